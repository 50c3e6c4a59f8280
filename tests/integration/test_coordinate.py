"""The coordinator in front of servers that answer as they are told: as a command, and once under Ray Serve."""

import json
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest
from coordinating import Exchange, Stub, answer_hello, coordinator, metric, wait_until
from engine import free_port

from draftsmith.decode.errors import InputError
from draftsmith.scripts.services.coordinate.command import main
from draftsmith.train.cli import run
from draftsmith.train.data.generate import PrepareConfig, load_completions, prepare
from draftsmith.train.models import load_tokenizer

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
KEY = {"Authorization": "Bearer door-key"}
ENVIRONMENT = {"DOOR_KEY": "door-key", "SERVER_KEY": "server-key"}


class Served:
    """A coordinator in front of four stubs: pair a of two replicas, pairs b and c of one."""

    def __init__(self, folder: Path):
        self.stubs = {name: Stub() for name in ("a1", "a2", "b", "c")}
        self.folder, self.log, self.url = folder, folder / "log.jsonl", ""
        self.process: subprocess.Popen[bytes] | None = None
        self.stack = ExitStack()

    def start(self) -> None:
        self.url, self.process = self.stack.enter_context(coordinator(self.config(), self.folder, ENVIRONMENT))

    def config(self) -> dict[str, Any]:
        a1, a2, b, c = (stub.url for stub in self.stubs.values())
        return {
            "pairs": [
                {"name": "a", "models": ["m"], "endpoints": [a1, a2], "key_env": "SERVER_KEY"},
                {"name": "b", "models": ["m", "large"], "endpoints": [b], "server_model": "m-large"},
                {"name": "c", "models": ["small"], "endpoints": [c], "max_concurrency": 1},
            ],
            "rules": [
                {"pair": "b", "category": ["code"]},
                {"pair": "b", "keywords": [r"\bsql\b", "(a+)+$"]},
                {"pair": "a", "load_of": "a", "load_below": 2},
                {"pair": "b"},
            ],
            "log": {"path": str(self.log), "redact": [{"pattern": r"\w+@\w+", "replacement": "<mail>"}]},
            "key_env": "DOOR_KEY",
            "health_seconds": 0.3,
        }

    def ask(self, text: str = "hello", path: str = CHAT, **fields: Any) -> httpx2.Response:
        asked: dict[str, Any] = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
        body = {"model": "m", **asked, **fields}
        return httpx2.post(f"{self.url}{path}", json=body, headers=KEY, timeout=60)

    def stream(self, text: str = "hello", **fields: Any) -> Any:
        body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": text}], **fields}
        return httpx2.stream("POST", f"{self.url}{CHAT}", json=body, headers=KEY, timeout=60)

    def idle(self) -> bool:
        return metric(self.url, "in_flight") == 0

    def refuses(self) -> bool:
        """Whether nothing listens at the port."""
        try:
            httpx2.get(f"{self.url}/health", timeout=30)
        except httpx2.ConnectError:
            return True
        return False

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(tmp_path_factory.mktemp("coordinator"))
    with served.stack:
        for stub in served.stubs.values():
            stub.start()
            served.stack.callback(stub.stop)
        yield served
        assert served.process is None or served.process.poll() is None


@pytest.fixture
def served(running: Served) -> Iterator[Served]:
    """The coordinator with all its servers well, none of which has been asked."""
    for stub in running.stubs.values():
        stub.answer = answer_hello
        stub.asked.clear()
        stub.keys.clear()
    if running.process is None:
        running.start()
    wait_until(lambda: metric(running.url, "endpoint_up") == 4 and running.idle())
    yield running


