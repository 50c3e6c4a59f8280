"""Seconds of whole loops, of plain decoding and every drafter in turns at every temperature, and their consistency.

Shape suffixes: B rows, T tokens.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.autoregressive import autoregressive_generate
from draftsmith.decode.clock import now
from draftsmith.decode.planning.costs import RoundCosts
from draftsmith.decode.proposers.base import Proposer
from draftsmith.decode.sampling import Sampler
from draftsmith.decode.speculative import Round, speculative_generate

WRITTEN = 24  # tokens written to time the loop
TOLERANCE = 0.1  # the share of a round, or of a token of plain decoding, by which two measurements of it may differ
ATTEMPTS = 3  # the most measurements that are made until two agree


@dataclass(frozen=True)
class Parts:
    """Seconds of the parts of rounds."""

    target: dict[int, float]  # k → t(k)
    drafts: dict[float, dict[str, tuple[float, float, float]]]
    """Start and step of d(γ), and the additional seconds of the first draft, by temperature and drafter."""

    def least(self, other: "Parts", draft_lengths: Mapping[str, int]) -> "Parts":
        """Return the lesser of two measurements of each part."""

        def draft(name: str, seconds: tuple[float, float, float]) -> float:
            return seconds[0] + draft_lengths[name] * seconds[1]

        return Parts(
            {k: min(seconds, other.target[k]) for k, seconds in self.target.items()},
            {
                t: {name: min(own, other.drafts[t][name], key=partial(draft, name)) for name, own in drafts.items()}
                for t, drafts in self.drafts.items()
            },
        )

    def costs(self, temperature: float, name: str) -> RoundCosts:
        """Return the costs of the parts of a drafter's round."""
        start, step, _ = self.drafts[temperature][name]
        return RoundCosts(self.target, step, draft_start=start)


@dataclass(frozen=True)
class Turns:
    """Seconds of whole loops at one temperature: in each turn plain decoding and every drafter write a text."""

    tokens: list[float] = field(default_factory=list)  # the seconds of a token of plain decoding, turn by turn
    rounds: dict[str, list[tuple[float, list[int]]]] = field(default_factory=lambda: defaultdict(list))
    """For each drafter and turn, the seconds of a round, and the drafted tokens that each round verifies."""

    def __add__(self, later: "Turns") -> "Turns":
        return Turns(
            self.tokens + later.tokens, {name: turns + later.rounds[name] for name, turns in self.rounds.items()}
        )

    @property
    def token(self) -> float:
        """The least seconds of a token of plain decoding."""
        return min(self.tokens)

    def round_seconds(self, name: str) -> float:
        """Return the least seconds of a drafter's round."""
        return min(seconds for seconds, _ in self.rounds[name])

    def rest(self, name: str, parts: RoundCosts, draft_length: int) -> float:
        """Return the seconds of a drafter's round in addition to its draft and its forward, which `parts` price."""
        # t(k) is not linear in k: price each block by itself, for the price of the mean block would be too low.
        return min(
            seconds - fmean(parts.round_seconds(draft_length, count) for count in nodes)
            for seconds, nodes in self.rounds[name]
        )


@dataclass(frozen=True)
class Timing:
    """Loops before and after the parts of their rounds were timed."""

    before: dict[float, Turns]  # by temperature
    parts: Parts
    after: dict[float, Turns]
    draft_lengths: Mapping[str, int]

    def plain_overhead(self, temperature: float) -> float:
        """Return the seconds of a token of plain decoding in addition to its forward."""
        return self._all(temperature).token - self.parts.target[1]

    def rest(self, temperature: float, name: str) -> float:
        """Return o, the seconds of a drafter's round in addition to its draft and its forward."""
        return self._rest(self._all(temperature), temperature, name)

    def doubts(self) -> dict[float, list[str]]:
        """Return by temperature a line for each quantity whose measurements differ by more than `TOLERANCE`."""
        first, doubts = next(iter(self.before)), dict[float, list[str]]()
        for t, before in self.before.items():
            after, doubts[t] = self.after[t], []
            early, late = before.token, after.token
            if abs(early - late) > TOLERANCE * min(early, late):
                doubts[t].append(f"a token of plain decoding takes {_ms(early)} at first, {_ms(late)} later")
            sampling = self._all(t).token - self._all(first).token
            for name in before.rounds:
                whole = self._all(t).round_seconds(name)
                block = 1 + max(max(nodes) for _, nodes in self._all(t).rounds[name])
                early, late = self._rest(before, t, name), self._rest(after, t, name)
                here, there = self.rest(t, name), self.rest(first, name)
                subject = f"apart from draft and forward a round of {name}, of {_ms(whole)}, takes"
                if abs(early - late) > TOLERANCE * whole:
                    doubts[t].append(f"{subject} {_ms(early)} at first, {_ms(late)} later")
                # The rest must be alike at all temperatures, up to the work of sampling: that of a token of plain
                # decoding, between once a round and once for each token of its block.
                outside = max(
                    min(sampling, block * sampling) - here + there, here - there - max(sampling, block * sampling)
                )
                if here < -TOLERANCE * whole:
                    doubts[t].append(
                        f"draft and forward take {_ms(-here)} more alone than a round of {name}, {_ms(whole)}"
                    )
                if outside > TOLERANCE * whole:
                    doubts[t].append(f"{subject} {_ms(there)} at T={first:g}, {_ms(here)} at T={t:g}")
        return doubts

    def _all(self, temperature: float) -> Turns:
        return self.before[temperature] + self.after[temperature]

    def _rest(self, turns: Turns, temperature: float, name: str) -> float:
        return turns.rest(name, self.parts.costs(temperature, name), self.draft_lengths[name])


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"


