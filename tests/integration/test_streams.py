"""A stream is the whole answer, however it was cut, to the coordinator, its log, `adapt`, `measure` and `certify`."""

import asyncio
import json
from dataclasses import replace
from functools import partial

import pytest
from local_server import answering
from streamed import CONTENT, COUNTS, MODEL, REASONING, STYLES, cuts, events, tokens, whole
from unit.train.data.chat.test_masks import byte_level
from unit.train.data.chat.test_templates import WHOLE

from draftsmith.decode.measurement.server_counts import ServerCounts
from draftsmith.scripts.adapt.config import AdaptConfig
from draftsmith.scripts.adapt.traffic import read_traffic
from draftsmith.scripts.engines.certify.config import CertifyConfig
from draftsmith.scripts.engines.certify.servers import Servers, TextRequest
from draftsmith.scripts.engines.client import Engine
from draftsmith.scripts.measure.server.config import MeasureServerConfig
from draftsmith.scripts.measure.server.load import MeasuredServer, records_of
from draftsmith.scripts.services.coordinate.config import CoordinatorConfig, ServedPair
from draftsmith.scripts.services.coordinate.coordinator import Coordinator
from draftsmith.scripts.services.coordinate.relay import Relay
from draftsmith.scripts.services.coordinate.request import CHAT, TEXT, Keywords, read_request
from draftsmith.scripts.services.coordinate.request_log import record, unstreamed_answer
from draftsmith.train.data.chat.masks import ClosingTokens
from draftsmith.train.data.prompts import Prompt, mask_answers
from draftsmith.train.endpoint.client import Client, SentPrompt
from draftsmith.train.endpoint.http import ServerFailure

ASKED = {CHAT: {"messages": [{"role": "user", "content": "Rain?"}]}, TEXT: {"prompt": "Rain?"}}
PATHS = pytest.mark.parametrize("path", [CHAT, TEXT], ids=["chat", "text"])
WAYS = pytest.mark.parametrize("style", STYLES.values(), ids=STYLES)


def relayed(path: str, pieces: list[bytes], server_model: str | None = None) -> tuple[list[bytes], bytes]:
    """Relay a streamed answer; return the parts that went to the client, and what the log is given."""
    parts, logged = list[bytes](), list[bytes]()

    async def receive():
        await asyncio.sleep(60)

    async def send(message):
        parts.append(message.get("body", b""))

    async def log(answer):
        assert answer.whole and answer.status == 200
        logged.append(bytes(answer.content))

    async def ask():
        async with answering(pieces) as url:
            pair = ServedPair("pair", ["mine"], [url], server_model)
            body = json.dumps({"model": "mine", "stream": True, **ASKED[path]}).encode()
            request = read_request(path, body, {}, Keywords([]))
            await Relay(request, Coordinator(CoordinatorConfig([pair]), {}), log)({}, receive, send)

    asyncio.run(ask())
    return parts, logged[0]


def log_line(path: str, answer: dict) -> dict:
    return json.loads(json.dumps(record({"model": "m", **ASKED[path]}, answer, {}, None)))


@PATHS
@WAYS
def test_the_coordinator_relays_a_stream_byte_for_byte(style, path):
    body = events(path == CHAT, style)
    for name, pieces in cuts(body).items():
        parts, content = relayed(path, pieces)
        assert b"".join(parts) == content == body, name
        assert len(parts) >= len(pieces), "a part waits for none after it"
        parts, content = relayed(path, pieces, MODEL)
        assert b"".join(parts) == content == body.replace(b'"model": "m"', b'"model": "mine"'), name


@PATHS
@WAYS
def test_the_log_of_a_stream_is_that_of_the_whole_answer(style, path):
    chat = path == CHAT
    streamed = unstreamed_answer(events(chat, style), streamed=True)
    unstreamed = unstreamed_answer(json.dumps(whole(chat, style)).encode(), streamed=False)
    ours, theirs = log_line(path, streamed), log_line(path, unstreamed)
    if chat:
        message = ours["response"]["choices"][0]["message"]
        for call in message["tool_calls"]:
            del call["index"]
        del theirs["response"]["choices"][0]["message"]["refusal"]
    assert ours == theirs


