"""Samples and what becomes of them: batches, completions, the shards that they turn into, and the summary of a run."""

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
    """What a run of `prepare` read and wrote; the counts of tokens and n-grams are over written and kept samples."""

    output: Path
    """The directory of the completions."""
    prompts: int
    """Prompts read."""
    written: int = 0
    """Completions written by this run."""
    kept: int = 0
    """Completions kept from before."""
    empty: int = 0
    """Completions that are an end-of-sequence token and nothing else; they are samples all the same."""
    cut: int = 0
    """Completions that reached `max_new_tokens` without an end-of-sequence token."""
    tokens: int = 0
    """Tokens of all completions, end-of-sequence tokens included."""
    tokens_written: int = 0
    """Tokens of the completions that this run wrote."""
    seconds: float = 0.0
    """Time this run spent generating and writing."""
    repeated_ngrams: int = 0
    """4-grams that occurred earlier in their completion."""
    ngrams: int = 0
    """4-grams of all completions."""
    untrainable: list[str] = field(default_factory=list)
    """Ids of samples without a single token to learn from."""
    left_out: list[str] = field(default_factory=list)
    """Ids of given conversations, and of turns, that are longer than the target's positions; they become no samples."""
    unfinished: list[str] = field(default_factory=list)
    """Ids of given conversations whose answer was cut, as a log says of them; they become no samples."""
    uncertain: int = 0
    """Completions of this run that were tokenized from a server's text, and may differ from what the target wrote."""
    padded: int = 0
    """Completions of this run that were cut before an id that pads the vocabulary."""
    begun: int = 0
    """Tokens that are kept of the shard that this run was interrupted at."""

    def __str__(self) -> str:
        """Say what is there."""
        more = f", and {self.begun} tokens of the next" if self.begun else ""
        return f"{self.kept + self.written} of {self.prompts} completions{more}"

    @property
    def repeated_ngram_share(self) -> float | None:
        """Repeated 4-grams over all 4-grams: high where the target loops; None where there are none."""
        return self.repeated_ngrams / self.ngrams if self.ngrams else None

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens that this run wrote over its seconds; None where it wrote none."""
        return self.tokens_written / self.seconds if self.tokens_written else None

    @classmethod
    def over(cls, parts: Sequence["CompletionsSummary"]) -> "CompletionsSummary":
        """Add up what several processes wrote of the same prompts."""
        whole = cls.of_turns(parts[0].output, parts)
        for name in ("prompts", "left_out", "unfinished"):  # all processes read the same
            setattr(whole, name, getattr(parts[0], name))
        whole.seconds = max(part.seconds for part in parts)
        return whole

    @classmethod
    def of_turns(cls, output: Path, parts: Sequence["CompletionsSummary"]) -> "CompletionsSummary":
        """Add up what was written of one turn after the other."""
        whole = CompletionsSummary(output, 0)
        for name in {each.name for each in fields(cls)} - {"output"}:
            values = [getattr(part, name) for part in parts]
            setattr(whole, name, sum(values[1:], values[0]))
        return whole

    def add(self, shard: pa.Table) -> None:
        """Count a shard's tokens, n-grams and ways to end."""
        columns = (shard[name].to_pylist() for name in ("id", "input_ids", "loss_mask", "finish_reason"))
        for name, ids, mask, finish_reason in zip(*columns, strict=True):
            completion = [token for token, learnt in zip(ids, mask, strict=True) if learnt]
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
    """What the target wrote after a prompt."""

    ids: list[int]
    """Up to and with the first end-of-sequence token."""
    finish_reason: str
    """`stop`: it ended with an end-of-sequence token; `length`: it was cut."""
    uncertain: bool = False
    """It was tokenized from text, or ends with a guess at which end-of-sequence token; the target may have written
    others."""
    padded: bool = False
    """It was cut before an id that pads the vocabulary: a server cannot be kept from sampling those."""


@dataclass(frozen=True)
class Sample:
    """A prompt's ids, ready for its completion; or all ids of a given conversation, and their loss mask."""

    prompt: Prompt
    ids: list[int]
    mask: list[int] | None = None
    temperature: float | None = None
    """Of the completion, where there are several; None for the run's."""


@dataclass(frozen=True)
class ShardBatch:
    """Samples that are completed together, at one temperature, and become one shard."""

    index: int
    samples: list[Sample]

    @property
    def names(self) -> list[str]:
        """The samples' ids."""
        return [sample.prompt.id for sample in self.samples]

    @property
    def shard(self) -> str:
        """The name of the shard's file."""
        return f"shard-{self.index:05d}.parquet"

    def completed(self, completions: Iterable[Completion]) -> pa.Table:
        """Return the shard of prompts with their completions."""
        pairs = list(zip(self.samples, completions, strict=True))
        whole = [replace(s, ids=s.ids + c.ids, mask=[0] * len(s.ids) + [1] * len(c.ids)) for s, c in pairs]
        return _shard(whole, [c.finish_reason for _, c in pairs])

    def given(self) -> pa.Table:
        """Return the shard of conversations that hold their answers."""
        return _shard(self.samples, ["given"] * len(self.samples))


def _shard(samples: Sequence[Sample], reasons: Sequence[str]) -> pa.Table:
    rows, mixed = [], samples[0].temperature is not None
    for sample, reason in zip(samples, reasons, strict=True):
        mask = sample.mask or []
        length = mask.index(1) if 1 in mask else len(mask)  # a prompt ends where the mask begins
        row = (sample.prompt.id, sample.prompt.category, length, sample.ids, mask, reason)
        rows.append(dict(zip(COLUMNS.names, row, strict=True)) | ({"temperature": sample.temperature} if mixed else {}))
    return pa.Table.from_pylist(rows, schema=MIXED if mixed else COLUMNS)


def make_batches(samples: Sequence[Sample], batch_size: int) -> list[ShardBatch]:
    """Put samples of similar length together, to pad little; the longest come first, to run out of memory at once.

    Those of one temperature are apart from others.
    """
    ordered = sorted(samples, key=lambda sample: -len(sample.ids))
    parts = list[list[Sample]]()
    for temperature in dict.fromkeys(sample.temperature for sample in samples):
        alike = [sample for sample in ordered if sample.temperature == temperature]
        parts += [alike[at : at + batch_size] for at in range(0, len(alike), batch_size)]
    return [ShardBatch(n, part) for n, part in enumerate(parts)]


def mixed_seed(*parts: int | str) -> int:
    """Return 63 bits that depend on all parts: another seed for each batch or prompt of a run."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
