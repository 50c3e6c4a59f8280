"""The parts of a round's time, draft, target, accept, sync and rest, measured from outside the round loop.

A proxy of the proposer times the drafting, hooks on the target its forwards, and a proxy of the rule the acceptance.
The loop's observer reports the result of a round; the time between these parts is the rest.

A round lasts from one call of `propose` to the next, the last round until its last row ends. On CUDA every part begins
and ends with a wait for the device. These waits are "sync", named after the part that was waited for; the other parts
are the host's time, including their own waits. Profiled rounds are therefore slower than rounds on an asynchronous
device. On the CPU nothing waits.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch
from rich import box
from rich.table import Table
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.decode.generation import DecodeOutput
from draftsmith.decode.proposers.base import DraftTask, Outcome, Proposal, Proposer
from draftsmith.decode.rules import Rule, as_rule
from draftsmith.decode.rules.verification import Verdict
from draftsmith.decode.speculative import Observer, Round, speculative_generate

PARTS = ("draft", "target", "accept", "sync", "rest")
# The kinds of spans, a row each in a trace. The first forward of the target is "prefill".
TRACKS = ("call", "round", "prefill", *PARTS)


@dataclass(frozen=True)
class Span:
    """A stretch of time, in nanoseconds of `time.perf_counter_ns`."""

    kind: str  # one of `TRACKS`
    name: str  # the name of the call; for a wait, the part that was waited for
    begin: int
    end: int


@dataclass
class ProfiledRound:
    """One round of a batch, and its spans, which add up to it without gaps."""

    number: int  # the number of the round, from 1, through all calls of a profile
    first: bool  # true if it is the first round of its rows, in which target and drafter read the prompts
    rows: int
    draft_length: int  # the greatest γ of the rows
    begin: int
    end: int = 0
    spans: list[Span] = field(default_factory=list)
    drafted: int = 0  # drafted tokens, or nodes of a tree, summed over the rows, as are the next two
    accepted: int = 0
    emitted: int = 0

    def nanoseconds(self, kind: str) -> int:
        """Return the time of one kind of span."""
        return sum(span.end - span.begin for span in self.spans if span.kind == kind)

    def close(self, end: int) -> None:
        """End the round, and fill the gaps between its spans with "rest"."""
        self.end = end
        edges = [self.begin, *(edge for span in self.spans for edge in (span.begin, span.end)), end]
        gaps = [Span("rest", "rest", a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]
        self.spans = sorted([*self.spans, *gaps], key=lambda span: span.begin)


class Profile:
    """Decodes, and records where the time went: `profile = Profile(); profile.generate(target, proposer, input_ids)`.

    Texts and counts are those of `speculative_generate`, which may be called repeatedly. Drafting that runs ahead,
    concurrently with the target, belongs to no round. Compiled forwards bypass the target's hooks; the target's part is
    then all time between drafting and acceptance, including the preparation of inputs.
    """

    def __init__(self) -> None:
        self.rounds: list[ProfiledRound] = []
        self.calls: list[Span] = []  # one for each call of `generate`
        self.batch_size = 0  # of the largest call
        self._outside: list[Span] = []  # the proposer's work before the rounds
        self._round: ProfiledRound | None = None
        self._last_moment = 0
        self._busy = False  # inside a span, which includes all nested calls
        self._first = self._compiled = False
        self._forward_began = 0
        self._device = torch.device("cpu")

    def generate(
        self,
        target: PreTrainedModel,
        proposer: Proposer,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        rule: str | Rule = "exact",
        observer: Observer | None = None,
        **kwargs: Any,
    ) -> DecodeOutput:
        """Decode as `speculative_generate` does; the time of `observer` counts as the rest of the round."""
        self._device = target.device
        self.batch_size = max(self.batch_size, len(input_ids))

        def observe(round: Round) -> None:
            if observer is not None:
                observer(round)
            self._observe(round)

        hooks = [target.register_forward_pre_hook(self._forward), target.register_forward_hook(self._forwarded)]
        begin = time.perf_counter_ns()
        self._wait("rest")
        try:
            return speculative_generate(
                target,
                _TimedProposer(proposer, self),
                input_ids,
                attention_mask,
                rule=_TimedRule(as_rule(rule), self),
                observer=observe,
                **kwargs,
            )
        finally:
            self._close_round(self._last_moment)
            end = self._wait("rest")
            self.calls.append(Span("call", f"call {len(self.calls) + 1}", begin, end))
            self._busy = False
            for hook in hooks:
                hook.remove()

    @classmethod
    def joined(cls, profiles: Iterable["Profile"]) -> "Profile":
        """Return the calls of several profiles as those of one."""
        whole = cls()
        for profile in profiles:
            done = len(whole.rounds)
            whole.rounds += [replace(round, number=done + round.number) for round in profile.rounds]
            whole.calls += [replace(call, name=f"call {len(whole.calls) + 1}") for call in profile.calls]
            whole._outside += profile._outside
            whole.batch_size = max(whole.batch_size, profile.batch_size)
            whole._device = profile._device
        return whole

    def breakdown(self) -> dict[str, Any]:
        """Return the times in seconds as plain JSON types; None for parts that did not occur.

        `parts` holds for each of `PARTS` its share of the rounds' time, its median in a round, and its total.
        `sync_after` holds the same for waits, by the part that was waited for, and `round` for whole rounds, to which
        the parts add up. A call's first round counts as `prefill`, its time before and after the rounds as `outside`.
        The totals of `round`, `prefill` and `outside` add up to `total_seconds`.
        """
        rounds = [round for round in self.rounds if not round.first]
        firsts = [round.end - round.begin for round in self.rounds if round.first]
        whole = [round.end - round.begin for round in rounds]
        waits = self._device.type == "cuda"
        parts = {kind: [round.nanoseconds(kind) for round in rounds] for kind in PARTS if waits or kind != "sync"}
        after = {
            kind: [sum(s.end - s.begin for s in r.spans if s.kind == "sync" and s.name == kind) for r in rounds]
            for kind in PARTS
            if waits and kind != "sync"
        }
        outside = [
            call.end - call.begin - sum(r.end - r.begin for r in self.rounds if call.begin <= r.begin < call.end)
            for call in self.calls
        ]
        return {
            "batch_size": self.batch_size,
            "rounds": len(rounds),
            "rows_per_round": sum(round.rows for round in rounds) / len(rounds) if rounds else None,
            "parts": {kind: _times(parts.get(kind, []), sum(whole)) for kind in PARTS},
            "sync_after": {kind: _times(times, sum(whole)) for kind, times in after.items()},
            "round": _times(whole, sum(whole)),
            "prefill": _times(firsts),
            "outside": _times(outside),
            "total_seconds": sum(call.end - call.begin for call in self.calls) / 1e9,
        }

    def spans(self) -> list[tuple[Span, ProfiledRound | None]]:
        """Return every span with its round; None outside the rounds."""
        spans: list[tuple[Span, ProfiledRound | None]] = [(span, None) for span in [*self.calls, *self._outside]]
        for round in self.rounds:
            spans.append((Span("round", f"round {round.number}", round.begin, round.end), round))
            spans += [(span, round) for span in round.spans]
        return sorted(spans, key=lambda pair: (pair[0].begin, TRACKS.index(pair[0].kind)))

    @contextmanager
    def _span(self, kind: str, name: str) -> Iterator[None]:
        """Time one call, including forwards of the target inside it."""
        begin = self._wait("rest")
        self._busy = True
        try:
            yield
        finally:
            self._add(Span(kind, name, begin, time.perf_counter_ns()))
            self._wait(kind)
            self._busy = False

    def _begin_rows(self, task: DraftTask) -> None:
        """Begin with new rows, which may happen several times in a call."""
        self._close_round(self._last_moment)
        self._first, self._compiled = True, task.compiled

    def _begin_round(self, rows: int, draft_length: int) -> None:
        """Begin a round, and end the one before it."""
        now = time.perf_counter_ns()
        self._close_round(now)
        self._round = ProfiledRound(len(self.rounds) + 1, self._first, rows, draft_length, now)
        self._first = False

    def _verified(self) -> None:
        """Record a compiled forward, once the target's logits exist."""
        round = self._round
        if self._compiled and round is not None and not any(span.kind == "accept" for span in round.spans):
            # Hooks do not see compiled programs: take all time since the last event as the forward.
            self._add(Span(self._kind(round), "forward", self._last_moment, time.perf_counter_ns()))
            self._wait("target")

    @staticmethod
    def _kind(round: ProfiledRound) -> str:
        first = round.first and not any(span.kind == "prefill" for span in round.spans)
        return "prefill" if first else "target"

    def _forward(self, module: nn.Module, args: Any) -> None:
        if not self._busy:
            self._forward_began = self._wait("rest")

    def _forwarded(self, module: nn.Module, args: Any, output: Any) -> None:
        round = self._round
        if self._busy or round is None:  # inside a drafter's call, or a measurement before the rounds
            return
        self._add(Span(self._kind(round), "forward", self._forward_began, time.perf_counter_ns()))
        self._wait("target")

    def _observe(self, round: Round) -> None:
        if self._round is not None:
            self._round.drafted += round.nodes
            self._round.accepted += round.accepted
            self._round.emitted += len(round.tokens)
        self._last_moment = time.perf_counter_ns()

    def _close_round(self, end: int) -> None:
        if self._round is not None:
            self._round.close(end)
            self.rounds.append(self._round)
            self._round = None

    def _wait(self, after: str) -> int:
        """Wait for the device, so that its work counts for the part `after`, and return the time."""
        self._last_moment = begin = time.perf_counter_ns()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            self._add(Span("sync", after, begin, time.perf_counter_ns()))
        return self._last_moment

    def _add(self, span: Span) -> None:
        (self._outside if self._round is None else self._round.spans).append(span)
        self._last_moment = span.end


