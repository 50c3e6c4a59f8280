"""Plain and speculative decoding of the same prompts, side by side, and what was seen of each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median_high
from typing import Any

from torch import Tensor
from tqdm.auto import tqdm

from draftsmith.decode import Counts, autoregressive_generate, speculative_generate
from draftsmith.decode.clock import timed
from draftsmith.decode.generation import DecodeOutput
from draftsmith.scripts.measure.config import MeasureConfig
from draftsmith.scripts.pair import Pair, left_padded
from draftsmith.train.models import default_device

PLAIN = ""
"""The name of plain decoding among the drafters'."""


@dataclass(frozen=True)
class Method:
    """One way of decoding: plain, or a drafter at one draft length."""

    drafter: str = PLAIN
    draft_length: int = 0


@dataclass(frozen=True)
class Row:
    """One prompt's completion."""

    prompt: int
    """Its place among the prompts."""
    tokens: list[int]
    counts: Counts


@dataclass(frozen=True)
class Group:
    """Prompts that were decoded together."""

    rows: list[Row]
    seconds: float
    """Median over the repeats."""

    @property
    def tokens(self) -> int:
        """All that was written."""
        return sum(len(row.tokens) for row in self.rows)


Observations = Mapping[tuple[float, int, Method], Sequence[Group]]
"""By temperature, batch size and method, in the order of the prompts."""


def decode_side_by_side(
    config: MeasureConfig,
    pair: Pair,
    methods: Sequence[Method],
    prompts: Sequence[list[int]],
    batch_size: int,
    temperature: float,
    progress: bool,
) -> dict[Method, list[Group]]:
    """Decode prompts by every method; as many as fill whole batches.

    Each batch is decoded by every method before the next one's turn, in an order that rotates from batch to batch, so
    that a machine that slows down or speeds up does so for all of them. Prompt i draws with the config's seed + i,
    whatever the batch.

    Args:
        config: says how texts are decoded, and how often.
        pair: the models.
        methods: plain decoding among them.
        prompts: token ids.
        batch_size: B.
        temperature: of the sampling.
        progress: show a bar.
    """
    options, proposers = config.options(temperature), pair.proposers

    def decode(method: Method, first: int) -> DecodeOutput:
        rows = prompts[first : first + batch_size]
        batch = left_padded(rows, default_device())
        kwargs: dict[str, Any] = options | {"seed": config.seed + first}
        if method.drafter == PLAIN:
            return autoregressive_generate(pair.target, *batch, **kwargs)
        proposer = proposers[method.drafter]
        return speculative_generate(pair.target, proposer, *batch, draft_length=method.draft_length, **kwargs)

    for method in methods:  # warm-up: the first calls allocate, and time nothing that a user would see
        decode(method, 0)
    groups: dict[Method, list[Group]] = {method: [] for method in methods}
    firsts = range(0, len(prompts) - batch_size + 1, batch_size)
    for turn, first in enumerate(
        tqdm(firsts, desc=f"T={temperature:g}, B={batch_size}", unit="batch", disable=not progress)
    ):
        rotated = [*methods[turn % len(methods) :], *methods[: turn % len(methods)]]
        runs: dict[Method, list[tuple[float, DecodeOutput]]] = {method: [] for method in methods}
        for _ in range(config.repeats):
            for method in rotated:
                runs[method].append(timed(partial(decode, method, first)))
        longest = max(map(len, prompts[first : first + batch_size]))
        for method, results in runs.items():
            seconds, output = median_high(s for s, _ in results), results[0][1]
            rows = [
                Row(first + i, _completion(text, longest, counts), counts)
                for i, (text, counts) in enumerate(zip(output.sequences, output.row_counts, strict=True))
            ]
            groups[method].append(Group(rows, seconds))
    return groups


def _completion(text: Tensor, prompt: int, counts: Counts) -> list[int]:
    # Rows that end early are padded on the right.
    return text[prompt : prompt + counts.num_emitted_tokens].tolist()
