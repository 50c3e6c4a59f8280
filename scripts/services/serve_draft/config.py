"""Settings of `draftsmith serve-draft`."""

from dataclasses import dataclass, field

from draftsmith.decode.errors import InputError, Range, at_least, at_most, finite, more_than, require
from draftsmith.scripts.kinds import Drafters, aliases, only_drafter
from draftsmith.train.options import DEVICE, DRAFT_LENGTH, THREADS, ModelOptions

PORT = at_least(0) & at_most(65535)
LEAST_STORE = at_least(1 << 15)
"""What `SuffixStore` asks for, which a command's help need not import."""
ONE_DEVICE = DEVICE & Range("one device", lambda name: name != "auto")


@dataclass
class ServeDraftConfig(ModelOptions):
    """Serve a draft model or a hybrid over HTTP to decoders in other processes, such as vLLM, batched, with a cache.

    Drafts are the model's most likely tokens, those of a hybrid also copies of what the text has already. It runs until
    SIGTERM or SIGINT, and answers then what it has begun.
    """

    drafter: Drafters = field(default_factory=list, metadata=aliases())
    """The draft model: a directory or hub id. Its tokenizer must be the target's; the target itself is not read, so
    that drafters which need it cannot be served. Or a hybrid whose last drafter is one, such as
    hybrid:suffix+DIR@match=4: where its switch takes what was found in the text, that is the draft."""
    follow_seconds: float = 2.0
    """Seconds between looks at the draft's directory, where that is a link: once it points elsewhere, the draft there
    is loaded beside the old one, and takes its place."""
    learn: bool = False
    """Let texts that end go into the store of the suffix drafter, for other requests: what they share is copied. A
    client may then be drafted what another has written."""
    store_bytes: int = 1 << 27
    """Bytes of that store at most, 8 a token, where the drafter was given none. After every 65,536 tokens it is sorted:
    about a second for a million tokens that it holds, in which nothing is drafted."""
    host: str = "127.0.0.1"
    """Where to listen: 127.0.0.1 for this machine alone. Texts go over the line as they are, so beyond this machine put
    it behind something that encrypts."""
    port: int = 8100
    """The port; 0 takes a free one, which the first line names."""
    key_env: str | None = None
    """The environment variable that holds a key which clients must send as `Authorization: Bearer KEY`; /health and
    /metrics ask for none. Whoever reaches the port may ask for drafts if None."""
    device: str | None = None
    """Where the draft lies, such as cuda:1; the first GPU, or the CPU where there is none, if None."""
    threads: int | None = None
    """CPU threads; torch's default if None."""
    max_length: int | None = None
    """Tokens of a text at most, drafted ones included; as many as the model has positions if None."""
    max_draft_length: int = 16
    """γ at most; a request for more gets as many."""
    draft_lengths: str | None = None
    """draft_lengths.json of `measure` or `tune`: γ by the number of texts that a client decodes together, at most, so
    that a full server is drafted less for, or nothing."""
    max_batch: int = 256
    """Rows drafted for together at most, and so rows of a request."""
    cache_tokens: int = 65536
    """Tokens whose keys and values are kept at most: room for all texts that are being written. Where it is full, the
    text that was not asked for longest is forgotten. While a batch changes, up to twice as much memory is used."""
    max_waiting: int = 64
    """Requests that wait at most; further ones are refused with 503."""
    timeout: float = 30.0
    """Seconds after which a request is answered with 504, whatever was drafted for it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.drafter = only_drafter(self.drafter)
        require(self, PORT, "port")
        require(self, ONE_DEVICE, "device")
        require(self, THREADS, "threads")
        require(self, DRAFT_LENGTH, "max_draft_length")
        require(self, at_least(1), "max_length", "max_batch", "cache_tokens", "max_waiting")
        require(self, LEAST_STORE, "store_bytes")
        require(self, finite(more_than(0)), "timeout", "follow_seconds")
        if self.max_length is not None and self.cache_tokens < self.max_length:
            raise InputError(
                f"cache_tokens: expected room for a text of {self.max_length} tokens, found {self.cache_tokens}"
            )
