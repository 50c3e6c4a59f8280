"""τ and α of a server: emitted and accepted tokens of its texts' steps, from its counts in any convention.

τ is the texts' tokens ÷ the steps that verified a draft, and α the texts' accepted tokens ÷ the positions that were
tried: what comes after the end of a text belongs to neither. Servers differ in their conventions (`Convention`), which
the counts reveal. With D steps that emit E tokens, C steps that the end of a text cut within their accepted tokens, and
F steps that accepted a whole draft and emitted γ + 1 tokens

    accepted = E − D + C        tried = E − F

A server's accepted tokens exceed E − D by C if it stops counting at the end of a text, and by up to γ per text if it
does not. Every convention that the counts allow is computed: where all agree, τ and α are known; where they do not,
they are known within bounds.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
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
    texts: int = 1
    short: int = 0
    """Texts of a single token, as far as known."""
    parts: Sequence[Sequence[int]] = ()
    """Tokens of each part of each text; zeros for parts without ids, empty if parts are not known."""
    prompts: Sequence[int] = ()
    accepted: bool = True
    """True if the counts have accepted tokens, and not only steps."""


@dataclass(frozen=True)
class TextSteps:
    """Steps that verified drafts in one or several texts; accepted and tried tokens are within bounds."""

    drafts: float = 0
    emitted: float = 0
    accepted: Interval = (0, 0)
    tried: Interval = (0, 0)

    def __add__(self, other: "TextSteps") -> "TextSteps":
        accepted, tried = (
            (left[0] + right[0], left[1] + right[1])
            for left, right in ((self.accepted, other.accepted), (self.tried, other.tried))
        )
        return TextSteps(self.drafts + other.drafts, self.emitted + other.emitted, accepted, tried)


@dataclass(frozen=True)
class Reading:
    """The counts as read in one convention."""

    total: TextSteps
    by_prompt: Mapping[int, TextSteps]
    """Steps by prompt; empty if not known."""
    in_parts: bool
    """True if each part of the answers was a step."""
    alpha: bool
    """True if every step drafted a chain of γ tokens, so that the tried positions are known."""


@dataclass(frozen=True)
class ServerSteps:
    """The estimates of τ and α, in all conventions that the counts allow."""

    draft_length: int | None
    """γ; None if drafts differ in length."""
    readings: Mapping[Convention, Reading]

    def mean_acceptance_length(self, prompts: Set[int] | None = None) -> Estimate:
        """Estimate τ, emitted tokens ÷ steps, over all prompts or some, with its interval over prompts.

        The value is None if it is only known within `length_bounds`.
        """
        most = None if self.draft_length is None else self.draft_length + 1.0
        return self._estimate(_length, (1.0, most), None, prompts)

    def alpha(self, confidence: float | None = None) -> Estimate:
        """Estimate α, accepted ÷ tried positions, with its 95 % interval, or one of another level.

        If each position is accepted with the same probability, as α assumes, this is its maximum-likelihood estimate.
        The value is None if it is only known within bounds, which the interval holds.
        """
        if not all(reading.alpha for reading in self.readings.values()):
            return NOTHING
        return self._estimate(_alpha, (0.0, 1.0), confidence)

    def length_bounds(self) -> Interval | None:
        """Return the least and the greatest τ that the counts allow; None if there is none."""
        return self._bounds(_length)

    def alpha_bounds(self) -> Interval | None:
        """Return the least and the greatest α that the counts allow; None if unknown."""
        all_known = all(reading.alpha for reading in self.readings.values())
        return self._bounds(_alpha) if all_known else None

    def counts(self, counted: ServerCounts) -> ServerCounts:
        """Return a server's counts as those of single texts' steps, without the target's own tokens, if known."""
        single = {
            replace(convention, prompt_drafts=False, beyond_end=False).counted(
                counted, reading.total.drafts, self.draft_length
            )
            for convention, reading in self.readings.items()
        }
        return (single.pop() if len(single) == 1 else None) or counted

    def convention(self) -> str | None:
        """Return in words how the server counts, as far as known; None if no convention fits."""
        return in_words(self.readings) if self.readings else None

    def _bounds(self, quotients_of: Callable[[TextSteps], "Quotients"]) -> Interval | None:
        quotients = [quotients_of(reading.total) for reading in self.readings.values()]
        return _extremes(ends for quotient in quotients for ends in quotient)

    def _estimate(
        self,
        quotients_of: Callable[[TextSteps], "Quotients"],
        possible: tuple[float, float | None],
        confidence: float | None,
        prompts: Set[int] | None = None,
    ) -> Estimate:
        readings = [
            {prompt: steps for prompt, steps in reading.by_prompt.items() if prompts is None or prompt in prompts}
            for reading in self.readings.values()
        ]
        if prompts is None:
            bounds = self._bounds(quotients_of)
        else:
            bounds = _extremes(end for reading in readings for end in quotients_of(sum(reading.values(), TextSteps())))
        if bounds is None:
            return NOTHING
        intervals, count = list[Interval | None](), 0
        for reading in readings:
            quotients = [quotients_of(steps) for steps in reading.values()]
            count = len(quotients)
            for end in (0, 1):
                tops, unders = [pair[end][0] for pair in quotients], [pair[end][1] for pair in quotients]
                interval = ratio(tops, unders).ci95
                if confidence is not None:
                    interval = ratio_interval(tops, unders, confidence=confidence)
                intervals.append(interval)
        value = bounds[0] if bounds[1] - bounds[0] < 1e-12 else None
        known = [interval for interval in intervals if interval is not None]
        if len(known) < len(intervals) or not known:
            return Estimate(value, None, count)
        # The interval holds those of both ends in every convention.
        least, most = possible
        low, high = max(min(low for low, _ in known), least), max(high for _, high in known)
        return Estimate(value, (low, high if most is None else min(high, most)), count)


