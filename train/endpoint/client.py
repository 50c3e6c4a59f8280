"""A client of an OpenAI-compatible server, vLLM, SGLang or llama.cpp, that records when each part of a completion came.

Nothing is sent twice: a retry would be timed twice, and counted twice by the server.
"""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement.server_counts import ServerCounts, possible
from draftsmith.decode.options import Filters
from draftsmith.train.data.prompts import Prompt
from draftsmith.train.data.samples import mixed_seed
from draftsmith.train.endpoint.answers import (
    Delta,
    Generated,
    ModelList,
    StreamPart,
    WholeCompletion,
    Written,
    whole_ids,
)
from draftsmith.train.endpoint.http import MOST_BYTES, HttpClient, ServerFailure, server_words
from draftsmith.train.options import checked_url

KEY = "VLLM_API_KEY"
TEXT, CHAT, NATIVE, LLAMA = "/v1/completions", "/v1/chat/completions", "/generate", "/completion"
"""Paths of completions: OpenAI's, SGLang's own, whose answers have counts, and llama.cpp's own, which have ids."""
PATHS = {"sglang": NATIVE, "llama.cpp": LLAMA}
"""Servers' own paths."""


@dataclass(frozen=True)
class SentPrompt:
    """A prompt as it is sent: as token ids, else as `fields` of a request, text or messages that the server encodes."""

    prompt: Prompt
    ids: list[int] | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class ServedCompletion:
    """One completion; what the server does not say is None. Times are in seconds of `time.perf_counter`."""

    text: str | None = None
    finish_reason: str | None = None
    stop: int | str | None = None
    """The token, or the server's own text, that ended it."""
    token_ids: list[int] | None = None
    prompt_ids: list[int] | None = None
    completion_tokens: int | None = None
    """The server's count."""
    prompt_tokens: int | None = None
    counts: ServerCounts | None = None
    """The server's counts of this completion, if it gives them: SGLang's `/generate` does, its chats since 0.5.19,
    and vLLM started with `--per-request-spec-decode-metrics summary`."""
    sent: float = 0.0
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    """Time and tokens of each part; 0 tokens if the server gave no ids."""
    ended: float = 0.0

    def add(self, part: StreamPart, now: float = 0.0) -> None:
        """Add a part that came `now`, or a whole answer, of OpenAI's API."""
        for choice in part.choices or ():
            delta, ids = choice.delta or Delta(), choice.token_ids
            text = choice.text or delta.text
            if text or choice.text is not None:
                self.text = (self.text or "") + text
            self.prompt_ids = part.prompt_token_ids or self.prompt_ids or choice.prompt_token_ids
            if ids is not None:
                self.token_ids = [*(self.token_ids or []), *ids]
            if ids or text or delta.tool_calls:  # a call's arguments are tokens, too
                self.arrivals.append((now, len(ids or [])))
            self.finish_reason = choice.finish_reason or self.finish_reason
            stop = choice.matched_stop if choice.stop_reason is None else choice.stop_reason
            self.stop = self.stop if stop is None else _stop(stop)
        if part.usage is not None:
            usage = part.usage
            self.prompt_tokens = self.prompt_tokens if usage.prompt_tokens is None else usage.prompt_tokens
            if usage.completion_tokens is not None:
                self.completion_tokens = usage.completion_tokens
        if part.metrics is not None and part.metrics.speculative_decoding is not None:  # in the last part
            counted = part.metrics.speculative_decoding
            self.counts = ServerCounts.of_histogram(counted.acceptance_histogram, counted.num_draft_tokens)
        if part.sglext is not None and part.sglext.spec_tokens_details is not None:
            self.counts = part.sglext.spec_tokens_details.counts()

    def add_generated(self, part: Generated, now: float) -> None:
        """Add a part of SGLang's `/generate` that came `now`.

        The shapes are those of `handle_loop` and `_calculate_spec_decoding_metrics` (now `fill_spec_decoding_meta`) in
        `python/sglang/srt/managers/tokenizer_manager.py`: every part repeats the whole text and, unless the server
        streams incrementally, all ids; the last one has the counts.
        """
        meta, ids, before = part.meta_info, part.output_ids or [], self.token_ids or []
        if meta is None:
            return
        whole = len(ids) == meta.completion_tokens
        self.text = part.text if whole else (self.text or "") + part.text
        if part.output_ids is not None:
            self.token_ids = ids if whole else before + ids
        if len(self.token_ids or []) > len(before):
            self.arrivals.append((now, len(self.token_ids or []) - len(before)))
        self.prompt_ids = part.prompt_token_ids or self.prompt_ids
        self.prompt_tokens, self.completion_tokens = meta.prompt_tokens, meta.completion_tokens
        if meta.finish_reason is not None:
            self.finish_reason, self.stop = meta.finish_reason.type, _stop(meta.finish_reason.matched)
        self.counts = meta.counts()

    def add_written(self, part: Written, now: float) -> None:
        """Add a part of llama.cpp's `/completion` that came `now`: a token each, also of those accepted together."""
        self.text = (self.text or "") + part.content
        self.token_ids = [*(self.token_ids or []), *part.tokens]
        if part.tokens:
            self.arrivals.append((now, 0))
        if part.stop_type is not None and part.stop_type != "none":
            self.finish_reason = "length" if part.stop_type == "limit" else "stop"
            self.prompt_tokens, self.completion_tokens = part.tokens_evaluated, part.tokens_predicted


