"""Estimates of a server, from blocks made by hand: each figure is known."""

import pytest

from draftsmith.decode.measurement.intervals import ratio
from draftsmith.decode.measurement.server_counts import ServerCounts
from draftsmith.scripts.engines.client import Engine
from draftsmith.scripts.measure.server.config import MeasureServerConfig
from draftsmith.scripts.measure.server.entries import warnings_of
from draftsmith.scripts.measure.server.estimates import Acceptance, acceptance, observation, percentiles, token_seconds
from draftsmith.scripts.measure.server.load import MeasuredServer, RequestRecord
from draftsmith.scripts.measure.server.observe import Observed, ServerTurn
from draftsmith.train.data.prompts import Prompt
from draftsmith.train.endpoint.client import SentPrompt

ONE, TWO = (0.0, 1), (0.0, 2)
PARTS = [[1, 3, 2], [1, 1, 1, 2, 1], [1, 3, 3], [1, 2, 3], [1, 3, 1], [1, 2, 2]]
"""Of each prompt's answer: two drafted tokens a step, so that 3 is all and the next one, 1 none."""


def record(place: int, seconds: float, parts: list[int], **fields) -> RequestRecord:
    values = {"first": 0.1, "last": seconds, "ended": seconds, "finish_reason": "length"}
    values |= {"prompt_ids": None, "token_ids": None, "text": None, "counts": None}
    return RequestRecord(prompt=place, tokens=sum(parts), parts=parts, **(values | fields))


def block(records: list[RequestRecord], seconds: float = 1.0, **fields) -> ServerTurn:
    values = {"counters": ServerCounts(0, 0, 0, ()), "generated_tokens": None, "busy": False}
    return ServerTurn(records, seconds, **(values | fields))


def observed(blocks, config: dict | None = None, kind: str = "vllm") -> Observed:
    given = MeasureServerConfig("http://a", "p", "o", baseline_server="http://b", **(config or {}))
    prompts = [SentPrompt(Prompt(str(i), "", None, None)) for i in range(len(PARTS))]
    kinds = {"server": kind, "baseline_server": "vllm"}
    servers = {role: MeasuredServer(None, Engine(kind), "m", None, given) for role, kind in kinds.items()}
    return Observed(given, prompts, servers, blocks)


def steps_of(parts: list[list[int]]) -> ServerCounts:
    accepted = [tokens - 1 for of in parts for tokens in of[1:]]
    return ServerCounts.of_histogram([accepted.count(j) for j in range(3)], 2 * len(accepted))


def test_parts_that_match_the_counters_give_the_interval():
    """A part a step, the prompt's first: the same ratios as of the steps themselves."""
    total = steps_of(PARTS)
    accepted = [tokens - 1 for of in PARTS for tokens in of[1:]]
    assert total.num_drafts == len(accepted) == 14
    turns = [
        block([record(i, 1.0, parts)], counters=steps_of([parts]), generated_tokens=sum(parts))
        for i, parts in enumerate(PARTS)
    ]
    found = acceptance(observed({ONE: {"server": turns}}), ONE)
    assert found.source == "parts" and found.draft_length == 2
    rejected = sum(a < 2 for a in accepted)
    assert found.mean_acceptance_length().value == pytest.approx(1 + sum(accepted) / 14)
    columns = [[t - 1 for t in parts[1:]] for parts in PARTS]
    own = ratio([sum(of) for of in columns], [sum(of) + sum(a < 2 for a in of) for of in columns])
    assert found.alpha() == own and own.n == len(PARTS) and own.value == sum(accepted) / (sum(accepted) + rejected)
    # SGLang's counter has the steps alone.
    whole = block([record(i, 1.0, parts) for i, parts in enumerate(PARTS)], counters=ServerCounts(14, 0, 0, ()))
    found = acceptance(observed({ONE: {"server": [whole]}}, {"draft_length": 2}, "sglang"), ONE)
    assert found.draft_acceptance_rate().value == sum(accepted) / 28


def test_what_is_accepted_beyond_the_end_counts_for_alpha_alone():
    """The server counts three tokens more than came in parts, and five steps of which all was accepted."""
    total = steps_of(PARTS)
    more = ServerCounts(total.num_drafts, total.num_draft_tokens, total.num_accepted_tokens + 3, (11, 7))
    turn = block([record(i, 1.0, parts) for i, parts in enumerate(PARTS)], counters=more)
    found = acceptance(observed({ONE: {"server": [turn]}}), ONE)
    assert found.mean_acceptance_length().value == pytest.approx(1 + total.num_accepted_tokens / 14)
    assert found.alpha().value == pytest.approx(18 / (14 + 11)) and found.alpha().n == len(PARTS)


