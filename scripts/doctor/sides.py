"""A target, a draft or Medusa heads as `draftsmith doctor` sees them: shapes, and headers of what is stored."""

import json
from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from draftsmith.decode.errors import InputError, first_line
from draftsmith.medusa import MedusaHeads
from draftsmith.medusa.heads import MedusaConfig
from draftsmith.scripts.doctor.findings import Finding
from draftsmith.train.models import load_tokenizer

# What safetensors calls the dtypes that are arithmetic too; others are quantised.
STORED = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True)
class Side:
    """A target or a draft, without its weights."""

    role: str
    path: str
    tokenizer: PreTrainedTokenizerBase
    model: PreTrainedModel
    """On the meta device."""
    ends: tuple[int, ...]
    """The ids that end a text, by its generation config."""
    stored: Counter[str]
    """Numbers in the checkpoint by dtype, as safetensors names it; empty where its files are not here to be read."""

    @property
    def config(self) -> Any:
        """The text model's config."""
        return self.model.config.get_text_config()

    @property
    def head(self) -> int:
        """Logits a position."""
        return int(self.config.vocab_size)

    @property
    def positions(self) -> int | None:
        """The longest text, in tokens; None where the architecture has no such limit."""
        return getattr(self.config, "max_position_embeddings", None)


@dataclass(frozen=True)
class Heads:
    """Medusa heads, without their weights."""

    role: str
    path: str
    model: MedusaHeads
    """On the meta device."""
    stored: Counter[str]
    """As of a `Side`."""


def load_side(role: str, path: str, trust_remote_code: bool) -> tuple[Side | None, Finding]:
    """Load a target or a draft without its weights, and say what it is; None where it does not load."""
    try:
        tokenizer = load_tokenizer(path, field=role, trust_remote_code=trust_remote_code)
        model, config = _empty_model(role, path, trust_remote_code)
    except InputError as error:
        said = str(error).removeprefix(f"{role}: ")
        return None, Finding("error", role, said, "give the directory of a causal LM and its tokenizer")
    try:
        generation = GenerationConfig.from_pretrained(path)
    except OSError:
        generation = GenerationConfig.from_model_config(config)
    ends = generation.eos_token_id
    layers = getattr(model.config.get_text_config(), "num_hidden_layers", "?")
    said = f"{type(model).__name__}, {_counted(layers, 'layer')}, {_count(model.num_parameters())} parameters"
    tensors, finding = _checkpoint(role, path, said)
    side = Side(
        role, path, tokenizer, model, tuple([ends] if isinstance(ends, int) else ends or ()), _by_dtype(tensors)
    )
    return side, finding


def load_heads(path: str) -> tuple[Heads | None, Finding]:
    """Load Medusa heads without their weights, and say what they are; None where they do not load."""
    role, remedy = (
        "medusa",
        "give what draftsmith.medusa wrote; draftsmith export --import-from DIR reads other formats",
    )
    try:
        model = _empty_heads(path)
    except InputError as error:
        said = str(error).removeprefix("medusa: ")
        if said.startswith("tree: "):
            remedy = "search one that they can draft: draftsmith medusa-tree --heads DIR"
        return None, Finding("error", role, said, remedy)
    config = model.config
    said = f"{_counted(config.num_heads, 'head')}, {_counted(config.num_hidden_layers, 'block')} each, "
    said += f"{_count(model.num_parameters())} parameters"
    tensors, finding = _checkpoint(role, path, said)
    if finding.state != "error" and tensors:
        wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        found = {name: shape for name, (_, shape) in tensors.items()}
        differing = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
        if differing:  # loaders skip names they do not know, and fill what is missing with random numbers
            name = differing[0]
            finding = Finding(
                "error",
                role,
                f"{said}, but {len(differing)} tensors are not what its config.json says, the first {name}: expected "
                f"{wanted.get(name, 'none')}, found {found.get(name, 'none')}",
                remedy,
            )
    return Heads(role, path, model, _by_dtype(tensors)), finding


def _empty_model(role: str, path: str, trust_remote_code: bool) -> tuple[PreTrainedModel, Any]:
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            # In bfloat16: grouped products of experts have no shapes in another dtype.
            model: Any = AutoModelForCausalLM.from_config(
                config, dtype=torch.bfloat16, trust_remote_code=trust_remote_code
            )
    except Exception as error:  # a broken config raises whatever its architecture stumbles over
        raise InputError(f"{role}: expected a causal LM in {path}, found: {first_line(error)}") from error
    return model.eval(), config


def _empty_heads(path: str) -> MedusaHeads:
    directory = Path(path)
    if not (directory / "config.json").is_file() and (directory.exists() or path.count("/") != 1):  # no hub id
        raise InputError(f"medusa: expected a directory of Medusa heads with config.json, found none in {path}")
    try:
        config = MedusaConfig.from_pretrained(path)
        with torch.device("meta"):
            return MedusaHeads(config)
    except InputError:
        raise
    except Exception as error:  # as above
        raise InputError(f"medusa: expected Medusa heads in {path}, found: {first_line(error)}") from error


def _checkpoint(role: str, path: str, said: str) -> tuple[dict[str, tuple[str, tuple[int, ...]]], Finding]:
    """Read the headers of a directory's safetensors: dtype and shape by name, and what is wrong with the files."""
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    directory = Path(path)
    if not directory.is_dir():
        return tensors, Finding("ok", role, f"{said}; the weights, on the hub, were not looked at")
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        if any(directory.glob("pytorch_model*.bin")):
            remedy = "save it again with save_pretrained: safetensors"
            return tensors, Finding("warning", role, f"{said}, in pickled weights", remedy)
        return tensors, Finding("error", role, f"{said}, but no weights in {path}", "copy its *.safetensors there")
    for file in files:
        try:
            with safe_open(file, "pt") as weights:
                for key in weights.keys():  # noqa: SIM118 - it is no mapping
                    tensor = weights.get_slice(key)
                    tensors[key] = tensor.get_dtype(), tuple(tensor.get_shape())
        except (SafetensorError, OSError) as error:
            remedy = "copy it there again"
            return tensors, Finding("error", role, f"{said}, but {file.name} is damaged: {error}", remedy)
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            shards = set(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, KeyError, OSError) as error:
            remedy = "copy it there again"
            return tensors, Finding("error", role, f"{said}, but {index.name} is damaged: {error}", remedy)
        missing = sorted(shards - {file.name for file in files})
        if missing:
            count = f"{len(missing)} of {len(shards)} files are missing, the first {missing[0]}"
            return tensors, Finding("error", role, f"{said}, but {count}", "copy them there")
    if not tensors:
        return tensors, Finding("error", role, f"{said}, but no weights in {files[0].name}", "copy it there again")
    (dtype, most), whole = _by_dtype(tensors).most_common(1)[0], _by_dtype(tensors).total()
    mixed = "" if most == whole else f" ({most / whole:.0%} of it)"
    return tensors, Finding("ok", role, f"{said}, stored as {dtype}{mixed}")


def _by_dtype(tensors: dict[str, tuple[str, tuple[int, ...]]]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for dtype, shape in tensors.values():
        counts[dtype] += prod(shape)
    return counts


def _count(number: int) -> str:
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= unit:
            return f"{number / unit:.1f} {name}"
    return str(number)


def _counted(number: Any, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
