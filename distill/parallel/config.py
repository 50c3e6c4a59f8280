"""Options of a distillation run whose draft drafts several tokens in one forward."""

from dataclasses import dataclass
from typing import Any

from draftsmith.decode.errors import DECAY, SHARE, InputError, at_most, finite, more_than, require
from draftsmith.decode.options import Options

MOST = 256
"""Tokens of a block at most."""


@dataclass
class ParallelOptions(Options):
    """How a draft learns to draft in parallel."""

    parallel: int = 0
    """K: the draft learns to draft K tokens in one forward (PARD, arXiv 2504.18583): the next one as any draft
    does, and K − 1 more at mask tokens behind it. 0 for a plain draft."""
    parallel_retention: float = 0.5
    """r: of the places that learn, the share r^j has a mask for the token j further, so that a step takes about
    1 ÷ (1 − r) times a plain draft's arithmetic."""
    parallel_minimum: float = 0.05
    """The least share of places that have a mask for a token, however far."""
    parallel_decay: float = 1.0
    """The loss weighs the token j behind the next one decay^j."""
    parallel_importance: bool = False
    """Divide the weight of a mask by the share of places that have it: the loss is then, on average, that of all masks;
    its gradients vary more."""
    parallel_mask_token: int | str | None = None
    """The mask token of a parallel draft, an id or as the tokenizer writes it, which no text may have: by default that
    of the draft to start from, or else the first row beyond the tokenizer, or an unused special token."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.parallel == 1 or not 0 <= self.parallel <= MOST:
            raise InputError(f"parallel: expected 0, or between 2 and {MOST} tokens, found {self.parallel}")
        require(self, more_than(0) & at_most(1), "parallel_retention")
        require(self, SHARE, "parallel_minimum")
        require(self, finite(more_than(0)) & DECAY, "parallel_decay")

    @property
    def kept_shares(self) -> Any:
        """The shares of places that have a mask for the token 1, …, K − 1 further, (K − 1,)."""
        from draftsmith.distill.parallel.chains import kept_shares

        return kept_shares(self.parallel, self.parallel_retention, self.parallel_minimum)
