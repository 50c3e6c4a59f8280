"""What a report says, of a pair and its measurement."""

from conftest import tiny_llama
from families import tiny_model

from draftsmith.decode import DraftModelProposer, PromptLookupProposer
from draftsmith.decode.cache import cached_numbers, state_bytes
from draftsmith.distill.kind import DraftModel
from draftsmith.scripts.measure.build import _memory
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
