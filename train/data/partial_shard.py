"""A shard in progress, whose tokens are kept if the run is interrupted.

The tokens of unfinished texts are kept too: rewriting them would favour short texts, because a forward over other rows
rounds differently. The next run continues each text with the random numbers that it would have had, so that in float32
the texts are those of an uninterrupted run.
"""

import time
from pathlib import Path

import pyarrow as pa

from draftsmith.decode.clock import speed
from draftsmith.decode.progress import Phase
from draftsmith.train.data.samples import ShardBatch
from draftsmith.train.data.shards import read_shard, write_shard
from draftsmith.train.files import remove

COLUMNS = pa.schema([("id", pa.string()), ("input_ids", pa.list_(pa.int32()))])
"""The tokens written after each sample's prompt."""


class PartialShard:
    """The tokens written so far after a shard's prompts, starting with those of an interrupted run."""

    def __init__(self, output: Path, batch: ShardBatch):
        """Load the tokens kept for a shard; a damaged file is ignored."""
        self.file, self.names = output / f"begun-{batch.index:05d}.parquet", batch.names
        stored = read_shard(self.file, COLUMNS)
        self.texts: list[list[int]] = [[] for _ in self.names]
        if stored is not None and stored["id"].to_pylist() == self.names:
            self.texts = stored["input_ids"].to_pylist()

    @property
    def tokens(self) -> int:
        """The number of tokens in all texts."""
        return sum(map(len, self.texts))

    def keep(self) -> None:
        """Write the tokens for the next run."""
        if self.tokens:
            write_shard(self.file, pa.table({"id": self.names, "input_ids": self.texts}, schema=COLUMNS))

    def end(self) -> None:
        """Delete the kept tokens, after the shard is written."""
        remove(self.file)


class WritingProgress:
    """A progress bar over tokens, out of `texts` × `most` at most, that also counts finished texts."""

    def __init__(self, phase: Phase, texts: int, most: int):
        self._phase, self._texts, self._most = phase, texts, most
        self._ended = self._tokens = 0
        self._start = time.perf_counter()

    def take_up(self, tokens: int) -> None:
        """Count the tokens of an interrupted run."""
        if tokens:
            self._phase.advance(tokens)

    def add(self, tokens: int, ended: int | None = None) -> None:
        """Count written tokens; `ended` is the length of a text that they finish."""
        self._tokens += tokens
        if ended is not None:
            self._ended += 1
            self._phase.total = (self._phase.total or 0) - (self._most - ended)
        rate = self._tokens / max(time.perf_counter() - self._start, 1e-9)
        self._phase.advance(tokens, f"{self._ended} of {self._texts} texts, {speed(rate)} tokens/s")
