"""The coordinator's relay, and the predictions that it routes by."""

import asyncio
import copy
import json
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest
from local_server import answering

from draftsmith.decode.errors import InputError
from draftsmith.scripts.services.coordinate import relay
from draftsmith.scripts.services.coordinate.config import CoordinatorConfig, RoutingRule, ServedPair
from draftsmith.scripts.services.coordinate.coordinator import Coordinator
from draftsmith.scripts.services.coordinate.predictions import predicted_rates
from draftsmith.scripts.services.coordinate.relay import Names, Outcome, Relay
from draftsmith.scripts.services.coordinate.request import TEXT, CompletionRequest, Keywords, read_request
from draftsmith.scripts.services.coordinate.routing import Facts, Router

KEY = "sk-not-to-be-seen"
GOOD = b'{"model": "m", "choices": [{"text": "hello"}]}'
WORDS = b'{"error": {"message": "cannot be done"}}'


def relayed(
    *answers: tuple[bytes, str], times: int = 1, **added: object
) -> tuple[list[dict], list[Outcome], list[bool]]:
    """Relay a request some times to servers of one pair, the first one first.

    Returns:
        What was sent, the outcomes, and by server whether it would get no further request.
    """
    sent, outcomes = [], []

    async def receive():
        await asyncio.sleep(60)

    async def send(message):
        sent.append(message)

    class InOrder(Coordinator):
        def acquire(self, facts, failed_urls):
            return super().acquire(facts, failed_urls or list(self.clients)[1:])

        def count(self, outcome):
            outcomes.append(outcome)
            super().count(outcome)

    async def pass_on() -> list[bool]:
        async with AsyncExitStack() as stack:
            urls = [await stack.enter_async_context(answering(*answer)) for answer in answers]
            coordinator = InOrder(CoordinatorConfig([ServedPair("pair", ["m"], urls)]), {})
            for _ in range(times):
                request = read_request(TEXT, b'{"model": "m", "prompt": "p"}', {}, Keywords([]))
                await Relay(replace(request, added=added), coordinator)({"type": "http"}, receive, send)
            assert not any(coordinator.router.loads.values())
            return [coordinator.router.breakers[url].open for url in urls]

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


def test_what_the_log_asks_for_is_not_asked_again_where_a_server_refuses_it(monkeypatch):
    """SGLang refuses streamed chats with `return_token_ids`."""
    asked, ask = [], CompletionRequest.content
    monkeypatch.setattr(CompletionRequest, "content", lambda self, name: asked.append(ask(self, name)) or asked[-1])
    sent, outcomes, _ = relayed((WORDS, "400 Bad Request"), return_token_ids=True)
    assert [json.loads(body).get("return_token_ids") for body in asked] == [True, None]
    assert sent[0]["status"] == 400 and sent[1]["body"] == WORDS and len(sent) == 2
    assert [(outcome.failed, outcome.status) for outcome in outcomes] == [(False, 400)]


def test_a_line_without_end_does_not_wait_for_ever(monkeypatch):
    monkeypatch.setattr(relay, "MOST_BYTES", 100)
    names = Names("m", "mine")
    assert names.part(b'data: {"model"') == b"" and names.part(b': "m"}\r\nda') == b'data: {"model": "mine"}\r\n'
    assert names.part(b"x" * 99) == b"da" + b"x" * 99
    assert names.part(b"y") == b"" and names.end() == b"y" and names.end() == b""


def test_a_500_counts_against_a_server_where_another_one_answers():
    sent, outcomes, broken = relayed((WORDS, "500 Internal Server Error"), (GOOD, "200 OK"), times=3)
    assert [message["status"] for message in sent[::2]] == [200] * 3
    assert json.loads(sent[1]["body"]) == json.loads(GOOD)
    assert [outcome.failed for outcome in outcomes].count(True) == 3 and broken == [True, False]


def test_a_500_of_two_servers_is_the_requests_own():
    sent, outcomes, broken = relayed(*[(WORDS, "500 Internal Server Error")] * 2, times=4)
    assert [message["status"] for message in sent[::2]] == [500] * 4
    assert not any(outcome.failed for outcome in outcomes) and broken == [False, False]


def lengths(tau: float) -> dict:
    return {"4": {"value": tau, "ci95": None}}


def curve(tau: float, temperature: float, verifier: str = "probabilistic", **by_category: float) -> dict:
    return {
        "proposer": {"name": "draft", "tree_nodes": None},
        "temperature": temperature,
        "verifier": verifier,
        "mean_acceptance_length": lengths(tau),
        "by_category": {name: {"mean_acceptance_length": lengths(value)} for name, value in by_category.items()},
    }


