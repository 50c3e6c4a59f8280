"""The blocks behind many anchors of a text at once: what a decoder computes of one round, for all rounds.

A block that begins with the anchor at place a sees the target's features of the places before a, and its own slots. Its
guess k is of token a + 1 + k. Whether a round drafts token a + 1 + k counts only where those before it were accepted:
then the tokens before it, which the Markov head sees, are the text's own. So guesses made beside the text's tokens are
what the decoder makes, and training does the same.

Shape suffixes: B rows, T places, N anchors, S slots, K guesses, Q = N · S, F features, H hidden.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from draftsmith.decode.cache.kernels import additive_mask, computing_dtype, fused_attention
from draftsmith.medusa.block.model import Attend, BlockDrafter
from draftsmith.medusa.seen import KeysValues, TargetStates
from draftsmith.train.job.flops import Work

SHARE = 4
"""One out of so many places of a row that can be anchors is one in a step, unless told."""
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
    attend, positions_BQ = attend_to(drafter, context, anchors, texts_BT)
    states_BQH = drafter.block(anchors.tokens, embed).flatten(1, 2)
    hidden_BQH = drafter.hidden(states_BQH, positions_BQ, attend)
    return drafter.guessing(hidden_BQH.unflatten(1, (-1, drafter.config.block_size)))


def attend_to(
    drafter: BlockDrafter, context: Sequence[KeysValues], anchors: Anchors, texts_BT: Tensor | None = None
) -> tuple[Callable[[int], Attend], Tensor]:
    """Return what slots of blocks attend to in each layer, and their positions, (B, N·S): see `block_states`."""
    slots, places = drafter.config.block_size, context[0].keys.shape[2]
    behind_S = torch.arange(slots, device=anchors.places.device)
    mask = additive_mask(visible(anchors, places, slots, texts_BT), computing_dtype(context[0].keys))

    def attend(layer: int) -> Attend:
        def attended(queries: Tensor, own: KeysValues) -> Tensor:
            keys, values = (torch.cat(pair, dim=2) for pair in zip(context[layer], own, strict=True))
            return fused_attention(queries, keys, values, mask, is_causal=False)

        return attended

    return attend, (anchors.positions[..., None] + behind_S).flatten(1)


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


def anchors_of(most: int | None, length: int) -> int:
    """Return how many anchors of a row of some tokens a step of training computes, of so many at most if not None."""
    return max(1, length // SHARE) if most is None else min(most, length)


def states_of_blocks(
    drafter: BlockDrafter,
    embed: nn.Module,
    seen: TargetStates,
    ids_BT: Tensor,
    position_ids: Tensor | None,
    places_BN: Tensor,
) -> Tensor:
    """Return what the output head sees of every guess of the blocks behind some anchors, (B, N, K, H).

    Args:
        drafter: with gradients or without.
        embed: the target's embedding.
        seen: what the target left of the batch, (B, T, …).
        ids_BT: the batch.
        position_ids: of packed rows, (B, T); None where each row is one text.
        places_BN: of the anchors.
    """
    positions_BT, texts_BT = position_ids, None
    if positions_BT is None:
        positions_BT = torch.arange(ids_BT.shape[1], device=ids_BT.device).expand_as(ids_BT)
    else:
        texts_BT = (positions_BT == 0).cumsum(1)
    fused_BTH = drafter.fuse(seen.features.to(computing_dtype(drafter.fc.weight)))
    anchors = Anchors.at(places_BN, ids_BT, positions_BT, texts_BT)
    return block_states(drafter, embed, drafter.context(fused_BTH, positions_BT), anchors, texts_BT)


def work_of_blocks(drafter: BlockDrafter, share: float) -> Work:
    """Return the arithmetic of a token of the text, where a share of all tokens are anchors.

    Args:
        drafter: whose layers are computed.
        share: of the tokens.
    """
    layers: Any = list(drafter.layers)
    of_context = Work.of_maps(
        drafter.fc, *(map_ for each in layers for map_ in (each.self_attn.k_proj, each.self_attn.v_proj))
    )
    attended = sum(2 * each.self_attn.q_proj.out_features for each in layers)
    slots, guesses = share * drafter.config.block_size, share * drafter.config.guesses
    decoder = of_context.head + slots * Work.of_maps(*layers).head
    logits = (
        guesses * drafter.config.draft_vocab_size * drafter.config.hidden_size
    )  # the target's head, which is frozen
    if drafter.markov_head is not None:
        logits += guesses * drafter.markov_head.markov_w2.weight.numel()
    return Work(round(decoder), round(logits), round(slots * attended), decoder / (decoder + logits))
