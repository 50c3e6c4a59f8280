"""What drafters on features see of a target: its states of a batch, keys and values of a text, and its rotation.

Shape suffixes: B rows, T positions, S places with keys, F features, H hidden.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PretrainedConfig, PreTrainedModel

from draftsmith.decode.cache.features import collected
from draftsmith.decode.errors import InputError
from draftsmith.train.data.first_look import Text
from draftsmith.train.losses.output_head import last_hidden
from draftsmith.train.teacher.feature_reader import FeatureIndex


def rope_of(config: PretrainedConfig) -> dict[str, Any]:
    """Return how the last layer of a model of text turns its queries and keys, as `rope_parameters` of all of a head.

    Raises:
        InputError: the config does not say.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    if "rope_theta" not in rope:  # a family whose kinds of layers turn by different angles, or not at all
        kind = (getattr(config, "layer_types", None) or [None])[-1]
        rope = rope.get(kind) or next((each for each in rope.values() if isinstance(each, dict)), {})
    if "rope_theta" not in rope:
        raise InputError(
            f"target: expected rotary positions, whose rope_theta rope_parameters have, found none in its config "
            f"({config.model_type})"
        )
    return {name: value for name, value in rope.items() if name != "partial_rotary_factor"}


class KeysValues(NamedTuple):
    """What places that came before are attended by: keys and values, (B, key-value heads, S, head width)."""

    keys: Tensor
    values: Tensor


class TargetStates(NamedTuple):
    """What a forward of the target leaves of a batch, or a cache has of it, without gradients."""

    hidden: Tensor
    """What its head sees, (B, T, H)."""
    embeddings: Tensor
    """Of the tokens, (B, T, H)."""
    features: Tensor
    """What the heads fuse, (B, T, F)."""


def seen_by(target: PreTrainedModel, depths: Sequence[int], forward: Callable[[], Tensor]) -> TargetStates:
    """Run a target once on a batch.

    Args:
        target: without gradients.
        depths: after how many layers features are taken, ascending.
        forward: runs it, and returns its last hidden states, (B, T, H).
    """
    embeddings: list[Tensor] = []
    # A sharded target's embeddings are whole inside of its forward alone.
    hook = target.get_input_embeddings().register_forward_hook(lambda _m, _i, output: embeddings.append(output))
    try:
        with collected(target, depths) as features:
            hidden = forward()
    finally:
        hook.remove()
    return TargetStates(hidden, embeddings[0].to(hidden.device), features[0].to(hidden.device))


def seen_now(target: PreTrainedModel, depths: Sequence[int], text: Text) -> TargetStates:
    """Run the target on a text; `depths` are those of `seen_by`."""
    ids_1T = text.ids_T[None].to(target.device)
    return seen_by(target, depths, partial(last_hidden, target, input_ids=ids_1T))


def seen_before(target: PreTrainedModel, index: FeatureIndex, text: Text) -> TargetStates:
    """Look up what a cache has of a text; `target` has its embeddings."""
    states = index.states_of(text.sample)
    hidden, features = (states[name][:, text.start : text.start + len(text.ids_T)] for name in ("hidden", "features"))
    return TargetStates(hidden, target.get_input_embeddings()(text.ids_T[None].to(target.device)), features)


@contextmanager
def whole(*modules: nn.Module) -> Iterator[None]:
    """Gather the weights of modules that are sharded over processes, while the block runs."""
    sharded = [module for module in modules if isinstance(module, FSDPModule)]
    for module in sharded:
        module.unshard()
    try:
        yield
    finally:
        for module in sharded:
            module.reshard()
