"""Speeds that a report predicts for a pair at every load: costs times acceptance, by hand."""

import copy
import json

import pytest

from draftsmith.decode.errors import InputError
from draftsmith.scripts.services.coordinate.config import CoordinatorConfig, RoutingRule, ServedPair
from draftsmith.scripts.services.coordinate.predictions import predicted_rates
from draftsmith.scripts.services.coordinate.routing import Facts, Router


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
