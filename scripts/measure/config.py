"""Settings of `draftsmith measure`."""

from dataclasses import dataclass, field
from typing import Any

from draftsmith.decode.errors import (
    InputError,
    Range,
    at_least,
    between,
    finite,
    more_than,
    one_of,
    require,
    require_some,
)
from draftsmith.decode.measurement import LEAST_TOKENS
from draftsmith.decode.options import Filters
from draftsmith.distill.kind import DraftModel
from draftsmith.scripts.kinds import BASELINE, NONE, STOCK, Drafters, aliases, drafter_specs, drafter_texts
from draftsmith.train.cli import Floats, Ints, numbers
from draftsmith.train.kinds.drafter import DrafterSpec
from draftsmith.train.options import DRAFT_LENGTH, PromptedTarget

LLAMA_CPP = "llama.cpp"
TEST_TOKENS = Range(f"0 or at least {LEAST_TOKENS}", lambda tokens: tokens == 0 or tokens >= LEAST_TOKENS)


@dataclass
class MeasureConfig(Filters, PromptedTarget):
    """Measure on your prompts how drafters agree with a target, how much faster it decodes, and whether that pays."""

    output: str
    """The directory that receives `report.json` and `report.html`."""
    drafter: Drafters = field(default_factory=list, metadata=aliases())
    """A drafter to measure, `[NAME=]DIR_OR_KIND`, or several: a directory or hub id, whose config.json says its kind,
    or a kind that needs none, such as prompt_lookup. `KIND:DIR` measures a directory as another kind: `draft:DIR`
    drafts one token at a time with any draft model."""
    baseline_draft: str | None = None
    """A stock draft to beat: measured like the others, and compared prompt by prompt."""
    draft_length: Ints = field(default_factory=lambda: [4])
    """γ, drafted tokens per round; several with commas. A drafter with a tree drafts the tree. Replay adds 1 to 16."""
    temperature: Floats = field(default_factory=lambda: [0.0])
    """Sampling temperatures, several with commas; 0 is greedy."""
    batch_size: Ints = field(default_factory=lambda: [1])
    """Prompts decoded together, several numbers with commas."""
    replay_limit: int | None = None
    """Prompts to replay acceptance on, from the first: in addition to those decoded (`limit`), the target completes
    more in batches. Acceptance needs more prompts than speed does, and gets them at a fraction of the time."""
    min_speedup: float | None = None
    """A gate: the lower end of the interval of the speed-up over plain decoding must exceed this."""
    min_gain: float | None = None
    """A gate: the lower end of the interval of τ's gain over the stock draft must exceed this."""
    confidence: float = 0.95
    """The level at which the intervals of all settings hold together."""
    costs: str | None = None
    """Null measures the costs of forwards and drafting; with none nothing is predicted. With llama.cpp its server
    writes the texts and prices the rounds, all models as GGUF files, and forecasts say what drafters bring there."""
    compiled: bool | None = None
    """Compile all models, plain decoding included; null: where a token takes less than 0.1 s eagerly."""
    lossless_tokens: int | None = None
    """Tokens, at least 2000, on which the distribution of each sampled run's text is tested. Null: 2000, for the
    recommended run in each setting and in all. 0: no test, and therefore no GO above T=0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.drafter = drafter_texts(self.drafter)
        require_some(self, "drafter", "drafter")
        for name, kind in (("draft_length", int), ("temperature", float), ("batch_size", int)):
            setattr(self, name, numbers(getattr(self, name), kind, name))
            require_some(self, name, "number")
        require(self, at_least(1), "batch_size")
        require(self, DRAFT_LENGTH, "draft_length")
        require(self, more_than(0), "min_speedup")
        require(self, at_least(self.limit or 1), "replay_limit")
        require(self, finite(at_least(0)), "temperature")
        require(self, between(0, 1), "confidence")
        require(self, TEST_TOKENS, "lossless_tokens")
        require(self, one_of((NONE, LLAMA_CPP)), "costs")
        if self.min_gain is not None and self.costs == LLAMA_CPP:
            raise InputError("min_gain: expected none with costs llama.cpp, whose forecasts are judged by speed alone")
        if self.min_gain is not None and self.baseline_draft is None:
            raise InputError("min_gain: expected a `baseline_draft` to gain over, found none")

    @property
    def specs(self) -> list[DrafterSpec]:
        """The specs of all drafters; the stock draft follows the other draft models."""
        specs = drafter_specs(self.drafter, self.draft_length)
        if self.baseline_draft is not None:
            index = sum(spec.kind == DraftModel.name for spec in specs)
            specs.insert(index, DrafterSpec(BASELINE, self.baseline_draft, STOCK, self.draft_length))
        return specs

    def options(self, temperature: float) -> dict[str, Any]:
        """Return the keyword arguments of `generate` at a temperature."""
        return {
            "max_new_tokens": self.max_new_tokens,
            "compiled": bool(self.compiled),
            **self.at(temperature).generate_kwargs(),
        }
