"""The comparison of a server's answers and counts with a report, and the first difference and its causes.

From the rounds of a local measurement (`draftsmith.scripts.report.rounds`) follow the server's counts
(`draftsmith.decode.measurement.server_counts`): at T=0 exactly, under sampling within an interval. In half precision
rounding decides near-ties of the target and the draft: then the interval judges T=0 too, unless all is equal. Causes
are sought in the order in which they matter: the prompt's tokens, then the text, then the rounds.
"""

from collections.abc import Sequence
from statistics import median
from typing import Literal

from scipy import stats

from draftsmith.decode.measurement.exactness import first_difference
from draftsmith.decode.measurement.intervals import Interval, confidence_of_each, difference_interval
from draftsmith.decode.measurement.server_counts import ServerCounts, pooled, steps_of
from draftsmith.scripts.measure.server.pairing import (
    ROUNDING,
    SPACING,
    CountedAnswers,
    Pairing,
    ServedSetting,
    ServedText,
    pair_texts,
    too_few,
)
from draftsmith.scripts.report.entries import Cause, Departure, PositionShares, Reconciliation
from draftsmith.scripts.report.rounds import ExpectedText, RoundsSettings
from draftsmith.scripts.report.types import Verifier

FALSE_ALARM = 0.01
"""The probability that a server without mistakes is reported to differ at any position, under sampling."""
DRAWN: dict[Verifier, str] = {
    "greedy": "the draft's likeliest token",
    "probabilistic": "tokens that are drawn from the draft",
}
REMEDY: dict[Verifier, str] = {
    "greedy": 'for drawn drafts set "draft_sample_method":"probabilistic" (vLLM; SGLang has none); for greedy ones '
    "compare with --expect_verifier greedy",
    "probabilistic": "compare with --expect_verifier probabilistic, or let the server draft greedily",
}
"""Remedies if the counts fit another verifier."""
Columns = tuple[Sequence[float], Sequence[float]]


def reconcile(
    report: str,
    settings: RoundsSettings,
    texts: Sequence[ExpectedText],
    setting: ServedSetting,
    served: Sequence[ServedText],
    counted: Sequence[CountedAnswers],
    plain: Sequence[ServedText] = (),
) -> Reconciliation:
    """Compare a server's answers and counts with a report's `texts`.

    `report` is the report's path, and `counted` has the counts of all `served` answers. `plain` are answers of a server
    of the same target without speculation.

    Raises:
        InputError: the report lacks the prompts, temperature, drafter or γ, or an interval needs more answers.
    """
    pairing = pair_texts(settings, texts, setting, served, plain)
    total = pooled([group.counts for group in counted])
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
    intervals = _intervals(pairing, counts, counted)
    elsewhere = bool(pairing.prompt_departures) or (greedy and bool(pairing.text_departures))
    if None in intervals and not exact and not elsewhere:
        raise too_few(len(counted))
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
        expected=expected.rounded(),
        counted=total.rounded(),
        positions=positions,
        first_position=departs,
        agrees=agrees,
        departure=None if agrees else first_departure(pairing),
        causes=[] if agrees else causes_of(pairing, settings, expected, total, agrees_with(pairing, counted)),
        near_ties=len(pairing.near_ties) if greedy and pairing.tie is not None else None,
    )


def agrees_with(pairing: Pairing, counted: Sequence[CountedAnswers]) -> list[tuple[str, Verifier]]:
    """Return the other drafters and verifiers of the report whose counts fit the server's."""
    setting, fitting, total = pairing.setting, [], pooled([group.counts for group in counted])
    others = {(name, key) for text in pairing.expected for name, by_key in text.accepted.items() for key in by_key}
    for name, verifier in sorted(others - {(setting.drafter, setting.verifier)}):
        counts = pairing.expected_counts(name, verifier)
        if counts is None:
            continue
        if setting.temperature == 0 and pairing.tie is None:
            fits = pooled(counts).same_as(total)
        else:
            positions = _positions(pooled(counts), total, _intervals(pairing, counts, counted), exact=False)
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
            steps = steps_of(a_TK, text.length, pairing.setting.draft_length)
            at_step = first_difference(steps, answer.parts)
            if at_step is not None and sum(answer.parts) == sum(steps):
                # A step emits its accepted tokens and one more, unless the text ends within it.
                sizes = [row[at_step] if at_step < len(row) else 0 for row in (steps, answer.parts)]
                words = [f"a step of {n} token{'s' if n != 1 else ''}" for n in sizes]
                return Departure("round", answer.prompt, sum(steps[:at_step]), words[0], words[1])
    return None


def _token(ids: Sequence[int], at: int) -> str:
    return f"token {ids[at]}" if at < len(ids) else "the end"


