"""A server that is simulated from known rounds: it agrees with them, and each planted fault is named."""

import dataclasses

import numpy as np
import pytest

from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement import intervals
from draftsmith.decode.measurement.server_counts import ServerCounts, pooled, steps_of, vllm_counts
from draftsmith.scripts.measure.server.compare import reconcile
from draftsmith.scripts.measure.server.pairing import CountedAnswers, ServedSetting, ServedText
from draftsmith.scripts.report.rounds import SCHEMA, ExpectedText, RoundsSettings

GAMMA, TOKENS, PROMPTS = 3, 24, 32
DRAFTERS = {"draft": {"kind": "draft", "path": "a"}, "stock": {"kind": "draft", "path": "b"}}
SETTINGS = RoundsSettings(SCHEMA, "target", "float32", TOKENS, GAMMA, DRAFTERS, {})
SHARES = {("draft", "probabilistic"): 0.7, ("draft", "greedy"): 0.55, ("stock", "probabilistic"): 0.3}


@pytest.fixture(scope="module", autouse=True)
def _quick():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(intervals, "RESAMPLES", 1000)
        yield


def texts(temperature: float, seed: int = 0, prompts: int = PROMPTS) -> list[ExpectedText]:
    generator = np.random.default_rng(seed)
    found = []
    for i in range(prompts):
        accepted: dict = {}
        for (name, verifier), share in SHARES.items():
            if temperature or verifier == "probabilistic":
                values = generator.random(TOKENS + GAMMA)
                values = values < share if temperature == 0 else np.clip(values + share - 0.5, 0, 1)
                accepted.setdefault(name, {})[verifier] = values.astype(float).tolist()
        tokens = generator.integers(0, 50, TOKENS + GAMMA).tolist()
        margins = None if temperature else generator.uniform(0.001, 0.3, TOKENS).tolist()
        found.append(ExpectedText(f"p{i}", temperature, [1, 2, 3 + i], tokens, TOKENS, margins, accepted))
    return found


def served(
    of: list[ExpectedText], drafter="draft", verifier="probabilistic", seed=1
) -> tuple[list[ServedText], list[ServerCounts]]:
    """What a server answers that drafts so, and its counts: at T=0 the expected texts, otherwise its own draws."""
    generator = np.random.default_rng(seed)
    answers, counts = [], []
    for text in of:
        a_TK = text.acceptance(drafter, verifier, GAMMA)
        drawn = (generator.random(a_TK.shape[0]) < a_TK[:, 0]).astype(float)
        certain = np.lib.stride_tricks.sliding_window_view(np.pad(drawn, (0, GAMMA - 1)), GAMMA)
        tokens = list(text.tokens[:TOKENS])
        if text.temperature:
            tokens = generator.integers(0, 50, TOKENS).tolist()
        counts.append(vllm_counts(certain, TOKENS, GAMMA))
        parts = steps_of(certain, TOKENS, GAMMA)
        answers.append(ServedText(text.prompt, TOKENS, list(text.prompt_ids), tokens, parts))
    return answers, counts


def by_turn(counts: list[ServerCounts], answers: int) -> list[CountedAnswers]:
    """The counts of turns of so many answers each."""
    turns = [range(i, min(i + answers, len(counts))) for i in range(0, len(counts), answers)]
    return [CountedAnswers(turn, pooled([counts[i] for i in turn])) for turn in turns]


def compare(
    of,
    answers,
    counts,
    temperature=0.0,
    drafter="draft",
    verifier="probabilistic",
    plain=(),
    concurrency=1,
    dtype="float32",
    turn=1,
):
    asked = ServedSetting(drafter, verifier, temperature, GAMMA, concurrency)
    settings = dataclasses.replace(SETTINGS, dtype=dtype)
    return reconcile("out", settings, of, asked, answers, by_turn(counts, turn), plain)


@pytest.mark.parametrize("turn", [1, 4])
def test_a_server_that_does_as_expected_agrees_to_the_integer(turn):
    of = texts(0.0)
    found = compare(of, *served(of), turn=turn)
    assert found.agrees and found.exact and found.expected == found.counted and found.causes == []
    assert (found.same_prompts, found.same_texts) == (PROMPTS, PROMPTS)
    assert found.first_position is found.departure is None
    assert [shares.expected for shares in found.positions] == [shares.counted for shares in found.positions]


