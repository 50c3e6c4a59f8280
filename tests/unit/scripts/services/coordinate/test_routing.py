"""The coordinator's choice: rules, loads, health, predicted speeds; and the requests that it is made for."""

import json

import pytest

from draftsmith.decode.errors import InputError
from draftsmith.scripts.services.coordinate.config import CoordinatorConfig
from draftsmith.scripts.services.coordinate.config import RoutingRule as Rule
from draftsmith.scripts.services.coordinate.config import ServedPair as Pair
from draftsmith.scripts.services.coordinate.relay import Names
from draftsmith.scripts.services.coordinate.request import CHAT, TEXT, ApiError, Keywords, read_request
from draftsmith.scripts.services.coordinate.routing import DOWN, FULL, UNKNOWN, Facts, Rates, Refusal, Router

A, B, C = "http://a:1", "http://b:1", "http://c:1"


def pair(name: str, *endpoints: str, models: tuple[str, ...] = ("m",), **options) -> Pair:
    return Pair(name, list(models), list(endpoints), **options)


def router(*pairs: Pair, rules: tuple[Rule, ...] = (), rates: dict[str, Rates] | None = None, **options) -> Router:
    return Router(CoordinatorConfig(list(pairs), list(rules), **options), rates or {}, seed=0)


def chosen(of: Router, facts: Facts | str = "m", tried: tuple[str, ...] = ()):
    return of.acquire(Facts(facts) if isinstance(facts, str) else facts, tried)


def test_the_first_rule_that_fits_wins_and_without_one_the_first_pair():
    rules = (Rule(pair="b", model="m-*"), Rule(pair="b", category=["code"]), Rule(pair="b", keywords=["sql"]))
    of = router(pair("a", A, models=("m", "m-large")), pair("b", B, models=("m", "m-large")), rules=rules)
    assert chosen(of).pair == "a"
    assert chosen(of, "m-large").pair == "b"
    assert chosen(of, Facts("m", category="code")).pair == "b"
    assert chosen(of, Facts("m", category="maths")).pair == "a"
    assert chosen(of, Facts("m", keywords=frozenset({2}))).pair == "b"


def test_all_conditions_of_a_rule_must_hold():
    of = router(pair("a", A), pair("b", B), rules=(Rule(pair="b", category=["code"], load_of="a", load_at_least=1),))
    assert chosen(of, Facts("m", category="code")).pair == "a"
    assert chosen(of, Facts("m", category="code")).pair == "b"
    assert chosen(of, Facts("m")).pair == "a"


def test_a_rule_never_sends_a_model_to_a_pair_that_does_not_serve_it():
    of = router(pair("a", A, models=("x",)), pair("b", B, models=("y",)), rules=(Rule(pair="b"),))
    assert chosen(of, "x").pair == "a"
    assert chosen(of, "z") == Refusal(UNKNOWN)


def test_load_moves_requests_to_another_pair_and_back_when_they_end():
    rules = (Rule(pair="a", load_of="a", load_below=2), Rule(pair="b"))
    of = router(pair("a", A), pair("b", B), rules=rules)
    servers = [chosen(of) for _ in range(3)]
    assert [server.pair for server in servers] == ["a", "a", "b"]
    of.release(servers[0])
    assert of.loads == {A: 1, B: 1}
    assert chosen(of).pair == "a"


def test_replicas_are_chosen_by_load():
    of = router(pair("a", A, B, C))
    assert sorted(chosen(of).url for _ in range(3)) == [A, B, C]
    of.breakers[A].ended(failed=True)
    of.breakers[A].ended(failed=True)
    assert [chosen(of).url != A for _ in range(4)] == [True] * 4


def test_a_full_pair_is_passed_over_and_all_full_is_said():
    of = router(pair("a", A, max_concurrency=1), pair("b", B, max_concurrency=1), rules=(Rule(pair="a"),))
    assert [chosen(of).pair, chosen(of).pair] == ["a", "b"]
    assert chosen(of) == Refusal(FULL)


