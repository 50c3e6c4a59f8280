"""The estimator of a server's τ and α, against servers whose every step is known: docs/log/server-counts.md."""

import random
from itertools import product

import numpy as np
import pytest
from server_steps import SteppingServer, together

from draftsmith.decode.measurement import intervals
from draftsmith.decode.measurement.intervals import LEAST
from draftsmith.decode.measurement.server_counts import VLLM, Convention, ServerCounts, vllm_counts
from draftsmith.scripts.serving.server_steps import CountedTexts, ServerSteps, server_steps

LENGTHS = {"at the limit": [24] * 12, "short": [random.Random(i).randint(1, 7) for i in range(12)]}
LENGTHS["mixed"] = [random.Random(i).randint(1, 50) for i in range(12)]
SERVERS = {
    "vLLM, a turn of several texts": lambda texts: [together(texts[i : i + 3]) for i in range(0, 12, 3)],
    "vLLM, all texts": lambda texts: [together(texts)],
    "vLLM or SGLang, each answer": lambda texts: texts,
    "batches of four": lambda texts: [together(texts, 4)],
}
CONVENTIONS = [Convention(*of) for of in product((False, True), repeat=3)]


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(intervals, "RESAMPLES", 100)


def check(server: SteppingServer, found: ServerSteps) -> tuple[bool, bool]:
    """Require what is said to be so; return whether τ and α are known."""
    truth, known = server.truth, list[bool]()
    for estimate, bounds, right, most in (
        (found.mean_acceptance_length(), found.length_bounds(), truth.tau, server.gamma + 1),
        (found.alpha(), found.alpha_bounds(), truth.alpha, 1),
    ):
        known.append(estimate.value is not None)
        if estimate.value is not None:
            assert estimate.value == pytest.approx(right)
        if bounds is not None:
            assert bounds[0] - 1e-9 <= right <= bounds[1] + 1e-9
        if estimate.ci95 is not None:
            assert most - server.gamma <= estimate.ci95[0] <= estimate.ci95[1] <= most or most == 1
            assert estimate.ci95[0] >= 0 and estimate.ci95[1] <= most
    assert found.readings and found.mean_acceptance_length().value in (None, pytest.approx(truth.tau))
    return known[0], known[1]


@pytest.mark.parametrize("positions", [True, False], ids=["by position", "sums alone"])
@pytest.mark.parametrize("convention", CONVENTIONS, ids=str)
@pytest.mark.parametrize("counted", SERVERS)
def test_every_convention_beside_every_server(counted, convention, positions):
    """τ of answers whose parts are steps is always known, and what is said of τ and α is always so."""
    if counted == "batches of four" and not positions:
        return  # which of tokens and rows is γ is not told
    for (length, lengths), alpha, gamma in product(LENGTHS.items(), (0.0, 0.3, 0.7, 0.95, 1.0), (1, 4, 8)):
        server = SteppingServer(convention, alpha, gamma, seed=17, positions=positions)
        found = server_steps(SERVERS[counted]([server.text(tokens, i) for i, tokens in enumerate(lengths)]))
        tau, known = check(server, found)
        parts = sum(len(text) for text in (range(0, tokens, gamma + 1) for tokens in lengths))
        assert tau or (convention.prompt_drafts and (length == "short" or alpha > 0.5 or parts < LEAST * 12))
        if positions and counted == "vLLM or SGLang, each answer" and tau:
            assert known
        if tau and counted != "batches of four":
            words = found.convention()
            assert ("step drafts too" in words) == convention.prompt_drafts
            assert not convention.bonus or "own token counts" in words


@pytest.mark.parametrize("beyond_end", [True, False])
@pytest.mark.parametrize("counted", ["vLLM, a turn of several texts", "vLLM or SGLang, each answer"])
def test_a_perfect_draft_has_an_alpha_of_one(counted, beyond_end):
    """Also where the end of each text cuts its only step."""
    server = SteppingServer(Convention(beyond_end=beyond_end), 1.0, 8)
    found = server_steps(SERVERS[counted]([server.text(4, i) for i in range(12)]))
    assert found.alpha().value == 1.0 and found.mean_acceptance_length().value == 3.0
    assert found.mean_acceptance_length().ci95 == (3.0, 3.0)


@pytest.mark.parametrize("convention", CONVENTIONS, ids=str)
def test_steps_that_come_together_leave_bounds_that_hold_the_truth(convention):
    for alpha, gamma, counted in product((0.2, 0.6, 0.95), (2, 6), SERVERS):
        server = SteppingServer(convention, alpha, gamma, seed=3, merges=True)
        check(server, server_steps(SERVERS[counted]([server.text(tokens, i) for i, tokens in enumerate([30] * 12)])))


def test_drafted_tokens_may_count_up_to_the_end_alone():
    server = SteppingServer(Convention(beyond_end=False), 0.7, 4, drafted_to_end=True)
    assert check(server, server_steps([together([server.text(n, n) for n in range(5, 30)])])) == (True, True)


def test_what_nothing_explains_gives_no_figure():
    for counts in (ServerCounts(50, 200, 10, (10, 0, 0, 0)), ServerCounts(2, 8, 1, (1, 0, 0, 0))):
        found = server_steps([CountedTexts(counts, 40, 1)])
        assert found.convention() is found.length_bounds() is found.mean_acceptance_length().value is None
        assert found.alpha().value is None


def test_what_is_expected_of_a_text_is_what_a_server_of_the_convention_counts():
    """At T = 0, of a text whose draft is always right: its rounds, walked by the simulated server."""
    for convention in (VLLM, Convention(beyond_end=False), Convention(True), Convention(True, False)):
        for tokens in (1, 2, 4, 9, 10, 23):
            server = SteppingServer(convention, 1.0, 4)
            counts = server.text(tokens, 0).counts
            expected = vllm_counts(np.ones((tokens + 4, 4)), tokens, 4, convention=convention)
            assert expected.same_as(counts)
