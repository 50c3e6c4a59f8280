"""The steps of all rounds at once: what heads give where each place begins a round (EAGLE-3, section 3.2).

A round that begins at place s knows the target's features of places up to s. Its step 0 is the layer at place s, as
ever. Its step k is the layer at place s + k, where it sees the state that step k − 1 gave, beside the embedding of the
next token of the text. It attends to the keys that step 0 made at the places up to s, and to those that steps 1 … k of
this same round made, one each. So a decoder does whose drafts are all accepted, and training does the same: the
paper's training-time test.

Tensors of step k have an entry for each round, not for each place: entry s is of the round that begins at s. Then all
steps look at the keys of step 0 by the same causal mask, and the key of step j is the entry of the same index.

`draftsmith plan` runs these functions on tensors without data.

Shape suffixes: B rows, T places, S = T − k rounds of a step, N chosen places, K steps, F features, H hidden.
"""

import torch
from torch import Tensor, nn

from draftsmith.decode.cache.kernels import additive_mask, computing_dtype, flash_takes, fused_attention, repeated
from draftsmith.medusa.eagle.heads import Attend, EagleHeads, Step, attention
from draftsmith.medusa.seen import KeysValues, TargetStates
from draftsmith.train.job.flops import Work

SPARE = 8
"""By how much keys and values are widened: attention kernels ask for widths that are multiples of it."""


def unrolled(
    heads: EagleHeads,
    embeddings_BTH: Tensor,
    features_BTF: Tensor,
    positions_BT: Tensor,
    num_steps: int,
    texts_BT: Tensor | None = None,
) -> list[Step]:
    """Return the steps 0 … K − 1 of the rounds that begin at every place.

    Entry s of step k is at place s + k: it has seen the text up to token s + k + 1 and guesses token s + k + 2. Where
    place s + k is of another text, or padding, an entry means nothing. Places behind a text change nothing in it.

    Args:
        heads: that draft.
        embeddings_BTH: the target's, of the tokens behind these places.
        features_BTF: the target's, of the tokens at these places.
        positions_BT: of these places in their texts, int64.
        num_steps: K.
        texts_BT: a number for each text of a packed row, such as (positions_BT == 0).cumsum(1); None: each row is one.

    Returns:
        K steps, tensors of step k (B, T − k, H).
    """
    visible = None if texts_BT is None else same_text(texts_BT)
    states_BTH = heads.fuse(features_BTF)
    mask = None if visible is None else additive_mask(visible, computing_dtype(states_BTH))
    steps = [heads.step(embeddings_BTH, states_BTH, positions_BT, attention(None, mask))]
    query_heads = heads.config.num_attention_heads
    of_features = FeatureKeys(steps[0].own, query_heads, visible) if num_steps > 1 else None
    for k in range(1, num_steps):
        assert of_features is not None
        attend = round_attention(of_features, [step.own for step in steps[1:]])
        states_BSH = steps[-1].states[:, : max(embeddings_BTH.shape[1] - k, 0)]
        steps.append(heads.step(embeddings_BTH[:, k:], states_BSH, positions_BT[:, k:], attend))
    return steps


def same_text(texts_BT: Tensor) -> Tensor:
    """Return where a place sees another: itself and those before it in its text, (B, 1, T, T) bool."""
    causal_TT = torch.ones(2 * texts_BT.shape[1:], dtype=torch.bool, device=texts_BT.device).tril()
    return ((texts_BT[:, :, None] == texts_BT[:, None, :]) & causal_TT)[:, None]