def test_servers_that_were_tried_or_are_not_well_are_not_asked():
    of = router(pair("a", A, B), pair("b", C))
    assert chosen(of, tried=(A,)).url == B
    assert chosen(of, tried=(A, B)).url == C
    for url in (A, B):
        for opened in (False, False, True):
            of.breakers[url].ended(failed=True)
            assert of.breakers[url].open == opened
    assert chosen(of).url == C
    for _ in range(3):
        of.breakers[C].count_check(well=False)
    assert chosen(of) == Refusal(DOWN)
    of.breakers[B].count_check(well=True)
    assert chosen(of).url == B


def test_failures_among_good_answers_do_not_add_up():
    of = router(pair("a", A)).breakers[A]
    for failed in (True, True, False, True, True, False):
        of.ended(failed)
        assert not of.open
    for _ in range(2):
        of.count_check(well=False)
        of.ended(failed=False)  # what it had begun: it is about to end all the same
    of.count_check(well=False)
    assert of.open


def test_a_server_that_fails_at_once_is_not_rewarded_for_having_nothing_under_way():
    """It fails each request in no time; the other one has two under way all the while."""
    of = router(pair("a", A, B))
    asked = {A: 0, B: 0}
    for turn in range(300):
        server = chosen(of)
        asked[server.url] += 1
        if server.url == A:
            of.release(server)
            of.breakers[A].ended(failed=True)
        elif sum(of.loads.values()) > 2:
            of.release(server)
        if turn % 30 == 0:
            of.breakers[A].count_check(well=True)  # it says that it is well
    assert asked[A] <= 3 + 10  # until it is passed over, and one for each look


def test_after_a_good_look_one_more_failure_is_enough():
    of = router(pair("a", A)).breakers[A]
    for _ in range(3):
        of.ended(failed=True)
    assert of.open
    of.count_check(well=True)
    assert not of.open
    of.ended(failed=True)
    assert of.open
    of.count_check(well=True)
    of.ended(failed=False)
    of.ended(failed=True)
    assert not of.open


def test_a_rule_that_would_backtrack_without_end_answers_at_once():
    rules = [Rule(pair="a", keywords=["(a+)+$"]), Rule(pair="a", keywords=[r"\bSQL\b", "(x*)*y"])]
    body = {"model": "m", "messages": [{"role": "user", "content": "a" * 26 + "!"}]}
    assert asked(body, rules=rules).facts.keywords == frozenset()
    body["messages"][0]["content"] = "\ud800 sql " + "x" * 15_000  # half a pair, which UTF-8 has no bytes for
    assert asked(body, rules=rules).facts.keywords == frozenset({1})


def test_the_best_pair_is_the_fastest_at_its_load():
    speculative, plain = [40.0, 22.0, 12.0], [20.0, 18.0, 16.0]
    rates = {"draft": Rates({0.0: {None: speculative}}), "plain": Rates({0.0: {None: plain}})}
    pairs = [pair("draft", A, report="r"), pair("plain", A, report="r")]
    of = router(*pairs, rules=(Rule(best=["draft", "plain"]),), rates=rates)
    assert [chosen(of).pair for _ in range(4)] == ["draft", "draft", "plain", "plain"]


def test_speeds_are_of_the_nearest_temperature_and_of_the_category_if_it_was_measured():
    rates = Rates({0.0: {None: [10.0, 9.0], "code": [30.0]}, 1.0: {None: [5.0]}})
    assert rates.tokens_per_second(2, 0.2) == 9.0
    assert rates.tokens_per_second(7, 0.2) == 9.0
    assert rates.tokens_per_second(1, 0.2, "code") == 30.0
    assert rates.tokens_per_second(1, 0.2, "poems") == 10.0
    assert rates.tokens_per_second(1, 0.7, "code") == 5.0


def asked(body, path=CHAT, headers=None, rules=()):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return read_request(path, content, headers or {}, Keywords(rules))


