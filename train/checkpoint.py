"""Checks of a model's files before and after its weights are read; each error is one line."""

import json
import logging
import pickle
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from difflib import get_close_matches
from itertools import product
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError, StrictDataclassError
from jinja2 import TemplateError
from safetensors import SafetensorError, safe_open
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.errors import InputError, at_least, first_line, lacks_memory
from draftsmith.decode.options import Sampling
from draftsmith.decode.validation import ServerMessage, parse_json, read
from draftsmith.train.files import is_gguf
from draftsmith.train.gguf import require_gguf
from draftsmith.train.quantization import is_quantized, plain_parts

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
POSITIONS = "max_position_embeddings"
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
STORED_FLOATS = ("F64", "F32", "BF16", "F16")
STORED_AS = {torch.int64: ("I64", "I32"), torch.bool: ("BOOL",)}
"""The safetensors dtypes accepted for floats, ids and marks: the library would convert any other without a word."""

OWN_SETTINGS: dict[str, Any] = {
    "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "top_h": None, "typical_p": 1.0, "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0, "repetition_penalty": 1.0, "encoder_repetition_penalty": 1.0, "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0, "bad_words_ids": None, "suppress_tokens": None, "begin_suppress_tokens": None,
    "forced_bos_token_id": None, "forced_eos_token_id": None, "sequence_bias": None, "min_length": 0,
    "min_new_tokens": None, "exponential_decay_length_penalty": None, "guidance_scale": 1.0, "num_beams": 1,
    "watermarking_config": None, "stop_strings": None,
}  # fmt: skip
"""Sampling fields of a generation config, with their neutral values."""

logger = logging.getLogger(__name__)

Stored = Mapping[str, tuple[str, tuple[int, ...]]]
"""The tensors of a checkpoint by name: safetensors' dtype, and shape."""


@contextmanager
def reading_errors(field: str, expected: str) -> Iterator[None]:
    """Turn any exception, except a lack of memory, into the InputError "FIELD: expected EXPECTED, found: …"."""
    try:
        yield
    except Exception as error:  # a broken file makes the library raise exceptions of many types
        if lacks_memory(error):
            raise
        if isinstance(error, pickle.UnpicklingError):
            cause = "pickled objects other than tensors, or damage"
        elif isinstance(error, StrictDataclassError):  # it names the field in the second line
            cause = " ".join(str(error).split())
        else:
            kind = "" if isinstance(error, OSError | ValueError | TemplateError) else f"{type(error).__name__}: "
            cause = kind + first_line(error)
        raise InputError(f"{field}: expected {expected}, found: {cause}") from error


def require_config(path: str | Path, field: str) -> None:
    """Require a GGUF file, a directory whose config.json is an object, or a possible hub id: others take long."""
    if is_gguf(path):
        require_gguf(path, field)
        return
    local = Path(path)
    file = local / "config.json"
    if local.is_dir() and not file.is_file():
        raise InputError(f"{field}: expected a model directory with config.json, found none in {path}")
    is_path = local.exists() or local.is_absolute() or str(path).startswith(".") or str(path).count("/") != 1
    if is_path and not local.is_dir():
        raise InputError(f"{field}: expected a model directory or a hub id, found nothing at {path}")
    if local.is_dir():
        with reading_errors(field, f"a JSON object in {file}"):
            content = parse_json(file.read_text(encoding="utf-8"))
            if not isinstance(content, dict):
                raise ValueError(f"{json.dumps(content)[:20]}")


def check_sizes(config: PretrainedConfig, path: str | Path, field: str) -> None:
    """Require sizes of at least 1 in a causal LM's config."""
    text = config.get_text_config()
    layers = text.per_layer_config if text.is_heterogeneous else [text]
    for layer, name in product(layers, (*SIZES, POSITIONS)):
        value = getattr(layer, name, None)
        if isinstance(value, int):
            at_least(1).check(f"{field}: {name} of {path}", value)


ROPE_TYPES = {"mrope": "default", "su": "longrope"}
"""Equivalent rope types: `su` is an older name, and for text positions `mrope` rotates as the default does."""
FILLED = ["rope_theta", "rope_type", "type", "partial_rotary_factor", "original_max_position_embeddings"]
"""Rope keys that the library fills in when it reads a config, or that are compared separately."""
ROPE_KEYS = [
    *FILLED, "factor", "attention_factor", "attn_factor", "extrapolation_factor",
    "max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate",
    "short_factor", "long_factor", "low_freq_factor", "high_freq_factor",
]  # fmt: skip
"""Rope keys of all families; some have more."""


