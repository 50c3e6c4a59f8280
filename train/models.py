"""Safe loading of models and tokenizers, and checks that a drafter and a target share their tokens."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from logging import LogRecord, getLogger
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    BitsAndBytesConfig,
    GgufConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.integrations import deepspeed
from transformers.utils import logging
from transformers.utils.generic import is_flash_attention_requested

from draftsmith.decode.cache import check_causal, follows_one_path, rotate_by_text
from draftsmith.decode.draft_models.cut_vocabulary import cut_head
from draftsmith.decode.draft_models.vocabulary import token_count
from draftsmith.decode.errors import InputError, first_line, one_of
from draftsmith.decode.progress import phase
from draftsmith.train import options
from draftsmith.train.checkpoint import (
    check_loaded,
    check_rope,
    check_sizes,
    load_generation_config,
    reading_errors,
    require_config,
    stored_tensors,
)
from draftsmith.train.files import is_gguf
from draftsmith.train.gguf import check_whole, gguf_config, holds_blocks, source_of
from draftsmith.train.quantization import quantization_of, unpack

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
QUANTIZATIONS: dict[str, dict[str, Any]] = {
    "8bit": {"load_in_8bit": True},
    "4bit": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16},
}


def default_device() -> torch.device:
    """Return this process's CUDA device where there is one, the CPU otherwise."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def named_device(name: torch.device | str | None) -> torch.device | None:
    """Return the named device of this machine, or raise InputError; None for None."""
    if name is None:
        return None
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:  # the latter if torch was built without CUDA
        raise InputError(f"device: expected a device of this machine, found {name}: {first_line(error)}") from error


def load_config(path: str | Path, *, field: str = "model", trust_remote_code: bool = False) -> PretrainedConfig:
    """Read a causal LM's config, without weights; raise InputError naming `field` if it is missing or damaged."""
    require_config(path, field)
    with reading_errors(field, f"a causal LM in {path}"):
        if is_gguf(path):
            config = gguf_config(path)
            raw: dict[str, Any] = {}
        else:
            config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
            raw, _ = PretrainedConfig.get_config_dict(path)
    for part in (raw, raw.get("text_config") or {}):
        check_rope(part, f"{field}: {path}: ")
    check_sizes(config, path, field)
    return config


def vocabulary_size(path: str | Path, *, field: str = "target", trust_remote_code: bool = False) -> int:
    """Return a model's number of logits, from its config alone."""
    config = load_config(path, field=field, trust_remote_code=trust_remote_code)
    return int(config.get_text_config().vocab_size)


def resolve_dtype(
    dtype: str,
    path: str | Path,
    *,
    field: str = "target",
    device: torch.device | None = None,
    trust_remote_code: bool = False,
) -> str:
    """Return a dtype's name; resolve "auto", and print the reason on standard error.

    "auto" is the dtype that the model is stored in, or float32 if `device` (the default one if None) has no fast
    arithmetic for that. CPUs are fast in float32, and in bfloat16 if they have AVX-512 BF16 or AMX; GPUs from Ampere on
    are fast in both.
    """
    if dtype != "auto":
        return dtype
    config = load_config(path, field=field, trust_remote_code=trust_remote_code)
    kind, stored = (device or default_device()).type, stored_dtype(config)
    resolved = fast_dtype(config, kind)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        why = "" if resolved == stored else f", for which this {kind.upper()} has no fast arithmetic"
        held = f"blocks of {path} become {stored}" if holds_blocks(path) else f"{path} is stored in {stored}"
        print(f"dtype: {resolved}; {held}{why}", file=sys.stderr)
    return resolved


def fast_dtype(config: PretrainedConfig, device: str) -> str:
    """Return the dtype that `resolve_dtype` picks for "auto" on a device of this type."""
    stored = stored_dtype(config)
    return stored if has_fast(stored, device) else "float32"


def stored_dtype(config: PretrainedConfig) -> str:
    """Return the name of the dtype that a config says its weights are stored in, or float32 without one."""
    name = str(config.dtype or config.get_text_config().dtype).removeprefix("torch.")
    return name if name in DTYPES else "float32"


def has_fast(dtype: str, device: str) -> bool:
    """Return whether a device of this type has fast arithmetic in a dtype."""
    if device == "cuda":
        return dtype != "bfloat16" or torch.cuda.is_bf16_supported(including_emulation=False)
    if dtype == "bfloat16":
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return dtype != "float16"


