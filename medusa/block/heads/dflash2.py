"""DFlash 2's parts (Inco AI and z-lab, 2026): a selector of candidates, and convolutions around the layers' sublayers.

A slot's candidates are its K most likely tokens by its own logits. The selector adds to these ⟨P[x] ⊙ Q h, S[c]⟩ for
candidate c, after the token x before it, and all other tokens are impossible: so a guess's law is a softmax over K
tokens. It depends on the tokens before the guess alone, as with any head that adds logits.

The convolutions let a slot see those before it in its block, inside of the one forward over all slots.

Shape suffixes: B rows, Q = N · S slots of N blocks, H hidden, G groups of channels, C channels of a group.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from draftsmith.decode.errors import InputError, at_least, at_most, require
from draftsmith.medusa.base import LMHead
from draftsmith.medusa.block.heads.base import SideHead


class Selector(SideHead):
    """Adds to each candidate's logit a product of three: of the token before, the slot's state and the candidate."""

    name, title, family = "candidate_selector", "candidate selector", "DFlash2"
    method = "dflash"
    fields: ClassVar = {"selector_rank": 0, "selector_top_k": 16}
    foreign: ClassVar = {"selector_rank": 256, "conv_kernel_size": 2, "conv_group_size": 16}
    renamed: ClassVar = {
        f"{book}_codebook.weight": f"candidate_selector.{book}_codebook" for book in ("predecessor", "successor")
    }

    def __init__(self, config: Any, side: int):
        super().__init__(config, side)
        self.predecessor_codebook = nn.Embedding(config.vocab_size, side)
        self.successor_codebook = LMHead(side, config.draft_vocab_size, bias=False)
        self.hidden_projection = nn.Linear(config.hidden_size, side, bias=False)
        self.candidates = config.selector_top_k

    @property
    def out(self) -> nn.Linear:  # type: ignore[override]
        """S."""
        return self.successor_codebook

    @classmethod
    def check(cls, config: Any) -> None:
        """Require a number of candidates that the vocabulary has."""
        require(config, at_least(1) & at_most(config.draft_vocab_size), "selector_top_k")

    @classmethod
    def new_fields(cls, config: Any, width: int) -> dict[str, Any]:
        """Return the rank that a run asks for."""
        return {"selector_rank": config.selector_rank}

    def step(self, state: Tensor | None, hidden: Tensor, before: Tensor, slot: int) -> tuple[Tensor, None]:
        """Return P's row of the token before, times Q h."""
        return self.predecessor_codebook(before) * self.hidden_projection(hidden), None

    def forced(self, hidden: Tensor, before: Tensor) -> Tensor:
        """Return all slots' products at once."""
        return self.step(None, hidden[..., : before.shape[-1], :], before, 0)[0]


class Convolution(nn.Module):
    """Two convolutions over the slots of each block, of a sublayer's inputs and of its outputs.

    The kernels of a slot are learnt ones, for each channel, and a map of its input, for each group of channels. Slots
    before a block's first count as zeros.
    """

    def __init__(self, config: Any):
        super().__init__()
        self.slots, self.taps, size = config.block_size, config.conv_kernel_size, config.hidden_size
        kernels = torch.zeros(2, self.taps, size)
        kernels[:, 0] = 1.0  # the identity, with a map of zeros
        self.base_kernel = nn.Parameter(kernels)
        self.kernel_projection = nn.Linear(size, 2 * self.taps * (size // config.conv_group_size), bias=False)

    @staticmethod
    def check(config: Any) -> None:
        """Require as many slots as taps, and whole groups of channels."""
        require(config, at_least(0) & at_most(config.block_size), "conv_kernel_size")
        require(config, at_least(1), "conv_group_size")
        if config.conv_kernel_size and config.hidden_size % config.conv_group_size:
            size, group = config.hidden_size, config.conv_group_size
            raise InputError(f"conv_group_size: expected a divisor of the hidden_size {size}, found {group}")

    def forward(self, states: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """Return a sublayer's outputs for the slots of blocks, (B, Q, H), with both convolved."""
        maps = self.kernel_projection(states).unflatten(-1, (2, self.taps, -1)).unbind(2)
        first, last = ((base, map_) for base, map_ in zip(self.base_kernel, maps, strict=True))
        return self._convolved(sublayer(self._convolved(states, *first)), *last)

    def _convolved(self, states_BQH: Tensor, base_TH: Tensor, map_BQTG: Tensor) -> Tensor:
        groups, base_TH = map_BQTG.shape[-1], base_TH.to(states_BQH.dtype)
        # A block's slots get an axis of their own, so that no tap reaches into another block.
        states_BNSGC = states_BQH.unflatten(1, (-1, self.slots)).unflatten(-1, (groups, -1))
        map_BNSTG, base_TGC = map_BQTG.unflatten(1, (-1, self.slots)), base_TH.unflatten(-1, (groups, -1))
        total = torch.zeros_like(states_BNSGC)
        for tap, base_GC in enumerate(base_TGC):
            earlier = nn.functional.pad(states_BNSGC[:, :, : self.slots - tap], (0, 0, 0, 0, tap, 0))
            total = total + earlier * (base_GC + map_BNSTG[..., tap, :, None])
        return total.flatten(3).flatten(1, 2)
