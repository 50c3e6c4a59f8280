"""The samples of a run's completions, for training (cut and packed) and for evaluation, and their batches.

Shape suffixes: B rows, T tokens of a row, N positions.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler
from transformers import PreTrainedTokenizerBase
from transformers.trainer_pt_utils import get_length_grouped_indices
from transformers.utils import logging

from draftsmith.decode.errors import InputError, at_least, at_most
from draftsmith.decode.progress import phase
from draftsmith.train.data.mapped import Texts, map_completions
from draftsmith.train.data.shards import check_samples
from draftsmith.train.job.processes import is_first
from draftsmith.train.losses.positions import IGNORED

logger = logging.get_logger(__name__)


@dataclass(frozen=True, eq=False)
class TrainingData(Dataset[dict[str, Any]]):
    """Training rows: samples, or several samples packed in a row. Tokens are read when a row is asked for."""

    texts: Texts
    members: np.ndarray  # the numbers of all rows' samples, row after row
    max_length: int | None = None  # the most tokens of a sample
    starts: np.ndarray | None = None  # where each row begins among the members; None if each row is one sample

    def __len__(self) -> int:
        return len(self.members if self.starts is None else self.starts)

    def __getitem__(self, row: int) -> dict[str, Any]:
        """Return a row's `input_ids` and `labels`, its number `index`, and its samples' `id` (`ids`) and `texts`.

        `index` is a number, since accelerate slices, concatenates and gathers the tensors of a batch and fails on
        strings. `texts` are hashes that tell samples apart. A packed row has `position_ids` that restart at 0 with each
        sample; the first label of each is −100, since the token before it belongs to another text.
        """
        if not 0 <= row < len(self):
            raise IndexError(row)
        samples = self.samples([row])
        read = [self.texts.read(sample, self.max_length) for sample in samples.tolist()]
        ids, labels = (np.concatenate(parts) for parts in zip(*read, strict=True))
        names = self.texts.table["id"]
        example = {"input_ids": ids.tolist(), "index": int(row), "texts": self.text_hashes[samples].tolist()}
        if self.starts is None:
            return example | {"id": names[int(samples[0])].as_py(), "labels": labels.tolist()}
        positions = np.concatenate([np.arange(len(part)) for part, _ in read])
        example |= {"ids": [names[int(sample)].as_py() for sample in samples], "position_ids": positions.tolist()}
        return example | {"labels": np.where(positions == 0, IGNORED, labels).tolist()}

    @cached_property
    def text_hashes(self) -> np.ndarray:
        """A hash (uint64) of each sample's tokens and mask, by sample number."""
        return self.texts.column("text")

    @cached_property
    def sizes(self) -> np.ndarray:
        """The number of tokens of each member."""
        return np.minimum(self.texts.lengths[self.members], self.max_length or np.iinfo(np.int32).max)

    @cached_property
    def lengths(self) -> np.ndarray:
        """The number of tokens of each row."""
        return self.sizes if self.starts is None else np.add.reduceat(self.sizes, self.starts)

    @property
    def source_of_rows(self) -> np.ndarray:
        """The number of the directory of each row's first sample."""
        return self.texts.source_of(self.members if self.starts is None else self.members[self.starts])

    def samples(self, rows: Sequence[int]) -> np.ndarray:
        """Return the numbers of the samples in given rows."""
        if self.starts is None:
            return self.members[list(rows)]
        ends = np.append(self.starts[1:], len(self.members))
        return np.concatenate([self.members[self.starts[row] : ends[row]] for row in rows])

    def sample_ids(self, rows: Sequence[int]) -> list[str]:
        """Return the ids of the samples in given rows, with their directories if there are several."""
        return self.texts.ids(self.samples(rows))

    def fingerprint(self, weights: Sequence[float] = ()) -> str:
        """Return a digest of these rows in their order, and of the weights with which they are read."""
        digest = hashlib.sha256(self.text_hashes[self.members].tobytes() + self.lengths.tobytes())
        digest.update(repr([float(weight) for weight in weights]).encode())
        return digest.hexdigest()[:16]

    def loss_tokens(self) -> int:
        """Return the number of tokens to learn from."""
        return int(self.texts.loss_tokens(self.max_length)[self.members].sum())

    def select(self, chosen: np.ndarray) -> "TrainingData":
        """Return a part of the rows, each of a single sample, by numbers or by a mask."""
        return replace(self, members=self.members[chosen])


