"""A server that is simulated from known rounds: it agrees with them, and each planted fault is named."""

import dataclasses

import numpy as np
import pytest

from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement import intervals
from draftsmith.decode.measurement.server_counts import (
    VLLM,
    Convention,
    ServerCounts,
    in_words,
    pooled,
    steps_of,
    vllm_counts,
)
from draftsmith.scripts.serving.reconcile.compare import reconcile
from draftsmith.scripts.serving.reconcile.pairing import ServedSetting, ServedText
from draftsmith.scripts.serving.reconcile.rounds import SCHEMA, ExpectedText, RoundsSettings

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
    of: list[ExpectedText], drafter="draft", verifier="probabilistic", seed=1, by_prompt=True
) -> list[ServedText]:
    """What a server answers that drafts so: at T=0 the expected texts, otherwise its own draws."""
    generator = np.random.default_rng(seed)
    answers = []
    for text in of:
        a_TK = text.acceptance(drafter, verifier, GAMMA)
        drawn = (generator.random(a_TK.shape[0]) < a_TK[:, 0]).astype(float)
        certain = np.lib.stride_tricks.sliding_window_view(np.pad(drawn, (0, GAMMA - 1)), GAMMA)
        tokens = list(text.tokens[:TOKENS])
        if text.temperature:
            tokens = generator.integers(0, 50, TOKENS).tolist()
        counts = vllm_counts(certain, TOKENS, GAMMA)
        parts = steps_of(certain, TOKENS, GAMMA)
        answers.append(
            ServedText(text.prompt, TOKENS, list(text.prompt_ids), tokens, parts, counts if by_prompt else None)
        )
    return answers


def totals(answers: list[ServedText], of: list[ExpectedText], **how) -> ServerCounts:
    return pooled([answer.counts for answer in served(of, **how)])


def compare(
    of,
    answers,
    total,
    temperature=0.0,
    drafter="draft",
    verifier="probabilistic",
    plain=(),
    concurrency=1,
    dtype="float32",
):
    asked = ServedSetting(drafter, verifier, temperature, GAMMA, concurrency)
    return reconcile("out", dataclasses.replace(SETTINGS, dtype=dtype), of, asked, answers, total, plain)


@pytest.mark.parametrize("by_prompt", [True, False])
def test_a_server_that_does_as_expected_agrees_to_the_integer(by_prompt):
    of = texts(0.0)
    answers = served(of, by_prompt=by_prompt)
    found = compare(of, answers, totals(answers, of))
    assert found.agrees and found.exact and found.expected == found.counted and found.causes == []
    assert (found.same_prompts, found.same_texts, found.first_position, found.departure) == (
        PROMPTS,
        PROMPTS,
        None,
        None,
    )
    assert [shares.expected for shares in found.positions] == [shares.counted for shares in found.positions]


def test_one_token_too_many_is_seen():
    of = texts(0.0)
    answers, right = served(of), totals(served(of), of)
    per_pos = (*right.num_accepted_tokens_per_pos[:-1], right.num_accepted_tokens_per_pos[-1] + 1)
    wrong = dataclasses.replace(
        right, num_accepted_tokens=right.num_accepted_tokens + 1, num_accepted_tokens_per_pos=per_pos
    )
    found = compare(of, answers, wrong)
    assert not found.agrees and found.first_position == GAMMA and found.causes[0].name == "draft dtype"


def test_several_requests_at_once_may_cut_a_few_drafts_short():
    of = texts(0.0)
    answers, right = served(of, by_prompt=False), totals(served(of), of)
    assert compare(of, answers, right, concurrency=4).exact
    cut = dataclasses.replace(right, num_draft_tokens=right.num_draft_tokens - 2)
    found = compare(of, answers, cut, concurrency=4)
    assert found.agrees and not found.exact
    assert not compare(of, answers, cut).agrees
    assert not compare(of, answers, totals(answers, of, drafter="stock"), concurrency=4).agrees


