"""The client of servers, against a server whose every answer is written down."""

import asyncio
import json

import pytest
from local_server import answering

from draftsmith.decode.errors import InputError
from draftsmith.decode.options import Filters
from draftsmith.decode.validation import parse_answer
from draftsmith.train.endpoint import answers, http
from draftsmith.train.endpoint import client as module
from draftsmith.train.endpoint.client import KEY, Client, ServedCompletion
from draftsmith.train.endpoint.http import ServerFailure

SECRET = "sk-not-to-be-seen"


def complete(monkeypatch, body: bytes, status: str = "200 OK", request=None, path=module.TEXT) -> ServedCompletion:
    monkeypatch.setenv(KEY, SECRET)

    async def ask() -> ServedCompletion:
        async with answering(body, status) as url, Client(url, timeout=10) as client:
            return await client.complete(request or {"model": "m", "prompt": "p", "max_tokens": 4}, path)

    return asyncio.run(ask())


def event(**part) -> bytes:
    return f"data: {json.dumps(part, ensure_ascii=False)}\n\n".encode()


def test_a_text_may_hold_any_sign_of_unicode_that_ends_lines(monkeypatch):
    text = "one\u2028two\u0085three\u2029"
    body = event(choices=[{"text": text, "finish_reason": "stop"}]) + b"data: [DONE]\n\n"
    assert complete(monkeypatch, body).text == text


def test_llama_cpp_is_asked_by_its_own_path_in_our_order_of_cuts(monkeypatch):
    sent = module.SentPrompt(None, [5, 6]), "m", Filters(top_k=3, repetition_penalty=1.5), 0.5, 4, 7
    request, path = module.completion_request(*sent, "llama.cpp", ignore_eos=False)
    assert (path, request["prompt"], request["n_predict"], request["seed"]) == ("/completion", [5, 6], 4, 7)
    assert request["samplers"] == ["penalties", "temperature", "top_k", "top_p", "min_p"]
    assert (request["top_k"], request["repeat_penalty"], request["temperature"]) == (3, 1.5, 0.5)
    parts = event(content="a", tokens=[8], stop=False) + event(content="b", tokens=[9], stop=False)
    end = event(content="", tokens=[], stop=True, stop_type="eos", tokens_predicted=2, tokens_evaluated=2)
    answer = complete(monkeypatch, parts + end, request=request, path=path)
    assert (answer.text, answer.token_ids, answer.prompt_ids) == ("ab", [8, 9], [5, 6])
    assert (answer.finish_reason, answer.completion_tokens, len(answer.arrivals)) == ("stop", 2, 2)


@pytest.mark.parametrize(
    "body",
    [
        event(error={"message": f"{'x' * 290} {SECRET}\nis wrong"}),
        event(wrong=f"{'x' * 290} {SECRET}"),
        b"data: " + SECRET.encode() + b"\n\n",
    ],
)
def test_a_key_is_not_in_what_is_said_of_a_stream(body, monkeypatch):
    with pytest.raises(ServerFailure) as error:
        complete(monkeypatch, body)
    assert SECRET[:5] not in str(error.value) and "\n" not in str(error.value)


def test_a_key_is_not_in_what_is_said_of_a_refusal(monkeypatch):
    with pytest.raises(InputError) as error:
        complete(monkeypatch, b"x" * 290 + b" " + SECRET.encode(), "401 Unauthorized")
    assert SECRET[:5] not in str(error.value)


@pytest.mark.parametrize(
    "body", [b"data: " + b"x" * 2000, event(choices=[{"text": "abc"}]) * 100], ids=["a line", "many parts"]
)
def test_an_answer_without_end_is_given_up(body, monkeypatch):
    for each in (http, module):
        monkeypatch.setattr(each, "MOST_BYTES", 1000)
    with pytest.raises(ServerFailure, match=r"expected an answer of at most 1000 bytes from http://.*, found more"):
        complete(monkeypatch, body)


