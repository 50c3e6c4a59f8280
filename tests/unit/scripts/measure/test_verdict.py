"""What to do with the figures: verdict, comparisons, breaks and predictions, on figures that are made by hand."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import tiny_llama

from draftsmith.decode import Counts
from draftsmith.decode.measurement.certificate import Certificate, unchecked
from draftsmith.decode.measurement.costs import CostTable, DraftCosts
from draftsmith.decode.measurement.intervals import Estimate, ratio, ratio_difference
from draftsmith.decode.measurement.replay import Replay, TextReplay
from draftsmith.decode.replay.batch_replay import replay_by_position
from draftsmith.decode.replay.texts import WrittenText
from draftsmith.scripts.kinds import kind_named
from draftsmith.scripts.measure.config import MeasureConfig
from draftsmith.scripts.measure.estimates import Observation, same_length
from draftsmith.scripts.measure.predictions import costs_entry, curve_of, predicted_speedup
from draftsmith.scripts.measure.state import GREEDY, PROBABILISTIC, Group, Measured, Method, Row
from draftsmith.scripts.measure.verdict import comparisons, judge_forecasts, judge_runs, partial
from draftsmith.scripts.measure.winner import Timed, held_out_speedup
from draftsmith.scripts.report.entries import Forecast
from draftsmith.scripts.report.types import Failure, Gate, GatePart, ProposerEntry, Report, Run, Speed
from draftsmith.scripts.report.words import headline
from draftsmith.train.data.prompts import Prompt
from draftsmith.train.kinds.drafter import Drafter, Pair

LENGTHS = range(1, 5)


# The verdict


def batches(factor: float, count: int = 8, noise=(0.96, 1.05, 1.0, 0.99, 1.02, 0.97, 1.01, 1.0)) -> Observation:
    """Batches of 10 tokens, decoded about so many times as fast as one token a second."""
    seconds = [10 / factor * noise[i % len(noise)] for i in range(count)]
    return Observation([10] * count, seconds, [[i] for i in range(count)])


def run(proposer, k=4, temperature=0.0, rows=1, **figures) -> Run:
    """A run's entry, with figures that no test looks at unless it gives them."""
    rate, speed = Estimate(0.75, None, 8), Speed(9.0, None, 8, median=9.0)
    others = {
        "proposer": proposer, "draft_length": k, "temperature": temperature, "batch_size": rows, "alpha": rate,
        "draft_acceptance_rate": rate, "mean_acceptance_length": Estimate(2.5, (2.25, 2.75), 8), "speedup": rate,
        "tokens_per_second": speed, "lossless": Certificate(passed=True),
    }  # fmt: skip
    return Run(**(others | figures))


class Case:
    """Runs and what they were decoded in, set by set."""

    def __init__(self, count: int = 8):
        self.runs, self.count, self.observations, self.gains = [], count, {}, {}

    def add(self, name, speed, temperature=0.0, rows=1, k=4, kind="draft", lossless=True, gain=None):
        plain = batches(1.0, self.count)
        plain = self.observations[temperature, rows, Method()] = replace(plain, seconds=plain.seconds[::-1])
        self.observations[temperature, rows, Method(name, k)] = own = batches(speed, self.count)
        self.gains |= {} if gain is None else {(name, k, rows, temperature): gain}
        certificate = Certificate(passed=lossless, reason=None if lossless else "prompt 3, token 7")
        entry = ProposerEntry(name, kind, None, 0, 0)
        self.runs.append(run(entry, k, temperature, rows, speedup=own.speedup(plain), lossless=certificate))
        return self

    def judge(self, min_speedup=None, min_gain=None, confidence=0.95, require_test=True):
        asked = None
        if min_speedup is not None or min_gain is not None:
            asked = Gate(min_speedup, min_gain, confidence)
        return judge_runs(self.runs, self.observations, self.gains, asked, confidence, require_test)