def _extremes(quotients: Iterable[tuple[float, float]]) -> Interval | None:
    """Return the least and the greatest of the quotients that are defined."""
    values = [top / under for top, under in quotients if under]
    return (min(values), max(values)) if values else None


Quotients = tuple[tuple[float, float], tuple[float, float]]


def server_steps(groups: Sequence[CountedTexts], draft_length: int | None = None, tree: bool = False) -> ServerSteps:
    """Return the steps of a server that its counts allow.

    If the number of parts equals one convention's steps, that convention holds. `draft_length` is γ if known from
    elsewhere than the counts; the tried positions of trees are unknown.
    """
    counts, readings = sum((group.counts for group in groups), ServerCounts()), dict[Convention, Reading]()
    lengths, texts = dict[Convention, int | None](), sum(group.texts for group in groups)
    for by_batch, prompt_drafts, beyond_end, bonus in product((False, True), repeat=4):
        convention = Convention(prompt_drafts, beyond_end, bonus, by_batch)
        gamma = None if tree else draft_length or _draft_length(counts, convention)
        # Counts by batch are tried last: only where texts share counts, and no count by row explains the drafts.
        rows = gamma is None or counts.num_draft_tokens <= gamma * counts.num_drafts
        if by_batch and (texts == len(groups) or not counts.num_drafts or (readings and rows)):
            continue
        by_group = [_read(group, convention, gamma) for group in groups]
        possible = [reading for reading in by_group if reading is not None]
        if possible and len(possible) == len(groups):
            readings[convention] = _together(possible)
            lengths[convention] = gamma
    whole = {convention: reading for convention, reading in readings.items() if reading.in_parts}
    parts = sum(len(sizes) for group in groups for sizes in group.parts)
    # Texts whose first two steps came in one part may have as many parts as drafts by chance, but not many long texts.
    if (texts >= LEAST and parts >= LEAST * texts) or any(not convention.prompt_drafts for convention in whole):
        readings = whole or readings
    # If one convention explains all drafted tokens by steps of γ, those that need shorter drafts are dropped.
    readings = {convention: reading for convention, reading in readings.items() if reading.alpha} or readings
    gammas = {lengths[convention] for convention in readings}
    return ServerSteps(gammas.pop() if len(gammas) == 1 else None, readings)


