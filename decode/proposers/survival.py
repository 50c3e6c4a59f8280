"""Chains that end where too few of a batch's rows survive: the slots that a batch verifies.

The target verifies a batch in one forward, as wide as its longest draft. So a slot is verified in all rows or in none,
while the rows' mean survival, the probability that a row's draft is accepted up to the slot, is at least a level.
Cutting single rows, as vLLM's adaptive verification does (#47808), would save nothing in a padded forward.

A row's confidence at a slot must be a function of its tokens before the slot. So whether a slot is verified never
depends on its own tokens, and drafts stay lossless. The `n` largest survivals of a batch would not do: which they are
depends on the slots after each.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from draftsmith.decode.errors import InputError, at_least, at_most


class Survival:
    """The rule that ends the chains of a batch before the first slot whose mean survival is less than `level`.

    A row's survival is the product of its confidences up to the slot.
    """

    def __init__(self, level: float):
        self.level = level

    def begin(self, draft_lengths: Sequence[int]) -> None:
        """Begin a round in which rows draft at most these many tokens."""
        self._draft_lengths, self._survivals = draft_lengths, [1.0] * len(draft_lengths)

    def keeps(self, slot: int, confidences: Sequence[float]) -> bool:
        """Return whether the round's next slot is verified, given each row's confidence there."""
        for row, confidence in enumerate(confidences):
            self._survivals[row] *= confidence
        total = sum(s for s, k in zip(self._survivals, self._draft_lengths, strict=True) if slot < k)
        # NaN does not cut: its token is proposed, and verification finds q to be NaN.
        return not total < self.level * len(self._survivals)

    def cut(self, confidence_BK: Tensor, draft_lengths: Sequence[int]) -> list[int]:
        """Return the lengths of chains whose confidence at each slot is known, (B, K)."""
        self.begin(draft_lengths)
        columns = confidence_BK.T.tolist()
        kept = next((slot for slot, column in enumerate(columns) if not self.keeps(slot, column)), len(columns))
        return [min(k, kept) for k in draft_lengths]


@dataclass(frozen=True)
class FixedLength:
    """A draft length γ with a `survival`, the level at which `Survival` cuts chains; 0 cuts none."""

    longest: int
    survival: float = 0.0

    def __post_init__(self) -> None:
        at_least(1).check("draft_length", self.longest)
        (at_least(0) & at_most(1)).check("survival", self.survival)

    @property
    def cut(self) -> Survival | None:
        """A rule that cuts chains; None if nothing does."""
        return Survival(self.survival) if self.survival else None


def as_length(draft_length: int | FixedLength | None, longest: int | None) -> FixedLength:
    """Return a draft length in the range of a proposer whose own is `longest`; None is `longest`, or 4 without one."""
    if not isinstance(draft_length, FixedLength):
        draft_length = FixedLength(longest or 4 if draft_length is None else draft_length)
    if longest is not None and draft_length.longest > longest:
        raise InputError(
            f"draft_length: expected at most the {longest} tokens that the draft was trained to propose, found "
            f"{draft_length.longest}"
        )
    return draft_length