class CompletionCollator:
    """A collator that pads samples, or packed rows of samples, on the right.

    Its batches hold `input_ids` and `labels`, (B, T) int64; the label −100 carries no loss. There is no mask: causal
    attention never reaches the padding after a text. Packed rows have `position_ids`, (B, T), by which attention tells
    samples apart; each padding token is a text of its own there, at position 0. `index`, (B,) int64, holds the rows'
    numbers in their data set, if they have one. `positions[k]` is the `LossPositions.flat_N` of the positions whose
    next 1 + k tokens all have a label.

    Args:
        ahead: the last k of `positions`.
        prompts: add `text_positions`, the same for all tokens of a text except its first.
        bounds: add `cu_seq_lens_q`, `cu_seq_lens_k`, `max_length_q` and `max_length_k`, the bounds of texts in the
            flattened batch, for attention kernels without a mask (flash attention); without them, transformers looks
            for packed texts in every layer.
        host: add `host`, the first of `positions` and `text_positions`, `position_ids` and `index` by name, as arrays
            that stay on the host when a batch goes to a device.
        by_text: give rows of one sample `position_ids` too, for rotary frequencies that depend on a text's length.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        ahead: int = 0,
        prompts: bool = False,
        bounds: bool = False,
        host: bool = False,
        by_text: bool = False,
    ):
        self.tokenizer, self.ahead, self.prompts, self.bounds, self.host = tokenizer, ahead, prompts, bounds, host
        self.by_text = by_text

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        """Collate samples of `input_ids` and `labels`, and of `position_ids` if they are packed."""
        batch = self.tokenizer.pad(
            {"input_ids": [s["input_ids"] for s in samples]}, padding_side="right", return_tensors="pt"
        )
        input_ids = batch["input_ids"]

        def padded(name: str, value: int) -> Tensor:
            out = input_ids.new_full(input_ids.shape, value)
            for row, sample in zip(out, samples, strict=True):
                row[: len(sample[name])] = row.new_tensor(sample[name])
            return out

        out = {"input_ids": input_ids, "labels": padded("labels", IGNORED)}
        inside_BT = batch["attention_mask"].bool()
        inside_BT[:, 0] = False  # no context predicts the first token
        if "position_ids" in samples[0] or self.by_text:
            packed = "position_ids" in samples[0]
            alone_BT = (batch["attention_mask"].cumsum(1) - 1) * batch["attention_mask"]
            out["position_ids"] = padded("position_ids", 0) if packed else alone_BT
            inside_BT = out["position_ids"] > 0
        if self.bounds:
            out |= text_bounds(out.get("position_ids", torch.arange(input_ids.shape[1]).expand_as(input_ids)))
        if "index" in samples[0]:
            out["index"] = torch.tensor([sample["index"] for sample in samples])
        out["positions"] = ahead_positions(out["labels"] != IGNORED, self.ahead)
        if self.prompts:
            out["text_positions"] = ahead_positions(inside_BT, self.ahead)
        if self.host:
            out["host"] = {name: out[name].numpy() for name in ("position_ids", "index") if name in out}
            out["host"] |= {name: out[name][0].numpy() for name in ("positions", "text_positions") if name in out}
        return out


def ahead_positions(predicted_BT: Tensor, ahead: int) -> tuple[Tensor, ...]:
    """Return `LossPositions.flat_N` of tokens to predict, then of windows of two such tokens, … up to 1 + `ahead`."""
    padded_BT = torch.nn.functional.pad(predicted_BT, (0, ahead))
    windows = [predicted_BT]
    for offset in range(1, ahead + 1):
        windows.append(windows[-1] & padded_BT[:, offset : offset + predicted_BT.shape[1]])
    # A row's first token never counts: no context predicts it.
    before = (torch.nn.functional.pad(window_BT[:, 1:], (0, 1)) for window_BT in windows)
    return tuple(before_BT.flatten().nonzero()[:, 0] for before_BT in before)


def text_bounds(position_ids: Tensor) -> dict[str, Any]:
    """Return flash attention's sequence bounds for position ids (B, T), where each text begins at 0."""
    starts = (position_ids.flatten() == 0).nonzero()[:, 0]
    bounds = torch.cat([starts, starts.new_tensor([position_ids.numel()])]).int()
    longest = int(bounds.diff().max())
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}


