"""Settings of `draftsmith serve-draft`."""

import re
from dataclasses import dataclass, field

from draftsmith.decode.errors import InputError, Range, at_least, at_most, require
from draftsmith.scripts.kinds import Drafters, aliases, only_drafter
from draftsmith.train.options import THREADS, ModelOptions

PORT = at_least(0) & at_most(65535)
DEVICE = Range(
    "cpu, or a device such as cuda:1", lambda name: re.fullmatch(r"cpu|mps|(cuda|xpu|npu|hpu)(:\d+)?", name) is not None
)


@dataclass
class ServeDraftConfig(ModelOptions):
    """Serve a draft model or a hybrid over HTTP to decoders in other processes, such as vLLM: batched, with a cache.

    Drafts are the model's most likely tokens; a hybrid also copies from the text. It runs until SIGTERM or SIGINT, then
    answers the requests that have begun.
    """

    drafter: Drafters = field(default_factory=list, metadata=aliases())
    """The draft model: a directory or hub id. Its tokenizer must be the target's. The target itself is not loaded, so
    drafters that need it cannot be served. Or a hybrid that ends with a draft model, such as
    hybrid:suffix+DIR@match=4: where its switch accepts a copy, the copy is the draft."""
    host: str = "127.0.0.1"
    """The address to listen at. Texts are sent unencrypted, so beyond this machine use a proxy that encrypts."""
    port: int = 8100
    """The port; 0 takes a free one, which the first line of output names."""
    key_env: str | None = None
    """The environment variable with the key that clients must send as `Authorization: Bearer KEY`, except to /health
    and /metrics. If None, anyone who reaches the port may ask for drafts."""
    device: str | None = None
    """The draft's device, such as cuda:1; if None, the first GPU, or the CPU without one."""
    threads: int | None = None
    """CPU threads; torch's default if None."""
    max_length: int | None = None
    """The most tokens of a text, including drafted ones; the model's number of positions if None."""
    max_batch: int = 256
    """The most rows to draft for together, and so the most rows of a request."""
    cache_tokens: int = 65536
    """The most tokens whose keys and values are cached: room for all texts in progress. When it is full, the least
    recently used text is forgotten. While a batch changes, up to twice the memory is used."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.drafter = only_drafter(self.drafter)
        require(self, PORT, "port")
        require(self, DEVICE, "device")
        require(self, THREADS, "threads")
        require(self, at_least(1), "max_length", "max_batch", "cache_tokens")
        if self.max_length is not None and self.cache_tokens < self.max_length:
            raise InputError(
                f"cache_tokens: expected room for a text of {self.max_length} tokens, found {self.cache_tokens}"
            )
