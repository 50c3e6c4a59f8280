"""The ends of a target, which training needs in addition to its states: embeddings, last layer, norm and head.

Drafting heads read the embeddings, the head makes distributions from the last hidden states, and heads may be
initialised from the last layer and the norm. For Qwen3-8B in bfloat16 they are 2.9 GB of 16. A cache of features keeps
them in a file; where servers give the states, they are read from the target's own files, and nothing else is.
"""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.decode.cache.features import decoder_layers, decoder_of, last_norm
from draftsmith.train.checkpoint import check_finite, reading_errors
from draftsmith.train.files import atomic_path
from draftsmith.train.losses.output_head import head_of
from draftsmith.train.models import DTYPES, empty_model, load_model
from draftsmith.train.quantization import own_weights, quantization_of

ENDS = "target.safetensors"
SHA256 = "sha256"
"""The metadata key of a checksum over all tensors: safetensors has none of its own."""


def save_ends(target: PreTrainedModel, path: Path) -> None:
    """Write the ends of a target in its names and dtype, in floating point."""
    tensors = {name: tensor.contiguous().cpu() for name, tensor in _ends(target)}
    with atomic_path(path) as aside:
        save_file(tensors, aside, {SHA256: _digest(tensors)})


def ends_bytes(path: str, dtype: str, trust_remote_code: bool = False) -> int:
    """Return the bytes of a target's ends, from its config alone; raise InputError if its layers are not found."""
    target = empty_model(path, field="target", dtype=DTYPES[dtype], trust_remote_code=trust_remote_code)
    return sum(tensor.nbytes for _, tensor in _ends(target))


def load_ends(path: Path, target: str, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """Load a target's ends from `path` into the host's memory; its other layers stay on the meta device.

    Only the config of `target` is read. Raise InputError if the file is missing, damaged or another target's.
    """
    with reading_errors("teacher_cache", f"what draftsmith cache --features keeps of a target in {path}"):
        tensors = load_file(path)
        with safe_open(path, "pt") as file:
            written = (file.metadata() or {}).get(SHA256)
        if written != _digest(tensors):
            raise ValueError("another checksum: remove the file and run draftsmith cache again")
        model = _model_of(tensors, target, trust_remote_code)
    check_finite(model, path, "teacher_cache")
    return model


def read_ends(path: str, dtype: str, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """Return the ends of a target as `load_ends` does, from the target's own files."""
    target = load_on_disk(path, dtype, trust_remote_code=trust_remote_code)
    return _model_of(dict(_ends(target)), path, trust_remote_code)


def load_on_disk(path: str, dtype: str, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """Load a target's ends into the host's memory; its forwards read the other layers from its files, one at a time.

    A target whose quantisation the library cannot read in this way is loaded whole.
    """
    model = empty_model(path, field="target", trust_remote_code=trust_remote_code)
    names = {id(module): name for name, module in model.named_modules()}
    layers = [names[id(layer)] for layer in decoder_layers(model)]
    places = dict.fromkeys(layers[:-1], "disk") | {layers[-1]: "cpu"}
    for name, module in model.named_modules():
        if name and not any(module.children()) and not name.startswith(tuple(f"{layer}." for layer in layers)):
            places[name] = "cpu"
    places = places if quantization_of(model.config) is None else {"": "cpu"}
    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust_remote_code}
    return load_model(path, field="target", device=places, **options)


def _model_of(tensors: Mapping[str, Tensor], target: str, trust_remote_code: bool) -> PreTrainedModel:
    """Return a target with these tensors, on the meta device elsewhere; ValueError for one that does not fit."""
    model = empty_model(target, field="target", trust_remote_code=trust_remote_code)
    for name, tensor in tensors.items():
        _put(model, name, tensor)
    if head_of(model).weight.is_meta:
        model.tie_weights()
    decoder = decoder_of(model)
    if (rotary := getattr(decoder, "rotary_emb", None)) is not None:  # MTP layers rotate as the target does
        decoder.rotary_emb = type(rotary)(model.config.get_text_config())
    return model.requires_grad_(False)


def _ends(target: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and buffers of the ends by name; tied tensors once."""
    parts: list[Any] = [target.get_input_embeddings(), last_norm(target), target.get_output_embeddings()]
    parts.append(decoder_layers(target)[-1])
    inside = {part for module in parts if module is not None for part in module.modules()}
    visited = set[int]()
    for prefix, module in target.named_modules():
        if module not in inside:
            continue
        for name, tensor in own_weights(module, target.dtype).items():
            if id(tensor) not in visited:
                visited.add(id(tensor))
                yield f"{prefix}.{name}", tensor.detach()


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a checksum of names, dtypes, shapes and values."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}".encode())
        digest.update(tensors[name].flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _put(model: nn.Module, name: str, tensor: Tensor) -> None:
    prefix, _, last = name.rpartition(".")
    module = model.get_submodule(prefix)
    expected = getattr(module, last)
    if expected.shape != tensor.shape:
        raise ValueError(f"{name} of {tuple(tensor.shape)} in place of {tuple(expected.shape)}")
    is_buffer = last in module._buffers
    setattr(module, last, tensor if is_buffer else nn.Parameter(tensor, requires_grad=False))
