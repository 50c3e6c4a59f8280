"""XPress's refiner (2026): a small network over a block's slots that adds logits, and the rounds that teach it.

It mixes what all slots before a guess saw: their states, the mean of all states, and the tokens before them. Servers
run it a few times over the whole block, each time on the guesses of the round before. Each round settles one guess
more, and what is settled stays: so enough rounds end in the draft that a walk along the slots makes, a guess after the
other, each after those before it. Our decoder walks. Then a guess's law depends on the tokens before it alone: drafts
are exact in trees too, and a replay finds the same ones.

Shape suffixes: S slots of a block, the first J of them with tokens before, R rank, H hidden, V vocabulary.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from draftsmith.decode.errors import at_least, at_most, require
from draftsmith.medusa.base import LMHead
from draftsmith.medusa.block.heads.base import SideHead


class Refiner(SideHead):
    """Adds R a_k to the logits of slot k, where a is mixed from the slots up to k; it keeps their unmixed states."""

    name, title, family = "refiner_head", "refiner", "XPress"
    served = "vLLM 0.32 and SGLang 0.5.23 do not decode with it"
    fields: ClassVar = {"xpress_rank": 0, "xpress_mlp_ratio": 2, "num_jacobi_passes": 6}
    foreign: ClassVar = {"xpress_rank": 256}

    def __init__(self, config: Any, side: int):
        super().__init__(config, side)
        size, wide = config.hidden_size, side * config.xpress_mlp_ratio
        self.token_embed = nn.Embedding(config.vocab_size, side)
        self.down_h, self.down_g = (nn.Linear(size, side, bias=False) for _ in range(2))
        self.in_proj = nn.Linear(3 * side, side, bias=False)
        self.mix_l = nn.Parameter(torch.zeros(side, config.block_size, config.block_size))
        self.mlp_gate, self.mlp_up = (nn.Linear(side, wide, bias=False) for _ in range(2))
        self.mlp_down = nn.Linear(wide, side, bias=False)
        self.readout = LMHead(side, config.draft_vocab_size, bias=False)

    @property
    def out(self) -> nn.Linear:  # type: ignore[override]
        """The map from mixed states to logits."""
        return self.readout

    @classmethod
    def check(cls, config: Any) -> None:
        """Require a width of its network, and a number of a server's rounds."""
        require(config, at_least(1) & at_most(64), "xpress_mlp_ratio", "num_jacobi_passes")

    @classmethod
    def new_fields(cls, config: Any, width: int) -> dict[str, Any]:
        """Return the rank that a run asks for."""
        return {"xpress_rank": config.xpress_rank}

    def begin(self, hidden: Tensor) -> Tensor:
        """Return the map of the mean state, (…, 1, R), to which each step adds a slot's unmixed state."""
        return self.down_g(hidden.mean(-2, keepdim=True))  # type: ignore[no-any-return]

    def step(self, state: Tensor | None, hidden: Tensor, before: Tensor, slot: int) -> tuple[Tensor, Tensor]:
        """Return a slot's mixed state, and with its unmixed state those of all slots so far."""
        assert state is not None
        drafted = self.token_embed(before)
        mean = state[..., 0, :].expand_as(drafted)
        new = self.in_proj(torch.cat([self.down_h(hidden), mean, drafted], dim=-1))
        states = torch.cat([state.expand(*new.shape[:-1], -1, -1), new[..., None, :]], dim=-2)
        rows_JR = self.mix_l[:, slot, : slot + 1].T
        return self._narrow(new + (rows_JR * states[..., 1:, :]).sum(-2)), states

    def forced(self, hidden: Tensor, before: Tensor) -> Tensor:
        """Return all slots' mixed states at once."""
        return self(hidden, before)  # type: ignore[no-any-return]

    def forward(self, hidden: Tensor, before: Tensor) -> Tensor:
        """Compute `forced` where sharded training has the mixing weights: inside of a forward of this module."""
        drafted, count = self.token_embed(before), before.shape[-1]
        mean = self.down_g(hidden.mean(-2, keepdim=True)).expand(*drafted.shape[:-1], -1)
        seen = self.down_h(hidden[..., :count, :]).expand_as(mean)
        states = self.in_proj(torch.cat([seen, mean, drafted], dim=-1))
        mix_RJJ = self.mix_l[:, :count, :count].tril()
        return self._narrow(states + torch.einsum("rkj,...jr->...kr", mix_RJJ, states))

    def _narrow(self, mixed: Tensor) -> Tensor:
        return mixed + self.mlp_down(silu(self.mlp_gate(mixed)) * self.mlp_up(mixed))  # type: ignore[no-any-return]
