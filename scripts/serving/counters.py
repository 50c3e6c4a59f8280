"""What a server counts of its speculative decoding, read from its `/metrics` (the Prometheus text format)."""

from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from draftsmith.decode.errors import InputError

PREFIX = "vllm:spec_decode_num_"


@dataclass(frozen=True)
class ServerCounters:
    """vLLM's counters, summed over its engines; a later reading minus an earlier one is what lies between."""

    num_drafts: int
    """Steps of a text that verified a draft."""
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_tokens_per_pos: tuple[int, ...]

    def __sub__(self, earlier: "ServerCounters") -> "ServerCounters":
        per_pos = self.num_accepted_tokens_per_pos
        before = earlier.num_accepted_tokens_per_pos + (0,) * (len(per_pos) - len(earlier.num_accepted_tokens_per_pos))
        return ServerCounters(
            self.num_drafts - earlier.num_drafts,
            self.num_draft_tokens - earlier.num_draft_tokens,
            self.num_accepted_tokens - earlier.num_accepted_tokens,
            tuple(now - then for now, then in zip(per_pos, before, strict=True)),
        )


def read_counters(text: str, where: str) -> ServerCounters:
    """Read vLLM's counters; zeros where the server does not speculate.

    Args:
        text: what `/metrics` answered.
        where: what it is called in an error.

    Raises:
        InputError: it is not in the format.
    """
    totals: dict[str, float] = {}
    positions: dict[int, float] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                name = sample.name.removeprefix(PREFIX)
                if name == sample.name or not name.endswith("_total"):
                    continue
                if "position" in sample.labels:
                    position = int(sample.labels["position"])
                    positions[position] = positions.get(position, 0.0) + sample.value
                else:
                    totals[name] = totals.get(name, 0.0) + sample.value
    except ValueError as error:
        raise InputError(f"{where}: expected metrics in Prometheus's text format, found: {error}") from error
    drafts, drafted, accepted = (
        int(totals.get(f"{name}_total", 0)) for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    depth = max(positions, default=-1) + 1
    return ServerCounters(drafts, drafted, accepted, tuple(int(positions.get(i, 0)) for i in range(depth)))