def test_one_token_too_many_is_seen():
    of = texts(0.0)
    answers, counts = served(of)
    counts[0] += ServerCounts(0, 0, 1, (0,) * (GAMMA - 1) + (1,))
    found = compare(of, answers, counts)
    assert not found.agrees and found.first_position == GAMMA and found.causes[0].name == "draft"


def test_a_server_that_counts_no_drafts_past_the_end_is_told():
    of = texts(0.0)
    accepted = [text.acceptance("draft", "probabilistic", GAMMA) for text in of]
    counts = [vllm_counts(a_TK, TOKENS, GAMMA, past_end=False) for a_TK in accepted]
    found = compare(of, served(of)[0], counts)
    assert not found.agrees and [cause.name for cause in found.causes] == ["counting"]


def test_several_requests_at_once_may_cut_a_few_drafts_short():
    of = texts(0.0)
    answers, counts = served(of)
    assert compare(of, answers, counts, concurrency=4, turn=4).exact
    cut = [counts[0] - ServerCounts(0, 2, 0), *counts[1:]]
    found = compare(of, answers, cut, concurrency=4, turn=4)
    assert found.agrees and not found.exact
    assert not compare(of, answers, cut, turn=4).agrees
    assert not compare(of, answers, served(of, "stock")[1], concurrency=4, turn=4).agrees


def test_another_draft_is_named_and_its_first_round():
    of = texts(0.0)
    answers, counts = served(of, "stock")
    found = compare(of, answers, counts)
    assert not found.agrees and found.exact and found.first_position == 1
    assert [cause.name for cause in found.causes] == ["another drafter"] and "'stock' (b)" in found.causes[0].evidence
    assert found.departure.what == "round" and found.departure.prompt == "p0"
    unknown, counts = served(texts(0.0, seed=5), "draft")  # acceptance of nothing in the report
    mixed = [dataclasses.replace(one, parts=other.parts) for one, other in zip(answers, unknown, strict=True)]
    found = compare(of, mixed, counts)
    assert not found.agrees and found.causes[0].name == "draft" and found.same_texts == PROMPTS


def test_another_template_is_named_first():
    of = texts(0.0)
    answers, counts = served(of, "stock")
    answers = [dataclasses.replace(one, prompt_ids=[9, *one.prompt_ids], token_ids=[7] * TOKENS) for one in answers]
    found = compare(of, answers, counts)
    assert [cause.name for cause in found.causes] == ["template"] and found.same_prompts == 0
    assert (found.departure.what, found.departure.token, found.departure.expected) == ("prompt", 0, "token 1")
    assert "4 there and 3 here, and differs at its token 0" in found.causes[0].evidence


def altered(of, answers, margin):
    """Answers whose every third text parts where the target's margin is `margin`."""
    of = [dataclasses.replace(text, margins=[0.2] * 5 + [margin] + [0.2] * (TOKENS - 6)) for text in of]
    changed = [
        dataclasses.replace(one, token_ids=[*one.token_ids[:5], 50, *one.token_ids[6:]]) if i % 3 == 0 else one
        for i, one in enumerate(answers)
    ]
    return of, changed


@pytest.mark.parametrize("turn", [1, 4])
@pytest.mark.parametrize(("dtype", "margin"), [("bfloat16", 0.01), ("float16", 0.001)])
def test_rounding_in_half_precision_is_no_departure(dtype, margin, turn):
    of = texts(0.0)
    answers, counts = served(of)
    # In every fourth text rounding took one drafted token or gave one; and the sums are not the same integers.
    counts = [one + ServerCounts(0, 0, 0, (1 if i % 8 else -1,)) if i % 4 == 0 else one for i, one in enumerate(counts)]
    counts[0] += ServerCounts(0, 0, 1)
    of, answers = altered(of, answers, margin)
    found = compare(of, answers, counts, dtype=dtype, turn=turn)
    assert found.agrees and not found.exact and found.departure is None and found.causes == []
    assert (found.same_texts, found.near_ties) == (PROMPTS - 11, 11)
    exactly = compare(of, answers, counts, turn=turn)
    assert not exactly.agrees and exactly.near_ties is None and exactly.departure.what == "text"


@pytest.mark.parametrize(("dtype", "margin"), [("bfloat16", 0.02), ("float16", 0.005)])
def test_a_text_that_parts_where_the_target_is_sure_departs_in_half_precision_too(dtype, margin):
    of = texts(0.0)
    right, counts = served(of)
    of, answers = altered(of, right, margin)
    found = compare(of, answers, counts, dtype=dtype)
    assert not found.agrees and found.near_ties == 0 and found.departure.what == "text"
    longer = [dataclasses.replace(one, token_ids=[*one.token_ids, 1]) for one in right]  # no margin is known there
    assert not compare(of, longer, counts, dtype=dtype).agrees


