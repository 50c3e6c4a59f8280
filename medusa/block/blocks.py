"""The blocks behind many anchors of a text at once: what a decoder computes of one round, for all rounds.

A block that begins with the anchor at place a sees the target's features of the places before a, and its own slots. Its
guess k is of token a + 1 + k. Whether a round drafts token a + 1 + k counts only where those before it were accepted:
then the tokens before it, which the Markov head sees, are the text's own. So guesses made beside the text's tokens are
what the decoder makes, and training does the same.

Shape suffixes: B rows, T places, N anchors, S slots, K guesses, Q = N · S, F features, H hidden.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from draftsmith.decode.cache.kernels import additive_mask, computing_dtype, fused_attention
from draftsmith.medusa.block.model import Attend, BlockDrafter
from draftsmith.medusa.seen import KeysValues

SCORES = 2**25
"""Entries of a mask that are held at a time, where anchors are computed in parts."""


class Anchors(NamedTuple):
    """Anchors of blocks in rows of text."""

    places: Tensor
    """Where they are, (B, N) int64."""
    tokens: Tensor
    """What stands there, (B, N)."""
    positions: Tensor
    """And at which position of its text, (B, N)."""
    texts: Tensor | None = None
    """Of packed rows the number of the text, (B, N)."""

    @classmethod
    def at(cls, places_BN: Tensor, ids_BT: Tensor, positions_BT: Tensor, texts_BT: Tensor | None = None) -> "Anchors":
        """Return anchors at some places of rows."""
        tokens_BN, positions_BN = (part.expand_as(ids_BT).gather(1, places_BN) for part in (ids_BT, positions_BT))
        return cls(places_BN, tokens_BN, positions_BN, None if texts_BT is None else texts_BT.gather(1, places_BN))


def block_states(
    drafter: BlockDrafter,
    embed: nn.Module,
    context: Sequence[KeysValues],
    anchors: Anchors,
    texts_BT: Tensor | None = None,
) -> Tensor:
    """Return what the output head sees of every guess of the blocks behind some anchors, (B, N, K, H).

    Args:
        drafter: with gradients or without.
        embed: the target's embedding.
        context: each layer's keys and values of the T places that have features: `BlockDrafter.context`.
        anchors: of the blocks.
        texts_BT: a number for each text of packed rows; None: each row is one.
    """
    slots, places = drafter.config.block_size, context[0].keys.shape[2]
    states_BQH = drafter.block(anchors.tokens, embed).flatten(1, 2)
    behind_S = torch.arange(slots, device=states_BQH.device)
    positions_BQ = (anchors.positions[..., None] + behind_S).flatten(1)
    mask = additive_mask(visible(anchors, places, slots, texts_BT), computing_dtype(states_BQH))

    def attend(layer: int) -> Attend:
        def attended(queries: Tensor, own: KeysValues) -> Tensor:
            keys, values = (torch.cat(pair, dim=2) for pair in zip(context[layer], own, strict=True))
            return fused_attention(queries, keys, values, mask, is_causal=False)

        return attended

    hidden_BQH = drafter(states_BQH, positions_BQ, attend)
    return drafter.guessing(hidden_BQH.unflatten(1, (-1, slots)))


def visible(anchors: Anchors, places: int, slots: int, texts_BT: Tensor | None = None) -> Tensor:
    """Return where slots of blocks see places and slots, (B, 1, N·S, T + N·S) bool.

    They see the places before their anchor in its text, and all slots of their block.
    """
    rows, count = anchors.places.shape
    before_BNT = torch.arange(places, device=anchors.places.device) < anchors.places[..., None]
    if texts_BT is not None:
        assert anchors.texts is not None
        before_BNT = before_BNT & (texts_BT[:, None] == anchors.texts[..., None])
    blocks_NN = torch.eye(count, dtype=torch.bool, device=anchors.places.device)
    blocks_NQ = blocks_NN.repeat_interleave(slots, dim=1).expand(rows, -1, -1)
    return torch.cat([before_BNT, blocks_NQ], dim=2).repeat_interleave(slots, dim=1)[:, None]


def anchors_at_once(places: int, slots: int) -> int:
    """Return how many anchors' blocks are computed together: those whose mask is of bounded size."""
    slots_at_once = (-places + (places**2 + 4 * SCORES) ** 0.5) / 2
    return max(1, int(slots_at_once) // slots)
