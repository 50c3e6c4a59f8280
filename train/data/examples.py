"""The samples of a run's completions: those to train on, cut and packed, and those to measure on."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers.utils import logging

from draftsmith.decode.errors import InputError, at_least, at_most
from draftsmith.decode.progress import phase
from draftsmith.train.data.mapped import Texts, map_completions
from draftsmith.train.losses.positions import IGNORED
from draftsmith.train.recipe import DUPLICATES

logger = logging.get_logger(__name__)


@dataclass(frozen=True, eq=False)
class TrainingData(Dataset[dict[str, Any]]):
    """Rows to learn from: samples, or samples packed one behind the other. Tokens are read as rows are asked for."""

    texts: Texts
    members: np.ndarray
    """The numbers of the rows' samples, one row behind the other."""
    max_length: int | None = None
    """Tokens of a sample, at most."""
    starts: np.ndarray | None = None
    """Where each row begins among the members; None where each is one sample."""

    def __len__(self) -> int:
        return len(self.members if self.starts is None else self.starts)

    def __getitem__(self, row: int) -> dict[str, Any]:
        """Return a row's `input_ids` and `labels`, its number, `index`, and its samples' `id` (`ids`) and `texts`.

        `index` is a number because batches carry it: accelerate slices, concatenates and gathers tensors over
        processes, and fails on strings there. `texts` are hashes that tell samples apart. A packed row has
        `position_ids` that restart at 0 with each sample, whose first label is −100: another text precedes it.
        """
        if not 0 <= row < len(self):
            raise IndexError(row)
        samples = self.samples([row])
        read = [self.texts.read(sample, self.max_length) for sample in samples.tolist()]
        ids, labels = (np.concatenate(parts) for parts in zip(*read, strict=True))
        names = self.texts.table["id"]
        found = {"input_ids": ids.tolist(), "index": int(row), "texts": self.text_hashes[samples].tolist()}
        if self.starts is None:
            return found | {"id": names[int(samples[0])].as_py(), "labels": labels.tolist()}
        positions = np.concatenate([np.arange(len(part)) for part, _ in read])
        found |= {"ids": [names[int(sample)].as_py() for sample in samples], "position_ids": positions.tolist()}
        return found | {"labels": np.where(positions == 0, IGNORED, labels).tolist()}

    @cached_property
    def text_hashes(self) -> np.ndarray:
        """A hash of each sample's tokens and mask, uint64, by its number."""
        return self.texts.column("text")

    @cached_property
    def sizes(self) -> np.ndarray:
        """Tokens of each member."""
        return np.minimum(self.texts.lengths[self.members], self.max_length or np.iinfo(np.int32).max)

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each row."""
        return self.sizes if self.starts is None else np.add.reduceat(self.sizes, self.starts)

    @property
    def source_of_rows(self) -> np.ndarray:
        """The number of the directory that each row, or its first sample, is from."""
        return self.texts.source_of(self.members if self.starts is None else self.members[self.starts])

    def samples(self, rows: Sequence[int]) -> np.ndarray:
        """Return the numbers of the samples in some rows."""
        if self.starts is None:
            return self.members[list(rows)]
        ends = np.append(self.starts[1:], len(self.members))
        return np.concatenate([self.members[self.starts[row] : ends[row]] for row in rows])

    def sample_ids(self, rows: Sequence[int]) -> list[str]:
        """Return the ids of the samples in some rows, with their directories where there are several."""
        return self.texts.ids(self.samples(rows))

    def fingerprint(self, weights: Sequence[float] = ()) -> str:
        """Return what tells these rows, in their order, from others, and from themselves under other weights."""
        digest = hashlib.sha256(self.text_hashes[self.members].tobytes() + self.lengths.tobytes())
        digest.update(repr([float(weight) for weight in weights]).encode())
        return digest.hexdigest()[:16]

    def loss_tokens(self) -> int:
        """Return how many tokens there are to learn from."""
        return int(self.texts.loss_tokens(self.max_length)[self.members].sum())

    def select(self, chosen: np.ndarray) -> "TrainingData":
        """Return some of the rows of single samples, by numbers or by a mask."""
        return replace(self, members=self.members[chosen])


def training_examples(
    paths: Sequence[str],
    max_length: int | None = None,
    vocab_size: int | None = None,
    dedup: str | None = None,
    output: Path | None = None,
    field: str = "completions",
    positions: int | None = None,
) -> TrainingData:
    """Return the samples of completions that `draftsmith prepare` wrote, as rows to learn from.

    Those without a single token to learn from are left out. They are counted and named, and so is what `max_length` or
    a model's positions cut and what `dedup` leaves out.

    Args:
        paths: completion directories.
        max_length: cut longer samples at the end.
        vocab_size: what the ids of tokens must be below; not looked at if None.
        dedup: leave out samples with an earlier one's tokens ("texts"), or also with an earlier one's prompt, which is
            what precedes the first token to learn from ("prompts").
        output: where samples may be mapped if a directory cannot be written in.
        field: the config field that named the directories, for messages.
        positions: cut samples that are longer than the models read, in tokens.

    Raises:
        InputError: a directory is missing or malformed, has a sample twice, or none with a token to learn from.
    """
    texts = Texts({path: map_completions(path, output) for path in paths})
    limit = f"max_length {max_length} cuts"
    if positions is not None and positions < min(int(texts.lengths.max(initial=0)), max_length or positions + 1):
        max_length, limit = positions, f"the {positions} positions of what is trained cut"
    sources, largest = texts.source_of(np.arange(len(texts))), texts.column("largest")
    kept_tokens, all_tokens = texts.loss_tokens(max_length), texts.loss_tokens()
    if vocab_size is not None and (beyond := largest >= vocab_size).any():
        first = int(beyond.argmax())
        raise InputError(
            f"{paths[sources[first]]}: expected samples as draftsmith prepare writes them, found token "
            f"{largest[first]} beside a vocabulary of {vocab_size}"
        )
    for number, path in enumerate(paths):
        _check_source(texts, path, np.flatnonzero(sources == number), kept_tokens, field)
    if max_length is not None and (cut := kept_tokens < all_tokens).any():
        lost, total = int((all_tokens - kept_tokens).sum()), int(all_tokens.sum())
        _say(
            f"{field}: {limit} {cut.sum()} of {len(texts)} samples, and with their ends {lost} of "
            f"{total} tokens to learn from ({lost / total:.1%}): {_listed(texts, np.flatnonzero(cut))}"
        )
    members = np.flatnonzero(kept_tokens > 0)
    if dedup is not None:
        members = _without_duplicates(texts, members, dedup, field)
    return TrainingData(texts, members, max_length)


def _check_source(texts: Texts, path: str, samples: np.ndarray, loss_tokens: np.ndarray, field: str) -> None:
    """Require that a directory has samples, none twice, and one with tokens to learn from; name those without."""
    if not len(samples):
        raise InputError(f"{path}: expected completions, found shards without samples")
    ids = texts.table["id"].slice(int(samples[0]), len(samples))
    if pc.count_distinct(ids).as_py() < len(ids):
        names = ids.value_counts()
        twice = names.filter(pc.greater(names.field("counts"), 1)).field("values")
        raise InputError(f"{path}: expected each sample once, found {twice[0].as_py()!r} again")
    empty = samples[loss_tokens[samples] == 0]
    if len(empty) == len(samples):
        raise InputError(
            f"{field}: expected tokens to train on, found an empty loss mask in all {len(empty)} samples of "
            f"{path}: {_listed(texts, empty)}"
        )
    if len(empty):
        _say(
            f"{path}: {len(empty)} of {len(samples)} samples have no token to learn from and are left out: "
            f"{_listed(texts, empty)}"
        )


def _without_duplicates(texts: Texts, members: np.ndarray, dedup: str, field: str) -> np.ndarray:
    kept = members
    for column in DUPLICATES[: DUPLICATES.index(dedup) + 1]:
        _, first = np.unique(texts.column(column[:-1])[kept], return_index=True)
        kept = kept[np.sort(first)]
    if len(kept) < len(members):
        left_out = np.setdiff1d(members, kept)
        _say(
            f"{field}: {len(left_out)} of {len(members)} samples repeat the {dedup[:-1]} of an earlier one and are "
            f"left out: {_listed(texts, left_out)}"
        )
    return kept


def split_off(data: TrainingData, share: float) -> tuple[TrainingData, TrainingData]:
    """Divide samples into those to learn from and a share to be measured on, a prompt at least, by a hash of prompts.

    Equal prompts fall on one side, and each stays there when completions are added.

    Raises:
        InputError: nothing is left to learn from.
    """
    prompts = data.texts.column("prompt")[data.members]
    held = prompts < max(np.uint64(share * 2**64), prompts.min() + np.uint64(1))
    if held.all():
        raise InputError(
            f"heldout: expected a share that divides the {len(data)} samples of completions by their prompts, found "
            f"{share}, which holds all of them back"
        )
    return data.select(~held), data.select(held)


def take_share(data: TrainingData, share: float) -> TrainingData:
    """Return the samples of a share of the prompts, by another hash of them than `split_off`'s.

    A smaller share lies within a larger one, and a prompt has all of its completions or none.

    Raises:
        InputError: that is no sample.
    """
    mixed = data.texts.column("prompt")[data.members] * np.uint64(0x9E3779B97F4A7C15)  # modulo 2⁶⁴
    chosen = mixed < np.uint64(share * 2**64)
    if not chosen.any():
        raise InputError(f"share: expected some of the {len(data)} samples of completions, found none in {share}")
    return data.select(chosen)


def require_apart(train: TrainingData, heldout: TrainingData) -> None:
    """Require that no sample to be measured on has the prompt of one to learn from.

    Raises:
        InputError: says how many have, and names one.
    """
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
    """Return the tokens that completions hold most often, ascending, (D,) int64; ties go to the lower id.

    Completions that hold fewer than `count` give as many as they hold, and a warning says so. Others would have no
    example to learn from; and no order of ids says which of them texts need: Gemma's first hundred are unused.

    Args:
        data: what is learned from.
        count: D at most.
        size: how many tokens there are.
        always: tokens that are among them however rare.
        field: the option that asked for them, for messages.

    Raises:
        InputError: there are fewer tokens, or `always` has more.
    """
    at_most(size).check(field, count)
    at_least(len(always)).check(field, count)
    counts = np.zeros(size, dtype=np.int64)
    for at in range(0, len(data), 1024):
        labels = np.concatenate([data[row]["labels"] for row in range(at, min(at + 1024, len(data)))])
        counts += np.bincount(labels[labels != IGNORED], minlength=size)
    counts[list(always)] = np.iinfo(np.int64).max
    if (found := np.count_nonzero(counts)) < count:
        logger.warning("%s: the completions hold %d different tokens, which are drafted, not %d", field, found, count)
    ranked = np.argsort(-counts, kind="stable")[: min(count, found)]
    return torch.from_numpy(np.sort(ranked))


def _listed(texts: Texts, samples: np.ndarray) -> str:
    return f"{', '.join(texts.ids(samples[:5]))}{', …' if len(samples) > 5 else ''}"


def _say(line: str) -> None:
    """Warn once, not in every process."""
    if os.environ.get("RANK", "0") == "0":
        logger.warning(line)
