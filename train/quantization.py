"""Quantised targets: how one was quantised, and its weights as floating-point numbers, which drafters begin with.

The library loads a checkpoint whose config has `quantization_config`, or quantises one as it loads it. Its modules then
hold packed integers, or tensors of a class of their own (torchao), and no two methods store them alike.
"""

import re
from collections.abc import Iterable, Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PretrainedConfig, PreTrainedModel

UNPACKED = "compressed-tensors"
"""The method whose weights the library unpacks as it loads them: in memory they are floating point."""
ROWS = 4096  # of the identity matrix at once


def is_quantized(model: PreTrainedModel) -> bool:
    """Return whether a model's config has a quantisation."""
    return getattr(model.config, "quantization_config", None) is not None


def _settings(config: PretrainedConfig) -> tuple[str, dict[str, Any]]:
    """Return the method of a model's quantisation and its settings; nothing for floating point."""
    stored: Any = getattr(config, "quantization_config", None)
    if stored is None:
        return "", {}
    values: dict[str, Any] = stored if isinstance(stored, dict) else stored.to_dict()
    return getattr(values.get("quant_method"), "value", None) or str(values.get("quant_method")), values


def quantization_of(config: PretrainedConfig) -> str | None:
    """Return how a model's weights were quantised, such as "torchao, 8 bits"; None for floating point."""
    method, values = _settings(config)
    if not method:
        return None
    bits = _bits(values)
    if method == "bitsandbytes":
        bits = [4] if values.get("load_in_4bit") else [8]
    elif method in ("fp8", "fbgemm_fp8", "mxfp4") and not bits:
        bits = [int(method[-1])]
    return f"{method}, {' and '.join(map(str, bits))} bits" if bits else method


def teacher_in_words(quantization: str | None, dtype: torch.dtype | None) -> str:
    """Return a teacher's quantisation and the dtype that it computed in, as far as they are known, for a card."""
    parts = [f"quantised: {quantization}"] if quantization else []
    parts += [f"computed in {str(dtype).removeprefix('torch.')}"] if dtype else []
    return "; ".join(parts)


def _bits(values: dict[str, Any]) -> list[int]:
    """Return the numbers of bits that a quantisation names for weights, ascending."""
    found = [values[name] for name in ("bits", "w_bit") if isinstance(values.get(name), int)]
    groups = values.get("config_groups") or {}
    found += [group["weights"]["num_bits"] for group in groups.values() if (group.get("weights") or {}).get("num_bits")]
    if not found and values.get("quant_type"):  # torchao: a class such as Int8DynamicActivationInt4WeightConfig
        found = [int(bits) for bits in re.findall(r"(?:Int|Float)(\d+)Weight", str(values["quant_type"]))]
    return sorted(set(found))


def plain_parts(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors by name; of one of a class of its own, as torchao's, the tensors in it: integers and scales."""
    for name, weight in weights:
        inner: Any = weight
        if is_traceable_wrapper_subclass(inner):
            yield from plain_parts((f"{name}.{part}", getattr(inner, part)) for part in inner.__tensor_flatten__()[0])
        else:
            yield name, weight


def unpack(model: PreTrainedModel, dtype: torch.dtype | None) -> None:
    """Give a model that the library unpacks all its weights now, in `dtype`; None for one that is stored whole."""
    if hasattr(model, "ct_decompress_hook"):  # compressed-tensors waits for the first forward
        quantizer: Any = model.hf_quantizer
        quantizer.compressor.decompress_model(model)
    elif dtype is not None and not is_quantized(model):  # fp8 and mxfp4 without their kernels: always in bfloat16
        islands = {*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())}
        for name, weight in model.named_parameters():
            if weight.is_floating_point() and not any(island in name for island in islands):
                weight.data = weight.data.to(dtype)


def own_weights(module: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return a module's parameters and buffers, without its children's; a linear map has a weight and a bias alone."""
    if not hasattr(module, "in_features"):
        return dict([*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)])
    bias = getattr(module, "bias", None)
    return {"weight": weight_of(module, dtype)} | ({} if bias is None else {"bias": bias})


def own_shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all parameters in a module by name, of linear maps as in floating point."""
    shapes = dict[str, tuple[int, ...]]()
    for prefix, part in module.named_modules():
        own = {name: tuple(weight.shape) for name, weight in part.named_parameters(recurse=False)}
        if hasattr(part, "in_features"):
            bias = {"bias": (part.out_features,)} if getattr(part, "bias", None) is not None else {}
            own = {"weight": (part.out_features, part.in_features), **bias}
        shapes |= {f"{prefix}.{name}" if prefix else name: shape for name, shape in own.items()}
    return shapes


def parameter_count(model: PreTrainedModel) -> int:
    """Return the number of parameters that a model has in floating point."""
    if not is_quantized(model):
        return model.num_parameters()
    tied = model.all_tied_weights_keys
    return sum(prod(shape) for name, shape in own_shapes(model).items() if name not in tied)


def float_state(model: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the state that a model, or a part of one, would have in floating point; `dtype` is that of its maps."""
    return {
        f"{prefix}.{name}" if prefix else name: tensor
        for prefix, module in model.named_modules()
        for name, tensor in own_weights(module, dtype).items()
        if name not in module._non_persistent_buffers_set
    }


@torch.no_grad()
def weight_of(linear: Any, dtype: torch.dtype) -> Tensor:
    """Return a linear map's weight, (out, in): the tensor itself if it is floating point, or a copy in `dtype`."""
    weight: Any = getattr(linear, "weight", None)
    if is_traceable_wrapper_subclass(weight) and hasattr(weight, "dequantize"):
        return weight.dequantize().to(dtype)
    if weight is not None and weight.dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        return weight
    # Each method packs its integers in another way, but all are linear maps: feed the identity.
    size, device = linear.in_features, next(iter(linear.state_dict().values())).device
    parts = [
        linear(torch.eye(min(ROWS, size - start), size, dtype=dtype, device=device).roll(start, 1))
        for start in range(0, size, ROWS)
    ]
    columns = torch.cat(parts)
    return (columns if getattr(linear, "bias", None) is None else columns - linear.bias).T.to(dtype)
