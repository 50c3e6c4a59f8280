"""The K steps of all rounds at once: the outputs of heads if each position begins a round (EAGLE-3, section 3.2).

A round that begins at position s knows the target's features of positions up to s. Its step 0 is the layer at position
s, as in decoding. Its step k is the layer at position s + k, on the state of step k − 1 and the embedding of the text's
next token. It attends to the keys that step 0 made at the positions up to s, and to those that steps 1 … k of the same
round made, one each. A decoder whose drafts are all accepted computes the same, and so does training: the paper's
training-time test.

Tensors of step k have an entry for each round, not for each position: entry s is the round that begins at s. So all
steps see the keys of step 0 through the same causal mask, and the key of step j is the entry with the same index.

`draftsmith plan` runs these functions on tensors without data.

Shape suffixes: B rows, T positions, S = T − k rounds of a step, N chosen positions, K steps, F features, H hidden.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.decode.cache.features import collect_features, decoder_of
from draftsmith.decode.cache.kernels import additive_mask, computing_dtype, flash_takes, fused_attention, repeat_heads
from draftsmith.decode.replay.starts import LogitsAt
from draftsmith.decode.replay.texts import WrittenText, fixed_packing
from draftsmith.medusa.eagle.heads import Attend, EagleHeads, Step, attention
from draftsmith.medusa.target_states import KeysValues, TargetStates
from draftsmith.train.job.flops import Work

SPARE = 8
"""The columns added to keys and values: attention kernels need widths that are multiples of 8."""


def logits_of_steps(target: PreTrainedModel, heads: EagleHeads, text: WrittenText, depth: int) -> LogitsAt:
    """Return the heads' logits by step and start for replay, from one target forward and K = `depth` steps.

    After a prompt of P tokens, the round from s ≥ 1 begins at position P + s − 2, the last one with features, and sees
    the embedding of x_{s−1}. Its step j guesses x_{s+j} from the text's own tokens, because a draft only counts if
    those before it were accepted.
    """
    if len(text) < 2:  # nothing is drafted
        return lambda step, first, end: torch.empty(0)
    ids_1T = text.sequence[None].to(target.device)
    # The last position that guesses a token of the text is at its last token but two.
    with collect_features(target, heads.layer_ids) as features, fixed_packing(False):
        decoder_of(target)(input_ids=ids_1T[:, :-2], use_cache=False)
    embed: Any = target.get_input_embeddings()
    embeddings, positions = embed(ids_1T[:, 1:-1]), torch.arange(ids_1T.shape[1] - 2, device=heads.device)[None]
    embeddings, fused_features = (part.to(heads.device, heads.dtype) for part in (embeddings, features.pop()))
    steps = unroll(heads, embeddings, fused_features, positions, min(depth, len(text) - 1))
    hidden = [step.hidden[0] for step in steps]

    def logits_at(step: int, first: int, end: int) -> Tensor:
        begin = text.prompt_length - 2
        return heads.widened(heads.head(hidden[step][begin + first : begin + end]))

    return logits_at


def unroll(
    heads: EagleHeads,
    embeddings_BTH: Tensor,
    features_BTF: Tensor,
    positions_BT: Tensor,
    num_steps: int,
    texts_BT: Tensor | None = None,
) -> list[Step]:
    """Return the steps 0 … K − 1 of the rounds that begin at every position, (B, T − k, H) each.

    Entry s of step k is at position s + k: it has seen the text up to token s + k + 1 and guesses token s + k + 2. It
    is meaningless if position s + k belongs to another text, or to padding.

    Args:
        heads: EAGLE-3 heads.
        embeddings_BTH: the target's embeddings of the next tokens.
        features_BTF: the target's features of the tokens at these positions.
        positions_BT: the index of each position within its text, int64.
        num_steps: K.
        texts_BT: in packed rows a number for each text, such as (positions_BT == 0).cumsum(1).
    """
    visible = None if texts_BT is None else same_text(texts_BT)
    states_BTH = heads.fuse(features_BTF)
    mask = None if visible is None else additive_mask(visible, computing_dtype(states_BTH))
    steps = [heads.step(embeddings_BTH, states_BTH, positions_BT, attention(None, mask))]
    query_heads = heads.config.num_attention_heads
    feature_keys = FeatureKeys(steps[0].own, query_heads, visible) if num_steps > 1 else None
    for k in range(1, num_steps):
        assert feature_keys is not None
        attend = round_attention(feature_keys, [step.own for step in steps[1:]])
        states_BSH = steps[-1].states[:, : max(embeddings_BTH.shape[1] - k, 0)]
        steps.append(heads.step(embeddings_BTH[:, k:], states_BSH, positions_BT[:, k:], attend))
    return steps


def same_text(texts_BT: Tensor) -> Tensor:
    """Return the causal mask within texts, (B, 1, T, T) bool: a position sees those up to itself in its text."""
    causal_TT = torch.ones(2 * texts_BT.shape[1:], dtype=torch.bool, device=texts_BT.device).tril()
    return ((texts_BT[:, :, None] == texts_BT[:, None, :]) & causal_TT)[:, None]


class FeatureKeys:
    """Keys and values of step 0 for `heads` query heads, with a sink before them: a key with a score for each query.

    The softmax over all keys of a round splits into two. The round's own keys are few: their part is computed entry by
    entry. The keys of step 0 are as many as positions: the library's kernel computes their part without T × T scores,
    but does not return the sum of their exponentials, which weighs the parts. So the kernel gets one more key, the
    sink. Its score is the logarithm of the other part's sum, and its value returns the weight that it got.

    `current` has the shape (B, key heads, T, width); `visible` is the mask of `same_text`, or None: causal.
    """

    def __init__(self, current: KeysValues, heads: int, visible: Tensor | None):
        # The score passes through the queries' dtype: what bfloat16 rounds off goes through a second entry.
        self.keys = nn.functional.pad(current.keys, (0, SPARE, 1, 0))
        self.keys[:, :, 0, -2:] = 1.0
        self.values = nn.functional.pad(current.values, (0, SPARE, 1, 0))
        self.values[:, :, 0, -1] = 1.0
        if not flash_takes(self.keys, visible is not None):  # repeat them here, once for all steps
            self.keys, self.values = repeat_heads(self.keys, heads), repeat_heads(self.values, heads)
        self.mask: Tensor | None = None
        if visible is not None:  # the sink's own query sees only the sink
            visible = nn.functional.pad(visible, (1, 0, 1, 0))
            visible[..., 0] = True
            self.mask = additive_mask(visible, computing_dtype(current.keys))

    def attend(self, queries: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Return the attended values times their weight, (B, heads, S, width), and the sink's weight, (B, heads, S, 1).

        `queries` are (B, heads, S, width); `scores` are the sink's, float32, (B, heads, S).
        """
        rounds, width = queries.shape[2:]
        scaled, dtype = scores * width**0.5, computing_dtype(queries)
        coarse = scaled.detach().to(dtype)
        fine = (scaled - coarse).to(dtype)
        at_sink = nn.functional.pad(torch.stack([coarse, fine], dim=-1), (SPARE - 2, 0))
        outputs = fused_attention(
            nn.functional.pad(torch.cat([queries, at_sink], dim=-1), (0, 0, 1, 0)),
            self.keys[:, :, : rounds + 1],
            self.values[:, :, : rounds + 1],
            None if self.mask is None else self.mask[..., : rounds + 1, : rounds + 1],
            is_causal=self.mask is None,
            scale=width**-0.5,
        )[:, :, 1:]
        return outputs[..., :width], outputs[..., -1:]


