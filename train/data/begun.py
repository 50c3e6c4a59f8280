"""A shard that is being written: how far its texts are, and what is kept of them where the run is interrupted.

All tokens are kept, those of texts that have not ended too. To keep whole texts alone, and write the others anew, would
favour short ones where a forward of other rows rounds otherwise. The next run continues behind each text's last token
with the random numbers that it would have had: in float32 the texts are those of an uninterrupted run.
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
"""Of each sample what is written behind its prompt."""


class BegunShard:
    """The tokens behind the prompts of a shard, those of an interrupted run at first."""

    def __init__(self, output: Path, batch: ShardBatch):
        """Take up what is kept of a shard in a directory of completions; a damaged file is none."""
        self.file, self.names = output / f"begun-{batch.index:05d}.parquet", batch.names
        stored = read_shard(self.file, COLUMNS)
        self.texts: list[list[int]] = [[] for _ in self.names]
        if stored is not None and stored["id"].to_pylist() == self.names:
            self.texts = stored["input_ids"].to_pylist()

    @property
    def tokens(self) -> int:
        """Tokens of all texts."""
        return sum(map(len, self.texts))

    def keep(self) -> None:
        """Keep what is there for the next run."""
        if self.tokens:
            write_shard(self.file, pa.table({"id": self.names, "input_ids": self.texts}, schema=COLUMNS))

    def end(self) -> None:
        """Forget what was kept, once the shard is written."""
        remove(self.file)


class WritingProgress:
    """How much is written: tokens of those that there may be at most, and texts that have ended."""

    def __init__(self, phase: Phase, texts: int, most: int):
        """Count in a phase of `texts` × `most` tokens."""
        self._phase, self._texts, self._most = phase, texts, most
        self._ended = self._tokens = 0
        self._start = time.perf_counter()

    def take_up(self, tokens: int) -> None:
        """Count tokens of an interrupted run."""
        if tokens:
            self._phase.advance(tokens)

    def add(self, tokens: int, ended: int | None = None) -> None:
        """Count tokens that were written; `ended` is the length of the text that they end, if they end one."""
        self._tokens += tokens
        if ended is not None:
            self._ended += 1
            self._phase.total = (self._phase.total or 0) - (self._most - ended)
        rate = self._tokens / max(time.perf_counter() - self._start, 1e-9)
        self._phase.advance(tokens, f"{self._ended} of {self._texts} texts, {speed(rate)} tokens/s")
