"""What a report says, of a pair and its measurement."""

from dataclasses import replace

import pytest
import torch
from conftest import tiny_llama
from unit.scripts.measure import test_verdict as verdict

from draftsmith.decode import Counts
from draftsmith.scripts.measure.build import _agrees
from draftsmith.scripts.measure.state import PROBABILISTIC, Group, Method, Row


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
