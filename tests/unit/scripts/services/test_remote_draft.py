"""RemoteDraft within a stand-in for vLLM: whatever the service does, `propose` answers, and it tells what is new."""

import http.server
import logging
import socket
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from local_server import LocalHandler

from draftsmith.scripts.services import draft_line
from draftsmith.scripts.services import draft_protocol as protocol
from draftsmith.scripts.services.draft_line import ThrottledLog
from draftsmith.scripts.services.remote_draft import FAILURES, PLAIN_ROUNDS, RemoteDraft

SERVICE = protocol.Service(protocol.VERSION, "fake", 100, 50, 8, 8)
LENGTH = 64


def drafts(drafts: list[list[int] | None]) -> bytes:
    return protocol.encode(protocol.DraftAnswer(protocol.VERSION, drafts))


class FakeService(http.server.ThreadingHTTPServer):
    """Drafts 1, 2, 3, … behind every text; `act` may do otherwise."""

    def __init__(self, port: int = 0):
        self.requests: list[protocol.DraftRequest] = []
        self.paths: list[str] = []
        self.act = None
        super().__init__(("127.0.0.1", port), Handler)
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def end(self) -> None:
        self.shutdown()
        self.server_close()


class Handler(LocalHandler):
    server: FakeService

    def do_GET(self) -> None:
        self.server.paths.append(self.path)
        self.say(protocol.encode(SERVICE))

    def do_POST(self) -> None:
        self.server.paths.append(self.path)
        request = protocol.decode(protocol.DraftRequest, self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(request)
        if self.server.act is not None and self.server.act(self, request):
            return
        self.say(drafts([list(range(1, 1 + row.want)) for row in request.rows]))

    def say(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def service():
    fake = FakeService()
    yield fake
    fake.end()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(draft_line, "PAUSES", (0.01, 0.02))


def up(drafter: RemoteDraft) -> RemoteDraft:
    until = time.monotonic() + 10
    while drafter._line.service is None:
        assert time.monotonic() < until, "the line did not come up"
        time.sleep(0.002)
    return drafter


def remote(url: str, gamma: int = 4, **environment: str) -> RemoteDraft:
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=gamma),
        model_config=SimpleNamespace(max_model_len=LENGTH, get_vocab_size=lambda: 90),
        scheduler_config=SimpleNamespace(max_num_seqs=4),
    )
    return RemoteDraft(config, {"DRAFT_ENDPOINT": url, **environment})


class Batch:
    """The arrays that vLLM hands over."""

    def __init__(self, *texts: list[int]):
        self.tokens, self.lengths = np.zeros((4, LENGTH), np.int32), np.zeros(4, np.int32)
        self.sampled = [[text[-1]] for text in texts]
        for row, text in enumerate(texts):
            self.write(row, text)

    def write(self, row: int, text: list[int]) -> None:
        self.tokens[row, : len(text)], self.lengths[row] = text, len(text)

    def drafts(self, drafter: RemoteDraft) -> list[list[int]]:
        return drafter.propose(self.sampled, self.lengths, self.tokens, slot_mappings=None)


def asked(service: FakeService) -> list[tuple[int, list[int], int]]:
    return [(row.start, row.tokens, row.want) for row in service.requests[-1].rows]


def test_a_round_tells_what_is_new(service):
    drafter, batch = up(remote(service.url)), Batch([5, 6], [7, 8, 9])
    assert batch.drafts(drafter) == [[1, 2, 3, 4]] * 2
    assert asked(service) == [(0, [5, 6], 4), (0, [7, 8, 9], 4)]
    batch.write(0, [7, 8, 9, 1, 2])  # rows have changed places
    batch.write(1, [5, 6, 3])
    batch.drafts(drafter)
    assert asked(service) == [(3, [1, 2], 4), (2, [3], 4)]
    assert service.requests[0].client == service.requests[1].client
    assert service.paths == ["/health", "/propose", "/propose"]


def test_prompts_that_are_read_in_parts_are_not_asked_for(service):
    drafter, batch = up(remote(service.url)), Batch([5, 6], [7, 8, 9])
    batch.sampled[0] = []
    assert batch.drafts(drafter) == [[], [1, 2, 3, 4]] and len(service.requests[0].rows) == 1
    batch.sampled = [[], []]
    assert batch.drafts(drafter) == [[], []] and len(service.requests) == 1


def test_what_the_service_does_not_know_is_told_anew(service):
    drafter, batch = up(remote(service.url)), Batch([5, 6])
    batch.drafts(drafter)
    batch.write(0, [5, 6, 7])
    service.act = lambda handler, _: handler.say(drafts([None])) or True
    assert batch.drafts(drafter) == [[]] and asked(service) == [(2, [7], 4)]
    service.act = None
    batch.write(0, [5, 6, 7, 8])
    assert batch.drafts(drafter) == [[1, 2, 3, 4]] and asked(service) == [(0, [5, 6, 7, 8], 4)]


@pytest.mark.parametrize(("limit", "wanted"), [("3", 3), ("99", 4), ("", 4)])
def test_a_draft_has_no_more_tokens_than_allowed(service, limit, wanted):
    assert len(Batch([5, 6]).drafts(up(remote(service.url, MAX_DRAFT_TOKENS=limit)))[0]) == wanted


def test_the_ends_of_both_models_are_minded(service, monkeypatch):
    drafter = up(remote(service.url))
    assert Batch(list(range(50))).drafts(drafter) == [[]]  # the draft model's
    monkeypatch.setattr(drafter._line, "service", protocol.Service(protocol.VERSION, "fake", 100, 500, 8, 8))
    assert Batch(list(range(61))).drafts(drafter) == [[1, 2]]  # a round writes one token more than it drafts
    assert Batch(list(range(63))).drafts(drafter) == [[]]


