"""The ends of a target, which training needs in addition to its states: embeddings, last layer, norm and head.

Drafting heads read the embeddings, the head makes distributions from the last hidden states, and heads may be
initialised from the last layer and the norm. For Qwen3-8B in bfloat16 they are 2.9 GB of 16. They are read from the
target's own files, and nothing else is.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.hub import cached_file

from draftsmith.decode.cache.features import decoder_layers, decoder_of, last_norm
from draftsmith.decode.validation import read
from draftsmith.train.checkpoint import INDEX, WEIGHTS, Index, check_finite, reading_errors
from draftsmith.train.files import is_gguf
from draftsmith.train.losses.output_head import head_of
from draftsmith.train.models import DTYPES, empty_model, load_config, load_model, resolve_dtype, whole_weights
from draftsmith.train.quantization import own_weights

LAYER = re.compile(r"\.layers\.(\d+)\.")
"""The number of a layer in the name of a stored tensor."""
DEQUANTIZED = ("fp8", "mxfp4")
"""Quantisations that the library turns into floating point as it loads them."""


def read_ends(path: str, dtype: str, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """Load a target's ends from its safetensors into the host's memory; its other layers stay on the meta device.

    Weights in fp8 and mxfp4 become floating point. A target whose weights are pickled, in a GGUF file, or quantised in
    another way, is loaded whole.
    """
    code = trust_remote_code
    dtype = resolve_dtype(dtype, path, field="target", trust_remote_code=code)
    config = load_config(path, field="target", trust_remote_code=code)
    model = empty_model(path, field="target", dtype=DTYPES[dtype], trust_remote_code=code)
    quantization: Any = getattr(config, "quantization_config", None)
    places, last = _places(model, "meta"), len(decoder_layers(model)) - 1
    with reading_errors("target", f"the embeddings, last layer, norm and head in {path}"):
        stored = _stored_ends(path, last)
        if not stored or (quantization is not None and quantization.get("quant_method") not in DEQUANTIZED):
            whole = load_model(path, field="target", dtype=dtype, device="cpu", trust_remote_code=code)
            return _model_of(dict(_ends(whole)), path, code)
        if quantization is not None:
            quantization["dequantize"] = True  # on a GPU the library would keep the bits for its kernels
        options: dict[str, Any] = {"dtype": DTYPES[dtype], "device_map": places}
        with whole_weights():
            loaded = type(model).from_pretrained(None, config=config, state_dict=stored, **options)
        tensors = dict(_ends(loaded, _placed))
        with init_empty_weights(include_buffers=False), whole_weights():  # no checkpoint has their numbers
            built: Any = type(model)
            buffers = dict(built._from_config(config).named_buffers())
        tensors |= {name: buffers[name] for name, _ in _ends(model) if name in buffers.keys() - tensors.keys()}
        if missing := {name for name, _ in _ends(model)} - tensors.keys():
            raise ValueError(f"no {min(missing)}")
        if quantization is not None:
            tensors = {name: tensor.to(DTYPES[dtype]) for name, tensor in tensors.items()}
        ends = _model_of(tensors, path, code)
    check_finite(ends, path, "target")
    return ends


def _stored_ends(path: str, last: int) -> dict[str, Tensor]:
    """Read the tensors of a checkpoint that belong to no layer before the `last`; empty for other files."""
    if is_gguf(path):
        return {}
    index = cached_file(path, INDEX, _raise_exceptions_for_missing_entries=False)
    single = None if index else cached_file(path, WEIGHTS, _raise_exceptions_for_missing_entries=False)
    if index:
        names = read(Index, Path(index), "target").weight_map
        files = {names[name] for name in names if _is_end(name, last)}
        paths = [cached_file(path, name) for name in sorted(files)]
    else:
        paths = [single] if single else []
    tensors = dict[str, Tensor]()
    for file in paths:
        with safe_open(str(file), "pt") as weights:
            tensors |= {name: weights.get_tensor(name) for name in weights.keys() if _is_end(name, last)}  # noqa: SIM118
    return tensors


def _is_end(name: str, last: int) -> bool:
    layer = LAYER.search(name)
    return layer is None or int(layer[1]) == last


def _placed(module: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return a module's own weights, which accelerate holds for it where other modules are on the meta device."""
    held: Any = getattr(module, "_hf_hook", None)
    placed = dict[str, Tensor]()
    for name, tensor in own_weights(module, dtype).items():
        with suppress(KeyError):  # a buffer that no checkpoint has
            placed[name] = held.weights_map[name] if tensor.is_meta else tensor
    return placed


def load_on_disk(path: str, dtype: str, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """Load a target whose forwards read its layers from its files, one at a time, except the last.

    A mixture of experts, whose layers the library stores in another way, is loaded whole, and so is a GGUF file.
    """
    model = empty_model(path, field="target", trust_remote_code=trust_remote_code)
    whole = is_gguf(path) or any(parameter.ndim == 3 for parameter in model.parameters())
    device = "cpu" if whole else _places(model, "disk")
    return load_model(path, field="target", dtype=dtype, device=device, trust_remote_code=trust_remote_code)


def _places(model: PreTrainedModel, others: str) -> dict[str, str]:
    """Return the device of each module: the CPU for the ends, `others` for the layers before the last."""
    names = {id(module): name for name, module in model.named_modules()}
    layers = [names[id(layer)] for layer in decoder_layers(model)]
    places = dict.fromkeys(layers[:-1], others) | {layers[-1]: "cpu"}
    inside = tuple(f"{layer}." for layer in layers)
    for name, module in model.named_modules():
        if name and not name.startswith(inside):
            own = [f"{name}.{part}" for part, _ in module.named_parameters(recurse=False)]  # with modules in it
            places |= dict.fromkeys(own if any(module.children()) else [name], "cpu")
    return places


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


def _ends(
    target: PreTrainedModel, weights: Callable[[nn.Module, torch.dtype], dict[str, Tensor]] = own_weights
) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and buffers of the ends by name, from a module's own `weights`; tied tensors once."""
    parts: list[Any] = [target.get_input_embeddings(), last_norm(target), target.get_output_embeddings()]
    parts.append(decoder_layers(target)[-1])
    inside = {part for module in parts if module is not None for part in module.modules()}
    visited = set[int]()
    for prefix, module in target.named_modules():
        if module not in inside:
            continue
        for name, tensor in weights(module, target.dtype).items():
            place = tensor.data_ptr() or id(tensor)  # on the meta device all are at 0
            if place not in visited:
                visited.add(place)
                yield f"{prefix}.{name}", tensor.detach()


def _put(model: nn.Module, name: str, tensor: Tensor) -> None:
    prefix, _, last = name.rpartition(".")
    module = model.get_submodule(prefix)
    expected = getattr(module, last)
    if expected.shape != tensor.shape:
        raise ValueError(f"{name} of {tuple(tensor.shape)} in place of {tuple(expected.shape)}")
    is_buffer = last in module._buffers
    setattr(module, last, tensor if is_buffer else nn.Parameter(tensor, requires_grad=False))
