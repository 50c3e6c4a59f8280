"""The losslessness certificates of all runs."""

from collections.abc import Sequence
from dataclasses import asdict

from torch import Tensor

from draftsmith.decode.measurement import LEAST_TOKENS
from draftsmith.decode.measurement.certificate import Certificate, certify_greedy, certify_sampled, unchecked
from draftsmith.decode.progress import each, phase
from draftsmith.scripts.measure.build import recommended
from draftsmith.scripts.measure.estimates import rows_of
from draftsmith.scripts.measure.state import Measured, Method
from draftsmith.scripts.measure.unfinished import Unfinished

FAILED = unchecked("the check failed")
NOT_ASKED = unchecked("lossless_tokens is 0")
UNTESTED = unchecked("without lossless_tokens, what would be recommended is tested alone")


def certify_runs(
    measured: Measured, prompts: Sequence[Tensor], unfinished: Unfinished
) -> dict[tuple[float, int, Method], Certificate]:
    """Return the certificate of every run: texts at T=0 against plain decoding's, sampled ones by a test.

    Where nothing says how many tokens to test, sampled ones wait for `certify_recommended`.

    Args:
        measured: what was decoded, plainly too, and how many tokens to test the distribution on.
        prompts: of the decoded texts, (T,) each.
        unfinished: what an earlier run has tested is there, and this one's tests go there.
    """
    config, observations = measured.config, measured.observations
    certificates: dict[tuple[float, int, Method], Certificate] = {}
    tested: dict[tuple[float, Method], Certificate] = {}  # the test has batches of its own
    for (temperature, rows, method), groups in each(observations.items(), "certificates", "runs"):
        if method == Method():
            continue
        key = temperature, rows, method
        if temperature == 0:
            plain, other = (
                [row.tokens for row in rows_of(decoded)]
                for decoded in (observations[temperature, rows, Method()], groups)
            )
            certificates[key] = FAILED
            with unfinished.attempt(f"the certificate of {method.at(temperature, rows)}"):
                certificates[key] = certify_greedy(
                    measured.pair.target, plain, other, prompts[: len(plain)], measured.sampler(0)
                )
        elif not config.lossless_tokens:
            certificates[key] = UNTESTED if config.lossless_tokens is None else NOT_ASKED
        else:
            if (temperature, method) not in tested:
                tested[temperature, method] = FAILED
                with unfinished.attempt(f"the certificate of {method.at(temperature)}"):
                    tested[temperature, method] = _tested(measured, temperature, method, prompts, unfinished)
            certificates[key] = tested[temperature, method]
    return certificates


def certify_recommended(measured: Measured, prompts: Sequence[Tensor], unfinished: Unfinished) -> None:
    """Test the law of what would be recommended, in each setting and in all, and of the next best where it fails.

    Args:
        measured: what was seen; its sampled texts may wait for a test.
        prompts: of the decoded texts, (T,) each.
        unfinished: what an earlier run has tested is there, and this one's tests go there.
    """
    while any(certificate == UNTESTED for certificate in measured.lossless.values()):
        with phase("choosing what to test"):
            best = recommended(measured)
        wanted = {(v.temperature, v.proposer, v.draft_length) for v in best.settings if v.go}
        if best.go:
            wanted |= {(v.temperature, best.proposer, best.draft_length) for v in best.settings if v.decides}
        waiting = [
            key
            for key, certificate in measured.lossless.items()
            if certificate == UNTESTED and (key[0], key[2].drafter, key[2].draft_length) in wanted
        ]
        if not waiting:
            break
        for temperature, method in dict.fromkeys((temperature, method) for temperature, _, method in waiting):
            certificate = FAILED
            with unfinished.attempt(f"the certificate of {method.at(temperature)}"):
                certificate = _tested(measured, temperature, method, prompts, unfinished)
            measured.lossless |= {key: certificate for key in waiting if (key[0], key[2]) == (temperature, method)}


def _tested(
    measured: Measured, temperature: float, method: Method, prompts: Sequence[Tensor], unfinished: Unfinished
) -> Certificate:
    """Test the distribution of a method's text, unless it was tested before."""
    config, pair = measured.config, measured.pair
    key = "certificate", temperature, method.drafter, method.draft_length
    kept = unfinished.kept(Certificate, *key)
    if kept is not None:
        return kept
    certificate = certify_sampled(
        pair.target,
        pair.proposers[method.drafter],
        prompts,
        config.lossless_tokens or LEAST_TOKENS,
        config.at(temperature),
        draft_length=method.draft_length,
        max_new_tokens=config.max_new_tokens,
    )
    unfinished.keep(*key, value=asdict(certificate))
    return certificate