def server_key() -> str | None:
    """Return the environment variable with the key of the servers that commands ask, None if it is not set."""
    return KEY if os.environ.get(KEY) else None


class Client(HttpClient):
    """Requests to one server; an asynchronous context manager.

    Its methods raise InputError for a refused request (4xx) or an unusable server, and ServerFailure for no answer, a
    broken one, or none within the timeout.
    """

    def __init__(self, url: str, name: str = "server", timeout: float = 600.0):
        """Check the URL, without requests; `name` is the option that gave it.

        A trailing /v1 is removed. `timeout` is in seconds per answer. The environment's `KEY` is the API key, if set.
        """
        super().__init__(checked_url(url, name), name, server_key(), timeout, KEY)

    async def model(self, named: str | None = None) -> str:
        """Return the name of the only model that the server lists, or `named` if it is listed."""
        names = list(await self.models())
        if named is not None:
            if named not in names:
                raise InputError(f"{self.name}: expected a model {named} at {self.url}, found {', '.join(names)}")
            return named
        if len(names) != 1:
            raise InputError(f"{self.name}: expected one model at {self.url}, found {', '.join(names) or 'none'}")
        return names[0]

    async def models(self) -> dict[str, int | None]:
        """Return the listed models, and the most tokens of a text of each, if known."""
        listed = await self.fetch(ModelList, "/v1/models", what="a list of models")
        return {model.id: model.max_model_len for model in listed.data}

    async def complete(self, request: Mapping[str, Any], path: str = TEXT, token_ids: bool = True) -> ServedCompletion:
        """Return one completion, read as it streams in.

        `request` and `path` are those of `completion_request`. Streaming, usage and ids are requested here. `token_ids`
        requests ids, which are dropped if some are missing. SGLang refuses them for streamed chats: without them its
        counts of the answer are requested.
        """
        native, size = path == NATIVE, 0
        stream: dict[str, Any] = {"stream": True}
        if native:
            stream["return_prompt_token_ids"] = True
        elif path == LLAMA:
            stream["return_tokens"] = True
        else:
            wanted = "return_token_ids" if token_ids else "return_spec_tokens_details"
            stream |= {"stream_options": {"include_usage": True}, wanted: True}
        most = request.get("sampling_params", {}).get("max_new_tokens") if native else request.get("max_tokens")
        answer = ServedCompletion(sent=time.perf_counter())
        async for data in self.events(path, {**request, **stream}, marked=path != LLAMA):
            size += len(data)
            if size > MOST_BYTES and not native:  # there each part repeats the text
                raise self.too_long(f"{self.url}{path}")
            self._add(answer, data, path)
            written = max(len(answer.token_ids or []), answer.completion_tokens or 0)
            if most is not None and written > most:
                raise self.impossible(path, f"expected at most {most} tokens, found {written}")
        answer.ended = time.perf_counter()
        if answer.finish_reason is None:
            raise self.broken_off(path)
        if answer.counts is not None:
            self.counted(path, answer.counts)
        if native or path == LLAMA:
            sent = request.get("input_ids", request.get("prompt"))
            answer.prompt_ids = answer.prompt_ids or (sent if isinstance(sent, list) else None)
            answer.token_ids = answer.token_ids or []
        elif not whole_ids(answer.token_ids, answer.completion_tokens, answer.finish_reason):
            # Servers that parse thinking or tool calls hold back parts of the text, and lose their ids.
            answer.token_ids, answer.arrivals = None, [(time, 0) for time, _ in answer.arrivals]
        return answer

    async def complete_whole(self, request: Mapping[str, Any], path: str, what: str) -> ServedCompletion:
        """Return one completion, `what` in messages, that comes in one piece; it is as the server gave it."""
        answer = ServedCompletion()
        answer.add(await self.fetch(WholeCompletion, path, {**request, "return_token_ids": True}, what))
        return answer

    def impossible(self, path: str, what: str) -> ServerFailure:
        """Return the failure of an answer with impossible values."""
        return ServerFailure(f"{self.name}: {self.url}{path}: {what}")

    def counted(self, path: str, counts: ServerCounts) -> ServerCounts:
        """Return the counts; raise ServerFailure if they are impossible."""
        try:
            return possible(counts)
        except ValueError as error:
            raise self.impossible(path, str(error)) from error

    def _add(self, answer: ServedCompletion, data: str, path: str) -> None:
        now, problem = time.perf_counter(), None
        kind: Any = {NATIVE: Generated, LLAMA: Written}.get(path, StreamPart)
        part: Generated | Written | StreamPart = self.read(kind, data, path)
        if part.error is not None:
            problem = server_words(data.encode())
        elif isinstance(part, Written):
            answer.add_written(part, now)
        elif isinstance(part, StreamPart):
            answer.add(part, now)
        elif part.meta_info is None:
            raise self.impossible(path, "meta_info: expected a value, found none")
        elif (ended := part.meta_info.finish_reason) is not None and ended.type == "abort":
            problem = ended.message or "aborted"
        else:
            answer.add_generated(part, now)
        if problem is not None:
            raise self.failure("a completion", f"{self.url}{path}", problem)


