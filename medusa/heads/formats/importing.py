"""Medusa heads from our files and vLLM's; no tensor is ignored silently."""

import json
import re
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.errors import InputError
from draftsmith.medusa.checkpoint_files import CONFIG, field, read_config, read_safetensors, shards
from draftsmith.medusa.formats import checked_config, read_heads
from draftsmith.medusa.heads.kind import Medusa
from draftsmith.medusa.heads.model import MedusaConfig, MedusaHeads
from draftsmith.train.kinds.export import check_format


def import_heads(
    directory: str | Path, format: str | None = None, target: PreTrainedModel | None = None
) -> MedusaHeads:
    """Read heads from any format, on the CPU, in the widest dtype of their tensors, in eval mode.

    The format is recognised by the files if None. The heads must fit the target.

    Raises:
        InputError: a file, config or tensor that is missing, damaged, not supported or does not match.
    """
    directory = Path(directory)
    format = detect(directory) if format is None else check_format(format, Medusa.formats)
    return {"own": _read_own, "vllm": _read_vllm}[format](directory, target)


def detect(directory: str | Path) -> str:
    """Return the format of a directory, or raise an InputError if it has none, or without a config.json."""
    config = read_config(Path(directory))
    if config.get("model_type") != "medusa":
        raise InputError(f"{directory}: expected Medusa heads in one of {', '.join(Medusa.formats)}, found neither")
    return "own" if "hydra" in config else "vllm"


def _read_own(directory: Path, target: PreTrainedModel | None) -> MedusaHeads:
    raw, path = read_config(directory), directory / CONFIG
    for name in ("logit_scale", "final_logit_softcapping"):
        field(raw, path, name, float, None)
    for name in ("medusa_fc_bias", "original_lm_head", "lm_head_bias", "hydra"):
        field(raw, path, name, bool, None)
    config = checked_config(MedusaConfig, raw, path, MedusaHeads.title)
    return _built(directory, config, read_safetensors(shards(directory)), target)


def _read_vllm(directory: Path, target: PreTrainedModel | None) -> MedusaHeads:
    path = directory / CONFIG
    raw = read_config(directory)
    for kind, name in (("heads", "num_heads"), ("layers", "num_hidden_layers")):
        # vLLM takes any such key, the last one if there are several.
        keys = [key for key in raw if "num" in key and kind in key and not ("heads" in key and kind == "layers")]
        if len({json.dumps(raw[key]) for key in keys}) > 1:
            raise InputError(f"{path}: expected one {name}, found {', '.join(f'{key} {raw[key]}' for key in keys)}")
        for key in keys:
            raw[name] = raw.pop(key)
    shape = {name: field(raw, path, name, int) for name in ("hidden_size", "vocab_size", "num_heads")}
    config = MedusaConfig(
        **shape,
        num_hidden_layers=field(raw, path, "num_hidden_layers", int),
        truncated_vocab_size=field(raw, path, "truncated_vocab_size", int, shape["vocab_size"]),
        medusa_fc_bias=field(raw, path, "medusa_fc_bias", bool, False),
        original_lm_head=field(raw, path, "original_lm_head", bool, False),
        logit_scale=field(raw, path, "logit_scale", float, 1.0),
        base_model_name_or_path=raw.get("base_model_name_or_path"),
    )
    # vLLM accepts a prefix, and two names of a shared head.
    tensors = {name.replace("medusa_heads.", ""): t for name, t in read_safetensors(shards(directory)).items()}
    if config.original_lm_head and "lm_head.weight" not in tensors and "lm_heads.0.weight" in tensors:
        tensors["lm_head.weight"] = tensors.pop("lm_heads.0.weight")
    token_map = tensors.get("token_map")
    if token_map is not None and token_map.ndim == 1 and bool((token_map < config.vocab_size).all()):
        for name, tensor in tensors.items():
            # vLLM cuts heads of the whole vocabulary to the tokens of the map.
            if name.startswith("lm_head") and tensor.ndim == 2 and len(tensor) == config.vocab_size > len(token_map):
                tensors[name] = tensor[token_map.long()]
    if not config.medusa_fc_bias and any(re.fullmatch(r"blocks\.\d+\.layers\.\d+\.bias", name) for name in tensors):
        raise InputError(f"{path}: expected medusa_fc_bias true with biases, which vLLM skips without, found false")
    return _built(directory, config, tensors, target)


def _built(
    directory: Path, config: MedusaConfig, tensors: dict[str, Tensor], target: PreTrainedModel | None
) -> MedusaHeads:
    """Return heads with these tensors, which must match the config."""
    what = f"{config.num_heads} heads with {config.num_hidden_layers} blocks each"
    return read_heads(MedusaHeads, directory, config, tensors, target, what)  # type: ignore[no-any-return]
