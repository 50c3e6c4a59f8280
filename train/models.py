"""Loading models and tokenizers safely, and checking that a drafter and a target speak the same tokens."""

import hashlib
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
    AutoTokenizer,
    BitsAndBytesConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.integrations import deepspeed
from transformers.utils import logging
from transformers.utils.generic import is_flash_attention_requested

from draftsmith.decode.cache import check_causal, rotate_by_text
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
    reading,
    require_config,
    stored_tensors,
)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
QUANTIZATIONS: dict[str, dict[str, Any]] = {
    "8bit": {"load_in_8bit": True},
    "4bit": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16},
}


def default_device() -> torch.device:
    """Return this process's CUDA device where there is one, the CPU otherwise."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def named_device(name: torch.device | str | None, field: str = "target_device") -> torch.device | None:
    """Return the device of a name; None for None and for "auto".

    Raises:
        InputError: torch has no such device here.
    """
    if name in (None, "auto"):
        return None
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:  # the latter where torch was built without CUDA
        raise InputError(f"{field}: expected a device of this machine, found {name}: {first_line(error)}") from error


def load_config(path: str | Path, *, field: str = "model", trust_remote_code: bool = False) -> PretrainedConfig:
    """Read a causal LM's config; its weights need not be there.

    Raises:
        InputError: none there, or one that is damaged; names the field.
    """
    require_config(path, field)
    with reading(field, f"a causal LM in {path}"):
        config: PretrainedConfig = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        raw, _ = PretrainedConfig.get_config_dict(path)
    for part in (raw, raw.get("text_config") or {}):
        check_rope(part, f"{field}: {path}: ")
    check_sizes(config, path, field)
    return config


def vocabulary_size(path: str | Path, *, field: str = "target", trust_remote_code: bool = False) -> int:
    """Return how many logits a model has, by its config; its weights need not be there.

    Raises:
        InputError: no causal LM's config there.
    """
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
    """Return a dtype's name; that of "auto", with a line on standard error that says why.

    Args:
        dtype: a name of `DTYPES`, or "auto": as the model is stored, or float32 where the device has no fast arithmetic
            for that: CPUs have it for float32, and for bfloat16 by instructions (AVX-512 BF16, AMX) that newer ones
            have; GPUs from Ampere on have both.
        path: the model's directory or hub id.
        field: the config field or flag that named it, for the error message.
        device: where it will run; the default device if None.
        trust_remote_code: run configuration code that the repository ships.

    Raises:
        InputError: no model's config there.
    """
    if dtype != "auto":
        return dtype
    config = load_config(path, field=field, trust_remote_code=trust_remote_code)
    kind, stored = (device or default_device()).type, stored_dtype(config)
    chosen = fast_dtype(config, kind)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        why = "" if chosen == stored else f", for which this {kind.upper()} has no fast arithmetic"
        print(f"dtype: {chosen}; {path} is stored in {stored}{why}", file=sys.stderr)
    return chosen


def fast_dtype(config: PretrainedConfig, device: str) -> str:
    """Return the dtype of `resolve_dtype`'s "auto" for a model with this config on a device of this type."""
    stored = stored_dtype(config)
    return stored if has_fast(stored, device) else "float32"


def stored_dtype(config: PretrainedConfig) -> str:
    """Return the name of the dtype that a model's weights are stored in, as its config says; float32 if it does not."""
    name = str(config.dtype or config.get_text_config().dtype).removeprefix("torch.")
    return name if name in DTYPES else "float32"


def has_fast(dtype: str, device: str) -> bool:
    """Say whether a device of this type computes fast in a dtype."""
    if device == "cuda":
        return dtype != "bfloat16" or torch.cuda.is_bf16_supported(including_emulation=False)
    if dtype == "bfloat16":
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return dtype != "float16"


def _no_report(record: LogRecord) -> bool:
    """Leave out the library's table of missing, unused and misshapen weights: `check_loaded` names them."""
    return "LOAD REPORT" not in record.getMessage()


@contextmanager
def whole_weights() -> Iterator[None]:
    """Build and load models whole where DeepSpeed ZeRO-3 would give each process a share of the weights.

    Shares have no values outside of an engine: a frozen target has none, and a draft is cut up when it gets its own.
    """
    logging.disable_progress_bar()  # one bar per loaded file says nothing beside the bars of the work itself
    report = getLogger("transformers.modeling_utils")
    report.addFilter(_no_report)
    reference = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = reference
        report.removeFilter(_no_report)