def training_examples(
    paths: Sequence[str],
    max_length: int | None = None,
    vocab_size: int | None = None,
    output: Path | None = None,
    field: str = "completions",
    positions: int | None = None,
) -> TrainingData:
    """Return the samples of completions that `draftsmith prepare` wrote, as training rows.

    Samples without a token to learn from are left out. Samples longer than `max_length` or the model's `positions` are
    cut. Warnings count both. A read-only directory is mapped in `output`.

    Raises:
        InputError: a directory is malformed, repeats a sample, has nothing to learn, or an id not below `vocab_size`.
    """
    texts = Texts({path: map_completions(path, output) for path in paths})
    limit = f"max_length {max_length} cuts"
    if positions is not None and positions < min(int(texts.lengths.max(initial=0)), max_length or positions + 1):
        max_length, limit = positions, f"the {positions} positions of the trained model cut"
    sources, largest = texts.source_of(np.arange(len(texts))), texts.column("largest")
    kept_tokens, all_tokens = texts.loss_tokens(max_length), texts.loss_tokens()
    if vocab_size is not None and (beyond := largest >= vocab_size).any():
        first = int(beyond.argmax())
        raise InputError(
            f"{paths[sources[first]]}: expected samples as draftsmith prepare writes them, found token "
            f"{largest[first]} with a vocabulary of {vocab_size}"
        )
    for number, path in enumerate(paths):
        _check_directory(texts, path, np.flatnonzero(sources == number), kept_tokens, field, limit)
    if max_length is not None and (cut := kept_tokens < all_tokens).any():
        lost, total = int((all_tokens - kept_tokens).sum()), int(all_tokens.sum())
        _warn(
            f"{field}: {limit} {cut.sum()} of {len(texts)} samples, and with their ends {lost} of "
            f"{total} tokens to learn from ({lost / total:.1%}): {_listed(texts, np.flatnonzero(cut))}"
        )
    return TrainingData(texts, np.flatnonzero(kept_tokens > 0), max_length)


def _check_directory(
    texts: Texts, path: str, samples: np.ndarray, loss_tokens: np.ndarray, field: str, limit: str
) -> None:
    """Require unique samples in a directory, some of them with tokens to learn from; warn of those without any.

    `limit` says in words what cuts samples.
    """
    start = int(samples[0]) if len(samples) else 0
    check_samples(path, texts.table["id"].slice(start, len(samples)))
    empty = samples[loss_tokens[samples] == 0]
    if len(empty) == len(samples):
        cut = texts.loss_tokens()[samples].any()
        found = f"that {limit} away those of all" if cut else "an empty loss mask in all"
        raise InputError(
            f"{field}: expected tokens to train on, found {found} {len(empty)} samples of {path}: "
            f"{_listed(texts, empty)}"
        )
    if len(empty):
        _warn(
            f"{path}: {len(empty)} of {len(samples)} samples have no token to learn from and are left out: "
            f"{_listed(texts, empty)}"
        )


def split_off(data: TrainingData, share: float) -> tuple[TrainingData, TrainingData]:
    """Divide samples into those to train on and a held-out share, at least one prompt, by a hash of prompts.

    Equal prompts are on the same side, and stay there when completions are added. At least one sample must be left.
    """
    prompts = data.texts.column("prompt")[data.members]
    held = prompts < max(np.uint64(share * 2**64), prompts.min() + np.uint64(1))
    if held.all():
        raise InputError(
            f"heldout: expected a share that divides the {len(data)} samples of completions by their prompts, found "
            f"{share}, which holds all of them back"
        )
    return data.select(~held), data.select(held)


def require_disjoint_prompts(train: TrainingData, heldout: TrainingData) -> None:
    """Require that no held-out sample has the prompt of a training sample."""
    prompts, held = (data.texts.column("prompt")[data.members] for data in (train, heldout))
    shared = np.flatnonzero(np.isin(held, prompts))
    if len(shared):
        twin = np.flatnonzero(prompts == held[shared[0]])[0]
        one, other = (data.texts.ids([data.members[at]], True)[0] for data, at in ((heldout, shared[0]), (train, twin)))
        raise InputError(
            f"heldout: expected prompts that are not learned from, found {len(shared)} of {len(held)} that are: first "
            f"{one}, which is {other}; take them out, or have --heldout 0.02 hold back a share of completions"
        )


@phase("counting tokens")
def frequent_tokens(
    data: TrainingData, count: int, size: int, always: Sequence[int] = (), field: str = "draft_vocabulary"
) -> Tensor:
    """Return the most frequent tokens of completions, ascending, (D,) int64; ties go to the lower id.

    D is `count`, `always` included; or fewer, with a warning, if the completions have fewer different tokens. Others
    would have no example to learn from, and ids say nothing about use: Gemma's first hundred are unused.
    """
    at_most(size).check(field, count)
    at_least(len(always)).check(field, count)
    counts = np.zeros(size, dtype=np.int64)
    for at in range(0, len(data), 1024):
        labels = np.concatenate([data[row]["labels"] for row in range(at, min(at + 1024, len(data)))])
        counts += np.bincount(labels[labels != IGNORED], minlength=size)
    counts[list(always)] = np.iinfo(np.int64).max
    if (present := np.count_nonzero(counts)) < count:
        logger.warning("%s: the completions hold %d different tokens, which are drafted, not %d", field, present, count)
    ranked = np.argsort(-counts, kind="stable")[: min(count, present)]
    return torch.from_numpy(np.sort(ranked))


def _listed(texts: Texts, samples: np.ndarray) -> str:
    return f"{', '.join(texts.ids(samples[:5]))}{', …' if len(samples) > 5 else ''}"


def _warn(line: str) -> None:
    """Warn in the first process only."""
    if is_first():
        logger.warning(line)


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
