"""The draft service: what it answers to many at once, what it refuses, and how it ends."""

import asyncio
import logging
import multiprocessing
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import httpx2
import pytest
from conftest import tiny_llama
from draft_service import totals
from engine import free_port
from fated import die_with_parent
from prometheus_client import generate_latest
from unit.scripts.services.serve_draft.test_texts import chain

from draftsmith.decode import PromptLookupProposer, Switch
from draftsmith.scripts import cli
from draftsmith.scripts.services import draft_protocol as protocol
from draftsmith.scripts.services.draft_protocol import VERSION, DraftRequest, DraftRow, Service
from draftsmith.scripts.services.serve_draft import command
from draftsmith.scripts.services.serve_draft.app import DraftApp
from draftsmith.scripts.services.serve_draft.command import Follower
from draftsmith.scripts.services.serve_draft.texts import Copies, DraftTexts
from draftsmith.scripts.services.serve_draft.worker import PREFIX, PendingDrafts, ServiceMetrics, Worker
from draftsmith.train.files import move_link
from draftsmith.train.runs import save_model

MAX_LENGTH = 200


def request(client: str, *rows: DraftRow, ended: tuple[int, ...] = ()) -> DraftRequest:
    return DraftRequest(VERSION, client, list(rows), list(ended))


class Inside:
    """A service without a process of its own; the worker is started by the test."""

    def __init__(self, model, max_waiting: int = 8, max_batch: int = 8, timeout: float = 60.0, key: str = ""):
        self.metrics = ServiceMetrics()
        self.texts = DraftTexts(model, MAX_LENGTH, 8, 4096)
        self.worker = Worker(self.texts, max_batch, self.metrics, max_waiting)
        service = Service(protocol.VERSION, "tiny", self.texts.vocab_size, MAX_LENGTH, max_batch, 8)
        self.app = DraftApp(self.worker, service, self.metrics, key, timeout).app

    def ask(self, *bodies: bytes, **headers: str | bytes) -> list[httpx2.Response]:
        async def all_at_once() -> list[httpx2.Response]:
            transport = httpx2.ASGITransport(self.app)
            async with httpx2.AsyncClient(transport=transport, base_url="http://inside") as client:
                return await asyncio.gather(
                    *(client.post("/propose", content=body, headers=headers) for body in bodies)
                )

        return asyncio.run(all_at_once())

    def counted(self) -> dict[str, float]:
        return totals(generate_latest(self.metrics.registry).decode(), f"{PREFIX}_")


def test_what_waits_is_drafted_together(draft):
    inside = Inside(draft)
    works = [
        PendingDrafts(request(name, DraftRow(1, 0, [5, 6, len(name)], 4), DraftRow(2, 0, [7], 2)))
        for name in ("a", "bb", "ccc")
    ]
    assert all(inside.worker.submit(work) for work in works)
    again = PendingDrafts(
        request("a", DraftRow(1, 3, [9], 4))
    )  # the same text once more: not in one batch with its beginning
    inside.worker.submit(again)
    inside.worker.start()
    for work in works:
        rows = work.request.rows
        assert work.answer.result(60) == [chain(draft, row.tokens, row.want) for row in rows]
    assert again.answer.result(60) == [chain(draft, [5, 6, 1, 9], 4)]
    inside.worker.stop()
    counted = inside.counted()
    assert (counted["batch_rows_count"], counted["batch_rows_sum"], counted["rows_total"]) == (2, 7, 7)
    assert counted["tokens_total"] == 3 * (4 + 2) + 4 and counted["texts"] == 6


def test_a_batch_has_no_more_rows_than_allowed(draft):
    inside = Inside(draft, max_batch=3)
    works = [PendingDrafts(request(name, DraftRow(1, 0, [5], 1), DraftRow(2, 0, [6], 1))) for name in ("a", "b")]
    for work in works:
        inside.worker.submit(work)
    inside.worker.start()
    assert all(len(work.answer.result(60)) == 2 for work in works)
    inside.worker.stop()
    assert inside.counted()["batch_rows_count"] == 2
    (answer,) = inside.ask(protocol.encode(request("a", *(DraftRow(i, 0, [5], 1) for i in range(4)))))
    assert (answer.status_code, answer.text) == (400, "rows: expected at most 3, found 4\n")