class _TimedProposer(Proposer):
    """A proposer whose calls are timed."""

    def __init__(self, proposer: Proposer, profile: Profile):
        self._proposer, self._profile = proposer, profile
        self.wants_hidden, self.wants_features = proposer.wants_hidden, proposer.wants_features

    def start(self, task: DraftTask) -> int:
        self._profile._begin_rows(task)
        with self._profile._span("draft", "start"):
            return self._proposer.start(task)

    def propose(self, contexts: Sequence[Tensor], draft_lengths: Sequence[int]) -> list[Proposal]:
        self._profile._begin_round(len(contexts), max(draft_lengths))
        with self._profile._span("draft", "propose"):
            return self._proposer.propose(contexts, draft_lengths)

    def commit(self, outcomes: Sequence[Outcome]) -> None:
        with self._profile._span("draft", "commit"):
            self._proposer.commit(outcomes)

    def select(self, rows: Sequence[int]) -> None:
        with self._profile._span("draft", "select"):
            self._proposer.select(rows)


class _TimedRule(Rule):
    """A rule whose verdicts are timed."""

    def __init__(self, rule: Rule, profile: Profile):
        self.lossy = rule.lossy
        self._rule, self._profile = rule, profile

    def verify(self, *args: Any) -> Verdict:
        return self._rule.verify(*args)

    def verify_batch(self, *args: Any) -> list[Verdict]:
        self._profile._verified()
        with self._profile._span("accept", "verify"):
            return self._rule.verify_batch(*args)


