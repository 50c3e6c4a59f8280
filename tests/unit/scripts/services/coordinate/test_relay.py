"""Requests that the coordinator passes on, against servers whose every answer is written down."""

import asyncio
import json
from contextlib import AsyncExitStack

from local_server import answering

from draftsmith.scripts.services.coordinate.config import CoordinatorConfig, ServedPair
from draftsmith.scripts.services.coordinate.dispatcher import Dispatcher
from draftsmith.scripts.services.coordinate.relay import LeaseOutcome, Relay
from draftsmith.scripts.services.coordinate.request import TEXT, Keywords, read_request
from draftsmith.train.endpoint.http import HttpClient

KEY = "sk-not-to-be-seen"
GOOD = b'{"model": "m", "choices": [{"text": "hello"}]}'
WORDS = b'{"error": {"message": "cannot be done"}}'


def relayed(*answers: tuple[bytes, str], times: int = 1) -> tuple[list[dict], list[LeaseOutcome], list[bool]]:
    """Relay a request some times to servers of one pair, the first one first.

    Returns:
        What was sent, the outcomes, and by server whether it would get no further request.
    """
    sent, outcomes = [], []

    async def receive():
        await asyncio.sleep(60)

    async def send(message):
        sent.append(message)

    async def pass_on() -> list[bool]:
        async with AsyncExitStack() as stack:
            urls = [await stack.enter_async_context(answering(*answer)) for answer in answers]
            clients = {url: await stack.enter_async_context(HttpClient(url, "server")) for url in urls}
            dispatcher = Dispatcher(CoordinatorConfig([ServedPair("pair", ["m"], urls)], failures=3), {})

            class Dispatch:
                async def acquire(self, facts, tried):
                    others = [url for url in urls[1:] if url not in tried]
                    (chosen,) = dispatcher.exchange("i", [], [(facts, tried or others)], None)
                    return chosen

                def ended(self, outcome):
                    outcomes.append(outcome)
                    dispatcher.exchange("i", [outcome], [], None)

            for _ in range(times):
                request = read_request(TEXT, b'{"model": "m", "prompt": "p"}', {}, Keywords([]))
                await Relay(request, Dispatch(), clients, {"pair": None})({"type": "http"}, receive, send)
            return [dispatcher.router.breakers[url].open for url in urls]

    broken = asyncio.run(pass_on())
    return sent, outcomes, broken


def test_what_a_server_says_of_the_coordinators_key_is_not_passed_on():
    sent, outcomes, _ = relayed((f"wrong key {KEY}".encode(), "401 Unauthorized"))
    assert sent[0]["status"] == 502 and KEY.encode() not in b"".join(each.get("body", b"") for each in sent)
    assert [(outcome.failed, outcome.status) for outcome in outcomes] == [(True, 0)]


def test_a_request_that_always_brings_a_500_does_not_shut_the_only_server():
    sent, outcomes, broken = relayed((WORDS, "500 Internal Server Error"), times=5)
    assert [message["status"] for message in sent[::2]] == [500] * 5
    assert {message["body"] for message in sent[1::2]} == {WORDS}
    assert not any(outcome.failed for outcome in outcomes) and broken == [False]
    assert [outcome.status for outcome in outcomes if outcome.status] == [500] * 5


def test_a_500_counts_against_a_server_where_another_one_answers():
    sent, outcomes, broken = relayed((WORDS, "500 Internal Server Error"), (GOOD, "200 OK"), times=3)
    assert [message["status"] for message in sent[::2]] == [200] * 3
    assert json.loads(sent[1]["body"]) == json.loads(GOOD)
    assert [outcome.failed for outcome in outcomes].count(True) == 3 and broken == [True, False]


def test_a_500_of_two_servers_is_the_requests_own():
    sent, outcomes, broken = relayed(*[(WORDS, "500 Internal Server Error")] * 2, times=4)
    assert [message["status"] for message in sent[::2]] == [500] * 4
    assert not any(outcome.failed for outcome in outcomes) and broken == [False, False]
