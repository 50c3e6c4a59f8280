"""Plain and speculative decoding of the same prompts, side by side."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from draftsmith.decode import autoregressive_generate, speculative_generate
from draftsmith.decode.clock import Compared, timed_warm
from draftsmith.decode.generation import DecodeOutput
from draftsmith.decode.progress import track
from draftsmith.scripts.measure.state import PLAIN, REPEATS, Group, Measured, Method, Row
from draftsmith.scripts.measure.unfinished import Unfinished
from draftsmith.train.data.decoding import left_padded
from draftsmith.train.models import default_device


class _Batches:
    """The batches of one temperature and size, and the methods that have not failed yet."""

    def __init__(self, measured: Measured, temperature: float, batch_size: int, unfinished: Unfinished):
        self.measured, self.temperature, self.batch_size = measured, temperature, batch_size
        self.unfinished = unfinished
        self.options = measured.config.options(temperature)
        self.methods = measured.methods
        """Methods that have not failed; empty after plain decoding failed."""

    def decode(self, method: Method, first: int) -> DecodeOutput:
        """Decode the batch that begins with a prompt. Prompt i draws with the config's seed + i, in any batch."""
        pair, ids = self.measured.pair, self.measured.prompt_ids[first : first + self.batch_size]
        batch = left_padded(ids, default_device())
        kwargs: dict[str, Any] = self.options | {"seed": self.measured.config.seed + first}
        if method.drafter == PLAIN:
            return autoregressive_generate(pair.target, *batch, **kwargs)
        proposer = pair.proposers[method.drafter]
        return speculative_generate(pair.target, proposer, *batch, draft_length=method.draft_length, **kwargs)

    def attempt(self, method: Method, first: int) -> tuple[float, DecodeOutput] | None:
        """Return the seconds of a batch and its output; None if it fails now, or the method failed before."""
        if method in self.methods:
            with self.unfinished.attempt(method.at(self.temperature, self.batch_size)):
                return timed_warm(partial(self.decode, method, first))
            self.methods = [other for other in self.methods if other != method and method.drafter != PLAIN]
        return None

    def warm_up(self, first: int) -> None:
        """Decode a batch by all methods: first calls allocate, which a user does not see."""
        for method in self.methods:
            self.attempt(method, first)

    def decoded(self, first: int, methods: Sequence[Method]) -> dict[Method, Group]:
        """Decode a batch by some methods in this order; those that fail are missing."""
        longest = max(map(len, self.measured.prompt_ids[first : first + self.batch_size]))
        runs = ((method, self.attempt(method, first)) for method in methods)
        return {method: _group(*run, first, longest) for method, run in runs if run is not None}


def decode_side_by_side(
    measured: Measured, temperature: float, batch_size: int, unfinished: Unfinished
) -> dict[Method, list[Group]]:
    """Decode the prompts that fill whole batches by every method; return each method's batches.

    Every method decodes a batch before the next batch begins, in rotating order, and all batches have one of the
    clock's turns before any has its next: a machine that slows down or speeds up does so for all methods, and a burst
    of other work meets a batch once. A method that failed is left out; if plain decoding failed, the result is empty.
    Plain decoding's seconds are its least, a drafter's are these times the median of its ratios in the same turns.
    """
    batches, warm, plain = _Batches(measured, temperature, batch_size, unfinished), False, Method()
    firsts = range(0, len(measured.prompt_ids[: measured.config.limit]) - batch_size + 1, batch_size)
    runs: dict[tuple[int, Method], Group] = {}
    compared = Compared(firsts, measured.methods)
    for turn, due in enumerate(compared.turns(REPEATS)):
        for first, methods in track(due, f"T={temperature:g}, B={batch_size}", "batches"):
            key = "decoded", temperature, batch_size, turn, first
            kept = unfinished.kept(list[Group], *key)
            if kept is not None and _are_of(kept, measured, methods, range(first, first + batch_size)):
                decoded = dict(zip(methods, kept, strict=True))
            else:
                if not warm:
                    batches.warm_up(first)
                warm = True
                decoded = batches.decoded(first, methods)
                if len(decoded) == len(methods):
                    unfinished.keep(*key, value=[asdict(group) for group in decoded.values()])
            for method, group in decoded.items():
                runs.setdefault((first, method), group)
                compared.times[first, method][turn] = group.seconds
            if not batches.methods:
                return {}
            compared.ways = batches.methods  # what failed needs no more turns
    drafted = [(first, method) for first in firsts for method in batches.methods if method != plain]
    measured.compared += [(len(compared.times[key]), compared.ratios(*key)) for key in drafted]
    groups = {
        method: [replace(runs[first, method], seconds=compared.seconds(first, method)) for first in firsts]
        for method in batches.methods
    }
    rows = [row for group in groups[plain] for row in group.rows]
    prompts = [len(measured.prompt_ids[row.prompt]) for row in rows]
    lengths = [prompt + len(row.tokens) for prompt, row in zip(prompts, rows, strict=True)]
    measured.pair.warn_undrafted(prompts, lengths)
    return groups


def _are_of(groups: Sequence[Group], measured: Measured, methods: Sequence[Method], prompts: Sequence[int]) -> bool:
    """Return whether kept groups are these methods' groups of these prompts, with tokens of the target."""
    vocab_size = measured.pair.target.config.get_text_config().vocab_size
    return len(groups) == len(methods) and all(
        [row.prompt for row in group.rows] == list(prompts)
        and all(max(row.tokens, default=0) < vocab_size for row in group.rows)
        and all(row.counts.num_emitted_tokens == len(row.tokens) for row in group.rows)
        for group in groups
    )


def _group(seconds: float, output: DecodeOutput, first: int, longest: int) -> Group:
    """Return a batch; `first` is the index of its first prompt, `longest` the longest's tokens."""
    sources = output.row_sources or [()] * len(output.row_counts)
    rows = [
        # Prompts are padded on the left to `longest`, and rows that end early on the right.
        Row(first + i, text[longest : longest + counts.num_emitted_tokens].tolist(), counts, list(row_sources))
        for i, (text, counts, row_sources) in enumerate(zip(output.sequences, output.row_counts, sources, strict=True))
    ]
    return Group(rows, seconds)