@pytest.mark.parametrize(
    ("ids", "reason", "known"),
    [([5, 6, 7], "length", True), ([5, 6], "length", False), ([5, 6], "stop", True), ([5], "stop", False)],
)
def test_ids_that_are_fewer_than_the_usage_counts_are_none(monkeypatch, ids, reason, known):
    """The end of a text need not be listed; a token of a part that was never sent is lost."""
    body = event(choices=[{"text": "abc", "token_ids": ids, "finish_reason": reason}])
    body += event(choices=[], usage={"completion_tokens": 3}) + b"data: [DONE]\n\n"
    answer = complete(monkeypatch, body)
    assert answer.token_ids == (ids if known else None)
    assert [count for _, count in answer.arrivals] == [len(ids) if known else 0]


def test_the_token_that_ended_a_text_is_kept_where_a_part_comes_after_it(monkeypatch):
    body = event(choices=[{"text": "a", "finish_reason": "stop", "stop_reason": 0}])
    assert complete(monkeypatch, body + event(choices=[{"text": ""}]) + b"data: [DONE]\n\n").stop == 0


def drafted(**counts) -> bytes:
    return event(choices=[], metrics={"speculative_decoding": counts})


@pytest.mark.parametrize(
    ("part", "field"),
    [
        *(
            (event(choices=[{"text": "a", "token_ids": ids}]), r"choices\[0\].token_ids")
            for ids in ([1.0], [1.5], [True], ["7"], [-1], [None], [2**31], 7)
        ),
        (event(choices=[{"text": "a", "token_ids": [1] * 5}]), "at most 4 tokens, found 5"),
        (event(choices=[{"text": 7}]), r"choices\[0\].text"),
        (event(choices=[], usage={"completion_tokens": -3}), "usage.completion_tokens"),
        (event(choices=[], usage={"completion_tokens": 2.5}), "usage.completion_tokens"),
        (event(choices=[], usage={"completion_tokens": float("nan")}), "usage.completion_tokens"),
        (event(choices=[], usage={"completion_tokens": 10**400}), "usage.completion_tokens"),
        (event(choices=[], usage={"completion_tokens": 5}), "at most 4 tokens, found 5"),
        (drafted(acceptance_histogram=[1, 4], num_draft_tokens=3), "at most as many accepted as drafted"),
        (drafted(acceptance_histogram=[-1, 4], num_draft_tokens=8), "acceptance_histogram"),
        (drafted(acceptance_histogram=[], num_draft_tokens=8), "acceptance_histogram"),
        (b'data: {"choices": ' + b"[" * 1000 + b"]" * 1000 + b"}\n\n", "expected JSON, found: nested too deeply"),
    ],
)
def test_what_no_completion_says_is_refused_in_one_line(part, field, monkeypatch):
    with pytest.raises(ServerFailure, match=f"^server: http://.*/v1/completions: .*{field}") as error:
        complete(monkeypatch, part + event(choices=[{"text": "", "finish_reason": "stop"}]) + b"data: [DONE]\n\n")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("kind", "said", "read"),
    [
        (answers.StreamPart, '{"choices": null, "usage": {"completion_tokens": 3}}', {"choices": None}),
        (answers.ModelCard, '{"id": "m", "max_model_len": 0}', {"max_model_len": None}),
        (answers.ModelCard, '{"id": "m", "max_model_len": -1}', {"max_model_len": None}),
        (answers.ModelCard, '{"id": "m", "max_model_len": 4096}', {"max_model_len": 4096}),
        (answers.Delta, '{"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}', {"text": "ab"}),
        (answers.Delta, '{"content": null, "reasoning": "why"}', {"text": "why"}),
        (answers.Delta, '{"content": "so", "reasoning_content": "why "}', {"text": "why so"}),
        (answers.Delta, '{"content": "so", "reasoning": "why ", "reasoning_content": "why "}', {"text": "why so"}),
        (answers.Delta, '{"content": "cut \\ud83d"}', {"text": "cut \ufffd"}),
        (answers.Choice, '{"text": null, "token_ids": [1]}', {"text": None, "finish_reason": None}),
    ],
)
def test_what_real_servers_say_is_taken(kind, said, read):
    answer = parse_answer(kind, said, "here")
    assert {name: getattr(answer, name) for name in read} == read
