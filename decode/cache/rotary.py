"""Rotary frequencies that change with the length of a text, as each text of a batch has them alone.

The library takes one length for all rows: the longest text of a forward (longrope), or of all forwards since a short
one (dynamic). A text begins at position 0: a row, or a sample of a packed row. Shape suffixes: B rows, T positions, D
of a head.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


def rotary_limit(model: PreTrainedModel) -> tuple[str, int] | None:
    """Return the rope type and the length at which its frequencies change; None where they never do."""
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
    """Let length-dependent frequencies follow each text's own length from now on; return whether there are any."""
    embeddings = [module for module in model.modules() if _kinds(module) & {"longrope", "dynamic"}]
    for module in embeddings:
        if _by_text not in module._forward_hooks.values():
            module.register_forward_hook(_by_text, with_kwargs=True)
    return bool(embeddings)


def own_positions(model: nn.Module, lengths: Sequence[int], ids_BT: Tensor) -> dict[str, Tensor]:
    """Return the `position_ids` (B, T) by which right-padded texts are read as alone; empty if they do not matter."""
    if not rotate_by_text(model):
        return {}
    order_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
    return {"position_ids": order_T * (order_T < torch.tensor(lengths, device=ids_BT.device)[:, None])}


def _kinds(module: nn.Module) -> set[str]:
    kinds: Any = getattr(module, "rope_type", None)
    return set(kinds.values()) if isinstance(kinds, dict) else {kinds}


def _by_text(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Turn each text by its own length, as a forward hook of a rotary embedding."""
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
    # Number the texts of each row by their zeros; a text's length is its greatest position + 1.
    texts_BT = (positions_BT == 0).cumsum(1)
    greatest = positions_BT.new_zeros(len(positions_BT), positions_BT.shape[1] + 1)
    lengths_BT = greatest.scatter_reduce(1, texts_BT, positions_BT, "amax").gather(1, texts_BT) + 1
    # Lengths up to the limit share frequencies, and under longrope all lengths beyond it do.
    classes_BT = lengths_BT.clamp(min=limit, max=limit + 1 if kind == "longrope" else None)
    classes = classes_BT.unique().tolist()
    if kind == "longrope" and len(classes) == 1:
        return None
    prefix = "" if layer_type is None else f"{layer_type}_"
    for length in classes:
        if kind == "dynamic":  # it remembers the longest text, and must forget it
            module.register_buffer(f"{prefix}inv_freq", getattr(module, f"{prefix}original_inv_freq"), persistent=False)
            setattr(module, f"{prefix}max_seq_len_cached", limit)
        mask_BT = classes_BT == length
        parts = module.forward(**(inputs | {"position_ids": positions_BT[mask_BT][None]}))
        for whole_BTD, part_1ND in zip(output, parts, strict=True):
            whole_BTD[mask_BT] = part_1ND[0]
    return output
