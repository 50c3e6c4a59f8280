"""The costs of a round: seconds measured on this machine, after a context and for a number of rows.

t(k) is a forward of the target over k tokens a row, d(γ) the drafting of γ tokens, o the rest of the loop. All are
least times of warm runs taken in turns, through the decoder's own cache, proposers and loop. Whole rounds are timed
before and after their parts, and again where the two disagree. Remaining disagreements are in the table's `doubts`.

Shape suffixes: B rows, T tokens, V vocabulary, H hidden.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import AfterValidator, Field
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.cache import CachedModel
from draftsmith.decode.clock import least_seconds, timed
from draftsmith.decode.measurement.turns import Parts, Timing, loop_turns, measure_until_agreement, text_windows
from draftsmith.decode.planning.costs import (
    RoundCosts,
    interpolate,
    rounds_with_others,
    stack_sizes,
    turn_seconds,
    verification_costs,
)
from draftsmith.decode.progress import track
from draftsmith.decode.proposers.base import DraftTask, Outcome, Proposer
from draftsmith.decode.sampling import Sampler
from draftsmith.decode.validation import Amount

BLOCKS = (1, 2, 3, 4, 5, 7, 9, 13, 17)
LEAST_SECONDS, MOST_SECONDS = 1e-9, 1e6
"""The bounds of plausible seconds, for files that are read back."""
Size = Annotated[int, Field(ge=1, le=2**31)]
Forward = Annotated[float, Field(ge=LEAST_SECONDS, lt=MOST_SECONDS)]
Spent = Annotated[float, Field(ge=0, lt=MOST_SECONDS)]
Rest = Annotated[float, Field(ge=-MOST_SECONDS, lt=MOST_SECONDS)]
"""Seconds: of a forward, of drafting, and of the rest of a round, which noise may leave below zero."""


def forward_after_text(model: PreTrainedModel, compiled: bool, context: int = 64) -> Callable[[], object]:
    """Return a forward of one token after a text of `context` tokens, compiled by its first call."""
    cached = CachedModel(model, rows=1, max_length=context + 1, block=1, compiled=compiled)
    cached.prefill(torch.ones(1, context, dtype=torch.long, device=model.device))
    return partial(cached.feed, torch.ones(1, 1, dtype=torch.long, device=model.device), [context])


@dataclass(frozen=True)
class DraftCosts:
    """The seconds that drafting costs for a number of rows."""

    start: Spent
    """The fixed part of a draft: d(γ) = start + γ · step."""
    step: Spent
    """The cost of each token; 0 where all are drafted at once."""
    overhead: Rest
    """o, the rest of a round: its time in the loop less d and t. Noise may leave it below zero."""
    prefill: Spent
    """The additional cost of the first draft after a prompt."""


@dataclass(frozen=True)
class CostTable:
    """Seconds by the number of rows, after texts of `context` tokens under one temperature."""

    context: Size
    """Tokens of text in the cache."""
    temperature: Amount
    target_seconds: Annotated[dict[Size, dict[Size, Forward]], Field(min_length=1)]
    """B → k → t(k)."""
    plain_overhead_seconds: dict[Size, Rest]
    """B → the cost of a token of plain decoding in addition to its forward."""
    prompt: Size
    prefill_seconds: dict[Size, Forward]
    """B → the target's forward over `prompt` tokens."""
    drafters: dict[str, dict[Size, DraftCosts]]
    """Name → B → the cost of its drafting."""
    doubts: list[str] = field(default_factory=list)
    """A line for each quantity whose two measurements disagree."""

    @cached_property
    def _interpolated(self) -> dict[tuple[str, int], RoundCosts]:
        return {}

    def at(self, name: str, rows: int) -> RoundCosts:
        """Return a drafter's costs for a number of rows, interpolated between those measured."""
        if (name, rows) not in self._interpolated:
            self._interpolated[name, rows] = self._at(name, rows)
        return self._interpolated[name, rows]

    def _at(self, name: str, rows: int) -> RoundCosts:
        sizes = sorted({k for seconds in self.target_seconds.values() for k in seconds})
        by_rows = self.drafters[name]

        def between(values: Mapping[int, float]) -> float:
            return interpolate(values, rows)

        return RoundCosts(
            target={k: between({b: t[k] for b, t in self.target_seconds.items()}) for k in sizes},
            draft_step=between({b: costs.step for b, costs in by_rows.items()}),
            overhead=between({b: costs.overhead for b, costs in by_rows.items()}),
            draft_start=between({b: costs.start for b, costs in by_rows.items()}),
            plain_overhead=between(self.plain_overhead_seconds),
        )

    def prompt_seconds(self, rows: int, tokens: int) -> float:
        """Return the seconds of the target's forward over prompts, on the line through t(1) and the measured prompt."""
        measured = interpolate(self.prefill_seconds, rows)
        slope = (measured - self._plain_forward(rows)) / max(1, self.prompt - 1)
        return max(measured + max(0.0, slope) * (tokens - self.prompt), 0.0)

    def speculative_seconds(
        self, name: str, rounds: Sequence[float], draft_length: int, nodes: int | None, prompt: int
    ) -> float:
        """Return the seconds of a batch whose rows take these numbers of rounds.

        Rows that end leave the batch. `prompt` is the number of tokens of the longest prompt; 0 leaves prompts out.
        """
        first, rows, seconds = self.at(name, len(rounds)), len(rounds), 0.0
        if prompt:
            seconds = self.prompt_seconds(rows, prompt) + self._first_draft(name, rows, prompt)
            if rows == 1:  # the prompt and the first draft go through the target together
                seconds += max(0.0, first.drafting(draft_length) + first.overhead)
                rounds = [rounds[0] - 1]
        return seconds + _drained(rounds, lambda rows: self.at(name, rows).round_seconds(draft_length, nodes))

    def taking_turns_seconds(
        self, names: Sequence[str], sizes: Sequence[np.ndarray], draft_lengths: Sequence[int], prompt: int
    ) -> float:
        """Return the seconds of a batch where S drafters take turns.

        `sizes` holds for each row its rounds by drafter and number of drafted tokens, (≤ S, ≤ K + 1), as
        `TextReplay.sizes` counts them; `prompt` is as in `speculative_seconds`.
        """
        sizes_BSK = stack_sizes(sizes, len(names))
        rows, pooled_SK = len(sizes_BSK), sizes_BSK.sum(0)

        def step(live_rows: int) -> float:
            costs = [self.at(name, live_rows) for name in names]
            prices_SK = turn_seconds(costs, draft_lengths, pooled_SK.shape[1] - 1)
            return float((prices_SK * rounds_with_others(pooled_SK, pooled_SK, live_rows)).sum() / pooled_SK.sum())

        seconds = 0.0
        if prompt:
            seconds = self.prompt_seconds(rows, prompt)
            for index, name in enumerate(names):
                # A drafter reads the prompt in its first turn, which may never come: hence the expected share.
                share = min(1.0, float(pooled_SK[index:].sum()) / rows)
                seconds += share * self._first_draft(name, rows, prompt)
            if rows == 1:  # the prompt and the first draft go through the target together
                target = self.at(names[0], rows)
                forwards = sum(n * target.verification(1 + nodes) for nodes, n in enumerate(pooled_SK.sum(0)))
                # Save at most a whole round: noise may leave the rest of a round below zero.
                seconds -= min(step(1), float(forwards / pooled_SK.sum()))
        return seconds + _drained(sizes_BSK.sum((1, 2)).tolist(), step)

    def plain_seconds(self, tokens: Sequence[float], prompt: int) -> float:
        """Return the seconds of plain decoding for rows of these lengths; `prompt` is as in `speculative_seconds`."""
        # The forward over a single prompt also gives its first token.
        steps = [tokens[0] - 1] if len(tokens) == 1 and prompt else tokens
        return (self.prompt_seconds(len(tokens), prompt) if prompt else 0.0) + _drained(
            steps, lambda rows: self._plain_forward(rows) + interpolate(self.plain_overhead_seconds, rows)
        )

    def _first_draft(self, name: str, rows: int, prompt: int) -> float:
        """Return the additional seconds of the first draft, in which the drafter reads the prompt."""
        return interpolate({b: c.prefill for b, c in self.drafters[name].items()}, rows) * prompt / self.prompt

    def _plain_forward(self, rows: int) -> float:
        return interpolate({b: t[1] for b, t in self.target_seconds.items()}, rows)


