"""Packing: whole samples one behind the other in rows of a bounded length, each as if it were alone.

A packed batch has `position_ids` that restart with each sample, and no attention mask. Where both hold and there is no
cache, transformers keeps a token from looking beyond its sample (`masking_utils.find_packed_sequence_indices`), for
the attention implementations that take a mask, of T² entries a row under sdpa, of blocks under flex attention. Flash
attention takes none: it is told where samples begin and end (`collator.text_bounds`), and its work is that of the
samples alone.
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
from draftsmith.train.data.collator import text_bounds
from draftsmith.train.data.examples import TrainingData
from draftsmith.train.losses.output_head import last_hidden
from draftsmith.train.models import takes_bounds


@phase("packing")
def pack(data: TrainingData, length: int, by_source: bool = False) -> TrainingData:
    """Put samples together in as few rows as best-fit decreasing finds; the same rows every time.

    No token is read for it.

    Args:
        data: rows of single samples.
        length: tokens of a row, at most.
        by_source: put samples together only with others of their directory.

    Raises:
        InputError: a sample is longer than `length`; names it.
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

    It needs at most 11/9 of the fewest possible bins, and four (Johnson et al. 1974, Worst-case performance bounds for
    simple one-dimensional packing algorithms). For training rows: Ding et al. 2024 (arXiv 2404.10830). Items of
    one size go together into bins with one space left: there are far fewer sizes and spaces than items.

    Args:
        sizes: of the items, each at most `capacity`.
        capacity: of a bin.

    Returns:
        The items' numbers, bin by bin; and how many each bin has.
    """
    items = np.asarray(sizes, dtype=np.int64)
    descending = np.argsort(-items, kind="stable")
    bin_of = np.empty(len(items), np.int64)  # of the items in that order
    spaces: list[int] = []  # those that some open bin has left, ascending
    having: dict[int, list[int]] = defaultdict(list)  # the bins that have this much space left
    at = bins = 0
    for size, count in zip(*(each[::-1].tolist() for each in np.unique(items, return_counts=True)), strict=True):
        end = at + count
        while at < end:
            place, space = bisect_left(spaces, size), capacity
            if place < len(spaces):
                space = spaces[place]
            fitting = space // size  # items of a bin
            wanted = -(-(end - at) // fitting)
            if place < len(spaces):
                chosen = having[space][: -wanted - 1 : -1]
                del having[space][-wanted:]
                if not having[space]:
                    del spaces[place]
            else:
                chosen = list(range(bins, bins + wanted))
                bins += wanted
            filled = min(len(chosen) * fitting, end - at)
            bin_of[at : at + filled] = np.repeat(chosen, fitting)[:filled]
            at += filled
            last = filled - (len(chosen) - 1) * fitting  # the last bin may have fewer
            for left, those in ((space - fitting * size, chosen[:-1]), (space - last * size, chosen[-1:])):
                if left and those:
                    if not having[left]:
                        insort(spaces, left)
                    having[left] += those
    return descending[np.argsort(bin_of, kind="stable")], np.bincount(bin_of, minlength=bins)


@torch.no_grad()
def require_packing(model: PreTrainedModel, field: str, rows: int = 2) -> None:
    """Require that samples of a packed batch have the hidden states that each has alone, by trying it.

    Args:
        model: on the device and with the attention that it will be trained with.
        field: the config field that named it.
        rows: of a batch. From two on, the second is a sample and padding.

    Raises:
        InputError: the samples of a packed batch would see each other; names the field.
    """
    training, alike = model.training, False
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
        if takes_bounds(model):
            batch |= text_bounds(position_ids)
        packed = last_hidden(model, **send_to_device(batch, model.device))
        # The same numbers in other shapes; half precision rounds their order.
        tolerance = 1e-4 if packed.dtype in (torch.float32, torch.float64) else 0.05
        close = []
        for sample, hidden in [(a, packed[0, :5]), (b, packed[0, 5:]), *((b, row[:7]) for row in packed[1:])]:
            alone = sample[None].to(model.device)
            expected = last_hidden(model, input_ids=alone)[0]
            close.append(bool((hidden - expected).norm() <= tolerance * expected.norm()))
        alike = all(close)
    except (AttributeError, TypeError):
        pass
    finally:
        model.train(training)
    if not alike:
        attention = model.config.get_text_config()._attn_implementation
        raise InputError(
            f"{field}: packs samples only where they can be told apart by their positions, found "
            f"{type(model).__name__} with {attention} attention, {rows} rows a batch; set packing false"
        )
