"""What a report says, of a pair and its measurement."""

from conftest import tiny_llama

from draftsmith.decode import DraftModelProposer
from draftsmith.decode.cache import cached_numbers
from draftsmith.distill.kind import DraftModel
from draftsmith.scripts.measure.build import _memory
from draftsmith.train.kinds.drafter import Drafter, Pair


def test_a_cache_is_priced_in_the_dtype_of_the_model_that_keeps_it():
    """A short timing may choose another for the draft than for the target."""
    target, model = tiny_llama(0), tiny_llama(1).bfloat16()
    drafter = Drafter("draft", "draft", DraftModel(), "d", DraftModelProposer(model), model=model)
    memory = _memory(Pair(target, None, "float32", [drafter]))
    assert memory.target_cache_bytes_per_token == 4 * cached_numbers(target)
    assert memory.drafters["draft"].cache_bytes_per_token == 2 * cached_numbers(model)
    assert memory.drafters["draft"].weights_bytes == 2 * model.num_parameters()
