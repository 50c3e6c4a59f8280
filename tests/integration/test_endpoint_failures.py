"""A server that is busy, slow, broken or refuses, and settings that cannot be meant."""

import json
import threading
from pathlib import Path

import pytest
from fake_server import COUNT, refusal, rows, vllm

from draftsmith.decode.errors import InputError
from draftsmith.train.data.generate import prepare
from draftsmith.train.endpoint import http, retries
from draftsmith.train.endpoint.client import KEY
from draftsmith.train.endpoint.retries import Window

pytest_plugins = ["server_fixtures"]


def test_a_busy_server_is_given_the_time_it_asks_for(remote, server, waits, caplog):
    def answer(path, body, number):
        if number == 1:
            return 429, {"Retry-After": "7"}, b'{"error": {"message": "slow down"}}'
        if number == 2:
            return 503, {"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}, b"down"  # long past
        if number == 3:
            return 429, {"Retry-After": "86400"}, b""
        return vllm(body, [65], "length")

    server.answer = answer
    assert prepare(remote()).written == COUNT
    assert len(server.asked) == COUNT + 3
    assert waits[0] == 7
    assert 1 <= waits[1] <= 2  # the second of the waits that double, and up to half of it off at random
    assert waits[2:] == [600]  # a day is not waited for
    assert "429 slow down; next try in 7 s" in caplog.text


def test_a_failing_server_is_given_up_and_what_was_finished_is_kept(remote, server, waits):
    def answer(path, body, number):
        return vllm(body, [65], "length") if number <= 5 else (500, {}, b'{"error": {"message": "CUDA\\nerror"}}')

    server.answer = answer
    cfg = remote()
    assert refusal(cfg).endswith(
        f" from {server.root}/v1/completions, found 500 CUDA error in the last of 9 tries; finished shards are kept, "
        "run the same command again"
    )
    assert len(server.asked) == 5 + 9
    assert [0.5 <= wait / most <= 1 for wait, most in zip(waits, (1, 2, 4, 8, 16, 32, 60, 60), strict=True)] == [
        True
    ] * 8
    assert len(rows(cfg)) == 4
    server.requests.clear()
    server.answer = lambda path, body, number: vllm(body, [65], "length")
    summary = prepare(cfg)
    assert (summary.kept, summary.written, len(server.asked)) == (4, COUNT - 4, COUNT - 4)


@pytest.mark.parametrize(
    ("said", "found"),
    [
        (b'{"error": {"message": "max_tokens is too large", "type": "BadRequestError", "code": 400}}', "max_tokens is"),
        (b'{"object": "error", "message": "max_tokens is\\ntoo large", "code": 400}', "max_tokens is too large"),
        (b'{"detail": "Not Found"}', "Not Found"),
        (b"<html>proxy</html>", "<html>proxy</html>"),
        (b"", "Bad Request"),
    ],
)
def test_a_refusal_is_final_and_in_the_servers_words(said, found, remote, server, waits):
    server.answer = lambda path, body, number: (400, {}, said)
    message = refusal(remote())
    assert message.startswith(
        f"endpoint: expected a completion of prompt 'p7' from {server.root}/v1/completions, found 400 {found}"
    )
    assert len(server.asked) == 1
    assert waits == []


def test_broken_answers_and_connections_are_tried_again(remote, server, waits):
    def answer(path, body, number):
        whole = json.dumps(vllm(body, [65], "length")).encode()
        if number == 1:
            return 200, {}, whole[:40]
        if number == 2:
            return 200, {"Content-Length": str(len(whole)), "Connection": "close"}, whole[:40]
        return 200, {}, whole

    server.answer = answer
    assert prepare(remote()).written == COUNT
    assert (len(server.asked), len(waits)) == (COUNT + 2, 2)


def test_a_server_that_nobody_runs_is_given_up(remote, server, waits):
    message = refusal(remote(endpoint="http://127.0.0.1:9/v1"))
    assert message.startswith(
        "endpoint: expected a list of models from http://127.0.0.1:9/v1/models, found ConnectError"
    )
    assert len(waits) == 8


def test_a_slow_server_is_waited_for_so_long_and_asked_again(remote, server, waits, monkeypatch):
    monkeypatch.setattr(retries, "TIMEOUT", 0.3)
    stuck = threading.Event()

    def answer(path, body, number):
        if number == 1:
            stuck.wait(20)
        return vllm(body, [65], "length")

    server.answer = answer
    assert prepare(remote()).written == COUNT
    stuck.set()
    assert len(waits) >= 1
    assert len(server.asked) == COUNT + len(waits)


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (lambda body: {"choices": []}, "/completions: choices: expected at least 1 of it, found []"),
        (lambda body: [1], "/completions: expected an object, found [1]"),
        (lambda body: vllm(body, [65], "abort"), ", found finish_reason 'abort'"),
        (lambda body: vllm(body, [65], None), ", found finish_reason None"),
        (lambda body: vllm(body, [65], "stop", text=None, token_ids=None), ", found neither a text nor token ids"),
        (
            lambda body: vllm(body, [65], "length", token_ids=["a"]),
            "/completions: choices[0].token_ids[0]: expected a whole number, found 'a'",
        ),
    ],
)
def test_answers_of_another_shape_are_refused(answer, found, remote, server):
    server.answer = lambda path, body, number: answer(body)
    said = refusal(remote())
    assert said.removeprefix("endpoint: expected ").removeprefix("endpoint: ") == (
        f"a completion of prompt 'p7' from {server.root}/v1{found}"
    )


