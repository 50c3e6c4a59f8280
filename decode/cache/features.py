"""The target's features for drafters that read them: the outputs of a few decoder layers, collected by hooks.

Shape suffixes: B rows, T positions, H hidden, F = H × the number of depths.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.decode.errors import InputError


def default_layers(layers: int) -> list[int]:
    """Return the depths 2, L // 2 and L − 3 of L layers (Li et al. 2025, arXiv 2503.01840; vLLM, SGLang)."""
    # Shallow targets, without three different ones: after the first layer, a middle one, and the last but one or last.
    depths = [2, layers // 2, layers - 3]
    if sorted(set(depths)) == depths:
        return depths
    last = max(layers - 1, 1)
    return sorted({1, (1 + last) // 2, last})


def decoder_of(model: PreTrainedModel) -> Any:
    """Return a causal LM's decoder, whose last hidden states its head sees."""
    decoder: Any = model.get_decoder()
    return decoder.model if decoder is model else decoder  # Llama 4's text class returns itself


def last_norm(model: PreTrainedModel) -> nn.Module | None:
    """Return the norm after the last layer, under any family's name; None without one, or one without weights."""
    norms = [
        part
        for name, part in decoder_of(model).named_children()
        # Gemma 3n and 4 also have a norm of the embeddings that each layer adds.
        if not name.startswith("per_layer") and any(p.ndim == 1 for p in part.parameters(False))
    ]
    return norms[-1] if norms else None


def decoder_layers(target: PreTrainedModel) -> Sequence[nn.Module]:
    """Return a causal LM's decoder layers, first to last; an `InputError` if the family has no `layers`."""
    layers = getattr(decoder_of(target), "layers", None)
    if not isinstance(layers, nn.ModuleList) or not len(layers):
        raise InputError(
            "target: expected a model whose decoder has its layers in `layers`, as Llama, Qwen, Mistral and Gemma do, "
            f"found {type(target).__name__}"
        )
    return list(layers)


def check_apart(model: PreTrainedModel, field: str) -> None:
    """Raise an `InputError` if layers do not work without the others: Gemma 3n's and some of Gemma 4's."""
    for name in ("num_kv_shared_layers", "hidden_size_per_layer_input"):
        if value := getattr(model.config.get_text_config(), name, 0):
            raise InputError(
                f"{field}: expected layers with keys and embeddings of their own, found {type(model).__name__} with "
                f"{name} {value}"
            )


def check_layers(depths: Sequence[int], layers: int, field: str) -> None:
    """Raise an `InputError` unless depths are ascending and within a target of `layers` layers."""
    if not depths or list(depths) != sorted(set(depths)) or not 1 <= depths[0] <= depths[-1] <= layers:
        raise InputError(
            f"{field}: expected ascending depths between 1 and the target's {layers} layers, found {list(depths)}"
        )


class Features(list[Tensor]):
    """The features of the target's forwards, (B, T, F) each, with the depths concatenated."""


@contextmanager
def collect_features(target: PreTrainedModel, depths: Sequence[int]) -> Iterator[Features]:
    """Collect the outputs of the target's layers at ascending depths, before any final norm.

    Each forward in this block appends to the list, which is to be emptied between forwards.
    """
    layers = decoder_layers(target)
    check_layers(depths, len(layers), "depths")
    features, states = Features(), list[Tensor]()  # `states` are those of the forward under way

    def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
        state = output if isinstance(output, Tensor) else output[0]
        if state.ndim != 3:  # Gemma 3n has several streams
            raise InputError(
                f"target: expected layers with one state for each token, found several in {type(target).__name__}"
            )
        states.append(state)
        if len(states) == len(depths):  # a model may be spread over several devices
            features.append(torch.cat([state.to(states[-1].device) for state in states], dim=-1))
            states.clear()

    hooks = [layers[depth - 1].register_forward_hook(keep) for depth in depths]
    try:
        yield features
    finally:
        for hook in hooks:
            hook.remove()


@dataclass
class States:
    """The wanted states of a model's forwards."""

    hidden: Tensor | None = None  # the head's input in the last forward, (B, T, H)
    features: Features = field(default_factory=Features)


@contextmanager
def collect_states(model: PreTrainedModel, wants_hidden: bool, depths: Sequence[int]) -> Iterator[States]:
    """Keep the wanted states of the forwards in this block."""
    states = States()

    def keep(_head: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        states.hidden = inputs[0]

    # Hooks, because `output_hidden_states` would keep those of every layer of a long prompt.
    with ExitStack() as hooks:
        if wants_hidden:
            hooks.callback(model.get_output_embeddings().register_forward_pre_hook(keep).remove)
        if depths:
            states.features = hooks.enter_context(collect_features(model, depths))
        yield states
