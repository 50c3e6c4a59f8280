"""The rounds of compiled decoding, timed: how long each takes, and its part inside the compiled calls."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode import autoregressive_generate, speculative_generate
from draftsmith.decode.cache.program import Program
from draftsmith.decode.errors import InputError
from draftsmith.train.kinds.drafter import Drafter

TEXT = "def add(a, b):\n    return a + b\n\n\ndef mean(numbers):\n"
UNCOUNTED = 2
"""Rounds at a text's beginning that are left out: they read the prompt."""
Decode = Callable[[Callable[[int], None]], None]
"""Decodes a batch, and calls what it is given with the place of each row that was written."""


@dataclass
class Stopwatch:
    """The rounds of decoded texts in which all rows were written, in seconds."""

    rounds: list[float] = field(default_factory=list)
    inside: list[float] = field(default_factory=list)
    """Seconds of each round inside the compiled calls."""
    _laps: list[tuple[int, float, float]] = field(default_factory=list)
    _rows: set[int] = field(default_factory=set)
    _begun: float = 0.0
    _inside: float = 0.0

    def row(self, index: int) -> None:
        """A row was written: a round ends where one is written again."""
        if index in self._rows:
            now = perf_counter()
            self._laps.append((len(self._rows), now - self._begun, self._inside))
            self._rows.clear()
        if not self._rows:
            self._begun, self._inside = perf_counter(), 0.0
        self._rows.add(index)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Time the compiled calls in this block, which decodes a batch."""
        run = Program.__call__

        def call(program: Program, *inputs: Any) -> list[Tensor]:
            begin = perf_counter()
            outputs = run(program, *inputs)
            self._inside += perf_counter() - begin
            return outputs

        patched: Any = Program
        patched.__call__ = call
        self._laps, self._rows = [], set()
        try:
            yield
        finally:
            patched.__call__ = run
        most = max((rows for rows, _, _ in self._laps), default=0)
        whole = [lap for lap in self._laps if lap[0] == most][UNCOUNTED:]
        self.rounds += [seconds for _, seconds, _ in whole]
        self.inside += [inside for _, _, inside in whole]

    def figures(self) -> dict[str, float]:
        """Return milliseconds of the median round.

        Raises:
            InputError: too few rounds.
        """
        check_rounds(self.rounds)
        seconds, outside = median(self.rounds), median(a - b for a, b in zip(self.rounds, self.inside, strict=True))
        return {
            "round_ms": 1e3 * seconds,
            "outside_compiled_calls_ms": 1e3 * outside,
            "outside_share": outside / seconds,
        }


def timed_rounds(methods: Mapping[str, Decode], repeats: int) -> dict[str, dict[str, float]]:
    """Return the figures of methods that decode compiled, by name.

    They take turns, `repeats` batches each after one to warm up.
    """
    watches = {name: Stopwatch() for name in methods}
    for repeat in range(1 + repeats):
        for name, method in methods.items():
            watch = watches[name] if repeat else Stopwatch()
            with watch.watching():
                method(watch.row)
    return {name: watch.figures() for name, watch in watches.items()}


def methods(
    target: PreTrainedModel, drafters: Sequence[Drafter], ids: Tensor, options: Mapping[str, Any]
) -> dict[str, Decode]:
    """Return plain decoding and each drafter's, by name.

    Args:
        target: the model; its generation config ends no text.
        drafters: each with the first of its draft lengths.
        ids: prompts, (B, T).
        options: of the decoder.
    """

    def plain(observe: Callable[[int], None]) -> None:
        autoregressive_generate(target, ids, observer=lambda row, _: observe(row.index), **options)

    def speculative(drafter: Drafter, observe: Callable[[int], None]) -> None:
        length = drafter.draft_lengths[0]
        speculative_generate(
            target, drafter.proposer, ids, draft_length=length, observer=lambda r: observe(r.row), **options
        )

    by_name: dict[str, Decode] = {"plain": plain}
    return by_name | {drafter.name: partial(speculative, drafter) for drafter in drafters}


def options_at(temperature: float, max_new_tokens: int) -> dict[str, Any]:
    """Return the decoder's options for a temperature and a length."""
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    return {"max_new_tokens": max_new_tokens, **sampling}


def check_rounds(rounds: Sequence[object]) -> None:
    """Require that texts were long enough to look at a round."""
    if not rounds:
        raise InputError(f"max_new_tokens: expected more than {UNCOUNTED + 1} rounds of text, found fewer")


def prompts(ids: Sequence[int], rows: int) -> Tensor:
    """Return a text as the prompts of some rows, (B, T), each begun at another token."""
    shifts = [row % len(ids) for row in range(rows)]
    return torch.tensor([[*ids[shift:], *ids[:shift]] for shift in shifts])
