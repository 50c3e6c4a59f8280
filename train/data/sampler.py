"""The order in which rows are read, which the seed and the epoch alone decide."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch.utils.data import Sampler
from transformers.trainer_pt_utils import get_length_grouped_indices

from draftsmith.train.data.examples import TrainingData


class EpochSampler(Sampler[int]):
    """The rows of an epoch: of each directory as many as its weight says, shuffled or with similar lengths together.

    A weight of 1 takes each row of a directory once, 0.3 takes a random 30 % of them, others each epoch, and 2.5 each
    twice and a random half a third time.

    The library's samplers draw from the global generator. So a run that is resumed in a later epoch goes on in another
    order, and processes whose generators have come apart (dropout) see some rows twice and others never.
    """

    def __init__(
        self, data: TrainingData, seed: int, group_size: int | None = None, weights: Sequence[float] = ()
    ) -> None:
        """Take an order.

        Args:
            data: the rows.
            seed: of the order, and of what is drawn.
            group_size: rows of a step, which have similar lengths then; None for none.
            weights: of the directories; 1 each if there are none.
        """
        self.lengths, self.seed, self.group_size, self.epoch = data.lengths, seed, group_size, 0
        sources = data.source_of_rows if weights else np.zeros(len(data), np.int64)
        self._parts = [(np.flatnonzero(sources == number), weight) for number, weight in enumerate(weights or [1.0])]

    def __len__(self) -> int:
        return sum(len(rows) * int(weight) + _extra(rows, weight) for rows, weight in self._parts)

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch is read next."""
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
    """Return how many rows are drawn at random, beside those that are taken whole."""
    return round((weight - int(weight)) * len(rows))
