"""Medusa heads out of the formats of `draftsmith.medusa.formats.export`, every tensor accounted for."""

import json
import pickle
import re
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.errors import InputError, first_line
from draftsmith.medusa.formats.export import (
    CONFIG,
    FORMATS,
    LEGACY,
    PICKLED,
    PREFIXES,
    WEIGHTS,
    assembled,
    check_format,
    dtype_name,
    tensor_names,
)
from draftsmith.medusa.heads import MedusaConfig, MedusaHeads
from draftsmith.train.checkpoint import check_finite
from draftsmith.train.files import parse_json
from draftsmith.train.losses.output_head import head_of
from draftsmith.train.models import DTYPES


def import_heads(
    directory: str | Path, format: str | None = None, target: PreTrainedModel | None = None
) -> MedusaHeads:
    """Read heads from any format.

    Args:
        directory: a local one.
        format: one of `FORMATS`; recognised by its files if None.
        target: whose language-model head they use, where the file has none; else they must fit it.

    Returns:
        Heads in the widest dtype of their tensors, on the CPU, in eval mode.

    Raises:
        InputError: no such format, a file that is missing, damaged or holds pickled code, a config that cannot be, or
            tensors that are missing, not expected or of another shape.
    """
    directory = Path(directory)
    format = detect(directory) if format is None else check_format(format)
    if format == "own":
        heads = _read_own(directory)
    elif format == "vllm":
        heads = _read_vllm(directory)
    else:
        heads = _read_sequential(directory, format, target)
    if target is not None:
        heads.check_fits(target)
    return heads.eval()


def detect(directory: str | Path) -> str:
    """Return the one format that a directory is in.

    Raises:
        InputError: no config.json, none of the formats, or more than one of them.
    """
    directory = Path(directory)
    config = _read_config(directory)
    marks = {
        "own": config.get("model_type") == "medusa" and "hydra" in config,
        "vllm": config.get("model_type") == "medusa" and "hydra" not in config,
        "fasterdecoding": (directory / PICKLED).is_file() or (directory / LEGACY).is_file(),
        "modelopt": isinstance(config.get("medusa"), dict),
    }
    formats = [format for format, marked in marks.items() if marked]
    if len(formats) != 1:
        raise InputError(
            f"{directory}: expected Medusa heads in one of {', '.join(FORMATS)}, found "
            + (f"marks of {' and '.join(formats)}; name the format" if formats else "no mark of any")
        )
    return formats[0]


def _read_own(directory: Path) -> MedusaHeads:
    raw, path = _read_config(directory), directory / CONFIG
    for name in ("logit_scale", "final_logit_softcapping"):
        _field(raw, path, name, float, None)
    for name in ("medusa_fc_bias", "original_lm_head", "lm_head_bias", "hydra"):
        _field(raw, path, name, bool, None)
    try:
        config = MedusaConfig.from_dict(raw)
    except Exception as error:  # the library stumbles over whatever it finds
        raise InputError(f"{path}: expected a config of heads, found: {first_line(error)}") from error
    return _built(directory, config, _read_safetensors(_shards(directory)), {})


