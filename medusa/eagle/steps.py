"""What training computes of a batch before any loss: a forward of the target, and the steps of all rounds.

`draftsmith plan` runs the same functions on tensors without data. Shape suffixes: B rows, T positions, S rounds of a
step, N chosen positions, K steps, F features, H hidden.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.cache.features import collected
from draftsmith.decode.cache.kernels import computing_dtype
from draftsmith.medusa.eagle.heads import EagleHeads
from draftsmith.medusa.eagle.unrolled import unrolled
from draftsmith.train.job.flops import Work


class Seen(NamedTuple):
    """What a forward of the target leaves of a batch, or a cache has of it, without gradients."""

    hidden: Tensor
    """What its head sees, (B, T, H)."""
    embeddings: Tensor
    """Of the tokens, (B, T, H)."""
    features: Tensor
    """What the heads fuse, (B, T, F)."""


def seen_by(target: PreTrainedModel, depths: Sequence[int], forward: Callable[[], Tensor]) -> Seen:
    """Run a target once on a batch.

    Args:
        target: without gradients.
        depths: after how many layers features are taken, ascending.
        forward: runs it, and returns its last hidden states, (B, T, H).
    """
    embeddings: list[Tensor] = []
    # A sharded target's embeddings are whole inside of its forward alone.
    hook = target.get_input_embeddings().register_forward_hook(lambda _m, _i, output: embeddings.append(output))
    try:
        with collected(target, depths) as features:
            hidden = forward()
    finally:
        hook.remove()
    return Seen(hidden, embeddings[0].to(hidden.device), features[0].to(hidden.device))


def states_of_steps(
    heads: EagleHeads, seen: Seen, position_ids: Tensor | None, places_N: Tensor, num_steps: int
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
