"""τ and α of a server: what the steps of its texts emitted and accepted, out of its counts in any convention.

τ is the tokens that entered texts ÷ the steps that verified a draft, and α the accepted tokens of the texts ÷ the
positions that were tried there: what comes after the end of a text belongs to neither. Servers differ in three
conventions (`Convention`), which can be told from the counts. With D steps that emit E tokens, C steps that the end of
a text cut within their accepted tokens, and F steps that accepted a whole draft and emitted γ + 1 tokens

    accepted = E − D + C        tried = E − F

and what a server counts as accepted lies above E − D by C if it stops counting at the end of a text, and by up to γ for
each text if it does not. Every convention that the counts allow is computed: where all say the same, τ and α are known;
where they do not, they are known within bounds.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any

from draftsmith.decode.measurement.intervals import LEAST, Estimate, Interval, ratio, ratio_interval
from draftsmith.decode.measurement.server_counts import Convention, ServerCounts, in_words

NOTHING = Estimate(None, None, 0)


@dataclass(frozen=True)
class CountedTexts:
    """Texts that a server counted together, or one that it counted alone."""

    counts: ServerCounts
    tokens: int
    """Of all texts."""
    texts: int = 1
    short: int = 0
    """Texts of a single token, as far as known."""
    parts: Sequence[Sequence[int]] = ()
    """Tokens of each part that each text came in; zeros where a part has no ids, nothing where parts are not known."""
    prompts: Sequence[int] = ()
    """The prompt of each text."""
    accepted: bool = True
    """Whether the counts have accepted tokens, and not steps alone."""


@dataclass(frozen=True)
class TextSteps:
    """What the steps that verified drafts did in a text, or in several; accepted and tried tokens within bounds."""

    drafts: float = 0
    emitted: float = 0
    accepted: Interval = (0, 0)
    tried: Interval = (0, 0)

    def __add__(self, other: "TextSteps") -> "TextSteps":
        accepted, tried = (
            (ours[0] + theirs[0], ours[1] + theirs[1])
            for ours, theirs in ((self.accepted, other.accepted), (self.tried, other.tried))
        )
        return TextSteps(self.drafts + other.drafts, self.emitted + other.emitted, accepted, tried)


@dataclass(frozen=True)
class Reading:
    """Counts as one convention has them."""

    total: TextSteps
    by_prompt: Mapping[int, TextSteps]
    """Empty where it is not known prompt by prompt."""
    in_parts: bool
    """Whether each part of the answers was a step."""
    alpha: bool
    """Whether every step drafted γ tokens in a chain, so that tried positions are known."""


@dataclass(frozen=True)
class ServerSteps:
    """The estimates of τ and α, by all conventions that the counts allow."""

    draft_length: int | None
    """γ; None where drafts differ in length."""
    readings: Mapping[Convention, Reading]

    def mean_acceptance_length(self, prompts: Set[int] | None = None) -> Estimate:
        """Estimate τ, emitted tokens ÷ steps, of all prompts or of some, with its interval over prompts.

        The value is None where it is known within bounds alone, which are `length_bounds`.
        """
        most = None if self.draft_length is None else self.draft_length + 1.0
        return self._estimate(_length, (1.0, most), None, prompts)

    def alpha(self, confidence: float | None = None) -> Estimate:
        """Estimate α, accepted ÷ tried positions, with its 95 % interval, or one of another level.

        Where each position is accepted with one probability, as α says, this is its maximum-likelihood estimate. The
        value is None where it is known within bounds alone; the interval holds them.
        """
        if not all(reading.alpha for reading in self.readings.values()):
            return NOTHING
        return self._estimate(_alpha, (0.0, 1.0), confidence)

    def length_bounds(self) -> Interval | None:
        """Return the least and the greatest τ that the counts allow; None where they allow none."""
        return self._bounds(_length)

    def alpha_bounds(self) -> Interval | None:
        """Return the least and the greatest α that the counts allow; None where it is not known at all."""
        known = all(reading.alpha for reading in self.readings.values())
        return self._bounds(_alpha) if known else None

    def counts(self, counted: ServerCounts) -> ServerCounts:
        """Return a server's counts as those of single texts' steps, without the target's own tokens, where known."""
        found = {
            replace(convention, prompt_drafts=False, beyond_end=False).counted(
                counted, reading.total.drafts, self.draft_length
            )
            for convention, reading in self.readings.items()
        }
        (alone,) = found if len(found) == 1 else (None,)
        return alone or counted

    def convention(self) -> str | None:
        """Return in words how the server counts, as far as the counts tell; None where they fit no convention."""
        return in_words(self.readings) if self.readings else None

    def _bounds(self, of: Callable[[TextSteps], "Quotients"]) -> Interval | None:
        quotients = [of(reading.total) for reading in self.readings.values()]
        values = [top / under for each in quotients for top, under in each if under]
        return (min(values), max(values)) if values else None

    def _estimate(
        self,
        of: Callable[[TextSteps], "Quotients"],
        possible: tuple[float, float | None],
        confidence: float | None,
        prompts: Set[int] | None = None,
    ) -> Estimate:
        readings = [
            {prompt: steps for prompt, steps in reading.by_prompt.items() if prompts is None or prompt in prompts}
            for reading in self.readings.values()
        ]
        if prompts is None:
            bounds = self._bounds(of)
        else:
            ends = [end for reading in readings for end in of(sum(reading.values(), TextSteps()))]
            values = [top / under for top, under in ends if under]
            bounds = (min(values), max(values)) if values else None
        if bounds is None:
            return NOTHING
        intervals, count = list[Interval | None](), 0
        for reading in readings:
            quotients = [of(steps) for steps in reading.values()]
            count = len(quotients)
            for end in (0, 1):
                columns = [each[end][0] for each in quotients], [each[end][1] for each in quotients]
                intervals.append(
                    ratio(*columns).ci95 if confidence is None else ratio_interval(*columns, confidence=confidence)
                )
        known = [each for each in intervals if each is not None]
        value = bounds[0] if bounds[1] - bounds[0] < 1e-12 else None
        if len(known) < len(intervals) or not known:
            return Estimate(value, None, count)
        least, most = possible
        low, high = max(min(low for low, _ in known), least), max(high for _, high in known)
        return Estimate(value, (low, high if most is None else min(high, most)), count)


