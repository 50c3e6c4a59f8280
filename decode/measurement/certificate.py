"""The losslessness certificate: does a drafter's decoding write the target's text?

At T=0 the texts must equal plain decoding's token for token, up to ties, which `measurement.exactness` defines. Sampled
texts must have the target's distribution, by the test of `measurement.distribution_test`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.cache.checks import parameters_of
from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement import FALSE_ALARM, LEAST_TOKENS
from draftsmith.decode.measurement.distribution_test import (
    DistributionTest,
    Text,
    distribution_test,
    prepared_sampler,
    sample_texts,
)
from draftsmith.decode.measurement.exactness import GREEDY, TIE_ULPS, Mismatch, first_mismatch
from draftsmith.decode.options import Sampling
from draftsmith.decode.progress import track
from draftsmith.decode.proposers.base import Proposer
from draftsmith.decode.replay.texts import Distributions
from draftsmith.decode.sampling import Sampler
from draftsmith.decode.validation import Count, Share

SAMPLED = Sampling(temperature=1.0)
MOST_NAMED = 3
TEXTS_FED_AGAIN = 4
TIE_DEVIATIONS = 6
OTHER_KERNELS = 2
"""The allowed factor between the rounding of another program's margins and that measured here."""
TIES_ALARM = 1e-3
"""The probability under rounding alone below which a number of near-ties fails the certificate."""


@dataclass(frozen=True)
class Certificate:
    """The check that a run's texts are the target's; fields are None where they do not apply."""

    checked: bool = True
    identical: bool | None = None
    """At T=0: true if every text is plain decoding's."""
    prompts_identical: Count | None = None
    near_ties: Count | None = None
    """Texts that first differ at a tie, which rounding decides."""
    departures: Count | None = None
    """Texts that first differ elsewhere."""
    p_value: Share | None = None
    """Under sampling: the p-value of the distribution test."""
    tokens: Count | None = None
    """Under sampling: the number of tested tokens."""
    passed: bool | None = None
    reason: str | None = None
    """Why the run failed or was not checked, or the positions that differ."""


def unchecked(reason: str) -> Certificate:
    """Return the certificate of a run that was not checked."""
    return Certificate(checked=False, reason=reason)


def certify_greedy(
    target: PreTrainedModel,
    plain: Sequence[Sequence[int]],
    other: Sequence[Sequence[int]],
    prompts: Sequence[Tensor],
    sampler: Sampler = GREEDY,
    same_kernels: bool = True,
    tie: float | None = None,
) -> Certificate:
    """Compare a drafter's completions at T=0 with plain decoding's, and judge where each first differs.

    Forwards of one token and of several round differently: where the target's logits of the two tokens tie, either is
    right. Any other difference is a departure, and one departure fails. Tokens after the first difference have another
    context and are not judged. The 8 units in the last place that `first_mismatch` allows are wide in half precision:
    lossy rules depart by less. Rounding is therefore measured on the texts that differ, and a margin above 6 standard
    deviations of it (and above one unit) is no tie.

    Without `same_kernels` another program, such as a server, wrote the texts, and its rounding cannot be measured here.
    All 8 units are then a tie, but the number of near-ties must be plausible under twice the rounding measured here
    (p ≥ 0.001).

    `tie` is the margin of logits up to which another arithmetic, such as that of quantised weights, may turn them.

    Completions are without prompts and padding, prompts are (T,) int64; `reason` counts prompts and tokens from 0.

    Raises:
        InputError: no completions, or not as many as prompts.
    """
    if not len(prompts) == len(plain) == len(other) or not len(prompts):
        raise InputError(
            f"texts: expected as many plain and other ones as prompts, at least one, found {len(plain)} and "
            f"{len(other)} for {len(prompts)} prompts"
        )
    texts = [_text(prompt, tokens) for prompt, tokens in zip(prompts, plain, strict=True)]
    mismatches = {}
    compared = list(zip(texts, other, strict=True))
    for i, ((ids, length), tokens) in enumerate(track(compared, "texts against plain decoding's", "texts")):
        mismatch = first_mismatch(target, ids, _text(ids[:length], tokens)[0], length, sampler)
        if mismatch is not None:
            tolerance = mismatch.tolerance if tie is None else tie
            mismatches[i] = replace(mismatch, position=mismatch.position - length, tolerance=tolerance)
    near = [i for i, mismatch in mismatches.items() if mismatch.is_tie]
    if near and same_kernels and tie is None:  # narrow the tolerance to the measured rounding
        noise = TIE_DEVIATIONS * _rounding(target, [texts[i] for i in near[:TEXTS_FED_AGAIN]], sampler)
        for i in near:
            least, most = mismatches[i].tolerance / TIE_ULPS, mismatches[i].tolerance
            mismatches[i] = replace(mismatches[i], tolerance=min(max(noise, least), most))
    ties = {i: mismatch for i, mismatch in mismatches.items() if mismatch.is_tie}
    excess = None
    if len(ties) > 1 and not same_kernels and tie is None:  # a single tie is no evidence, however improbable
        shared = [
            (ids[: length + mismatches[i].position + 1] if i in mismatches else ids, length)
            for i, (ids, length) in enumerate(texts)
            if len(ids) > length
        ]
        unit = max(mismatch.tolerance for mismatch in ties.values()) / TIE_ULPS
        excess = _excess_of_ties(len(ties), _turned_by_rounding(target, shared, sampler, unit))
    departures = {i: mismatch for i, mismatch in mismatches.items() if i not in ties}
    reasons = [excess] if excess else []
    reasons += [_listed(kind, found) for kind, found in (("departures", departures), ("near ties", ties)) if found]
    return Certificate(
        identical=not mismatches,
        prompts_identical=len(prompts) - len(mismatches),
        near_ties=len(ties),
        departures=len(departures),
        passed=not departures and excess is None,
        reason="; ".join(reasons) or None,
    )


