"""What a server counts of its speculative decoding: in its `/metrics` (the Prometheus text format), or in an answer."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from draftsmith.decode.errors import InputError

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
class ServerCounters:
    """vLLM's counters, summed over its engines; a later reading minus an earlier one is what lies between.

    What servers count in one answer is said in the same words.
    """

    num_drafts: int
    """Steps of a text that verified a draft."""
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_tokens_per_pos: tuple[int, ...]

    def __sub__(self, earlier: "ServerCounters") -> "ServerCounters":
        per_pos = zip_longest(self.num_accepted_tokens_per_pos, earlier.num_accepted_tokens_per_pos, fillvalue=0)
        return ServerCounters(
            self.num_drafts - earlier.num_drafts,
            self.num_draft_tokens - earlier.num_draft_tokens,
            self.num_accepted_tokens - earlier.num_accepted_tokens,
            tuple(now - then for now, then in per_pos),
        )

    def __add__(self, other: "ServerCounters") -> "ServerCounters":
        per_pos = zip_longest(self.num_accepted_tokens_per_pos, other.num_accepted_tokens_per_pos, fillvalue=0)
        return ServerCounters(
            self.num_drafts + other.num_drafts,
            self.num_draft_tokens + other.num_draft_tokens,
            self.num_accepted_tokens + other.num_accepted_tokens,
            tuple(one + another for one, another in per_pos),
        )

    @classmethod
    def of_histogram(cls, steps: Sequence[int], num_draft_tokens: int) -> "ServerCounters":
        """Return the counts of one text.

        Args:
            steps: how many of its steps accepted 0, 1, 2, … drafted tokens.
            num_draft_tokens: what they drafted together.
        """
        per_pos = [sum(steps[i:]) for i in range(1, len(steps))]
        return cls(sum(steps), num_draft_tokens, sum(per_pos), tuple(per_pos))

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "ServerCounters":
        """Return the counts that `to_dict` wrote."""
        return cls(**{**values, "num_accepted_tokens_per_pos": tuple(values["num_accepted_tokens_per_pos"])})

    def to_dict(self) -> dict[str, Any]:
        """Return the counts as plain JSON types."""
        return asdict(self) | {"num_accepted_tokens_per_pos": list(self.num_accepted_tokens_per_pos)}


@dataclass(frozen=True)
class Metrics:
    """One reading of a server's `/metrics`, summed over its engines."""

    counters: ServerCounters
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
    except ValueError as error:
        raise InputError(f"{where}: expected metrics in Prometheus's text format, found: {error}") from error
    drafts, drafted, accepted = (
        int(totals.get(f"{PREFIX}{name}_total", 0)) for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    depth = max(positions, default=-1) + 1
    generated = [int(totals[name]) for name in GENERATED if name in totals]
    return Metrics(
        ServerCounters(drafts, drafted, accepted, tuple(int(positions.get(i, 0)) for i in range(depth))),
        generated_tokens=sum(generated) if generated else None,
        requests=int(sum(totals.get(name, 0) for name in UNDER_WAY)),
        verify_calls=int(totals[VERIFY_CALLS]) if VERIFY_CALLS in totals else None,
        mean_acceptance_length=sum(lengths) / len(lengths) if lengths else None,
    )
