"""Medusa heads in the formats that others load: what each can say, and its names.

| format           | weights             | block l of head h               | language-model head of h                 |
|------------------|---------------------|---------------------------------|------------------------------------------|
| `own`            | `model.safetensors` | `blocks.{h}.layers.{l}.*`       | `lm_heads.{h}.*`, or `lm_head.*` for all |
| `vllm`           | `model.safetensors` | `blocks.{h}.layers.{l}.*`       | the same, `.weight` alone                |
| `fasterdecoding` | `medusa_lm_head.pt` | `{h}.{l}.linear.*`              | `{h}.{L}.weight`                         |
| `modelopt`       | `model.safetensors` | `medusa_heads.{h}.{l}.linear.*` | `medusa_heads.{h}.{L}.weight`            |

FasterDecoding's older trainer writes another file under that name, `medusa_lm_head.safetensors`, without language-model
heads: there all heads go through the target's. It is read, not written (`draftsmith.medusa.heads.formats.importing`).
"""

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PretrainedConfig

from draftsmith.decode.errors import InputError
from draftsmith.medusa.checkpoint_files import CONFIG, WEIGHTS, check_dtype, dtype_name, rounded
from draftsmith.medusa.heads.formats.proof import prove
from draftsmith.medusa.heads.model import MedusaConfig, MedusaHeads
from draftsmith.train.kinds.export import check_format as one_of_formats
from draftsmith.train.kinds.export import put_in_place
from draftsmith.train.losses.cut_vocabulary import whole_rows
from draftsmith.train.models import DTYPES

FORMATS = ("own", "vllm", "fasterdecoding", "modelopt")
PICKLED, LEGACY = "medusa_lm_head.pt", "medusa_lm_head.safetensors"
PREFIXES = {"fasterdecoding": "", "modelopt": "medusa_heads."}
VLLM_READS = ("vllm", "fasterdecoding")
"""Formats whose directories vLLM 0.32 loads as they are."""


def check_format(format: str) -> str:
    """Return the name of a format.

    Raises:
        InputError: an unknown format.
    """
    if format == "sglang":
        raise InputError(f"format: expected one of {', '.join(FORMATS)}, found 'sglang'; SGLang loads no Medusa heads")
    return one_of_formats(format, FORMATS)


def refusal(heads: MedusaHeads, format: str, by_rank: bool = False) -> str | None:
    """Return what of the heads a format cannot say, and the way out; None where it can say all.

    Args:
        heads: any.
        format: one of `FORMATS`.
        by_rank: as in `export_heads`.
    """
    config = heads.config
    if format == "own":
        return None
    stay = "keep draftsmith's own format and decode with MedusaProposer"
    if config.hydra:
        return f"Hydra heads, which see the tokens drafted before; {stay}"
    if config.lm_head_bias:
        return f"language-model heads with a bias; {stay}"
    finish = {"final_logit_softcapping": config.final_logit_softcapping}
    if format != "vllm":
        finish["logit_scale"] = None if config.logit_scale == 1 else config.logit_scale
    for name, value in finish.items():
        if value is not None and not (by_rank and value > 0):
            return f"{name} {value}; by_rank leaves out what changes logits but not their order"
    if config.truncated_vocab_size < config.vocab_size and (format != "vllm" or config.truncated_vocab_size == 1):
        ways = "take vllm" if config.truncated_vocab_size > 1 else stay
        return f"a truncated vocabulary of {config.truncated_vocab_size} tokens; {ways}"
    if format == "fasterdecoding" and not all(map(_equal_layers, heads.blocks)):
        # Its `[ResBlock(hidden_size)] * layers` is one block, which the last of them would overwrite.
        return (
            f"{config.num_hidden_layers} different blocks a head, of which its reader uses one; take vllm or modelopt"
        )
    return None