def certify_sampled(
    target: PreTrainedModel,
    proposer: Proposer,
    prompts: Sequence[Tensor],
    tokens: int,
    sampling: Sampling = SAMPLED,
    draft_length: int = 4,
    batch_size: int = 8,
    max_new_tokens: int = 128,
    seed: int = 0,
    false_alarm: float = FALSE_ALARM,
    **decoding: Any,
) -> Certificate:
    """Sample texts speculatively, and test whether their distribution is the target's under the same settings.

    The prompts, (T,) int64 each, are cycled with new seeds until `tokens` were sampled; more tokens show smaller
    departures. A lossless drafter fails with probability at most `false_alarm`. The test has less power for proposers
    without `distributions_after`. `decoding` holds further arguments of `speculative_generate`, such as `rule`.

    Raises:
        InputError: T=0, fewer than 2000 tokens, or no prompts.
    """
    if tokens < LEAST_TOKENS:
        raise InputError(f"tokens: expected at least {LEAST_TOKENS} to test their law, found {tokens}")
    if not sampling.temperature > 0:
        raise InputError(f"temperature: expected more than 0 to sample texts, found {sampling.temperature}")
    options = sampling.generate_kwargs()
    limits = {"batch_size": batch_size, "draft_length": draft_length, "max_new_tokens": max_new_tokens}
    texts, _ = sample_texts(target, proposer, prompts, tokens, **limits, **options, **decoding)
    sampler = prepared_sampler(target, **options)
    result = tie_tolerant_test(target, texts, sampler, proposer.distributions_after(target, sampler), seed, batch_size)
    passed = result.p_value > false_alarm
    reason = None
    if not passed:
        reason = result.worst()
    elif proposer.distributions_after(target, GREEDY) is None:
        reason = f"tested without the distributions of {type(proposer).__name__}, and so with less power"
    return Certificate(p_value=result.p_value, tokens=result.num_tokens, passed=passed, reason=reason)


def tie_tolerant_test(
    target: PreTrainedModel,
    texts: Sequence[Text],
    sampler: Sampler,
    drafter: Distributions | None = None,
    seed: int = 0,
    batch_size: int = 8,
) -> DistributionTest:
    """Run `distribution_test`, but let rounding excuse tokens of probability zero.

    Where a tie can move every such token into the set that top-k or top-p keep, the other tests alone decide.
    """
    result = distribution_test(target, texts, sampler, drafter, seed, batch_size)
    if result.num_impossible and all(_rounding_ruled_out(target, texts[i], k, sampler) for i, k in result.impossible):
        result = replace(result, p_value=result.combined)
    return result