def test_what_routing_knows_of_a_request():
    rules = [Rule(pair="a"), Rule(pair="a", keywords=[r"\bsql\b"]), Rule(pair="a", keywords=["poem", "verse"])]
    turns = [
        {"role": "user", "content": "a poem"},
        {"role": "assistant", "content": "verse"},
        {"role": "user", "content": [{"type": "text", "text": "now as SQL"}]},
    ]
    found = asked({"model": "m", "messages": turns, "temperature": 0, "stream": True}, rules=rules)
    assert found.facts == Facts("m", None, 0.0, frozenset({1}))
    assert found.streams
    prompt = {"model": "m", "prompt": "in verse", "metadata": {"category": "x"}}
    assert asked(prompt, TEXT, rules=rules).facts == Facts("m", "x", 1.0, frozenset({2}))
    header = {"x-draftsmith-category": "y"}
    assert asked({"model": "m", "prompt": [1, 2]}, TEXT, header).facts == Facts("m", "y")


def test_an_answer_names_the_model_as_the_client_did():
    event = b'data: {"model":"a/b","choices":[{"delta":{"content":"\\"model\\":\\"a/b\\""}}]}\n\n'
    renamed = event.replace(b'"model":"a/b"', b'"model":"tiny"')
    for size in (1, 7, 1000):
        names = Names("a/b", "tiny")
        parts = [names.part((event * 3)[at : at + size]) for at in range(0, 3 * len(event), size)]
        assert b"".join(parts) + names.end() == renamed * 3
    assert Names("a/b", "tiny").whole(b'{"model": "a/b"}') == b'{"model": "tiny"}'
    assert Names(None, "tiny").part(b'{"model": "a/b"') == b'{"model": "a/b"'


def test_the_body_is_sent_on_as_it_came_but_for_the_models_name():
    body = {"model": "m", "messages": [{"role": "user", "content": "é\u2028"}], "logit_bias": {"5": 1}}
    assert json.loads(asked(body).content(None)) == body
    assert json.loads(asked(body).content("other")) == body | {"model": "other"}


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"{", "body: expected JSON"),
        (b"[]", "body: expected a JSON object"),
        (b"\xff", "body: expected JSON"),
        ({"messages": [1]}, "model: expected the name of a model"),
        ({"model": "m"}, "messages: expected some"),
        ({"model": "m", "messages": "hello"}, "messages: expected a list"),
        ({"model": "m", "messages": [1], "temperature": 10**400}, "temperature: expected a number"),
        (b'{"model": "m", "messages": ' + b"[" * 150 + b"]" * 150 + b"}", "body: expected at most 100 levels"),
    ],
)
def test_a_request_that_cannot_be_sent_on_is_refused_by_field(content, named):
    with pytest.raises(ApiError) as error:
        asked(content)
    assert error.value.status == 400
    assert error.value.message.startswith(named)
    assert set(error.value.body()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Rule(), "rules: expected either pair or best, found none"),
        (lambda: Rule(pair="a", best=["b"]), "rules: expected either pair or best, found both"),
        (lambda: Rule(pair="a", load_of="a"), "rules.load_of: expected it together with"),
        (lambda: Rule(pair="a", load_below=3), "rules.load_of: expected it together with"),
        (lambda: Rule(pair="a", keywords=["("]), "rules.keywords: expected a regular expression"),
        (lambda: Rule(pair="a", keywords=["(?=a)"]), "rules.keywords: expected a regular expression of RE2 (no look"),
        (lambda: pair("a"), "pairs.a.endpoints: expected at least one URL"),
        (lambda: pair("a", "http://user:secret@a"), "pairs.a.endpoints: expected a URL without user name"),
        (lambda: pair("a", A, A), "pairs.a.endpoints: expected each once"),
        (lambda: router(pair("a", A), pair("a", B)), "pairs.name: expected each once, found a again"),
        (lambda: router(pair("a", A), pair("b", A, key_env="K")), "pairs.b.key_env: expected one key for http://a:1"),
        (lambda: router(pair("a", A), rules=(Rule(pair="b"),)), "rules: expected one of the pairs a, found 'b'"),
        (lambda: router(pair("a", A), rules=(Rule(best=["a"]),)), "rules.best: expected a pair with a report"),
        (lambda: router(pair("a", A), port=70000), "port: expected at most 65535"),
    ],
)
def test_a_config_that_cannot_be_meant_is_refused(make, named):
    with pytest.raises(InputError) as error:
        make()
    assert str(error.value).startswith(named)
    assert "secret" not in str(error.value)
