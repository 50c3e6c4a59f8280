"""The target's states that drafters on features see: of a batch, of a text, live or from a cache.

Shape suffixes: B rows, T positions, S positions with keys, F features, H hidden.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from draftsmith.decode.cache.features import collect_states
from draftsmith.train.data.first_look import Text, best_scale, choose_once
from draftsmith.train.losses.cut_vocabulary import CutVocabulary
from draftsmith.train.losses.output_head import OutputHead, last_hidden
from draftsmith.train.losses.positions import IGNORED
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
    """Run a target once on a batch: `forward` returns its last hidden states, and features are taken at `depths`.

    Without depths they have no entries.
    """
    embeddings: list[Tensor] = []
    # A sharded target's embeddings are whole only inside of its forward.
    hook = target.get_input_embeddings().register_forward_hook(lambda _m, _i, output: embeddings.append(output))
    try:
        with collect_states(target, False, depths) as states:
            hidden = forward()
    finally:
        hook.remove()
    features = states.features[0].to(hidden.device) if depths else hidden[..., :0]
    return TargetStates(hidden, embeddings[0].to(hidden.device), features)


def states_from_forward(target: PreTrainedModel, depths: Sequence[int], text: Text) -> TargetStates:
    """Return the target's states of a text, from a forward of its sample; `depths` as in `run_for_states`."""
    before = text.sample["input_ids"][: text.start] if text.start else []
    ids_1T = torch.cat([torch.tensor(before, dtype=torch.long), text.ids_T])[None].to(target.device)
    states = run_for_states(target, depths, partial(last_hidden, target, input_ids=ids_1T))
    return TargetStates(*(states_1TX[:, text.start :] for states_1TX in states))


def states_from_cache(target: PreTrainedModel, index: FeatureIndex, text: Text) -> TargetStates:
    """Return the target's states of a text from a cache, and the embeddings from `target`."""
    # A cache stores whole samples, and texts begin at the first token that is looked at.
    states = index.states_of(text.sample)
    hidden, features = (states[name][:, text.start : text.start + len(text.ids_T)] for name in ("hidden", "features"))
    return TargetStates(hidden, target.get_input_embeddings()(text.ids_T[None].to(target.device)), features)


@torch.no_grad()
def scale_of_steps(
    heads: PreTrainedModel,
    states_of: Callable[[Text], TargetStates],
    texts: Sequence[Text],
    steps: int,
    states_of_steps: Callable[..., list[Tensor]],
    head: Callable[[], OutputHead],
    tokens: int,
    sharded: bool,
) -> float:
    """Return the scale of the logits with the least loss of all K `steps` on some texts; a collective call.

    `states_of_steps` are the kind's own states of the head, which may have more rows than the tokenizer has `tokens`.
    """
    token_map: Any = heads.token_map

    def look() -> float:
        states, labels = [], []
        for text in texts:
            target_states = states_of(text)
            nn.Module.to(heads, target_states.hidden.device)  # on the CPU a large layer is slow
            indices_N = (text.ahead(1) != IGNORED).nonzero()[:, 0]
            indices_N = indices_N[indices_N > steps].to(heads.device)  # where each step has a round that reaches
            states += states_of_steps(heads, target_states, None, indices_N, steps)
            labels += [text.ids_T.to(heads.device)[indices_N + 1]] * steps
        cut = None if token_map is None else CutVocabulary(token_map, heads.config.vocab_size)
        return best_scale(states, torch.cat(labels), head().to(heads.device), cut, tokens)

    home = heads.device
    scale = choose_once(look, together=sharded)
    nn.Module.to(heads, home)
    return scale


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