def _check_whole(table: CostTable) -> CostTable:
    """Return the table; raise ValueError unless all parts have the same batch sizes, and the target its t(1)."""
    sizes = table.target_seconds.keys()
    parts: dict[str, Mapping[int, Any]] = {**table.drafters, "plain_overhead_seconds": table.plain_overhead_seconds}
    for name, by_rows in (parts | {"prefill_seconds": table.prefill_seconds}).items():
        if by_rows.keys() != sizes:
            raise ValueError(f"expected {name} of batch sizes {sorted(sizes)}, found {sorted(by_rows)}")
    for rows, seconds in table.target_seconds.items():
        if 1 not in seconds:
            raise ValueError(f"expected the target's seconds for 1 token of {rows} rows, found {sorted(seconds)}")
    return table


ValidTable = Annotated[CostTable, AfterValidator(_check_whole)]
"""A table read from a file."""


def _drained(steps: Sequence[float], seconds: Callable[[int], float]) -> float:
    """Sum the seconds of a batch whose rows take these numbers of steps; `seconds` prices a step by its live rows."""
    total, elapsed = 0.0, 0.0
    for ended, step in enumerate(sorted(steps)):
        # Between two ends the batch keeps its size: (difference in steps) × (price at that size).
        total += (step - elapsed) * seconds(len(steps) - ended) if step > elapsed else 0.0
        elapsed = max(elapsed, step)
    return total


