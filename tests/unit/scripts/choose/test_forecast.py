"""Speed-ups of candidates, now and after more text, from rounds and costs by hand."""

from dataclasses import replace

import pytest

from draftsmith.decode.measurement import learning_curve
from draftsmith.decode.measurement.costs import CostTable, DraftCosts
from draftsmith.decode.measurement.intervals import Estimate
from draftsmith.scripts.choose import forecast
from draftsmith.scripts.choose.forecast import Standing, Trial, outlook, outlooks, score
from draftsmith.scripts.choose.rounds import ReplayedRounds, Way

TABLE = CostTable(
    context=50,
    temperature=0.0,
    target_seconds={1: {1: 0.9, 2: 1.2, 3: 1.4, 4: 1.6}},
    plain_overhead_seconds={1: 0.1},
    prompt=20,
    prefill_seconds={1: 2.0},
    drafters={"draft": {1: DraftCosts(0.0, 0.2, 0.0, 0.0)}, "suffix": {1: DraftCosts(0.0, 0.0, 0.0, 0.0)}},
)


def alone(rounds: float, nodes: int) -> list[list[float]]:
    """A text's rounds of one drafter, all of which draft as many tokens."""
    return [[0.0] * nodes + [rounds]]


def replayed(tau: float, texts: int = 12) -> ReplayedRounds:
    """Texts of 30 tokens that one token at a time drafts at this τ, and three at a time no better."""
    return ReplayedRounds(
        [30] * texts,
        {
            "alone": {1: [alone(30 / tau, 1)] * texts, 3: [alone(30 / tau, 3)] * texts},
            # Half of the rounds copy two tokens, half draft one, and all emit as much.
            "last=1": {2: [[[0.0, 0.0, 15 / tau], [0.0, 15 / tau, 0.0]]] * texts},
        },
    )


def trial(tokens: int, tau: float) -> Trial:
    return Trial("dir", tokens, 1.0, 0.0, {"0": replayed(tau)})


def test_the_fastest_way_is_taken_and_priced_by_its_rounds():
    found = outlook("draft", [trial(1000, 1.5)], TABLE, "0", 1, 1000.0)
    # A round of one token takes 0.2 + 1.2 seconds, one of three 0.6 + 1.6; a copied one 1.4.
    assert found.way == Way(1) and found.mean_acceptance_length.value == pytest.approx(1.5)
    assert found.now.value == pytest.approx(1.5 / 1.4)
    assert found.forecast == found.now  # one amount says nothing of more
    ways = replayed(1.5).ways()
    assert ways == [Way(1), Way(3), Way(2, 1)]
    hybrid = replayed(1.5).seconds(Way(2, 1), "draft", TABLE, 1)
    assert hybrid == pytest.approx([(15 * 1.4 + 15 * 1.4) / 1.5] * 12)
    copied = ReplayedRounds([30], replayed(1.5).sizes | {"last=1": {2: [[[0.0, 0.0, 9.0], [0.0, 9.0, 0.0]]]}})
    found = outlook("draft", [replace(trial(1000, 1.5), replayed={"0": copied})], TABLE, "0", 1, 1000.0)
    assert found.way == Way(2, 1)


def test_more_text_is_forecast_along_the_curve():
    grown = [trial(1000 * 2**step, 1.3 + 0.1 * step) for step in range(4)]
    two = outlook("draft", grown[:2], TABLE, "0", 1, 8000.0)
    four = outlook("draft", grown, TABLE, "0", 1, 16_000.0)
    assert two.now.value < two.forecast.value and two.forecast.ci95 is None
    low, high = four.forecast.ci95
    assert four.now.value < four.forecast.value < 1.75 / 1.4 and low < 1.7 / 1.4 < high
    rounds = [[30 / tau] * 12 for tau in (1.3, 1.4, 1.5, 1.6)]
    tau = learning_curve.forecast([1.0, 2.0, 4.0, 8.0], [[30.0] * 12] * 4, rounds, 2.0)
    assert four.forecast.ci95 == pytest.approx([end / 1.4 for end in tau.ci95])
    flat = outlook("draft", [trial(1000 * 2**step, 1.5) for step in range(4)], TABLE, "0", 1, 16_000.0)
    assert flat.forecast.value == pytest.approx(flat.now.value, abs=0.05)


def test_amounts_that_are_too_close_promise_nothing():
    close = outlook("draft", [trial(1000, 1.3), trial(1300, 1.4)], TABLE, "0", 1, 9000.0)
    assert close.forecast == close.now and close.forecast.ci95 is not None
    far = outlook("draft", [trial(1000, 1.3), trial(2000, 1.4)], TABLE, "0", 1, 9000.0)
    assert far.forecast.value > far.now.value


def test_the_score_is_the_geometric_mean_over_settings():
    found = outlooks(
        "draft",
        [Trial("dir", 1000, 1.0, 0.0, {"0": replayed(1.5), "1": replayed(1.2)})],
        {"0": TABLE, "1": TABLE},
        [1],
        1e3,
    )
    assert [each.temperature for each in found] == ["0", "1"]
    assert score(found) == pytest.approx((1.5 * 1.2) ** 0.5 / 1.4)


def standing(name: str, taus: list[float]) -> Standing:
    """A candidate of which each held-out text is drafted at its own τ, one token at a time."""
    texts = ReplayedRounds([30] * len(taus), {"alone": {1: [alone(30 / tau, 1) for tau in taus]}})
    trials = [Trial("dir", 1000, 1.0, 0.0, {"0": texts})]
    return Standing(name, "distill", {}, trials, None, outlooks("draft", trials, {"0": TABLE}, [1], 1e3))


def test_plain_decoding_stands_in_where_a_candidate_does_not_pay():
    (now,) = standing("", [2.0]).outlooks
    standings = []
    for name, speedups in (("even", (1.1, 1.1)), ("mixed", (2.0, 0.5))):
        ahead = [replace(now, forecast=Estimate(speedup, None, 1)) for speedup in speedups]
        standings.append(Standing(name, None, {}, [], None, ahead))
    assert forecast.verdict(standings)[0] == "mixed"


def test_the_winner_is_told_from_those_that_are_slower_on_the_same_prompts(monkeypatch):
    """Texts differ far more than candidates: only what is paired over them tells candidates apart."""
    monkeypatch.setattr(forecast, "COST_ERROR", 0.0)
    table = replace(TABLE, drafters={name: TABLE.drafters["draft"] for name in ("best", "near", "far")})
    texts = [1.6, 2.6, 1.9, 2.2] * 4
    best = standing("best", texts)
    far = standing("far", [0.95 * tau for tau in texts])
    near = standing("near", [tau * (0.97 if place % 2 else 1.02) for place, tau in enumerate(texts)])
    assert forecast.close_to("best", [best, far, near], {"0": table}) == ["near"]
    monkeypatch.setattr(forecast, "COST_ERROR", 0.02)  # 5 % are within two standard errors of 2 % for each
    assert forecast.close_to("best", [best, far, near], {"0": table}) == ["far", "near"]
    # Where costs do not agree, a candidate's are wrong by a tenth.
    doubtful = replace(table, doubts=["a token of plain decoding takes 1.00 ms at first, 2.00 ms later"])
    farther = standing("far", [0.8 * tau for tau in texts])
    assert forecast.close_to("best", [best, farther], {"0": table}) == []
    assert forecast.close_to("best", [best, farther], {"0": doubtful}) == ["far"]
