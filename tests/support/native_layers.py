"""Tiny targets that ship with MTP layers, under the names that their families use."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from draftsmith.medusa.mtp.heads import MtpHeads

PARTS = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "post_norm": "norm"}


def qwen_names(name: str) -> str:
    """Return a tensor's name as in Qwen 3.5 and Mellum, which have one layer: mtp.fc, mtp.layers.0.self_attn.…"""
    rest = name.removeprefix("layers.0.")
    first, _, last = rest.partition(".")
    return f"mtp.{PARTS[first]}.{last}" if first in PARTS else f"mtp.layers.0.{last}"


def deepseek_names(layers: int) -> Any:
    """Return a function from a tensor's name to that in DeepSeek V3: model.layers.N.…, after the target's `layers`."""

    def named(name: str) -> str:
        _, index, rest = name.split(".", 2)
        rest = rest.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
        return f"model.layers.{layers + int(index)}.{rest}"

    return named


def split_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors with an entry for each expert's map, as checkpoints have them; gpt-oss's have them joined."""
    if any(name.endswith("gate_up_proj_bias") for name in tensors):
        return tensors
    split = {}
    for name, tensor in tensors.items():
        if not name.endswith((".gate_up_proj", ".down_proj")) or tensor.ndim != 3:
            split[name] = tensor
            continue
        start, _, part = name.rpartition(".")
        for index, expert in enumerate(tensor):
            maps = zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True)
            for key, weight in maps if part == "gate_up_proj" else [(part, expert)]:
                split[f"{start}.{index}.{key}.weight"] = weight.contiguous()
    return split


def save_with_mtp(target: PreTrainedModel, heads: MtpHeads, names: Any, path: Path, **fields: Any) -> None:
    """Write a target with MTP layers in one file, and the fields of its config that promise them."""
    text = target.config.get_text_config()
    for name, value in fields.items():
        setattr(text, name, value)
    target.save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    own = {name: tensor for name, tensor in heads.state_dict().items() if not name.startswith("shared_post")}
    tensors |= split_experts({names(name): tensor.contiguous() for name, tensor in own.items()})
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
