"""Acceptance by category and length of context: whose tokens and prompts are in a group, and what its figures are."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import tiny_llama
from unit.scripts.measure import test_verdict as verdict
from unit.scripts.measure.test_verdict import LENGTHS, measured

from draftsmith.decode import Counts, Replay
from draftsmith.decode.measurement.intervals import Estimate
from draftsmith.decode.measurement.replay import TextReplay
from draftsmith.decode.replay.batch_replay import replay_by_position
from draftsmith.decode.replay.texts import WrittenText
from draftsmith.scripts.measure.build import _agrees
from draftsmith.scripts.measure.predictions import curve_of
from draftsmith.scripts.measure.replays import doublings, groups_of
from draftsmith.scripts.measure.state import PROBABILISTIC, Group, Method, Row

PROMPTS, TOKENS = (1022, 2044, 3, 3, 3, 4095), (7, 5, 2, 1, 7, 1)


@pytest.fixture(scope="module")
def own(tokenizer):
    found = measured(tokenizer, [[5] * tokens for tokens in TOKENS], {}, categories=["code", "prose"])
    found.prompt_ids = [[5] * length for length in PROMPTS]
    return found


def replayed(certain: bool = False) -> tuple[Replay, dict[int, list[list[float]]]]:
    """Return a replay, and by γ the probabilities of the starts of rounds, by hand."""
    texts, starts = [], {k: [] for k in LENGTHS}
    for length, tokens in zip(PROMPTS, TOKENS, strict=True):
        a = torch.rand(tokens, generator=torch.Generator().manual_seed(tokens)).double().clamp(min=float(certain))
        written = [WrittenText(torch.arange(length + tokens), length, tokens)]
        chain = replay_by_position(written, [a], [a])
        [stretches] = chain.stretches(written, [doublings(length, tokens)], LENGTHS)
        counts = {k: chain.counts(k)[0] for k in LENGTHS}
        texts.append(TextReplay(counts, float(a.sum()), len(a), tuple(a.tolist()), stretches=stretches))
        for k in LENGTHS:
            starts[k].append([1.0] + [0.0] * (len(a) + k))
            for t in range(len(a)):
                reach = starts[k][-1][t]
                for j in range(k + 1):
                    rejected = 1 - float(a[t + j]) if j < k and t + j < len(a) else 1.0
                    starts[k][-1][t + j + 1] += reach * rejected
                    reach *= 1 - rejected
    return Replay(texts), starts


def test_a_curve_has_the_figures_of_each_group(own):
    replay, starts = replayed()
    curve = curve_of(own, 0.0, "draft", PROBABILISTIC, replay)
    labels = [doublings(length, tokens).tolist() for length, tokens in zip(PROMPTS, TOKENS, strict=True)]
    # Two tokens are before 1,024 tokens of context, and the second text ends after 2,048.
    assert labels == [[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 2], [0, 0], [0], [0] * 7, [2]]
    assert {name: group.prompts for name, group in curve.by_category.items()} == {"code": 3, "prose": 3}
    assert {n: (g.prompts, g.tokens) for n, g in curve.by_context.items()} == {
        "1024": (4, 12), "2048": (2, 9), "4096": (2, 2),
    }  # fmt: skip
    flat = [label for of_text in labels for label in of_text]
    acceptance = [a for text in replay.texts for a in text.acceptance]
    for label, group in enumerate(curve.by_context.values()):
        overlap = sum(a for a, own_label in zip(acceptance, flat, strict=True) if own_label == label)
        assert group.alpha.value == pytest.approx(overlap / group.tokens)
        for k in LENGTHS:
            started = [s for row, tokens in zip(starts[k], TOKENS, strict=True) for s in row[:tokens]]
            rounds = sum(s for s, own_label in zip(started, flat, strict=True) if own_label == label)
            assert group.mean_acceptance_length[k].value == pytest.approx(group.tokens / rounds)
    # One length of context is no group.
    assert groups_of(replace(own, prompts=[]), replay.within([0])) == {"category": {}, "context": {}}


def test_a_group_in_which_no_round_starts_has_no_length(own):
    """All drafts are accepted, and the one token after 2,048 tokens of context is the end of one."""
    replay, _ = replayed(certain=True)
    with np.errstate(invalid="raise"):
        group = groups_of(replace(own, prompts=[]), Replay(replay.texts[:5]))["context"]["4096"]
    assert group.tokens_and_rounds(4) == ([1], [0]) and group.mean_acceptance_length[4] == Estimate(None, None, 1)


@pytest.mark.parametrize(("dtype", "agrees"), [(torch.float32, False), (torch.bfloat16, True)])
def test_at_t_0_replay_counts_every_round_only_if_the_drafter_has_no_near_ties(tokenizer, dtype, agrees):
    """One round of one prompt differs: a near-tie in bfloat16, though the target is in float32."""
    measured = verdict.measured(tokenizer, [[0] * 8 for _ in range(8)], {})
    [draft, *_] = measured.pair.drafters
    measured.pair.drafters[0] = replace(draft, model=tiny_llama(1).to(dtype))
    replay = verdict.replayed([[1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0] for _ in range(8)])
    _, rounds = replay.tokens_and_rounds(4)
    rows = [Row(i, [0] * 8, Counts(num_drafts=round(rounds[i]) + (i == 0), num_emitted_tokens=8)) for i in range(8)]
    measured.observations[0.0, 1, Method("draft", 4)] = [Group([row], 1.0) for row in rows]
    measured.replays[0.0, "draft", PROBABILISTIC] = replay
    assert _agrees(measured, replay, rows, Method("draft", 4), 0.0) is agrees