def test_another_draft_is_named_and_its_first_round():
    of = texts(0.0)
    answers = served(of, "stock")
    found = compare(of, answers, totals(answers, of, drafter="stock"))
    assert not found.agrees and found.exact and found.first_position == 1
    assert [cause.name for cause in found.causes] == ["another drafter"] and "'stock' (b)" in found.causes[0].evidence
    assert found.departure.what == "round" and found.departure.prompt == "p0"
    unknown = served(texts(0.0, seed=5), "draft")  # acceptance of nothing in the report
    mixed = [
        dataclasses.replace(one, parts=other.parts, counts=other.counts)
        for one, other in zip(answers, unknown, strict=True)
    ]
    found = compare(of, mixed, pooled([one.counts for one in mixed]))
    assert not found.agrees and found.causes[0].name in ("draft", "draft dtype") and found.same_texts == PROMPTS


def test_another_template_is_named_first():
    of = texts(0.0)
    answers = [dataclasses.replace(one, prompt_ids=[9, *one.prompt_ids], token_ids=[7] * TOKENS) for one in served(of)]
    found = compare(of, answers, totals(answers, of, drafter="stock"))
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


def rounded(answers: list[ServedText]) -> list[ServedText]:
    """The same answers, in every fourth of which rounding took one drafted token or gave one."""
    found = list(answers)
    for i in range(0, len(found), 4):
        accepted = found[i].counts.num_accepted_tokens_per_pos
        moved = (accepted[0] + (1 if i % 8 else -1), *accepted[1:])
        found[i] = dataclasses.replace(
            found[i], counts=dataclasses.replace(found[i].counts, num_accepted_tokens_per_pos=moved)
        )
    return found


@pytest.mark.parametrize("by_prompt", [True, False])
@pytest.mark.parametrize(("dtype", "margin"), [("bfloat16", 0.01), ("float16", 0.001)])
def test_rounding_in_half_precision_is_no_departure(dtype, margin, by_prompt):
    of = texts(0.0)
    of, answers = altered(of, rounded(served(of)), margin)
    total = pooled([one.counts for one in answers])
    total = dataclasses.replace(total, num_accepted_tokens=total.num_accepted_tokens + 1)  # not the same integers
    if not by_prompt:
        answers = [dataclasses.replace(one, counts=None) for one in answers]
    found = compare(of, answers, total, dtype=dtype)
    assert found.agrees and not found.exact and found.departure is None and found.causes == []
    assert (found.same_texts, found.near_ties) == (PROMPTS - 11, 11)
    exactly = compare(of, answers, total)
    assert not exactly.agrees and exactly.near_ties is None and exactly.departure.what == "text"


@pytest.mark.parametrize(("dtype", "margin"), [("bfloat16", 0.02), ("float16", 0.005)])
def test_a_text_that_parts_where_the_target_is_sure_departs_in_half_precision_too(dtype, margin):
    of = texts(0.0)
    of, answers = altered(of, served(of), margin)
    found = compare(of, answers, totals(answers, of), dtype=dtype)
    assert not found.agrees and found.near_ties == 0 and found.departure.what == "text"
    longer = [dataclasses.replace(one, token_ids=[*one.token_ids, 1]) for one in served(of)]  # no margin is known there
    assert not compare(of, longer, totals(longer, of), dtype=dtype).agrees


def test_another_draft_is_seen_in_half_precision_beside_near_ties():
    of = texts(0.0)
    of, answers = altered(of, served(of, "stock"), 0.001)
    found = compare(of, answers, totals(answers, of, drafter="stock"), dtype="bfloat16")
    assert not found.agrees and not found.exact and found.first_position == 1 and found.near_ties == 11
    assert [cause.name for cause in found.causes] == ["another drafter"] and "near-ties" in found.causes[0].evidence
    assert (found.departure.what, found.departure.prompt) == ("round", "p1")  # the first whose text is the same


def test_equal_counts_in_half_precision_are_equal_integers():
    of = texts(0.0)
    answers = served(of)
    found = compare(of, answers, totals(answers, of), dtype="bfloat16")
    assert found.agrees and found.exact and found.near_ties == 0


@pytest.mark.parametrize(("margin", "names"), [(0.001, ["dtype", "target"]), (0.11, ["target"])])
def test_another_target_is_told_from_another_dtype_by_its_margins(margin, names):
    of = texts(0.0)
    of, answers = altered(of, served(of), margin)
    found = compare(of, answers, totals(answers, of))
    assert not found.agrees and not found.exact and found.same_texts == PROMPTS - 11
    assert [cause.name for cause in found.causes] == names
    assert (found.departure.what, found.departure.prompt, found.departure.token) == ("text", "p0", 5)
    assert found.departure.found == "token 50"


