"""What a server counts, against rounds that are walked one by one."""

import json
from dataclasses import asdict

import numpy as np
import pytest

from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement.server_counts import Counted, ServerCounts, pooled, possible, steps_of, vllm_counts
from draftsmith.decode.validation import parse


def by_start(agrees: list[int], draft_length: int) -> np.ndarray:
    padded = np.array([*agrees, *[0] * (draft_length - 1)], dtype=np.float64)
    return np.lib.stride_tricks.sliding_window_view(padded, draft_length)


def walked(agrees: list[int], tokens: int, draft_length: int) -> ServerCounts:
    """The engine's own loop: a step for the prompt, then drafts of full length until the text is long enough."""
    emitted, drafts, per_pos = 1, 0, [0] * draft_length
    while emitted < tokens:
        accepted = 0
        while accepted < draft_length and agrees[emitted + accepted]:
            per_pos[accepted] += 1
            accepted += 1
        drafts += 1
        emitted += accepted + 1
    return ServerCounts(drafts, drafts * draft_length, sum(per_pos), tuple(per_pos))


@pytest.mark.parametrize("draft_length", [1, 2, 4, 7])
@pytest.mark.parametrize("tokens", [1, 2, 3, 17, 64])
def test_certain_counts_are_those_of_the_loop(draft_length, tokens):
    generator = np.random.default_rng(tokens)
    for share in (0.0, 0.3, 0.8, 1.0):
        agrees = (generator.random(tokens + draft_length) < share).astype(int).tolist()
        a_TK = by_start(agrees, draft_length)
        counts = vllm_counts(a_TK, tokens, draft_length)
        assert counts == walked(agrees, tokens, draft_length)
        steps = steps_of(a_TK, tokens, draft_length)
        assert len(steps) == 1 + counts.num_drafts and sum(steps) == tokens


def test_rounds_that_draft_less_are_counted_as_they_are():
    agrees = by_start([1] * 12, 4).copy()
    drafted = np.array([4, 0, 2, 0, 0, 9, 0, 0, 0, 0, 0, 0])
    agrees[2, 2:] = 0.0
    # The prompt's token; nothing drafted at 1; two of two at 2; four of four at 5; the text ends at 10.
    counts = vllm_counts(agrees, 8, 4, drafted_T=drafted)
    assert counts == ServerCounts(2, 2 + 4, 2 + 4, (2, 2, 1, 1))


def test_expected_counts_are_the_mean_over_draws():
    """Over 5,000 draws the mean of each count lies within 5 standard errors: false alarms below 1e-5."""
    generator, tokens, gamma = np.random.default_rng(0), 12, 3
    a_N = generator.random(tokens + gamma)
    expected = vllm_counts(by_start(a_N.tolist(), gamma), tokens, gamma)
    # A token is accepted or not whatever round drafts it, for a round meets each position once.
    draws = [walked((generator.random(tokens + gamma) < a_N).astype(int).tolist(), tokens, gamma) for _ in range(5_000)]
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        values = np.array([getattr(draw, name) for draw in draws])
        assert abs(values.mean() - getattr(expected, name)) < 5 * values.std() / len(values) ** 0.5
    per_pos = np.array([draw.num_accepted_tokens_per_pos for draw in draws])
    off = np.abs(per_pos.mean(0) - expected.num_accepted_tokens_per_pos)
    assert (off < 5 * per_pos.std(0) / len(draws) ** 0.5).all()


def test_the_servers_context_bounds_the_last_drafts():
    agrees = by_start([1] * 30, 4)
    free, bound = vllm_counts(agrees, 11, 4), vllm_counts(agrees, 11, 4, room=12)
    assert free.num_accepted_tokens_per_pos == (2, 2, 2, 2)
    assert free.num_draft_tokens == 8 and bound.num_draft_tokens == 8
    assert vllm_counts(agrees, 11, 4, room=9).num_draft_tokens == 4 + 2
    with pytest.raises(InputError, match=r"^acceptance: expected that of 8 tokens"):
        vllm_counts(np.ones((8, 4)), 8, 4)


def test_counts_add_up_and_have_the_ratios_of_the_servers_log():
    total = pooled([ServerCounts(2, 4, 3, (2, 1)), ServerCounts(2, 6, 1, (1, 0, 0))])
    assert total == ServerCounts(4, 10, 4, (3, 1, 0))
    assert total.draft_acceptance_rate() == 0.4
    assert total.acceptance_per_position() == [0.75, 0.25, 0]
    assert ServerCounts().draft_acceptance_rate() is None
    # A server that was started anew with shorter drafts has counted down.
    assert ServerCounts(1, 2, 1, (1,)) - ServerCounts(5, 20, 9, (5, 4)) == ServerCounts(-4, -18, -8, (-4, -4))


def test_a_histogram_of_steps_is_counted():
    """5 steps accepted none, 3 one, 2 both of two drafted tokens."""
    counts = ServerCounts.of_histogram([5, 3, 2], 20)
    assert counts == ServerCounts(10, 20, 7, (5, 2))
    assert parse(Counted, json.dumps(asdict(counts)), "it") == counts
    assert counts + ServerCounts.of_histogram([1], 2) == ServerCounts(11, 22, 7, (5, 2))


@pytest.mark.parametrize(
    "counts",
    [
        ServerCounts(10, 20, 21),
        ServerCounts(10, 20, 7, (5, 6)),
        ServerCounts(10, 20, 7, (8, 2)),
        ServerCounts(-1, 20, 7),
        ServerCounts(10, 20.5, 7),
        ServerCounts(10, float("nan"), 7),
        ServerCounts(10, 10**400, 7),
    ],
    ids=str,
)
def test_what_no_server_can_have_counted_is_refused(counts):
    with pytest.raises(ValueError, match="expected"):
        possible(counts)
    with pytest.raises(InputError, match=r"^it: "):
        parse(Counted, json.dumps(asdict(counts)), "it")


def test_counts_are_compared_by_position_too():
    expected = ServerCounts(2.0, 6.0, 3.0, (2.0, 1.0, 0.0))
    assert expected.same_as(ServerCounts(2, 6, 3, (2, 1, 0)))
    assert expected.same_as(ServerCounts(2, 6, 3, (2, 1)))  # a position of which nothing was accepted is left out
    assert not expected.same_as(ServerCounts(2, 6, 3, (1, 1, 1)))
    assert not expected.same_as(ServerCounts(3, 6, 3, (2, 1, 0)))
