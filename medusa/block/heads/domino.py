"""Domino's head (Huang et al. 2026): a recurrent network over a block's tokens, which corrects each guess's logits.

A GRU reads the target's embeddings of the anchor and of the tokens drafted after it. Its state and the slot's state go
through a small network to logits that are added to the guess's own. The first guesses can be left as they are
(`pure_draft_prefix_len`): the published head does so with one, because the layers see the anchor anyway.

Shape suffixes: S slots of a block, the first J of them with tokens before, R rank, G the GRU's width, H hidden.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from draftsmith.decode.errors import at_least, at_most, require
from draftsmith.medusa.base import LMHead
from draftsmith.medusa.block.heads.base import SideHead

TENSORS = ("prefix_gru.weight_ih_l0", "prefix_gru.weight_hh_l0", "embed_proj.0.weight", "embed_proj.2.weight")
WIDER = 4
"""The GRU's width in a new head, relative to the rank, as published: 1024 and 256."""


class Recurrent(nn.Module):
    """A GRU without biases, in the names of `torch.nn.GRU`; its steps compile, and its weights may be sharded."""

    def __init__(self, size: int, width: int):
        super().__init__()
        self.weight_ih_l0 = nn.Parameter(torch.empty(3 * width, size).uniform_(-(width**-0.5), width**-0.5))
        self.weight_hh_l0 = nn.Parameter(torch.empty(3 * width, width).uniform_(-(width**-0.5), width**-0.5))

    def forward(self, inputs: Tensor, states: Tensor) -> Tensor:
        """Return the states after each of J inputs, (…, J, G), from (…, J, H) and the state before them, (…, G)."""
        after = list[Tensor]()
        for gates in linear(inputs, self.weight_ih_l0).unbind(-2):  # all inputs at once
            reset, update, new = gates.chunk(3, dim=-1)
            own_reset, own_update, own = linear(states, self.weight_hh_l0).chunk(3, dim=-1)
            update = (update + own_update).sigmoid()
            new = (new + (reset + own_reset).sigmoid() * own).tanh()
            states = new + update * (states - new)
            after.append(states)
        return torch.stack(after, dim=-2)


class Domino(SideHead):
    """Adds logits by what a GRU remembers of the tokens since the anchor; its state is the GRU's."""

    name, title, family = "domino_head", "recurrent head", "Domino"
    embeds = True
    fields: ClassVar = {"emb_dim": 0, "gru_hidden_dim": 1024, "pure_draft_prefix_len": 0}
    foreign: ClassVar = {"projector_type": "domino"}
    renamed: ClassVar = {name: name for name in TENSORS}

    def __init__(self, config: Any, side: int):
        super().__init__(config, side)
        size, width = config.hidden_size, config.gru_hidden_dim
        self.silent, self.first = config.silent, config.silent + config.pure_draft_prefix_len
        self.prefix_gru = Recurrent(size, width)
        out = LMHead(side, config.draft_vocab_size, bias=False)
        self.embed_proj = nn.Sequential(nn.Linear(size + width, side, bias=False), nn.SiLU(), out)

    @property
    def out(self) -> nn.Linear:  # type: ignore[override]
        """The last map of its network."""
        return self.embed_proj[2]  # type: ignore[return-value]

    @classmethod
    def check(cls, config: Any) -> None:
        """Require a width of the GRU, and a guess that is corrected."""
        require(config, at_least(1) & at_most(2**16), "gru_hidden_dim")
        require(config, at_least(0) & at_most(config.guesses - 1), "pure_draft_prefix_len")

    @classmethod
    def new_fields(cls, config: Any, width: int) -> dict[str, Any]:
        """Return the rank that a run asks for, with the published ratio."""
        rank = config.domino_rank
        return {"emb_dim": rank, "gru_hidden_dim": WIDER * rank, "pure_draft_prefix_len": 1} if rank else {}

    def begin(self, hidden: Tensor) -> Tensor:
        """Return zeros, (…, G)."""
        return hidden.new_zeros(*hidden.shape[:-2], self.prefix_gru.weight_hh_l0.shape[1])

    def step(self, state: Tensor | None, hidden: Tensor, before: Tensor, slot: int) -> tuple[Tensor, Tensor]:
        """Return a slot's side state; the GRU begins at the anchor, which is before the first guess."""
        assert state is not None
        if slot >= self.silent:
            state = self.prefix_gru(before[..., None, :], state.to(before.dtype))[..., 0, :]
        return self._narrow(hidden, state) * (slot >= self.first), state

    def forced(self, hidden: Tensor, before: Tensor) -> Tensor:
        """Return all slots' side states at once."""
        return self(hidden, before)  # type: ignore[no-any-return]

    def forward(self, hidden: Tensor, before: Tensor) -> Tensor:
        """Compute `forced` inside of a forward of this module, where sharded training has its weights."""
        count = before.shape[-2]
        start = before.new_zeros(*before.shape[:-2], self.prefix_gru.weight_hh_l0.shape[1])
        states = torch.cat([
            start[..., None, :].expand(*start.shape[:-1], self.silent, -1),
            self.prefix_gru(before[..., self.silent :, :], start),
        ], dim=-2)  # fmt: skip
        corrected_J1 = torch.arange(count, device=hidden.device)[:, None] >= self.first
        return self._narrow(hidden[..., :count, :], states) * corrected_J1

    def _narrow(self, hidden: Tensor, state: Tensor) -> Tensor:
        hidden = hidden.expand(*state.shape[:-1], -1)
        return self.embed_proj[:2](torch.cat([hidden, state.to(hidden.dtype)], dim=-1))  # type: ignore[no-any-return]
