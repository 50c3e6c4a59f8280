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

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from accelerate.utils import send_to_device
from datasets import Dataset
from transformers import PreTrainedModel

from draftsmith.decode.errors import InputError
from draftsmith.train.data.collator import IGNORED, numbered, text_bounds
from draftsmith.train.losses.output_head import last_hidden
from draftsmith.train.models import takes_bounds


def pack(dataset: Dataset, length: int) -> Dataset:
    """Put samples together in as few rows as best-fit decreasing finds; the same rows every time.

    Args:
        dataset: of `training_examples`: `id`, `input_ids`, `labels`.
        length: tokens of a row, at most.

    Returns:
        A row for each bin, with its samples' `ids`, and `input_ids`, `labels` and `position_ids`, which restart at 0
        with each sample. A sample's first label is −100: what precedes it in the row is another text. `index` numbers
        the rows.

    Raises:
        InputError: a sample is longer than `length`; names it.
    """
    table: pa.Table = dataset.with_format("arrow")[:]
    sizes = pc.list_value_length(table["input_ids"]).to_pylist()
    for name, size in zip(table["id"].to_pylist(), sizes, strict=True):
        if size > length:
            raise InputError(f"packing: expected samples of at most {length} tokens, found {size} in sample {name!r}")
    bins = best_fit_decreasing(sizes, length)
    order = [sample for row in bins for sample in row]
    table = table.take(order)
    input_ids, labels = (pc.list_flatten(table[name]).to_numpy() for name in ("input_ids", "labels"))
    position_ids = np.concatenate([np.arange(sizes[sample]) for sample in order])
    labels = np.where(position_ids == 0, IGNORED, labels)
    samples = np.cumsum([0] + [len(row) for row in bins])  # the samples and the tokens that each row begins with
    tokens = np.cumsum([0] + [sum(sizes[sample] for sample in row) for row in bins])

    def rows(values: np.ndarray, offsets: np.ndarray) -> pa.Array:
        return pa.LargeListArray.from_arrays(offsets, values)  # as a data set may have more than 2³¹ tokens

    columns = {"input_ids": input_ids, "labels": labels, "position_ids": position_ids}
    names = [name for name in ("id", "source") if name in table.column_names]
    packed = {f"{name}s": rows(table[name].combine_chunks(), samples) for name in names}
    return numbered(Dataset(pa.table(packed | {name: rows(values, tokens) for name, values in columns.items()})))


def best_fit_decreasing(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Assign items to bins, the largest first, each to the fullest bin that has room for it.

    It needs at most 11/9 of the fewest possible bins, and four (Johnson et al. 1974, Worst-case performance bounds for
    simple one-dimensional packing algorithms). For training rows: Ding et al. 2024 (arXiv 2404.10830).

    Args:
        sizes: of the items, each at most `capacity`.
        capacity: of a bin.

    Returns:
        The items' numbers, bin by bin.
    """
    bins: list[list[int]] = []
    spaces: list[int] = []  # those that some open bin has left, ascending
    having: dict[int, list[int]] = defaultdict(list)  # the bins that have so much space left
    for item in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        at = bisect_left(spaces, sizes[item])
        if at < len(spaces):
            space = spaces[at]
            chosen = having[space].pop()
            if not having[space]:
                del spaces[at]
        else:
            space, chosen = capacity, len(bins)
            bins.append([])
        bins[chosen].append(item)
        left = space - sizes[item]
        if left:
            if not having[left]:
                insort(spaces, left)
            having[left].append(chosen)
    return bins


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