def test_a_full_queue_and_a_late_answer(draft):
    """With a worker that has not begun: two wait until their time is over, the third finds no room."""
    inside = Inside(draft, max_waiting=2, timeout=0.3)
    body = protocol.encode(request("a", DraftRow(1, 0, [5], 1)))
    answers = inside.ask(body, body, body)
    assert sorted(answer.status_code for answer in answers) == [503, 504, 504]
    assert {answer.text for answer in answers} == {
        "service: expected room for a request, found a full queue\n",
        "timeout: expected drafts within 0.3 s, found none\n",
    }
    inside.worker.start()
    inside.worker.stop()  # nobody waits for those two any more: they are left out
    assert len(inside.texts) == 0 and inside.counted()["rows_total"] == 0


def test_nothing_is_drafted_for_a_client_that_has_left(draft):
    inside, told = Inside(draft), []
    body = protocol.encode(request("a", DraftRow(1, 0, [5], 1)))
    events = [{"type": "http.request", "body": body, "more_body": False}, {"type": "http.disconnect"}]
    scope = {"type": "http", "method": "POST", "path": "/propose", "headers": [], "query_string": b""}

    async def receive():
        return events.pop(0)

    async def send(event):
        told.append(event)

    asyncio.run(inside.app(scope, receive, send))
    assert told[0]["status"] == 499
    inside.worker.start()
    inside.worker.stop()
    assert len(inside.texts) == 0 and inside.counted()["rows_total"] == 0


def test_an_error_is_an_answer_and_the_next_request_finds_a_clean_service(draft, monkeypatch, caplog):
    inside = Inside(draft)
    inside.worker.start()
    ask = protocol.encode(request("a", DraftRow(1, 0, [5, 6], 2)))
    assert inside.ask(ask)[0].status_code == 200
    with monkeypatch.context() as patch:
        patch.setattr(DraftTexts, "_chains", lambda *_: 1 / 0)
        (answer,) = inside.ask(ask)
    assert (answer.status_code, answer.text) == (500, "service: expected drafts, found ZeroDivisionError\n")
    assert "all texts are forgotten" in caplog.text
    (answer,) = inside.ask(protocol.encode(request("a", DraftRow(1, 2, [7], 2))))
    assert answer.json() == {"version": 2, "drafts": [None]}
    inside.worker.stop()


def test_other_bodies_and_other_keys_are_refused(draft):
    inside = Inside(draft, key="sesame")
    inside.worker.start()
    good = protocol.encode(request("a", DraftRow(1, 0, [5], 1)))
    (answer,) = inside.ask(good)
    assert answer.status_code == 401 and "sesame" not in answer.text
    assert inside.ask(good, Authorization="Bearer sesamé".encode())[0].status_code == 401
    bodies = [good, b"{}", b"x" * (protocol.MOST_BYTES + 1)]
    answers = inside.ask(*bodies, Authorization="Bearer sesame")
    assert [answer.status_code for answer in answers] == [200, 400, 413]
    assert all(answer.text.count("\n") == 1 for answer in answers[1:])
    inside.worker.stop()


def test_ended_texts_are_forgotten(draft):
    inside = Inside(draft)
    inside.worker.start()
    inside.ask(protocol.encode(request("a", DraftRow(1, 0, [5], 1), DraftRow(2, 0, [6], 1))))
    inside.ask(protocol.encode(request("b", DraftRow(1, 0, [5], 1), ended=(2,))))
    assert len(inside.texts) == 3  # another client's 2 is another text
    inside.ask(protocol.encode(request("a", DraftRow(1, 1, [5], 1), ended=(2,))))
    inside.worker.stop()
    assert len(inside.texts) == 2


