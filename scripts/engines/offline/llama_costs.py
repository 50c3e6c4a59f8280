"""The costs of rounds in llama.cpp, by the clock of its server.

A server cannot change γ while it runs, so each way to draft has a server of its own, and servers take turns. t(k + 1)
is a round that verifies k copied tokens of a text that repeats one token. A drafter's rounds are timed on real text and
counted: the tokens written less those accepted.
"""

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
from torch import Tensor

from draftsmith.decode.measurement.costs import BLOCKS, CostTable, DraftCosts
from draftsmith.decode.measurement.turns import text_windows
from draftsmith.decode.progress import track
from draftsmith.decode.validation import Amount, Count, ServerMessage, parse
from draftsmith.scripts.engines.offline.jobs import EngineFailure, Job
from draftsmith.scripts.engines.offline.llama_cpp import COPIES, LlamaCpp
from draftsmith.train.kinds.export import Served

TURNS = 5
"""Servers of each way to draft, whose median counts: a rare quiet moment speeds up one token more than a block."""
WRITTEN, LEAST = 128, 16
"""The most tokens of a timed answer, half of them before the context whose rounds are asked for, and the least of it
and of its prompt: after a shorter one llama.cpp copies nothing for a while."""
LIKELY = 100.0
"""The bias of the logit of the token that a repeating text repeats."""
Prices = Mapping[tuple[str, float, int], Mapping[int, float]]
"""Seconds of a round by drafter (the target is ""), temperature and rows, then γ."""


class Timings(ServerMessage):
    """The clock of one answer: milliseconds, and numbers of tokens."""

    prompt_ms: Amount
    predicted_n: Count
    predicted_ms: Amount
    draft_n_accepted: Count = 0


class Timed(ServerMessage):
    """An answer of `/completion` with its clock."""

    timings: Timings


@dataclass(frozen=True)
class LlamaCosts:
    """Rounds to time: of a GGUF target that writes `rows` texts at a time after `context` tokens of `text`, (T,).

    `first` collects the seconds in which each drafter's servers read the prompt, the target's own under "".
    """

    engine: LlamaCpp
    target: str
    text: Tensor
    context: int
    rows: Sequence[int]
    temperatures: Sequence[float]
    new_tokens: int
    threads: int | None
    cuts: Mapping[str, float] = field(default_factory=dict)  # of the distribution, by llama.cpp's names, in their order
    first: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    @property
    def _span(self) -> tuple[int, int]:
        """The tokens of a timed answer's prompt, and of the answer."""
        new = max(LEAST, min(self.new_tokens, WRITTEN))
        return max(LEAST, self.context - new // 2), new

    def tables(self, drafters: Mapping[str, Mapping[int, Served | None]]) -> list[CostTable]:
        """Return a table for each temperature; `drafters` are by name, then γ, None if they copy.

        Raise EngineFailure if a server fails.
        """
        lengths, ways = {k for of in drafters.values() for k in of}, dict[tuple[str, int], Served | None]()
        for k in sorted({0} | lengths | {block - 1 for block in BLOCKS if block <= max(lengths)}):
            copies = {"method": COPIES, "model": self.target, "num_speculative_tokens": k}
            ways["", k] = Served(COPIES, copies) if k else None
        ways |= {(name, k): form for name, of in drafters.items() for k, form in of.items() if form}
        timed: dict[tuple[str, float, int], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        turns = [key for _ in range(TURNS) for key in ways]
        for name, k in track(turns, "costs of rounds in llama.cpp", "servers"):
            for setting, seconds in self._timed(name, k, ways[name, k]).items():
                timed[name, *setting][k].append(seconds)
        prices = {key: {k: median(seconds) for k, seconds in of.items()} for key, of in timed.items()}
        return [self._table(temperature, prices, list(drafters)) for temperature in self.temperatures]

    def _timed(self, name: str, draft_length: int, form: Served | None) -> dict[tuple[float, int], float]:
        """Return the seconds of a round by temperature and rows, from a server of its own."""
        most, (start, new) = max(self.rows), self._span
        target, speculative = (self.target, None) if form is None else (form.target or self.target, form.speculative)
        job = Job(target, [], dict(speculative) if speculative else None, new, start + 2 * new, max_num_seqs=most)
        prompts = text_windows(self.text, most, start).tolist()
        fields: dict[str, Any] = {"n_predict": new, "ignore_eos": True, "samplers": ["temperature", *self.cuts]}
        fields |= self.cuts
        if not name and draft_length:
            # Whole rounds after the prompt's token: near its end an answer is drafted less.
            fields["n_predict"] = 1 + max(1, (new - 1) // (draft_length + 1)) * (draft_length + 1)
            token = int(self.text.mode().values)
            prompts, fields = [[token] * start] * most, fields | {"logit_bias": [[token, LIKELY]]}
        seconds: dict[tuple[float, int], float] = {}
        with self.engine.serve(job, self.threads or os.cpu_count()) as client, ThreadPoolExecutor(most) as pool:

            def answer(row: int, **more: Any) -> Timings:
                asked = client.post("/completion", json=fields | {"prompt": prompts[row], "id_slot": row} | more)
                if asked.status_code != 200:
                    found = f"{asked.status_code}: {asked.text[:200]}"
                    raise EngineFailure(f"llama-server: expected a completion, found {found}")
                return parse(Timed, asked.content, "llama-server").timings

            # The first answers read the prompts, which then stay in the slots' caches.
            self.first[name].append(min(pool.map(lambda row: answer(row, n_predict=2).prompt_ms, range(most))) / 1000)
            for temperature in self.temperatures:
                for rows in self.rows:
                    texts = list(pool.map(lambda row, t=temperature: answer(row, temperature=t), range(rows)))
                    counted = sum(text.predicted_n - 1 - text.draft_n_accepted for text in texts)
                    seconds[temperature, rows] = sum(text.predicted_ms for text in texts) / counted / 1000
        return seconds

    def _table(self, temperature: float, prices: Prices, names: Sequence[str]) -> CostTable:
        forwards = {rows: {1 + k: s for k, s in prices["", temperature, rows].items()} for rows in self.rows}
        prompt, priced = min(self.first[""]), dict[str, dict[int, DraftCosts]]()
        for name in names:
            late = max(0.0, min(self.first[name]) - prompt) if name in self.first else 0.0
            priced[name] = {}
            for rows in self.rows:
                own = prices.get((name, temperature, rows), {})
                rest = {k: seconds - forwards[rows][1 + k] for k, seconds in own.items()}
                priced[name][rows] = DraftCosts(0.0, *_line(rest), rows * late)
        zero, prompts = dict.fromkeys(self.rows, 0.0), {rows: rows * prompt for rows in self.rows}
        return CostTable(self.context, temperature, forwards, zero, self._span[0], prompts, priced)


def _line(seconds: Mapping[int, float]) -> tuple[float, float]:
    """Return step and overhead of the line through the seconds by γ that a round takes beyond the target's forward."""
    if len(seconds) < 2:
        return 0.0, sum(seconds.values())
    step, overhead = np.polyfit(list(seconds), list(seconds.values()), 1)
    return (float(step), float(overhead)) if step > 0 else (0.0, float(np.mean(list(seconds.values()))))
