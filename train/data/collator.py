"""Batches of target completions."""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.trainer_pt_utils import LengthGroupedSampler, get_length_grouped_indices
from transformers.utils import logging

from draftsmith.decode.errors import InputError
from draftsmith.train.data.generate import load_completions
from draftsmith.train.losses.positions import LossPositions

IGNORED = -100
logger = logging.get_logger(__name__)


def training_examples(paths: list[str], max_length: int | None = None, vocab_size: int | None = None) -> Dataset:
    """Read completions that `draftsmith prepare` wrote, as `id`, `input_ids` and `labels`.

    Labels are the tokens themselves where the loss mask is 1, and −100 on the prompt. Samples without a single loss
    token are left out, counted and named. `index` numbers the rows of what is returned, and with several directories
    `source` says which of them a row is from.

    Args:
        paths: completion directories.
        max_length: cut longer samples at the end.
        vocab_size: what the ids of tokens must be below; not looked at if None.

    Raises:
        InputError: a directory is missing or malformed, or no sample has a loss token.
    """
    parts = []
    for path in paths:
        samples = load_completions(path, vocab_size).data.table
        labelled = pa.Table.from_batches([_labelled(batch, max_length) for batch in samples.to_batches()])
        empty = labelled.filter(pc.invert(labelled["trains"]))["id"]
        listed = f"{', '.join(empty[:5].to_pylist())}{', …' if len(empty) > 5 else ''}"
        if len(empty) == len(samples):
            raise InputError(
                f"completions: expected tokens to train on, found an empty loss mask in all {len(empty)} samples of "
                f"{path}: {listed}"
            )
        if len(empty):
            logger.warning(
                f"{path}: {len(empty)} of {len(samples)} samples have no token to learn from and are left out: {listed}"
            )
        part = labelled.filter(labelled["trains"]).drop_columns("trains")
        # An id is of one sample in its directory alone: most are numbers of lines.
        parts.append(part.append_column("source", [[path] * len(part)]) if len(paths) > 1 else part)
    return numbered(Dataset(pa.concat_tables(parts)))


def _labelled(samples: pa.RecordBatch, max_length: int | None) -> pa.RecordBatch:
    """Return the samples' `id`, `input_ids` and `labels`, and in `trains` whether any label is a token."""
    ids, mask = samples["input_ids"], samples["loss_mask"]
    if max_length is not None:
        ids, mask = (pc.list_slice(column, 0, max_length) for column in (ids, mask))
    ends = np.append(0, pc.list_value_length(ids).to_numpy()).cumsum()
    counted = mask.flatten().to_numpy(zero_copy_only=False) != 0
    tokens = ids.flatten().to_numpy()
    labels = pa.ListArray.from_arrays(pa.array(ends, pa.int32()), np.where(counted, tokens, IGNORED))
    trains = np.diff(np.append(0, counted.cumsum())[ends]) > 0
    columns = [samples["id"], ids, labels, pa.array(trains)]
    return pa.RecordBatch.from_arrays(columns, ["id", "input_ids", "labels", "trains"])


def numbered(dataset: Dataset) -> Dataset:
    """Add the column `index`, a row's number. Batches carry it: a tensor survives what names would not.

    accelerate slices, concatenates and gathers tensors over processes, and fails on strings there.
    """
    return dataset.add_column("index", np.arange(len(dataset)))  # type: ignore[call-arg]


def sample_ids(dataset: Dataset, index: Sequence[int]) -> list[str]:
    """Return the ids of the samples in some rows of a data set, of `training_examples` or packed.

    Where they come from several directories, each has its directory before it.
    """
    rows = dataset.select(index)

    def of_each(column: str) -> list[str]:
        if f"{column}s" in rows.column_names:  # packed
            return list(chain.from_iterable(rows[f"{column}s"]))
        return list(rows[column]) if column in rows.column_names else []

    ids, sources = of_each("id"), of_each("source")
    return [f"{source}: {name}" for source, name in zip(sources, ids, strict=True)] if sources else ids


