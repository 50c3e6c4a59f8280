"""What a report says, of a pair and its measurement."""

from dataclasses import replace

import pytest
import torch
from conftest import tiny_llama
from families import tiny_model
from unit.scripts.measure import test_verdict as verdict

from draftsmith.decode import Counts, DraftModelProposer, PromptLookupProposer
from draftsmith.decode.cache import cached_numbers, state_bytes
from draftsmith.distill.kind import DraftModel
from draftsmith.scripts.measure.build import _agrees, _memory
from draftsmith.scripts.measure.state import PROBABILISTIC, Group, Method, Row
from draftsmith.train.kinds.drafter import Drafter, Pair
from draftsmith.train.kinds.untrained import PromptLookup


def test_a_cache_is_priced_in_the_dtype_of_the_model_that_keeps_it():
    """A short timing may choose another for the draft than for the target."""
    target, model = tiny_llama(0), tiny_llama(1).bfloat16()
    drafter = Drafter("draft", "draft", DraftModel(), "d", DraftModelProposer(model), model=model)
    memory = _memory(Pair(target, None, "float32", [drafter]))
    assert memory.target_cache_bytes_per_token == 4 * cached_numbers(target)
    assert memory.drafters["draft"].cache_bytes_per_token == 2 * cached_numbers(model)
    assert memory.drafters["draft"].weights_bytes == 2 * model.num_parameters()
    assert (memory.target_state_bytes, memory.drafters["draft"].state_bytes) == (0, 0)


def test_states_are_counted_next_to_keys_and_values():
    """Recurrent ones are float32 whatever the model is."""
    target, model = tiny_model("qwen3-5"), tiny_model("lfm2").bfloat16()
    drafter = Drafter("draft", "draft", DraftModel(), "d", DraftModelProposer(model), model=model)
    lookup = Drafter("prompt_lookup", "prompt_lookup", PromptLookup(), None, PromptLookupProposer())
    memory = _memory(Pair(target, None, "float32", [drafter, lookup]))
    assert memory.target_state_bytes == state_bytes(target) > 0
    assert memory.drafters["draft"].state_bytes == state_bytes(model) > 0
    assert memory.drafters["prompt_lookup"].state_bytes == 0


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
