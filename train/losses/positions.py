"""Where a loss is taken: the places of a batch before the tokens to predict.

Found where batches are made, on the CPU: to look for them on a GPU would make every micro-step wait for it.
Shape suffixes: B rows, T tokens of a row, N places.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

IGNORED = -100
"""The label of a token that is not to be learned, as in torch's cross entropy."""


@dataclass(frozen=True)
class LossPositions:
    """N places of a (B, T) batch, ascending in its flattened form, none the last of a row."""

    flat_N: Tensor
    """int64, row · T + column."""

    @classmethod
    def before(cls, predicted_BT: Tensor) -> "LossPositions":
        """Return the places before the tokens that are to be predicted, (B, T) bool; a row's first never is."""
        places_BT = torch.nn.functional.pad(predicted_BT[:, 1:], (0, 1))
        return cls(places_BT.flatten().nonzero()[:, 0])

    def __len__(self) -> int:
        return len(self.flat_N)

    def take(self, values_BTX: Tensor) -> Tensor:
        """Return what a tensor has at the places, (B, T, …) → (N, …)."""
        return values_BTX.flatten(0, 1).index_select(0, self.flat_N)

    def next_tokens(self, ids_BT: Tensor) -> Tensor:
        """Return the tokens to predict, (N,)."""
        return ids_BT.flatten().index_select(0, self.flat_N + 1)

    def follow(self) -> Tensor:
        """Say which places come right after the one before them in their row, (N,) bool."""
        return torch.nn.functional.pad(self.flat_N[1:] == self.flat_N[:-1] + 1, (1, 0))[: len(self)]
