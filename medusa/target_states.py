"""The target's states that drafters on features see: of a batch, of a text, live or from a cache.

Shape suffixes: B rows, T positions, S positions with keys, F features, H hidden.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from draftsmith.decode.cache.features import collect_features
from draftsmith.train.data.first_look import Text
from draftsmith.train.losses.output_head import last_hidden
from draftsmith.train.teacher.feature_reader import FeatureIndex


class KeysValues(NamedTuple):
    """Keys and values of some positions, (B, key-value heads, S, head width)."""

    keys: Tensor
    values: Tensor


class TargetStates(NamedTuple):
    """The target's states of a batch, without gradients: its head's inputs, embeddings and features, (B, T, …) each."""

    hidden: Tensor
    embeddings: Tensor
    features: Tensor


def run_for_states(target: PreTrainedModel, depths: Sequence[int], forward: Callable[[], Tensor]) -> TargetStates:
    """Run a target once on a batch: `forward` returns its last hidden states, and features are taken at `depths`."""
    embeddings: list[Tensor] = []
    # A sharded target's embeddings are whole only inside of its forward.
    hook = target.get_input_embeddings().register_forward_hook(lambda _m, _i, output: embeddings.append(output))
    try:
        with collect_features(target, depths) as features:
            hidden = forward()
    finally:
        hook.remove()
    return TargetStates(hidden, embeddings[0].to(hidden.device), features[0].to(hidden.device))


def states_from_forward(target: PreTrainedModel, depths: Sequence[int], text: Text) -> TargetStates:
    """Return the target's states of a text from a forward; `depths` as in `run_for_states`."""
    ids_1T = text.ids_T[None].to(target.device)
    return run_for_states(target, depths, partial(last_hidden, target, input_ids=ids_1T))


def states_from_cache(target: PreTrainedModel, index: FeatureIndex, text: Text) -> TargetStates:
    """Return the target's states of a text from a cache, and the embeddings from `target`."""
    # A cache stores whole samples, and texts begin at the first token that is looked at.
    states = index.states_of(text.sample)
    hidden, features = (states[name][:, text.start : text.start + len(text.ids_T)] for name in ("hidden", "features"))
    return TargetStates(hidden, target.get_input_embeddings()(text.ids_T[None].to(target.device)), features)


@contextmanager
def gather_weights(*modules: nn.Module) -> Iterator[None]:
    """Gather the weights of modules that FSDP shards, while the block runs."""
    sharded = [module for module in modules if isinstance(module, FSDPModule)]
    for module in sharded:
        module.unshard()
    try:
        yield
    finally:
        for module in sharded:
            module.reshard()