def test_what_is_faster_for_certain_is_deployed():
    gate, verdict = Case().add("slow", 1.2).add("fast", 1.6, k=2).judge()
    assert gate is None and (verdict.go, verdict.key) == (True, ("fast", 2, 1, 0.0))
    assert verdict.measured_speedup.value == pytest.approx(1.6, rel=0.02)
    gate, verdict = Case().add("draft", 1.005).judge()
    assert verdict.measured_speedup.ci95[0] < 1 < verdict.measured_speedup.value
    assert gate is None and (verdict.go, verdict.proposer) == (False, "draft")
    assert verdict.reason.startswith("Don't deploy.") and verdict.reason.endswith("a speed-up above 1 is not shown.")
    # One batch alone says nothing.
    gate, verdict = Case(count=1).add("draft", 3.0).judge(min_speedup=1.1)
    assert len(gate.failures) == 1 and "too few" in gate.failures[0] and "needs 5" in gate.failures[0]
    assert verdict.go is False and verdict.measured_speedup.ci95 is None


@pytest.mark.parametrize("min_speedup", [None, 1.0])
def test_a_text_that_departs_is_never_deployed_and_named_before_the_speed(min_speedup):
    case = Case().add("draft", 0.9, lossless=False).add("other", 0.8)
    gate, verdict = case.judge(min_speedup=min_speedup)
    line = "the text is not the target's, for draft, γ = 4, at T = 0, batch size 1: prompt 3, token 7"
    assert line in verdict.reason and verdict.settings[0].departs
    assert gate is None or (gate.failures[0] == line and len(gate.failures) == 2)
    case.add("broken", 2.0, lossless=False)
    assert case.judge(min_speedup=min_speedup)[1].go is False
    _, verdict = case.add("third", 1.5).judge(min_speedup=min_speedup)
    assert (verdict.go, verdict.proposer) == (True, "third")
    both = Case().add("draft", 0.9, lossless=False).add("draft", 0.9, temperature=1.0)
    assert "NO-GO at T = 0: not the target's text" in headline_of(both, *both.judge())


def test_replayed_texts_give_tau_and_the_clock_gives_rounds():
    rng = np.random.default_rng(0)
    rounds, tokens, plain = rng.integers(20, 40, 8).tolist(), [64] * 8, batches(1.0)
    own = Observation(tokens, [0.5 * count for count in rounds], plain.prompts, rounds=rounds)
    plain = replace(plain, tokens=tokens, seconds=[64.0] * 8)
    assert own.speedup(plain).value == pytest.approx(64 * 8 / sum(rounds) / 0.5)
    # Of all 100 texts τ is 2, and a round takes half a token's time, so that nothing is uncertain.
    more = replace(own, replayed={i: (64.0, 32.0) for i in range(100)})
    assert more.speedup(plain).value == pytest.approx(4.0) and more.speedup(plain).n == 8
    assert np.ptp(more.speedup(plain).ci95) < 1e-9 < np.ptp(own.speedup(plain).ci95)
    assert more.speed().value == pytest.approx(4.0) and more.within({0, 1, 50}).units == [[0], [1], [50]]
    assert held_out_speedup({"only": {1: Timed.of(more, plain)}}, 1) == pytest.approx(4.0)


def test_the_gate_on_speed_is_passed_by_the_lower_bound_at_its_level():
    case = Case().add("draft", 1.5)
    own, plain = (case.observations[0.0, 1, method] for method in (Method("draft", 4), Method()))
    low = own.speedup_interval(plain, 0.8)[0]
    below, above = low - 1e-9, low + 1e-9
    gate, verdict = case.judge(min_speedup=below, confidence=0.8)
    parts = [GatePart(f"speed-up above {below:g}", True), GatePart("lossless text", True)]
    assert gate == Gate(below, None, 0.8, passed=True, failures=[], parts=parts)
    assert verdict.go is True
    for least, confidence in ((above, 0.8), (below, 0.99)):
        gate, verdict = case.judge(min_speedup=least, confidence=confidence)
        assert gate.passed is verdict.go is False and len(gate.failures) == 1
        assert f"{least:g}" in gate.failures[0] and f"{confidence:.0%} confidence" in gate.failures[0]
        assert gate.failures[0] in verdict.reason