def test_another_draft_takes_the_place_of_the_one_that_is_served(draft, tmp_path, capsys, caplog):
    inside, link = Inside(draft), tmp_path / "current"
    new, other = tiny_llama(5), tiny_llama(5, 50)
    models = {"old": draft, "new": new, "other": other, "broken": None}
    for name in models:
        (tmp_path / name).mkdir()

    def load(directory: str) -> DraftTexts:
        return DraftTexts(models[Path(directory).name], MAX_LENGTH, 8, 4096)

    link.symlink_to("old", target_is_directory=True)
    old = str((tmp_path / "old").resolve())
    inside.texts.copies = Copies([PromptLookupProposer()], Switch(match=3))
    follower = Follower(str(link), inside.texts, old, load, inside.worker, inside.metrics, 0.01)
    inside.worker.start()
    text = [5, 6, 7]

    def drafted(start: int = 0, given: list[int] = text) -> list[int] | None:
        (answer,) = inside.ask(protocol.encode(request("a", DraftRow(1, start, given, 3))))
        return answer.json()["drafts"][0]

    follower.look()
    assert drafted() == chain(draft, text, 3)
    for name in ("other", "broken"):
        move_link(link, str(tmp_path / name))
        follower.look()
        assert f"{name}: not served, the draft before stays" in caplog.text and inside.counted()["replaced_total"] == 0
        assert drafted(3, []) == chain(draft, text, 3)
    assert "found 50 and 200" in caplog.text and capsys.readouterr().out == ""
    move_link(link, str(tmp_path / "new"))
    follower.look()
    assert drafted(3, []) is None  # the client sends the text once more
    assert drafted() == chain(new, text, 3) != chain(draft, text, 3)
    assert drafted(0, [1, 2, 3, 4, 9, 1, 2, 3]) == [4, 9, 1]  # copies go on
    assert capsys.readouterr().out == f"serving {(tmp_path / 'new').resolve()} now\n"
    assert inside.counted()["replaced_total"] == 1
    move_link(link, str(tmp_path / "old"))
    follower.start()
    while inside.counted()["replaced_total"] == 1:
        time.sleep(0.01)
    follower.stop()
    assert drafted() == chain(draft, text, 3)
    inside.worker.stop()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("draft")
    save_model(tiny_llama(3, len(tokenizer)), tokenizer, folder)
    return folder


def post(url: str, body: bytes, **headers: str) -> httpx2.Response:
    return httpx2.post(f"{url}/propose", content=body, headers=headers, timeout=60)


@contextmanager
def serving(drafter: str, port: int, said: Path, *flags: str) -> Iterator[multiprocessing.Process]:
    """Run the command in a fork of this process, which has imported it, until the end of the block; it is impatient."""

    def work() -> None:
        die_with_parent()
        sys.stdout = sys.stderr = said.open("a", buffering=1)
        logging.root.handlers.clear()  # pytest's
        command.GRACE, command.Follower = 0.5, partial(Follower, seconds=0.05)
        flags_here = ("--port", str(port), "--dtype", "float32", "--threads", "1", *flags)
        sys.exit(cli.main(["serve-draft", "--drafter", drafter, *flags_here]))

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    try:
        while True:
            with suppress(httpx2.ConnectError):
                assert httpx2.get(f"http://127.0.0.1:{port}/health", timeout=60).status_code == 200
                break
            assert process.is_alive(), said.read_text()
            time.sleep(0.02)
        yield process
    finally:
        process.kill()
        process.join()