def test_tokens_that_the_target_lacks_end_a_draft(service):
    service.act = lambda handler, _: handler.say(drafts([[5, 90, 6]])) or True
    assert Batch([5, 6]).drafts(up(remote(service.url))) == [[5]]


def refuse(handler, request):
    handler.say(b"service: expected room for a request, found a full queue\n", 503)
    return True


def drop(handler, request):
    handler.close_connection = True
    handler.connection.shutdown(socket.SHUT_RDWR)
    return True


def chatter(handler, request):
    handler.say(b'{"version": 2, "drafts": "many"}')
    return True


def too_long(handler, request):
    handler.say(drafts([list(range(5))]))
    return True


@pytest.mark.parametrize("act", [refuse, drop, chatter, too_long])
def test_a_failure_is_plain_decoding_until_the_service_is_well(service, act):
    drafter, batch = up(remote(service.url)), Batch([5, 6])
    service.act = act
    assert batch.drafts(drafter) == [[]]
    service.act = None
    up(drafter)
    assert batch.drafts(drafter) == [[1, 2, 3, 4]]
    assert service.requests[-1].rows[0].start == 0


def test_a_slow_service_is_waited_for_once(service):
    release = threading.Event()
    service.act = lambda handler, request: release.wait(20) and False
    drafter, batch = up(remote(service.url, DRAFT_TIMEOUT_MS="30")), Batch([5, 6])
    counts = [counter._value.get() for counter in (FAILURES, PLAIN_ROUNDS)]
    assert [batch.drafts(drafter) for _ in range(5)] == [[[]]] * 5
    release.set()
    service.act = None
    up(drafter)
    drafter._line.timeout = 20.0
    assert batch.drafts(drafter) == [[1, 2, 3, 4]]
    assert [counter._value.get() for counter in (FAILURES, PLAIN_ROUNDS)] == [counts[0] + 1, counts[1] + 5]
    assert len(service.requests) == 2


def test_a_service_that_was_restarted_is_found_again(service):
    port = service.server_address[1]
    drafter, batch = up(remote(service.url)), Batch([5, 6])
    batch.drafts(drafter)
    service.end()
    service.act = drop  # the connection that is open already has a thread of its own
    assert batch.drafts(drafter) == [[]]
    again = FakeService(port)
    try:
        assert batch.drafts(up(drafter)) == [[1, 2, 3, 4]]
    finally:
        again.end()


def test_a_connection_that_was_closed_in_silence_is_opened_again(service):
    drafter, batch = up(remote(service.url)), Batch([5, 6])
    batch.drafts(drafter)
    drafter._line._connection.sock.shutdown(socket.SHUT_RDWR)
    assert batch.drafts(drafter) == [[1, 2, 3, 4]]
    assert service.paths == ["/health", "/propose", "/propose"]


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"DRAFT_ENDPOINT": ""}, "DRAFT_ENDPOINT: expected a URL such as http://127.0.0.1:8100, found none"),
        ({"DRAFT_ENDPOINT": "ftp://here"}, "DRAFT_ENDPOINT: expected a URL"),
        ({"DRAFT_ENDPOINT": "http://here:port"}, "DRAFT_ENDPOINT: expected a URL"),
        ({"DRAFT_ENDPOINT": "http://me:secret@here"}, "found one with a user name, password or query"),
        ({"DRAFT_TIMEOUT_MS": "soon"}, "DRAFT_TIMEOUT_MS: expected a whole number of at least 1, found 'soon'"),
        ({"MAX_DRAFT_TOKENS": "0"}, "MAX_DRAFT_TOKENS: expected a whole number"),
        ({"DRAFT_API_KEY": "secret\nX: y"}, "DRAFT_API_KEY: expected printable ASCII characters, found others"),
    ],
)
def test_settings_that_are_wrong_are_a_line_in_the_log(environment, words, caplog):
    with caplog.at_level(logging.INFO):
        drafter = remote("http://127.0.0.1:9", **environment)
    assert [record.name for record in caplog.records] == ["vllm.draftsmith"]
    assert words in caplog.text and "secret" not in caplog.text
    assert Batch([5, 6], [7]).drafts(drafter) == [[], []]


def test_a_mistake_of_ours_is_plain_decoding(service, caplog):
    drafter = up(remote(service.url))
    for _ in range(3):
        assert drafter.propose([[1], [2]], None, None) == [[], []]
    assert caplog.text.count("decoding continues plainly") == 1


def test_the_key_is_sent_and_never_shown(service, caplog):
    keys = []

    def repeat(handler, request):
        keys.append(handler.headers["Authorization"])
        handler.say(f"not for {keys[-1]}".encode(), 403)
        return True

    service.act = repeat
    Batch([5, 6]).drafts(up(remote(service.url, DRAFT_API_KEY="sesame")))
    assert keys == ["Bearer sesame"] and "403 not for Bearer ***" in caplog.text and "sesame" not in caplog.text


def test_the_log_is_told_once_a_minute(caplog):
    now = [0.0]
    say = ThrottledLog(logging.getLogger("seldom"), lambda: now[0])
    with caplog.at_level(logging.INFO):
        for second in (0, 30, 59, 60, 61):
            now[0] = second
            say.warning(f"at {second}")
        say.info("well")
    # A thread of an earlier test may still log.
    assert [record.message for record in caplog.records if record.name == "seldom"] == ["at 0", "at 60", "well"]