def test_the_gate_on_the_gain_is_passed_by_its_lower_bound():
    case = Case().add("draft", 1.5, gain=Estimate(0.5, (0.2, 0.8), 8))
    assert case.judge(min_gain=0.1)[0].passed is True
    gate, verdict = case.judge(min_gain=0.2)
    assert gate.passed is verdict.go is False
    assert "+0.50" in gate.failures[0] and "+0.20" in gate.failures[0]
    assert [part.passed for part in gate.parts] == [True, False, True] and "gain of τ" in gate.parts[1].what
    # A gain that is asked for does not do away with the speed-up.
    gate, _ = Case().add("draft", 0.9, gain=Estimate(0.5, (0.2, 0.8), 8)).judge(min_gain=0.1)
    assert len(gate.failures) == 1 and "speed-up" in gate.failures[0]
    gate, _ = Case().add("draft", 1.5).judge(min_gain=0.1)
    assert gate.failures == ["no gain over a stock draft is known for draft, γ = 4, at T = 0, batch size 1"]
    # The stock draft is no candidate then.
    case = Case().add("stock", 1.8, kind="baseline_draft")
    gate, verdict = case.judge(min_gain=0.0)
    assert not gate.passed and "stock draft" in gate.failures[0] and (verdict.go, verdict.proposer) == (False, None)
    case.add("draft", 1.3, gain=Estimate(0.5, (0.2, 0.8), 8))
    assert [case.judge(min_gain=gain)[1].proposer for gain in (None, 0.0)] == ["stock", "draft"]


def test_sampled_text_whose_law_was_not_tested_is_not_deployed():
    case = Case().add("draft", 1.6).add("draft", 1.5, temperature=0.7)
    assert case.judge()[1].go is True
    case.runs[1] = replace(case.runs[1], lossless=unchecked("lossless_tokens is 0"))
    gate, verdict = case.judge(min_speedup=1.1)
    where = "for draft, γ = 4, at T = 0.7, batch size 1"
    line = f"the distribution of the text was not tested, {where}: lossless_tokens is 0"
    assert gate.failures == [line] and line in verdict.reason and verdict.go is False
    assert line in case.judge()[1].reason and case.judge()[1].go is False
    assert case.judge(min_speedup=1.1, require_test=False)[1].go is True
    case.runs[1] = replace(case.runs[1], lossless=Certificate(p_value=0.25, tokens=2000, passed=True))
    verdict = case.judge(min_speedup=1.1)[1]
    assert verdict.go and verdict.judged.endswith(
        "; at T = 0.7 the distribution of draft's text was tested on 2,000 tokens (p = 0.25)."
    )


def test_the_best_of_many_is_judged_at_a_level_that_holds_for_all():
    """The same setting passes alone and not beside others, however slow they are."""
    case = Case().add("draft", 1.045)
    alone = case.judge(min_speedup=1.0)[1]
    assert alone.go and alone.judged == (
        "One drafter with one γ was measured, and judged by Student's interval at 95% confidence."
    )
    for k in range(5, 16):
        case.add("draft", 0.9, k=k)
    gate, verdict = case.judge(min_speedup=1.0)
    assert not gate.passed and "must exceed 1 with 99.58% confidence" in gate.failures[0]
    assert verdict.judged.startswith("The best of 12 drafters and γ was taken. ")


@pytest.mark.parametrize("tested", [None, (), ("first",), ("first", "second")])
def test_the_winner_is_said_to_be_what_it_is_on_prompts_that_did_not_choose_it(tested):
    """Of two settings that are alike the one ahead is lucky, also where laws wait for their test (None: T = 0)."""
    case, luck, temperature = Case(), (0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0), 0.0 if tested is None else 1.0
    for name, noise in (("first", luck), ("second", luck[::-1])):
        case.add(name, 1.5, temperature=temperature)
        case.observations[temperature, 1, Method()] = plain = batches(1.0)
        case.observations[temperature, 1, Method(name, 4)] = own = batches(1.5, noise=noise)
        law = Certificate(p_value=0.25, tokens=2000, passed=True) if name in (tested or ()) else unchecked("waits")
        law = Certificate(passed=True) if tested is None else law
        case.runs[-1] = replace(case.runs[-1], speedup=own.speedup(plain), lossless=law)
    (first, second), (_, verdict) = case.runs, case.judge()
    assert first.speedup.value == second.speedup.value == pytest.approx(1.6)
    # Without its lucky prompt neither is the better one, and the other is taken for it.
    assert verdict.measured_speedup.value == pytest.approx(1.5)
    # Where one prompt alone is slow, the choice without it is a bad one there; its own interval bounds it.
    for name, noise in (("first", (1.0,)), ("second", (0.5,) * 7 + (8.0,))):
        case.observations[temperature, 1, Method(name, 4)] = batches(1.5, noise=noise)
    case.runs = [
        replace(each, speedup=Estimate(value, None, 8)) for each, value in zip(case.runs, (1.5, 1.0), strict=True)
    ]
    speedup = case.judge()[1].measured_speedup
    assert 1.4 < speedup.value == speedup.ci95[0]