def test_half_a_surrogate_pair_is_no_text(remote, server):
    server.answer = lambda path, body, number: vllm(body, [65], "length", text="\ud800")
    assert prepare(remote("ids")).uncertain == 0
    server.answer = lambda path, body, number: vllm(body, [65], "length", text="\ud800", token_ids=None)
    assert prepare(remote("text")).uncertain == COUNT
    server.answer = lambda path, body, number: (400, {}, b'{"error": {"message": "no \\ud800"}}')
    refusal(remote()).encode("utf-8")
    server.models = ["\ud800"]
    assert ": expected JSON, found: " in refusal(remote())


@pytest.mark.parametrize("data", [5, "tiny", {"id": "tiny"}, None, [["tiny"]], [{"id": 5}]])
def test_a_list_of_models_that_is_none_names_none(data, remote, server, monkeypatch):
    said = json.dumps({"object": "list", "data": data}).encode()
    monkeypatch.setattr(server, "respond", lambda path, headers, body: (200, {}, said))
    assert refusal(remote()).startswith(f"endpoint: a list of models from {server.root}/v1/models: data")


def test_an_answer_of_more_tokens_than_were_asked_for_is_refused(remote, server):
    server.answer = lambda path, body, number: vllm(body, [65] * 13, "length")
    assert refusal(remote()) == (
        f"endpoint: expected at most 12 tokens for prompt 'p7', found 13 from {server.root}/v1"
    )


def test_an_answer_without_end_is_not_kept_in_memory(remote, server, monkeypatch):
    monkeypatch.setattr(http, "MOST_BYTES", 2**20)
    server.answer = lambda path, body, number: (200, {}, b" " * 2**21)
    assert refusal(remote()) == (
        f"endpoint: expected an answer of at most 1048576 bytes from {server.root}/v1/completions, found more"
    )


def test_a_server_that_drips_bytes_is_waited_for_no_longer_than_one_that_is_silent(remote, server, waits, monkeypatch):
    """Each byte comes in time, the answer never does."""
    monkeypatch.setattr(retries, "TIMEOUT", 0.3)
    monkeypatch.setattr(retries, "TRIES", 2)
    server.drips = 0.05
    server.answer = lambda path, body, number: vllm(body, [65], "length")
    message = refusal(remote(endpoint_model="tiny"))
    assert "found no whole answer within 0.3 s in the last of 2 tries; finished shards are kept" in message
    assert len(waits) == 1


def test_requests_under_way_follow_the_server():
    window, sizes = Window(), []
    for change in (window.grow, window.shrink, window.shrink):  # two that were under way together count once
        change()
        sizes.append(window.size)
    assert sizes == [65, 32, 32]
    for _ in range(9):
        window.grow()
        window.shrink()
    assert window.size == 1
    for _ in range(2000):
        window.grow()
    assert window.size == 1024


def test_a_busy_server_gets_fewer_requests_at_once(remote, server, waits, monkeypatch):
    """It takes four at a time, and says so to the others."""
    for name, value in {"FIRST_REQUESTS": 64, "MOST_REQUESTS": 1024, "TRIES": 50}.items():
        monkeypatch.setattr(retries, name, value)
    slow = threading.Event()

    def answer(path, body, number):
        if server.busy > 4:
            return 429, {}, b"busy"
        slow.wait(0.02)
        return vllm(body, [65], "length")

    server.answer = answer
    summary = prepare(remote(samples=3, temperature=1.0))
    assert summary.written == 3 * COUNT
    assert 4 < server.busiest <= 3 * COUNT


def test_a_server_that_changes_the_prompt_is_refused(remote, server):
    server.answer = lambda path, body, number: vllm(body, [65], "length", prompt_token_ids=[0, *body["prompt"]])
    assert "after its 40 tokens as sent" in (message := refusal(remote())), message
    assert "put it after 41 others" in message


def test_the_key_is_read_from_the_environment_and_written_nowhere(remote, server, monkeypatch, caplog, waits):
    caplog.set_level("DEBUG")
    secret = "sk-0123456789"
    monkeypatch.setenv(KEY, secret)
    prepare(remote())
    assert {headers["Authorization"] for _, headers, _ in server.requests} == {f"Bearer {secret}"}
    refused = {"error": {"message": f"Incorrect API key provided: {secret}"}}
    server.answer = lambda path, body, number: (401, {}, json.dumps(refused).encode())
    message = refusal(remote("refused"))
    assert message.endswith("found 401 Incorrect API key provided: ***")
    server.answer = lambda path, body, number: (500, {}, json.dumps(refused).encode())
    assert secret not in refusal(remote("failed"))
    assert secret not in caplog.text
    for output in (remote().output, remote("refused").output):
        assert all(secret.encode() not in path.read_bytes() for path in Path(output).iterdir())
    for value in (" ", "sk\n1", "schlüssel"):
        monkeypatch.setenv(KEY, value)
        said = f"{KEY}: expected an API key in the environment variable {KEY}, found none"
        assert refusal(remote("none")) == said


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"endpoint": "localhost:8000"}, "endpoint"),
        ({"endpoint": "http://localhost:port/v1"}, "endpoint"),
        ({"endpoint": "http://me:secret@localhost/v1"}, "endpoint"),
        ({"endpoint": "http://localhost/v1?key=secret"}, "endpoint"),
        ({"endpoint": None, "endpoint_model": "tiny"}, "endpoint_model"),
        ({"answers": "given"}, "endpoint"),
        ({"answers": "mine"}, "answers"),
    ],
)
def test_settings_are_checked(settings, field, remote):
    with pytest.raises(InputError, match=f"^{field}: expected ") as error:
        remote(**settings)
    assert "secret" not in str(error.value)
