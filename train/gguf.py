"""GGUF files as models: a config, a tokenizer and weights in one file, which the library reads and de-quantises.

No other file decides what a GGUF file is, not even one that lies next to it.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import lru_cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.integrations.gguf.reader import read_gguf_metadata
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from draftsmith.decode.errors import InputError
from draftsmith.train.files import is_gguf

ENDS = ("eos", "eot", "eom")
"""The tokens of a file's tokenizer that end a text, a turn or a message: llama.cpp stops at each of them."""
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}
"""The rotation of Llama 3.1 and its successors; a file has its factors alone."""
FACTORS = "rope_freqs.weight"
FLOATS = {0: torch.float32, 1: torch.float16, 32: torch.bfloat16}
"""The dtypes of files that hold no blocks, by their number in llama.cpp."""
IN_BLOCKS = 0.5
"""The margin of two logits that llama.cpp may turn where it multiplies blocks by rounded numbers; 0.39 was seen."""
SPLITS = {*GGUF_PRE_TOKENIZER_SPLITS, "gpt-2", "gpt2", "default"}
"""Names of how a tokenizer of bytes splits words that the library knows; it splits by all others as GPT-2 does."""

library: Any = import_module("transformers.modeling_gguf_pytorch_utils")
logger = logging.getLogger(__name__)


def require_gguf(path: str | Path, field: str) -> None:
    """Require one whole GGUF file, and the package that reads it."""
    if not Path(path).is_file():
        raise InputError(f"{field}: expected a GGUF file, found none at {path}")
    if find_spec("gguf") is None:
        raise InputError(f"{field}: expected the package gguf to read {path}, found none: install draftsmith[gguf]")
    try:
        metadata, _ = read_gguf_metadata(str(path))
    except Exception as error:  # each kind of damage raises another one
        raise InputError(f"{field}: expected a whole GGUF file, found damage in {path}: {error}") from error
    if (parts := metadata.get("split.count", 1)) > 1:
        remedy = "join them with `llama-gguf-split --merge`"
        raise InputError(f"{field}: expected a GGUF file in one part, found {path} of {parts}: {remedy}")


@contextmanager
def source_of(path: str | Path) -> Iterator[tuple[str | Path, dict[str, Any]]]:
    """Yield the path and the options by which `from_pretrained` finds a model: a directory, a hub id, a GGUF file.

    The library gets a file alone in a directory, or it would take a tokenizer that lies next to it.
    """
    if not is_gguf(path):
        yield path, {}
        return
    bar = library.tqdm
    with TemporaryDirectory(prefix="draftsmith-gguf-") as alone:
        (Path(alone) / Path(path).name).symlink_to(Path(path).absolute())
        library.tqdm = partial(bar, disable=True)
        try:
            yield alone, {"gguf_file": Path(path).name}
        finally:
            library.tqdm = bar


def gguf_config(path: str | Path) -> PretrainedConfig:
    """Return a GGUF file's config; raise ValueError for a family or a rotation that the library does not read.

    Weights of blocks count as stored in bfloat16, which rounds them by less than their blocks did.
    """
    stat = Path(path).stat()
    return deepcopy(_config(str(path), stat.st_size, stat.st_mtime_ns))


@lru_cache(maxsize=4)
def _config(path: str, size: int, changed: int) -> PretrainedConfig:
    """Read a config, which takes seconds, since every token of the vocabulary is read too."""
    with source_of(path) as (place, named):
        config: Any = AutoConfig.from_pretrained(place, **named)
    metadata, names = read_gguf_metadata(path)
    config.name_or_path = path
    config.dtype = FLOATS.get(metadata.get("general.file_type", 0), torch.bfloat16)
    classes: Any = AutoModelForCausalLM._model_mapping
    config.architectures = [classes[type(config)].__name__] if type(config) in classes else None
    width = metadata.get(f"{metadata['general.architecture']}.attention.key_length")
    if width and hasattr(config, "head_dim"):
        config.head_dim = width  # the library takes the family's own, as of Qwen3
    ends = [metadata[key] for name in ENDS if (key := f"tokenizer.ggml.{name}_token_id") in metadata]
    config.eos_token_id = config.eos_token_id if len(set(ends)) < 2 else list(dict.fromkeys(ends))
    if hasattr(config, "_model_name_or_path"):
        del config._model_name_or_path
    _rotate(config, metadata, names)
    split = metadata.get("tokenizer.ggml.pre")
    if metadata.get("tokenizer.ggml.model") == "gpt2" and split is not None and split not in SPLITS:
        logger.warning("%s splits words as %s does: the library does not know how, and splits as GPT-2", path, split)
    return config


def holds_blocks(path: str | Path) -> bool:
    """Return whether a model is a GGUF file of quantised blocks, and no plain numbers."""
    return is_gguf(path) and read_gguf_metadata(str(path))[0].get("general.file_type", 0) not in FLOATS


def turned_margin(path: str | Path) -> float | None:
    """Return the margin of two logits that llama.cpp may turn with this target; None where it computes in float32."""
    return IN_BLOCKS if holds_blocks(path) else None


def _rotate(config: Any, metadata: dict[str, Any], names: tuple[str, ...]) -> None:
    """Give a config the rotation of its file that the library drops, Llama 3's; raise ValueError for others."""
    rope: dict[str, Any] = config.get_text_config().rope_parameters or {}
    kinds = [part.get("rope_type") for part in (rope, *rope.values()) if isinstance(part, dict)]
    scaling = metadata.get(f"{metadata['general.architecture']}.rope.scaling.type", "none")
    tensors = [name for name in names if name.startswith("rope_")]
    if scaling != "none" and set(kinds) <= {None, "default"}:
        raise ValueError(f"positions scaled by {scaling}, which the library does not read in GGUF files")
    if tensors == [FACTORS] and rope.get("rope_type") == "default":
        from gguf import GGUFReader

        parts = GGUFReader(config.name_or_path).tensors
        factors = next(torch.tensor(part.data) for part in parts if part.name == FACTORS)
        plain = rope["rope_theta"] ** -(torch.arange(len(factors)) / len(factors))
        config.rope_parameters = rope | LLAMA3 | {"factor": float(factors.max())}
        if torch.allclose(plain / ROPE_INIT_FUNCTIONS["llama3"](config)[0], factors, rtol=1e-4):
            return
    if tensors:
        raise ValueError(f"{tensors[0]}, a rotation that the library does not read in GGUF files")


def check_whole(model: PreTrainedModel, path: str | Path, field: str) -> None:
    """Raise InputError, naming `field`, if a file has more tensors than its model, MTP layers aside."""
    depth, parameters = model.config.get_text_config().num_hidden_layers, list(model.parameters())
    known = {FACTORS, "output.weight"} if model.config.tie_word_embeddings else {FACTORS}
    names = [name for name in read_gguf_metadata(str(path))[1] if name not in known]
    names = [name for name in names if not name.startswith("blk.") or int(name.split(".")[1]) < depth]
    merged = any(parameter.ndim > 2 for parameter in parameters)  # experts: several tensors of the file are one here
    if len(names) > len(parameters) and not merged:
        found = f"{len(names)} tensors for its {len(parameters)}: the library does not read all of them"
        raise InputError(f"{field}: expected the weights of a {type(model).__name__} in {path}, found {found}")
