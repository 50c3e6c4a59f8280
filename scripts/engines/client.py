"""A client's view of a server: which kind it is, and its counters of speculative decoding."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from prometheus_client.parser import text_string_to_metric_families
from pydantic import Field, Strict

from draftsmith.decode.errors import InputError, first_line
from draftsmith.decode.measurement.server_counts import ServerCounts
from draftsmith.decode.validation import Count, ServerMessage, parse_json, validate
from draftsmith.train.endpoint.answers import Limit
from draftsmith.train.endpoint.client import Client

PREFIX = "vllm:spec_decode_num_"
PER_POS = f"{PREFIX}accepted_tokens_per_pos_total"
GENERATED = ("vllm:generation_tokens_total", "sglang:generation_tokens_total", "llamacpp:tokens_predicted_total")
UNDER_WAY = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "sglang:num_running_reqs",
    "sglang:num_queue_reqs",
    "llamacpp:requests_processing",
    "llamacpp:requests_deferred",
)
VERIFY_CALLS = "sglang:spec_verify_calls_total"
SPECULATED = tuple(f"{PREFIX}{name}_total" for name in ("drafts", "draft_tokens", "accepted_tokens"))
COUNTED = {*SPECULATED, *GENERATED, *UNDER_WAY, VERIFY_CALLS}
MOST_POSITIONS = 4096
"""Servers draft a hundred tokens at most."""
Whole = Annotated[Count, Strict(False)]
"""A whole number, written as a float as the format requires."""
Position = Annotated[int, Field(ge=0, lt=MOST_POSITIONS), Strict(False)]


@dataclass(frozen=True)
class ServerMetrics:
    """One reading of a server's `/metrics`, summed over its engines. None if a server does not say."""

    counters: ServerCounts
    """vLLM's counts; of SGLang only the steps that verified a draft, in newer versions; zeros without speculation."""
    generated_tokens: int | None
    """Tokens written for all clients since the server's start."""
    requests: int


async def metrics_of(client: Client) -> ServerMetrics:
    """Return a server's metrics of speculative decoding and load; InputError if it shows none."""
    return read_metrics(await client.get_text("/metrics"), f"{client.name}: {client.url}/metrics")


def read_metrics(text: str, where: str) -> ServerMetrics:
    """Parse the answer of `/metrics`; `where` names it in the InputError for another format or a bad count.

    Names and meaning: vLLM 0.32 `vllm/v1/spec_decode/metrics.py` and `vllm/v1/metrics/loggers.py`; SGLang
    `python/sglang/srt/observability/metrics_collector.py`, whose `spec_accept_*` are gauges, not counts; llama.cpp
    `tools/server/server-task.cpp`.
    """
    totals: dict[str, int] = {}
    positions: dict[int, int] = {}
    try:
        families = list(text_string_to_metric_families(text))
    except Exception as error:  # the parser raises any error on unexpected text
        raise InputError(
            f"{where}: expected metrics in Prometheus's text format, found: {first_line(error)}"
        ) from error
    for sample in (sample for family in families for sample in family.samples):
        # llama.cpp's counters have vLLM's names under a prefix of its own.
        name, value = sample.name.replace("llamacpp:spec_decode_", "vllm:spec_decode_"), sample.value
        if name == PER_POS:  # the family also has …_created, which is a time
            position = validate(Position, sample.labels.get("position"), f"{where}: {name}: position")
            positions[position] = positions.get(position, 0) + validate(Whole, value, f"{where}: {name}")
        elif name in COUNTED:
            totals[name] = totals.get(name, 0) + validate(Whole, value, f"{where}: {name}")
    drafts, drafted, accepted = (totals.get(name, 0) for name in SPECULATED)
    depth = max(positions, default=-1) + 1
    generated = [totals[name] for name in GENERATED if name in totals]
    return ServerMetrics(
        ServerCounts(
            drafts or totals.get(VERIFY_CALLS, 0), drafted, accepted, tuple(positions.get(i, 0) for i in range(depth))
        ),
        generated_tokens=sum(generated) if generated else None,
        requests=sum(totals.get(name, 0) for name in UNDER_WAY),
    )


class ServerInfo(ServerMessage):
    """SGLang's `/server_info`; its `internal_states` tell it from other servers."""

    version: str | None = None
    speculative_algorithm: str | None = None
    speculative_num_draft_tokens: Limit | None = None
    speculative_num_steps: Count | None = None
    speculative_eagle_topk: Count | None = None


@dataclass(frozen=True)
class Engine:
    """The server at a URL.

    `method` and `draft_tokens`, verified after the text's last token, are SGLang's; `tree` if they form one.
    """

    kind: Literal["vllm", "sglang", "llama.cpp", "other"]
    version: str | None = None
    method: str | None = None
    draft_tokens: int | None = None
    tree: bool = False


async def identify_engine(client: Client) -> Engine:
    """Identify the server by its paths; raise ServerFailure if it does not answer, or reports impossible values."""
    for path in ("/server_info", "/get_server_info"):  # older versions have the latter
        text, value = await _page(client, path)
        if isinstance(value, dict) and "internal_states" in value:
            info = client.read(ServerInfo, text, path)
            drafted, width = info.speculative_num_draft_tokens, info.speculative_eagle_topk or 1
            return Engine(
                "sglang",
                info.version,
                info.speculative_algorithm,
                None if drafted is None else drafted - 1,
                tree=width > 1 and drafted != (info.speculative_num_steps or 0) + 1,
            )
    _, value = await _page(client, "/props")
    if isinstance(value, dict) and isinstance(value.get("build_info"), str):
        return Engine("llama.cpp", value["build_info"])
    _, value = await _page(client, "/version")
    if isinstance(value, dict) and isinstance(value.get("version"), str):
        return Engine("vllm", value["version"])
    return Engine("other", value if isinstance(value, str) else None)


async def _page(client: Client, path: str) -> tuple[str, Any]:
    """Return a path's text, and its JSON value, None without a path or JSON."""
    try:
        text = await client.get_text(path)
        return text, parse_json(text)
    except (InputError, ValueError):
        return "", None
