"""Medusa heads in the formats of other tools: their names and their limits.

| format           | weights             | block l of head h         | language-model head of h                 |
|------------------|---------------------|---------------------------|------------------------------------------|
| `own`            | `model.safetensors` | `blocks.{h}.layers.{l}.*` | `lm_heads.{h}.*`, or `lm_head.*` for all |
| `vllm`           | `model.safetensors` | `blocks.{h}.layers.{l}.*` | the same, only `.weight`                 |
| `fasterdecoding` | `medusa_lm_head.pt` | `{h}.{l}.linear.*`        | `{h}.{L}.weight`                         |

FasterDecoding's older trainer writes `medusa_lm_head.safetensors`, without language-model heads: all heads use the
target's. That file is only read (`draftsmith.medusa.heads.formats.importing`).
"""

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from draftsmith.decode.errors import InputError
from draftsmith.medusa.checkpoint_files import check_dtype, dtype_name, from_tensors, round_tensors
from draftsmith.medusa.heads.model import MedusaHeads
from draftsmith.train.kinds.export import check_format as one_of_formats
from draftsmith.train.losses.cut_vocabulary import whole_rows
from draftsmith.train.models import DTYPES

FORMATS = ("own", "vllm", "fasterdecoding")
PICKLED, LEGACY = "medusa_lm_head.pt", "medusa_lm_head.safetensors"
VLLM_READS = ("vllm", "fasterdecoding")
"""Formats whose directories vLLM 0.32 loads as they are."""


def check_format(format: str) -> str:
    """Return the format's name, or raise an InputError if it is unknown."""
    if format == "sglang":
        raise InputError(f"format: expected one of {', '.join(FORMATS)}, found 'sglang'; SGLang loads no Medusa heads")
    return one_of_formats(format, FORMATS)


def refusal(heads: MedusaHeads, format: str, target: PreTrainedModel | None = None) -> str | None:
    """Return why a format cannot hold the heads, and the way out, or None."""
    config = heads.config
    if format == "own":
        return None
    stay = "keep draftsmith's own format and decode with MedusaProposer"
    if config.hydra:
        return f"Hydra heads, which see the tokens drafted before; {stay}"
    if config.lm_head_bias:
        return f"language-model heads with a bias; {stay}"
    if config.truncated_vocab_size < config.vocab_size and (format != "vllm" or config.truncated_vocab_size == 1):
        ways = "take vllm" if config.truncated_vocab_size > 1 else stay
        return f"a truncated vocabulary of {config.truncated_vocab_size} tokens; {ways}"
    if format == "fasterdecoding" and not all(map(_equal_layers, heads.blocks)):
        # Its `[ResBlock(hidden_size)] * layers` is one block, which loading would overwrite with the last one.
        return f"{config.num_hidden_layers} different blocks a head, but its reader uses only one; take vllm"
    return None


def written_bytes(heads: MedusaHeads, format: str, dtype: str | None = None) -> int:
    """Return the size of the weights as written, usually more in vLLM's format than in ours."""
    config, kind = heads.config, heads.dtype if dtype is None else DTYPES[check_dtype(dtype)]
    blocks = sum(p.numel() for name, p in heads.named_parameters() if not name.startswith("lm_head"))
    if format == "fasterdecoding" and not config.medusa_fc_bias:
        blocks += config.num_heads * config.num_hidden_layers * config.hidden_size
    count = 1 if config.original_lm_head and format != "fasterdecoding" else config.num_heads
    rows = config.vocab_size if format == "vllm" else config.truncated_vocab_size
    bias = int(config.lm_head_bias)
    return (blocks + count * rows * (config.hidden_size + bias)) * kind.itemsize