def _read_vllm(directory: Path) -> MedusaHeads:
    path = directory / CONFIG
    raw = _read_config(directory)
    for kind, name in (("heads", "num_heads"), ("layers", "num_hidden_layers")):
        # vLLM takes any such key for it, the last one if there are several.
        keys = [key for key in raw if "num" in key and kind in key and not ("heads" in key and kind == "layers")]
        if len({json.dumps(raw[key]) for key in keys}) > 1:
            raise InputError(f"{path}: expected one {name}, found {', '.join(f'{key} {raw[key]}' for key in keys)}")
        for key in keys:
            raw[name] = raw.pop(key)
    shape = {name: _field(raw, path, name, int) for name in ("hidden_size", "vocab_size", "num_heads")}
    config = MedusaConfig(
        **shape,
        num_hidden_layers=_field(raw, path, "num_hidden_layers", int),
        truncated_vocab_size=_field(raw, path, "truncated_vocab_size", int, shape["vocab_size"]),
        medusa_fc_bias=_field(raw, path, "medusa_fc_bias", bool, False),
        original_lm_head=_field(raw, path, "original_lm_head", bool, False),
        logit_scale=_field(raw, path, "logit_scale", float, 1.0),
        base_model_name_or_path=raw.get("base_model_name_or_path"),
    )
    tensors = {name.replace("medusa_heads.", ""): t for name, t in _read_safetensors(_shards(directory)).items()}
    if config.original_lm_head and "lm_head.weight" not in tensors and "lm_heads.0.weight" in tensors:
        tensors["lm_head.weight"] = tensors.pop("lm_heads.0.weight")
    token_map = tensors.get("token_map")
    if token_map is not None and token_map.ndim == 1 and bool((token_map < config.vocab_size).all()):
        for name, tensor in tensors.items():
            # vLLM cuts heads of the whole vocabulary to the tokens of the map.
            if name.startswith("lm_head") and tensor.ndim == 2 and len(tensor) == config.vocab_size > len(token_map):
                tensors[name] = tensor[token_map.long()]
    if not config.medusa_fc_bias and any(re.fullmatch(r"blocks\.\d+\.layers\.\d+\.bias", name) for name in tensors):
        raise InputError(f"{path}: expected medusa_fc_bias true beside biases, which vLLM skips without, found false")
    return _built(directory, config, tensors, {})


def _read_sequential(directory: Path, format: str, target: PreTrainedModel | None) -> MedusaHeads:
    """Read formats whose heads are sequences: blocks, then a linear map."""
    path = directory / CONFIG
    raw = _read_config(directory)
    prefix = PREFIXES[format]
    if format == "modelopt":
        shape = _field(raw, path, "medusa", dict)
        heads, layers = (_field(shape, path, f"num_medusa_{part}", int) for part in ("heads", "layers"))
        # ModelOpt keeps the heads inside of a checkpoint of the whole model, of which they are all that is read.
        tensors = _read_safetensors(_shards(directory), lambda name: name.startswith(prefix))
    else:
        heads, layers = (_field(raw, path, f"medusa_num_{part}", int) for part in ("heads", "layers"))
        tensors = _read_fasterdecoding(directory)
    first, last = f"{prefix}0.0.linear.weight", f"{prefix}0.{layers}.weight"
    shared = not any(re.fullmatch(rf"{re.escape(prefix)}\d+\.{layers}\.weight", name) for name in tensors)
    if shared and target is None:
        raise InputError(f"target: expected it for heads without language-model heads, as in {directory}, found none")
    for name in (first,) if shared else (first, last):
        if name not in tensors or tensors[name].ndim != 2:
            raise InputError(f"{directory}: expected the tensors of {heads} heads, found no matrix {name}")
    config = MedusaConfig(
        hidden_size=tensors[first].shape[1],
        vocab_size=1 if shared else tensors[last].shape[0],
        num_heads=heads,
        num_hidden_layers=layers,
        medusa_fc_bias=True,
        medusa_choices=_field(raw, path, "medusa_choices", list, None),
        base_model_name_or_path=raw.get("base_model_name_or_path"),
    )
    names = tensor_names(config, format)
    if shared and target is not None:
        head = head_of(target)
        config.vocab_size = config.truncated_vocab_size = len(head.weight)
        config.original_lm_head, config.lm_head_bias = True, head.bias is not None
        config.logit_scale, config.final_logit_softcapping = head.scale, head.softcap
        tensors["lm_head.weight"] = head.weight.detach().cpu().clone()
        if head.bias is not None:
            tensors["lm_head.bias"] = head.bias.detach().cpu().clone()
    return _built(directory, config, tensors, names)


