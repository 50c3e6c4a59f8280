"""Samples and what becomes of them: batches, the shards that they turn into, and the summary of a run."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from draftsmith.decode.measurement.repetition import count_repeated_ngrams
from draftsmith.train.data.prompts import Prompt
from draftsmith.train.data.shards import COLUMNS


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
    """Ids of given conversations that are longer than the target's positions; they become no samples."""
    uncertain: int = 0
    """Completions of this run that were tokenized from a server's text, and may differ from what the target wrote."""
    padded: int = 0
    """Completions of this run that were cut before an id that pads the vocabulary."""

    @property
    def repeated_ngram_share(self) -> float | None:
        """Repeated 4-grams over all 4-grams: high where the target loops; None where there are none."""
        return self.repeated_ngrams / self.ngrams if self.ngrams else None

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens that this run wrote over its seconds; None where it wrote none."""
        return self.tokens_written / self.seconds if self.tokens_written else None

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
class Batch:
    """Prompts that are completed together, and the shard that they become.

    Of given conversations `prompt_ids` are all ids, answers included.
    """

    index: int
    prompts: list[Prompt]
    prompt_ids: list[list[int]]

    @property
    def shard(self) -> str:
        """The name of the shard's file."""
        return f"shard-{self.index:05d}.parquet"


def make_batches(prompts: Sequence[Prompt], encoded: Sequence[list[int]], batch_size: int) -> list[Batch]:
    """Put prompts of similar length together, to pad little; the longest come first, to run out of memory at once."""
    order = sorted(range(len(prompts)), key=lambda i: (-len(encoded[i]), i))
    rows = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    return [Batch(index, [prompts[i] for i in row], [encoded[i] for i in row]) for index, row in enumerate(rows)]


def completed_shard(batch: Batch, completions: list[tuple[list[int], str]]) -> pa.Table:
    """Return a batch's samples: each prompt, then its completion's ids, with the reason that it ended."""
    pairs = zip(batch.prompt_ids, completions, strict=True)
    return _shard(batch, [(p + ids, [0] * len(p) + [1] * len(ids), reason) for p, (ids, reason) in pairs])


def given_shard(batch: Batch, masks: dict[str, list[int]]) -> pa.Table:
    """Return a batch's conversations with their loss masks, which are found by the conversation's id."""
    pairs = zip(batch.prompts, batch.prompt_ids, strict=True)
    return _shard(batch, [(ids, masks[prompt.id], "given") for prompt, ids in pairs])


def _shard(batch: Batch, samples: list[tuple[list[int], list[int], str]]) -> pa.Table:
    """Return the samples, (ids, loss mask, finish reason) each, as a table; a prompt ends where the mask begins."""
    rows = [
        {
            "id": prompt.id,
            "category": prompt.category,
            "prompt_length": mask.index(1) if 1 in mask else len(mask),
            "input_ids": ids,
            "loss_mask": mask,
            "finish_reason": reason,
        }
        for prompt, (ids, mask, reason) in zip(batch.prompts, samples, strict=True)
    ]
    return pa.Table.from_pylist(rows, schema=COLUMNS)
