"""Settings of `draftsmith measure`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any

from draftsmith.decode.errors import InputError, Range, at_least, between, finite, more_than, require, require_some
from draftsmith.decode.measurement import LEAST_TOKENS
from draftsmith.decode.options import Filters
from draftsmith.scripts.kinds import Drafters, aliases, drafter_texts
from draftsmith.scripts.measure.server.config import GatedSettings, MeasureServerConfig
from draftsmith.train.cli import Floats, Ints, fields_of, numbers
from draftsmith.train.options import DRAFT_LENGTH, PromptedTarget

TEST_TOKENS = Range(f"0 or at least {LEAST_TOKENS}", lambda tokens: tokens == 0 or tokens >= LEAST_TOKENS)


@dataclass
class MeasureConfig(GatedSettings, Filters, PromptedTarget):
    """Measure on your prompts how drafters agree with a target, how much faster it decodes, and whether that pays."""

    output: str
    """The directory that receives `report.json`, `report.html`, `summary.md` and `costs.json`."""
    drafter: Drafters = field(default_factory=list, metadata=aliases())
    """A drafter to measure, `[NAME=]DIR_OR_KIND`, or several: a directory or hub id, whose kind its config.json says,
    or a kind that needs none, such as prompt_lookup. `KIND:DIR` measures a directory as
    another kind: `draft:DIR` drafts one token at a time with any draft model."""
    prompt_lookup_min: int = 1
    """The shortest n-gram that it looks for, in tokens, as in vLLM: a longer one drafts less often, and fails less."""
    prompt_lookup_max: int = 3
    """The longest."""
    baseline_draft: str | None = None
    """A stock draft to beat: measured beside the others, and compared prompt by prompt."""
    draft_length: Ints = field(default_factory=lambda: [4])
    """γ, drafted tokens per round; several with commas. A drafter with a tree drafts the tree. Replay adds 1 to 16."""
    draft_length_of: dict[str, Ints] = field(default_factory=dict)
    """γ of single drafters, by their names, in place of `draft_length`."""
    temperature: Floats = field(default_factory=lambda: [0.0])
    """Sampling temperatures, several with commas; 0 is greedy."""
    batch_size: Ints = field(default_factory=lambda: [1])
    """Prompts that are decoded together, several numbers with commas."""
    replay_limit: int | None = None
    """Prompts to replay acceptance on, from the first: on top of those decoded (`limit`), the target completes further
    ones in batches. Acceptance needs more prompts than speed does, and so gets them at a fraction of the time."""
    repeats: int = 1
    """Times that each method decodes each prompt; the median time counts."""
    min_speedup: float | None = None
    """A gate: what the speed-up over plain decoding must exceed, by its interval's lower end."""
    min_gain: float | None = None
    """A gate: what τ must gain over the stock draft, by its interval's lower end."""
    confidence: float = 0.95
    """Level at which the intervals of all settings hold together."""
    measure_costs: bool = True
    """Measure what forwards and drafting cost, which the planner needs."""
    costs: str | None = None
    """Costs that an earlier run left here as costs.json, in place of measuring them."""
    context: Ints = field(default_factory=list)
    """Tokens of text that costs are measured behind, several with commas; the texts' mean length if none are given."""
    dtype: str = field(default="auto", kw_only=True)
    """Weights and arithmetic: float32, bfloat16, float16 or float64, of all models; auto: on a CPU as the target is
    stored or float32, whichever a short timing finds faster, and each draft model likewise; on a GPU as it is stored.
    T=0 texts are identical for certain in float32 and float64 only."""
    compiled: bool | None = None
    """Run all models, plain decoding too, compiled; null: where a short timing finds it faster."""
    threads: int | None = field(default=None, kw_only=True)
    """CPU threads; null: as many as a short timing finds fastest."""
    lossless_tokens: int | None = None
    """Under sampling, the distribution of each run's text is tested on this many tokens, at least 2000. Null: 2000, for
    what would be recommended, in each setting and in all. 0: no test, and therefore no GO above T=0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.drafter = drafter_texts(self.drafter)
        require_some(self, "drafter", "drafter")
        for name, kind in (("draft_length", int), ("temperature", float), ("batch_size", int), ("context", int)):
            setattr(self, name, numbers(getattr(self, name), kind, name))
        for name in ("draft_length", "temperature", "batch_size"):
            require_some(self, name, "number")
        of = {name: numbers(value, int, f"draft_length_of: {name}") for name, value in self.draft_length_of.items()}
        self.draft_length_of = of
        for name, lengths in of.items():
            if not lengths:
                raise InputError(f"draft_length_of: {name}: expected at least one number, found none")
            DRAFT_LENGTH.check(f"draft_length_of: {name}", lengths)
        require(self, at_least(1), "repeats", "batch_size", "context")
        require(self, DRAFT_LENGTH, "draft_length")
        require(self, more_than(0), "min_speedup")
        require(self, at_least(self.limit or 1), "replay_limit")
        require(self, at_least(1), "prompt_lookup_min")
        require(self, at_least(self.prompt_lookup_min), "prompt_lookup_max")
        require(self, finite(at_least(0)), "temperature")
        require(self, between(0, 1), "confidence")
        require(self, TEST_TOKENS, "lossless_tokens")
        self.check_gate(self.temperature, self.batch_size)
        if self.names_settings and self.min_speedup is None and self.min_gain is None:
            self.min_speedup = 1.0
        if self.min_gain is not None and self.baseline_draft is None:
            raise InputError("min_gain: expected a `baseline_draft` to gain over, found none")

    @property
    def draft_lengths(self) -> list[int]:
        """γ of any drafter."""
        return sorted({*self.draft_length, *chain.from_iterable(self.draft_length_of.values())})

    def options(self, temperature: float) -> dict[str, Any]:
        """Return how texts are written at a temperature, as `generate` takes it."""
        return {
            "max_new_tokens": self.max_new_tokens,
            "compiled": bool(self.compiled),
            **self.at(temperature).generate_kwargs(),
        }


def measure_config(arguments: Sequence[str]) -> type[Any]:
    """Return the config class of a measurement: of a server where one is named, by a flag or in a file.

    A file that cannot be read is left to the parser.
    """
    words = [part for argument in arguments for part in argument.split("=", 1)]
    named = "--server" in words
    for flag, file in pairwise([*words, ""]):
        named |= flag == "--config" and "server" in fields_of(file)
    return MeasureServerConfig if named else MeasureConfig
