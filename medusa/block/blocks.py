"""The blocks after many anchors of a text at once: training and replay compute all rounds as a decoder computes one.

A block whose anchor is at position a sees the target's features of the positions before a, and its own slots. Its guess
k is token a + 1 + k. A draft of that token only counts if the tokens before it were accepted; then the tokens before
it, which heads see, are the text's own. So guesses made with the text's tokens are the decoder's.

Shape suffixes: B rows, T positions, N anchors, S slots, K guesses, Q = N · S, F features, H hidden.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.decode.cache.features import collect_features, decoder_of
from draftsmith.decode.cache.kernels import additive_mask, computing_dtype, fused_attention
from draftsmith.decode.replay.starts import LogitsOfRounds
from draftsmith.decode.replay.texts import WrittenText, fixed_packing
from draftsmith.medusa.block.model import Attend, BlockDrafter
from draftsmith.medusa.target_states import KeysValues, TargetStates
from draftsmith.train.job.flops import Work

SHARE = 4
"""A step draws by default one of every four positions of a row that can be anchors."""
SCORES = 2**25
"""The most entries of a mask at a time, when anchors are computed in parts."""


class Anchors(NamedTuple):
    """Anchors of blocks in rows of text, (B, N) int64 each; `texts` are the numbers of their texts in packed rows."""

    indices: Tensor
    tokens: Tensor
    positions: Tensor
    texts: Tensor | None = None

    @classmethod
    def at(cls, indices_BN: Tensor, ids_BT: Tensor, positions_BT: Tensor, texts_BT: Tensor | None = None) -> "Anchors":
        """Return the anchors at some positions of rows."""
        tokens_BN, positions_BN = (part.expand_as(ids_BT).gather(1, indices_BN) for part in (ids_BT, positions_BT))
        return cls(indices_BN, tokens_BN, positions_BN, None if texts_BT is None else texts_BT.gather(1, indices_BN))


def block_states(
    drafter: BlockDrafter,
    embed: nn.Module,
    context: Sequence[KeysValues],
    anchors: Anchors,
    texts_BT: Tensor | None = None,
) -> Tensor:
    """Return the output head's inputs for all slots of the blocks after some anchors, (B, N, S, H).

    `embed` is the target's; `context` holds each layer's keys and values of the T positions that have features, from
    `BlockDrafter.context`. In packed rows `texts_BT` is a number for each text.
    """
    attend, positions_BQ = attend_to(drafter, context, anchors, texts_BT)
    states_BQH = drafter.block(anchors.tokens, embed).flatten(1, 2)
    hidden_BQH = drafter.hidden(states_BQH, positions_BQ, attend)
    return hidden_BQH.unflatten(1, (-1, drafter.config.block_size))


def tokens_before(drafter: BlockDrafter, ids_BT: Tensor, position_ids: Tensor | None, indices_BN: Tensor) -> Tensor:
    """Return the token before each slot's of the blocks after anchors at some positions, (B, N, S), for heads.

    Before an anchor that guesses nothing it is the text's token there, or the anchor itself where the text begins. In
    packed rows `position_ids`, (B, T), tell where that is.
    """
    config: Any = drafter.config
    order_S = torch.arange(config.block_size, device=ids_BT.device) - config.silent
    at_BNS = (indices_BN[..., None] + order_S).clamp(0, ids_BT.shape[1] - 1)
    if config.silent and position_ids is not None:
        begins_BN = position_ids.gather(1, indices_BN) == 0
        at_BNS[..., 0] = indices_BN.where(begins_BN, at_BNS[..., 0])
    return ids_BT.gather(1, at_BNS.flatten(1)).view_as(at_BNS)


def attend_to(
    drafter: BlockDrafter, context: Sequence[KeysValues], anchors: Anchors, texts_BT: Tensor | None = None
) -> tuple[Callable[[int], Attend], Tensor]:
    """Return each layer's attention of the slots of blocks, and the slots' positions, (B, N·S): see `block_states`."""
    config, positions = drafter.config, context[0].keys.shape[2]
    kinds = [(config.window_of(layer), config.causal(layer)) for layer in range(len(context))]
    masks = {
        kind: additive_mask(
            visible(anchors, positions, config.block_size, texts_BT, *kind), computing_dtype(context[0].keys)
        )
        for kind in set(kinds)
    }

    def attend(layer: int) -> Attend:
        def attended(queries: Tensor, own: KeysValues) -> Tensor:
            # The context comes first, as in `visible`.
            keys, values = (torch.cat(pair, dim=2) for pair in zip(context[layer], own, strict=True))
            return fused_attention(queries, keys, values, masks[kinds[layer]], is_causal=False)

        return attended

    order_S = torch.arange(config.block_size, device=anchors.indices.device)
    return attend, (anchors.positions[..., None] + order_S).flatten(1)


def visible(
    anchors: Anchors,
    positions: int,
    slots: int,
    texts_BT: Tensor | None = None,
    window: int | None = None,
    causal: bool = False,
) -> Tensor:
    """Return the mask of slots of blocks, (B, 1, N·S, T + N·S) bool.

    A slot sees the positions before its anchor in the same text, and all slots of its own block; with a `window` only
    as many positions, its own included, and if `causal` no slots after itself.
    """
    rows, count = anchors.indices.shape
    order_S = torch.arange(slots, device=anchors.indices.device)
    before_BNT = torch.arange(positions, device=anchors.indices.device) < anchors.indices[..., None]
    if texts_BT is not None:
        assert anchors.texts is not None
        # Packed rows hold several texts, and a block sees only its own.
        before_BNT = before_BNT & (texts_BT[:, None] == anchors.texts[..., None])
    blocks_NN = torch.eye(count, dtype=torch.bool, device=anchors.indices.device)
    blocks_NQ = blocks_NN.repeat_interleave(slots, dim=1).expand(rows, -1, -1)
    seen_BQX = torch.cat([before_BNT, blocks_NQ], dim=2).repeat_interleave(slots, dim=1)
    if window is not None:  # at least a block, so that only the text's positions can be outside
        first_BQ = (anchors.indices[..., None] + order_S).flatten(1) - window + 1
        seen_BQX[..., :positions] &= torch.arange(positions, device=first_BQ.device) >= first_BQ[..., None]
    if causal:
        order_Q = order_S.repeat(count)
        seen_BQX[..., positions:] &= order_Q <= order_Q[:, None]
    return seen_BQX[:, None]


def anchors_at_once(positions: int, slots: int) -> int:
    """Return how many anchors' blocks to compute together, so that their mask has at most `SCORES` entries."""
    slots_at_once = (-positions + (positions**2 + 4 * SCORES) ** 0.5) / 2  # of q · (positions + q) = SCORES
    return max(1, int(slots_at_once) // slots)


def anchors_of(max_anchors: int | None, length: int) -> int:
    """Return the number of anchors that a step computes in a row of `length` tokens; by default one in `SHARE`."""
    return max(1, length // SHARE) if max_anchors is None else min(max_anchors, length)


def states_of_blocks(
    drafter: BlockDrafter,
    embed: nn.Module,
    target_states: TargetStates,
    ids_BT: Tensor,
    position_ids: Tensor | None,
    indices_BN: Tensor,
) -> Tensor:
    """Return `block_states` after the anchors at some positions of a batch, from the target's states of it.

    In packed rows `position_ids`, (B, T), are the positions; without them each row is one text.
    """
    positions_BT, texts_BT = position_ids, None
    if positions_BT is None:
        positions_BT = torch.arange(ids_BT.shape[1], device=ids_BT.device).expand_as(ids_BT)
    else:
        texts_BT = (positions_BT == 0).cumsum(1)
    fused_BTH = drafter.fuse(target_states.features.to(computing_dtype(drafter.fc.weight)))
    anchors = Anchors.at(indices_BN, ids_BT, positions_BT, texts_BT)
    return block_states(drafter, embed, drafter.context(fused_BTH, positions_BT), anchors, texts_BT)


def work_of_blocks(drafter: BlockDrafter, share: float) -> Work:
    """Return the arithmetic of a token of the text, if a share of all tokens are anchors."""
    layers: Any = list(drafter.layers)
    context = Work.of_maps(
        drafter.fc, *(map_ for layer in layers for map_ in (layer.self_attn.k_proj, layer.self_attn.v_proj))
    )
    attended = sum(2 * layer.self_attn.q_proj.out_features for layer in layers)
    slots, guesses = share * drafter.config.block_size, share * drafter.config.guesses
    decoder = context.head + slots * Work.of_maps(*layers).head
    logits = guesses * drafter.config.draft_vocab_size * drafter.config.hidden_size  # the target's frozen head
    if (head := drafter.side_head) is not None:
        logits += guesses * head.out.weight.numel()
    return Work(round(decoder), round(logits), round(slots * attended), decoder / (decoder + logits))


def logits_of_blocks(target: PreTrainedModel, drafter: BlockDrafter, text: WrittenText) -> LogitsOfRounds:
    """Return the drafter's logits by start and guess for replay, from one target forward.

    After a prompt of P tokens, the round from s ≥ 1 has the anchor x_{s−1}, at position P + s − 1; its guess j is
    x_{s+j}.
    """
    if len(text) < 2:  # nothing is drafted
        return lambda first, end: iter(())
    ids_1T = text.sequence[None].to(target.device)
    # The last anchor that drafts a token of the text is its last token but one, whose own features no block sees.
    with collect_features(target, drafter.layer_ids) as features, fixed_packing(False):
        decoder_of(target)(input_ids=ids_1T[:, :-2], use_cache=False)
    home, embed = drafter.device, target.get_input_embeddings()
    states_1TH, ids_T = drafter.fuse(features.pop().to(home, drafter.dtype)), ids_1T[0].to(home)
    positions = states_1TH.shape[1]
    context = drafter.context(states_1TH, torch.arange(positions, device=home)[None])
    at_once = anchors_at_once(positions, drafter.config.block_size)
    head = drafter.head_for(target).to(home)

    def logits_of(first: int, end: int) -> Iterator[Tensor]:
        begin = text.prompt_length - 1
        rounds_C = torch.arange(begin + first, begin + end, device=home)
        hidden_CSH = torch.cat(
            [
                block_states(drafter, embed, context, Anchors(at[None], ids_T[at][None], at[None]))[0]
                for at in rounds_C.split(at_once)
            ]
        )
        # Guesses after the text's end have no tokens before them, and nobody asks for their logits.
        before_CS = tokens_before(drafter, ids_T[None], None, rounds_C[None])[0]
        side_CKR = drafter.sides(hidden_CSH, before_CS, embed)
        hidden_CKH = drafter.guessing(hidden_CSH)
        for guess in range(drafter.config.guesses):
            side = None if side_CKR is None else side_CKR[:, guess]
            yield drafter.widened(drafter.logits(hidden_CKH[:, guess], side, head))

    return logits_of
