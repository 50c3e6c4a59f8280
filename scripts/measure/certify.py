"""The losslessness certificates of all runs."""

from collections.abc import Mapping, Sequence

from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode import Proposer
from draftsmith.decode.measurement.certificate import Certificate, certify_greedy, certify_sampled, unchecked
from draftsmith.decode.options import Filters
from draftsmith.scripts.measure.estimates import rows_of
from draftsmith.scripts.measure.side_by_side import Method, Observations


def certify_runs(
    target: PreTrainedModel,
    proposers: Mapping[str, Proposer],
    observations: Observations,
    prompts: Sequence[Tensor],
    sampled_tokens: int,
    filters: Filters,
    max_new_tokens: int,
) -> dict[tuple[float, int, Method], Certificate]:
    """Return the certificate of every run: texts at T=0 against plain decoding's, sampled ones by a test if asked for.

    Args:
        target: the model.
        proposers: by name.
        observations: what was decoded, plainly too.
        prompts: of the decoded texts, (T,) each.
        sampled_tokens: to test the distribution of each drafter and γ on; 0 for no test.
        filters: how texts were decoded, beside the temperature.
        max_new_tokens: of a text.
    """
    certificates: dict[tuple[float, int, Method], Certificate] = {}
    tested: dict[tuple[float, Method], Certificate] = {}  # the test has batches of its own
    for (temperature, rows, method), groups in observations.items():
        if method == Method():
            continue
        key = temperature, rows, method
        if temperature == 0:
            plain, other = (
                [row.tokens for row in rows_of(decoded)]
                for decoded in (observations[temperature, rows, Method()], groups)
            )
            certificates[key] = certify_greedy(target, plain, other, prompts[: len(plain)], filters.at(0).sampler())
        elif not sampled_tokens:
            certificates[key] = unchecked("lossless_tokens says how many tokens to test the distribution on")
        else:
            if (temperature, method) not in tested:
                tested[temperature, method] = certify_sampled(
                    target,
                    proposers[method.drafter],
                    prompts,
                    sampled_tokens,
                    filters.at(temperature),
                    draft_length=method.draft_length,
                    max_new_tokens=max_new_tokens,
                )
            certificates[key] = tested[temperature, method]
    return certificates
