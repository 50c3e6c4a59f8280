"""A head over the states of a block's guesses: how it begins, steps in decoding, and is taught by forcing.

The layers compute all slots at once, so none knows the token before it. A head gives each slot a side state, from the
slots' states and the tokens drafted before it; `out` maps that to logits that are added to the target's. What a head
remembers of the tokens is a state for each node of a draft. Heads see all slots, also an anchor's that guesses nothing,
and tokens as their ids, or as the target's embeddings. A head with `candidates` leaves a slot only its most likely
tokens, by the logits without the head.

Shape suffixes: S slots of a block, the first J of them with tokens before, H hidden, R side, D tokens that are drafted.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn


class BlockHead(nn.Module):
    """A head of a block drafter, made from a `BlockConfig`; `side` is R of its `SideHead`, 0 without one."""

    name: ClassVar[str]  # of its attribute in the drafter
    title: ClassVar[str]
    family: ClassVar[str | None] = None
    """The name of drafters with it, in lower case also speculators' type; None for a head of no known family."""
    fields: ClassVar[Mapping[str, Any]]
    """The fields of the config that describe it, with their values in a drafter without it. The first switches it on,
    and is R if it adds logits."""
    foreign: ClassVar[Mapping[str, Any] | None] = None
    """Other tools' fields, with their only value, or for fields of our config what they mean left out; None if no tool
    knows it."""
    renamed: ClassVar[Mapping[str, str]] = {}
    """Other tools' whole names of its tensors, where they differ from ours."""

    def __init__(self, config: Any, side: int):
        super().__init__()

    @classmethod
    def setting(cls, config: Any) -> Any:
        """Return the config's first field of it: 0 or False in a drafter without it."""
        return getattr(config, next(iter(cls.fields)))

    @classmethod
    def check(cls, config: Any) -> None:
        """Raise an InputError if another field than `setting` is impossible, in a drafter with the head."""

    @classmethod
    def new_fields(cls, config: Any, width: int) -> dict[str, Any]:
        """Return the fields of a run's new drafter, from its `BlockTrainingConfig` and the target's width."""
        return {}

    @classmethod
    def added_fields(cls, config: Any, width: int) -> dict[str, Any]:
        """Return the fields of a head that a run adds to an earlier drafter without it, if it does."""
        return cls.new_fields(config, width)


class SideHead(BlockHead, ABC):
    """A head that adds logits: a side state for each guess, and the map from it."""

    out: nn.Linear
    """The map from side states, (…, R), to logits."""

    candidates: int | None = None
    """The number of a slot's tokens that it chooses among; None for all."""
    embeds: ClassVar[bool] = False
    """Whether it sees the target's embeddings of the tokens before guesses, (…, H), in place of the tokens, (…)."""
    method: ClassVar[str | None] = None
    """vLLM's name for the method of its drafters, if not their family's."""

    def begin(self, hidden: Tensor) -> Tensor | None:
        """Return its state before a block's first slot, (…, *), from all slots' states, (…, S, H)."""
        return None

    @abstractmethod
    def step(self, state: Tensor | None, hidden: Tensor, before: Tensor, slot: int) -> tuple[Tensor, Tensor | None]:
        """Return a slot's side state, (…, R), and the head's next state, after the token before the slot's."""

    def forced(self, hidden: Tensor, before: Tensor) -> Tensor:
        """Return side states, (…, J, R), from all slots' states, (…, S, H), and the J tokens before the first slots."""
        state, sides = self.begin(hidden), list[Tensor]()
        for slot, token in enumerate(before.unbind(-2 if self.embeds else -1)):
            side, state = self.step(state, hidden[..., slot, :], token, slot)
            sides.append(side)
        return torch.stack(sides, dim=-2)


def limited(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return logits, (…, D), with −∞ for all but some tokens, (…, K) int64."""
    return torch.full_like(logits, -torch.inf).scatter(-1, tokens, logits.gather(-1, tokens))