@torch.inference_mode()
def measure_costs(
    target: PreTrainedModel,
    proposers: Mapping[str, Proposer],
    draft_lengths: Mapping[str, int],
    text: Tensor,
    samplers: Mapping[float, Sampler],
    batch_sizes: Sequence[int],
    context: int,
    prompt: int,
    blocks: Sequence[int] = BLOCKS,
    repeats: int = 5,
    compiled: bool = False,
    seconds: float | None = None,
) -> list[CostTable]:
    """Measure the costs of rounds after texts of `context` tokens; return a table for each sampler.

    `text` is real text, (T,) int64, in which drafters that copy find copies at their usual rate; `draft_lengths` holds
    the longest draft of each proposer, `blocks` the k of t(k). The target's forwards are measured once for all
    samplers. `seconds` is an approximate limit once all is compiled, kept by fewer turns and attempts; None sets none.
    """
    sizes, block_sizes = sorted(set(batch_sizes)), sorted(set(blocks) | {1})
    share = None if seconds is None else seconds / len(sizes)

    def parts(rows: int) -> Parts:
        forward = verification_costs(target, rows, context, block_sizes, repeats, compiled)
        drafting = partial(_drafts, target, text=text, rows=rows, context=context, prompt=prompt)
        return Parts(
            forward,
            {
                t: {
                    name: drafting(proposer, sampler, draft_lengths[name], repeats, compiled)
                    for name, proposer in proposers.items()
                }
                for t, sampler in samplers.items()
            },
        )

    prefill: dict[int, float] = {}
    timings: dict[int, Timing] = {}
    for rows in track(sizes, "costs of rounds", "batch sizes"):
        prefill[rows] = _prefill_seconds(target, rows, prompt, repeats, compiled)
        loops = partial(
            loop_turns, target, proposers, draft_lengths, text, rows, context, samplers, repeats, compiled,
            None if share is None else share / 3,
        )  # fmt: skip
        timings[rows] = measure_until_agreement(loops, partial(parts, rows), draft_lengths, share)
    forwards = {rows: timing.parts.target for rows, timing in timings.items()}
    return [
        CostTable(
            context,
            t,
            forwards,
            {rows: timing.plain_overhead(t) for rows, timing in timings.items()},
            prompt,
            prefill,
            {name: {rows: _draft_costs(timing, t, name) for rows, timing in timings.items()} for name in proposers},
            [f"T={t:g}, {rows} at a time: {line}" for rows, timing in timings.items() for line in timing.doubts()[t]],
        )
        for t in samplers
    ]


def _draft_costs(timing: Timing, temperature: float, name: str) -> DraftCosts:
    start, step, first = timing.parts.drafts[temperature][name]
    return DraftCosts(start, step, timing.rest(temperature, name), first)


