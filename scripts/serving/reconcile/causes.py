"""Why a server differs from a report: the known causes, the evidence for each, and what to try."""

from collections.abc import Sequence
from statistics import median

from draftsmith.decode.measurement.exactness import first_difference
from draftsmith.decode.measurement.server_counts import ServerCounts
from draftsmith.scripts.report.entries import Cause
from draftsmith.scripts.report.types import Verifier
from draftsmith.scripts.serving.reconcile.pairing import ROUNDING, SPACING, Pairing, ServedText
from draftsmith.scripts.serving.reconcile.rounds import ExpectedText, RoundsSettings

SLIGHT = 0.02
"""A difference of the acceptance rate that another dtype of the draft explains."""
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
    setting, causes = pairing.setting, []
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
    draft = Cause(
        "draft",
        evidence,
        f"compare the server's draft with {path}: its revision, files and vocabulary; a draft that was trained further "
        "may have the same name",
    )
    dtype = Cause("draft dtype", evidence, f"let the server load the draft as the report did, in {settings.dtype}")
    return [dtype, draft] if abs(rates[0] - rates[1]) <= SLIGHT else [draft]


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
