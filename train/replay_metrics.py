"""Acceptance during training, by replay on held-out completions: what a checkpoint is selected on.

The validation loss can fall while acceptance falls, so it is never the criterion. Each sample yields sums; processes
gather the sums, and ratios are taken at the end.
"""

import numpy as np
import torch
from torch import Tensor
from transformers import EvalPrediction

from draftsmith.decode.replay.rounds import acceptance_probabilities, expected_rounds, overlap
from draftsmith.decode.sampling import Sampler
from draftsmith.train.teacher.distributions import CachedDistributions

COLUMNS = ("tokens", "rounds", "overlap", "greedy_overlap", "agreement", "loss")


def replay_features(p: Tensor | CachedDistributions, q_logits: Tensor, labels: Tensor, sampler: Sampler) -> Tensor:
    """Return what a position has to say of acceptance.

    Args:
        p: the target's logits of the next token, (N, V), or its cached laws under the same warping. With these the
            second feature is an upper bound, exceeded by at most min(p_tail, q_tail), and the third a lower bound,
            which takes 0 for tokens of the tail, each less probable than the k-th; the others are exact.
        q_logits: the draft's, (N, V).
        labels: the next tokens, (N,), written by the target under the law.
        sampler: the deployment's warping, a context-free one.

    Returns:
        (N, 4) float32: min(1, q(x)/p(x)); Σ_v min(p, q); p(argmax q), which a verifier of greedy drafts accepts; and
        whether the argmaxes are equal.
    """
    q, guess = sampler.probabilities(q_logits, []), q_logits.argmax(-1, keepdim=True)
    if isinstance(p, CachedDistributions):
        known, ids, x = p.bucketed().exp(), p.ids.long(), labels[:, None]
        q_tail = q.scatter(1, ids, 0.0).sum(-1, keepdim=True)
        a = (q.gather(1, x)[:, 0] / p.log_p_of_text.exp().clamp(min=torch.finfo(q.dtype).tiny)).clamp(max=1.0)
        bucketed = overlap(known, torch.cat([q.gather(1, ids), q_tail], dim=1))
        greedy, agree = (known[:, :-1] * (ids == guess)).sum(-1), ids[:, :1] == guess
        return torch.stack([a, bucketed, greedy, agree[:, 0].to(q.dtype)], dim=1)
    distributions = sampler.probabilities(p, [])
    return torch.stack(
        [
            acceptance_probabilities(distributions, q, labels),
            overlap(distributions, q),
            distributions.gather(1, guess)[:, 0],
            (p.argmax(-1) == guess[:, 0]).to(distributions.dtype),
        ],
        dim=1,
    )


def replay_sums(features: Tensor, inside: Tensor, draft_length: int) -> Tensor:
    """Return each sample's sums over its completion.

    Args:
        features: of `replay_features`, (B, T, 4); anything outside the completions.
        inside: (B, T) bool, the completions' tokens. Those of a sample are taken to be one text.
        draft_length: γ of the replayed rounds.

    Returns:
        (B, 5) float32: completion tokens, expected rounds, and the sums of the last three features.
    """
    # Completions begin at different columns: shift each to the left, so that the chain starts at its first token.
    order = torch.argsort(~inside, dim=1, stable=True)
    lengths = inside.sum(1)
    a = torch.where(inside, features[..., 0], 0.0).gather(1, order)[:, : int(lengths.max())]
    rounds = expected_rounds(a, lengths, draft_length)
    sums = torch.where(inside[..., None], features[..., 1:], 0.0).sum(1)
    return torch.cat([lengths[:, None], rounds[:, None], sums], dim=1).float()


def acceptance_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """Turn gathered sums, (samples, 6): those of `replay_sums` and the loss, into ratios over tokens.

    Returns:
        `loss`, the mean over tokens; `alpha` = 1 − TV(p, q); `greedy_alpha`, the acceptance of argmax drafts (vLLM's
        default); `agreement`, the share of contexts with equal argmax (on these contexts, which need not be greedy
        ones); `mean_acceptance_length`, τ at the configured draft length.
    """
    sums = dict(zip(COLUMNS, np.asarray(prediction.predictions, dtype=np.float64).sum(0), strict=True))
    return {
        "loss": float(sums["loss"] / sums["tokens"]),
        "alpha": float(sums["overlap"] / sums["tokens"]),
        "greedy_alpha": float(sums["greedy_overlap"] / sums["tokens"]),
        "agreement": float(sums["agreement"] / sums["tokens"]),
        "mean_acceptance_length": float(sums["tokens"] / sums["rounds"]),
    }
