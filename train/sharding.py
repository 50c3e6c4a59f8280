"""Drafts and targets sharded over processes: what FSDP2 and DeepSpeed ZeRO need in addition to their configs."""

from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from draftsmith.decode.cache.features import decoder_of
from draftsmith.decode.errors import InputError
from draftsmith.train.models import DTYPES, empty_model, load_config, load_model
from draftsmith.train.quantization import quantization_of


def check_sharding(accelerator: Accelerator, optimizer: str) -> None:
    """Check and adjust the sharding that `accelerate launch` set by environment variables, unseen by the config.

    FSDP1 (flat parameters are not weights) and Muon (which needs whole matrices) raise InputError. Losses stay in
    float32, and ZeRO-3 gathers weights to save them.
    """
    fsdp, zero = (getattr(accelerator.state, name, None) for name in ("fsdp_plugin", "deepspeed_plugin"))
    if fsdp is not None and fsdp.fsdp_version != 2:
        raise InputError(f"fsdp_version: expected 2, found {fsdp.fsdp_version}")
    if fsdp is not None and fsdp.mixed_precision_policy is not None:
        # The model returns a summed loss or replay's features, and half precision would keep only 8 bits of them.
        fsdp.mixed_precision_policy = replace(fsdp.mixed_precision_policy, output_dtype=None)
    if optimizer == "muon" and (fsdp or zero):
        raise InputError("optimizer: expected trainer for a draft sharded by FSDP or DeepSpeed, found muon")
    if zero is not None and zero.zero_stage == 3:
        # Otherwise shards are saved, which nothing loads as a draft. A whole draft fits into one process's memory.
        zero.deepspeed_config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True


@torch.no_grad()
def load_sharded(path: str, device: torch.device, *, dtype: str, trust_remote_code: bool = False) -> PreTrainedModel:
    """Load the frozen target, sharded with FSDP2: each process keeps its share of the decoder on `device`.

    A layer is gathered while it computes, so all processes must call the decoder equally often. The head stays whole on
    each device. The first process reads the weights and distributes them one by one: the others never hold more than
    their share and the largest weight. Raise InputError with fewer than two processes, and as `load_model` does.
    """
    count = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    if count == 1:
        raise InputError("target_sharded: expected more than one process, found one")
    config = load_config(path, field="target", trust_remote_code=trust_remote_code)
    if quantization := quantization_of(config):
        raise InputError(f"target_sharded: expected a target in floating point, found {path} ({quantization})")
    source: PreTrainedModel | None = None
    if torch.distributed.get_rank() == 0:
        source = load_model(path, field="target", dtype=dtype, trust_remote_code=trust_remote_code, device="cpu")
    options: dict[str, Any] = {"field": "target", "trust_remote_code": trust_remote_code}
    model = empty_model(path, dtype=DTYPES[dtype], **options).requires_grad_(False)
    decoder = decoder_of(model)
    depth: int = model.config.get_text_config().num_hidden_layers
    layers = next(part for part in decoder.modules() if isinstance(part, nn.ModuleList) and len(part) == depth)
    mesh = init_device_mesh(device.type, (count,))
    for part in (*layers, decoder):  # the head, even one tied to the embeddings, is not sharded
        fully_shard(part, mesh=mesh, reshard_after_forward=True)
    model.to_empty(device=device)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        if source is not None:
            module, _, last = name.rpartition(".")
            whole.copy_(getattr(source.get_submodule(module), last))
        if isinstance(tensor, DTensor):
            share = distribute_tensor(whole, mesh, tensor.placements)  # sends the first process's values
            tensor.to_local().copy_(share.to_local())
        else:
            torch.distributed.broadcast(whole, 0)
            tensor.copy_(whole)
    return model
