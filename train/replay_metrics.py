"""Acceptance during training, by replay on held-out completions: the criterion of checkpoint selection.

The validation loss can fall while acceptance falls, so it is never the criterion. Each sample yields sums; processes
gather the sums, and ratios are taken at the end.

Shape suffixes: B samples, T positions of a sample, N positions, V vocabulary, K features; k tokens of a cached
distribution, E = k + 1 with their tail.
"""

import numpy as np
import torch
from torch import Tensor
from transformers import EvalPrediction

from draftsmith.decode.replay.rounds import acceptance_probabilities, expected_rounds, overlap
from draftsmith.decode.sampling import Sampler
from draftsmith.train.losses.distributions import CachedDistributions

COLUMNS = ("tokens", "rounds", "overlap", "greedy_overlap", "agreement", "loss")


def replay_features(p: Tensor | CachedDistributions, q_logits_NV: Tensor, labels_N: Tensor, sampler: Sampler) -> Tensor:
    """Return four features of acceptance for each position.

    Args:
        p: the target's logits of the next token, (N, V), or its cached distributions under the same warping. With
            these the second feature is an upper bound, too high by at most min(p_tail, q_tail), and the third a lower
            bound, which takes 0 for tokens of the tail, each less probable than the k-th; the others are exact.
        labels_N: the next tokens, written by the target under the same warping.
        sampler: the deployment's warping, a context-free one.

    Returns:
        (N, 4) float32: min(1, q(x)/p(x)); Σ_v min(p, q); p(argmax q), the probability that a greedy draft is
        accepted; and whether the argmaxes are equal.
    """
    q_NV, guess_N1 = sampler.probabilities(q_logits_NV, []), q_logits_NV.argmax(-1, keepdim=True)
    if isinstance(p, CachedDistributions):
        p_NE, ids_Nk = p.bucketed().exp(), p.ids.long()
        q_x_N = q_NV.gather(1, labels_N[:, None])[:, 0]
        q_tail_N1 = q_NV.scatter(1, ids_Nk, 0.0).sum(-1, keepdim=True)
        a_N = (q_x_N / p.log_p_of_text.exp().clamp(min=torch.finfo(q_NV.dtype).tiny)).clamp(max=1.0)
        overlap_N = overlap(p_NE, torch.cat([q_NV.gather(1, ids_Nk), q_tail_N1], dim=1))
        greedy_N = (p_NE[:, :-1] * (ids_Nk == guess_N1)).sum(-1)
        agree_N = (ids_Nk[:, :1] == guess_N1)[:, 0]
    else:
        p_NV = sampler.probabilities(p, [])
        a_N, overlap_N = acceptance_probabilities(p_NV, q_NV, labels_N), overlap(p_NV, q_NV)
        greedy_N = p_NV.gather(1, guess_N1)[:, 0]
        agree_N = p.argmax(-1) == guess_N1[:, 0]
    return torch.stack([a_N, overlap_N, greedy_N, agree_N.to(q_NV.dtype)], dim=1)


def replay_sums(features_BTK: Tensor, inside_BT: Tensor, draft_length: int) -> Tensor:
    """Return sums over each sample's completion, (B, 5) float32: tokens, expected rounds, the last three features.

    `features_BTK` holds those of `replay_features`, with any values outside of the completions. `inside_BT` marks the
    completions' tokens; those of a sample count as one text.
    """
    # Completions begin at different columns: shift each to the left, so that the chain starts at its first token.
    order_BT = torch.argsort(~inside_BT, dim=1, stable=True)
    lengths_B = inside_BT.sum(1)
    a_BT = torch.where(inside_BT, features_BTK[..., 0], 0.0).gather(1, order_BT)
    rounds_B = expected_rounds(a_BT, lengths_B, draft_length)
    sums_B3 = torch.where(inside_BT[..., None], features_BTK[..., 1:], 0.0).sum(1)
    return torch.cat([lengths_B[:, None], rounds_B[:, None], sums_B3], dim=1).float()


def acceptance_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """Turn gathered sums, (samples, 6): those of `replay_sums` and the loss, into ratios over tokens."""
    sums = dict(zip(COLUMNS, np.asarray(prediction.predictions, dtype=np.float64).sum(0), strict=True))
    return {
        "loss": float(sums["loss"] / sums["tokens"]),
        "alpha": float(sums["overlap"] / sums["tokens"]),  # 1 − TV(p, q)
        "greedy_alpha": float(sums["greedy_overlap"] / sums["tokens"]),  # of argmax drafts, vLLM's default
        "agreement": float(sums["agreement"] / sums["tokens"]),  # equal argmaxes, after contexts that may be sampled
        "mean_acceptance_length": float(sums["tokens"] / sums["rounds"]),  # τ at the configured draft length
    }