def measure_until_agreement(
    loops: Callable[[], dict[float, Turns]],
    parts: Callable[[], Parts],
    draft_lengths: Mapping[str, int],
    seconds: float | None = None,
) -> Timing:
    """Time loops, then the parts of their rounds, then loops again; repeat while they disagree and `seconds` allow."""
    begin, before, alone = now(), loops(), parts()
    for attempt in range(1, ATTEMPTS + 1):
        alone = alone.least(parts(), draft_lengths) if attempt > 1 else alone
        timing = Timing(before, alone, loops(), draft_lengths)
        spent = now() - begin
        if not any(timing.doubts().values()) or (seconds is not None and spent * (attempt + 1) > seconds * attempt):
            break
        before = timing.after
    return timing


def loop_turns(
    target: PreTrainedModel,
    proposers: Mapping[str, Proposer],
    draft_lengths: Mapping[str, int],
    text: Tensor,
    rows: int,
    context: int,
    samplers: Mapping[float, Sampler],
    repeats: int = 5,
    compiled: bool = False,
    seconds: float | None = None,
) -> dict[float, Turns]:
    """Time plain decoding and rounds of each drafter at each temperature, all in turns; see `measure_costs`.

    If `seconds` are given, the first timed turn decides how many turns fit, at least two.
    """
    prompts = text_windows(text, rows, max(1, context - WRITTEN // 2))
    turns = {t: Turns() for t in samplers}
    with without_end_of_text(target):
        for turn in count():
            begin = now(target.device)
            for t, sampler in samplers.items():
                token = _token_seconds(target, prompts, sampler, compiled)
                rounds = {
                    name: _round_seconds(target, proposer, prompts, draft_lengths[name], sampler, compiled)
                    for name, proposer in proposers.items()
                }
                if turn:  # the first is for warming up
                    turns[t].tokens.append(token)
                    for name, timed_round in rounds.items():
                        turns[t].rounds[name].append(timed_round)
            if turn == 1 and seconds is not None:
                repeats = min(repeats, max(2, round(seconds / (now(target.device) - begin))))
            if turn == repeats:
                break
    return turns


@contextmanager
def without_end_of_text(target: PreTrainedModel) -> Iterator[None]:
    """Decode without an end of text, which would cut a measurement short."""
    generation: Any = target.generation_config
    ends, generation.eos_token_id = generation.eos_token_id, None
    try:
        yield
    finally:
        generation.eos_token_id = ends


def _options(sampler: Sampler, tokens: int, compiled: bool) -> dict[str, Any]:
    # Neutral settings leave the sampler's own processors as they are.
    processors = {"logits_processor": sampler.processors} if sampler.processors else {}
    sampling = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} if sampler.do_sample else {}
    return {"max_new_tokens": tokens, "do_sample": sampler.do_sample, "compiled": compiled, **sampling, **processors}


def text_windows(text: Tensor, rows: int, length: int) -> Tensor:
    """Return rows of real text, (B, length), each from another offset."""
    enough = text.repeat(-(-(length + rows) // len(text)) + 1)
    shift = max(1, (len(enough) - length) // rows)
    return torch.stack([enough[row * shift : row * shift + length] for row in range(rows)])


def _token_seconds(target: PreTrainedModel, prompts: Tensor, sampler: Sampler, compiled: bool) -> float:
    """Return the seconds of a token of plain decoding, after the first two, which include the prompt."""
    # Two moments of one text: the difference between two texts may be negative on a busy machine.
    ends = list[float]()
    options = _options(sampler, WRITTEN + 2, compiled)
    autoregressive_generate(target, prompts, observer=lambda row, token: ends.append(now(target.device)), **options)
    return (ends[-1] - ends[2 * len(prompts) - 1]) / WRITTEN


def _round_seconds(
    target: PreTrainedModel, proposer: Proposer, prompts: Tensor, draft_length: int, sampler: Sampler, compiled: bool
) -> tuple[float, list[int]]:
    """Return the seconds of a round, and the drafted tokens of each, while every row has room to draft.

    The first round is left out because it includes the prompt.
    """
    rows, most = len(prompts), max(WRITTEN, 4 * (draft_length + 1))
    ends, nodes, written = list[float](), list[int](), [0] * rows

    def observe(round: Round) -> None:
        if max(written) <= most or len(ends) % rows:
            ends.append(now(target.device))
            nodes.append(round.nodes)
        written[round.row] += len(round.tokens)

    options = _options(sampler, most + draft_length + 1, compiled)
    speculative_generate(target, proposer, prompts, draft_length=draft_length, observer=observe, **options)
    # A round ends with its last row, and its block is as wide as its widest row.
    widest = [max(nodes[at : at + rows]) for at in range(rows, len(nodes), rows)]
    return (ends[-1] - ends[rows - 1]) / len(widest), widest