class Held:
    """A stub's answer that ends when it is let go."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def __call__(self, exchange: Exchange) -> None:
        if not exchange.body.get("stream"):
            self.go.wait(60)
            exchange.whole()
            return
        exchange.begin()
        exchange.part("first")
        self.go.wait(60)
        exchange.part(" and last")
        exchange.finish()


def pair(response: httpx2.Response) -> str:
    return response.headers["x-draftsmith-pair"]


def test_requests_are_routed_by_model_category_and_keyword(served):
    assert pair(served.ask()) == "a"
    assert pair(served.ask(model="small")) == "c"
    assert served.stubs["a1"].keys + served.stubs["a2"].keys == ["Bearer server-key"]  # and never the client's
    assert served.stubs["c"].keys == [None]
    assert pair(served.ask(metadata={"category": "code"})) == "b"
    assert pair(served.ask("Write SQL.")) == "b"
    answer = served.ask(model="large")
    assert pair(answer) == "b"
    assert answer.json()["choices"][0]["message"]["content"] == "hello"
    assert answer.json()["model"] == "large"  # as it was asked for, and not as the server calls it
    assert answer.headers["x-request-id"] == "from-the-server"
    assert served.stubs["b"].asked[-1]["model"] == "m-large"
    assert served.stubs["c"].asked[-1]["model"] == "small"


def test_a_full_pair_is_429(served):
    held = served.stubs["c"].answer = Held()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(served.ask, model="small")
        wait_until(lambda: len(served.stubs["c"].asked) == 1)
        refused = served.ask(model="small")
        held.go.set()
        assert first.result().status_code == 200
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "1"
    assert refused.json()["error"]["type"] == "rate_limit_error"


def test_parts_arrive_as_they_are_sent(served):
    """The server sends each part only once the one before has arrived: what is held back anywhere never ends."""
    arrived = threading.Semaphore(0)

    def one_by_one(exchange: Exchange) -> None:
        exchange.begin()
        for text in "abcdefgh":
            exchange.part(text)
            assert arrived.acquire(timeout=60)
        exchange.finish()

    served.stubs["c"].answer = one_by_one
    parts = []
    with served.stream(model="small") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        for chunk in response.iter_bytes():
            parts.append(chunk)
            arrived.release()
    texts = [json.loads(line[6:])["choices"][0]["delta"].get("content") for line in b"".join(parts).decode().split("\n")
             if line.startswith("data: {")]  # fmt: skip
    assert texts == [*"abcdefgh", None]
    assert b"".join(parts).endswith(b"data: [DONE]\n\n")


def test_a_client_that_leaves_ends_the_request_at_the_server(served):
    left = threading.Event()

    def endless(exchange: Exchange) -> None:
        exchange.begin()
        try:
            while True:
                exchange.part("x")
                left.wait(0.01)
        except OSError:
            left.set()
            raise

    before = metric(served.url, "requests_total", status="499")
    served.stubs["c"].answer = endless
    with served.stream(model="small") as response:
        next(response.iter_bytes())
    assert left.wait(60)
    wait_until(served.idle)
    assert metric(served.url, "requests_total", status="499") == before + 1


def test_another_replica_answers_for_one_that_is_gone_and_it_is_asked_again_when_it_is_back(served):
    gone = served.stubs["a1"]
    gone.stop()
    answers = [served.ask() for _ in range(6)]
    assert [answer.status_code for answer in answers] == [200] * 6
    assert {pair(answer) for answer in answers} == {"a"}
    assert len(served.stubs["a2"].asked) == 6
    wait_until(lambda: metric(served.url, "endpoint_up", endpoint=gone.url) == 0)
    gone.start()
    wait_until(lambda: metric(served.url, "endpoint_up", endpoint=gone.url) == 1)
    wait_until(lambda: served.ask().status_code == 200 and len(gone.asked) > 0)


def test_clients_that_never_ask_keep_nobody_out(served):
    port = int(served.url.rpartition(":")[2])
    half = (
        b"POST /v1/completions HTTP/1.1\r\nHost: here\r\nAuthorization: Bearer door-key\r\nContent-Length: 9\r\n\r\n{"
    )
    half_open = [socket.create_connection(("127.0.0.1", port)) for _ in range(300)]
    for place, connection in enumerate(half_open):
        connection.sendall((b"", half[:40], half)[place % 3])
    with socket.create_connection(("127.0.0.1", port)) as endless, suppress(ConnectionError):
        endless.sendall(half[:40] + b"x" * 2**24)
    assert httpx2.get(f"{served.url}/health", timeout=5).status_code == 200
    assert served.ask("a" * 26 + "!", max_tokens=1).status_code == 200  # which (a+)+$ would take a minute for
    for connection in half_open:
        connection.close()


def test_a_busy_server_is_passed_over_and_one_that_refuses_is_not(served):
    for name in ("a1", "a2"):
        served.stubs[name].answer = lambda exchange: exchange.whole("busy", 503)
    assert pair(served.ask()) == "b"
    for name in ("a1", "a2"):
        served.stubs[name].answer = lambda exchange: exchange.whole("too long", 400)
    wait_until(lambda: metric(served.url, "endpoint_up") == 4)
    refused = served.ask()
    assert (refused.status_code, pair(refused)) == (400, "a")
    assert refused.json() == {"error": {"message": "too long"}}


def test_after_the_first_byte_no_other_server_is_asked(served):
    def breaks_off(exchange: Exchange) -> None:
        exchange.begin()
        exchange.part("half")
        exchange.handler.connection.close()
        raise OSError

    for name in ("a1", "a2"):
        served.stubs[name].answer = breaks_off
    with served.stream() as response:
        content = b"".join(response.iter_bytes()).decode()
    events = [json.loads(line[6:]) for line in content.split("\n") if line.startswith("data: ")]
    assert events[0]["choices"][0]["delta"]["content"] == "half"
    assert events[1]["error"]["code"] == 502
    assert len(events) == 2 and "127.0.0.1" not in content
    assert len(served.stubs["a1"].asked) + len(served.stubs["a2"].asked) == 1
    assert not served.stubs["b"].asked


def test_errors_are_in_the_shape_of_the_api(served):
    url = served.url
    for response, status, named in (
        (served.ask(model="other"), 404, "model: expected one that is served, found 'other'"),
        (served.ask(messages=[]), 400, "messages: expected some"),
        (served.ask("x" * 4_000_000), 413, "body: expected at most 4000000 bytes"),
        (httpx2.post(f"{url}{CHAT}", content=b"{", headers=KEY), 400, "body: expected JSON"),
        (httpx2.get(f"{url}/v1/files", headers=KEY), 404, "/v1/files: Not Found"),
        (httpx2.get(f"{url}{CHAT}", headers=KEY), 405, f"{CHAT}: Method Not Allowed"),
        (httpx2.post(f"{url}{CHAT}", json={}), 401, "authorization: expected the API key"),
        (httpx2.get(f"{url}/v1/models", headers={"Authorization": "Bearer no"}), 401, "authorization: expected"),
    ):
        assert response.status_code == status
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["code"] == status
        assert error["message"].startswith(named)
    assert not any(stub.asked for stub in served.stubs.values())
    listed = httpx2.get(f"{url}/v1/models", headers=KEY).json()
    assert [entry["id"] for entry in listed["data"]] == ["m", "large", "small"]
    assert isinstance(listed["data"][0]["created"], int)
    assert httpx2.get(f"{url}/v1/models/large", headers=KEY).json() == listed["data"][1]
    assert httpx2.get(f"{url}/v1/models/no", headers=KEY).status_code == 404
    assert httpx2.get(f"{url}/health").status_code == 200


def test_without_a_server_that_is_well_it_says_so(served):
    served.stubs["c"].stop()
    try:
        answer = served.ask(model="small")
        assert answer.status_code in (502, 503) and answer.json()["error"]["type"] == "server_error"
        wait_until(lambda: metric(served.url, "endpoint_up", pair="c") == 0)
        answer = served.ask(model="small")
        assert answer.status_code == 503
        assert answer.json()["error"]["message"] == "no server of this model is well; try again"
    finally:
        served.stubs["c"].start()


def test_the_log_becomes_completions_to_distil_from(served, tmp_path):
    def answer(exchange: Exchange) -> None:
        if not exchange.body.get("stream"):
            exchange.whole("Mail me@home.", reason="length" if "long" in str(exchange.body) else "stop")
            return
        exchange.begin()
        for text in ("Mail me", "@home", " or not."):
            exchange.part(text)
        exchange.finish()

    before = len(served.lines())
    served.stubs["c"].answer = answer
    asked = {"model": "small", "metadata": {"category": "mail"}, "user": "somebody"}
    with served.stream("I am you@work.", **asked) as response:
        response.read()
    served.ask("Who?", **asked)
    served.ask("A long one?", **asked)
    served.ask("no key, no answer", model="other")
    served.ask([1, 2, 3], path=TEXT, model="small")  # ids, which nothing is taken out of

    def lines_here() -> list[dict]:  # a line of an earlier test may still come
        return [line for line in served.lines()[before:] if "Mail" in json.dumps(line)]

    wait_until(lambda: len(lines_here()) == 3)
    text = served.log.read_text()
    assert "work" not in text and "me@home" not in text and "somebody" not in text and "no key" not in text
    lines = tmp_path / "traffic.jsonl"
    lines.write_text("".join(json.dumps(line) + "\n" for line in lines_here()))
    target = str(ROOT / "assets" / "tiny-target")
    summary = prepare(PrepareConfig(target, str(lines), str(tmp_path / "given"), answers="given"))
    assert (summary.written, len(summary.unfinished)) == (2, 1)
    tokenizer = load_tokenizer(target)
    rows = load_completions(str(tmp_path / "given")).to_list()
    learnt = {
        tokenizer.decode([i for i, m in zip(row["input_ids"], row["loss_mask"], strict=True) if m],
                         skip_special_tokens=True).strip(): row["category"]
        for row in rows
    }  # fmt: skip
    assert learnt == {"Mail <mail> or not.": "mail", "Mail <mail>.": "mail"}


def test_a_signal_lets_requests_end_and_the_log_has_them(served):
    held = served.stubs["c"].answer = Held()
    process, before = served.process, len(served.lines())
    with served.stream(model="small") as response:
        parts = response.iter_bytes()
        assert b"first" in next(parts)
        process.send_signal(signal.SIGTERM)
        wait_until(served.refuses)
        held.go.set()
        assert b"".join(parts).endswith(b"data: [DONE]\n\n")
    assert process.wait(240) == 0
    served.process = None  # a test that comes later starts another
    (line,) = served.lines()[before:]
    assert line["response"]["choices"][0]["message"]["content"] == "first and last"


def test_what_is_wrong_is_said_before_it_listens(tmp_path, capsys):
    stub = Stub()
    stub.start()
    taken = stub.port
    a = '[{"name": "a", "models": ["m"], "endpoints": ["http://127.0.0.1:1"], '
    for flags, said in (
        (["--pairs", a + '"key_env": "NO_SUCH_KEY"}]'], "pairs.a.key_env: expected an API key in the environment"),
        (["--pairs", a + f'"report": "{tmp_path}/no.json"}}]'], "pairs.a.report: expected a report of `draftsmith"),
        (
            ["--pairs", a.rstrip(", ") + "}]", "--port", str(taken)],
            f"port: expected a free one at 127.0.0.1, found {taken}",
        ),
        (["--pairs", a.rstrip(", ") + "}]", "--log.path", "/proc/no/log.jsonl"], "log.path: expected a file to write"),
    ):
        assert run(lambda flags=flags: main(flags)) == 2
        assert capsys.readouterr().err.startswith(f"error: {said}")
    stub.stop()
    line = subprocess.run(
        [str(ROOT / ".venv/bin/draftsmith"), "coordinate", "--pairs", "[]"], capture_output=True, text=True
    )
    assert (line.returncode, line.stderr) == (2, "error: pairs: expected at least one pair, found none\n")


def test_serve_runs_the_application_of_a_cluster(monkeypatch):
    import ray
    from ray import serve
    from ray.serve.schema import ServeDeploySchema
    from yaml import safe_load

    from draftsmith.scripts.services.coordinate import application

    (app,) = ServeDeploySchema(**safe_load((ROOT / "configs" / "serve" / "ray.yaml").read_text())).applications
    assert app.import_path == f"{application.__name__}:{application.build.__name__}"
    application.build(app.args)
    with pytest.raises(InputError, match=r"^rules: expected one of the pairs"):
        application.build({**app.args, "rules": [{"pair": "none"}]})
    for name, value in {"NO_PROXY": "127.0.0.1", "RAY_USAGE_STATS_ENABLED": "0"}.items():
        monkeypatch.setenv(name, value)
    # Ray's memory monitor kills workers when others fill the machine.
    monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "0")
    port, stub = free_port(), Stub()
    stub.start()
    address = {"address": "local", "_node_ip_address": "127.0.0.1", "object_store_memory": 80 * 2**20}
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, **address)
    try:
        serve.start(proxy_location="Disabled")
        pairs = [{"name": "a", "models": ["m"], "endpoints": [stub.url]}]
        serve.run(application.build({"pairs": pairs, "port": port}), route_prefix=None)
        body = {"model": "m", "prompt": "hello"}
        assert pair(httpx2.post(f"http://127.0.0.1:{port}{TEXT}", json=body, timeout=60)) == "a"
    finally:
        ray.shutdown()
        stub.stop()
