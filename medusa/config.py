"""Settings of a training run of drafting heads."""

from dataclasses import dataclass
from typing import ClassVar

from draftsmith.decode.errors import DECAY, InputError, at_least, more_than, require
from draftsmith.train.job.defaults import Defaults
from draftsmith.train.recipe import ObjectiveConfig


@dataclass
class HeadsConfig(ObjectiveConfig):
    """Train drafting heads on a target, on completions that the target wrote (`draftsmith prepare`)."""

    acceptance_metrics: ClassVar[tuple[str, ...]] = ("mean_acceptance_length", "alpha", "accuracy_1")

    heads: str | None = None
    """Heads to start from: the directory of an earlier run. Without it the fields below describe new heads."""
    draft_vocabulary: int | None = None
    """D: draft only the D most frequent tokens of `completions`, or all of theirs if they hold fewer. If not given, the
    whole vocabulary."""
    decay: float = 0.8
    """The loss of guess k, from 0, has the weight decay^k (Medusa, Cai et al. 2024, section 2.2.1)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, at_least(1), "draft_vocabulary")
        require(self, more_than(0), "decay")
        require(self, DECAY, "decay")
        if self.heads is not None and self.draft_vocabulary is not None:
            raise InputError("draft_vocabulary: expected none with heads, which have their own, found one")

    @property
    def defaults(self) -> Defaults:
        """A lower learning rate for heads of an earlier run."""
        return Defaults(rate=4e-3 if self.heads is None else 1e-3)
