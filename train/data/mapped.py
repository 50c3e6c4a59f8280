"""Completions mapped from disk: read, checked and masked once, for all processes and later runs.

`.mapped`, in a directory of completions, holds an Arrow file. Its name is a digest of the shards' names, sizes and
times, so that changed shards are read again. It is written under another name and then renamed. A run's options
(length, packing, weights, held-out share) only choose among the samples; they do not change the file.
"""

import hashlib
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from filelock import FileLock

from draftsmith.decode.errors import InputError
from draftsmith.decode.progress import Phase, phase
from draftsmith.train.data.shards import completion_files, read_completions
from draftsmith.train.losses.positions import IGNORED

VERSION = 3  # of the files below; another number makes all runs write them again
DIRECTORY = ".mapped"
SHARDS_A_BATCH = 64
SAMPLES = pa.schema(
    [
        ("id", pa.string()),
        ("input_ids", pa.list_(pa.int32())),
        ("spans", pa.list_(pa.int32())),  # begin and end of each span of tokens to learn from, alternately
        ("largest", pa.int32()),  # the largest token id
        ("prompt", pa.uint64()),  # a hash of the tokens before the first span, or of all if those are fewer than two
        ("text", pa.uint64()),  # a hash of tokens and mask, by which teacher caches know a sample
    ]
)


def map_completions(path: str, output: Path | None = None) -> Path:
    """Return the file that a directory's samples are mapped from, which is written if it is missing.

    It is in `path`, or in `output` if `path` is read-only; an InputError says if both are. One process writes while the
    others wait at a lock. On a file system without locks several may write the same file, which costs only time.
    """
    shards = completion_files(path)
    name = f"{_identity(shards)}.arrow"
    places = [Path(path) / DIRECTORY]
    if output is not None:
        places.append(output / DIRECTORY / hashlib.sha256(str(Path(path).resolve()).encode()).hexdigest()[:16])
    refused: OSError | None = None
    for place in sorted(places, key=lambda place: not (place / name).is_file()):
        try:
            _write_missing(place / name, shards)
            return place / name
        except OSError as error:
            refused = error
    raise InputError(
        f"{path}: expected a place for {DIRECTORY}, in it or in training.output_dir, found: {refused}"
    ) from refused


def _identity(shards: Sequence[Path]) -> str:
    """Return a digest that changes when any shard does."""
    stats = [(file.name, (stat := file.stat()).st_size, stat.st_mtime_ns) for file in shards]
    return hashlib.sha256(repr((VERSION, stats)).encode()).hexdigest()[:16]


def _write_missing(file: Path, shards: Sequence[Path]) -> None:
    if file.is_file():
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    with _lock(file.parent) as alone, ThreadPoolExecutor() as pool:
        if file.is_file():
            return
        for leftover in file.parent.glob(f".*.{socket.gethostname()}-*.partial") if alone else ():
            leftover.unlink()  # only this machine's: on other machines a writer may not see the lock
        with phase(f"reading {file.parent.parent}", len(shards), "shards") as bar:
            parts = [shards[at : at + SHARDS_A_BATCH] for at in range(0, len(shards), SHARDS_A_BATCH)]
            _write(file, pool.map(_samples, parts), bar)
        for former in file.parent.glob("*.arrow"):
            if former != file:
                former.unlink()


@contextmanager
def _lock(directory: Path) -> Iterator[bool]:
    """Wait for the lock of a directory; yield whether it is held, since some file systems have no locks."""
    lock = FileLock(directory / ".lock")
    with suppress(OSError):
        lock.acquire()
    try:
        yield lock.is_locked
    finally:
        lock.release()


def _write(file: Path, batches: Iterator[pa.RecordBatch], bar: Phase) -> None:
    """Write samples to a file under a name of this process's own, then rename it."""
    aside = file.with_name(f".{file.name}.{socket.gethostname()}-{os.getpid()}.partial")
    try:
        with aside.open("wb") as sink:
            with pa.ipc.new_file(sink, SAMPLES) as writer:
                for batch in batches:
                    writer.write_batch(batch)
                    bar.advance(SHARDS_A_BATCH)
            sink.flush()
            os.fsync(sink.fileno())
        os.replace(aside, file)
    finally:
        aside.unlink(missing_ok=True)


def _samples(shards: Sequence[Path]) -> pa.RecordBatch:
    """Return the samples of some shards in the mapped form."""
    table = pa.concat_tables([read_completions(file) for file in shards]).combine_chunks()
    ids, masks = (table[name].combine_chunks() for name in ("input_ids", "loss_mask"))
    ends = np.append(0, pc.list_value_length(ids).to_numpy()).cumsum()
    tokens, mask = ids.flatten().to_numpy(), masks.flatten().to_numpy()
    spans, borders = _spans(mask != 0, ends)
    prompts, texts = np.empty((2, len(ids)), np.uint64)
    for sample, (start, end) in enumerate(zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)):
        own, edges = tokens[start:end], spans[borders[sample] : borders[sample + 1]]
        prompt = own[: edges[0]] if len(edges) else own
        prompts[sample] = _hash(prompt if len(prompt) > 1 else own)
        texts[sample] = _hash(own, edges)
    largest = np.maximum.reduceat(tokens, ends[:-1]) if len(ids) else tokens
    offsets = (pa.array(starts, pa.int32()) for starts in (ends, borders))
    lists = [pa.ListArray.from_arrays(at, values) for at, values in zip(offsets, (tokens, spans), strict=True)]
    columns = [table["id"].combine_chunks(), *lists, *(pa.array(c) for c in (largest, prompts, texts))]
    return pa.RecordBatch.from_arrays(columns, schema=SAMPLES)


