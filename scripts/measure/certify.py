"""The losslessness certificates of all runs."""

from dataclasses import asdict

from draftsmith.decode.measurement import LEAST_TOKENS
from draftsmith.decode.measurement.certificate import Certificate, certify_greedy, certify_sampled, unchecked
from draftsmith.decode.progress import phase, track
from draftsmith.scripts.measure.build import recommend
from draftsmith.scripts.measure.estimates import rows_of
from draftsmith.scripts.measure.state import Measured, Method
from draftsmith.scripts.measure.unfinished import Unfinished

FAILED = unchecked("the check failed")
NOT_ASKED = unchecked("lossless_tokens is 0")
UNTESTED = unchecked("without lossless_tokens, only what would be recommended is tested")


def certify_runs(measured: Measured, unfinished: Unfinished) -> dict[tuple[float, int, Method], Certificate]:
    """Return the certificate of every run: greedy texts are compared with plain decoding's, sampled ones are tested.

    Without `lossless_tokens` sampled runs stay `UNTESTED` until `certify_recommended`.
    """
    config, observations, prompts = measured.config, measured.observations, measured.decoded_prompts
    certificates: dict[tuple[float, int, Method], Certificate] = {}
    tested: dict[tuple[float, Method], Certificate] = {}  # the test samples batches of its own size
    for (temperature, rows, method), groups in track(observations.items(), "certificates", "runs"):
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
                tested[temperature, method] = _tested(measured, temperature, method, unfinished)
            certificates[key] = tested[temperature, method]
    return certificates


def certify_recommended(measured: Measured, unfinished: Unfinished) -> None:
    """Test the runs that would be recommended, in each setting and in all; where one fails, the next best."""
    # A failed test rules a method out and may recommend another one, which is then tested in turn.
    while any(certificate == UNTESTED for certificate in measured.lossless.values()):
        with phase("choosing what to test"):
            best = recommend(measured)
        recommended_methods = {(v.temperature, v.proposer, v.draft_length) for v in best.settings if v.go}
        if best.go:
            recommended_methods |= {(v.temperature, best.proposer, best.draft_length) for v in best.settings}
        waiting = [
            key
            for key, certificate in measured.lossless.items()
            if certificate == UNTESTED and (key[0], key[2].drafter, key[2].draft_length) in recommended_methods
        ]
        if not waiting:
            break
        for temperature, method in dict.fromkeys((temperature, method) for temperature, _, method in waiting):
            certificate = _tested(measured, temperature, method, unfinished)
            measured.lossless |= {key: certificate for key in waiting if (key[0], key[2]) == (temperature, method)}


def _tested(measured: Measured, temperature: float, method: Method, unfinished: Unfinished) -> Certificate:
    models = measured.pair.target, measured.pair.proposers[method.drafter]
    config, prompts = measured.config, measured.decoded_prompts
    key = "certificate", temperature, method.drafter, method.draft_length
    with unfinished.attempt(f"the certificate of {method.at(temperature)}"):
        if (kept := unfinished.kept(Certificate, *key)) is not None:
            return kept
        tokens, sampling = config.lossless_tokens or LEAST_TOKENS, config.at(temperature)
        certificate = certify_sampled(
            *models, prompts, tokens, sampling, method.draft_length, max_new_tokens=config.max_new_tokens
        )
        unfinished.keep(*key, value=asdict(certificate))
        return certificate
    return FAILED
