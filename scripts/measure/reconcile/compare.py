"""Whether a server does what a report expects of it, and if not, where it first departs and why.

Out of the rounds of a local measurement (`draftsmith.scripts.measure.reconcile.rounds`) it is known what the server has
to count (`draftsmith.decode.measurement.server_counts`): at T=0 to the integer, under sampling within an interval. In
half precision rounding decides near-ties, of the target and of the draft: then the interval judges T=0 too, unless all
is equal. What differs is looked for in the order in which it matters: the prompt's tokens, then the text, then the
rounds.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from scipy import stats

from draftsmith.decode.measurement.exactness import first_difference
from draftsmith.decode.measurement.intervals import (
    Interval,
    confidence_of_each,
    difference_interval,
    ratio,
    ratio_interval,
)
from draftsmith.decode.measurement.server_counts import VLLM, Convention, ServerCounts, in_words, pooled, steps_of
from draftsmith.scripts.measure.reconcile.causes import causes_of
from draftsmith.scripts.measure.reconcile.pairing import (
    Pairing,
    ServedSetting,
    ServedText,
    paired,
    too_few,
)
from draftsmith.scripts.measure.reconcile.rounds import ExpectedText, RoundsSettings
from draftsmith.scripts.report.reconciliation import Departure, PositionShares, Reconciliation, SeenCounts
from draftsmith.scripts.report.types import Verifier

FALSE_ALARM = 0.01
"""Probability that a server without mistakes is said to depart, under sampling, at any position."""
Columns = tuple[Sequence[float], Sequence[float]]
"""Accepted tokens and drafts of each text."""


def reconcile(
    report: str,
    settings: RoundsSettings,
    texts: Sequence[ExpectedText],
    asked: ServedSetting,
    served: Sequence[ServedText],
    total: ServerCounts,
    plain: Sequence[ServedText] = (),
    conventions: Sequence[Convention] = (VLLM,),
) -> Reconciliation:
    """Compare what a server answered and counted with what is expected, in each convention that it may have.

    Args:
        report: where the expectation is from.
        settings: the report's.
        texts: the report's.
        asked: what is compared.
        served: the server's answers, all that `total` counts.
        total: what the server counted.
        plain: answers of a server of the same target without speculation.
        conventions: those that the counts allow, the likeliest first; one in which they agree is enough.

    Raises:
        InputError: the report knows none of these prompts, temperatures, drafters or draft lengths; or the answers are
            too few for an interval, where that has to decide.
    """
    found = list[Reconciliation]()
    for convention in conventions:
        pairing = paired(settings, texts, replace(asked, convention=convention), served, plain)
        found.append(_reconciled(report, settings, pairing, total))
        if found[-1].agrees:
            return found[-1]
    return found[0]


def _reconciled(report: str, settings: RoundsSettings, pairing: Pairing, total: ServerCounts) -> Reconciliation:
    """Compare in one convention."""
    asked = pairing.asked
    counts = pairing.expected_counts(asked.drafter, asked.verifier)
    assert counts is not None
    expected = pooled(counts)
    greedy = asked.temperature == 0
    same_texts = None
    if greedy and pairing.known_texts:
        same_texts = len(pairing.served) - len(pairing.other_texts)
    # Several at once may fill a batch, and then a server may cut drafts short; and rounding may change a draft.
    certain = asked.concurrency == 1 and pairing.tie is None
    exact = same_texts == len(pairing.served) and (certain or expected.same_as(total))
    intervals = _intervals(pairing, counts, total)
    elsewhere = bool(pairing.prompt_departures) or (greedy and bool(pairing.text_departures))
    if None in intervals and not exact and not elsewhere:
        raise too_few(len(pairing.served))
    positions = _positions(expected, total, intervals, exact)
    departs = next((shares.position for shares in positions if shares.departs), None)
    agrees = not elsewhere and departs is None and (not exact or expected.same_as(total))
    return Reconciliation(
        report=report,
        proposer=asked.drafter,
        verifier=asked.verifier,
        temperature=asked.temperature,
        concurrency=asked.concurrency,
        draft_length=asked.draft_length,
        answers=len(pairing.served),
        same_prompts=_known(pairing.served, len(pairing.served) - len(pairing.prompt_departures)),
        same_texts=same_texts,
        exact=exact,
        expected=SeenCounts.of(expected),
        counted=SeenCounts.of(total),
        positions=positions,
        first_position=departs,
        agrees=agrees,
        departure=None if agrees else first_departure(pairing),
        causes=[] if agrees else causes_of(pairing, settings, expected, total, agrees_with(pairing, total)),
        near_ties=len(pairing.near_ties) if greedy and pairing.tie is not None else None,
        convention=in_words([asked.convention]),
    )


def agrees_with(pairing: Pairing, total: ServerCounts) -> list[tuple[str, Verifier]]:
    """Return the other drafters and verifiers of the report whose counts the server's are, within their interval."""
    asked, found = pairing.asked, []
    others = {(name, verifier) for text in pairing.expected for name, of in text.accepted.items() for verifier in of}
    for name, verifier in sorted(others - {(asked.drafter, asked.verifier)}):
        counts = pairing.expected_counts(name, verifier)
        if counts is None:
            continue
        if asked.temperature == 0 and pairing.tie is None:
            fits = pooled(counts).same_as(total)
        else:
            positions = _positions(pooled(counts), total, _intervals(pairing, counts, total), exact=False)
            fits = not any(shares.departs for shares in positions)
        if fits:
            found.append((name, verifier))
    return found