def _spans(mask: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the spans of a mask, counted from each sample's start, and the bounds of each sample's part of them.

    `mask` is bool, over all samples; `ends` are where samples begin, and where the last one ends; no sample is empty.
    The spans are begin and end alternately, int32; the bounds are one more than the samples.
    """
    before, after = np.roll(mask, 1), np.roll(mask, -1)
    before[ends[:-1]] = after[ends[1:] - 1] = False
    begins, finishes = np.flatnonzero(mask & ~before), np.flatnonzero(mask & ~after) + 1
    sample = np.searchsorted(ends, begins, side="right") - 1
    spans = (np.stack([begins, finishes], axis=1) - ends[sample][:, None]).astype(np.int32).ravel()
    return spans, np.append(0, 2 * np.bincount(sample, minlength=len(ends) - 1)).cumsum()


def _hash(*arrays: np.ndarray) -> int:
    digest = hashlib.blake2b(digest_size=8)
    for array in arrays:
        digest.update(array.tobytes() + b"/")
    return int.from_bytes(digest.digest(), "big")


def text_hash(input_ids: Sequence[int], loss_mask: Sequence[int]) -> int:
    """Return the hash of a sample's tokens and mask, as in the column `text`."""
    spans, _ = _spans(np.asarray(loss_mask) != 0, np.array([0, len(loss_mask)]))
    return _hash(np.asarray(input_ids, np.int32), spans)


class Texts:
    """The samples of directories of completions, numbered in order; their tokens stay on disk.

    A pickled copy maps the files again. Damaged or missing files raise an InputError.
    """

    def __init__(self, files: Mapping[str, Path]):
        self.files = files
        batches, counts = list[pa.RecordBatch](), []
        for file in files.values():
            before = len(batches)
            try:
                reader = pa.ipc.open_file(pa.memory_map(str(file)))
                batches += [reader.get_batch(number) for number in range(reader.num_record_batches)]
                if reader.schema != SAMPLES:
                    raise pa.ArrowInvalid("other columns")
                for batch in batches[before:]:
                    batch.validate(full=True)  # also the offsets: a wrong one would be read without a check
            except (OSError, pa.ArrowException) as error:
                raise InputError(f"{file}: expected mapped samples, found no whole file; remove it") from error
            counts.append(sum(len(batch) for batch in batches[before:]))
        self.table = pa.Table.from_batches(batches, SAMPLES)
        self.sources = list(files)
        self._source_ends = np.cumsum(counts)
        self._batch_starts = np.cumsum([0, *(len(batch) for batch in batches)])
        self._views = [
            tuple(
                view.to_numpy() for name in ("input_ids", "spans") for view in (batch[name].offsets, batch[name].values)
            )
            for batch in batches
        ]
        self._texts = [batch["text"].to_numpy() for batch in batches]
        self.lengths: np.ndarray = np.concatenate([np.diff(view[0]) for view in self._views] or [np.empty(0, np.int32)])

    def __len__(self) -> int:
        return len(self.table)

    def __reduce__(self) -> Any:
        return Texts, (self.files,)

    def column(self, name: str) -> np.ndarray:
        """Return a numeric column over all samples."""
        return self.table[name].to_numpy()

    def ids(self, samples: Sequence[int] | np.ndarray, with_source: bool | None = None) -> list[str]:
        """Return the ids of some samples, after their directory if `with_source`, or if None and there are several."""
        names = [self.table["id"][int(sample)].as_py() for sample in samples]
        if not (len(self.sources) > 1 if with_source is None else with_source):
            return names
        return [f"{self.sources[at]}: {name}" for at, name in zip(self.source_of(samples), names, strict=True)]

    def source_of(self, samples: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the numbers of the samples' directories."""
        return np.searchsorted(self._source_ends, samples, side="right")

    def loss_tokens(self, max_length: int | None = None) -> np.ndarray:
        """Return the number of tokens to learn from in each sample's first `max_length` tokens."""
        counts = [np.empty(0, np.int64)]
        for _, _, borders, spans in self._views:
            clipped = spans if max_length is None else np.minimum(spans, max_length)
            sums = np.append(0, (clipped[1::2] - clipped[::2]).cumsum(dtype=np.int64))
            counts.append(np.diff(sums[borders // 2]))
        return np.concatenate(counts)

    def read(self, sample: int, max_length: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return a sample's first tokens and their labels, −100 where there is nothing to learn, both (T,) int32."""
        at = int(np.searchsorted(self._batch_starts, sample, side="right")) - 1
        offsets, tokens, borders, spans = self._views[at]
        row = sample - self._batch_starts[at]
        own, edges = tokens[offsets[row] : offsets[row + 1]], spans[borders[row] : borders[row + 1]]
        if _hash(own, edges) != self._texts[at][row]:
            name = next(iter(self.files.values()))
            raise InputError(
                f"{name.parent}: expected mapped samples as they were written, found a damaged file; remove {DIRECTORY}"
            )
        ids = own[:max_length]
        labels = np.full_like(ids, IGNORED)
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            labels[start:end] = ids[start:end]
        return ids, labels