def _read_fasterdecoding(directory: Path) -> dict[str, Tensor]:
    pickled, legacy = directory / PICKLED, directory / LEGACY
    if pickled.is_file() == legacy.is_file():
        what = "both, which can differ: remove one" if legacy.is_file() else "neither"
        raise InputError(f"{directory}: expected {PICKLED} or {LEGACY}, found {what}")
    if legacy.is_file():
        return _read_safetensors([legacy])
    try:
        tensors = torch.load(pickled, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise InputError(f"{pickled}: expected pickled tensors alone, found other objects or damage") from error
    except Exception as error:  # a damaged archive raises whatever its reader stumbles over
        raise InputError(f"{pickled}: expected a whole file of tensors, found: {first_line(error)}") from error
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise InputError(f"{pickled}: expected a state dict, found {type(tensors).__name__} of other things")
    return {str(name): tensor for name, tensor in tensors.items()}


def _built(directory: Path, config: MedusaConfig, tensors: dict[str, Tensor], names: dict[str, str]) -> MedusaHeads:
    """Return heads with these tensors, which must be those of the config, under the names of their format."""
    try:
        with torch.device("meta"):
            empty = MedusaHeads(config).state_dict()
    except InputError as error:
        raise InputError(f"{directory / CONFIG}: {error}") from error
    expected = {names.get(name, name): (name, tensor) for name, tensor in empty.items()}
    for kind, odd in (("missing", expected.keys() - tensors), ("not expected", tensors.keys() - expected)):
        if odd:
            listed = f"{', '.join(sorted(odd)[:5])}{', …' if len(odd) > 5 else ''}"
            raise InputError(
                f"{directory}: expected the tensors of {config.num_heads} heads with {config.num_hidden_layers} "
                f"blocks each, found {len(odd)} {kind}: {listed}"
            )
    for name, (_, tensor) in expected.items():
        if tensors[name].shape != tensor.shape:
            shape = tuple(tensors[name].shape)
            raise InputError(f"{directory}: expected {name} of shape {tuple(tensor.shape)}, found {shape}")
        if (tensors[name].dtype in DTYPES.values()) != tensor.is_floating_point():
            wanted = "a floating-point type" if tensor.is_floating_point() else "integers"
            raise InputError(f"{directory}: expected {name} in {wanted}, found {dtype_name(tensors[name].dtype)}")
    ours = {name: tensors[theirs] for theirs, (name, _) in expected.items()}
    # One dtype for all, which must lose nothing: float16 blocks before a bfloat16 head become float32.
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in ours.values() if tensor.is_floating_point()))
    ours = {k: tensor.to(dtype if tensor.is_floating_point() else torch.int64) for k, tensor in ours.items()}
    heads = assembled(config, ours).check_map()
    check_finite(heads, directory, "Medusa heads")
    return heads


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / CONFIG
    if not directory.is_dir():
        raise InputError(f"{directory}: expected a directory of Medusa heads, found none")
    try:
        config = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{directory}: expected Medusa heads with {CONFIG}, found: {error}") from error
    except ValueError as error:
        raise InputError(f"{path}: expected JSON, found: {error}") from error
    if not isinstance(config, dict):
        raise InputError(f"{path}: expected an object, found {type(config).__name__}")
    return config


def _field(config: dict[str, Any], path: Path, name: str, kind: type, default: Any = ...) -> Any:
    value = config.get(name)
    value = default if value is None else value
    if value is ...:
        raise InputError(f"{path}: expected {name}, found none")
    accepted = (int, float) if kind is float else kind
    if value is not default and (not isinstance(value, accepted) or (kind is not bool and isinstance(value, bool))):
        raise InputError(f"{path}: expected {name} as {kind.__name__}, found {value!r}")
    return value


def _shards(directory: Path) -> list[Path]:
    index = directory / f"{WEIGHTS}.index.json"
    if not index.is_file():
        return [directory / WEIGHTS]
    try:
        names = parse_json(index.read_text(encoding="utf-8"))["weight_map"].values()
        return [directory / name for name in sorted(set(names))]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{index}: expected an index of safetensors, found: {first_line(error)}") from error


def _read_safetensors(paths: list[Path], keep: Callable[[str], bool] = lambda name: True) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path in paths:
        try:
            with safe_open(path, "pt") as file:
                tensors |= {name: file.get_tensor(name) for name in file.keys() if keep(name)}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise InputError(f"{path}: expected safetensors, found: {first_line(error)}") from error
    return tensors