def first_departure(pairing: Pairing) -> Departure | None:
    """Return the first place where the server does otherwise: in a prompt, a text, or the rounds of one; None if none.

    The rounds are compared at T=0 alone, of texts that are the same, where the parts of an answer are its steps.
    """
    for what, departures in (("prompt", pairing.prompt_departures), ("text", pairing.text_departures)):
        if departures and (what == "prompt" or pairing.asked.temperature == 0):
            place, at = next(iter(departures.items()))
            one, text = pairing.served[place], pairing.expected[place]
            wanted, found = (
                (text.prompt_ids, one.prompt_ids) if what == "prompt" else (text.tokens[: text.length], one.token_ids)
            )
            return Departure(
                "prompt" if what == "prompt" else "text", one.prompt, at, _token(wanted, at), _token(found or (), at)
            )
    if pairing.asked.temperature == 0:
        for place, (one, text) in enumerate(zip(pairing.served, pairing.expected, strict=True)):
            if place in pairing.near_ties:
                continue
            a_TK = text.acceptance(pairing.asked.drafter, pairing.asked.verifier, pairing.asked.draft_length)
            assert a_TK is not None
            steps = steps_of(a_TK, text.length, pairing.asked.draft_length, pairing.asked.convention)
            at_step = first_difference(steps, one.parts)
            if at_step is not None and sum(one.parts) == sum(steps):
                # A step emits what it accepted and one more, unless the text ends within it.
                wanted_tokens, found_tokens = (of[at_step] if at_step < len(of) else 0 for of in (steps, one.parts))
                words = [f"a step of {n} token{'s' if n != 1 else ''}" for n in (wanted_tokens, found_tokens)]
                return Departure("round", one.prompt, sum(steps[:at_step]), words[0], words[1])
    return None


def _token(ids: Sequence[int], at: int) -> str:
    return f"token {ids[at]}" if at < len(ids) else "the end"


def _known(served: Sequence[ServedText], value: int) -> int | None:
    return value if all(one.prompt_ids is not None for one in served) else None