Quotients = tuple[tuple[float, float], tuple[float, float]]
"""Numerator and denominator of the least and of the greatest value."""


def server_steps(groups: Sequence[CountedTexts], draft_length: int | None = None, tree: bool = False) -> ServerSteps:
    """Return what the counts of a server tell of its steps.

    Where the parts of the answers are as many as the steps that one convention needs, that one holds.

    Args:
        groups: the texts, as they were counted.
        draft_length: γ, if it is known from elsewhere than the counts.
        tree: whether drafts are trees, of which tried positions are not known.
    """
    counts, readings = sum((group.counts for group in groups), ServerCounts()), dict[Convention, Reading]()
    lengths, texts = dict[Convention, int | None](), sum(group.texts for group in groups)
    for by_batch, prompt_drafts, beyond_end, bonus in product((False, True), repeat=4):
        convention = Convention(prompt_drafts, beyond_end, bonus, by_batch)
        gamma = None if tree else draft_length or _draft_length(counts, convention)
        rows = gamma is None or counts.num_draft_tokens <= gamma * counts.num_drafts
        if by_batch and (texts == len(groups) or not counts.num_drafts or (readings and rows)):
            continue
        read = [_read(group, convention, gamma) for group in groups]
        found = [reading for reading in read if reading is not None]
        if found and len(found) == len(groups):
            readings[convention] = _together(found)
            lengths[convention] = gamma
    whole = {convention: reading for convention, reading in readings.items() if reading.in_parts}
    parts = sum(len(of) for group in groups for of in group.parts)
    # As many parts as drafts may also be those of texts whose first two steps came together: not of many long ones.
    if (texts >= LEAST and parts >= LEAST * texts) or any(not convention.prompt_drafts for convention in whole):
        readings = whole or readings
    # Where one explains all drafted tokens, by steps of γ, those do not hold that need shorter drafts.
    readings = {convention: reading for convention, reading in readings.items() if reading.alpha} or readings
    gammas = {lengths[convention] for convention in readings}
    return ServerSteps(gammas.pop() if len(gammas) == 1 else None, readings)


