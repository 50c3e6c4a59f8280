"""Settings of `draftsmith measure --server`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from draftsmith.decode.errors import (
    InputError,
    at_least,
    at_most,
    between,
    finite,
    more_than,
    one_of,
    require,
    require_some,
)
from draftsmith.decode.options import Filters
from draftsmith.scripts.measure.config import MeasureConfig
from draftsmith.train.cli import Floats, Ints, numbers, values_by_field
from draftsmith.train.options import DRAFT_LENGTH, INVALID

MOST_REQUESTS = 1024


@dataclass
class MeasureServerConfig(Filters):
    """Measure a running vLLM or SGLang server: acceptance from its own counts, latency, and speed-up over another."""

    server: str
    """The server's URL, such as http://127.0.0.1:8000."""
    prompts: str
    """A .jsonl, .json, .parquet or text file of prompts, a directory, or a hub id."""
    output: str
    """The directory that receives `report.json` and `report.html`."""
    baseline_server: str | None = None
    """The URL of a second server of the same target without speculation, to compare with; the two take turns."""
    model: str | None = None
    """The model's name on the servers; null: the only one they list."""
    drafter: str | None = None
    """The drafter's name in the report; null: SGLang's algorithm, or `drafter`. With `expect`, one of that report's;
    null: its only one, or the recommended one."""
    target: str | None = None
    """The target's directory or hub id. Its tokenizer encodes the prompts, and servers receive tokens. Null: servers
    receive plain text as it is, and conversations as messages, which they template."""
    temperature: Floats = field(default_factory=lambda: [0.0], kw_only=True)
    """Sampling temperatures, several with commas; 0 is greedy."""
    max_new_tokens: int = 128
    """The most tokens of a completion."""
    ignore_eos: bool = False
    """Continue texts past their end, up to `max_new_tokens`, so that all have one length."""
    concurrency: Ints = field(default_factory=lambda: [1])
    """Requests at once, several numbers with commas."""
    warm_up: int = 2
    """Requests to each server before each setting that are not measured."""
    limit: int | None = None
    """Number of prompts, the first of the file; null: all."""
    system_prompt: str | None = None
    """Begins every conversation that has no system turn of its own."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables of the chat template, such as '{"enable_thinking": false}'."""
    invalid_prompts: str = "refuse"
    """`refuse` ends the command at the first record that cannot be read or rendered; `skip` leaves such records out."""
    max_prompt_tokens: int | None = None
    """The most tokens of a prompt, with `target`: longer ones lose their beginning."""
    draft_length: int | None = None
    """γ, drafted tokens per round; null: drafted tokens ÷ drafts, as the server counts them; 0: a server that drafts
    nothing at any load, to measure what that costs."""
    min_speedup: float | None = None
    """A gate: the lower end of the interval of the speed-up over the baseline server must exceed this."""
    min_alpha: float | None = None
    """A gate: the lower end of α's interval must exceed this. If it does not, train the drafter again."""
    expect: str | None = None
    """The report of a local measurement of the same prompts, or its directory. The server's counts must be those that
    follow from it, exactly so at temperature 0; otherwise the report says where they differ, and why."""
    expect_verifier: str = "probabilistic"
    """The server's drafting under sampling: probabilistic, tokens drawn from the draft; or greedy, its likeliest
    token."""
    confidence: float = 0.95
    """The level at which the intervals of all settings hold together."""
    trust_remote_code: bool = False
    """Run tokenizer code that a repository ships."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, kind in (("temperature", float), ("concurrency", int)):
            setattr(self, name, numbers(getattr(self, name), kind, name))
            require_some(self, name, "number")
        require(self, at_least(1), "max_new_tokens", "limit", "max_prompt_tokens")
        require(self, at_least(1) & at_most(MOST_REQUESTS), "concurrency")
        require(self, at_least(0), "warm_up")
        require(self, finite(at_least(0)), "temperature")
        require(self, finite(more_than(0)), "min_speedup")
        require(self, between(0, 1), "min_alpha", "confidence")
        if self.draft_length != 0:
            require(self, DRAFT_LENGTH, "draft_length")
        require(self, one_of(("probabilistic", "greedy")), "expect_verifier")
        require(self, one_of(INVALID), "invalid_prompts")
        if self.no_repeat_ngram_size:
            raise InputError("no_repeat_ngram_size: expected 0, for servers know no such filter, found another number")
        if self.max_prompt_tokens is not None and self.target is None:
            raise InputError("max_prompt_tokens: expected a `target`, whose tokenizer counts them, found none")
        if self.min_speedup is not None and self.baseline_server is None:
            raise InputError("min_speedup: expected a `baseline_server` to be faster than, found none")
        if self.drafter == "":
            raise InputError("drafter: expected a name, found none")

    @property
    def settings(self) -> list[tuple[float, int]]:
        """The temperatures and concurrencies that are measured, in order."""
        return [(temperature, rows) for temperature in self.temperature for rows in self.concurrency]


def measure_config(arguments: Sequence[str]) -> type[Any]:
    """Return the config class: a server's where `--server`, or a config file's `server` field, names one.

    A file that cannot be read is left to the parser.
    """
    return MeasureServerConfig if "server" in values_by_field(arguments) else MeasureConfig
