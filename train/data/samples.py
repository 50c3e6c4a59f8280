"""Samples, the batches, completions and shards made of them, and the summary of a run of `prepare`."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import pyarrow as pa

from draftsmith.decode.repetition import count_repeated_ngrams
from draftsmith.train.data.prompts import Prompt
from draftsmith.train.data.shards import COLUMNS, MIXED


@dataclass
class CompletionsSummary:
    """The counts of a run of `prepare`; those of tokens and n-grams cover written and kept completions."""

    output: Path  # the directory of the completions
    prompts: int  # prompts read
    written: int = 0  # completions written by this run
    kept: int = 0  # completions of an earlier run
    empty: int = 0  # completions of an end-of-sequence token only; they are samples all the same
    cut: int = 0  # completions that reached `max_new_tokens` without an end-of-sequence token
    tokens: int = 0  # tokens of all completions, with end-of-sequence tokens
    tokens_written: int = 0
    seconds: float = 0.0  # the time that this run spent generating and writing
    repeated_ngrams: int = 0  # 4-grams that occurred earlier in their completion
    ngrams: int = 0  # 4-grams of all completions
    untrainable: list[str] = field(default_factory=list)  # ids of samples without a token to learn from
    left_out: list[str] = field(default_factory=list)
    """Ids of given conversations, and of turns, longer than the target's positions; they become no samples."""
    unfinished: list[str] = field(default_factory=list)
    """Ids of given conversations whose answer was cut, according to a log; they become no samples."""
    uncertain: int = 0
    """Completions of this run tokenized from a server's text, which may differ from the target's tokens."""
    padded: int = 0  # completions of this run cut before an id that pads the vocabulary

    def __str__(self) -> str:
        """Return the completions written so far, for messages."""
        return f"{self.kept + self.written} of {self.prompts} completions"

    @property
    def repeated_ngram_share(self) -> float | None:
        """Repeated 4-grams over all 4-grams, high if the target loops; None without any."""
        return self.repeated_ngrams / self.ngrams if self.ngrams else None

    @property
    def tokens_per_second(self) -> float | None:
        """The tokens per second that this run wrote; None if it wrote none."""
        return self.tokens_written / self.seconds if self.tokens_written else None

    @classmethod
    def over(cls, parts: Sequence["CompletionsSummary"]) -> "CompletionsSummary":
        """Return the sum over processes that shared the same prompts."""
        whole = cls.of_turns(parts[0].output, parts)
        for name in ("prompts", "left_out", "unfinished"):  # all processes read the same prompts
            setattr(whole, name, getattr(parts[0], name))
        whole.seconds = max(part.seconds for part in parts)
        return whole

    @classmethod
    def of_turns(cls, output: Path, parts: Sequence["CompletionsSummary"]) -> "CompletionsSummary":
        """Return the sum over successive turns."""
        whole = CompletionsSummary(output, 0)
        for name in {entry.name for entry in fields(cls)} - {"output"}:
            values = [getattr(part, name) for part in parts]
            setattr(whole, name, sum(values[1:], values[0]))
        return whole

    def add(self, shard: pa.Table) -> None:
        """Add a shard's tokens, n-grams and ways to end."""
        columns = (shard[name].to_pylist() for name in ("id", "input_ids", "loss_mask", "finish_reason"))
        for name, ids, mask, finish_reason in zip(*columns, strict=True):
            completion = [token for token, learned in zip(ids, mask, strict=True) if learned]
            repeated, total = count_repeated_ngrams(completion)
            self.tokens += len(completion)
            self.repeated_ngrams += repeated
            self.ngrams += total
            self.cut += finish_reason == "length"
            self.empty += finish_reason == "stop" and len(completion) == 1
            if not completion:
                self.untrainable.append(name)


@dataclass(frozen=True)
class Completion:
    """The target's text after a prompt."""

    ids: list[int]  # the token ids, with the first end-of-sequence token
    finish_reason: str  # `stop`: with an end-of-sequence token; `length`: cut
    uncertain: bool = False
    """Whether it was tokenized from text, or its end-of-sequence token was guessed: the target may have differed."""
    padded: bool = False  # whether it was cut before an id that pads the vocabulary: a server may sample those


@dataclass(frozen=True)
class Sample:
    """A prompt's ids, ready for its completion, or all ids of a given conversation with their loss mask.

    `temperature` is None where the run's own holds.
    """

    prompt: Prompt
    ids: list[int]
    mask: list[int] | None = None
    temperature: float | None = None


@dataclass(frozen=True)
class ShardBatch:
    """Samples that are completed together at one temperature and become one shard."""

    index: int
    samples: list[Sample]

    @property
    def names(self) -> list[str]:
        """The samples' ids."""
        return [sample.prompt.id for sample in self.samples]

    @property
    def shard(self) -> str:
        """The shard's file name."""
        return f"shard-{self.index:05d}.parquet"

    def completed(self, completions: Iterable[Completion]) -> pa.Table:
        """Return the shard of the prompts with their completions."""
        pairs = list(zip(self.samples, completions, strict=True))
        whole = [replace(s, ids=s.ids + c.ids, mask=[0] * len(s.ids) + [1] * len(c.ids)) for s, c in pairs]
        return _shard(whole, [c.finish_reason for _, c in pairs])

    def given(self) -> pa.Table:
        """Return the shard of conversations with given answers."""
        return _shard(self.samples, ["given"] * len(self.samples))


def _shard(samples: Sequence[Sample], reasons: Sequence[str]) -> pa.Table:
    rows, mixed = [], samples[0].temperature is not None
    for sample, reason in zip(samples, reasons, strict=True):
        mask = sample.mask or []
        length = mask.index(1) if 1 in mask else len(mask)  # the prompt ends where the mask begins
        row = (sample.prompt.id, sample.prompt.category, length, sample.ids, mask, reason)
        rows.append(dict(zip(COLUMNS.names, row, strict=True)) | ({"temperature": sample.temperature} if mixed else {}))
    return pa.Table.from_pylist(rows, schema=MIXED if mixed else COLUMNS)


def make_batches(samples: Sequence[Sample], batch_size: int) -> list[ShardBatch]:
    """Group samples of one temperature and similar length, to pad little; the longest first, to lack memory early."""
    ordered = sorted(samples, key=lambda sample: -len(sample.ids))
    parts = list[list[Sample]]()
    for temperature in dict.fromkeys(sample.temperature for sample in samples):
        same = [sample for sample in ordered if sample.temperature == temperature]
        parts += [same[at : at + batch_size] for at in range(0, len(same), batch_size)]
    return [ShardBatch(n, part) for n, part in enumerate(parts)]


def mixed_seed(*parts: int | str) -> int:
    """Return 63 bits that depend on all parts, as a seed for a batch or a prompt."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