def round_attention(feature_keys: FeatureKeys, drafted: list[KeysValues]) -> Attend:
    """Return the attention of step k: to the keys of step 0 up to the round's beginning, and to the round's own.

    `drafted` holds the keys and values of the steps 1 … k − 1.
    """

    def attend(queries: Tensor, current: KeysValues) -> Tensor:
        rounds, width = queries.shape[2:]
        parts = [KeysValues(*(states[:, :, None, :rounds] for states in part)) for part in (*drafted, current)]
        grouped = queries.unflatten(1, (current.keys.shape[1], -1))
        # The round's own keys: one score a step, from the entry with the same index.
        scores = torch.stack([(grouped * part.keys).sum(-1, dtype=torch.float32) for part in parts]) * width**-0.5
        attended, weight = feature_keys.attend(queries, scores.logsumexp(0).flatten(1, 2))
        shares = scores.softmax(0).to(queries.dtype)
        own = torch.stack([share[..., None] * part.values for share, part in zip(shares, parts, strict=True)]).sum(0)
        return attended + weight * own.flatten(1, 2)

    return attend


def states_of_steps(
    heads: EagleHeads, target_states: TargetStates, position_ids: Tensor | None, indices_N: Tensor, num_steps: int
) -> list[Tensor]:
    """Return each step's inputs of the head at positions c of the flat batch, (N, H); undefined if it learns nothing.

    Step k guesses token c + 1, in the round that begins at c − 1 − k. In packed rows `position_ids`, (B, T), are the
    positions; without them each row is one text.
    """
    rows, length = target_states.hidden.shape[:2]
    positions_BT = position_ids
    if positions_BT is None:
        positions_BT = torch.arange(length, device=indices_N.device).expand(rows, length)
    positions_BS = positions_BT[:, :-1]  # the last position of a row has no next token
    dtype = computing_dtype(heads.fc.weight)  # with a long context the features are the largest tensor
    steps = unroll(
        heads,
        target_states.embeddings[:, 1:].to(dtype),
        target_states.features[:, :-1].to(dtype),
        positions_BS,
        num_steps,
        None if position_ids is None else (positions_BS == 0).cumsum(1),
    )
    row_N, column_N = indices_N // length, indices_N % length
    return [
        # A batch of short rows may have no round of this length, and nothing to learn from it.
        (step if step.hidden.shape[1] else steps[0]).hidden[row_N, (column_N - 1 - k).clamp(min=0)]
        for k, step in enumerate(steps)
    ]


def work_of_steps(heads: EagleHeads, num_steps: int) -> Work:
    """Return the arithmetic of K steps: a layer and a head in each, and one fusion of the features."""
    attention = heads.midlayer.self_attn
    return Work(
        Work.of_maps(*[heads.midlayer] * num_steps, heads.fc).head,
        Work.of_maps(*[heads.lm_head] * num_steps).head,
        2 * attention.q_proj.out_features * num_steps,
    )
