"""Settings of `draftsmith certify`."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from draftsmith.decode.errors import InputError, Range, at_least, at_most, between, finite, require, require_some
from draftsmith.decode.measurement import LEAST_TOKENS
from draftsmith.decode.options import Filters
from draftsmith.scripts.kinds import Drafters, aliases, drafter_texts, only_drafter
from draftsmith.train.cli import Floats, numbers
from draftsmith.train.options import PromptOptions

CONCURRENCY = at_least(1) & at_most(256)
Texts = Sequence[tuple[list[int], str]]
"""Token ids and why each text ended, in the order of their indices."""
TEMPERATURES = Range("0 or at least 0.01, which vLLM makes of less", lambda value: value == 0 or value >= 0.01)


@dataclass
class CertifyConfig(Filters, PromptOptions):
    """Certify from outside that a server with speculative decoding writes what its target would."""

    server: str
    """The server under test: the root of its URL, such as http://127.0.0.1:8000. It must be llama-server, or speak
    OpenAI's API and answer with token ids, as vLLM and SGLang do."""
    prompts: str
    """A .jsonl, .json, .parquet or text file of prompts, a directory, or a hub id."""
    output: str
    """The directory that receives `certificate.json`."""
    target: str | None = None
    """The target that the server should equal: a model directory, hub id or GGUF file, run here in `dtype`."""
    plain_server: str | None = None
    """A server of the same target without a drafter. With `target`, T=0 is compared with its texts; without, it is the
    reference for sampled text too, at less power."""
    drafter: Drafters = field(default_factory=list, metadata=aliases())
    """The server's drafter, which sharpens the test of sampled text: most faults lean towards its drafts. Needs
    `target`."""
    temperature: Floats = field(default_factory=lambda: [0.0, 1.0])
    """Temperatures to certify, several with commas; 0 compares texts token for token."""
    sampled_tokens: int = 20_000
    """The most tokens to sample at each temperature above 0, in texts of `max_new_tokens`. More tokens find smaller
    departures."""
    false_alarm: float = 1e-3
    """The probability that a lossless server fails, at most, over all temperatures and tests."""
    concurrency: int = 4
    """Requests at once, so that rows meet in a batch."""
    model: str | None = None
    """The model's name on the servers; null: the only one they list."""
    max_new_tokens: int = field(default=32, kw_only=True)
    """The most tokens of a text. Many short texts test more first tokens and rows that join a batch; long ones test
    text after many rounds."""
    dtype: str = field(default="float32", kw_only=True)
    """The arithmetic of `target` here, which should be the server's: float32, bfloat16, float16 or float64. The size of
    a tie follows it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target is None and self.plain_server is None:
            raise InputError(
                "target: expected the target or, as `plain_server`, a server without a drafter, found neither"
            )
        self.drafter = drafter_texts(self.drafter)
        if self.drafter:
            self.drafter = only_drafter(self.drafter)
        if self.target is None:
            for name in ("drafter", "max_prompt_tokens"):
                if getattr(self, name):
                    raise InputError(f"{name}: expected none without `target`, found {getattr(self, name)}")
        if self.no_repeat_ngram_size:
            raise InputError(
                f"no_repeat_ngram_size: expected 0, which is all servers know, found {self.no_repeat_ngram_size}"
            )
        self.temperature = numbers(self.temperature, float, "temperature")
        require_some(self, "temperature", "temperature")
        require(self, finite(TEMPERATURES), "temperature")
        if self.min_p and self.top_p < 1:
            raise InputError(f"min_p: expected 0 with top_p, which servers apply in another order, found {self.min_p}")
        require(self, at_least(LEAST_TOKENS) & at_most(10**9), "sampled_tokens")
        require(self, between(0, 1), "false_alarm")
        if self.target is None:  # a test by shuffles needs 1 / level shuffles
            require(self, at_least(1e-5), "false_alarm")
        require(self, CONCURRENCY, "concurrency")

    @property
    def sampled(self) -> list[float]:
        """The temperatures above 0."""
        return [temperature for temperature in self.temperature if temperature > 0]

    @property
    def level(self) -> float:
        """The p-value each temperature must exceed: the false-alarm rate divided among temperatures."""
        return self.false_alarm / max(len(self.sampled), 1)

    @property
    def texts(self) -> int:
        """Texts to sample at each temperature."""
        return -(-self.sampled_tokens // self.max_new_tokens)
