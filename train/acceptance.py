"""Acceptance during training, by replay on held-out completions: what a checkpoint is selected on.

The validation loss can fall while acceptance falls, so it is never the criterion. Each sample yields sums; processes
gather the sums, and ratios are taken at the end.
"""

import numpy as np
import torch
from torch import Tensor
from transformers import EvalPrediction

from draftsmith.decode.replay import acceptance_probabilities, expected_rounds, overlap

COLUMNS = ("tokens", "overlap", "agreement", "rounds", "loss")


def replay_statistics(
    p_logits: Tensor, q_logits: Tensor, labels: Tensor, temperature: float, draft_length: int
) -> Tensor:
    """Return a sample's sums over its completion.

    Args:
        p_logits: the target's logits of each next token, (B, T, V).
        q_logits: the draft's, (B, T, V).
        labels: the next tokens, (B, T) int64; −100 outside the completion, which is one contiguous run a row.
        temperature: the deployment's, > 0; completions are taken to be sampled at it.
        draft_length: γ of the replayed rounds.

    Returns:
        (B, 4) float32: completion tokens, Σ of Σ_v min(p, q), Σ of argmax agreement, expected rounds.
    """
    p, q = (logits.float().div(temperature).softmax(-1) for logits in (p_logits, q_logits))
    inside = labels != -100
    a = acceptance_probabilities(p, q, labels.clamp(min=0))
    # Completions begin at different columns: shift each to the left, so that the chain starts at its first token.
    order = torch.argsort(~inside, dim=1, stable=True, descending=False)
    lengths = inside.sum(1)
    rounds = expected_rounds(a.gather(1, order)[:, : int(lengths.max())], lengths, draft_length)
    agreement = (p_logits.argmax(-1) == q_logits.argmax(-1)) & inside
    return torch.stack([lengths, (overlap(p, q) * inside).sum(1), agreement.sum(1), rounds], dim=1).float()


def acceptance_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """Turn gathered sums, (samples, 5): those of `replay_statistics` and the loss, into ratios over tokens.

    Returns:
        `loss`, the mean over tokens; `alpha` = 1 − TV(p, q); `agreement`, the share of contexts with equal argmax (on
        these contexts, which need not be greedy ones); `mean_acceptance_length`, τ at the configured draft length.
    """
    sums = dict(zip(COLUMNS, np.asarray(prediction.predictions, dtype=np.float64).sum(0), strict=True))
    return {
        "loss": float(sums["loss"] / sums["tokens"]),
        "alpha": float(sums["overlap"] / sums["tokens"]),
        "agreement": float(sums["agreement"] / sums["tokens"]),
        "mean_acceptance_length": float(sums["tokens"] / sums["rounds"]),
    }
