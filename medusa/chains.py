"""Heads that draft chains: the positions where each head learns, and the metrics of evaluations.

Heads guess K tokens from each position. Guess i is learned where all of the tokens guessed before it are known.
Shape suffixes: B rows, T positions, N chosen positions, K guesses or features of a position, H hidden.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from transformers import EvalPrediction, PreTrainedModel

PER_GUESS = ("count", "overlap", "right")


class HeadPositions(Protocol):
    """The guesses of a batch that the loss is computed on: labels, (N,), and for each head weights, (N,) float32."""

    labels: Tensor
    weights: list[Tensor]

    def teacher(self, hidden: Tensor) -> Tensor:
        """Return the inputs of the teacher's head, (N, H), from hidden states, (B, T, H)."""


class ChainPositions:
    """The positions c of a batch where heads learn: the teacher predicts token c + 1, as does head i from c − 1 − i.

    All positions are head 0's. Head i learns where the tokens c − i … c + 1 all belong to one completion, because heads
    draft after a token that the target has just written, which is c − i. So all heads share one p.
    """

    def __init__(self, inputs: dict[str, Any], count: int):
        # A text's first token has no label, so no window reaches into the next text of a packed row.
        # `positions[i]` lists the positions whose next i + 1 tokens are all to predict.
        windows: Sequence[Tensor] = inputs["positions"][1 : 1 + count]
        self.ids_N: Tensor = inputs["input_ids"].flatten()
        """The whole batch, flattened."""
        self.flat = windows[0] + 1
        """c in the flattened batch, (N,)."""
        self.labels = self.ids_N[self.flat + 1]
        self.weights = [torch.zeros(len(self.flat), device=self.flat.device) for _ in windows]
        """For each head 1 where it learns and 0 elsewhere, (N,) float32."""
        for index, (starts, weights_N) in enumerate(zip(windows, self.weights, strict=True)):
            weights_N[torch.searchsorted(self.flat, starts + index + 1)] = 1.0

    def head_inputs(self, index: int, hidden: Tensor, heads: PreTrainedModel) -> Tensor:
        """Return a head's inputs, (N, H), from hidden states (B, T, H); undefined where the head does not learn."""
        return hidden.flatten(0, 1).index_select(0, (self.flat - 1 - index).clamp(min=0)).to(heads.dtype)

    def teacher(self, hidden: Tensor) -> Tensor:
        """Return the inputs of the teacher's head, (N, H)."""
        return hidden.flatten(0, 1).index_select(0, self.flat)

    def embeddings(self, index: int, embed: nn.Module, heads: PreTrainedModel) -> Tensor | None:
        """Return the embeddings of the index + 1 tokens up to c, (N, index + 1, H), for Hydra heads; else None."""
        if not heads.config.hydra:
            return None
        positions = torch.stack([(self.flat - index + j).clamp(min=0) for j in range(index + 1)], dim=1)
        with torch.no_grad():
            tokens = self.ids_N[positions]
            return embed(tokens.to(next(embed.parameters()).device)).to(tokens.device, heads.dtype)

    def table(self, index: int, features_NK: Tensor, shape: tuple[int, int]) -> Tensor:
        """Return a head's features and, last, weights by their rounds, (B, T, K + 1); zeros where it does not learn."""
        table = features_NK.new_zeros(*shape, features_NK.shape[1] + 1, dtype=torch.float32)
        learns = self.weights[index].bool()[:, None]
        ones = features_NK.new_ones(len(features_NK), 1)
        values = torch.cat([features_NK, ones], dim=1).float().where(learns, 0.0)
        # The round whose first draft is token s = c + 1 − i sees the state of token s − 2; its entries are at s − 1.
        table.flatten(0, 1).index_add_(0, (self.flat - index).clamp(min=0), values)
        return table


def chain_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """Turn gathered sums, (samples, 3 + 3K), into ratios over tokens; `loss` is the heads' objective."""
    sums = np.asarray(prediction.predictions, dtype=np.float64).sum(0)
    tokens, rounds, loss = sums[:3]
    heads = sums[3:].reshape(-1, len(PER_GUESS))
    metrics = {"mean_acceptance_length": float(tokens / rounds), "loss": float(loss / tokens)}
    for index, (count, overlap, right) in enumerate(heads, 1):
        metrics[f"accuracy_{index}"] = float(right / max(count, 1))
        metrics[f"alpha_{index}"] = float(overlap / max(count, 1))
    metrics["alpha"] = metrics["alpha_1"]
    return metrics
