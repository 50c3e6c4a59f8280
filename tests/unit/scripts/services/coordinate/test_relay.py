"""The coordinator's relay, its watch over servers, and the predictions it routes by."""

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
from draftsmith.scripts.services.coordinate.dispatcher import Dispatcher
from draftsmith.scripts.services.coordinate.predictions import predicted_rates
from draftsmith.scripts.services.coordinate.relay import LeaseOutcome, Names, Relay
from draftsmith.scripts.services.coordinate.request import TEXT, CompletionRequest, Keywords, read_request
from draftsmith.scripts.services.coordinate.routing import Facts, Router
from draftsmith.scripts.services.coordinate.watch import AWAY, ReplicaWatch, answers
from draftsmith.train.endpoint.http import HttpClient

KEY = "sk-not-to-be-seen"
GOOD = b'{"model": "m", "choices": [{"text": "hello"}]}'
WORDS = b'{"error": {"message": "cannot be done"}}'


def relayed(
    *answers: tuple[bytes, str], times: int = 1, **added: object
) -> tuple[list[dict], list[LeaseOutcome], list[bool]]:
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
                request = replace(request, added=added)
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


WHOLE = {"ingress": 2, "dispatcher": 1}


def test_what_changes_is_said_once():
    watch = ReplicaWatch(WHOLE)
    assert watch.look(WHOLE, 0) == []
    assert watch.look({"ingress": 1, "dispatcher": 1}, 2) == ["coordinator: 1 of 2 replicas of ingress run"]
    assert watch.look({"ingress": 1, "dispatcher": 1}, 4) == []
    assert watch.look(WHOLE, 6) == ["coordinator: 2 of 2 replicas of ingress run"]


def test_it_ends_where_a_deployment_stays_away_and_not_before():
    watch = ReplicaWatch(WHOLE)
    watch.look({"ingress": 2}, 0)
    assert watch.lost(AWAY - 1) == []
    watch.look(WHOLE, AWAY - 1)
    watch.look({"ingress": 1}, AWAY + 1)  # one ingress is enough to answer
    assert watch.lost(2 * AWAY) == []
    assert watch.lost(2 * AWAY + 1) == ["dispatcher"]


def test_a_controller_that_does_not_answer_says_nothing_of_the_replicas():
    watch = ReplicaWatch(WHOLE)
    assert watch.look(None, 0) == ["coordinator: Ray Serve's controller does not answer"]
    assert watch.look(None, AWAY) == [] and watch.lost(2 * AWAY) == []
    assert watch.look(WHOLE, 2 * AWAY) == ["coordinator: Ray Serve's controller answers again"]


def test_it_ends_where_neither_the_controller_nor_the_port_answers():
    watch = ReplicaWatch(WHOLE)
    watch.look(None, 0, answers=False)
    assert watch.lost(AWAY - 1) == []
    watch.look(None, AWAY - 1, answers=True)
    watch.look(None, AWAY, answers=False)
    assert watch.lost(2 * AWAY - 1) == []
    assert watch.lost(2 * AWAY) == ["ingress", "dispatcher"]


def test_a_deployment_that_was_away_stays_away_while_the_controller_is_silent():
    watch = ReplicaWatch(WHOLE)
    watch.look({"ingress": 2}, 0)
    watch.look(None, AWAY / 2)
    assert watch.lost(AWAY) == ["dispatcher"]


def test_whether_a_port_answers():
    async def ask() -> bool:
        async with answering(b"", "503 Service Unavailable") as url:
            return await asyncio.to_thread(answers, "127.0.0.1", int(url.rpartition(":")[2]))

    assert asyncio.run(ask())
    assert not answers("127.0.0.1", 9)


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
    assert predicted_rates(pair(drafts="probabilistic")).tokens_per_second(1, 0.9) == pytest.approx(2.0 / 0.016)


def test_plain_decoding_costs_a_forward_of_one_token(pair):
    plain = predicted_rates(pair(draft_length=0))
    assert plain.tokens_per_second(1, 0.0) == pytest.approx(100)
    assert plain.tokens_per_second(8, 0.7) == pytest.approx(1 / 0.012)


def test_servers_that_draft_by_their_load_are_priced_so(pair, tmp_path):
    entry = {"path": None, "temperatures": [0], "num_speculative_tokens": 4}
    entry["num_speculative_tokens_per_batch_size"] = [[1, 3, 4], [4, 8, 0]]
    path = tmp_path / "draft_lengths.json"
    path.write_text(json.dumps({"schema": "draftsmith.draft_lengths/1", "target": "t", "drafters": {"draft": entry}}))
    rates, always = predicted_rates(pair(draft_lengths=str(path))), predicted_rates(pair())
    plain = predicted_rates(pair(draft_length=0))
    for rows, like in ((1, always), (3, always), (4, plain), (8, plain), (500, plain)):
        for where in ((rows, 0.0), (rows, 1.0), (rows, 0.0, "code")):
            expected = like.tokens_per_second(*(where if like is always else where[:2]))
            assert rates.tokens_per_second(*where) == pytest.approx(expected)
    two = json.loads(path.read_text())
    two["drafters"] = {"other": entry, "third": entry}
    path.write_text(json.dumps(two))
    with pytest.raises(InputError, match=r"pairs.drafted.draft_lengths: expected draft in .*, found other, third"):
        predicted_rates(pair(draft_lengths=str(path)))
    two["drafters"] = {"whatever": entry | {"num_speculative_tokens_per_batch_size": [[1, 3, 2]]}}  # the only one is it
    path.write_text(json.dumps(two))
    with pytest.raises(InputError, match=r"draft_lengths: expected one that the report has, 4, found 2"):
        predicted_rates(pair(draft_lengths=str(path)))
    with pytest.raises(InputError, match=r"draft_lengths: expected a report with it and no draft_length"):
        pair(draft_lengths=str(path), draft_length=4)


def test_drafting_is_left_off_where_full_batches_make_it_a_loss(pair):
    drafted, plain = pair(), pair(name="plain", draft_length=0)  # the same machine: their loads are one
    config = CoordinatorConfig([drafted, plain], [RoutingRule(best=["drafted", "plain"])])
    router = Router(config, {each.name: predicted_rates(each) for each in config.pairs})
    chosen = [router.acquire(Facts("m", temperature=0.0), "h", (), 0.0).pair for _ in range(8)]
    turn = chosen.index("plain")
    assert 1 < turn < 8 and chosen == ["drafted"] * turn + ["plain"] * (8 - turn)
    assert router.acquire(Facts("m", "code", 0.0), "h", (), 0.0).pair == "drafted"  # 3.2 ÷ 40 ms against 1 ÷ 12.3 ms


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
        (without("costs"), {}, "pairs.drafted.report: expected costs in"),
        (without("curves"), {}, "pairs.drafted.report: {path}: curves: expected a list, found None"),
        (REPORT, {"drafter": "other"}, "pairs.drafted.drafter: expected one of the report's drafters, draft, found"),
        (REPORT, {"draft_length": 5}, "pairs.drafted.draft_length: expected one that the report has, 4, found 5"),
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
