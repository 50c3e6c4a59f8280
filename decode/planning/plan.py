"""The choice of a draft length round by round, from measured costs and acceptance, and fixed lengths in its place."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.clock import compilations
from draftsmith.decode.errors import InputError, at_least, at_most
from draftsmith.decode.planning.costs import RoundCosts, best_draft_length, interpolate, verification_costs
from draftsmith.decode.proposers.base import Proposal, Proposer
from draftsmith.decode.proposers.survival import Survival

FIRST_ROUNDS, FIRST_SPEEDUP = 30, 1.1
"""How many rounds a plan takes for granted at first that drafting pays, and by how much."""
SLOW_DECAY = 0.99  # of the seconds of rounds
RATE_DECAY = 0.995  # of the speed of drafting: over two hundred rounds, since one brings from one to γ + 1 tokens
GIVE_UP = 0.95
"""The speed-up below which a plan drafts no more, until it is 1 again: it is known to a few percent."""
HOLDS = 3  # the rounds for which a choice is kept: making it takes a tenth of a millisecond
FIRST_PAUSE, LONGEST_PAUSE = 16, 256
"""While drafting does not pay, the 16th round tries it, and then one after twice as many each time: they are dear."""
CLOSE, CLOSE_ROUNDS, FAR_ROUNDS = 1.25, 5.0, 1.5
"""How many recent rounds without a draft a plan wants to know while drafting is at most this much faster, or more: what
such a round takes decides whether drafting pays, and changes with the machine."""
OTHERS = 4  # every fourth choice for drafts at once tries another length


class Line:
    """A line of least squares through points; old ones lose weight."""

    def __init__(self) -> None:
        self._sums = [0.0] * 5  # of 1, x, y, x², x·y

    @property
    def weight(self) -> float:
        """The number of points, old ones counting less."""
        return self._sums[0]

    def fade(self) -> None:
        """Let all points lose weight."""
        self._sums = [SLOW_DECAY * s for s in self._sums]

    def add(self, x: float, y: float, most: float) -> None:
        """Add a point; one that is farther than `most` from the line of earlier ones is moved closer."""
        if self._sums[0] > 3:
            y = min(max(y, self.at(x) - most), self.at(x) + most)
        self.fade()
        self._sums = [s + new for s, new in zip(self._sums, (1, x, y, x * x, x * y), strict=True)]

    def at(self, x: float, origin: float | None = None) -> float:
        """Return the line's value; `origin`, if given, is that of one more point at 0."""
        weight, xs, ys, xx, xy = self._sums
        if origin is not None:
            weight, ys = weight + 1, ys + origin
        # A little more in the denominator: points at one x make no slope.
        slope = (xy - xs * ys / weight) / (xx - xs * xs / weight + 0.25)
        return ys / weight + slope * (x - xs / weight)