def test_a_false_alarm_is_shared_by_all_comparisons_of_decoder_and_replay():
    columns = ([20] * 8, [10] * 8), ([20] * 8, [10.4, 9.9, 10.3, 10.0, 10.5, 9.9, 10.2, 10.4])
    assert [same_length(*columns, compared) for compared in (1, 2, 50)] == [False, True, True]


def test_the_winner_is_chosen_where_it_does_worst_and_never_by_a_batch_that_shares_a_prompt():
    plain = np.array([10.0] * 4)

    def timed(prompts, seconds):
        return Timed(prompts, np.stack([plain, np.array(seconds), plain, plain]))

    alone, pairs = [[0], [1], [2], [3]], [[0, 1], [2, 3], [4, 5], [6, 7]]
    settings = {
        "first": {1: timed(alone, [5.0] * 4), 2: timed(pairs, [20.0] * 4)},
        "second": {1: timed(alone, [8.0] * 4), 2: timed(pairs, [8.0] * 4)},
    }
    assert held_out_speedup(settings, 1) == pytest.approx(1.25)
    # In pairs the second is slow on what is never held out with the first four: it is seen all the same.
    settings["second"][2] = timed(pairs, [8.0, 8.0, 8.0, 100.0])
    assert held_out_speedup(settings, 1) == pytest.approx(2.0)
    assert held_out_speedup({"only": {1: timed([[0, 1]] * 4, [5.0] * 4)}}, 1) is None  # nothing is left to choose on


def test_a_setting_is_as_good_as_where_it_does_worst():
    case = Case().add("first", 2.0).add("first", 0.9, rows=4).add("second", 1.4).add("second", 1.2, temperature=1.0)
    gate, verdict = case.judge(min_speedup=1.05)
    assert gate.passed and (verdict.proposer, verdict.temperature) == ("second", 1.0)
    assert "(T = 1, batch size 1, the least of 2 measured)" in verdict.reason
    case.runs = case.runs[:2]
    gate, verdict = case.judge(min_speedup=1.05)
    assert not gate.passed and verdict.batch_size == 4 and "batch size 4" in gate.failures[0]
    # γ is part of a setting.
    case.add("first", 1.1, k=2).add("first", 1.1, k=2, rows=4)
    _, verdict = case.judge(min_speedup=1.05)
    assert (verdict.go, verdict.proposer, verdict.draft_length) == (True, "first", 2)


def headline_of(case, gate, verdict) -> str:
    go, part = verdict.go, any(each.go for each in verdict.settings)
    word = "GO" if go else "GO IN PART" if gate is None and part else "NO-GO"
    return headline(SimpleNamespace(recommendation=verdict, gate=gate, verdict=word, server=None))


