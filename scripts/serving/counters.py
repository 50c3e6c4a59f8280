"""What a server counts of its speculative decoding: in its `/metrics` (the Prometheus text format), or in an answer."""

from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from draftsmith.decode.errors import InputError, first_line
from draftsmith.decode.measurement.server_counts import ServerCounts

PREFIX = "vllm:spec_decode_num_"
PER_POS = f"{PREFIX}accepted_tokens_per_pos_total"
GENERATED = ("vllm:generation_tokens_total", "sglang:generation_tokens_total")
UNDER_WAY = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "sglang:num_running_reqs",
    "sglang:num_queue_reqs",
)
VERIFY_CALLS = "sglang:spec_verify_calls_total"
MEAN_LENGTH = "sglang:spec_accept_length"


@dataclass(frozen=True)
class Metrics:
    """One reading of a server's `/metrics`, summed over its engines."""

    counters: ServerCounts
    """vLLM's; zeros where the server does not speculate, or is another."""
    generated_tokens: int | None
    """That it wrote since its start, for whomever; None where it does not say."""
    requests: int
    """Running or waiting."""
    verify_calls: int | None
    """SGLang's steps that verified a draft; None of other servers and of older versions."""
    mean_acceptance_length: float | None
    """SGLang's gauge: τ over the last few steps of each engine, here a mean over engines."""


def read_metrics(text: str, where: str) -> Metrics:
    """Read what a server says of its speculative decoding and its load.

    Names and meaning: vLLM 0.32 `vllm/v1/spec_decode/metrics.py` and `vllm/v1/metrics/loggers.py`; SGLang
    `python/sglang/srt/observability/metrics_collector.py`, whose `spec_accept_*` are gauges of the last steps.

    Args:
        text: what `/metrics` answered.
        where: what it is called in an error.

    Raises:
        InputError: it is not in the format.
    """
    totals: dict[str, float] = {}
    positions: dict[int, float] = {}
    lengths: list[float] = []
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == PER_POS:  # and not …_created, a time
                    position = int(sample.labels["position"])
                    positions[position] = positions.get(position, 0.0) + sample.value
                elif sample.name == MEAN_LENGTH:
                    lengths += [sample.value] if sample.value else []
                else:
                    totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
        drafts, drafted, accepted = (
            int(totals.get(f"{PREFIX}{name}_total", 0)) for name in ("drafts", "draft_tokens", "accepted_tokens")
        )
        depth = max(positions, default=-1) + 1
        generated = [int(totals[name]) for name in GENERATED if name in totals]
        return Metrics(
            ServerCounts(drafts, drafted, accepted, tuple(int(positions.get(i, 0)) for i in range(depth))),
            generated_tokens=sum(generated) if generated else None,
            requests=int(sum(totals.get(name, 0) for name in UNDER_WAY)),
            verify_calls=int(totals[VERIFY_CALLS]) if VERIFY_CALLS in totals else None,
            mean_acceptance_length=sum(lengths) / len(lengths) if lengths else None,
        )
    except (ValueError, KeyError, OverflowError) as error:  # no metrics, or counts that are no number
        raise InputError(
            f"{where}: expected metrics in Prometheus's text format, found: {first_line(error)}"
        ) from error