def test_counts_that_fit_nothing_give_no_figure():
    total = steps_of(PARTS) + ServerCounts(40, 80, 0, (0, 0))
    turn = block([record(i, 1.0, parts) for i, parts in enumerate(PARTS)], counters=total)
    seen = only(observed({ONE: {"server": [turn]}}))
    found = acceptance(seen, ONE)
    assert found.source == "counters" and found.alpha().value is found.mean_acceptance_length().value is None
    assert any("are not counted as vLLM 0.32" in words for words in warnings_of(seen, {ONE: found}))


def only(seen: Observed) -> Observed:
    seen.servers.pop("baseline_server")
    return seen


def test_drafts_of_several_lengths_have_no_alpha():
    counts = ServerCounts(10, 17, 6, (5, 1))
    records = [record(i, 1.0, [1, 16], counts=counts) for i in range(6)]
    found = acceptance(observed({ONE: {"server": [block(records)]}}), ONE)
    assert found.source == "answers" and found.alpha().value is None
    assert found.mean_acceptance_length().value == 1.6
    # Twenty-four steps of each text had nothing to copy, and are no drafts; each step emits a token of the target.
    for drafted, kind in ((17, "vllm"), (16, "llama.cpp")):
        records = [record(i, 1.0, [1, 40], counts=ServerCounts(4, drafted, 12, ())) for i in range(6)]
        found = acceptance(observed({ONE: {"server": [block(records)]}}, kind=kind), ONE)
        assert found.mean_acceptance_length().value == 40 / 28


def test_one_at_a_time_speed_is_that_of_requests_paired_over_prompts():
    fast = [record(i, 1.0 + i, [2] * 5) for i in range(6)]
    slow = [record(i, 2.0 + 2 * i, [1] * 10) for i in range(6)]
    seen = observed({ONE: {"server": [block(fast[:3]), block(fast[3:])],
                           "baseline_server": [block(slow[:3]), block(slow[3:])]}})  # fmt: skip
    estimate = observation(seen, ONE, "server").speedup(observation(seen, ONE, "baseline_server"))
    assert (estimate.value, estimate.n) == (2.0, 6) and estimate.ci95 == pytest.approx((2.0, 2.0))
    assert observation(seen, ONE, "server").within({1}).seconds == [2.0]


def test_several_at_once_speed_is_that_of_turns():
    turns = [block([record(2 * i + j, 9.0, [1] * 10) for j in range(2)], seconds=i + 1.0) for i in range(3)]
    found = observation(observed({TWO: {"server": turns}}, {"concurrency": [2]}), TWO, "server")
    assert (found.tokens, found.seconds, found.speed().value) == ([20] * 3, [1.0, 2.0, 3.0], 10.0)


def test_percentiles_and_seconds_a_token():
    found = percentiles([i / 100 for i in range(101)])
    assert (found.count, found.p50, found.p90, found.p99) == (101, 0.5, 0.9, 0.99)
    assert percentiles([]).p50 is None
    assert token_seconds(record(0, 1.1, [1, 2, 3])) == pytest.approx(0.2)
    assert token_seconds(record(0, 1.1, [5])) is None


def test_a_load_that_changes_alpha_is_told():
    """As of a server whose rows get mixed up."""
    good, bad = ServerCounts(10, 20, 12, (8, 4)), ServerCounts(18, 36, 3, (2, 1))

    def at(setting, counts: ServerCounts) -> Acceptance:
        tokens = 1 + counts.num_drafts + counts.num_accepted_tokens
        records = [record(i, 1.0, [tokens], counts=counts) for i in range(6)]
        return acceptance(observed({setting: {"server": [block(records)]}}), setting)

    accepted = {(1.0, 1): at((1.0, 1), good), (1.0, 4): at((1.0, 4), bad)}
    turn = {"server": [block([record(0, 1.0, [1] * 99)])]}
    seen = observed({(1.0, 1): turn, (1.0, 4): turn})
    seen.servers.pop("baseline_server")
    (warning,) = warnings_of(seen, accepted)
    assert "should not depend on its load" in warning
    assert not warnings_of(seen, accepted | {(1.0, 4): accepted[1.0, 1]})