def test_each_setting_has_a_verdict_of_its_own():
    case = Case().add("draft", 1.4).add("copies", 1.2)
    case.add("draft", 1.02, temperature=1.0).add("copies", 0.9, temperature=1.0)
    gate, verdict = case.judge()
    assert gate is None and verdict.go is False
    first, second = verdict.settings
    assert (first.go, first.key) == (True, ("draft", 4, 1, 0.0))
    assert (second.go, second.key) == (False, ("draft", 4, 1, 1.0))
    # The intervals of all four runs hold together.
    for each in verdict.settings:
        own, plain = (case.observations[each.temperature, 1, m] for m in (Method("draft", 4), Method()))
        assert each.speedup.ci95 == own.speedup_interval(plain, 1 - 0.05 / 4)
    assert second.speedup.ci95[0] < 1 < second.speedup.value
    low, high = second.speedup.ci95
    times = f"{second.speedup.value:.2f}× [{low:.2f}, {high:.2f}]"
    assert headline_of(case, gate, verdict) == f"GO at T = 0: {first.speedup.value:.2f}×; at T = 1: {times}, not shown"
    assert second.reason.endswith("(T = 1, batch size 1): a speed-up above 1 is not shown.")
    assert verdict.reason == f"Deploy where it pays: T = 0. {second.reason}"
    assert verdict.judged.startswith("The best of 2 drafters and γ was taken in each of 2 settings")
    # What is not shown to be faster has no test of its law, which is not what keeps it from being a GO.
    case.runs[2:] = [replace(run, lossless=unchecked("waits")) for run in case.runs[2:]]
    assert case.judge()[1].settings[1].reason == second.reason


@pytest.mark.parametrize("min_speedup", [None, 1.0])
def test_a_sentence_and_a_headline_show_no_interval_that_the_gate_does_not_judge_by(min_speedup):
    """With 95 % the speed-up at T = 1 is shown, with the level that is asked for it is not."""
    case = Case().add("draft", 1.4).add("draft", 1.045, temperature=1.0)
    gate, verdict = case.judge(min_speedup=min_speedup, confidence=0.99999)
    second = verdict.settings[1]
    assert verdict.settings[0].go and not second.go and second.speedup.ci95[0] > 1
    own, plain = (case.observations[1.0, 1, method] for method in (Method("draft", 4), Method()))
    low, high = own.speedup_interval(plain, 1 - 0.00001 / 2)
    assert low < 1 and f" [{low:.2f}, {high:.2f}] times as fast" in second.reason
    assert second.reason.endswith("batch size 1, all intervals at 100% confidence): a speed-up above 1 is not shown.")
    words = headline_of(case, gate, verdict)
    assert "NO-GO at T = 1: 1.04×" in words and "[" not in words


def test_the_gate_fails_if_one_setting_or_a_part_does():
    case = Case().add("draft", 1.4).add("draft", 1.02, temperature=1.0)
    gate, verdict = case.judge(min_speedup=1.0)
    assert not gate.passed and not verdict.go and "at T = 1" in gate.failures[0] and len(gate.failures) == 1
    words = headline_of(case, gate, verdict)
    assert words.startswith("NO-GO at T = 1: 1.02× [") and words.endswith("; GO at T = 0: 1.40×")
    gate, _ = partial(*Case().add("draft", 1.4).judge(min_speedup=1.0), [Failure("draft", "out of memory", 2)])
    assert not gate.passed and [part.what for part in gate.parts if not part.passed] == ["a whole report"]
    many = Case()
    for rows in range(1, 6):
        many.add("draft", 1.5 if rows < 3 else 0.9, rows=rows)
    assert headline_of(many, *many.judge()) == "GO in 2 of 5 settings"
    assert headline_of(many, *many.judge(min_speedup=1.0)) == "NO-GO in 3 of 5 settings"


def test_one_drafter_must_pass_in_all_settings_that_a_server_answers():
    """A server is started with one drafter: two that pay in one setting each are no GO for both."""
    case = Case().add("first", 1.5).add("first", 0.9, rows=4).add("second", 0.9).add("second", 1.5, rows=4)
    gate, verdict = case.judge()
    assert [(each.go, each.proposer) for each in verdict.settings] == [(True, "first"), (True, "second")]
    assert verdict.go is False and verdict.reason.startswith(
        "Each setting has a drafter that pays, but no drafter with one γ pays in all: the speed-up must exceed 1"
    )
    assert case.judge(min_speedup=1.0)[0].passed is False
    assert headline_of(case, gate, verdict) == "GO at batch size 1: 1.50×; at batch size 4: 1.50×"


# Comparisons


