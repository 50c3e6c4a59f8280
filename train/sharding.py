"""Drafts and targets that lie over several processes: what FSDP2 and DeepSpeed ZeRO need beside their configs."""

from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel

from draftsmith.decode.errors import InputError


def check_sharding(accelerator: Accelerator, optimizer: str) -> None:
    """Refuse what a sharded draft cannot do, and have ZeRO-3 gather its weights when it is saved.

    `accelerate launch` shards by environment variables, of which the config knows nothing.

    Raises:
        InputError: FSDP1, whose flat parameters are no weights; Muon, which needs whole matrices.
    """
    fsdp, zero = (getattr(accelerator.state, name, None) for name in ("fsdp_plugin", "deepspeed_plugin"))
    if fsdp is not None and fsdp.fsdp_version != 2:
        raise InputError(f"fsdp_version: expected 2, found {fsdp.fsdp_version}")
    if optimizer == "muon" and (fsdp or zero):
        raise InputError("optimizer: expected trainer for a draft sharded by FSDP or DeepSpeed, found muon")
    if zero is not None and zero.zero_stage == 3:
        # Without it shards are saved, which nothing loads as a draft. A draft fits into one process's memory.
        zero.deepspeed_config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True


def shard_decoder(model: PreTrainedModel, device: torch.device) -> None:
    """Leave each process its share of a frozen model's decoder; a layer is whole while it computes, and not otherwise.

    By `fully_shard` (FSDP2), however the draft is trained. From then on all processes must call the decoder equally
    often. The head is no part of it, but embeddings that are tied to it are: whoever needs it takes it before.

    Raises:
        InputError: there are no processes to share it.
    """
    count = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    if count == 1:
        raise InputError("target_sharded: expected more than one process, found one")
    decoder: Any = model.get_decoder()
    depth: int = model.config.get_text_config().num_hidden_layers
    layers = next(part for part in decoder.modules() if isinstance(part, nn.ModuleList) and len(part) == depth)
    mesh = init_device_mesh(device.type, (count,))
    for part in (*layers, decoder):
        fully_shard(part, mesh=mesh, reshard_after_forward=True)