def _no_report(record: LogRecord) -> bool:
    """Filter out the libraries' reports of what `check_loaded` checks and of layers that stay on the disk."""
    return not any(words in record.getMessage() for words in ("LOAD REPORT", "they were offloaded to the"))


@contextmanager
def whole_weights() -> Iterator[None]:
    """Build and load models whole under DeepSpeed ZeRO-3, which would give each process a share of the weights.

    Shares have no values outside of an engine. A frozen target has no engine, and a draft is sharded by its own.
    """
    logging.disable_progress_bar()  # a bar for each file adds nothing to the bars of the work itself
    reports = [getLogger(name) for name in ("transformers.modeling_utils", "accelerate.big_modeling")]
    for report in reports:
        report.addFilter(_no_report)
    reference = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = reference
        for report in reports:
            report.removeFilter(_no_report)


def load_model(
    path: str | Path,
    *,
    field: str = "model",
    dtype: str = "float32",
    trust_remote_code: bool = False,
    device: torch.device | str | dict[str, str] | None = None,
    quantization: str | None = None,
) -> PreTrainedModel:
    """Load a causal LM for inference: eval mode, no gradients, on `device` (the default device if None).

    A dictionary has the devices of modules, by name. `dtype` may be "auto" (`resolve_dtype`), and `quantization` `8bit`
    or `4bit` (bitsandbytes). Pickled weights are read with `weights_only=True`. Under ZeRO-3 each process gets a whole
    copy. Raise InputError, which names `field`, if there is no causal LM at `path`, or its weights are incomplete or
    invalid.
    """
    one_of(options.DTYPES).check("dtype", dtype)
    config = load_config(path, field=field, trust_remote_code=trust_remote_code)
    stored = stored_tensors(path, field)
    where = torch.device("cpu") if isinstance(device, dict) else named_device(device)
    dtype = resolve_dtype(dtype, path, field=field, device=where, trust_remote_code=trust_remote_code)
    placed: dict[str, Any] = {}
    home = device or default_device()
    if isinstance(home, dict):
        placed["device_map"] = home
    elif quantization or torch.device(home).type != "cpu":  # straight to the device's memory
        placed["device_map"] = {"": home}
    expected = f"a causal LM in {path}"
    if is_gguf(path):
        if quantization:
            raise InputError(f"target_quantization: expected none with a GGUF file, found {quantization} for {path}")
        placed |= {"config": config, "quantization_config": GgufConfig(dequantize=True)}
    if quantization:
        placed["quantization_config"] = BitsAndBytesConfig(**QUANTIZATIONS[quantization])
        expected += f" for bitsandbytes in {quantization}"
    # `check_loaded` reports mismatched sizes in one line.
    checked = {"weights_only": True, "output_loading_info": True, "ignore_mismatched_sizes": True}
    with phase(f"loading {path}"), whole_weights(), reading_errors(field, expected), source_of(path) as (place, named):
        loaded: Any = _loader(config).from_pretrained(
            place, dtype=DTYPES[dtype], trust_remote_code=trust_remote_code, **named, **checked, **placed
        )
    model, info = loaded
    check_causal(model, field)
    if is_gguf(path):
        check_whole(model, path, field)
    model.config.name_or_path = model.name_or_path = str(path)
    unpack(model, DTYPES[dtype] if quantization_of(config) else None)
    check_loaded(model, info, stored, path, field)
    model.generation_config = load_generation_config(path, config, field=field)
    rotate_by_text(model)
    return model.eval().requires_grad_(False)


def _loader(config: PretrainedConfig) -> Any:
    """Return the library's class that loads a causal LM: the whole model where a family with images has no other."""
    has_text_class = type(config) in AutoModelForCausalLM._model_mapping
    sees = not has_text_class and type(config) in AutoModelForImageTextToText._model_mapping
    return AutoModelForImageTextToText if sees else AutoModelForCausalLM


def load_draft(path: str | Path, *, field: str = "draft", **options: Any) -> PreTrainedModel:
    """Load a draft model as `load_model` does, with its head cut if its config asks for that (`cut_head`)."""
    return cut_head(load_model(path, field=field, **options), field)


