"""The requests of a run in the files of AIPerf, for those who read its records or make its reports.

The shapes are those of AIPerf 0.13: `MetricRecordInfo` of `src/aiperf/common/models/record_models.py`, and
`SpecDecodeAcceptanceRecord` of `spec_decode_models.py`. Since 0.14 its `speed-bench-report` groups records by their
category (`source_kind`), and looks for the model's name next to them. Times begin as a request is sent.
"""

import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from draftsmith.decode.measurement.server_counts import ServerCounts
from draftsmith.scripts.serving.measure.load import RequestRecord
from draftsmith.scripts.serving.measure.observe import Observed
from draftsmith.train.data.prompts import Prompt
from draftsmith.train.files import write_atomically

RECORDS, SUMMARY = "profile_export.jsonl", "profile_export_aiperf.json"
WRITER = "draftsmith"  # in place of AIPerf's processes


def write_aiperf(observed: Observed, directory: Path) -> None:
    """Write the finished settings of a run: a folder for each server, temperature and number of requests at once."""
    for (temperature, concurrency), turns in observed.blocks.items():
        for role in turns:
            folder, door = directory / f"{role}-T{temperature:g}-{concurrency}", observed.servers[role]
            requests = observed.records((temperature, concurrency), role)
            lines = [
                json.dumps(aiperf_record(number, request, observed.prompts[request.prompt].prompt, door.engine.kind))
                for number, request in enumerate(requests)
            ]
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / RECORDS, "".join(f"{line}\n" for line in lines))
            models = {"models": {"items": [{"name": door.model}]}}
            write_atomically(folder / SUMMARY, json.dumps({"input_config": models}) + "\n")


def aiperf_record(number: int, request: RequestRecord, prompt: Prompt, engine: str) -> dict[str, Any]:
    """Return a request as a line of `profile_export.jsonl`; what is not known is left out."""
    ended = request.begun + request.ended - request.sent
    metadata: dict[str, Any] = {"session_num": number, "conversation_id": prompt.id, "turn_index": 0}
    metadata |= {} if prompt.category is None else {"source_kind": prompt.category}
    metadata |= {"request_start_ns": round(request.begun * 1e9), "request_end_ns": round(ended * 1e9)}
    metadata |= {"worker_id": WRITER, "record_processor_id": WRITER, "benchmark_phase": "profiling"}
    values: list[tuple[str, float, str]] = [("output_sequence_length", request.tokens, "tokens")]
    if request.prompt_ids is not None:
        values.append(("input_sequence_length", len(request.prompt_ids), "tokens"))
    if request.first is not None and request.last is not None:
        values.append(("time_to_first_token", 1e3 * (request.first - request.sent), "ms"))
        values.append(("request_latency", 1e3 * (request.last - request.sent), "ms"))
        if request.tokens > 1 and request.last > request.first:
            between = (request.last - request.first) / (request.tokens - 1)
            values.append(("inter_token_latency", 1e3 * between, "ms"))
            values.append(("output_token_throughput_per_user", 1 / between, "tokens/sec/user"))
    record: dict[str, Any] = {"metadata": metadata | {"was_cancelled": False}}
    record["metrics"] = {name: {"value": value, "unit": unit} for name, value, unit in values}
    drafted = None if request.counts is None else acceptance(request.counts)
    if drafted is not None:
        record["spec_decode_acceptance"] = {"engine": engine, **drafted, "completion_tokens": request.tokens}
    return record | {"error": None}


def acceptance(counts: ServerCounts) -> Mapping[str, Any] | None:
    """Return a server's counts of one answer as AIPerf has them; None where it would refuse them.

    It needs steps by accepted tokens, which some servers do not tell, and no target's own tokens among the accepted.
    """
    steps, drafted, accepted = counts.num_drafts, counts.num_draft_tokens, counts.num_accepted_tokens
    by_position = counts.num_accepted_tokens_per_pos
    if not steps or not drafted or sum(by_position) != accepted or accepted > drafted:
        return None
    by_accepted = [before - after for before, after in pairwise([steps, *by_position, 0])]
    return {
        "mean_acceptance_length": 1 + accepted / steps,
        "draft_acceptance_rate": accepted / drafted,
        "acceptance_histogram": {str(j): count for j, count in enumerate(by_accepted) if count},
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_steps": steps,
    }
