"""Medusa heads in our format and in vLLM's: what it holds, and its limits.

Both have the same names, `blocks.{h}.layers.{l}.*` and `lm_heads.{h}.*`, or `lm_head.*` for all heads; vLLM's has no
biases of language-model heads.
"""

import copy
from typing import Any

import torch
from transformers import PreTrainedModel

from draftsmith.decode.errors import InputError
from draftsmith.decode.tree import Tree
from draftsmith.medusa.checkpoint_files import dtype_name, from_tensors, round_tensors
from draftsmith.medusa.formats import HeadsFormats
from draftsmith.medusa.heads.formats.importing import import_heads
from draftsmith.medusa.heads.kind import Medusa
from draftsmith.medusa.heads.model import MedusaHeads
from draftsmith.medusa.heads.proposer import MedusaProposer
from draftsmith.train.kinds.export import ExportOptions, vllm_command, vocabulary_override
from draftsmith.train.kinds.quantities import count_of
from draftsmith.train.losses.cut_vocabulary import whole_rows


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
    if config.truncated_vocab_size < config.vocab_size and config.truncated_vocab_size == 1:
        return f"a truncated vocabulary of 1 tokens; {stay}"
    return None


def adapt_heads(heads: MedusaHeads, format: str, dtype: torch.dtype) -> MedusaHeads:
    """Return the heads in the format's terms, rounded, on the CPU.

    A softcap, which only ours holds, is left out: vLLM drafts the most likely tokens, and these stay the same.
    """
    config: Any = copy.deepcopy(heads.config)
    tensors = heads.state_dict()
    if format == "vllm":
        config.final_logit_softcapping = None
    token_map = tensors.pop("token_map", None) if format == "vllm" else None  # vLLM fails on a cut vocabulary
    if token_map is not None:
        config.truncated_vocab_size = config.vocab_size
        for name in [name for name in tensors if name.startswith("lm_head")]:
            # New rows are the mean of the others, so their logits are never the largest.
            tensors[name] = whole_rows(tensors[name], token_map, config.vocab_size)
    return from_tensors(MedusaHeads, config, round_tensors(tensors, dtype))


def config_fields(heads: MedusaHeads, format: str) -> dict[str, Any]:
    """Return config.json without keys that vLLM would rename: those with "num" and "heads" or "layers"."""
    config = heads.config
    names = "hidden_size vocab_size num_heads num_hidden_layers truncated_vocab_size medusa_fc_bias original_lm_head"
    names += " logit_scale base_model_name_or_path"
    fields = {name: getattr(config, name) for name in names.split()}
    # All versions of the library read this older name of the dtype.
    fields["torch_dtype"] = dtype_name(heads.dtype)
    return {"architectures": ["MedusaModel"], "model_type": "medusa", **fields}


def notes(heads: MedusaHeads, format: str, target: PreTrainedModel | None = None) -> list[str]:
    """Return what readers leave out."""
    config, lines = heads.config, list[str]()
    if format == "own":
        return lines
    if config.final_logit_softcapping is not None:
        lines.append("final_logit_softcapping is left out: the order of logits stays")
    if config.truncated_vocab_size < config.vocab_size:
        lines.append(
            f"vLLM 0.32 loads no cut vocabulary: heads of {config.truncated_vocab_size} tokens are written with all "
            f"{config.vocab_size}, and the others are never the most likely; they draft the same, but save no memory"
        )
    if config.medusa_choices is not None:
        lines.append(
            "vLLM drafts the chain of each head's most likely token: the tree of "
            f"{len(config.medusa_choices)} tokens is not written"
        )
    return lines


def _described(heads: MedusaHeads) -> str:
    return f"{count_of(heads.config.num_heads, 'head')}, {count_of(heads.config.num_hidden_layers, 'block')} each"


def _speculative(config: ExportOptions, heads: MedusaHeads) -> dict[str, Any]:
    count = heads.config.num_heads if config.draft_length is None else config.draft_length
    if count > heads.config.num_heads:
        raise InputError(f"draft_length: expected at most the {heads.config.num_heads} heads, found {count}")
    return {"method": "medusa", "model": str(config.output), "num_speculative_tokens": count}


def _launch(
    name: str, speculative: dict[str, Any], heads: MedusaHeads, format: str, target: PreTrainedModel | None
) -> list[str]:
    override = None if target is None else vocabulary_override(target.config)
    return [vllm_command(name, speculative, override)] if format == "vllm" else []


FORMATS = HeadsFormats(
    names=Medusa.formats,
    read=import_heads,
    refusal=refusal,
    adapted=adapt_heads,
    fields=config_fields,
    notes=notes,
    described=_described,
    speculative=_speculative,
    proposer=lambda heads, draft_length: MedusaProposer(heads, Tree.chain(draft_length)),
    launch=_launch,
)
