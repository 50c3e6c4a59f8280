"""Files of checkpoints: the fields of a config, and tensors, where an unexpected one is an error."""

import pickle
from collections.abc import Callable, Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.errors import InputError, first_line
from draftsmith.decode.validation import read
from draftsmith.train.checkpoint import indexed_files
from draftsmith.train.models import DTYPES, empty_model, load_model, stored_dtype

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
CONFIG, WEIGHTS = "config.json", "model.safetensors"


def match_tensors(
    directory: Path, what: str, empty: Mapping[str, Tensor], tensors: Mapping[str, Tensor], names: Mapping[str, str]
) -> dict[str, Tensor]:
    """Return tensors under our names, in the widest of their floating-point types; InputErrors name `what` they are of.

    `empty` holds the expected tensors by our names, for shapes and kinds of dtype; `names` the file's names where they
    differ.
    """
    expected = {names.get(name, name): (name, tensor) for name, tensor in empty.items()}
    # Readers of other tools skip what they do not know, and start missing weights at random: both are errors here.
    for kind, odd in (("missing", expected.keys() - tensors), ("not expected", tensors.keys() - expected)):
        if odd:
            listed = f"{', '.join(sorted(odd)[:5])}{', …' if len(odd) > 5 else ''}"
            raise InputError(f"{directory}: expected the tensors of {what}, found {len(odd)} {kind}: {listed}")
    for name, (_, tensor) in expected.items():
        if tensors[name].shape != tensor.shape:
            shape = tuple(tensors[name].shape)
            raise InputError(f"{directory}: expected {name} of shape {tuple(tensor.shape)}, found {shape}")
        if tensors[name].dtype not in (DTYPES.values() if tensor.is_floating_point() else INTEGERS):
            wanted = "a floating-point type" if tensor.is_floating_point() else "integers"
            raise InputError(f"{directory}: expected {name} in {wanted}, found {dtype_name(tensors[name].dtype)}")
    ours = {name: tensors[theirs] for theirs, (name, _) in expected.items()}
    # One dtype that loses nothing: float16 blocks with a bfloat16 head become float32.
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in ours.values() if tensor.is_floating_point()))
    return {k: tensor.to(dtype if tensor.is_floating_point() else empty[k].dtype) for k, tensor in ours.items()}


def round_tensors(tensors: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return tensors on the CPU, rounded to a dtype; raise an InputError if a number is not finite there."""
    copies = {}
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            copies[name] = tensor.cpu()
            continue
        # Copies, because safetensors refuses two names for one memory, and converters drop such names.
        copies[name] = tensor.detach().to("cpu", dtype, copy=True).contiguous()
        if not copies[name].isfinite().all():
            raise InputError(f"heads: expected weights that are finite in {dtype_name(dtype)}, found others in {name}")
    return copies


def from_tensors(heads_class: Any, config: Any, tensors: dict[str, Tensor]) -> Any:
    """Return heads with these tensors, under our names, in eval mode; nothing is copied."""
    with torch.device("meta"):
        heads = heads_class(config)
    heads.load_state_dict(tensors, assign=True)
    for name, module in heads.named_children():
        if hasattr(module, "inv_freq"):
            setattr(heads, name, type(module)(config))  # the frequencies of a rotation are computed, not stored
    return heads.eval()


def read_pickled(pickled: Path) -> dict[str, Tensor]:
    """Return the tensors of a file that torch.save wrote, or raise an InputError."""
    try:
        # Only tensors: pickled code would be run.
        tensors = torch.load(pickled, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise InputError(f"{pickled}: expected pickled tensors alone, found other objects or damage") from error
    except Exception as error:  # a damaged archive raises any error of its reader
        raise InputError(f"{pickled}: expected a whole file of tensors, found: {first_line(error)}") from error
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise InputError(f"{pickled}: expected a state dict, found {type(tensors).__name__} of other things")
    return {str(name): tensor for name, tensor in tensors.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name, such as bfloat16."""
    return str(dtype).removeprefix("torch.")


def read_config(directory: Path, what: str = "Medusa heads") -> dict[str, Any]:
    """Return a directory's config.json, or raise an InputError that names `what` was expected."""
    path = directory / CONFIG
    if not directory.is_dir():
        raise InputError(f"{directory}: expected a directory of {what}, found none")
    try:
        return read(dict[str, Any], path)
    except FileNotFoundError as error:
        raise InputError(f"{directory}: expected {what} with {CONFIG}, found none") from error


def field(config: dict[str, Any], path: Path, name: str, kind: type, default: Any = ...) -> Any:
    """Return a config's field of type `kind`, or the default if it is missing; without one raise an InputError."""
    value = config.get(name)
    value = default if value is None else value
    if value is ...:
        raise InputError(f"{path}: expected {name}, found none")
    # JSON has one type of numbers, and Python's bool is an int.
    accepted = (int, float) if kind is float else kind
    if value is not default and (not isinstance(value, accepted) or (kind is not bool and isinstance(value, bool))):
        raise InputError(f"{path}: expected {name} as {kind.__name__}, found {value!r}")
    return value


def shards(directory: Path) -> list[Path]:
    """Return the paths of a directory's safetensors: one file, or those in its index, all inside of the directory."""
    index = directory / f"{WEIGHTS}.index.json"
    if not index.is_file():
        return [directory / WEIGHTS]
    return indexed_files(index)


def read_safetensors(paths: list[Path], keep: Callable[[str], bool] = lambda name: True) -> dict[str, Tensor]:
    """Return the tensors of some files whose names pass `keep`, or raise an InputError."""
    tensors: dict[str, Tensor] = {}
    for path in paths:
        try:
            with safe_open(path, "pt") as file:
                tensors |= {name: file.get_tensor(name) for name in file.keys() if keep(name)}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise InputError(f"{path}: expected safetensors, found: {first_line(error)}") from error
    return tensors


def load_target(path: str | None, trust_remote_code: bool) -> PreTrainedModel | None:
    """Load the target of an export or import on the CPU, in its stored dtype; None without one."""
    if path is None:
        return None
    dtype = stored_dtype(empty_model(path, field="target", trust_remote_code=trust_remote_code).config)
    return load_model(path, field="target", dtype=dtype, trust_remote_code=trust_remote_code, device="cpu")