def replayed(acceptance: list[list[float]], lengths=LENGTHS) -> Replay:
    """What replay says of texts whose tokens are accepted with these probabilities."""
    texts = []
    for a in acceptance:
        a_N = torch.tensor(a, dtype=torch.float64)
        text = [WrittenText(torch.arange(len(a) + 1), 1, len(a))]
        of_text = replay_by_position(text, [a_N], [a_N])
        [whole] = of_text.stretches(text, [np.zeros(len(a), int)], lengths)
        counts = {k: of_text.counts(k)[0] for k in lengths}
        texts.append(TextReplay(counts, sum(a), len(a), tuple(a), stretches=whole))
    return Replay(texts)


def random_a(seed: int, level: float, texts: int = 6) -> list[list[float]]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.rand(10 + i, generator=generator) * level).tolist() for i in range(texts)]


def test_drafters_are_compared_two_by_two_where_both_were_replayed():
    a = {"stock": random_a(0, 0.6), "draft": random_a(1, 1.0), "medusa": random_a(2, 0.8)}
    replays = {(0.0, name, PROBABILISTIC): replayed(own) for name, own in a.items() if name != "medusa"}
    replays[0.0, "medusa", PROBABILISTIC] = replayed(a["medusa"], [2])
    replays[1.0, "draft", GREEDY] = replayed(a["draft"])
    replays[1.0, "draft", PROBABILISTIC] = replays[1.0, "stock", PROBABILISTIC] = replayed(a["stock"])
    found = comparisons(replays, [2, 4])
    named = {(c.temperature, c.proposer, c.other, c.draft_length): c for c in found}
    # Never the stock draft first, never two verifiers or a draft length that one lacks.
    assert set(named) == {
        (0.0, "draft", "stock", 2), (0.0, "draft", "stock", 4), (0.0, "medusa", "stock", 2),
        (0.0, "draft", "medusa", 2), (1.0, "draft", "stock", 2), (1.0, "draft", "stock", 4),
    }  # fmt: skip
    own = named[0.0, "draft", "stock", 4]
    sums = [replays[0.0, name, PROBABILISTIC].tokens_and_rounds(4) for name in ("draft", "stock")]
    assert own.mean_acceptance_length == ratio_difference(*sums[0], *sums[1])
    taus = [sum(tokens) / sum(rounds) for tokens, rounds in sums]
    assert own.mean_acceptance_length.value == pytest.approx(taus[0] - taus[1])
    alphas = [sum(map(sum, a[name])) / sum(map(len, a[name])) for name in ("draft", "stock")]
    assert own.alpha.value == pytest.approx(alphas[0] - alphas[1])
    assert own.mean_acceptance_length.ci95[0] > 0
    equal = named[1.0, "draft", "stock", 4]
    assert equal.mean_acceptance_length == Estimate(0.0, (0.0, 0.0), 6)


def forecast(name: str, temperature: float, low: float, k: int = 3) -> Forecast:
    speedup, bounds = Estimate(low + 0.1, (low + 0.05, low + 0.15), 8), (low, low + 0.2)
    return Forecast(name, k, temperature, 1, Estimate(2.0, None, 8), 0.01, 0.02, speedup, speedup, bounds)


@pytest.mark.parametrize(
    ("lows", "least", "word", "go", "says"),
    [
        # By name, the lower bounds at T = 0 and T = 1: the best has the higher of the lesser ones.
        ({"copies": (1.3, 1.01), "draft": (1.2, 1.1)}, None, "GO", [True, True], "draft with γ = 3 is forecast"),
        ({"copies": (1.3, 0.97), "draft": (0.9, 0.8)}, None, "GO IN PART", [True, False], "Deploy where it pays. cop"),
        ({"copies": (0.9, 0.9), "draft": (0.8, 0.7)}, None, "NO-GO", [False, False], "Don't deploy: copies with γ = 3"),
        ({"copies": (1.3, 1.1)}, 1.2, "NO-GO", [True, False], "Don't deploy: copies with"),
    ],
)
def test_forecasts_for_llama_cpp_are_judged_by_their_lower_bounds(lows, least, word, go, says):
    of = [forecast(name, t, bounds[int(t)]) for name, bounds in lows.items() for t in (0.0, 1.0)]
    gate, found = judge_forecasts(of, None if least is None else Gate(least, None, 0.95), 0.95)
    assert [verdict.go for verdict in found.settings] == go and found.reason.startswith(says), found
    assert found.go is all(go) and (gate is None or (gate.passed, len(gate.failures)) == (False, 1))
    report = SimpleNamespace(baseline=None, forecasts=of, failures=(), gate=gate, recommendation=found)
    assert Report.verdict.fget(report) == word


