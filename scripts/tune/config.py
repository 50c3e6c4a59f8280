"""Settings of `draftsmith tune`."""

from dataclasses import dataclass, field

from draftsmith.decode.errors import InputError, Range, at_least, less_than, more_than, require
from draftsmith.decode.options import Sampling
from draftsmith.scripts.kinds import Drafters, aliases, only_drafter
from draftsmith.train.cli import Floats, numbers
from draftsmith.train.options import DRAFT_LENGTH, PromptedTarget

BELOW_ONE = Range("levels of at least 0 and less than 1", lambda level: 0 <= level < 1)
UP_TO_ONE = Range("levels of at least 0 and at most 1", lambda level: 0 <= level <= 1)
LEVELS = {"typical_levels": BELOW_ONE, "threshold_levels": BELOW_ONE, "cascade_levels": UP_TO_ONE}


@dataclass
class TuneConfig(Sampling, PromptedTarget):
    """Decode prompts by lossy rules at several levels, and find the fastest that departs less than you allow."""

    output: str
    """The directory that receives `tune.json` and `tune.svg`."""
    drafter: Drafters = field(default_factory=list, metadata=aliases())
    """The drafter: `DIR`, or a kind that needs none, such as prompt_lookup."""
    draft_length: int = 4
    """γ, drafted tokens a round, of what drafts no tree of its own. Of all levels alike: where more tokens
    stand, a longer draft may pay that did not."""
    batch_size: int = 8
    """Prompts decoded together. Acceptance and departure don't depend on it, but for ties in half precision; speeds are
    of such batches, and their intervals over them."""
    max_disagreement: float | None = None
    """At temperature 0: the share of tokens, below 1, that may differ from the target's argmax in their context."""
    max_total_variation: float | None = None
    """Under sampling: how far a token's distribution may be from the target's in its context, mean total variation,
    below 1. A text of n tokens is then at most n times as far."""
    typical_levels: Floats = field(default_factory=lambda: [0.05, 0.1, 0.2, 0.4, 0.8])
    """ε of typical acceptance: levels with commas, an empty list for none of this rule. However high ε is, it stays
    lenient where the target is unsure, unless δ is high too."""
    typical_delta: float | None = None
    """δ of typical acceptance at every ε, above which ε changes nothing; None for √ε, as its authors set it."""
    threshold_levels: Floats = field(default_factory=lambda: [0.05, 0.1, 0.2, 0.4, 0.8])
    """Levels of the threshold rule, which near 1 is nearly exact, and slower than the exact rule: it refuses the
    target's own choice too where that is less likely. At temperature 0 it looks at the target's probability at
    temperature 1."""
    cascade_levels: Floats = field(default_factory=lambda: [0.15, 0.3, 0.5, 0.7, 0.9])
    """The drafter's confidence from which the cascade lets its tokens stand."""
    refine: int = 3
    """Further levels of each rule, each half-way between one that departs little enough and one that does not, while
    there is something to gain. Nothing is tried beyond the levels given."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.drafter = only_drafter(self.drafter)
        require(self, at_least(1), "batch_size")
        require(self, DRAFT_LENGTH, "draft_length")
        require(self, at_least(2), "limit")
        require(self, at_least(0), "refine", "typical_delta")
        # The other limit says nothing there: disagreements are of T=0 alone.
        wanted, other = ("max_disagreement", "max_total_variation")[:: 1 if self.temperature == 0 else -1]
        if getattr(self, other) is not None:
            raise InputError(f"{other}: expected {wanted} at temperature {self.temperature:g}, found {other}")
        require(self, more_than(0) & less_than(1), wanted)
        for name, allowed in LEVELS.items():
            setattr(self, name, sorted(numbers(getattr(self, name), float, name)))
            require(self, allowed, name)
        if not (self.typical_levels or self.threshold_levels or self.cascade_levels):
            raise InputError("threshold_levels: expected a level of at least one rule, found none")

    @property
    def most(self) -> float | None:
        """The departure that the user allows."""
        return self.max_disagreement if self.temperature == 0 else self.max_total_variation
