"""Some of the target's own layers as a draft model, which needs no memory for weights."""

import copy
from collections.abc import Sequence
from itertools import chain

from torch import nn
from transformers import PreTrainedModel

from draftsmith.decode.cache.features import check_apart, decoder_of
from draftsmith.decode.errors import InputError


def early_exit(target: PreTrainedModel, layers: int | Sequence[int]) -> PreTrainedModel:
    """Return a model of some of the target's layers, with the target's embeddings, final norm and head.

    `DraftModelProposer(early_exit(target, 2))` is self-speculative decoding with the first layers (LayerSkip, Elhoushi
    et al. 2024, section 4.3) or with chosen ones (Draft & Verify, Zhang et al. 2023, section 3.2). Weights are the
    target's own tensors, so training one model trains the other. `layers` is the number of first layers, or ascending
    indices from 0.

    Raises:
        InputError: missing or unordered layers, or a target whose layers share keys or are not in one list.
    """
    config = target.config.get_text_config()
    check_apart(target, "target")
    depth: int = config.num_hidden_layers
    if isinstance(layers, int):
        if not 1 <= layers <= depth:
            raise InputError(f"layers: expected between 1 and {depth}, found {layers}")
        layers = range(layers)
    indices = list(layers)
    if not indices or indices != sorted(set(indices)) or indices[0] < 0 or indices[-1] >= depth:
        raise InputError(f"layers: expected ascending indices between 0 and {depth - 1}, found {indices}")

    # Copy modules and config but not tensors: layers store their index in the cache, and configs their number.
    draft = copy.deepcopy(target, {id(t): t for t in chain(target.parameters(), target.buffers())})
    lists = (module for module in decoder_of(draft).modules() if isinstance(module, nn.ModuleList))
    stack = next((modules for modules in lists if len(modules) == depth), None)
    if stack is None:
        raise InputError(f"target: expected a list of {depth} layers, found none in {type(target).__name__}")
    for index in reversed(range(depth)):
        if index not in indices:
            del stack[index]
    for i, layer in enumerate(stack):
        for module in layer.modules():
            attributes = vars(module)
            attributes |= {name: i for name in ("layer_idx", "layer_id") if name in attributes}
    config = draft.config.get_text_config()
    overrides = config.to_dict().get("per_layer_config") or {}  # of layers that differ in their sizes
    for name, value in list(vars(config).items()):
        if name.endswith("_only_layers") and isinstance(value, list):  # indices of layers
            setattr(config, name, [indices.index(index) for index in value if index in indices])
        elif "layer" in name and isinstance(value, list | tuple) and len(value) == depth:
            setattr(config, name, [value[index] for index in indices])  # for example layer_types
    config.num_hidden_layers = len(indices)
    if config.is_heterogeneous:
        config.per_layer_config = {i: overrides.get(str(index), {}) for i, index in enumerate(indices)}
    return draft