def test_another_draft_is_seen_in_half_precision_beside_near_ties():
    of = texts(0.0)
    answers, counts = served(of, "stock")
    of, answers = altered(of, answers, 0.001)
    found = compare(of, answers, counts, dtype="bfloat16")
    assert not found.agrees and not found.exact and found.first_position == 1 and found.near_ties == 11
    assert [cause.name for cause in found.causes] == ["another drafter"] and "near-ties" in found.causes[0].evidence
    assert (found.departure.what, found.departure.prompt) == ("round", "p1")  # the first whose text is the same


def test_equal_counts_in_half_precision_are_equal_integers():
    of = texts(0.0)
    found = compare(of, *served(of), dtype="bfloat16")
    assert found.agrees and found.exact and found.near_ties == 0


@pytest.mark.parametrize(("margin", "names"), [(0.001, ["dtype", "target"]), (0.11, ["target"])])
def test_another_target_is_told_from_another_dtype_by_its_margins(margin, names):
    of = texts(0.0)
    answers, counts = served(of)
    of, answers = altered(of, answers, margin)
    found = compare(of, answers, counts)
    assert not found.agrees and not found.exact and found.same_texts == PROMPTS - 11
    assert [cause.name for cause in found.causes] == names
    assert (found.departure.what, found.departure.prompt, found.departure.token) == ("text", "p0", 5)
    assert found.departure.found == "token 50"


def test_a_server_whose_plain_text_is_right_is_not_lossless():
    of = texts(0.0)
    plain, counts = served(of)
    of, answers = altered(of, plain, 0.1)
    found = compare(of, answers, counts, plain=plain)
    assert found.causes[0].name == "not lossless" and "of 11 of them" in found.causes[0].evidence


@pytest.mark.parametrize("turn", [1, 4])
def test_sampled_counts_agree_within_their_interval(turn):
    """20 servers; 1 % of false alarms each is at most 3 with a probability above 0.9999."""
    of, alarms = texts(1.0), 0
    for seed in range(20):
        found = compare(of, *served(of, seed=seed), temperature=1.0, turn=turn)
        alarms += not found.agrees
        assert not found.exact and found.same_texts is None
    assert alarms <= 3


@pytest.mark.parametrize(("prompts", "turn"), [(4, 1), (16, 4)])
def test_counts_too_few_for_an_interval_prove_nothing(prompts, turn):
    of = texts(1.0, prompts=prompts)
    with pytest.raises(InputError, match=r"expected counts of at least 5 answers or turns, .* found 4"):
        compare(of, *served(of), temperature=1.0, turn=turn)


@pytest.mark.parametrize(("prompts", "turn"), [(32, 1), (120, 12)])
def test_greedy_drafts_are_told_from_drawn_ones(prompts, turn):
    of = texts(1.0, prompts=prompts)
    answers, counts = served(of, verifier="greedy")
    found = compare(of, answers, counts, temperature=1.0, turn=turn)
    assert not found.agrees and found.first_position == 1 and found.causes[0].name == "draft sampling"
    assert "probabilistic" in found.causes[0].remedy
    assert compare(of, answers, counts, temperature=1.0, verifier="greedy", turn=turn).agrees


def test_what_the_report_does_not_know_is_refused():
    of = texts(0.0)
    answers, counts = served(of)
    with pytest.raises(InputError, match=r"expect: expected a report of T = 0\.5, found T = 0"):
        compare(of, answers, counts, temperature=0.5)
    with pytest.raises(InputError, match="drafter: expected one of the report's, draft, stock, found 'other'"):
        compare(of, answers, counts, drafter="other")
    with pytest.raises(InputError, match="expect: expected a report of the same prompts, found none of 32 of 32"):
        compare(of, [dataclasses.replace(one, prompt=f"q{one.prompt}") for one in answers], counts)
    with pytest.raises(InputError, match="rounds of up to 9 tokens, which the server drafts, found 3"):
        reconcile("out", SETTINGS, of, ServedSetting("draft", "probabilistic", 0.0, 9), answers, by_turn(counts, 1))
    with pytest.raises(InputError, match=r"the rounds of stock \(greedy\)"):
        compare(of, answers, counts, drafter="stock", verifier="greedy")
