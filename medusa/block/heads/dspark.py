"""DSpark's heads (DeepSpec, 2026), and which drafters servers know.

The Markov head adds W2 · W1[x] to a guess's logits, where x is the token before. The confidence head gives the
probability that a guess is accepted.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from draftsmith.medusa.base import LMHead
from draftsmith.medusa.block.heads.base import BlockHead, SideHead

RANK = 256
"""The default rank of a Markov head."""
REMEDY = "train with a markov_rank"


class MarkovHead(SideHead):
    """A map of rank R from the token before to logits; it has no state."""

    name, title, family = "markov_head", "Markov head", "DSpark"
    fields: ClassVar = {"markov_rank": 0}
    foreign: ClassVar = {"markov_head_type": "vanilla"}

    def __init__(self, config: Any, side: int):
        super().__init__(config, side)
        self.markov_w1 = nn.Embedding(config.vocab_size, side)
        self.markov_w2 = LMHead(side, config.draft_vocab_size, bias=False)

    @property
    def out(self) -> nn.Linear:  # type: ignore[override]
        """W2."""
        return self.markov_w2

    @classmethod
    def new_fields(cls, config: Any, width: int) -> dict[str, Any]:
        """Return the rank that a run asks for."""
        return {"markov_rank": min(RANK, width) if config.markov_rank is None else config.markov_rank}

    @classmethod
    def added_fields(cls, config: Any, width: int) -> dict[str, Any]:
        """Return a rank if the run names one."""
        return {} if config.markov_rank is None else cls.new_fields(config, width)

    def step(self, state: Tensor | None, hidden: Tensor, before: Tensor, slot: int) -> tuple[Tensor, None]:
        """Return W1's row of the token before."""
        return self.markov_w1(before), None

    def forced(self, hidden: Tensor, before: Tensor) -> Tensor:
        """Return all rows at once."""
        return self.markov_w1(before)  # type: ignore[no-any-return]


class ConfidenceHead(BlockHead):
    """A map to the logit of a guess's acceptance, from its state and, if `sees_side`, its side state."""

    name, title, family = "confidence_head", "confidence head", "DSpark"
    fields: ClassVar = {"enable_confidence_head": False, "confidence_head_with_markov": True}
    foreign: ClassVar = {"confidence_head_with_markov": False}

    def __init__(self, config: Any, side: int):
        super().__init__(config, side)
        self.sees_side = bool(side and config.confidence_head_with_markov)
        self.proj = nn.Linear(config.hidden_size + side * self.sees_side, 1)

    @classmethod
    def new_fields(cls, config: Any, width: int) -> dict[str, Any]:
        """Return whether a run trains one."""
        return {"enable_confidence_head": config.confidence > 0}

    def logits(self, hidden: Tensor, side: Tensor | None) -> Tensor:
        """Return the logit of each guess's acceptance, (…), from its state and side state."""
        seen = hidden if side is None else torch.cat([hidden, side.to(hidden.dtype)], dim=-1)
        return self.proj(seen)[..., 0]  # type: ignore[no-any-return]


HEADS = (MarkovHead, ConfidenceHead)


def unserved(config: Any) -> str | None:
    """Return why no server decodes a drafter without a Markov head, and the way out, or None."""
    if not config.markov_rank and config.anchor_guesses:
        return f"an anchor that guesses, and no Markov head: servers know none such; {REMEDY}"
    if not config.markov_rank and config.enable_confidence_head:
        return "a confidence head, and no Markov head; train without confidence"
    return None