def _draft_length(counts: ServerCounts, convention: Convention) -> int | None:
    """Return γ, as the counts have it under a convention; None where they do not tell."""
    drafts, drafted = counts.num_drafts, counts.num_draft_tokens
    positions = len(counts.num_accepted_tokens_per_pos)
    if not drafts or not drafted:
        return None
    if not convention.by_batch and drafted % drafts == 0 and drafted // drafts >= positions - convention.bonus:
        return int(drafted // drafts)
    # Of a batch's steps or of drafts that the end of a text cuts; vLLM lists a position that was never accepted, too.
    return max(positions - convention.bonus, 0) or None


def _read(group: CountedTexts, convention: Convention, gamma: int | None) -> Reading | None:
    """Return what a convention makes of the counts; None where they are impossible under it."""
    first = 0 if convention.prompt_drafts else 1
    emitted = group.tokens - first * group.texts
    steps = [list(parts[first:]) for parts in group.parts]
    parts_count = sum(map(len, steps))
    counts = convention.counted(group.counts, _batch_steps(group.counts, parts_count, gamma), gamma)
    if counts is None:
        return None
    drafts, ends = counts.num_drafts, group.texts - first * group.short
    accepted = counts.num_accepted_tokens if group.accepted else emitted - drafts
    over = accepted + drafts - emitted
    most = ends * (1 if not convention.beyond_end else gamma or float("inf"))
    if not (drafts <= emitted and 0 <= over <= most):
        return None
    if gamma is not None and (emitted > (gamma + 1) * drafts or counts.num_draft_tokens > gamma * drafts):
        return None
    complete = len(group.parts) == group.texts and all(0 not in parts for parts in group.parts)
    if complete and sum(map(sum, group.parts)) == group.tokens and parts_count > drafts:
        return None  # a step comes in one part at most
    in_parts = bool(group.parts) and parts_count == drafts
    if not (in_parts and complete and all(parts[0] == 1 for parts in group.parts if first)):
        return _by_totals(group, convention, gamma, counts, emitted, ends, in_parts and not complete)
    return _by_parts(group, convention, gamma, counts, steps, over)


def _batch_steps(counts: ServerCounts, parts: int, gamma: int | None) -> float:
    """Return the steps of single texts, where a server counts those of batches."""
    if gamma is not None and counts.num_draft_tokens > gamma * counts.num_drafts:
        return counts.num_draft_tokens // gamma
    return parts


def _by_totals(
    group: CountedTexts,
    convention: Convention,
    gamma: int | None,
    counts: ServerCounts,
    emitted: int,
    ends: int,
    in_parts: bool,
) -> Reading:
    """Return what sums alone tell."""
    drafts, per_pos = counts.num_drafts, counts.num_accepted_tokens_per_pos
    if gamma is None or not group.accepted or counts.num_draft_tokens != gamma * drafts:
        return _reading(group, [TextSteps(drafts, emitted)], in_parts, alpha=False)
    over = counts.num_accepted_tokens + drafts - emitted
    cut = (over, over) if not convention.beyond_end else (-(-over // gamma), min(over, ends))
    if per_pos:
        whole = per_pos[gamma - 1] if len(per_pos) >= gamma else 0
        # Those of them that the end of a text cut emitted no token of the target's.
        full = whole - min(whole, cut[1]), whole - max(0, whole - (drafts - cut[0]))
    else:
        full = max(0, emitted - gamma * drafts), min(drafts - cut[0], (emitted - drafts) // gamma)
    accepted = emitted - drafts + cut[0], emitted - drafts + cut[1]
    steps = TextSteps(drafts, emitted, accepted, (emitted - full[1], emitted - full[0]))
    return _reading(group, [steps], in_parts, alpha=True)


def _by_parts(
    group: CountedTexts,
    convention: Convention,
    gamma: int | None,
    counts: ServerCounts,
    steps: Sequence[Sequence[int]],
    over: float,
) -> Reading | None:
    """Return what parts tell that are steps: of all but the last of a text, how many tokens it accepted."""
    if gamma is None or not group.accepted:
        texts = [TextSteps(len(of), sum(of)) for of in steps]
        return _reading(group, texts, True, alpha=False)
    if max((size for of in steps for size in of), default=0) > gamma + 1:
        return None
    last = Counter(of[-1] for of in steps if of)
    cut = _cut(convention, gamma, counts, Counter(size - 1 for of in steps for size in of[:-1]), last, over)
    if cut is None:
        return None
    undrafted = gamma * counts.num_drafts - counts.num_draft_tokens  # where drafts count up to the end of a text
    whole = undrafted == 0 or undrafted == sum(low * (gamma - size) for size, (low, _) in cut.items())
    texts = []
    for of in steps:
        low, high = (cut[of[-1]][end] / last[of[-1]] for end in (0, 1)) if of else (0.0, 0.0)
        accepted, tried = sum(of) - len(of), sum(min(size, gamma) for size in of)
        texts.append(TextSteps(len(of), sum(of), (accepted + low, accepted + high), (tried, tried)))
    return _reading(group, texts, True, alpha=whole)


def _cut(
    convention: Convention,
    gamma: int,
    counts: ServerCounts,
    before: Mapping[int, int],
    last: Mapping[int, int],
    over: float,
) -> dict[int, Interval] | None:
    """Return, of the last steps of e tokens, how many the end cut within their accepted tokens, by e, within bounds.

    A step that was not cut accepted e − 1 tokens, and one that was at least e. So of the last steps with e tokens as
    many were not cut as there are more last steps of at least e tokens than of at least e accepted ones, or more;
    and no more than accepted e − 1.

    Args:
        convention: how the server counts.
        gamma: γ.
        counts: of the server.
        before: how many steps before the last of a text accepted each number of tokens.
        last: how many last steps emitted each number of tokens.
        over: accepted tokens and steps, less emitted tokens.

    Returns:
        None where the counts are impossible.
    """
    sizes, per_pos = range(1, gamma + 2), counts.num_accepted_tokens_per_pos
    if not per_pos:
        candidates = sum(last[size] for size in sizes[:-1])
        low, high = (over, over) if not convention.beyond_end else (-(-over // gamma), min(over, candidates))
        if high > candidates:
            return None
        return {s: (low * last[s] / candidates, high * last[s] / candidates) if s <= gamma and candidates else (0, 0)
                for s in sizes}  # fmt: skip
    reached = [counts.num_drafts, *per_pos, *[0] * (gamma + 1 - len(per_pos))]
    accepted = [more - fewer - before.get(j, 0) for j, (more, fewer) in enumerate(pairwise(reached))]
    found = {}
    for size in sizes:
        least = sum(last[s] for s in sizes if s >= size) - sum(accepted[size:])
        uncut = max(0, least), min(last[size], accepted[size - 1])
        if uncut[0] > uncut[1] or (not convention.beyond_end and least < 0):
            return None
        found[size] = (last[size] - uncut[1] if convention.beyond_end else last[size] - least, last[size] - uncut[0])
    return found


def _reading(group: CountedTexts, steps: Sequence[TextSteps], in_parts: bool, alpha: bool) -> Reading:
    by_prompt = dict[int, TextSteps]()
    if len(steps) == len(group.prompts):
        for prompt, of in zip(group.prompts, steps, strict=True):
            by_prompt[prompt] = by_prompt.get(prompt, TextSteps()) + of
    return Reading(sum(steps, TextSteps()), by_prompt, in_parts, alpha)


def _together(readings: Sequence[Reading]) -> Reading:
    """Return one reading of all groups."""
    by_prompt = dict[int, TextSteps]()
    if all(reading.by_prompt for reading in readings):
        for prompt, steps in (item for reading in readings for item in reading.by_prompt.items()):
            by_prompt[prompt] = by_prompt.get(prompt, TextSteps()) + steps
    total = sum((reading.total for reading in readings), TextSteps())
    flags: Any = {name: all(getattr(reading, name) for reading in readings) for name in ("in_parts", "alpha")}
    return replace(readings[0], total=total, by_prompt=by_prompt, **flags)


def _length(steps: TextSteps) -> Quotients:
    return (steps.emitted, steps.drafts), (steps.emitted, steps.drafts)


def _alpha(steps: TextSteps) -> Quotients:
    return (steps.accepted[0], steps.tried[1]), (steps.accepted[1], steps.tried[0])