def chrome_trace(profiles: Sequence[Profile]) -> dict[str, Any]:
    """Return profiles on one clock in the Trace Event Format, a process each and a thread for each of `TRACKS`.

    Spans are complete events ("ph": "X"), with `ts` and `dur` in microseconds. chrome://tracing and Perfetto read the
    format, which Google's document "Trace Event Format" specifies.
    """
    origin = min((call.begin for profile in profiles for call in profile.calls), default=0)
    events: list[dict[str, Any]] = []
    for pid, profile in enumerate(profiles, start=1):
        events.append(_metadata("process", pid, 0, f"batch size {profile.batch_size}"))
        events += [_metadata("thread", pid, tid, track) for tid, track in enumerate(TRACKS)]
        for span, round in profile.spans():
            event: dict[str, Any] = {
                "name": f"wait for {span.name}" if span.kind == "sync" else span.name,
                "cat": span.kind,
                "ph": "X",
                "ts": (span.begin - origin) / 1e3,
                "dur": (span.end - span.begin) / 1e3,
                "pid": pid,
                "tid": TRACKS.index(span.kind),
            }
            if round is not None:
                names = "rows", "draft_length", "drafted", "accepted", "emitted"
                numbers = {name: getattr(round, name) for name in names}
                event["args"] = {"round": round.number, **numbers}
            events.append(event)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def profile_table(profiles: Sequence[Profile]) -> Table:
    """Return the breakdowns of profiles, one for each batch size, as a table of 80 columns."""
    table = Table(
        caption="ms: the median of a round; of prefill, outside: of a call. sync: waits for the device. rest: the "
        "round loop itself. prefill: a call's first round, with the prompts. outside: before and after the rounds.",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 2, 0, 0),
        pad_edge=False,
    )
    for name in ("batch", "part", "share", "ms", "total s"):
        table.add_column(name, justify="left" if name == "part" else "right", no_wrap=True)
    for profile in profiles:
        breakdown = profile.breakdown()
        rows = [(kind, breakdown["parts"][kind], "") for kind in PARTS]
        index = PARTS.index("sync") + 1
        rows[index:index] = [(f"  after {kind}", times, "dim") for kind, times in breakdown["sync_after"].items()]
        # Rows end in different rounds, so that a batch is not always full.
        mean = f" × {breakdown['rows_per_round']:.1f} rows" if profile.batch_size > 1 and breakdown["rounds"] else ""
        rows.append((f"{breakdown['rounds']} rounds{mean}", breakdown["round"], "bold"))
        rows += [(name, breakdown[name], "dim") for name in ("prefill", "outside")]
        for i, (name, times, style) in enumerate(rows):
            table.add_row(
                "" if i else str(profile.batch_size),
                name,
                _cell(times["share"], "{:.1%}"),
                _cell(times["median_seconds"], "{:.3f}", 1e3),
                _cell(times["total_seconds"], "{:.3f}"),
                style=style,
            )
        table.add_section()
    return table


def _times(nanoseconds: Sequence[int], whole: int | None = None) -> dict[str, float | None]:
    if not nanoseconds:
        return {"share": None, "median_seconds": None, "total_seconds": None}
    total = sum(nanoseconds)
    return {
        "share": total / whole if whole else None,
        "median_seconds": median(nanoseconds) / 1e9,
        "total_seconds": total / 1e9,
    }


def _cell(value: float | None, form: str, scale: float = 1.0) -> str:
    return "–" if value is None else form.format(value * scale)


def _metadata(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": f"{kind}_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
