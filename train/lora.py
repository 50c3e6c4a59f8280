"""Low-rank adapters on drafts and backbones: added in place, and merged when the model is saved."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from draftsmith.decode.errors import InputError
from draftsmith.train.options import LoraOptions

ADAPTER = "default"


def add_lora(model: PreTrainedModel, options: LoraOptions) -> None:
    """Add float32 adapters to a model's linear maps in place; its own weights are frozen."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise InputError("lora: expected peft to be installed (pip install peft), found none") from error

    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    excluded = {name for name, module in model.named_modules() if module in ends}
    linear = {name for name, module in model.named_modules() if _is_linear(module)} - excluded - _read_by_kernels(model)
    targets = linear if options.target_modules is None else set()
    for suffix in options.target_modules or ():
        matching = {name for name in linear | excluded if f".{name}".endswith(f".{suffix}")}
        if matching & excluded:
            reason = "the loss takes the head's weight in pieces"
            raise InputError(f"lora.target_modules: expected neither embeddings nor head, found {suffix!r}: {reason}")
        if not matching:
            names = sorted({name.rpartition(".")[2] for name in linear})
            raise InputError(f"lora.target_modules: expected names among {', '.join(names)}, found {suffix!r}")
        targets |= matching
    config = LoraConfig(
        r=options.r,
        lora_alpha=options.alpha,  # type: ignore[arg-type]
        lora_dropout=options.dropout,
        target_modules=sorted(targets),
        fan_in_fan_out=any(isinstance(model.get_submodule(name), Conv1D) for name in targets),
    )
    # For some families peft mistakes maps for experts by older names. Another model_type makes it take names exactly.
    model_config: Any = model.config
    family, model_config.model_type = model_config.model_type, "exact"
    try:
        inject_adapter_in_model(config, model, ADAPTER)
    finally:
        model_config.model_type = family
    for name, parameter in model.named_parameters():
        if "lora_" in name:  # peft gives adapters the dtype of their map, and bfloat16 would lose small updates
            parameter.data = parameter.data.float()


def _is_linear(module: nn.Module) -> bool:
    """Return whether a module is only a linear map; a family's own subclasses, such as Llama 4's routers, do more."""
    return isinstance(module, nn.Linear | Conv1D) and not type(module).__module__.startswith("transformers.models.")


def _read_by_kernels(model: PreTrainedModel) -> set[str]:
    """Return the names of Mamba's maps whose weights kernels read directly: adapters on them would have no effect."""
    mixers = [name for name, module in model.named_modules() if hasattr(module, "A_log") and hasattr(module, "D")]
    return {f"{mixer}.{name}" for mixer in mixers for name in ("x_proj", "dt_proj", "out_proj")}


@torch.no_grad()
def merged_state(model: PreTrainedModel, state: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return a draft's state dict (`state` if it is sharded) with adapters merged: W + (alpha ÷ r)·B·A for W."""
    state = dict(model.state_dict() if state is None else state)
    for key in [key for key in state if key.endswith(f".lora_A.{ADAPTER}.weight")]:
        name = key.removesuffix(f".lora_A.{ADAPTER}.weight")
        module: Any = model.get_submodule(name)
        down, up = state.pop(key), state.pop(f"{name}.lora_B.{ADAPTER}.weight")
        delta = module.scaling[ADAPTER] * (up.float() @ down.float())
        weight = state.pop(f"{name}.base_layer.weight")
        delta = (delta.T if module.fan_in_fan_out else delta).to(weight.device)
        state[f"{name}.weight"] = (weight + delta).to(weight.dtype)
        if f"{name}.base_layer.bias" in state:
            state[f"{name}.bias"] = state.pop(f"{name}.base_layer.bias")
    return state