def _intervals(pairing: Pairing, expected: Sequence[ServerCounts], counted: ServerCounts) -> list[Interval | None]:
    """Return, for each position, the interval of the server's share of accepted drafts less the expected one.

    Over prompts, and paired where the server's counts are known prompt by prompt. Elsewhere the server's share is taken
    to be as uncertain as one that is drawn from the expected rounds: its interval over prompts, wider by √2 because the
    texts are others than those expected. Few texts may be alike by chance, at deep positions above all: no interval is
    narrower than that of as many independent steps.
    """
    depth, own = pairing.asked.draft_length, [one.counts for one in pairing.served]
    confidence = confidence_of_each(1 - FALSE_ALARM, depth)
    wanted = [_shares(expected, j) for j in range(depth)]
    if all(counts is not None for counts in own):
        columns = [_shares([counts for counts in own if counts is not None], j) for j in range(depth)]
        return [
            _no_narrower(difference_interval(*one, *other, confidence=confidence), one, other, confidence)
            for one, other in zip(columns, wanted, strict=True)
        ]
    generator = np.random.default_rng(0)
    drawn = [_drawn(pairing, text, generator) for text in pairing.expected]
    of_all, intervals = [_shares([counted], j) for j in range(depth)], list[Interval | None]()
    for j in range(depth):
        bounds = ratio_interval(*_shares(drawn, j), confidence=confidence)
        share, expected_share = ratio(*of_all[j]).value, ratio(*wanted[j]).value
        if bounds is None or share is None or expected_share is None:
            intervals.append(None)
            continue
        half, difference = (bounds[1] - bounds[0]) / 2 * 2**0.5, share - expected_share
        bounds = difference - half, difference + half
        intervals.append(_no_narrower(bounds, of_all[j], wanted[j], confidence))
    return intervals


def _no_narrower(interval: Interval | None, counted: Columns, expected: Columns, confidence: float) -> Interval | None:
    """Return an interval no narrower than a binomial's of the same share and as many steps."""
    accepted, drafts = (sum(of) for of in counted)
    if interval is None or not drafts:
        return interval
    share = (accepted + sum(expected[0])) / (drafts + sum(expected[1]))
    deviation = (max(share * (1 - share), 0.0) / drafts) ** 0.5
    middle, half = (interval[0] + interval[1]) / 2, (interval[1] - interval[0]) / 2
    half = max(half, float(stats.t.ppf((1 + confidence) / 2, len(expected[0]) - 1)) * deviation)
    return middle - half, middle + half


def _shares(counts: Sequence[ServerCounts], position: int) -> Columns:
    """Return the accepted tokens and the drafts of each text."""
    accepted = [c.num_accepted_tokens_per_pos for c in counts]
    return [of[position] if position < len(of) else 0.0 for of in accepted], [c.num_drafts for c in counts]


def _drawn(pairing: Pairing, text: ExpectedText, generator: np.random.Generator) -> ServerCounts:
    """Return what a server might count of a text: acceptance is drawn."""
    asked = pairing.asked
    a_TK = text.acceptance(asked.drafter, asked.verifier, asked.draft_length)
    assert a_TK is not None
    drawn_TK = (generator.random(a_TK.shape) < a_TK).astype(np.float64)
    return pairing.counts(text, drawn_TK, text.lengths(asked.drafter))


def _positions(
    expected: ServerCounts, counted: ServerCounts, intervals: Sequence[Interval | None], exact: bool
) -> list[PositionShares]:
    """Compare position by position: exactly the integers, otherwise the interval of the difference must hold zero."""
    positions = []
    for j, interval in enumerate(intervals):
        (wanted,), (drafts,) = _shares([expected], j)
        (found,), (found_drafts,) = _shares([counted], j)
        if exact:
            departs = round(wanted) != round(found)
        else:
            departs = interval is not None and not interval[0] <= 0 <= interval[1]
        share, expected_share = (of / many if many else None for of, many in ((found, found_drafts), (wanted, drafts)))
        positions.append(PositionShares(j + 1, expected_share, share, interval, departs))
    return positions
