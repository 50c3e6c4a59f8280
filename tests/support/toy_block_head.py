"""A block head with a state: a small GRU over the tokens drafted before a guess, as in Domino."""

from typing import ClassVar

import torch
from torch import nn

from draftsmith.medusa.base import LMHead
from draftsmith.medusa.block.heads.base import SideHead


class ToyHead(SideHead):
    name, title = "toy_head", "toy head"
    fields: ClassVar = {"toy_width": 0}

    def __init__(self, config, side):
        super().__init__(config, side)
        self.first, self.cell = nn.Linear(config.hidden_size, side), nn.GRUCell(side, side)
        self.tokens, self.map = nn.Embedding(config.vocab_size, side), LMHead(side, config.draft_vocab_size, bias=False)

    @property
    def out(self):
        return self.map

    @classmethod
    def new_fields(cls, config, width):
        return {"toy_width": 4}

    def begin(self, hidden):
        return self.first(hidden.mean(-2)).tanh()  # all guesses' states: a second pass would begin so too

    def step(self, state, hidden, before, slot):
        drafted = self.tokens(before)
        states = self.cell(drafted.flatten(0, -2), state.to(drafted.dtype).flatten(0, -2)).view_as(drafted)
        return states, torch.clone(states)
