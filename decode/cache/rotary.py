"""Rotary frequencies that change with the length of a text: in a batch, each text has those that it would have alone.

The library takes one length for all rows, that of the longest text of a forward (longrope), or of all forwards since a
short one (dynamic). Here hooks on the embeddings take that of each text. A text begins at position 0: a row, or a
sample of a packed row. Shape suffixes: B rows, T positions, D of a head.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


def rotary_limit(model: PreTrainedModel) -> tuple[str, int] | None:
    """Return the rope type and the length that its frequencies change at; None where they never do."""
    config = model.config.get_text_config()
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        kind = parameters.get("rope_type")
        if kind == "longrope":
            return kind, parameters["original_max_position_embeddings"]
        if kind == "dynamic":
            return kind, config.max_position_embeddings
    return None


def rotate_by_text(model: nn.Module) -> bool:
    """Have frequencies that change with the length follow each text's own, from now on; say whether there are any."""
    embeddings = [module for module in model.modules() if _kinds(module) & {"longrope", "dynamic"}]
    for module in embeddings:
        if _by_text not in module._forward_hooks.values():
            module.register_forward_hook(_by_text, with_kwargs=True)
    return bool(embeddings)


def own_positions(model: nn.Module, lengths: Sequence[int], ids_BT: Tensor) -> dict[str, Tensor]:
    """Return the `position_ids` (B, T) with which texts padded on the right are read as alone; none where none matter.

    Args:
        model: reads the texts; its frequencies follow them from now on.
        lengths: tokens of each of the B texts.
        ids_BT: the texts.
    """
    if not rotate_by_text(model):
        return {}
    places_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
    return {"position_ids": places_T * (places_T < torch.tensor(lengths, device=ids_BT.device)[:, None])}


def _kinds(module: nn.Module) -> set[str]:
    kinds: Any = getattr(module, "rope_type", None)
    return set(kinds.values()) if isinstance(kinds, dict) else {kinds}


def _by_text(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Turn each text by its own length: a hook on a rotary embedding."""
    inputs = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    positions_BT, layer_type = inputs["position_ids"], inputs.get("layer_type")
    kind = module.rope_type if layer_type is None else module.rope_type[layer_type]
    if kind not in ("longrope", "dynamic") or positions_BT.is_meta or torch.compiler.is_exporting():
        return None
    if kind == "longrope":
        parameters = module.config.rope_parameters
        limit = (parameters if layer_type is None else parameters[layer_type])["original_max_position_embeddings"]
    else:
        limit = module.original_max_seq_len
    texts_BT = (positions_BT == 0).cumsum(1)
    greatest = positions_BT.new_zeros(len(positions_BT), positions_BT.shape[1] + 1)
    lengths_BT = greatest.scatter_reduce(1, texts_BT, positions_BT, "amax").gather(1, texts_BT) + 1
    # Up to the limit all lengths are alike, and of longrope all beyond it.
    classes_BT = lengths_BT.clamp(min=limit, max=limit + 1 if kind == "longrope" else None)
    classes = classes_BT.unique().tolist()
    if kind == "longrope" and len(classes) == 1:
        return None
    prefix = "" if layer_type is None else f"{layer_type}_"
    for each in classes:
        if kind == "dynamic":  # it remembers the longest text
            module.register_buffer(f"{prefix}inv_freq", getattr(module, f"{prefix}original_inv_freq"), persistent=False)
            setattr(module, f"{prefix}max_seq_len_cached", limit)
        chosen_BT = classes_BT == each
        turned = module.forward(**(inputs | {"position_ids": positions_BT[chosen_BT][None]}))
        for whole_BTD, part_1ND in zip(output, turned, strict=True):
            whole_BTD[chosen_BT] = part_1ND[0]
    return output