def export_heads(
    heads: MedusaHeads,
    directory: str | Path,
    format: str,
    dtype: str | None = None,
    by_rank: bool = False,
    readme: str | None = None,
) -> list[str]:
    """Write heads in a format, and prove that another process reads the same logits from it.

    A language-model head that all heads share becomes one each where the format has no other way, and a block without
    biases gets zeros where it always has them: both exact. A truncated vocabulary becomes whole for vLLM, whose loader
    fails on any other: the rows that are missing are the mean of those there are, so that their logits, a mean too, are
    never the largest. All is written aside and renamed when it is proven.

    Args:
        heads: of any device; they stay as they are.
        directory: new, or empty.
        format: one of `FORMATS`.
        dtype: of the written weights; that of the heads if None.
        by_rank: leave softcapping out, and outside of vLLM a positive `logit_scale`. Neither changes which tokens are
            the most likely, and these readers draft by that alone.
        readme: a model card, written as README.md.

    Returns:
        Notes for the reader, a line each, such as a tree that vLLM does not draft.

    Raises:
        InputError: an unknown format or dtype, heads that the format cannot hold or the dtype overflows, weights that
            are not finite, or a directory that holds something or cannot be written in.
        RuntimeError: a reader finds other logits in what was written; the directory is removed.
    """
    directory = Path(directory)
    reason = refusal(heads, check_format(format), by_rank)
    if reason is not None:
        raise InputError(f"format: expected heads that {format} can hold, found {reason}")
    kind = heads.dtype if dtype is None else DTYPES[check_dtype(dtype)]
    adapted = _adapted(heads, format, kind, by_rank)
    if format == "fasterdecoding" and not adapted.config.base_model_name_or_path:
        raise InputError("target: expected its name or path, which fasterdecoding loads it by, found none")
    with put_in_place(directory) as aside:
        _write(adapted, aside, format)
        if readme is not None:
            (aside / "README.md").write_text(readme, encoding="utf-8")
        for reader in dict.fromkeys((format, "vllm") if format in VLLM_READS else (format,)):
            prove(heads, aside, format, reader, kind, by_rank)
    return _notes(heads, format)


def written_bytes(heads: MedusaHeads, format: str, dtype: str | None = None) -> int:
    """Return what the weights take as `export_heads` writes them: in vLLM's format more than here, as a rule.

    Args:
        heads: that the format can hold.
        format: one of `FORMATS`.
        dtype: of the written weights; that of the heads if None.
    """
    config, kind = heads.config, heads.dtype if dtype is None else DTYPES[check_dtype(dtype)]
    blocks = sum(p.numel() for name, p in heads.named_parameters() if not name.startswith("lm_head"))
    if format in PREFIXES and not config.medusa_fc_bias:
        blocks += config.num_heads * config.num_hidden_layers * config.hidden_size
    count = 1 if config.original_lm_head and format not in PREFIXES else config.num_heads
    rows = config.vocab_size if format == "vllm" else config.truncated_vocab_size
    bias = int(config.lm_head_bias)
    return (blocks + count * rows * (config.hidden_size + bias)) * kind.itemsize


def _adapted(heads: MedusaHeads, format: str, dtype: torch.dtype, by_rank: bool) -> MedusaHeads:
    """Return heads as the format says them, on the CPU: rounded, with a head and biases each where it wants them."""
    config: Any = copy.deepcopy(heads.config)
    tensors = heads.state_dict()
    if by_rank and format != "own":
        config.final_logit_softcapping = None
        config.logit_scale = config.logit_scale if format == "vllm" else 1.0
    if format in PREFIXES:
        config.medusa_fc_bias, config.original_lm_head = True, False
        for h in range(config.num_heads):
            tensors[f"lm_heads.{h}.weight"] = heads.lm_head_of(h).weight
            for layer in range(config.num_hidden_layers):
                tensors.setdefault(f"blocks.{h}.layers.{layer}.bias", torch.zeros(config.hidden_size))
        tensors.pop("lm_head.weight", None)
    token_map = tensors.pop("token_map", None) if format == "vllm" else None
    if token_map is not None:
        config.truncated_vocab_size = config.vocab_size
        for name in [name for name in tensors if name.startswith("lm_head")]:
            tensors[name] = whole_rows(tensors[name], token_map, config.vocab_size)
    return assembled(config, rounded(tensors, dtype))