@dataclass
class Plan:
    """Chooses γ ≤ `longest` anew every few rounds, from the acceptance over recent rounds of all rows and the costs.

    Chains of drafters that know their confidence are also cut within the round: a slot is verified while the tokens
    that it and later slots are expected to bring exceed those of recent rounds in the same time. All that this looks
    at is known before the slot's tokens are, so drafts stay lossless: see `draftsmith.decode.proposers.survival`.

    Without measured `costs` it measures the target's before the first round, and learns the rest of a round, drafting
    included, from the time between drafts. Under sampling the texts then depend on the clock: their distribution is
    right, but a seed does not repeat them.
    """

    costs: RoundCosts | None = None
    longest: int = 8
    decay: float = 0.96
    cut: Survival = field(default_factory=Survival, init=False)
    _accepted: float = field(default=3.0, init=False)
    _rejected: float = field(default=1.0, init=False)
    # For each slot the recent rounds that might draft it, and verified, or accepted, the slot before it, or its own
    _slots: list[tuple[float, float, float, float]] = field(default_factory=list, init=False)
    _asked: int = field(default=0, init=False)  # γ of the round
    # B → a row's tokens in recent rounds that drafted, and those that plain decoding would have brought in their time
    _speeds: dict[int, tuple[float, float]] = field(default_factory=dict, init=False)
    _rows: int = field(default=0, init=False)  # of the last round
    _started: int = field(default=0, init=False)  # rows of the present call
    _choice: int = field(default=0, init=False)  # the last γ
    _holds: int = field(default=0, init=False)  # for how many more rounds
    _choices: int = field(default=0, init=False)  # of drafts at once
    _pause: int = field(default=0, init=False)  # how long nothing is drafted between two tries; 0 while drafting pays
    _target: dict[int, dict[int, float]] = field(default_factory=dict, init=False)  # B → k → t(k)
    _forwards: dict[tuple[int, int], float] = field(default_factory=dict, init=False)  # B, k → t(k), interpolated
    _blocks: list[int] = field(default_factory=list, init=False)  # tokens that a row verifies, by depth of the draft
    # B, whether a round drafted → the seconds of such rounds less t, by steps if drafts stop, and otherwise by the mean
    # of the drafted and the verified length: the two hardly differ, so that their prices cannot be told apart
    _rests: dict[tuple[int, bool], Line] = field(default_factory=dict, init=False)
    # Of the last round: its begin, number of rows, whether it drafted, the draft's size, nodes, earlier compilations
    _round: tuple[float, tuple[int, bool], float, int, int] | None = field(default=None, init=False)
    _present: RoundCosts | None = field(default=None, init=False)  # of the round
    # By whether a round drafts, how many more such rounds of the call are not timed: the first has the prompts'
    # forward, and the second of a drafter of features its own over the prompts
    _untimed: dict[bool, int] = field(default_factory=dict, init=False)
    _proposer: Proposer | None = field(default=None, init=False)

    def start(self, target: PreTrainedModel, proposer: Proposer, rows: int, context: int, compiled: bool) -> None:
        """Begin with new rows, and measure the target unless its costs were given or measured for such drafts."""
        if proposer is not self._proposer:
            self._rests, self._speeds, self._pause = {}, {}, 0
        if not self._pause:
            self._holds = 0
        self._proposer, self._started, self._forwards = proposer, rows, {}
        self._round, self._untimed = None, {False: 1, True: 2}
        self._blocks = [1 + proposer.nodes(depth) for depth in range(self.longest + 1)]
        largest = self._blocks[-1]
        sizes = sorted({1, 2, (largest + 2) // 2, largest})
        for count in {1, rows}:  # rows that end leave the batch
            if self.costs is None and max(self._target.get(count, {0: 0.0})) < largest:
                self._target[count] = verification_costs(target, count, context, sizes, compiled=compiled)

    def draft_length(self, rows: int = 1) -> int:
        """Return γ for the next round of this number of rows, and set the levels by which its chains are cut."""
        over = not self._holds
        if not over and rows == self._rows:
            self._holds -= 1
            return self._choice
        longest, nodes, proposer = self.longest, None, self._proposer
        if proposer is not None:  # its own limit, and its trees' sizes
            nodes = proposer.nodes
            longest = longest if proposer.longest is None else min(longest, proposer.longest)
        self._present = costs = self._costs(rows)
        if costs is None:
            return min(4, longest)
        acceptance, plain = self._accepted / (self._accepted + self._rejected), costs.target[1] + costs.plain_overhead
        least, probe = 0, 1
        if proposer is not None and proposer.cuts:
            # At first drafting is taken to pay.
            tokens, forwards = self._speeds.setdefault(rows, (FIRST_ROUNDS * FIRST_SPEEDUP, FIRST_ROUNDS))
            speedup = tokens / forwards
            rate = max(speedup, 1.0) / plain  # plain decoding's can always be had
            step = costs.draft_step if proposer.stops else 0.0
            self.cut.levels = [rate * seconds for seconds in costs.slot_prices(longest, acceptance, step)]
            self.cut.undrafted = self.cut.levels
            if proposer.stops:
                undrafted = costs.slot_prices(longest, acceptance, step, drafted=False)
                self.cut.undrafted = [rate * seconds for seconds in undrafted]
            if proposer.stops or proposer.at_once:
                # Many recent rounds that paid say more than the few by which a slot is judged.
                least, probe = int(speedup >= (1.0 if self._pause else GIVE_UP)), longest
                rest, wanted = self._rest(rows, False), CLOSE_ROUNDS if speedup < CLOSE else FAR_ROUNDS
                if self.costs is None and least and (rest is None or rest.weight < wanted):
                    return 0
        if proposer is not None and proposer.stops:
            best = longest * least  # what is cut was not drafted in vain
        else:
            best = best_draft_length(costs, *self._shares(acceptance, longest), nodes, least)
        last, self._choice = self._choice, best
        if best:
            self._pause, self._holds = 0, HOLDS
        elif over and self._pause and not last:  # a try, which cuts nothing
            self._pause, self._choice, self.cut.levels = min(2 * self._pause, LONGEST_PAUSE), probe, ()
        elif over or last:
            self._pause = self._pause or FIRST_PAUSE
            self._holds = self._pause - 2
        if best and proposer is not None and proposer.at_once and self.costs is None:
            # Drafts of one length would not show what their last slots cost, or what longer ones bring.
            self._choices += 1
            if self._choices % OTHERS == 1 and longest > 1:
                self._holds = 0
                return best * 2 if best * 2 <= longest else best // 2
        return self._choice

    def propose(
        self, target: PreTrainedModel, proposer: Proposer, contexts: Sequence[Tensor], room: Sequence[int]
    ) -> list[Proposal]:
        """Let the proposer draft for rows with room for `room` tokens each; time it where no costs were given."""
        begin, last = time.perf_counter(), self._round
        if last is not None and last[-1] == compilations():  # its tokens have been read on the host
            since, kind, size, nodes, _ = last
            forward = self._forward(kind[0], 1 + nodes)
            self._rests.setdefault(kind, Line()).add(size, begin - since - forward, forward / 4)
            if kind[1] and (undrafted := self._rest(kind[0], False)):
                undrafted.fade()  # no older than what it is compared with
        gamma, before, self.cut.seen = self.draft_length(len(room)), compilations(), 0
        self._rows = len(room)
        lengths = [min(gamma, tokens) for tokens in room]
        self._asked, drafts = max(lengths), proposer.propose(contexts, lengths)
        depth, nodes = max(draft.tree.depth for draft in drafts), max(len(draft.tree) for draft in drafts)
        cut = proposer.cuts and self._asked and any(draft.confidence is not None for draft in drafts)
        # The q that stops a draft was computed, too.
        steps = self.cut.seen if proposer.stops else self._asked
        if cut and self._rows in self._speeds and (costs := self._present) is not None:
            kept = RATE_DECAY ** (16 if self._pause else 1)  # the round stands for some that did not draft
            tokens, forwards = self._speeds[self._rows]
            now = costs.round_seconds(steps, nodes=depth) / (costs.target[1] + costs.plain_overhead)
            self._speeds[self._rows] = kept * tokens, kept * forwards + now
        self._round, untimed = None, self._untimed[gamma > 0]
        self._untimed = {False: 0, True: max(0, self._untimed[True] - (gamma > 0))}
        if self.costs is None and not untimed:
            size = steps if proposer.stops else (steps + depth) / 2
            self._round = begin, (self._rows, gamma > 0), size, nodes, before
        return drafts

    def observe(self, accepted: int, draft: Proposal, drafted: int) -> None:
        """Update the estimates with the result of one row's draft, of whose depths `drafted` count."""
        if self._asked and draft.confidence is not None and draft.tree.is_chain:
            if self._rows in self._speeds:
                tokens, forwards = self._speeds[self._rows]
                self._speeds[self._rows] = tokens + (1 + accepted) / self._rows, forwards
            self.cut.observe(draft.confidence, accepted, drafted)
        if drafted:  # old rounds lose weight; a round has one rejection at most
            self._accepted = self._accepted * self.decay + accepted
            self._rejected = self._rejected * self.decay + (accepted < drafted)
        if asked := max(self._asked, drafted):
            self._slots += [(0.0, 0.0, 0.0, 0.0)] * (asked - len(self._slots))
            for slot, counts in enumerate(self._slots):
                now = drafted >= slot, drafted > slot, accepted >= slot, accepted > slot
                kept = [self.decay * count + (slot < asked and is_so) for count, is_so in zip(counts, now, strict=True)]
                self._slots[slot] = kept[0], kept[1], kept[2], kept[3]

    def _shares(self, acceptance: float, longest: int) -> tuple[list[float], list[float]]:
        """Return the shares of rounds that accept, and that verify, a token at each depth.

        A slot that was hardly drafted of late is taken to be verified, and accepted as others are.
        """
        accepted, verified = [1.0], [1.0]
        for before, itself, reached, hits in [*self._slots, *[(0.0,) * 4] * longest][:longest]:
            accepted.append(accepted[-1] * (hits + 2 * acceptance) / (reached + 2))
            verified.append(verified[-1] * (itself + 2) / (before + 2))
        return accepted[1:], verified[1:]

    def _forward(self, rows: int, tokens: int) -> float:
        """Return t(k) for a number of rows of the present call."""
        if (seconds := self._forwards.get((rows, tokens))) is None:
            by_rows = {count: interpolate(self._target[count], tokens) for count in (1, self._started)}
            seconds = self._forwards[rows, tokens] = interpolate(by_rows, rows)
        return seconds

    def _costs(self, rows: int) -> RoundCosts | None:
        """Return the costs of a round of some rows; None before a round that drafted was timed."""
        if self.costs is not None:
            return self.costs

        proposer = self._proposer
        if (drafted := self._rest(rows, True)) is None or proposer is None:
            return None
        undrafted, forward = self._rest(rows, False), self._forward(rows, 1)
        plain = forward + (undrafted.at(0) if undrafted else 0.0)
        ends = None if proposer.at_once else plain - forward
        start = drafted.at(0, ends)
        step = drafted.at(1, ends) - start
        of_verified = 0.0 if proposer.stops else step / 2
        seconds = {k: self._forward(rows, k) + start + depth * of_verified for depth, k in enumerate(self._blocks)}
        return RoundCosts(seconds, max(0.0, step - of_verified), plain_overhead=plain - seconds[1])

    def _rest(self, rows: int, drafted: bool) -> Line | None:
        """Return what is known of the rest of rounds that drafted, or did not, at the nearest number of rows."""
        counts = [n for n, drafts in self._rests if drafts == drafted]
        return self._rests[min(counts, key=lambda n: abs(n - rows)), drafted] if counts else None


@dataclass(frozen=True)
class FixedLength:
    """A fixed γ in place of a `Plan`; chains end before the first slot whose survival is less than `survival`.

    A row's survival is the product of its confidences up to the slot. A batch's is the mean of its rows'.
    """

    longest: int
    survival: float = 0.0

    def __post_init__(self) -> None:
        at_least(1).check("draft_length", self.longest)
        (at_least(0) & at_most(1)).check("survival", self.survival)

    @property
    def cut(self) -> Survival | None:
        """A rule that cuts chains; None if nothing does."""
        return Survival([self.survival], learns=False) if self.survival else None

    def start(self, target: PreTrainedModel, proposer: Proposer, rows: int, context: int, compiled: bool) -> None:
        """Measure nothing; raise InputError if nothing says how sure the drafts are."""
        if self.survival and not proposer.cuts:
            raise InputError(
                "survival: expected chains of a drafter that knows its confidence, under the exact rule, found "
                f"{type(proposer).__name__}"
            )

    def propose(
        self, target: PreTrainedModel, proposer: Proposer, contexts: Sequence[Tensor], room: Sequence[int]
    ) -> list[Proposal]:
        """Let the proposer draft for rows with room for `room` drafted tokens each."""
        return proposer.propose(contexts, [min(self.longest, tokens) for tokens in room])

    def observe(self, accepted: int, draft: Proposal, drafted: int) -> None:
        """Learn nothing."""


def as_plan(draft_length: "int | Plan | FixedLength | None", longest: int | None = None) -> Plan | FixedLength:
    """Return the plan itself, a new one for None, or one of a fixed draft length if it is in the proposer's range."""
    plan = FixedLength(draft_length) if isinstance(draft_length, int) else draft_length or Plan()
    if longest is not None and isinstance(plan, FixedLength) and plan.longest > longest:
        raise InputError(
            f"draft_length: expected at most the {longest} tokens that the draft was trained to propose, found "
            f"{plan.longest}"
        )
    return plan