def check_rope(raw: Mapping[str, Any], where: str = "") -> None:
    """Require that the rope fields of a raw config agree, since readers differ in which one they use.

    Version 5 of the library writes `rope_parameters`, and reads `rope_scaling` first; version 4 reads `rope_theta`
    and `rope_scaling`. `where` begins the message.
    """
    ropes: dict[str, Mapping[str, Any]] = {}
    for name in ("rope_parameters", "rope_scaling"):
        value = {} if raw.get(name) is None else raw[name]
        if not isinstance(value, Mapping):
            raise InputError(f"{where}{name}: expected fields and their values, found {value!r}")
        by_layer = {kind: rope for kind, rope in value.items() if isinstance(rope, Mapping)}
        value = by_layer.get("full_attention", {}) if by_layer else value
        ropes |= {name: value} if value else {}
    thetas = {name: rope["rope_theta"] for name, rope in ropes.items() if rope.get("rope_theta") is not None}
    if ropes and raw.get("rope_theta") is not None:
        thetas["the field rope_theta"] = raw["rope_theta"]
    _require_one("rope_theta", thetas, where)
    types = {name: _rope_type(rope, f"{where}{name}") for name, rope in ropes.items()}
    _require_one("rope_type", types, where)
    # The default type uses no further keys.
    if len(ropes) == 2 and "default" not in types.values():
        for key in sorted(set().union(*ropes.values()).difference(FILLED)):
            _require_one(key, {name: rope.get(key) for name, rope in ropes.items()}, where)


def check_rope_keys(written: Mapping[str, Any], where: str = "") -> None:
    """Require that no rope key of one of our configs is misspelt; other families have keys of their own."""
    for name in ("rope_parameters", "rope_scaling"):
        value = written.get(name)
        if not isinstance(value, Mapping):
            continue
        for rope in [rope for rope in value.values() if isinstance(rope, Mapping)] or [value]:
            for key in rope.keys() - ROPE_KEYS:
                if close := get_close_matches(key, ROPE_KEYS, 1, 0.8):
                    raise InputError(f"{where}{name}: expected {close[0]}, found {key}")


def _require_one(key: str, by_field: Mapping[str, Any], where: str) -> None:
    values = list(by_field.values())
    if values.count(values[0] if values else None) < len(values):
        both = " and ".join(f"{value} in {name}" for name, value in by_field.items())
        raise InputError(f"{where}{key}: expected the same wherever the config says it, found {both}")


def _rope_type(value: Mapping[str, Any], field: str) -> str:
    """Return the rope type, whose key is `type` in older configs."""
    kinds = [ROPE_TYPES.get(str(value[key]), str(value[key])) for key in ("rope_type", "type") if value.get(key)]
    _require_one("rope_type", dict(zip(("rope_type", "type"), kinds, strict=False)), f"{field}: ")
    return kinds[0] if kinds else "default"


def files_of(model: str | Path) -> Path:
    """Return the directory with a model's files: for a hub id its snapshot in the hub's cache, if all weights are here.

    Without them a hub id stays as it is, and no directory.
    """
    directory = Path(model)
    if directory.is_dir():
        return directory
    with suppress(HFValidationError):
        found = (try_to_load_from_cache(str(model), name) for name in (WEIGHTS, INDEX))
        for file in (Path(name) for name in found if isinstance(name, str)):
            if all(part.is_file() for part in (indexed_files(file) if file.name == INDEX else [file])):
                return file.parent
    return directory


def stored_tensors(path: str | Path, field: str) -> Stored:
    """Read and check the headers of a model's safetensors; return {} for pickled weights, and those not yet here."""
    directory, tensors = files_of(path), dict[str, tuple[str, tuple[int, ...]]]()
    files, at = [directory / WEIGHTS], directory / INDEX
    try:
        if not files[0].is_file():
            if not at.is_file():
                return tensors
            files = indexed_files(at, field)
            if missing := [file.name for file in files if not file.is_file()]:
                gap = f"{len(missing)} of {len(files)} files missing, the first {missing[0]}"
                raise InputError(f"{field}: expected whole weights in {path}, found {gap}")
        for at in files:
            with safe_open(at, "pt") as weights:  # checks the file's size too
                for key in weights.keys():  # noqa: SIM118 - not a mapping
                    tensor = weights.get_slice(key)
                    tensors[key] = tensor.get_dtype(), tuple(tensor.get_shape())
        return tensors
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, InputError):
            raise
        reason = first_line(error)
        raise InputError(f"{field}: expected whole weights in {path}, found a damaged {at.name}: {reason}") from error


class Index(ServerMessage):
    """The index of a sharded checkpoint: the file of each tensor."""

    weight_map: dict[str, str]