@pytest.mark.slow
def test_the_command_serves_several_clients_follows_its_link_and_ends_when_told(tiny, tokenizer, tmp_path, capsys):
    """A hybrid, which copies nothing from texts as short as the clients'."""
    port, failures, link = free_port(), [], tmp_path / "current"
    model, size = tiny_llama(3, len(tokenizer)), len(tokenizer)
    link.symlink_to(tiny, target_is_directory=True)
    url = f"http://127.0.0.1:{port}"

    def client(name: str, first: int) -> None:
        text, told = [first, first + 1], 0
        for _ in range(6):
            answer = post(url, protocol.encode(request(name, DraftRow(9, told, text[told:], 3))))
            (drafted,) = answer.json()["drafts"]
            if drafted != chain(model, text, 3):
                failures.append((name, text, drafted))
            told = len(text)
            text += [*drafted[: first % 4], first]

    drafter, flags = f"hybrid:suffix+{link}@match=30", ("--max-batch", "4", "--cache_tokens", "600")
    with serving(drafter, port, tmp_path / "log", *flags) as process:
        threads = [threading.Thread(target=client, args=(f"c{i}", i)) for i in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        assert httpx2.get(f"{url}/health").json() == {
            "version": 2, "model": "suffix+current", "vocab_size": size, "max_length": 512, "max_rows": 4,
            "max_draft_length": 16,
        }  # fmt: skip
        assert httpx2.get(f"{url}/propose").status_code == 405 and httpx2.get(f"{url}/docs").status_code == 404
        assert post(url, b"{").status_code == 400
        counted = totals(httpx2.get(f"{url}/metrics").text, f"{PREFIX}_")
        assert counted["requests_total"] == 31 and counted["rows_total"] == 30 and counted["unknown_rows_total"] == 0
        assert cli.main(["serve-draft", "--draft", str(tiny), "--port", str(port)]) == 2
        assert capsys.readouterr().err.startswith(f"error: port: expected a free one at 127.0.0.1, found {port}")
        half_open = [socket.create_connection(("127.0.0.1", port)) for _ in range(300)]
        half = b"POST /propose HTTP/1.1\r\nHost: here\r\nContent-Length: 99\r\n\r\n{"
        for place, connection in enumerate(half_open):
            connection.sendall((b"", half[:30], half)[place % 3])
        with socket.create_connection(("127.0.0.1", port)) as endless, suppress(ConnectionError):
            endless.sendall(half[:30] + b"x" * 2**24)
        assert httpx2.get(f"{url}/health", timeout=5).status_code == 200
        assert post(url, protocol.encode(request("late", DraftRow(1, 0, [5], 1)))).status_code == 200
        text = list(range(20, 60))
        (copied,) = post(url, protocol.encode(request("late", DraftRow(2, 0, text + text[:32], 1)))).json()["drafts"]
        assert copied == [52]
        (tmp_path / "new").mkdir()
        (other := tiny_llama(7, size)).save_pretrained(tmp_path / "new")
        move_link(link, str(tmp_path / "new"))
        while f"serving {(tmp_path / 'new').resolve()} now" not in (tmp_path / "log").read_text():
            assert process.is_alive()
            time.sleep(0.02)
        (drafted,) = post(url, protocol.encode(request("late", DraftRow(3, 0, [5, 6], 3)))).json()["drafts"]
        assert drafted == chain(other, [5, 6], 3)
        process.terminate()  # in the middle of a hundred requests
        process.join(30)
        assert process.exitcode == 0
        for connection in half_open:
            connection.close()
    log = (tmp_path / "log").read_text()
    assert f"on {url}: texts of up to 512 tokens, a cache of 600 tokens (0 MiB)" in log and log.endswith("ended\n")
    assert "Traceback" not in log


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--draft", "nowhere"], "draft: expected"),
        (["--draft", "d", "--port", "70000"], "port: expected"),
        (["--draft", "d", "--device", "auto"], "device: expected"),
        (["--draft", "d", "--max-length", "100", "--cache-tokens", "99"], "cache_tokens: expected room"),
        (["--draft", "d", "--key-env", "NO_SUCH_VARIABLE"], "key_env: expected an API key"),
        (["--draft", "TINY", "--max-length", "513"], "max_length: expected at most the draft's 512 positions"),
        (["--draft", "TINY", "--cache-tokens", "511"], "cache_tokens: expected room for a text of 512 tokens"),
        (
            ["--drafter", "prompt_lookup"],
            "drafter: expected a draft model, which drafts without the target, found n-grams",
        ),
    ],
)
def test_bad_input_is_a_line(flags, words, tiny, capsys):
    port = [] if "--port" in flags else ["--port", "0"]
    assert cli.main(["serve-draft", *port, *(str(tiny) if flag == "TINY" else flag for flag in flags)]) == 2
    error = capsys.readouterr().err
    assert f"error: {words}" in error and len(error.splitlines()) <= 2