# Breaks and predictions

TABLE = CostTable(
    context=30,
    temperature=0.0,
    target_seconds={1: {1: 1.0, 5: 1.8}, 2: {1: 1.2, 5: 2.8}},
    plain_overhead_seconds={1: 0.1, 2: 0.2},
    prefill_seconds={1: 2.0, 2: 3.0},
    prompt=2,
    drafters={
        "draft": {1: DraftCosts(0.1, 0.05, 0.2, 0.3), 2: DraftCosts(0.2, 0.1, 0.3, 0.4)},
        "lookup": {1: DraftCosts(0.01, 0.0, 0.1, 0.0), 2: DraftCosts(0.02, 0.0, 0.1, 0.0)},
    },
)


def measured(tokenizer, texts, a, tables=(TABLE,), categories=(), rows: int = 1) -> Measured:
    target = tiny_llama(0)
    names = {"draft": "draft", "lookup": "prompt_lookup"}
    drafters = [
        Drafter(name, kind, kind_named(kind), None, SimpleNamespace(longest=None)) for name, kind in names.items()
    ]
    prompts = [
        Prompt(str(i), "", None, categories[i % len(categories)] if categories else None) for i in range(len(texts))
    ]
    groups = [
        Group([Row(i, texts[i], Counts()) for i in range(at, at + rows)], 1.0) for at in range(0, len(texts), rows)
    ]
    config = MeasureConfig("target", "prompts.jsonl", "out", ["prompt_lookup"])
    return Measured(
        config, Pair(target, tokenizer, "float32", drafters),
        prompts, [[1, 2]] * len(texts), {0.0: texts}, {(0.0, rows, Method()): groups},
        {(0.0, name, PROBABILISTIC): replayed(own) for name, own in a.items()}, tables, {}, [],
    )  # fmt: skip


@pytest.mark.parametrize("rows", [1, 2])
def test_the_predicted_speedup_is_costs_times_acceptance(tokenizer, rows):
    texts = [[0] * n for n in (9, 6, 8, 8)]
    a = [[0.5 + 0.1 * i] * len(text) for i, text in enumerate(texts)]
    own = measured(tokenizer, texts, {"draft": a}, rows=rows)
    groups = own.observations[0.0, rows, Method()]
    found = predicted_speedup(own, 0.0, own.drafter("draft"), 4, rows)
    replay = own.replays[0.0, "draft", PROBABILISTIC]
    seconds, plain = [], []
    for group in groups:
        rounds = sorted(replay.texts[row.prompt].counts[4].num_drafts for row in group.rows)
        tokens = sorted(len(row.tokens) for row in group.rows)
        if rows == 1:
            one = 0.1 + 4 * 0.05 + 0.2
            seconds.append(2.0 + 0.3 + one + (rounds[0] - 1) * (one + 1.8))
            plain.append(2.0 + (tokens[0] - 1) * 1.1)
        else:
            both, alone = 0.2 + 4 * 0.1 + 0.3 + 2.8, 0.1 + 4 * 0.05 + 0.2 + 1.8
            seconds.append(3.0 + 0.4 + rounds[0] * both + (rounds[1] - rounds[0]) * alone)
            plain.append(3.0 + tokens[0] * 1.4 + (tokens[1] - tokens[0]) * 1.1)
    assert found.value == pytest.approx(sum(plain) / sum(seconds))
    assert found.ci95 == pytest.approx(ratio(plain, seconds).ci95)
    # The curve, of the same texts and batches, says the same.
    curve = curve_of(own, 0.0, "draft", PROBABILISTIC, replay)
    assert curve.predicted_speedup[rows][4] == found
    # Without replay or costs it says nothing.
    assert predicted_speedup(measured(tokenizer, texts, {}), 0.0, own.drafter("draft"), 4, rows) is None
    bare = measured(tokenizer, texts, {"draft": a}, tables=())
    assert predicted_speedup(bare, 0.0, own.drafter("draft"), 4, rows) is None and costs_entry(bare) is None