def indexed_files(index: Path, field: str = "") -> list[Path]:
    """Return the files that an index names, all in its own directory; raise InputError for any other index."""
    names = sorted(set(read(Index, index, field).weight_map.values()))
    for name in names:
        if Path(name).name != name:
            named = f"{field}: " if field else ""
            raise InputError(f"{named}{index}: expected files next to it, found {name!r}")
    return [index.with_name(name) for name in names]


def load_heads(
    cls: type[PreTrainedModel], load: Callable[..., Any], path: str | Path, what: str, *args: Any, **kwargs: Any
) -> Any:
    """Load drafting heads of class `cls` from safetensors with `load`, its `from_pretrained`; `what` names them.

    Raise InputError if the directory or config is missing or invalid, a file is damaged, or a tensor is missing,
    unexpected, of another shape or type, or not finite.
    """
    options: dict[str, Any] = {"use_safetensors": True, "output_loading_info": True, "dtype": "auto"}
    options |= {"ignore_mismatched_sizes": True, **kwargs}  # reported below, in one line
    if "subfolder" not in kwargs:
        require_config(path, what)  # the library would fall back on the defaults
        if Path(path).is_dir():
            _check_stored(cls, path, what)  # before anything takes memory
    with reading_errors(str(path), f"{what} (config.json, safetensors)"):
        heads, info = load(path, *args, **options)
    for kind, fault in (("missing", "missing"), ("unexpected", "not expected"), ("mismatched", "of another shape")):
        _refuse([key if isinstance(key, str) else key[0] for key in info[f"{kind}_keys"]], path, what, fault)
    check_finite(heads, path, what)
    return heads


def _check_stored(cls: type[PreTrainedModel], path: str | Path, what: str) -> None:
    """Require that the tensors of a directory have the shapes and types that its config implies."""
    stored = stored_tensors(path, what)
    with reading_errors(str(path), f"a config of {what}"), torch.device("meta"):
        config: Any = cls.config_class
        empty = cls(config.from_pretrained(path)).state_dict()
    present = {name: tensor for name, tensor in empty.items() if name in stored}
    misshapen = [name for name, tensor in present.items() if stored[name][1] != tensor.shape]
    _refuse(misshapen, path, what, "of another shape")
    for name, tensor in present.items():
        if stored[name][0] not in STORED_AS.get(tensor.dtype, STORED_FLOATS):
            dtype = "floating point" if tensor.is_floating_point() else str(tensor.dtype).removeprefix("torch.")
            raise InputError(f"{path}: expected {name} of {what} in {dtype}, found {stored[name][0]}")


def _refuse(names: Sequence[str], path: str | Path, what: str, fault: str) -> None:
    if names:
        examples = ", ".join(sorted(names)[:5]) + (", …" if len(names) > 5 else "")
        raise InputError(f"{path}: expected the tensors of {what}, found {len(names)} {fault}: {examples}")


def check_loaded(model: PreTrainedModel, info: Mapping[str, Any], stored: Stored, path: str | Path, field: str) -> None:
    """Require that a loaded model has all of its weights, of the right shapes and layers, floating-point and finite.

    `info` is the `output_loading_info` of `from_pretrained`; `stored` holds the checkpoint's tensors, if known.
    """
    kind = type(model).__name__
    missing, unused = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    if missing:  # the library fills them with random numbers and warns
        hint = ", a checkpoint with adapters" if any("lora_" in key for key in unused) else ""
        raise InputError(f"{field}: expected all weights of a {kind} in {path}, found none of {_first(missing)}{hint}")
    for name, shape, expected in sorted(info["mismatched_keys"]):
        tensor = f"{name} of {tuple(shape)} in place of {tuple(expected)}"
        raise InputError(f"{field}: expected weights of the shapes in config.json in {path}, found {tensor}")
    present = {of_any_layer(name) for name in model.state_dict()}
    unused = [name for name in unused if not is_mtp(name, model.config)]
    if beyond := [name for name in unused if of_any_layer(name) in present]:
        layers = f"{model.config.get_text_config().num_hidden_layers} layers that config.json in {path} names"
        raise InputError(f"{field}: expected weights of the {layers}, found {_first(beyond)}")
    if unused:
        logger.warning("%s: %s holds weights that a %s does not use: %s", field, path, kind, _first(unused))
    if name := integer_weight(model, stored):
        dtype = stored[name][0]
        raise InputError(f"{field}: expected weights in a floating-point type in {path}, found {name} in {dtype}")
    check_finite(model, path, field)