@torch.inference_mode()
def _rounding(target: PreTrainedModel, texts: Sequence[Text], sampler: Sampler) -> float:
    """Return the root mean square that rounding adds to the margin between the two likeliest tokens."""
    squares: list[Tensor] = []
    for ids, length in track(texts, "rounding", "texts"):
        contexts = [ids[:end] for end in range(length, len(ids))]
        # Compare one forward of the text, by which `first_mismatch` judges, with plain decoding's forwards of a token.
        whole = sampler.scores(target(input_ids=ids[None], use_cache=False).logits[0, length - 1 : -1], contexts)
        past, singly = None, []
        cache = "past_key_values" if "past_key_values" in parameters_of(target) else "cache_params"  # Mamba's name
        for tokens in (ids[:length], *ids[length:-1].split(1)):
            output = target(input_ids=tokens[None], use_cache=True, **{cache: past})
            past = output[cache]
            singly.append(output.logits[0, -1:])
        best = whole.topk(2).indices
        margins = [scores.gather(1, best).diff() for scores in (whole, sampler.scores(torch.cat(singly), contexts))]
        squares.append((margins[1] - margins[0]).square())
    return float(torch.cat(squares).mean().sqrt())


@torch.inference_mode()
def _turned_by_rounding(target: PreTrainedModel, texts: Sequence[Text], sampler: Sampler, unit: float) -> Tensor:
    """Return the probabilities that rounding turns 0, 1, … of the texts, (texts + 1,) float64.

    A token turns where rounding moves the margin between the two likeliest below zero. Rounding is taken as normal,
    with `OTHER_KERNELS` times the deviation measured here, but at least half a `unit` in the last place. Each text ends
    at its first difference.
    """
    deviation = max(OTHER_KERNELS * _rounding(target, texts[:TEXTS_FED_AGAIN], sampler), unit / 2)
    counts = torch.ones(1, dtype=torch.float64)
    for ids, length in texts:
        contexts = [ids[:end] for end in range(length, len(ids))]
        scores = sampler.scores(target(input_ids=ids[None], use_cache=False).logits[0, length - 1 : -1], contexts)
        best = scores.topk(2).values.double()
        stable = torch.special.log_ndtr((best[:, 0] - best[:, 1]) / deviation).sum().exp().cpu()
        # The Poisson binomial distribution, text by text: the text stays with probability `stable`, or turns.
        stays, turns = torch.nn.functional.pad(counts, (0, 1)) * stable, torch.nn.functional.pad(counts, (1, 0))
        counts = stays + turns * (1 - stable)
    return counts


def _text(prompt: Tensor, tokens: Sequence[int]) -> Text:
    return torch.cat([prompt, prompt.new_tensor(list(tokens))]), len(prompt)


def _excess_of_ties(ties: int, turned: Tensor) -> str | None:
    """Return why there are too many near-ties, by the distribution of turned texts; None if rounding explains them."""
    probability = float(turned[ties:].sum())
    if probability >= TIES_ALARM:
        return None
    expected = float(turned @ torch.arange(len(turned), dtype=turned.dtype))
    return f"{ties} near ties are more than rounding explains, which turns {expected:.2g} texts (p = {probability:.1g})"


@torch.inference_mode()
def _rounding_ruled_out(target: PreTrainedModel, text: Text, index: int, sampler: Sampler) -> bool:
    """Return whether an impossible token becomes possible once all margins move in its favour by the size of a tie."""
    context, token = text[0][:index], int(text[0][index])
    logits = target(input_ids=context[None], use_cache=False).logits[0, -1:]
    tie = TIE_ULPS * torch.finfo(target.dtype).eps * float(logits.abs().max())
    logits = logits if logits.dtype == torch.float64 else logits.float()
    # Lower all likelier logits and raise the others: ranks and cumulative sums both move in the token's favour.
    favoured = torch.where(logits > logits[:, token], logits - tie / 2, logits + tie / 2)
    return bool(sampler.probabilities(favoured, [context])[0, token] > 0)


def _listed(kind: str, mismatches: Mapping[int, Mismatch]) -> str:
    """List the first mismatches in a sentence."""
    named = [
        f"prompt {i}, token {d.position}: "
        + (
            f"{d.found} in place of {d.expected}, margin {d.margin:.2g}, a tie up to {d.tolerance:.2g}"
            if d.found is not None and d.expected is not None
            else "the text ends there"
            if d.found is None
            else "the plain text ends there"
        )
        for i, d in list(mismatches.items())[:MOST_NAMED]
    ]
    return f"{len(mismatches)} {kind}: " + " | ".join(named) + (" | …" if len(mismatches) > MOST_NAMED else "")
