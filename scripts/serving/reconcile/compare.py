"""The comparison of a server's answers and counts with a report, and the first difference and its causes.

From the rounds of a local measurement (`draftsmith.scripts.serving.reconcile.rounds`) follow the server's counts
(`draftsmith.decode.measurement.server_counts`): at T=0 exactly, under sampling within an interval. In half precision
rounding decides near-ties of the target and the draft: then the interval judges T=0 too, unless all is equal. Causes
are sought in the order in which they matter: the prompt's tokens, then the text, then the rounds.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

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
from draftsmith.scripts.report.entries import Departure, PositionShares, Reconciliation, SeenCounts
from draftsmith.scripts.report.types import Verifier
from draftsmith.scripts.serving.reconcile.causes import causes_of
from draftsmith.scripts.serving.reconcile.pairing import Pairing, ServedSetting, ServedText, pair_texts, too_few
from draftsmith.scripts.serving.reconcile.rounds import ExpectedText, RoundsSettings

FALSE_ALARM = 0.01
"""The probability that a server without mistakes is reported to differ at any position, under sampling."""
Columns = tuple[Sequence[float], Sequence[float]]


def reconcile(
    report: str,
    settings: RoundsSettings,
    texts: Sequence[ExpectedText],
    setting: ServedSetting,
    served: Sequence[ServedText],
    total: ServerCounts,
    plain: Sequence[ServedText] = (),
    conventions: Sequence[Convention] = (VLLM,),
) -> Reconciliation:
    """Compare a server's answers and counts with a report's `texts`, in each convention that the counts allow.

    `report` is the report's path, and `total` counts exactly the `served` answers. `plain` are answers of a server of
    the same target without speculation. Of `conventions`, the likeliest first, agreement in one is enough.

    Raises:
        InputError: the report lacks the prompts, temperature, drafter or γ, or an interval needs more answers.
    """
    results = list[Reconciliation]()
    for convention in conventions:
        pairing = pair_texts(settings, texts, replace(setting, convention=convention), served, plain)
        results.append(_reconciled(report, settings, pairing, total))
        if results[-1].agrees:
            return results[-1]
    return results[0]


def _reconciled(report: str, settings: RoundsSettings, pairing: Pairing, total: ServerCounts) -> Reconciliation:
    setting = pairing.setting
    counts = pairing.expected_counts(setting.drafter, setting.verifier)
    assert counts is not None
    expected = pooled(counts)
    greedy = setting.temperature == 0
    knows_prompts = all(answer.prompt_ids is not None for answer in pairing.served)
    same_texts = None
    if greedy and all(answer.token_ids is not None for answer in pairing.served):
        same_texts = len(pairing.served) - len(pairing.other_texts)
    # Several requests at once may fill a batch, where a server may cut drafts short; and rounding may change a draft.
    certain = setting.concurrency == 1 and pairing.tie is None
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
        proposer=setting.drafter,
        verifier=setting.verifier,
        temperature=setting.temperature,
        concurrency=setting.concurrency,
        draft_length=setting.draft_length,
        answers=len(pairing.served),
        same_prompts=len(pairing.served) - len(pairing.prompt_departures) if knows_prompts else None,
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
        convention=in_words([setting.convention]),
    )


def agrees_with(pairing: Pairing, total: ServerCounts) -> list[tuple[str, Verifier]]:
    """Return the other drafters and verifiers of the report whose counts fit the server's."""
    setting, fitting = pairing.setting, []
    others = {(name, key) for text in pairing.expected for name, by_key in text.accepted.items() for key in by_key}
    for name, verifier in sorted(others - {(setting.drafter, setting.verifier)}):
        counts = pairing.expected_counts(name, verifier)
        if counts is None:
            continue
        if setting.temperature == 0 and pairing.tie is None:
            fits = pooled(counts).same_as(total)
        else:
            positions = _positions(pooled(counts), total, _intervals(pairing, counts, total), exact=False)
            fits = not any(shares.departs for shares in positions)
        if fits:
            fitting.append((name, verifier))
    return fitting


def first_departure(pairing: Pairing) -> Departure | None:
    """Return the first difference, in a prompt, a text, or the rounds of one; None without any.

    Rounds are compared at T=0 only, for equal texts whose answers came in one part per step.
    """
    for what, departures in (("prompt", pairing.prompt_departures), ("text", pairing.text_departures)):
        if departures and (what == "prompt" or pairing.setting.temperature == 0):
            index, at = next(iter(departures.items()))
            answer, text = pairing.served[index], pairing.expected[index]
            expected_ids, server_ids = text.prompt_ids, answer.prompt_ids
            if what == "text":
                expected_ids, server_ids = text.tokens[: text.length], answer.token_ids
            where: Literal["prompt", "text"] = "prompt" if what == "prompt" else "text"
            return Departure(where, answer.prompt, at, _token(expected_ids, at), _token(server_ids or (), at))
    if pairing.setting.temperature == 0:
        for index, (answer, text) in enumerate(zip(pairing.served, pairing.expected, strict=True)):
            if index in pairing.near_ties:
                continue
            a_TK = text.acceptance(pairing.setting.drafter, pairing.setting.verifier, pairing.setting.draft_length)
            assert a_TK is not None
            steps = steps_of(a_TK, text.length, pairing.setting.draft_length, pairing.setting.convention)
            at_step = first_difference(steps, answer.parts)
            if at_step is not None and sum(answer.parts) == sum(steps):
                # A step emits its accepted tokens and one more, unless the text ends within it.
                sizes = [row[at_step] if at_step < len(row) else 0 for row in (steps, answer.parts)]
                words = [f"a step of {n} token{'s' if n != 1 else ''}" for n in sizes]
                return Departure("round", answer.prompt, sum(steps[:at_step]), words[0], words[1])
    return None


