"""The target's states that drafters on features see: of a batch, of a text, live or from a cache.

Shape suffixes: B rows, T positions, S positions with keys, F features, H hidden.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from draftsmith.decode.cache.features import collect_states
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


def run_for_states(target: PreTrainedModel, depths: Sequence[int], batch: dict[str, Any]) -> TargetStates:
    """Run a target once on a batch, on its device; features are taken at `depths`, and without any have no entries."""
    embeddings: list[Tensor] = []
    # A sharded target's embeddings are whole only inside of its forward.
    hook = target.get_input_embeddings().register_forward_hook(lambda _m, _i, output: embeddings.append(output))
    try:
        with collect_states(target, False, depths) as states:
            hidden = last_hidden(target, **send_to_device(batch, target.device))
    finally:
        hook.remove()
    features = states.features[0].to(hidden.device) if depths else hidden[..., :0]
    return TargetStates(hidden, embeddings[0].to(hidden.device), features)


def states_from_forward(target: PreTrainedModel, depths: Sequence[int], text: Text) -> TargetStates:
    """Return the target's states of a text, from a forward of its sample; `depths` as in `run_for_states`."""
    before = text.sample["input_ids"][: text.start] if text.start else []
    ids_1T = torch.cat([torch.tensor(before, dtype=torch.long), text.ids_T])[None]
    states = run_for_states(target, depths, {"input_ids": ids_1T})
    return TargetStates(*(states_1TX[:, text.start :] for states_1TX in states))


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
