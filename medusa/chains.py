"""Heads that draft chains: the places where each head learns, and what evaluations say of chains.

Heads guess K tokens from each place. Guess i is learned at the places where all that was guessed before it is known.
Shape suffixes: B rows, T positions, N chosen positions, K guesses or features of a position, H hidden.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from transformers import EvalPrediction, PreTrainedModel

PER_GUESS = ("count", "overlap", "right")


class LossPlaces(Protocol):
    """The guesses of a batch, of which a loss is taken."""

    labels: Tensor
    """(N,)."""
    weights: list[Tensor]
    """Of each head, how much each guess counts, (N,) float32."""

    def teacher(self, hidden: Tensor) -> Tensor:
        """Return what the teacher's head sees, (N, H), of hidden states, (B, T, H)."""


class ChainPlaces:
    """Where heads learn: places c. There the teacher predicts the token c + 1, and head i from the state at c − 1 − i.

    All places are head 0's. Head i learns at those where the tokens c − i … c + 1 are all a completion's, one text:
    heads draft after a token that the target has just written, which is c − i. A text's first token has no label, so
    that no window reaches into the next text of a packed row. So all heads have one p.
    """

    def __init__(self, inputs: dict[str, Any], count: int):
        self.ids_N: Tensor = inputs["input_ids"].flatten()
        """Of the flattened batch."""
        windows: Sequence[Tensor] = inputs["positions"][1 : 1 + count]
        self.flat = windows[0] + 1
        """(N,): c, in the flattened batch."""
        self.labels = self.ids_N[self.flat + 1]
        """(N,)."""
        self.weights = [torch.zeros(len(self.flat), device=self.flat.device) for _ in windows]
        """Of each head, (N,) float32: 1 where it learns, and 0 elsewhere."""
        for index, (starts, weights_N) in enumerate(zip(windows, self.weights, strict=True)):
            weights_N[torch.searchsorted(self.flat, starts + index + 1)] = 1.0

    def before(self, index: int, hidden: Tensor, heads: PreTrainedModel) -> Tensor:
        """Return what a head sees of hidden states (B, T, H), in the heads' precision, (N, H).

        It is undefined where the head does not learn.
        """
        return hidden.flatten(0, 1).index_select(0, (self.flat - 1 - index).clamp(min=0)).to(heads.dtype)

    def teacher(self, hidden: Tensor) -> Tensor:
        """Return what the teacher's head sees, (N, H)."""
        return hidden.flatten(0, 1).index_select(0, self.flat)

    def embeddings(self, index: int, embed: nn.Module, heads: PreTrainedModel) -> Tensor | None:
        """Return the embeddings of the index + 1 tokens up to c, constants, (N, index + 1, H); None of Medusa heads."""
        if not heads.config.hydra:
            return None
        places = torch.stack([(self.flat - index + j).clamp(min=0) for j in range(index + 1)], dim=1)
        with torch.no_grad():
            seen = self.ids_N[places]
            return embed(seen.to(next(embed.parameters()).device)).to(seen.device, heads.dtype)

    def table(self, index: int, features_NK: Tensor, shape: tuple[int, int]) -> Tensor:
        """Return features of a head's guesses by the round that they belong to, and behind them its weights.

        The round that begins with a token drafts from the state of the token two before it.

        Args:
            index: of the head.
            features_NK: of its guesses at the places.
            shape: B and T of the batch.

        Returns:
            (B, T, K + 1), zeros where the head does not learn.
        """
        table = features_NK.new_zeros(*shape, features_NK.shape[1] + 1, dtype=torch.float32)
        learns = self.weights[index].bool()[:, None]
        ones = features_NK.new_ones(len(features_NK), 1)
        values = torch.cat([features_NK, ones], dim=1).float().where(learns, 0.0)
        table.flatten(0, 1).index_add_(0, (self.flat - index).clamp(min=0), values)
        return table


def chain_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """Turn gathered sums, (samples, 3 + 3K), into ratios over tokens; `loss` is what the heads minimise."""
    sums = np.asarray(prediction.predictions, dtype=np.float64).sum(0)
    tokens, rounds, loss = sums[:3]
    heads = sums[3:].reshape(-1, len(PER_GUESS))
    metrics = {"mean_acceptance_length": float(tokens / rounds), "loss": float(loss / tokens)}
    for index, (count, overlap, right) in enumerate(heads, 1):
        metrics[f"accuracy_{index}"] = float(right / max(count, 1))
        metrics[f"alpha_{index}"] = float(overlap / max(count, 1))
    metrics["alpha"] = metrics["alpha_1"]
    return metrics