def adapt_heads(heads: MedusaHeads, format: str, dtype: torch.dtype) -> MedusaHeads:
    """Return the heads in the format's terms, on the CPU: rounded, and with the heads and biases that it needs.

    What no format holds but ours, a softcap and perhaps a scale, is left out: readers draft the most likely tokens, and
    these stay the same.
    """
    config: Any = copy.deepcopy(heads.config)
    tensors = heads.state_dict()
    if format != "own":
        config.final_logit_softcapping = None
        config.logit_scale = config.logit_scale if format == "vllm" else 1.0
    if format == "fasterdecoding":
        if not config.base_model_name_or_path:
            raise InputError("target: expected its name or path, which fasterdecoding loads it by, found none")
        # It always has biases, and no shared head: zeros and copies are exact.
        config.medusa_fc_bias, config.original_lm_head = True, False
        for h in range(config.num_heads):
            tensors[f"lm_heads.{h}.weight"] = heads.lm_head_of(h).weight
            for layer in range(config.num_hidden_layers):
                tensors.setdefault(f"blocks.{h}.layers.{layer}.bias", torch.zeros(config.hidden_size))
        tensors.pop("lm_head.weight", None)
    token_map = tensors.pop("token_map", None) if format == "vllm" else None  # vLLM fails on a cut vocabulary
    if token_map is not None:
        config.truncated_vocab_size = config.vocab_size
        for name in [name for name in tensors if name.startswith("lm_head")]:
            # New rows are the mean of the others, so their logits are never the largest.
            tensors[name] = whole_rows(tensors[name], token_map, config.vocab_size)
    return from_tensors(MedusaHeads, config, round_tensors(tensors, dtype))


def tensors(heads: MedusaHeads, format: str, target: PreTrainedModel | None) -> dict[str, Tensor]:
    """Return the tensors under the format's names."""
    names = tensor_names(heads.config, format)
    return {names.get(name, name): tensor for name, tensor in heads.state_dict().items()}


def config_fields(heads: MedusaHeads, format: str) -> dict[str, Any]:
    """Return config.json without keys that vLLM would rename: those with "num" and "heads" or "layers"."""
    config = heads.config
    # All versions of the library read this older name of the dtype.
    common = {"base_model_name_or_path": config.base_model_name_or_path, "torch_dtype": dtype_name(heads.dtype)}
    if format == "vllm":
        names = "hidden_size vocab_size num_heads num_hidden_layers truncated_vocab_size medusa_fc_bias"
        fields = {name: getattr(config, name) for name in [*names.split(), "original_lm_head", "logit_scale"]}
        return {"architectures": ["MedusaModel"], "model_type": "medusa", **fields, **common}
    fields = {"medusa_num_heads": config.num_heads, "medusa_num_layers": config.num_hidden_layers, **common}
    # FasterDecoding reads these from the target; vLLM, which also loads the directory, only from here.
    fields |= {"hidden_size": config.hidden_size, "vocab_size": config.vocab_size, "medusa_fc_bias": True}
    return fields if config.medusa_choices is None else {**fields, "medusa_choices": config.medusa_choices}


def notes(heads: MedusaHeads, format: str) -> list[str]:
    """Return what readers leave out."""
    config, lines = heads.config, []
    left_out = {"final_logit_softcapping": config.final_logit_softcapping is not None}
    left_out["logit_scale"] = format == "fasterdecoding" and config.logit_scale != 1
    lines += [
        f"{name} is left out: the order of logits stays" for name, out in left_out.items() if out and format != "own"
    ]
    if format == "vllm" and config.truncated_vocab_size < config.vocab_size:
        lines.append(
            f"vLLM 0.32 loads no cut vocabulary: heads of {config.truncated_vocab_size} tokens are written with all "
            f"{config.vocab_size}, and the others are never the most likely; they draft the same, but save no memory"
        )
    if format == "fasterdecoding":
        lines.append("vLLM 0.32 reads this directory too, with its medusa method, as a chain")
    if config.medusa_choices is not None and format == "vllm":
        lines.append(
            "vLLM drafts the chain of each head's most likely token: the tree of "
            f"{len(config.medusa_choices)} tokens is not written"
        )
    return lines


def _equal_layers(block: torch.nn.Module) -> bool:
    first, *others = block.layers  # type: ignore[misc, union-attr]
    return all(
        torch.equal(a, b) for layer in others for a, b in zip(first.parameters(), layer.parameters(), strict=True)
    )


def tensor_names(config: PretrainedConfig, format: str) -> dict[str, str]:
    """Return the format's names of tensors by ours, where they differ."""
    if format != "fasterdecoding":
        return {}
    layers = config.num_hidden_layers
    names = {f"lm_heads.{h}.weight": f"{h}.{layers}.weight" for h in range(config.num_heads)}
    for h in range(config.num_heads):
        for layer in range(layers):
            for part in ("weight", "bias"):
                names[f"blocks.{h}.layers.{layer}.{part}"] = f"{h}.{layer}.linear.{part}"
    return names