@WAYS
def test_adapt_learns_the_same_tokens_from_a_stream(style, tmp_path):
    """The log has the answer whole, then as a stream; half of it are the newest requests, which are only asked."""
    lines = [log_line(CHAT, unstreamed_answer(json.dumps(whole(True, style)).encode(), streamed=False))]
    lines += [log_line(CHAT, unstreamed_answer(events(True, style), streamed=True))]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines * 8))
    files = {"log": [str(tmp_path / "log.jsonl")], "output": str(tmp_path)}
    config = AdaptConfig(target="t", drafter="d", newest=8, least=16, **files)
    traffic = read_traffic(config, 0)
    tokenizer = byte_level(False)
    tokenizer.chat_template = WHOLE.replace("m.reasoning_content", f"m.{style.names[-1]}")
    closing = ClosingTokens.of(tokenizer)
    read = [mask_answers(prompt, tokenizer, len(tokenizer), closing, [])[0] for prompt in traffic.learned]
    assert read[0].ids == read[1].ids and read[0].mask == read[1].mask
    text = tokenizer.decode(read[0].ids)
    assert REASONING in text and CONTENT in text and "Zürich 🌧" in text
    assert traffic.newest[0] == replace(traffic.newest[1], id="8", where=None)
    assert traffic.newest[0].messages == ASKED[CHAT]["messages"]


def served(pieces: list[bytes], use):
    """Return what `use` makes of a client of a server that answers so."""

    async def ask():
        async with answering(pieces) as url, Client(url, timeout=20) as client:
            return await use(client)

    return asyncio.run(ask())


def asked(path: str) -> SentPrompt:
    prompt = Prompt("a", None, ASKED[path]["messages"], None) if path == CHAT else Prompt("a", "Rain?", None, None)
    return SentPrompt(prompt, fields=ASKED[path]) if path == CHAT else SentPrompt(prompt, ids=[1, 2, 3])


async def measured(client: Client, path: str, settings: dict):
    config = MeasureServerConfig(client.url, **settings)
    door = MeasuredServer(client, Engine("vllm"), MODEL, None, config)
    (record,), _ = await records_of(door, {0: asked(path)}, 0.0, 1)
    return record


async def certified(client: Client, path: str, settings: dict):
    config = CertifyConfig(server=client.url, target="t", **settings)
    servers = Servers(config, [asked(path)], [], None, models={"server": MODEL})
    return await servers.ask(client, [TextRequest(0.0, 0, 0)], 1, lambda count: None)


@PATHS
@WAYS
def test_measure_and_certify_count_what_the_whole_answer_has(style, path, tmp_path):
    chat = path == CHAT
    written, reason = len(tokens(chat)), "tool_calls" if chat else "length"
    settings = {"max_new_tokens": written, "prompts": "p", "output": str(tmp_path)}
    for name, pieces in cuts(events(chat, style)).items():
        record = served(pieces, partial(measured, path=path, settings=settings))
        assert (record.tokens, record.finish_reason) == (written, reason), name
        assert record.token_ids == list(range(written)) and record.prompt_ids == [1, 2, 3], name
        assert record.counts == ServerCounts.of_histogram(COUNTS["acceptance_histogram"], 10), name
        assert record.parts == [len(tokens(chat)[i : i + style.at_once]) for i in range(0, written, style.at_once)]
        certify = partial(certified, path=path, settings=settings)
        if chat:  # a call may end a text, but `certify` asks for none
            with pytest.raises(ServerFailure, match="ends with stop or length, found 'tool_calls'"):
                served(pieces, certify)
        else:
            assert served(pieces, certify) == {0: (list(range(written)), "length")}, name


@PATHS
@WAYS
def test_a_server_without_ids_is_timed_by_all_that_it_writes(style, path):
    """A call's arguments are tokens too, and so the last part of an answer that calls a tool."""
    chat, listed = path == CHAT, tokens(path == CHAT, style.halves)
    pieces = cuts(events(chat, replace(style, ids=False)))["within lines"]
    answer = served(pieces, lambda client: client.complete({"model": MODEL}, path))
    assert answer.token_ids is None and answer.completion_tokens == len(listed)
    assert style.halves or answer.text == REASONING + CONTENT
    groups = [listed[start : start + style.at_once] for start in range(0, len(listed), style.at_once)]
    written = [group for group in groups if any(text or field.isdigit() for field, text, _ in group)]
    assert len(answer.arrivals) == len(written)