def load_model(
    path: str | Path,
    *,
    field: str = "model",
    dtype: str = "float32",
    trust_remote_code: bool = False,
    device: torch.device | str | None = None,
    quantization: str | None = None,
) -> PreTrainedModel:
    """Load a causal LM for inference: eval mode, no gradients, on `device` (the default device if None).

    Pickled weights are read with `weights_only=True`, code from the model's repository only with `trust_remote_code`.
    Under ZeRO-3 each process gets a whole copy.

    Args:
        path: a local directory or a hub id.
        field: the config field or flag that named it, for the error message.
        dtype: one of `float32`, `bfloat16`, `float16`, `float64`, or `auto` (`resolve_dtype`).
        trust_remote_code: run model code that the repository ships.
        device: where to put it; "auto" spreads its layers over all GPUs, and the CPU's memory behind them.
        quantization: `8bit` or `4bit` weights, by bitsandbytes; as the checkpoint is if None.

    Raises:
        InputError: no model there, or not a causal LM, or one without all its weights, or an unknown dtype.
    """
    one_of(options.DTYPES).check("dtype", dtype)
    config = load_config(path, field=field, trust_remote_code=trust_remote_code)
    stored = stored_tensors(path, field)
    where = named_device(device)
    dtype = resolve_dtype(dtype, path, field=field, device=where, trust_remote_code=trust_remote_code)
    placed: dict[str, Any] = {}
    home = device or default_device()
    if device == "auto" or quantization or torch.device(home).type != "cpu":  # by way of the host's memory otherwise
        placed["device_map"] = "auto" if device == "auto" else {"": home}
    expected = f"a causal LM in {path}"
    if quantization:
        placed["quantization_config"] = BitsAndBytesConfig(**QUANTIZATIONS[quantization])
        expected += f" for bitsandbytes in {quantization}"
    with phase(f"loading {path}"), whole_weights(), reading(field, expected):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=DTYPES[dtype],
            trust_remote_code=trust_remote_code,
            weights_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below, in one line
            **placed,
        )
    model, info = loaded
    check_causal(model, field)
    check_loaded(model, info, stored, path, field)
    model.generation_config = load_generation_config(path, config, field=field)
    rotate_by_text(model)
    return model.eval().requires_grad_(False)


def load_draft(path: str | Path, *, field: str = "draft", **options: Any) -> PreTrainedModel:
    """Load a draft model to draft with: as `load_model` does, and its head cut where its config says so (`cut_head`).

    Raises:
        InputError: as `load_model`, or a config whose cut vocabulary is none.
    """
    return cut_head(load_model(path, field=field, **options), field)


