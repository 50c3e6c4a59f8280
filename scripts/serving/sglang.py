"""SGLang's own paths: `/generate`, whose answers have counts of their own, and `/server_info`.

Its streamed OpenAI-compatible answers have no counts of speculative decoding, and its metrics have gauges instead of
counters; so prompts with known tokens or text are sent to `/generate`.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement.server_counts import ServerCounts
from draftsmith.decode.validation import Count, ServerMessage, parse_json
from draftsmith.scripts.serving.client import Client, StreamedCompletion
from draftsmith.train.endpoint.answers import Generated, Limit, Meta
from draftsmith.train.endpoint.http import server_words

PATH = "/generate"
COUNTED = (
    ("spec_num_proposed_drafts", "spec_num_correct_drafts", "spec_correct_drafts_histogram"),
    ("spec_draft_token_num", "spec_accept_token_num", "spec_accept_histogram"),
)
"""Fields of an answer for drafted and accepted tokens and for steps by accepted tokens: since 2026, and before."""


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

    kind: Literal["vllm", "sglang", "other"]
    version: str | None = None
    method: str | None = None
    draft_tokens: int | None = None
    tree: bool = False


async def recognised(client: Client) -> Engine:
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


async def generate(client: Client, request: Mapping[str, Any]) -> StreamedCompletion:
    """Return one completion by `/generate`, as it streams in, with SGLang's counts; errors are those of `complete`.

    `request` has `input_ids` or `text`, and `sampling_params`. The shapes are those of `handle_loop` and
    `_calculate_spec_decoding_metrics` (now `fill_spec_decoding_meta`) in
    `python/sglang/srt/managers/tokenizer_manager.py`: every part repeats the whole text and, unless the server streams
    incrementally, all ids; the last one has the counts.
    """
    answer, meta, ids = StreamedCompletion(sent=time.perf_counter()), None, list[int]()
    most = request.get("sampling_params", {}).get("max_new_tokens")
    async for data in client.events(PATH, {**request, "stream": True, "return_prompt_token_ids": True}):
        now, part = time.perf_counter(), client.read(Generated, data, PATH)
        if part.error is not None:
            raise client.failure("a completion", f"{client.url}{PATH}", server_words(data.encode()))
        if part.meta_info is None:
            raise client.impossible(PATH, "meta_info: expected a value, found none")
        meta, new_ids, before = part.meta_info, part.output_ids or [], len(ids)
        whole = len(new_ids) == meta.completion_tokens
        ids, answer.text = (new_ids, part.text) if whole else (ids + new_ids, answer.text + part.text)
        client.require_room(PATH, max(len(ids), meta.completion_tokens), most)
        answer.prompt_ids = part.prompt_token_ids or answer.prompt_ids
        if len(ids) > before:
            answer.arrivals.append((now, len(ids) - before))
    answer.ended = time.perf_counter()
    if meta is None or meta.finish_reason is None:
        raise client.broken_off(PATH)
    if meta.finish_reason.type == "abort":
        raise client.failure("a completion", f"{client.url}{PATH}", meta.finish_reason.message or "aborted")
    answer.token_ids, answer.finish_reason = ids, meta.finish_reason.type
    answer.prompt_ids = answer.prompt_ids or request.get("input_ids")
    answer.prompt_tokens, answer.completion_tokens = meta.prompt_tokens, meta.completion_tokens
    counts = counted(meta)
    answer.counts = None if counts is None else client.counted(PATH, counts)
    return answer


def counted(meta: Meta) -> ServerCounts | None:
    """Return the counts in an answer's `meta_info`; None without speculation."""
    for names in COUNTED:
        drafted, accepted, steps = (getattr(meta, name) for name in names)
        if drafted is not None and meta.spec_verify_ct:
            if steps and sum(steps) == meta.spec_verify_ct:
                return ServerCounts.of_histogram(steps, drafted)
            return ServerCounts(meta.spec_verify_ct, drafted, accepted or 0, ())
    return None