class GroupedByLength(LengthGroupedSampler):
    """Rows of similar length one behind the other, in an order that the seed and the epoch alone decide.

    The library's sampler draws from the global generator. So a run that is resumed in a later epoch goes on in
    another order, and processes whose generators have come apart (dropout) see some rows twice and others never.
    """

    def __init__(self, dataset: Dataset, batch_size: int, seed: int):
        super().__init__(batch_size, lengths=[len(ids) for ids in dataset["input_ids"]])
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch is read next."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return iter(get_length_grouped_indices(self.lengths, self.batch_size, generator=generator))


class CompletionCollator:
    """Pads samples, or packed rows of samples, on the right.

    Returns batches of `input_ids` and `labels`, each (B, T) int64; −100 labels carry no loss, padding has no others.
    There is no mask: causal attention does not see what stands behind a text. Packed rows have `position_ids`, (B, T),
    by which attention tells their samples apart. Each padding token is a text of its own there, at position 0. `index`
    is (B,) int64, the rows' numbers in their data set, where they have one.

    `positions` are where a loss is taken, `LossPositions.flat_N`: first those before a label, then those whose next two
    tokens have one, and so on.

    Args:
        tokenizer: its padding token pads.
        ahead: how many tokens behind the next one the last of `positions` looks.
        prompts: add `text_positions`, those before any token of a text but its first.
        bounds: tell texts apart for attention kernels that take no mask (flash attention), which else look for packed
            ones in every layer: adds `cu_seq_lens_q` and `cu_seq_lens_k`, where texts begin and end in the flattened
            batch, int32, and `max_length_q` and `max_length_k`, the tokens of the longest.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, ahead: int = 0, prompts: bool = False, bounds: bool = False):
        self.tokenizer, self.ahead, self.prompts, self.bounds = tokenizer, ahead, prompts, bounds

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        """Collate samples of `input_ids` and `labels`, and of `position_ids` if they are packed."""
        batch = self.tokenizer.pad(
            {"input_ids": [s["input_ids"] for s in samples]}, padding_side="right", return_tensors="pt"
        )
        input_ids = batch["input_ids"]

        def padded(name: str, value: int) -> torch.Tensor:
            out = input_ids.new_full(input_ids.shape, value)
            for row, sample in zip(out, samples, strict=True):
                row[: len(sample[name])] = row.new_tensor(sample[name])
            return out

        out = {"input_ids": input_ids, "labels": padded("labels", IGNORED)}
        inside_BT = batch["attention_mask"].bool()
        inside_BT[:, 0] = False  # a first token is predicted from nothing
        if "position_ids" in samples[0]:
            out["position_ids"] = padded("position_ids", 0)
            inside_BT = out["position_ids"] > 0
        if self.bounds:
            out |= text_bounds(out.get("position_ids", torch.arange(input_ids.shape[1]).expand_as(input_ids)))
        if "index" in samples[0]:
            out["index"] = torch.tensor([sample["index"] for sample in samples])
        out["positions"] = ahead_positions(out["labels"] != IGNORED, self.ahead)
        if self.prompts:
            out["text_positions"] = ahead_positions(inside_BT, self.ahead)
        return out


def ahead_positions(predicted_BT: Tensor, ahead: int) -> tuple[Tensor, ...]:
    """Return `LossPositions.flat_N` of tokens to predict, then of windows of two such tokens, … up to 1 + `ahead`."""
    further_BT = torch.nn.functional.pad(predicted_BT, (0, ahead))
    windows = [predicted_BT]
    for offset in range(1, ahead + 1):
        windows.append(windows[-1] & further_BT[:, offset : offset + predicted_BT.shape[1]])
    return tuple(LossPositions.before(each).flat_N for each in windows)


def text_bounds(position_ids: Tensor) -> dict[str, Any]:
    """Return what flash attention is told of a batch, (B, T): where texts, at position 0, begin and end."""
    starts = (position_ids.flatten() == 0).nonzero()[:, 0]
    bounds = torch.cat([starts, starts.new_tensor([position_ids.numel()])]).int()
    longest = int(bounds.diff().max())
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}