def empty_model(
    config: str | Path | PretrainedConfig,
    *,
    field: str = "model",
    dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Return a causal LM without weights, on the meta device, in eval mode.

    Args:
        config: a config, or the directory or hub id that has one.
        field: the config field or flag that named it, for the error message.
        dtype: of its tensors; the config's if None.
        trust_remote_code: run model code that the repository ships.

    Raises:
        InputError: not the config of a causal LM.
    """
    source, generation = config.name_or_path if isinstance(config, PretrainedConfig) else config, None
    if not isinstance(config, PretrainedConfig):
        config = load_config(config, field=field, trust_remote_code=trust_remote_code)
        generation = load_generation_config(str(source), config, field=field)
    options: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
    with torch.device("meta"), whole_weights(), reading(field, f"a causal LM in {source}"):
        model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code, **options)
    check_causal(model, field)
    model.generation_config = generation or model.generation_config
    return model.eval()


def load_tokenizer(
    path: str | Path, *, field: str = "model", trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Load the tokenizer beside a model, padding on the left.

    End-of-sequence stands in for a pad token that is missing, or that the model has no embedding for.

    Raises:
        InputError: no tokenizer there, or one without a pad and an end-of-sequence token; no causal LM's config.
    """
    rows = vocabulary_size(path, field=field, trust_remote_code=trust_remote_code)
    with phase(f"reading the tokenizer of {path}"), reading(field, f"a tokenizer in {path}"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    tokenizer.padding_side = "left"
    usable = ((tokenizer.pad_token, tokenizer.pad_token_id), (tokenizer.eos_token, tokenizer.eos_token_id))
    pad = next((token for token, number in usable if number is not None and number < rows), None)
    if pad is None:
        raise InputError(f"{field}: expected a pad or an end-of-sequence token in {path}'s tokenizer, found neither")
    tokenizer.pad_token = pad
    return tokenizer


def identity(path: str, weights: bool = True, trust_remote_code: bool = False) -> dict[str, Any]:
    """Tell a model from another without reading all of its weights: one that is trained on keeps its names and sizes.

    Args:
        path: a local directory or a hub id, of which the commit is returned.
        weights: look at the weights, which need not be there otherwise.
        trust_remote_code: run configuration code that the repository ships.
    """
    directory = Path(path)
    if not directory.is_dir():
        return {"commit": AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)._commit_hash}
    digests: dict[str, Any] = {}
    for name in ("config.json", "generation_config.json"):
        if (directory / name).is_file():
            digests[name] = hashlib.sha256((directory / name).read_bytes()).hexdigest()
    patterns = ("*.safetensors", "pytorch_model*.bin", "*lm_head*.pt") if weights else ()
    for file in sorted(file for pattern in patterns for file in directory.glob(pattern)):
        size, digest = file.stat().st_size, hashlib.sha256()
        with file.open("rb") as content:
            for sample in range(64):
                content.seek(size * sample // 64)
                digest.update(content.read(1 << 16))
        digests[file.name] = {"bytes": size, "sampled_sha256": digest.hexdigest()}
    return digests


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

    Equal length proves nothing (two 4,096-entry vocabularies can differ in every entry), so the mappings are compared.
    The models' embedding sizes may differ by padding; logits are cut to the tokenizer's size when they are compared.

    Args:
        target: the target's.
        draft: the draft's.
        target_path: where it came from, for messages.
        draft_path: likewise.
        vocab_size: how many logits the target has. Tokens behind them, which no text has, are not compared; all are if
            None.
        ends_may_differ: for a draft in training: it may have further tokens, or lack the last that the target added.

    Raises:
        InputError: names the first id that differs, and what to do with such a draft.
    """
    p, q = ({number: token for token, number in t.get_vocab().items()} for t in (target, draft))
    end = min(max(p), max(q)) if ends_may_differ else max(*p, *q)
    end = end if vocab_size is None else min(end, vocab_size - 1)
    differing = [number for number in sorted(p.keys() | q.keys()) if number <= end and p.get(number) != q.get(number)]
    if differing:
        number = differing[0]
        way_out = "; carve a draft from the target (init.layers), or decode with RetokenizedProposer"
        raise InputError(
            f"draft {draft_path}: expected the tokenizer of target {target_path}, found {len(differing)} tokens that "
            f"differ, the first {number}: {q.get(number)!r} in the draft, {p.get(number)!r} in the target"
            + (way_out if ends_may_differ else "")
        )


def set_attention(model: PreTrainedModel, name: str | None) -> None:
    """Have a model compute its attention by one of transformers' implementations; as it does where the name is None.

    Raises:
        InputError: the model, this machine or the library has no such implementation.
    """
    if name is not None:
        with reading("attn_implementation", f"an attention that {type(model).__name__} can have here"):
            model.set_attn_implementation(name)


def takes_bounds(model: PreTrainedModel) -> bool:
    """Say whether a model's attention takes the bounds of texts in place of a mask, as flash attention does."""
    return is_flash_attention_requested(model.config.get_text_config())


def check_head(
    config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, field: str, target: PretrainedConfig | None = None
) -> None:
    """Require a logit for every token that texts can have; more of them are padding and do no harm.

    These are the pieces that the tokenizer makes of text, and those of its added tokens that the target can write.
    Others may lie behind the logits: `require_logits` refuses the texts that hold them.

    Args:
        config: the target's, or its draft's.
        tokenizer: the model's.
        field: the config field or flag that named the model, for the error message.
        target: the target's config, of a draft that has its tokenizer.

    Raises:
        InputError: the head is narrower.
    """
    rows: int = config.get_text_config().vocab_size
    if target is not None:
        expected = token_count(tokenizer, target)
    else:
        expected = max(set(tokenizer.get_vocab().values()) - tokenizer.added_tokens_decoder.keys(), default=-1) + 1
    if rows < expected:
        raise InputError(f"{field}: expected a vocabulary of at least {expected} for its tokenizer, found {rows}")