class FeatureKeys:
    """Keys and values of step 0, with a sink before them: a key that all queries see, each at a score of its own.

    The softmax over all keys of a round splits into two: its own keys are few, and their part is computed entry by
    entry; the keys of step 0 are as many as places, and the library's kernel computes theirs without holding T × T
    scores. What it does not tell is the sum of their exponentials, which weighs the parts. So it is shown one key more,
    whose score is the logarithm of the other part's sum, and whose value says what weight it got.

    Args:
        current: keys and values of step 0, (B, key heads, T, width).
        heads: that query them.
        visible: of `same_text`; None: causal.
    """

    def __init__(self, current: KeysValues, heads: int, visible: Tensor | None):
        # The score passes through the queries' precision: what bfloat16 rounds off of it goes through another entry.
        self.keys = nn.functional.pad(current.keys, (0, SPARE, 1, 0))
        self.keys[:, :, 0, -2:] = 1.0
        self.values = nn.functional.pad(current.values, (0, SPARE, 1, 0))
        self.values[:, :, 0, -1] = 1.0
        if not flash_takes(self.keys, visible is not None):  # once for all steps
            self.keys, self.values = repeated(self.keys, heads), repeated(self.values, heads)
        self.mask: Tensor | None = None
        if visible is not None:  # the sink's own query sees it alone
            visible = nn.functional.pad(visible, (1, 0, 1, 0))
            visible[..., 0] = True
            self.mask = additive_mask(visible, computing_dtype(current.keys))

    def attend(self, queries: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the rounds' queries attend to, times its weight, and the weight of the sink.

        Args:
            queries: (B, heads, S, width).
            scores: of the sink, float32, (B, heads, S).

        Returns:
            (B, heads, S, width) and (B, heads, S, 1).
        """
        rounds, width = queries.shape[2:]
        scaled, dtype = scores * width**0.5, computing_dtype(queries)
        coarse = scaled.detach().to(dtype)
        fine = (scaled - coarse).to(dtype)
        at_sink = nn.functional.pad(torch.stack([coarse, fine], dim=-1), (SPARE - 2, 0))
        seen = fused_attention(
            nn.functional.pad(torch.cat([queries, at_sink], dim=-1), (0, 0, 1, 0)),
            self.keys[:, :, : rounds + 1],
            self.values[:, :, : rounds + 1],
            None if self.mask is None else self.mask[..., : rounds + 1, : rounds + 1],
            is_causal=self.mask is None,
            scale=width**-0.5,
        )[:, :, 1:]
        return seen[..., :width], seen[..., -1:]


def round_attention(of_features: FeatureKeys, drafted: list[KeysValues]) -> Attend:
    """Return the attention of step k: a round sees the keys of step 0 up to its beginning, and those that it made.

    Args:
        of_features: the keys of step 0.
        drafted: keys and values of the steps 1 … k − 1.
    """

    def attend(queries: Tensor, current: KeysValues) -> Tensor:
        rounds, width = queries.shape[2:]
        made = [KeysValues(*(each[:, :, None, :rounds] for each in part)) for part in (*drafted, current)]
        grouped = queries.unflatten(1, (current.keys.shape[1], -1))
        scores = torch.stack([(grouped * part.keys).sum(-1, dtype=torch.float32) for part in made]) * width**-0.5
        seen, weight = of_features.attend(queries, scores.logsumexp(0).flatten(1, 2))
        shares = scores.softmax(0).to(queries.dtype)
        of_round = torch.stack([share[..., None] * part.values for share, part in zip(shares, made, strict=True)]).sum(
            0
        )
        return seen + weight * of_round.flatten(1, 2)

    return attend


def states_of_steps(
    heads: EagleHeads, seen: TargetStates, position_ids: Tensor | None, places_N: Tensor, num_steps: int
) -> list[Tensor]:
    """Return what the head sees of each step at the places where it learns, (N, H) each; anything at others.

    Args:
        heads: with gradients or without.
        seen: of the batch, (B, T, …).
        position_ids: of packed rows, (B, T); None where each row is one text.
        places_N: c in the flattened batch: step k guesses the token c + 1, in the round that begins at c − 1 − k.
        num_steps: K.
    """
    rows, length = seen.hidden.shape[:2]
    positions_BT = position_ids
    if positions_BT is None:
        positions_BT = torch.arange(length, device=places_N.device).expand(rows, length)
    # The last place of a row has no token behind it.
    positions_BS = positions_BT[:, :-1]
    dtype = computing_dtype(heads.fc.weight)  # of a long context the features are the largest tensor
    steps = unrolled(
        heads,
        seen.embeddings[:, 1:].to(dtype),
        seen.features[:, :-1].to(dtype),
        positions_BS,
        num_steps,
        None if position_ids is None else (positions_BS == 0).cumsum(1),
    )
    row_N, column_N = places_N // length, places_N % length
    return [
        # A batch of short rows may have no round as long, and nothing to learn from it.
        (step if step.hidden.shape[1] else steps[0]).hidden[row_N, (column_N - 1 - k).clamp(min=0)]
        for k, step in enumerate(steps)
    ]


def work_of_steps(heads: EagleHeads, num_steps: int) -> Work:
    """Return the arithmetic of K steps: a layer and a head each, and what fuses the features once."""
    attention = heads.midlayer.self_attn
    return Work(
        Work.of_maps(*[heads.midlayer] * num_steps, heads.fc).head,
        Work.of_maps(*[heads.lm_head] * num_steps).head,
        2 * attention.q_proj.out_features * num_steps,
    )