def empty_model(
    config: str | Path | PretrainedConfig,
    *,
    field: str = "model",
    dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Return a causal LM without weights, on the meta device, in eval mode; `config` may be a directory or hub id."""
    source, generation = config.name_or_path if isinstance(config, PretrainedConfig) else config, None
    if not isinstance(config, PretrainedConfig):
        config = load_config(config, field=field, trust_remote_code=trust_remote_code)
        generation = load_generation_config(str(source), config, field=field)
    options: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
    with torch.device("meta"), whole_weights(), reading_errors(field, f"a causal LM in {source}"):
        model: Any = _loader(config).from_config(config, trust_remote_code=trust_remote_code, **options)
    check_causal(model, field)
    model.generation_config = generation or model.generation_config
    return model.eval()


def load_tokenizer(
    path: str | Path, *, field: str = "model", trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer, padding on the left.

    End-of-sequence replaces a pad token that is missing or has no embedding. Raise InputError if the tokenizer or the
    causal LM's config is missing, or both tokens are.
    """
    rows = vocabulary_size(path, field=field, trust_remote_code=trust_remote_code)
    expected = f"a tokenizer in {path}"
    with phase(f"reading the tokenizer of {path}"), reading_errors(field, expected), source_of(path) as (place, named):
        tokenizer: Any = AutoTokenizer.from_pretrained(place, trust_remote_code=trust_remote_code, **named)
    tokenizer.name_or_path = str(path)
    tokenizer.padding_side = "left"
    usable = ((tokenizer.pad_token, tokenizer.pad_token_id), (tokenizer.eos_token, tokenizer.eos_token_id))
    pad = next((token for token, number in usable if number is not None and number < rows), None)
    if pad is None:
        raise InputError(f"{field}: expected a pad or an end-of-sequence token in {path}'s tokenizer, found neither")
    tokenizer.pad_token = pad
    return tokenizer


def check_same_tokenizer(
    target: PreTrainedTokenizerBase,
    draft: PreTrainedTokenizerBase,
    target_path: str | Path,
    draft_path: str | Path,
    *,
    vocab_size: int | None = None,
    ends_may_differ: bool = False,
) -> None:
    """Require that two tokenizers agree by content: every id that texts can have is the same token in both.

    Equal length proves nothing: two 4,096-entry vocabularies can differ in every entry. Only ids below `vocab_size`,
    the target's number of logits, are compared, since no text has the others; None compares all. With
    `ends_may_differ` a draft in training may have more tokens, or lack the last ones that the target added.
    """
    p, q = ({number: token for token, number in t.get_vocab().items()} for t in (target, draft))
    end = min(max(p), max(q)) if ends_may_differ else max(*p, *q)
    end = end if vocab_size is None else min(end, vocab_size - 1)
    differing = [number for number in sorted(p.keys() | q.keys()) if number <= end and p.get(number) != q.get(number)]
    if differing:
        number = differing[0]
        tokens = f"{q.get(number)!r} in the draft, {p.get(number)!r} in the target"
        tokens += "; carve a draft from the target (init.layers)" * ends_may_differ
        difference = f"{len(differing)} tokens that differ, the first {number}: {tokens}"
        raise InputError(f"draft {draft_path}: expected the tokenizer of target {target_path}, found {difference}")


def set_attention(model: PreTrainedModel, name: str | None) -> None:
    """Set a model's attention implementation by its name in transformers; None keeps it."""
    if name is not None:
        with reading_errors("attn_implementation", f"an attention that {type(model).__name__} can have here"):
            model.set_attn_implementation(name)


def uses_varlen_attention(model: PreTrainedModel) -> bool:
    """Return whether a model's attention takes the bounds of texts in place of a mask, as flash attention does."""
    return is_flash_attention_requested(model.config.get_text_config())


def wants_bounds(*models: PreTrainedModel) -> bool:
    """Return whether batches for models hold the bounds of texts; kernels of states would take them as their own."""
    return any(map(uses_varlen_attention, models)) and not any(follows_one_path(model.config) for model in models)


def check_head(
    config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, field: str, target: PretrainedConfig | None = None
) -> None:
    """Require a logit for every token that texts can have; more logits are padding and do no harm.

    Texts have the pieces that the tokenizer makes of plain text, and the added tokens that the target can write. Other
    added tokens may be without logits: `require_logits` refuses texts that contain them. `target` is the target's
    config, for a draft with the target's tokenizer.
    """
    rows: int = config.get_text_config().vocab_size
    if target is not None:
        expected = token_count(tokenizer, target)
    else:
        expected = max(set(tokenizer.get_vocab().values()) - tokenizer.added_tokens_decoder.keys(), default=-1) + 1
    if rows < expected:
        raise InputError(f"{field}: expected a vocabulary of at least {expected} for its tokenizer, found {rows}")