def _prefill_seconds(target: PreTrainedModel, rows: int, prompt: int, repeats: int, compiled: bool) -> float:
    tokens = torch.ones(rows, prompt, dtype=torch.long, device=target.device)
    # Short prompts go through the compiled program, as in the loops.
    calls = {"prefill": lambda: CachedModel(target, rows, prompt + 1, compiled=compiled).prefill(tokens)}
    return least_seconds(calls, repeats, target.device)["prefill"]


def _drafts(
    target: PreTrainedModel,
    proposer: Proposer,
    sampler: Sampler,
    draft_length: int,
    repeats: int,
    compiled: bool,
    *,
    text: Tensor,
    rows: int,
    context: int,
    prompt: int,
) -> tuple[float, float, float]:
    """Return start and step of d(γ), and the additional seconds of the first draft after a prompt."""
    texts = text_windows(text, rows, max(prompt, context) + repeats + 2)

    def drafting(length: int, draft_length: int) -> tuple[float, float, int]:
        return drafting_seconds(target, proposer, texts, length, draft_length, sampler, repeats, compiled)

    long, _, nodes = drafting(context, draft_length)
    # A chain of one step would be another compiled program, so its cost is a share of the longer chain's equal steps.
    equal_steps = compiled and not proposer.at_once and nodes == draft_length
    short = long / draft_length if equal_steps else drafting(context, 1)[0]
    _, first, _ = drafting(prompt, draft_length)
    # The step is 0 for drafters that draft all tokens at once, and for copies that were shorter than γ.
    step = max(0.0, (long - short) / (draft_length - 1)) if draft_length > 1 and nodes == draft_length else 0.0
    return max(0.0, long - draft_length * step), step, max(0.0, first - long)


@torch.inference_mode()
def drafting_seconds(
    target: PreTrainedModel,
    proposer: Proposer,
    texts_BT: Tensor,
    context: int,
    draft_length: int,
    sampler: Sampler | None = None,
    repeats: int = 5,
    compiled: bool = False,
) -> tuple[float, float, int]:
    """Return the least seconds of a draft, those of the first draft, which reads the text, and the tokens of a draft.

    Every draft is rejected, so that each round adds one token to a row. `texts_BT` needs at least `context` +
    `repeats` + 1 tokens a row; the sampler is greedy if None.
    """
    rows, length = texts_BT.shape
    task = DraftTask(
        sampler=Sampler.of(0) if sampler is None else sampler,
        vocab_size=target.config.get_text_config().vocab_size,
        generators=[None] * rows,
        max_length=length + draft_length,
        draft_length=draft_length,
        draw_siblings=True,
        compiled=compiled,
        target=target,
    )
    proposer.start(task)
    seconds, tokens = [], 0
    # Two turns warm up: heads have hidden states to draft from only after the first.
    for turn in range(repeats + 2):
        contexts = [row[: context + turn] for row in texts_BT]
        drafting, proposals = timed(partial(proposer.propose, contexts, [draft_length] * rows), target.device)
        seconds.append(drafting)
        tokens = max(len(proposal.tokens) for proposal in proposals)
        depths, prompt = len(proposer.wants_features), 0 if turn else context - 1
        proposer.commit([_rejected(target, len(proposal.tokens), depths, prompt) for proposal in proposals])
    # A drafter on features reads the text with its second draft, because the first has no features yet.
    return min(seconds[2:]), seconds[1 if proposer.wants_features else 0], tokens


def _rejected(target: PreTrainedModel, tokens: int, depths: int, prompt: int) -> Outcome:
    """Return the outcome of a rejected draft, with features of `depths` layers for it and for the prompt."""
    config = target.config.get_text_config()
    logits = torch.zeros(tokens + 1, config.vocab_size, device=target.device, dtype=target.dtype)
    if depths:
        features = logits.new_zeros(prompt + 1, depths * config.hidden_size)
        return Outcome([], logits, None, features[prompt:], features[:prompt])
    hidden = torch.zeros(tokens + 1, config.hidden_size, device=target.device, dtype=target.dtype)
    return Outcome([], logits, hidden)
