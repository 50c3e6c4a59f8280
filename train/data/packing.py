"""Packing: whole samples in rows of a bounded length, each treated as if it were alone.

A packed batch has `position_ids` that restart with each sample, and no attention mask. With both and without a cache,
transformers keeps a token from attending beyond its sample (`masking_utils.find_packed_sequence_indices`), by a mask of
T² entries per row under sdpa, and of blocks under flex attention. Flash attention takes no mask: it gets the bounds of
the samples (`examples.text_bounds`), and does only their work.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from accelerate.utils import send_to_device
from transformers import PreTrainedModel

from draftsmith.decode.errors import InputError
from draftsmith.decode.progress import phase
from draftsmith.train.data.examples import TrainingData, text_bounds
from draftsmith.train.losses.output_head import last_hidden
from draftsmith.train.models import wants_bounds


@phase("packing")
def pack(data: TrainingData, length: int, by_source: bool = False) -> TrainingData:
    """Pack samples into as few rows of at most `length` tokens as best-fit decreasing finds; deterministic.

    Only sizes are read, no tokens. With `by_source`, a row holds samples of one directory.
    """
    if len(too_long := np.flatnonzero(data.sizes > length)):
        row = int(too_long[0])
        raise InputError(
            f"packing: expected samples of at most {length} tokens, found {data.sizes[row]} in sample "
            f"{data.sample_ids([row])[0]!r}"
        )
    sources = data.source_of_rows if by_source else np.zeros(len(data), np.int64)
    orders, counts = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for source in np.unique(sources):
        rows = np.flatnonzero(sources == source)
        order, count = best_fit_decreasing(data.sizes[rows], length)
        orders.append(rows[order])
        counts.append(count)
    count = np.concatenate(counts)
    return replace(data, members=data.members[np.concatenate(orders)], starts=count.cumsum() - count)


def best_fit_decreasing(sizes: Sequence[int] | np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Assign items to bins, the largest first, each to the fullest bin that has room for it.

    Return the item numbers bin by bin, and the number of items in each bin. The bins are at most 11/9 of the fewest
    possible, plus four (Johnson et al. 1974, Worst-case performance bounds for simple one-dimensional packing
    algorithms). Ding et al. 2024 (arXiv 2404.10830) pack training rows this way.
    """
    items = np.asarray(sizes, dtype=np.int64)
    descending = np.argsort(-items, kind="stable")
    bin_of = np.empty(len(items), np.int64)  # the bin of each item, in descending order
    spaces: list[int] = []  # the different spaces left in open bins, ascending
    bins_with: dict[int, list[int]] = defaultdict(list)  # the bins with a space left
    at = bins = 0
    # All items of one size go at once into bins with one space: there are far fewer sizes and spaces than items.
    for size, count in zip(*(array[::-1].tolist() for array in np.unique(items, return_counts=True)), strict=True):
        end = at + count
        while at < end:
            index, space = bisect_left(spaces, size), capacity  # the least space that is large enough, or a new bin
            if index < len(spaces):
                space = spaces[index]
            fitting = space // size  # items per bin
            needed = -(-(end - at) // fitting)
            if index < len(spaces):
                chosen = bins_with[space][: -needed - 1 : -1]
                del bins_with[space][-needed:]
                if not bins_with[space]:
                    del spaces[index]
            else:
                chosen = list(range(bins, bins + needed))
                bins += needed
            filled = min(len(chosen) * fitting, end - at)
            bin_of[at : at + filled] = np.repeat(chosen, fitting)[:filled]
            at += filled
            last = filled - (len(chosen) - 1) * fitting  # the last bin may hold fewer
            for rest, refilled in ((space - fitting * size, chosen[:-1]), (space - last * size, chosen[-1:])):
                if rest and refilled:
                    if not bins_with[rest]:
                        insort(spaces, rest)
                    bins_with[rest] += refilled
    return descending[np.argsort(bin_of, kind="stable")], np.bincount(bin_of, minlength=bins)


@torch.no_grad()
def require_packing(model: PreTrainedModel, field: str, rows: int = 2) -> None:
    """Require that samples in a packed batch of `rows` rows get the same hidden states as alone, by a short forward.

    The model must be on the device and have the attention of the training. From two rows on, the second one is a sample
    and padding.
    """
    training, matches = model.training, False
    model.eval()
    try:
        generator = torch.Generator().manual_seed(0)
        vocab_size: int = model.config.get_text_config().vocab_size
        a, b = (torch.randint(vocab_size, (n,), generator=generator) for n in (5, 7))
        zeros = torch.zeros(5, dtype=torch.long)
        ids = torch.stack([torch.cat([a, b]), torch.cat([b, a])])
        position_ids = torch.stack([torch.cat([torch.arange(5), torch.arange(7)]), torch.cat([torch.arange(7), zeros])])
        position_ids = position_ids[:rows]
        batch = {"input_ids": ids[:rows], "position_ids": position_ids}
        if wants_bounds(model):
            batch |= text_bounds(position_ids)
        packed = last_hidden(model, **send_to_device(batch, model.device))
        # The same numbers in other shapes, but half precision rounds differently in another order.
        tolerance = 1e-4 if packed.dtype in (torch.float32, torch.float64) else 0.05
        close = []
        for sample, hidden in [(a, packed[0, :5]), (b, packed[0, 5:]), *((b, row[:7]) for row in packed[1:])]:
            alone = sample[None].to(model.device)
            expected = last_hidden(model, input_ids=alone)[0]
            close.append(bool((hidden - expected).norm() <= tolerance * expected.norm()))
        matches = all(close)
    except (AttributeError, TypeError):
        pass
    finally:
        model.train(training)
    if not matches:
        attention = model.config.get_text_config()._attn_implementation
        raise InputError(
            f"{field}: packs samples only where they can be told apart by their positions, found "
            f"{type(model).__name__} with {attention} attention, {rows} rows a batch; set packing false"
        )