def _write(heads: MedusaHeads, directory: Path, format: str) -> None:
    if format == "own":
        heads.save_pretrained(directory)
        return
    (directory / CONFIG).write_text(json.dumps(_config(heads, format), indent=2) + "\n", encoding="utf-8")
    names = tensor_names(heads.config, format)
    tensors = {names.get(name, name): tensor for name, tensor in heads.state_dict().items()}
    if format == "fasterdecoding":
        torch.save(tensors, directory / PICKLED)
    else:
        save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})


def _config(heads: MedusaHeads, format: str) -> dict[str, Any]:
    """Return config.json. vLLM renames any key that holds "num" and "heads" or "layers": no others may be there."""
    config = heads.config
    # The older name of the dtype is the one that all versions of the library read.
    common = {"base_model_name_or_path": config.base_model_name_or_path, "torch_dtype": dtype_name(heads.dtype)}
    if format == "vllm":
        names = "hidden_size vocab_size num_heads num_hidden_layers truncated_vocab_size medusa_fc_bias"
        fields = {name: getattr(config, name) for name in [*names.split(), "original_lm_head", "logit_scale"]}
        return {"architectures": ["MedusaModel"], "model_type": "medusa", **fields, **common}
    if format == "modelopt":
        medusa = {"num_medusa_heads": config.num_heads, "num_medusa_layers": config.num_hidden_layers}
        return {"medusa": medusa, "hidden_size": config.hidden_size, "vocab_size": config.vocab_size, **common}
    fields = {"medusa_num_heads": config.num_heads, "medusa_num_layers": config.num_hidden_layers, **common}
    # FasterDecoding reads these of the target; vLLM, which reads the directory too, knows them from here alone.
    fields |= {"hidden_size": config.hidden_size, "vocab_size": config.vocab_size, "medusa_fc_bias": True}
    return fields if config.medusa_choices is None else {**fields, "medusa_choices": config.medusa_choices}


def _notes(heads: MedusaHeads, format: str) -> list[str]:
    config, notes = heads.config, []
    if format == "vllm" and config.truncated_vocab_size < config.vocab_size:
        notes.append(
            f"vLLM 0.32 loads no cut vocabulary: heads of {config.truncated_vocab_size} tokens are written with all "
            f"{config.vocab_size}, the further ones never the most likely; they draft the same, but save no memory"
        )
    if format == "fasterdecoding":
        notes.append("vLLM 0.32 reads this directory too, with its medusa method, as a chain")
    if config.medusa_choices is not None and format in ("vllm", "modelopt"):
        nodes = len(config.medusa_choices)
        notes.append(
            f"vLLM drafts the chain of each head's most likely token: the tree of {nodes} tokens is not written"
            if format == "vllm"
            else f"the tree of {nodes} tokens has no place in this format: give its reader medusa_choices"
        )
    return notes


def _equal_layers(block: torch.nn.Module) -> bool:
    first, *others = block.layers  # type: ignore[misc, union-attr]
    return all(
        torch.equal(a, b) for layer in others for a, b in zip(first.parameters(), layer.parameters(), strict=True)
    )


def assembled(config: MedusaConfig, tensors: dict[str, Tensor]) -> MedusaHeads:
    """Return heads of these tensors, under our names, in eval mode; nothing is copied."""
    with torch.device("meta"):
        heads = MedusaHeads(config)
    heads.load_state_dict(tensors, assign=True)
    return heads.eval()


def tensor_names(config: PretrainedConfig, format: str) -> dict[str, str]:
    """Return the names of tensors in a format by ours, where they differ."""
    if format not in PREFIXES:
        return {}
    prefix, layers = PREFIXES[format], config.num_hidden_layers
    names = {f"lm_heads.{h}.weight": f"{prefix}{h}.{layers}.weight" for h in range(config.num_heads)}
    for h in range(config.num_heads):
        for layer in range(layers):
            for part in ("weight", "bias"):
                names[f"blocks.{h}.layers.{layer}.{part}"] = f"{prefix}{h}.{layer}.linear.{part}"
    return names
