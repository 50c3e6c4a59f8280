"""The order in which rows are read, decided by the seed and the epoch alone."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch.utils.data import Sampler
from transformers.trainer_pt_utils import get_length_grouped_indices

from draftsmith.train.data.examples import TrainingData


class EpochSampler(Sampler[int]):
    """The rows of an epoch, shuffled, or grouped by length in groups of `group_size`, a step's rows.

    Each directory has a weight: 1 takes each of its rows once; 0.3 takes a random 30 %, others in each epoch; 2.5 takes
    each twice and a random half a third time. Without weights, all are 1.

    The library's samplers draw from the global generator. A run resumed in a later epoch would then change its order,
    and processes whose generators differ (dropout) would see some rows twice and others never.
    """

    def __init__(
        self, data: TrainingData, seed: int, group_size: int | None = None, weights: Sequence[float] = ()
    ) -> None:
        self.lengths, self.seed, self.group_size, self.epoch = data.lengths, seed, group_size, 0
        sources = data.source_of_rows if weights else np.zeros(len(data), np.int64)
        self._parts = [(np.flatnonzero(sources == number), weight) for number, weight in enumerate(weights or [1.0])]

    def __len__(self) -> int:
        return sum(len(rows) * int(weight) + _extra(rows, weight) for rows, weight in self._parts)

    def set_epoch(self, epoch: int) -> None:
        """Set the next epoch to read."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        drawn = []
        for rows, weight in self._parts:
            drawn.append(np.tile(rows, int(weight)))
            if extra := _extra(rows, weight):
                drawn.append(rows[torch.randperm(len(rows), generator=generator)[:extra].numpy()])
        rows = np.concatenate(drawn)
        if self.group_size is None:
            order = torch.randperm(len(rows), generator=generator).tolist()
        else:
            order = get_length_grouped_indices(self.lengths[rows].tolist(), self.group_size, generator=generator)
        return iter(rows[order].tolist())


def _extra(rows: np.ndarray, weight: float) -> int:
    """Return the number of rows drawn at random, in addition to whole passes over them."""
    return round((weight - int(weight)) * len(rows))