def _intervals(
    pairing: Pairing, expected: Sequence[ServerCounts], counted: Sequence[CountedAnswers]
) -> list[Interval | None]:
    """Return for each position the interval of the server's share of accepted drafts minus the expected one.

    It is over answers or turns, paired. A few may agree by chance, most of all at deep positions: no interval is
    narrower than that of independent steps.
    """
    confidence, intervals = confidence_of_each(1 - FALSE_ALARM, pairing.setting.draft_length), list[Interval | None]()
    together = [pooled([expected[index] for index in group.answers]) for group in counted]
    for j in range(pairing.setting.draft_length):
        own, other = _shares([group.counts for group in counted], j), _shares(together, j)
        found = difference_interval(*own, *other, confidence=confidence)
        intervals.append(_no_narrower(found, own, other, confidence))
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


def causes_of(
    pairing: Pairing,
    settings: RoundsSettings,
    expected: ServerCounts,
    counted: ServerCounts,
    others: Sequence[tuple[str, Verifier]],
) -> list[Cause]:
    """Return the likely causes, the likeliest first; `others` are drafters and verifiers whose counts fit."""
    if pairing.prompt_departures:
        return [_template(pairing)]
    if pairing.setting.temperature == 0 and pairing.text_departures:
        return _texts(pairing, settings)
    setting, causes = pairing.setting, list[Cause]()
    in_text = pairing.expected_counts(setting.drafter, setting.verifier, past_end=False)
    if setting.temperature == 0 and in_text is not None and pooled(in_text).same_as(counted):
        evidence = "texts and counts are right for a server that counts no drafts past the end of a text"
        return [Cause("counting", evidence, "nothing is wrong; vLLM 0.32 and SGLang 0.5 count otherwise")]
    texts = "its texts are the expected ones" if setting.temperature == 0 else "its prompts are the expected ones"
    texts += ", or part at near-ties" if pairing.near_ties else ""
    for name, verifier in others:
        if name == setting.drafter:
            evidence = f"the counts fit {DRAWN[verifier]}, and the report's are compared for {DRAWN[setting.verifier]}"
            causes.append(Cause("draft sampling", evidence, REMEDY[verifier]))
        else:
            evidence = f"{texts}, and the counts are those of the report's {name!r} ({settings.drafters[name]['path']})"
            remedy = "point the server at the draft that was meant, and start it anew"
            causes.append(Cause("another drafter", evidence, remedy))
    if causes:
        return causes
    rates = [counts.draft_acceptance_rate() or 0.0 for counts in (expected, counted)]
    evidence = f"{texts}, but of the drafted tokens {rates[1]:.1%} were accepted, where {rates[0]:.1%} are expected"
    path = settings.drafters[setting.drafter]["path"]
    remedy = f"compare the server's draft with {path}: its revision, files and dtype (here {settings.dtype})"
    return [Cause("draft", evidence, remedy)]


def _template(pairing: Pairing) -> Cause:
    index, at = next(iter(pairing.prompt_departures.items()))
    sent, ids = pairing.expected[index].prompt_ids, pairing.served[index].prompt_ids or ()
    evidence = (
        f"{len(pairing.prompt_departures)} of {len(pairing.served)} prompts have other tokens on the server; prompt "
        f"{pairing.served[index].prompt!r} has {len(ids)} there and {len(sent)} here, and differs at its token {at}"
    )
    return Cause(
        "template",
        evidence,
        "give the server the target's chat template and system prompt (--chat-template), look for a token at the "
        "beginning that is added twice, or send tokens with --target",
    )


def _texts(pairing: Pairing, settings: RoundsSettings) -> list[Cause]:
    departures = pairing.text_departures
    share = f"{len(departures)} of {len(pairing.served)} texts differ at T = 0"
    right_plain = [index for index in departures if _is_text(pairing.plain[index], pairing.expected[index])]
    causes = []
    if right_plain:
        causes.append(
            Cause(
                "not lossless",
                f"{share}, and of {len(right_plain)} of them the server without speculation writes the expected one",
                "run `draftsmith certify --server`, and take another version or method of the server",
            )
        )
    # The margin is known for the text's own tokens; an early end has none.
    margins_or_none = (pairing.margin(index, at) for index, at in departures.items())
    margins = [margin for margin in margins_or_none if margin is not None]
    if not margins:
        return [*causes, Cause("target", f"{share}", "compare the server's target with the report's, file by file")]
    tie = ROUNDING * SPACING["bfloat16"]
    lead = (
        f"at the first tokens that differ the target's likeliest is ahead by {median(margins):.1%} of its largest logit"
    )
    margin = f"{lead} (median; at most {max(margins):.1%}), and rounding in bfloat16 moves it by {tie:.1%}"
    rounding = Cause(
        "dtype",
        f"{share}; {margin}",
        f"run the server in {settings.dtype}, the report's dtype, or measure here in the server's",
    )
    weights = Cause(
        "target",
        f"{share}; {margin}",
        "the server's target is quantised, fine-tuned or another revision than the report's: measure here with its "
        "weights, and distil the draft again on its texts",
    )
    near = max(margins) <= tie
    return [*causes, rounding, weights] if near else [*causes, weights, *([rounding] if median(margins) <= tie else [])]


def _is_text(answer: ServedText | None, text: ExpectedText) -> bool:
    ids = None if answer is None else answer.token_ids
    return ids is not None and first_difference(text.tokens[: text.length], ids) is None