def _token(ids: Sequence[int], at: int) -> str:
    return f"token {ids[at]}" if at < len(ids) else "the end"


def _intervals(pairing: Pairing, expected: Sequence[ServerCounts], counted: ServerCounts) -> list[Interval | None]:
    """Return for each position the interval of the server's share of accepted drafts minus the expected one.

    It is over prompts, and paired if the server's counts are known by prompt. Otherwise the server's share is taken to
    be as uncertain as one drawn from the expected rounds: its interval over prompts, wider by √2 because the texts
    differ. A few texts may agree by chance, most of all at deep positions: no interval is narrower than that of
    independent steps.
    """
    depth, answers = pairing.setting.draft_length, [answer.counts for answer in pairing.served]
    confidence = confidence_of_each(1 - FALSE_ALARM, depth)
    expected_shares = [_shares(expected, j) for j in range(depth)]
    if all(counts is not None for counts in answers):
        columns = [_shares([counts for counts in answers if counts is not None], j) for j in range(depth)]
        return [
            _no_narrower(difference_interval(*own, *other, confidence=confidence), own, other, confidence)
            for own, other in zip(columns, expected_shares, strict=True)
        ]
    generator = np.random.default_rng(0)
    drawn = [_drawn(pairing, text, generator) for text in pairing.expected]
    server, intervals = [_shares([counted], j) for j in range(depth)], list[Interval | None]()
    for j in range(depth):
        bounds = ratio_interval(*_shares(drawn, j), confidence=confidence)
        share, expected_share = ratio(*server[j]).value, ratio(*expected_shares[j]).value
        if bounds is None or share is None or expected_share is None:
            intervals.append(None)
            continue
        half, difference = (bounds[1] - bounds[0]) / 2 * 2**0.5, share - expected_share
        bounds = difference - half, difference + half
        intervals.append(_no_narrower(bounds, server[j], expected_shares[j], confidence))
    return intervals


def _no_narrower(interval: Interval | None, counted: Columns, expected: Columns, confidence: float) -> Interval | None:
    """Return an interval no narrower than the binomial's of the same share and number of steps."""
    accepted, drafts = (sum(column) for column in counted)
    if interval is None or not drafts:
        return interval
    share = (accepted + sum(expected[0])) / (drafts + sum(expected[1]))
    deviation = (max(share * (1 - share), 0.0) / drafts) ** 0.5
    middle, half = (interval[0] + interval[1]) / 2, (interval[1] - interval[0]) / 2
    half = max(half, float(stats.t.ppf((1 + confidence) / 2, len(expected[0]) - 1)) * deviation)
    return middle - half, middle + half


def _shares(counts: Sequence[ServerCounts], position: int) -> Columns:
    accepted = [c.num_accepted_tokens_per_pos for c in counts]
    return [row[position] if position < len(row) else 0.0 for row in accepted], [c.num_drafts for c in counts]


def _drawn(pairing: Pairing, text: ExpectedText, generator: np.random.Generator) -> ServerCounts:
    setting = pairing.setting
    a_TK = text.acceptance(setting.drafter, setting.verifier, setting.draft_length)
    assert a_TK is not None
    drawn_TK = (generator.random(a_TK.shape) < a_TK).astype(np.float64)
    return pairing.counts(text, drawn_TK, text.lengths(setting.drafter))


def _positions(
    expected: ServerCounts, counted: ServerCounts, intervals: Sequence[Interval | None], exact: bool
) -> list[PositionShares]:
    """Compare position by position: integers if exact, otherwise the difference's interval must hold zero."""
    positions = []
    for j, interval in enumerate(intervals):
        (expected_accepted,), (drafts,) = _shares([expected], j)
        (server_accepted,), (server_drafts,) = _shares([counted], j)
        if exact:
            departs = round(expected_accepted) != round(server_accepted)
        else:
            departs = interval is not None and not interval[0] <= 0 <= interval[1]
        share = server_accepted / server_drafts if server_drafts else None
        expected_share = expected_accepted / drafts if drafts else None
        positions.append(PositionShares(j + 1, expected_share, share, interval, departs))
    return positions