def _draft_length(counts: ServerCounts, convention: Convention) -> int | None:
    """Return γ as the counts have it in a convention; None if they do not tell."""
    drafts, drafted = counts.num_drafts, counts.num_draft_tokens
    positions = len(counts.num_accepted_tokens_per_pos)
    if not drafts or not drafted:
        return None
    if not convention.by_batch and drafted % drafts == 0 and drafted // drafts >= positions - convention.bonus:
        return int(drafted // drafts)
    # Steps of batches, or drafts cut by a text's end, divide unevenly; but vLLM lists all positions, accepted or not.
    return max(positions - convention.bonus, 0) or None


def _read(group: CountedTexts, convention: Convention, gamma: int | None) -> Reading | None:
    """Return the reading of the counts in a convention; None if they are impossible in it."""
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
    # Each step emits at least one token, and only the end of a text can leave accepted tokens out of it.
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
    """Return the steps of single texts, for a server that counts those of batches."""
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
    drafts, per_pos = counts.num_drafts, counts.num_accepted_tokens_per_pos
    if gamma is None or not group.accepted or counts.num_draft_tokens != gamma * drafts:
        return _reading(group, [TextSteps(drafts, emitted)], in_parts, alpha=False)
    over = counts.num_accepted_tokens + drafts - emitted
    cut = (over, over) if not convention.beyond_end else (-(-over // gamma), min(over, ends))
    if per_pos:
        whole = per_pos[gamma - 1] if len(per_pos) >= gamma else 0
        # A whole draft that the end of a text cut emitted no token of the target's own.
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
    """Return the reading by parts that are steps: all but a text's last one tell how many tokens were accepted."""
    if gamma is None or not group.accepted:
        texts = [TextSteps(len(sizes), sum(sizes)) for sizes in steps]
        return _reading(group, texts, True, alpha=False)
    if max((size for sizes in steps for size in sizes), default=0) > gamma + 1:
        return None
    last = Counter(sizes[-1] for sizes in steps if sizes)
    cut = _cut(convention, gamma, counts, Counter(size - 1 for sizes in steps for size in sizes[:-1]), last, over)
    if cut is None:
        return None
    undrafted = gamma * counts.num_drafts - counts.num_draft_tokens  # where drafts count up to the end of a text
    whole = undrafted == 0 or undrafted == sum(low * (gamma - size) for size, (low, _) in cut.items())
    texts = []
    for sizes in steps:
        low, high = (cut[sizes[-1]][end] / last[sizes[-1]] for end in (0, 1)) if sizes else (0.0, 0.0)
        accepted, tried = sum(sizes) - len(sizes), sum(min(size, gamma) for size in sizes)
        texts.append(TextSteps(len(sizes), sum(sizes), (accepted + low, accepted + high), (tried, tried)))
    return _reading(group, texts, True, alpha=whole)


def _cut(
    convention: Convention,
    gamma: int,
    counts: ServerCounts,
    before: Mapping[int, int],
    last: Mapping[int, int],
    over: float,
) -> dict[int, Interval] | None:
    """Return, by e, bounds on the last steps of e tokens whose accepted tokens the text's end cut; None if impossible.

    A step that was not cut accepted e − 1 tokens, and one that was cut at least e. Subtract the last steps that
    accepted at least e tokens from those that emitted at least e: that many last steps of e tokens were not cut, or
    more, and no more than accepted e − 1.

    `before` counts the steps before a text's last one by accepted tokens, and `last` the last steps by emitted tokens.
    `over` is accepted tokens and steps minus emitted tokens.
    """
    sizes, per_pos = range(1, gamma + 2), counts.num_accepted_tokens_per_pos
    if not per_pos:
        candidates = sum(last[size] for size in sizes[:-1])
        low, high = (over, over) if not convention.beyond_end else (-(-over // gamma), min(over, candidates))
        if high > candidates:
            return None
        # Without counts by position the cut steps are spread evenly over the last steps that can be cut.
        return {s: (low * last[s] / candidates, high * last[s] / candidates) if s <= gamma and candidates else (0, 0)
                for s in sizes}  # fmt: skip
    # Last steps by accepted tokens: all steps of j accepted tokens, minus those before the last.
    reached = [counts.num_drafts, *per_pos, *[0] * (gamma + 1 - len(per_pos))]
    accepted = [more - fewer - before.get(j, 0) for j, (more, fewer) in enumerate(pairwise(reached))]
    cut = {}
    for size in sizes:
        least = sum(last[s] for s in sizes if s >= size) - sum(accepted[size:])
        uncut = max(0, least), min(last[size], accepted[size - 1])
        if uncut[0] > uncut[1] or (not convention.beyond_end and least < 0):
            return None
        cut[size] = (last[size] - uncut[1] if convention.beyond_end else last[size] - least, last[size] - uncut[0])
    return cut


def _reading(group: CountedTexts, steps: Sequence[TextSteps], in_parts: bool, alpha: bool) -> Reading:
    by_prompt = dict[int, TextSteps]()
    if len(steps) == len(group.prompts):
        for prompt, text_steps in zip(group.prompts, steps, strict=True):
            by_prompt[prompt] = by_prompt.get(prompt, TextSteps()) + text_steps
    return Reading(sum(steps, TextSteps()), by_prompt, in_parts, alpha)


def _together(readings: Sequence[Reading]) -> Reading:
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