# One row: t(1) = 10 ms and t(5) = 12 ms. Eight rows: 12 ms, and 30 ms, for five times eight tokens fill the machine.
TABLE = {
    "context": 64,
    "temperature": 0.0,
    "target_seconds": {"1": {"1": 0.010, "5": 0.012}, "8": {"1": 0.012, "5": 0.030}},
    "plain_overhead_seconds": {"1": 0.0, "8": 0.0},
    "prompt": 16,
    "prefill_seconds": {"1": 0.01, "8": 0.02},
    "drafters": {
        "draft": {
            "1": {"start": 0.0, "step": 0.001, "overhead": 0.0, "prefill": 0.0},
            "8": {"start": 0.0, "step": 0.001, "overhead": 0.002, "prefill": 0.0},
        }
    },
}
REPORT = {
    "schema": "draftsmith.report/1",
    "costs": {"tables": [TABLE]},
    "curves": [curve(2.4, 0.0, code=3.2), curve(2.0, 1.0), curve(1.6, 1.0, "greedy")],
    "recommendation": {"proposer": "draft", "draft_length": 4},
}


@pytest.fixture
def pair(tmp_path):
    def make(report: object = REPORT, name: str = "drafted", **options) -> ServedPair:
        path = tmp_path / "report.json"
        path.write_text(json.dumps(report))
        return ServedPair(name, ["m"], ["http://127.0.0.1:1"], report=str(path), **options)

    return make


def test_a_round_emits_tau_tokens_for_what_it_costs_at_that_many_rows(pair):
    rates = predicted_rates(pair())
    assert rates.tokens_per_second(1, 0.0) == pytest.approx(2.4 / (0.004 + 0.012))
    assert rates.tokens_per_second(8, 0.0) == pytest.approx(2.4 / (0.004 + 0.030 + 0.002))
    assert rates.tokens_per_second(1, 0.0, "code") == pytest.approx(3.2 / 0.016)
    assert rates.tokens_per_second(1, 0.9) == pytest.approx(1.6 / 0.016)  # servers draft their draft's argmax
    tree = curve(2.4, 0.0)
    tree["proposer"]["tree_nodes"] = 8  # t(9) lies on the line through t(1) and t(5)
    assert predicted_rates(pair(REPORT | {"curves": [tree]})).tokens_per_second(1, 0.0) == pytest.approx(2.4 / 0.018)
    assert predicted_rates(pair(drafts="probabilistic")).tokens_per_second(1, 0.9) == pytest.approx(2.0 / 0.016)


def test_plain_decoding_costs_a_forward_of_one_token(pair):
    plain = predicted_rates(pair(draft_length=0))
    assert plain.tokens_per_second(1, 0.0) == pytest.approx(100)
    assert plain.tokens_per_second(8, 0.7) == pytest.approx(1 / 0.012)


def test_drafting_is_left_off_where_full_batches_make_it_a_loss(pair):
    drafted, plain = pair(), pair(name="plain", draft_length=0)  # the same machine: their loads are one
    config = CoordinatorConfig([drafted, plain], [RoutingRule(best=["drafted", "plain"])])
    router = Router(config, {each.name: predicted_rates(each) for each in config.pairs})
    chosen = [router.acquire(Facts("m", temperature=0.0)).pair for _ in range(8)]
    turn = chosen.index("plain")
    assert 1 < turn < 8 and chosen == ["drafted"] * turn + ["plain"] * (8 - turn)
    assert router.acquire(Facts("m", "code", 0.0)).pair == "drafted"  # 3.2 ÷ 40 ms against 1 ÷ 12.3 ms


def without(path: str):
    report = copy.deepcopy(REPORT)
    report[path] = None
    return report


@pytest.mark.parametrize(
    ("report", "options", "named"),
    [
        (
            {"schema": "other"},
            {},
            "pairs.drafted.report: {path}: schema: expected 'draftsmith.report/1', found 'other'",
        ),
        (
            REPORT | {"curves": [curve(None, 0.0)]},
            {},
            "pairs.drafted.draft_length: expected one with a τ in the report, none",
        ),
        (without("costs"), {}, "pairs.drafted.report: expected costs in"),
        (without("curves"), {}, "pairs.drafted.report: {path}: curves: expected a list, found None"),
        (REPORT, {"drafter": "other"}, "pairs.drafted.drafter: expected one of the report's drafters, draft, found"),
        (REPORT, {"draft_length": 5}, "pairs.drafted.draft_length: expected one with a τ in the report, 4, found 5"),
        (
            {**REPORT, "recommendation": {"proposer": None, "draft_length": None}},
            {},
            "pairs.drafted.report: expected drafter and draft_length with a report that recommends none",
        ),
    ],
)
def test_a_report_that_does_not_say_is_refused(pair, report, options, named):
    of = pair(report, **options)
    with pytest.raises(InputError) as error:
        predicted_rates(of)
    assert str(error.value).startswith(named.format(path=of.report))
