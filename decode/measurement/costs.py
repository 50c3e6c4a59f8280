"""The costs of a round: seconds measured on this machine, behind a context and for a number of rows.

t(k) is a forward of the target over k tokens a row, d(γ) the drafting of γ tokens, o the rest of the loop.
Everything is warm, taken in turns, and a median; measured through the decoder's own cache, proposers and loop. Whole
rounds are timed before and after their parts. What must agree is compared, measured again where it does not, and if it
still does not, the table says so.

Shape suffixes: B rows, T tokens, V vocabulary, H hidden.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from statistics import median
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import AfterValidator, Field
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.cache import CachedModel
from draftsmith.decode.clock import median_seconds, timed
from draftsmith.decode.measurement.turns import Parts, Timing, agreeing, contexts_of, loop_turns
from draftsmith.decode.planner import (
    RoundCosts,
    beside_others,
    interpolated,
    stacked_sizes,
    turn_seconds,
    verification_costs,
)
from draftsmith.decode.progress import each
from draftsmith.decode.proposers.base import DraftTask, Outcome, Proposer
from draftsmith.decode.sampling import Sampler
from draftsmith.decode.validation import Amount

BLOCKS = (1, 2, 3, 4, 5, 7, 9, 13, 17)
LEAST_SECONDS, MOST_SECONDS = 1e-9, 1e6
"""Bounds of plausible seconds, for files that are read back."""
Size = Annotated[int, Field(ge=1, le=2**31)]
Forward = Annotated[float, Field(ge=LEAST_SECONDS, lt=MOST_SECONDS)]
Spent = Annotated[float, Field(ge=0, lt=MOST_SECONDS)]
Rest = Annotated[float, Field(ge=-MOST_SECONDS, lt=MOST_SECONDS)]
"""Seconds, of a file too: of a forward, of drafting, and beside them, which noise may leave below nothing."""


def forward_behind_text(
    model: PreTrainedModel, compiled: bool = False, tokens: int = 1, context: int = 64
) -> Callable[[], object]:
    """Return a forward of a block of tokens behind a text of `context` tokens, compiled by its first call."""
    cached = CachedModel(model, rows=1, max_length=context + tokens, block=tokens, compiled=compiled)
    cached.prefill(torch.ones(1, context, dtype=torch.long, device=model.device))
    return partial(cached.feed, torch.ones(1, tokens, dtype=torch.long, device=model.device), [context])


@dataclass(frozen=True)
class DraftCosts:
    """What drafting costs, in seconds, for a number of rows."""

    start: Spent
    """A draft, however long: d(γ) = start + γ · step."""
    step: Spent
    """Each token of it; 0 where all are drafted at once."""
    overhead: Rest
    """o, the rest of a round: what it takes in the loop, less d and t. Noise may leave it below zero."""
    prefill: Spent
    """The first draft behind a prompt, beyond another."""


@dataclass(frozen=True)
class CostTable:
    """Seconds by the number of rows, behind texts of `context` tokens under one temperature."""

    context: Size
    """Tokens of text in the cache."""
    temperature: Amount
    target_seconds: Annotated[dict[Size, dict[Size, Forward]], Field(min_length=1)]
    """B → k → t(k)."""
    plain_overhead_seconds: dict[Size, Rest]
    """B → what plain decoding does for a token beside its forward."""
    prompt: Size
    prefill_seconds: dict[Size, Forward]
    """B → the target's forward over `prompt` tokens."""
    drafters: dict[str, dict[Size, DraftCosts]]
    """Name → B → what its drafting costs."""
    doubts: list[str] = field(default_factory=list)
    """What was measured twice and does not agree, a line each."""

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
            return interpolated(values, rows)

        return RoundCosts(
            target={k: between({b: t[k] for b, t in self.target_seconds.items()}) for k in sizes},
            draft_step=between({b: costs.step for b, costs in by_rows.items()}),
            overhead=between({b: costs.overhead for b, costs in by_rows.items()}),
            draft_start=between({b: costs.start for b, costs in by_rows.items()}),
            plain_overhead=between(self.plain_overhead_seconds),
        )

    def prompt_seconds(self, rows: int, tokens: int) -> float:
        """Return how long the target's forward over prompts takes: on a line through one token and measured prompts."""
        measured = interpolated(self.prefill_seconds, rows)
        slope = (measured - self._plain_forward(rows)) / max(1, self.prompt - 1)
        return max(measured + max(0.0, slope) * (tokens - self.prompt), 0.0)

    def speculative_seconds(
        self, name: str, rounds: Sequence[float], draft_length: int, nodes: float | None, prompt: int
    ) -> float:
        """Return how long rows that are decoded together take for these rounds each.

        Rows that end leave the batch: it is faster without them, but less than by their share. `prompt` has the tokens
        of the longest prompt; 0 leaves prompts aside.
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
        """Return how long rows that are decoded together take where drafters take turns.

        Args:
            names: of S drafters, in their order.
            sizes: of each row its rounds by drafter and number of drafted tokens, (≤ S, ≤ K + 1): `BatchReplay.sizes`.
            draft_lengths: γ of each drafter.
            prompt: tokens of the longest prompt; 0 leaves prompts aside.
        """
        sizes_BSK = stacked_sizes(sizes, len(names))
        rows, pooled_SK = len(sizes_BSK), sizes_BSK.sum(0)

        def step(left: int) -> float:
            prices_SK = turn_seconds([self.at(name, left) for name in names], draft_lengths, pooled_SK.shape[1] - 1)
            return float((prices_SK * beside_others(pooled_SK, pooled_SK, left)).sum() / pooled_SK.sum())

        seconds = 0.0
        if prompt:
            seconds = self.prompt_seconds(rows, prompt)
            for place, name in enumerate(names):
                # A drafter reads the prompt when it is first asked, if ever: the last one may not be.
                asked = min(1.0, float(pooled_SK[place:].sum()) / rows)
                seconds += asked * self._first_draft(name, rows, prompt)
            if rows == 1:  # the prompt and the first draft go through the target together
                target = self.at(names[0], rows)
                forwards = sum(n * target.verification(1 + nodes) for nodes, n in enumerate(pooled_SK.sum(0)))
                # No more is saved than a round takes: noise may leave the rest of it below nothing.
                seconds -= min(step(1), float(forwards / pooled_SK.sum()))
        return seconds + _drained(sizes_BSK.sum((1, 2)).tolist(), step)

    def plain_seconds(self, tokens: Sequence[float], prompt: int) -> float:
        """Return how long plain decoding takes for rows of these many tokens; `prompt` as in `speculative_seconds`."""
        # One prompt's forward gives its first token.
        steps = [tokens[0] - 1] if len(tokens) == 1 and prompt else tokens
        return (self.prompt_seconds(len(tokens), prompt) if prompt else 0.0) + _drained(
            steps, lambda rows: self._plain_forward(rows) + interpolated(self.plain_overhead_seconds, rows)
        )

    def _first_draft(self, name: str, rows: int, prompt: int) -> float:
        """Return what the first draft after a prompt takes beyond another: the drafter reads the prompt."""
        return interpolated({b: c.prefill for b, c in self.drafters[name].items()}, rows) * prompt / self.prompt

    def _plain_forward(self, rows: int) -> float:
        return interpolated({b: t[1] for b, t in self.target_seconds.items()}, rows)


def whole(table: CostTable) -> CostTable:
    """Return a table if all its parts have the same numbers of rows, and the target's seconds for one token.

    Raises:
        ValueError: they do not; says why.
    """
    sizes = table.target_seconds.keys()
    parts: dict[str, Mapping[int, Any]] = {**table.drafters, "plain_overhead_seconds": table.plain_overhead_seconds}
    for name, by_rows in (parts | {"prefill_seconds": table.prefill_seconds}).items():
        if by_rows.keys() != sizes:
            raise ValueError(f"expected {name} of batch sizes {sorted(sizes)}, found {sorted(by_rows)}")
    for rows, seconds in table.target_seconds.items():
        if 1 not in seconds:
            raise ValueError(f"expected the target's seconds for 1 token of {rows} rows, found {sorted(seconds)}")
    return table


ValidTable = Annotated[CostTable, AfterValidator(whole)]
"""A table of a file."""


def _drained(steps: Sequence[float], seconds: Callable[[int], float]) -> float:
    """Sum the steps of a batch whose rows have these many, at what a step costs for the rows that are left."""
    total, before = 0.0, 0.0
    for ended, step in enumerate(sorted(steps)):
        total += (step - before) * seconds(len(steps) - ended) if step > before else 0.0
        before = max(before, step)
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
    """Measure what rounds cost behind texts of `context` tokens.

    Args:
        target: the model.
        proposers: what drafts, by name.
        draft_lengths: the longest draft of each.
        text: tokens of real text, (T,): drafters that look at the text find in it what they would find.
        samplers: by temperature; each has a table, and the target's forwards are measured once for all.
        batch_sizes: B.
        context: tokens of text in the cache.
        prompt: tokens of a prompt.
        blocks: k, tokens of a forward.
        repeats: each is measured so often, once more to warm up.
        compiled: of compiled forwards.
        seconds: about what all of it may take once everything is compiled; fewer turns and attempts are made for it.
    """
    sizes, of_blocks = sorted(set(batch_sizes)), sorted(set(blocks) | {1})
    share = None if seconds is None else seconds / len(sizes)

    def parts(rows: int) -> Parts:
        forward = verification_costs(target, rows, context, of_blocks, repeats, compiled)
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
    for rows in each(sizes, "costs of rounds", "batch sizes"):
        prefill[rows] = _prefill_seconds(target, rows, prompt, repeats, compiled)
        loops = partial(
            loop_turns, target, proposers, draft_lengths, text, rows, context, samplers, repeats, compiled,
            None if share is None else share / 3,
        )  # fmt: skip
        timings[rows] = agreeing(loops, partial(parts, rows), draft_lengths, share)
    forwards = {rows: timing.parts.target for rows, timing in timings.items()}
    return [
        CostTable(
            context,
            t,
            forwards,
            {rows: timing.plain_overhead(t) for rows, timing in timings.items()},
            prompt,
            prefill,
            {name: {rows: _of_drafter(timing, t, name) for rows, timing in timings.items()} for name in proposers},
            [f"T={t:g}, {rows} at a time: {line}" for rows, timing in timings.items() for line in timing.doubts()[t]],
        )
        for t in samplers
    ]


def _of_drafter(timing: Timing, temperature: float, name: str) -> DraftCosts:
    start, step, first = timing.parts.drafts[temperature][name]
    return DraftCosts(start, step, timing.rest(temperature, name), first)


def _prefill_seconds(target: PreTrainedModel, rows: int, prompt: int, repeats: int, compiled: bool) -> float:
    tokens = torch.ones(rows, prompt, dtype=torch.long, device=target.device)
    # Short prompts go through the program, as in the loops.
    calls = {"prefill": lambda: CachedModel(target, rows, prompt + 1, compiled=compiled).prefill(tokens)}
    return median_seconds(calls, repeats, target.device)["prefill"]


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
    """Return start and step of d(γ), and what the first draft behind a prompt takes on top."""
    texts = contexts_of(text, rows, max(prompt, context) + repeats + 2)

    def drafting(length: int, draft_length: int) -> tuple[float, float, int]:
        return drafting_seconds(target, proposer, texts, length, draft_length, sampler, repeats, compiled)

    long, _, nodes = drafting(context, draft_length)
    # A compiled chain of one step would be a program of its own; the steps of a longer one are alike.
    alike = compiled and not proposer.at_once and nodes == draft_length
    short = long / draft_length if alike else drafting(context, 1)[0]
    _, first, _ = drafting(prompt, draft_length)
    # What drafts all tokens at once, and n-grams that were not found, have no step.
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
    """Measure a draft for rows of text, all of whose drafts are rejected: after each round a row has one token more.

    Args:
        target: the model that is drafted for.
        proposer: what drafts.
        texts_BT: the rows' texts, at least `context` + `repeats` + 1 tokens each.
        context: tokens of text at the first draft.
        draft_length: γ.
        sampler: T=0 if None.
        repeats: drafts that are measured.
        compiled: run a draft model compiled.

    Returns:
        The median seconds of a draft, those of the first one, which reads the text, and the tokens of a draft.
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
        fixed_length=True,
    )
    proposer.start(task)
    seconds, tokens = [], 0
    # The second is for warming up: heads have no hidden states to draft from before it.
    for turn in range(repeats + 2):
        contexts = [row[: context + turn] for row in texts_BT]
        drafting, proposals = timed(partial(proposer.propose, contexts, [draft_length] * rows), target.device)
        seconds.append(drafting)
        tokens = max(len(proposal.tokens) for proposal in proposals)
        depths, prompt = len(proposer.wants_features), 0 if turn else context - 1
        proposer.commit([_rejected(target, len(proposal.tokens), depths, prompt) for proposal in proposals])
    # What wants features reads the text with its second draft, for the first has none.
    return median(seconds[2:]), seconds[1 if proposer.wants_features else 0], tokens


def _rejected(target: PreTrainedModel, tokens: int, depths: int, prompt: int) -> Outcome:
    """Return the outcome of a draft that was rejected, with features of `depths` layers, also of the prompt."""
    config = target.config.get_text_config()
    logits = torch.zeros(tokens + 1, config.vocab_size, device=target.device, dtype=target.dtype)
    if depths:
        features = logits.new_zeros(prompt + 1, depths * config.hidden_size)
        return Outcome([], logits, None, features[prompt:], features[:prompt])
    hidden = torch.zeros(tokens + 1, config.hidden_size, device=target.device, dtype=target.dtype)
    return Outcome([], logits, hidden)
