"""SGLang's own doors: `/generate`, whose answers are counted one by one, and `/server_info`.

Its OpenAI-compatible answers say nothing of speculative decoding while they stream, and its metrics have gauges in
place of counters; so prompts whose tokens or text are known go to `/generate`.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement.server_counts import ServerCounts
from draftsmith.scripts.serving.client import Answer, Client
from draftsmith.train.endpoint.server import server_words

PATH = "/generate"
COUNTED = (
    ("spec_num_proposed_drafts", "spec_num_correct_drafts", "spec_correct_drafts_histogram"),
    ("spec_draft_token_num", "spec_accept_token_num", "spec_accept_histogram"),
)
"""What an answer calls its drafted and accepted tokens, and its steps by accepted tokens: since 2026, and before."""

DRAFTED = ("speculative_num_draft_tokens", "speculative_num_steps", "speculative_eagle_topk")
"""What `/server_info` says of a step: tokens that it verifies, the last one of the text among them; the forwards of the
draft; branches."""


@dataclass(frozen=True)
class Engine:
    """What answers at a URL."""

    kind: Literal["vllm", "sglang", "other"]
    version: str | None = None
    method: str | None = None
    """SGLang's speculative algorithm, such as EAGLE3; other servers do not say."""
    draft_tokens: int | None = None
    """SGLang's tokens that a step verifies beyond the last one of the text."""
    tree: bool = False
    """Whether they are a tree's, and not a chain's."""


async def recognised(client: Client) -> Engine:
    """Return what answers, by the doors that it has.

    Raises:
        InputError: an SGLang's, of which a number is none.
        ServerFailure: nothing does.
    """
    for path in ("/server_info", "/get_server_info"):  # the latter of older versions
        info = await _answer(client, path)
        if isinstance(info, dict) and "internal_states" in info:
            drafted, steps, width = (_whole(info, name, f"{client.name}: {client.url}{path}") for name in DRAFTED)
            method = info.get("speculative_algorithm")
            return Engine(
                "sglang",
                str(info["version"]) if "version" in info else None,
                None if method is None else str(method),
                None if drafted is None else drafted - 1,
                tree=(width or 1) > 1 and drafted != (steps or 0) + 1,
            )
    told = await _answer(client, "/version")
    version = told.get("version") if isinstance(told, dict) else None
    return Engine("other") if version is None else Engine("vllm", str(version))


def _whole(info: Mapping[str, Any], name: str, where: str) -> int | None:
    """Return a number of what a server says of itself; None where it says none."""
    value = info.get(name)
    if value is not None and type(value) is not int:
        raise InputError(f"{where}: expected a whole number as {name}, found {repr(value)[:100]}")
    return value


async def _answer(client: Client, path: str) -> Any:
    """Return what a path answers; None where there is none."""
    try:
        return await client.get_json(path)
    except InputError:
        return None


async def generate(client: Client, request: Mapping[str, Any]) -> Answer:
    """Return one completion by `/generate`, read as it streams in, with what SGLang counted of it.

    The shapes are those of `handle_loop` and `_calculate_spec_decoding_metrics` (now `fill_spec_decoding_meta`) in
    `python/sglang/srt/managers/tokenizer_manager.py`: every part repeats the whole text and, unless the server streams
    incrementally, all ids; the last one counts.

    Args:
        client: of the server.
        request: the body: `input_ids` or `text`, and `sampling_params`.

    Raises:
        InputError: the request is refused (4xx).
        ServerFailure: no answer, a broken one, or none within the timeout.
    """
    answer, meta = Answer(sent=time.perf_counter()), dict[str, Any]()
    ids: list[int] = []
    async for data in client.parts(PATH, {**request, "stream": True, "return_prompt_token_ids": True}):
        now = time.perf_counter()
        try:
            part = json.loads(data)
            if "error" in part:
                raise client.no_completion(PATH, server_words(data.encode()))
            meta, said_ids = part["meta_info"], list(map(int, part.get("output_ids") or []))
            before, whole = len(ids), len(said_ids) == int(meta["completion_tokens"])
            ids, answer.text = (said_ids, part["text"]) if whole else (ids + said_ids, answer.text + part["text"])
            answer.prompt_ids = part.get("prompt_token_ids") or answer.prompt_ids
            if len(ids) > before:
                answer.arrivals.append((now, len(ids) - before))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise client.broken_part(PATH, data) from error
    answer.ended = time.perf_counter()
    reason = meta.get("finish_reason")
    if not isinstance(reason, dict):
        raise client.broken_off(PATH)
    if reason.get("type") == "abort":
        raise client.no_completion(PATH, str(reason.get("message", "aborted")))
    answer.token_ids, answer.finish_reason = ids, reason.get("type")
    answer.prompt_ids = answer.prompt_ids or request.get("input_ids")
    answer.prompt_tokens, answer.completion_tokens = meta.get("prompt_tokens"), meta["completion_tokens"]
    try:
        answer.counts = counted(meta)
    except (ValueError, TypeError, KeyError) as error:
        raise client.broken_part(PATH, json.dumps(meta)) from error
    return answer


def counted(meta: Mapping[str, Any]) -> ServerCounts | None:
    """Return what an answer's `meta_info` counts; None where it does not, as of a server that does not speculate."""
    for drafted, accepted, histogram in COUNTED:
        if drafted in meta and meta.get("spec_verify_ct"):
            steps = meta.get(histogram)
            if steps and sum(steps) == meta["spec_verify_ct"]:
                return ServerCounts.of_histogram(list(map(int, steps)), int(meta[drafted]))
            return ServerCounts(int(meta["spec_verify_ct"]), int(meta[drafted]), int(meta[accepted]), ())
    return None
