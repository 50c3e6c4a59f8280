"""Settings of `draftsmith tune`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftsmith.decode.errors import InputError, Range, at_least, less_than, more_than, require, require_some
from draftsmith.decode.options import Sampling
from draftsmith.scripts.kinds import Drafters, aliases, only_drafter
from draftsmith.train.cli import Floats, Ints, numbers, values_by_field
from draftsmith.train.kinds.hybrid import Hybrid
from draftsmith.train.options import DRAFT_LENGTH, PromptedTarget

BELOW_ONE = Range("levels of at least 0 and less than 1", lambda level: 0 <= level < 1)
UP_TO_ONE = Range("levels of at least 0 and at most 1", lambda level: 0 <= level <= 1)
LEVELS = {"typical_levels": BELOW_ONE, "threshold_levels": BELOW_ONE, "cascade_levels": UP_TO_ONE}


@dataclass
class TuneConfig(Sampling, PromptedTarget):
    """Decode prompts by lossy rules at several levels, and find the fastest within the allowed departure."""

    output: str
    """The directory that receives `tune.json` and `tune.svg`."""
    drafter: Drafters = field(default_factory=list, metadata=aliases())
    """The drafter: `DIR`, or a kind that needs no files, such as prompt_lookup."""
    draft_length: int = 4
    """γ, drafted tokens a round at all levels, for drafters without a tree; lenient rules may pay with a longer one."""
    batch_size: int = 8
    """Prompts decoded together. Acceptance and departure do not depend on it, except for ties in half precision. Speeds
    are those of such batches, with intervals over batches."""
    max_disagreement: float | None = None
    """At temperature 0: the share of tokens, below 1, that may differ from the target's argmax in their context."""
    max_total_variation: float | None = None
    """Under sampling: the mean total variation, below 1, allowed between a token's distribution and the target's in its
    context. The distribution of a text of n tokens is then at most n times as far."""
    typical_levels: Floats = field(default_factory=lambda: [0.05, 0.1, 0.2, 0.4, 0.8])
    """ε of typical acceptance: levels separated by commas; an empty list leaves this rule out. Even a high ε is lenient
    where the target is unsure. δ is √ε, as its authors have it."""
    threshold_levels: Floats = field(default_factory=lambda: [0.05, 0.1, 0.2, 0.4, 0.8])
    """Levels of the threshold rule. Near 1 it is nearly exact, and slower than the exact rule, because it refuses even
    the target's own choice where that is unlikely. At temperature 0 it reads the probability at temperature 1."""
    cascade_levels: Floats = field(default_factory=lambda: [0.15, 0.3, 0.5, 0.7, 0.9])
    """Confidences of the drafter from which the cascade accepts its tokens."""
    refine: int = 3
    """Further levels of each rule, each half-way between one within the allowed departure and one beyond it, while a
    gain is possible. No level outside the range of the given ones is tried."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.drafter = only_drafter(self.drafter)
        require(self, at_least(1), "batch_size")
        require(self, DRAFT_LENGTH, "draft_length")
        require(self, at_least(2), "limit")
        require(self, at_least(0), "refine")
        # The other limit has no meaning there: disagreements exist at T=0 only.
        limit, other = ("max_disagreement", "max_total_variation")[:: 1 if self.temperature == 0 else -1]
        if getattr(self, other) is not None:
            raise InputError(f"{other}: expected {limit} at temperature {self.temperature:g}, found {other}")
        require(self, more_than(0) & less_than(1), limit)
        for name, allowed in LEVELS.items():
            setattr(self, name, sorted(numbers(getattr(self, name), float, name)))
            require(self, allowed, name)
        if not (self.typical_levels or self.threshold_levels or self.cascade_levels):
            raise InputError("threshold_levels: expected a level of at least one rule, found none")

    @property
    def most(self) -> float | None:
        """The departure that the user allows, or None."""
        return self.max_disagreement if self.temperature == 0 else self.max_total_variation


@dataclass
class SwitchConfig(Sampling, PromptedTarget):
    """Find a hybrid's switch by replay and measured costs; half of the prompts, dealt by `seed`, report on it."""

    output: str
    """The directory that receives `switch.json`."""
    drafter: Drafters = field(default_factory=list, metadata=aliases())
    """The hybrid, `hybrid:FIRST+LAST`; a switch given with it is ignored."""
    draft_length: Ints = field(default_factory=lambda: [1, 2, 3, 4, 5, 6, 8])
    """γ, separated by commas: the length of copies, and the longest draft of a last drafter without a tree."""
    match_levels: Ints = field(default_factory=lambda: [1, 2, 3, 4, 5, 6, 8, 12, 16, 24])
    """Shortest matches, in tokens, to try."""
    score_levels: Floats = field(default_factory=lambda: [0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0])
    """Least scores to try."""
    batch_size: int = 1
    """Prompts decoded together when costs are measured."""
    compiled: bool | None = None
    """Compile forwards; null: as `measure` chooses, together with `dtype: auto`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.drafter = only_drafter(self.drafter)
        for name in ("draft_length", "match_levels"):
            setattr(self, name, sorted(numbers(getattr(self, name), int, name)))
        self.score_levels = sorted(numbers(self.score_levels, float, "score_levels"))
        for name in ("draft_length", "match_levels", "score_levels"):
            require_some(self, name, "number")
        require(self, DRAFT_LENGTH, "draft_length")
        require(self, at_least(1), "match_levels", "batch_size")
        require(self, at_least(0), "score_levels")
        require(self, at_least(4), "limit")


@dataclass
class LoadConfig:
    """Find the draft length for each load, from measurements of the server at several draft lengths."""

    reports: list[str]
    """Reports of `measure --server` with a baseline server, or their directories: one for each draft length, with the
    same `concurrency` and temperatures."""
    target: str
    """The target: a model directory or hub id."""
    output: str
    """The directory that receives `draft_lengths.json`."""
    drafter: Drafters = field(default_factory=list, metadata=aliases())
    """The drafter that was served, a directory."""

    def __post_init__(self) -> None:
        require_some(self, "reports", "report")
        self.drafter = only_drafter(self.drafter)

    @property
    def path(self) -> str:
        """The drafter's directory."""
        return str(self.drafter[0]).rpartition(":")[2].rpartition("=")[2]

    @property
    def drafter_name(self) -> str:
        """The drafter's name in the file."""
        return Path(self.path).name


def tune_config(arguments: Sequence[str]) -> type[Any]:
    """Return the config class for these arguments: with `reports` LoadConfig, with a hybrid SwitchConfig."""
    given = values_by_field(arguments)
    if "reports" in given:
        return LoadConfig
    return SwitchConfig if any(f"{Hybrid.name}:" in str(value) for value in given["drafter"]) else TuneConfig
