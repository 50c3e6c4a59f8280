"""Plain and speculative decoding of the same prompts, side by side, and what was seen of each."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median_high
from typing import Annotated, Any

from pydantic import AfterValidator, Field
from torch import Tensor

from draftsmith.decode import Counts, autoregressive_generate, speculative_generate
from draftsmith.decode.clock import timed_warm
from draftsmith.decode.counts import possible
from draftsmith.decode.generation import DecodeOutput
from draftsmith.decode.progress import each
from draftsmith.decode.validation import Amount, Count, TokenId
from draftsmith.scripts.measure.config import MeasureConfig
from draftsmith.scripts.measure.unfinished import Unfinished
from draftsmith.scripts.pair import left_padded
from draftsmith.train.kinds.drafter import Pair
from draftsmith.train.models import default_device

PLAIN = ""
"""The name of plain decoding among the drafters'."""


@dataclass(frozen=True)
class Method:
    """One way of decoding: plain, or a drafter at one draft length."""

    drafter: str = PLAIN
    draft_length: int = 0

    def at(self, temperature: float, batch_size: int | None = None) -> str:
        """Name it in a setting, in words."""
        name = "plain decoding" if self.drafter == PLAIN else f"{self.drafter}, γ = {self.draft_length}"
        return f"{name}, at T = {temperature:g}" + ("" if batch_size is None else f", batch size {batch_size}")


@dataclass(frozen=True)
class Row:
    """One prompt's completion."""

    prompt: Count
    """Its place among the prompts."""
    tokens: list[TokenId]
    counts: Annotated[Counts, AfterValidator(possible)]


@dataclass(frozen=True)
class Group:
    """Prompts that were decoded together."""

    rows: list[Row]
    seconds: Annotated[Amount, Field(gt=0)]
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
    unfinished: Unfinished,
) -> dict[Method, list[Group]]:
    """Decode prompts by every method; as many as fill whole batches.

    Each batch is decoded by every method before the next one's turn, in an order that rotates from batch to batch, so
    that a machine that slows down or speeds up does so for all of them. Prompt i draws with the config's seed + i,
    whatever the batch. A batch that every method has decoded is finished.

    Args:
        config: says how texts are decoded, and how often.
        pair: the models.
        methods: plain decoding first.
        prompts: token ids.
        batch_size: B.
        temperature: of the sampling.
        unfinished: what an earlier run has finished is there, and this one's batches go there.

    Returns:
        The batches of each method; a method that failed is left out, and so are all where plain decoding did.
    """
    options, proposers = config.options(temperature), pair.proposers
    vocab_size = pair.target.config.get_text_config().vocab_size
    groups: dict[Method, list[Group]] = {method: [] for method in methods}

    def decode(method: Method, first: int) -> DecodeOutput:
        rows = prompts[first : first + batch_size]
        batch = left_padded(rows, default_device())
        kwargs: dict[str, Any] = options | {"seed": config.seed + first}
        if method.drafter == PLAIN:
            return autoregressive_generate(pair.target, *batch, **kwargs)
        proposer = proposers[method.drafter]
        return speculative_generate(pair.target, proposer, *batch, draft_length=method.draft_length, **kwargs)

    def attempt(method: Method, first: int) -> list[tuple[float, DecodeOutput]]:
        """Decode a batch; nothing where it fails, or plain decoding did."""
        if method in groups:
            with unfinished.attempt(method.at(temperature, batch_size)):
                return [timed_warm(partial(decode, method, first))]
            del groups[method]
            if method.drafter == PLAIN:
                groups.clear()
        return []

    warm = False
    firsts = range(0, len(prompts) - batch_size + 1, batch_size)
    for turn, first in enumerate(each(firsts, f"T={temperature:g}, B={batch_size}", "batches")):
        key = "decoded", temperature, batch_size, first
        kept = unfinished.kept(list[Group], *key)
        if kept is not None and _are_of(kept, methods, range(first, first + batch_size), vocab_size):
            decoded = dict(zip(methods, kept, strict=True))
        else:
            # The first calls allocate, which a user does not see.
            for method in () if warm else methods:
                attempt(method, first)
            warm = True
            rotated = [*methods[turn % len(methods) :], *methods[: turn % len(methods)]]
            runs: dict[Method, list[tuple[float, DecodeOutput]]] = {method: [] for method in methods}
            for _ in range(config.repeats):
                for method in rotated:
                    runs[method] += attempt(method, first)
            longest = max(map(len, prompts[first : first + batch_size]))
            decoded = {method: _group(runs[method], first, longest) for method in methods if method in groups}
            if len(decoded) == len(methods):
                unfinished.keep(*key, value=[asdict(group) for group in decoded.values()])
        for method, of_method in groups.items():
            of_method.append(decoded[method])
        if not groups:
            break
    return groups


def _are_of(groups: Sequence[Group], methods: Sequence[Method], prompts: Sequence[int], vocab_size: int) -> bool:
    """Say whether kept groups are these methods' of these prompts, in tokens of the target's."""
    return len(groups) == len(methods) and all(
        [row.prompt for row in group.rows] == list(prompts)
        and all(max(row.tokens, default=0) < vocab_size for row in group.rows)
        and all(row.counts.num_emitted_tokens == len(row.tokens) for row in group.rows)
        for group in groups
    )


def _group(runs: Sequence[tuple[float, DecodeOutput]], first: int, longest: int) -> Group:
    """Return a batch that was decoded once or more.

    Args:
        runs: the seconds and the output of each time.
        first: place of its first prompt.
        longest: tokens of its longest prompt.
    """
    output = runs[0][1]
    rows = [
        Row(first + i, _completion(text, longest, counts), counts)
        for i, (text, counts) in enumerate(zip(output.sequences, output.row_counts, strict=True))
    ]
    return Group(rows, median_high(seconds for seconds, _ in runs))


def _completion(text: Tensor, prompt: int, counts: Counts) -> list[int]:
    # Rows that end early are padded on the right.
    return text[prompt : prompt + counts.num_emitted_tokens].tolist()