def completion_request(
    prompt: SentPrompt,
    model: str,
    filters: Filters,
    temperature: float,
    max_new_tokens: int | None,
    seed: int | None = None,
    kind: str = "",
    **options: Any,
) -> tuple[dict[str, Any], str]:
    """Return the body and the path of a request for one completion, by the server's own path for a known `kind`.

    All options of sampling are written out under the names of vLLM and SGLang, since servers take missing ones from the
    model's generation_config.json, as `generate` does. `options` are further ones. A `seed` is for sampled text only.
    """
    sampling: dict[str, Any] = {
        "temperature": temperature,
        "top_k": filters.top_k or -1,  # 0 means "all" to vLLM alone, −1 to both
        "top_p": filters.top_p,
        "min_p": filters.min_p,
        "repetition_penalty": filters.repetition_penalty,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        **options,
    }
    seeded = seed is not None and temperature > 0
    own = None if "messages" in prompt.fields else PATHS.get(kind)
    if own == LLAMA:
        # Here temperature comes before the cuts, as in the library; there it is the last by default.
        body: dict[str, Any] = {
            "n_predict": max_new_tokens,
            "samplers": ["penalties", "temperature", "top_k", "top_p", "min_p"],
        }
        body |= sampling | {"top_k": filters.top_k or 0, "repeat_penalty": sampling.pop("repetition_penalty")}
        body |= {"prompt": prompt.ids or prompt.fields.get("prompt"), "cache_prompt": False, "repeat_last_n": 1 << 17}
        return body | ({"seed": seed} if seeded else {}), LLAMA
    if own == NATIVE:
        sampling |= {"max_new_tokens": max_new_tokens} | ({"sampling_seed": seed} if seeded else {})
        content: dict[str, Any] = {"text": prompt.fields["prompt"]} if prompt.ids is None else {"input_ids": prompt.ids}
        return content | {"sampling_params": sampling}, NATIVE
    body = {"model": model, "max_tokens": max_new_tokens} | sampling | ({"seed": seed} if seeded else {})
    content = dict(prompt.fields) if prompt.ids is None else {"prompt": prompt.ids}
    return body | content, CHAT if "messages" in content else TEXT


def request_seed(*parts: int | str) -> int:
    """Return a seed of 31 bits, as servers take it, that depends on all parts."""
    return mixed_seed(*parts) >> 32


def _stop(value: Any) -> int | str | None:
    """Return the id of the token, or the text, that ended a completion; None for anything else."""
    return value if type(value) in (int, str) else None