@torch.inference_mode()
def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether all numbers are finite, in one pass: a NaN makes both extremes NaN."""
    # A twentieth of the time of `isfinite`, whose result has a byte for each number.
    return not tensor.numel() or bool(torch.stack(tensor.aminmax()).isfinite().all())


def check_finite(model: torch.nn.Module, path: str | Path, field: str) -> None:
    """Require that all weights are finite: a model with NaN would be decoded and measured without a warning."""
    for name, weight in plain_parts(model.named_parameters()):
        if weight.dtype not in FLOATS or not weight.numel() or weight.is_meta:
            continue
        if not is_finite(weight):
            tensor = f"{name} ({str(weight.dtype).removeprefix('torch.')})"
            raise InputError(f"{field}: expected finite weights in {path}, found NaN or infinity in {tensor}")


def integer_weight(model: PreTrainedModel, stored: Stored) -> str | None:
    """Return the first weight stored in integers without a quantisation config, which the library would convert."""
    if is_quantized(model):
        return None
    weights = (name for name, weight in model.named_parameters() if name in stored and weight.is_floating_point())
    return next((name for name in weights if stored[name][0][0] in "IU" or stored[name][0] == "BOOL"), None)


def load_generation_config(path: str | Path, config: PretrainedConfig, *, field: str = "model") -> GenerationConfig:
    """Read and check a model's generation config, which older models have in config.json."""
    with reading_errors(field, f"a generation_config.json in {path}"):
        try:
            if is_gguf(path):
                raise OSError
            generation = GenerationConfig.from_pretrained(path)
        except OSError:
            if (Path(path) / "generation_config.json").is_file():
                raise
            generation = GenerationConfig.from_model_config(config)
    _end_ids(generation, f"{field}: {path}")
    return generation


def end_of_sequence_ids(generation: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids that end a target's texts: those of its generation config, else the tokenizer's."""
    return _end_ids(generation) or ([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])


def unapplied_settings(generation: GenerationConfig, path: str | Path | None = None) -> list[str]:
    """Return the sampling settings of a target's generation config, which no command applies.

    Options that are not given are neutral, here and in each request to a server. Ends of sequence do apply. Where
    `path`, the target's directory, is given, log a warning.
    """
    stored = {name: getattr(generation, name, None) for name in OWN_SETTINGS}
    stored = {name: value for name, value in stored.items() if value not in (None, [], {}, OWN_SETTINGS[name])}
    settings = [f"{name} {value}" if len(str(value)) < 60 else name for name, value in stored.items()]
    if settings and path is not None:
        options = ", ".join(f"{field.name}: {stored[field.name]}" for field in fields(Sampling) if field.name in stored)
        hint = f": vLLM does by default, and fields do here: {options}" if options else ""
        text = "target: %s has %s in its generation config, which is not applied%s"
        logger.warning(text, path, ", ".join(settings), hint)
    return settings


def _end_ids(generation: GenerationConfig | None, field: str = "model") -> list[int]:
    ends = None if generation is None else generation.eos_token_id
    ids = [ends] if isinstance(ends, int) else list(ends or [])
    if not all(isinstance(token, int) for token in ids):
        raise InputError(f"{field}: expected ids as eos_token_id of the generation config, found {ends!r}")
    return ids


MTP_COUNTS = ("num_mtp_layers", "num_nextn_predict_layers", "mtp_num_hidden_layers")
"""The fields by which configs count a target's layers for multi-token prediction."""


def mtp_layers(config: PretrainedConfig) -> int:
    """Return how many MTP layers a target's config promises; 0 without a field that counts them."""
    counts = [getattr(config.get_text_config(), name, None) for name in MTP_COUNTS]
    return max((count for count in counts if isinstance(count, int)), default=0)


def mtp_layer(name: str, config: PretrainedConfig) -> int | None:
    """Return the index of the MTP layer that a tensor belongs to, by its name; None for all other tensors.

    Two ways of naming are in use: `mtp.layers.0.…`, with `mtp.fc` and norms next to the only layer, and
    `model.layers.N.…` with N from the number of the target's own layers on.
    """
    number, own = re.search(r"(^|\.)layers\.(\d+)\.", name), config.get_text_config().num_hidden_layers
    if re.search(r"(^|\.)mtp\.", name):
        return 0 if number is None else int(number[2])
    return int(number[2]) - own if number is not None and int(number[2]) >= own else None


def is_mtp(name: str, config: PretrainedConfig) -> bool:
    """Return whether a tensor belongs to one of the MTP layers that a target's config promises."""
    index = mtp_layer(name, config)
    return index is not None and index < mtp_layers(config)


def of_any_layer(name: str) -> str:
    """Return a tensor's name with `*` for the numbers of its layer and expert."""
    return re.sub(r"\d+", "*", name)


def _first(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
