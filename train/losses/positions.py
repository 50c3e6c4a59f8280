"""The positions of a batch where a loss is taken: those before the tokens to predict.

They are found on the CPU with the batch: on a GPU, every micro-step would wait for the search.
Shape suffixes: B rows, T tokens of a row, N positions.
"""

from dataclasses import dataclass

from torch import Tensor

IGNORED = -100  # the label of a token that is not learned, as in torch's cross entropy


@dataclass(frozen=True)
class LossPositions:
    """N positions of a (B, T) batch, ascending in its flattened form; none is the last of a row."""

    flat_N: Tensor  # int64, row · T + column

    def __len__(self) -> int:
        return len(self.flat_N)

    def take(self, values_BTX: Tensor) -> Tensor:
        """Return a tensor's values at the positions, (B, T, …) → (N, …)."""
        return values_BTX.flatten(0, 1).index_select(0, self.flat_N)

    def next_tokens(self, ids_BT: Tensor) -> Tensor:
        """Return the tokens to predict, (N,)."""
        return ids_BT.flatten().index_select(0, self.flat_N + 1)