def test_a_server_whose_plain_text_is_right_is_not_lossless():
    of = texts(0.0)
    plain = served(of)
    of, answers = altered(of, plain, 0.1)
    found = compare(of, answers, totals(answers, of), plain=plain)
    assert found.causes[0].name == "not lossless" and "of 11 of them" in found.causes[0].evidence


@pytest.mark.parametrize("by_prompt", [True, False])
def test_sampled_counts_agree_within_their_interval(by_prompt):
    """20 servers; 1 % of false alarms each is at most 3 with a probability above 0.9999."""
    of, alarms = texts(1.0), 0
    for seed in range(20):
        answers = served(of, seed=seed, by_prompt=by_prompt)
        found = compare(of, answers, totals(answers, of, seed=seed), temperature=1.0)
        alarms += not found.agrees
        assert not found.exact and found.same_texts is None
    assert alarms <= 3


@pytest.mark.parametrize("by_prompt", [True, False])
def test_answers_too_few_for_an_interval_prove_nothing(by_prompt):
    of = texts(1.0, prompts=4)
    answers = served(of, by_prompt=by_prompt)
    with pytest.raises(InputError, match=r"expected answers to at least 5 prompts, .* found 4"):
        compare(of, answers, totals(answers, of), temperature=1.0)


@pytest.mark.parametrize(("by_prompt", "prompts"), [(True, 32), (False, 256)])
def test_greedy_drafts_are_told_from_drawn_ones(by_prompt, prompts):
    """Counts of each answer tell more than their sum."""
    of = texts(1.0, prompts=prompts)
    answers = served(of, verifier="greedy", by_prompt=by_prompt)
    total = totals(answers, of, verifier="greedy")
    found = compare(of, answers, total, temperature=1.0)
    assert not found.agrees and found.first_position == 1 and found.causes[0].name == "draft sampling"
    assert "probabilistic" in found.causes[0].remedy
    assert compare(of, answers, total, temperature=1.0, verifier="greedy").agrees


def test_what_the_report_does_not_know_is_refused():
    of = texts(0.0)
    answers = served(of)
    total = totals(answers, of)
    with pytest.raises(InputError, match=r"expect: expected a report of T = 0\.5, found T = 0"):
        compare(of, answers, total, temperature=0.5)
    with pytest.raises(InputError, match="drafter: expected one of the report's, draft, stock, found 'other'"):
        compare(of, answers, total, drafter="other")
    with pytest.raises(InputError, match="expect: expected a report of the same prompts, found none of 32 of 32"):
        compare(of, [dataclasses.replace(one, prompt=f"q{one.prompt}") for one in answers], total)
    with pytest.raises(InputError, match="rounds of up to 9 tokens, which the server drafts, found 3"):
        reconcile("out", SETTINGS, of, ServedSetting("draft", "probabilistic", 0.0, 9), answers, total)
    with pytest.raises(InputError, match=r"the rounds of stock \(greedy\)"):
        compare(of, answers, total, drafter="stock", verifier="greedy")


@pytest.mark.parametrize("convention", [Convention(beyond_end=False), Convention(prompt_drafts=True)], ids=str)
def test_a_server_that_counts_otherwise_agrees_and_its_convention_is_named(convention):
    """With vLLM's convention alone, the same counts depart."""
    of = texts(0.0)
    counts = [
        vllm_counts(text.acceptance("draft", "probabilistic", GAMMA), TOKENS, GAMMA, convention=convention)
        for text in of
    ]
    answers = [dataclasses.replace(one, counts=each) for one, each in zip(served(of), counts, strict=True)]
    asked = ServedSetting("draft", "probabilistic", 0.0, GAMMA)
    found = reconcile("out", SETTINGS, of, asked, answers, pooled(counts), conventions=[VLLM, convention])
    assert found.agrees and found.exact and found.convention == in_words([convention])
    assert not compare(of, answers, pooled(counts)).agrees
