"""Medusa-2: the backbone in training with its heads, and the original backbone as their teacher."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.decode.errors import InputError
from draftsmith.medusa.heads.config import MedusaTrainingConfig
from draftsmith.medusa.heads.model import MedusaHeads
from draftsmith.train.lora import add_lora, merged_state
from draftsmith.train.losses.output_head import OutputHead, head_of, last_hidden
from draftsmith.train.models import load_config, load_model, stored_dtype
from draftsmith.train.quantization import is_quantized


class Joint(nn.Module):
    """Heads and backbone as one module for the Trainer; they are saved separately.

    The original backbone is the same one without its adapters, or a frozen copy if all of it is trained.
    """

    def __init__(self, heads: MedusaHeads, backbone: PreTrainedModel, config: MedusaTrainingConfig):
        super().__init__()
        if is_quantized(backbone) and config.target_quantization is None:
            raise InputError(
                "target: expected a checkpoint in floating point for a backbone in training (target_quantization "
                f"makes it smaller), found {config.target}, which is stored quantised"
            )
        self.heads, self.backbone, self._recipe = heads, backbone, config
        # ZeRO files with "auto" need the hidden size. A copy, because the Trainer changes caches in it.
        self.config = copy.deepcopy(backbone.config)
        self._no_split_modules = [*heads._no_split_modules, *(backbone._no_split_modules or [])]  # for FSDP
        self._copy: list[PreTrainedModel] = []  # in a list, it is no submodule
        if config.backbone == "lora":
            with torch.random.fork_rng(devices=[]):  # the same adapters on each process, and in each run
                torch.manual_seed(int(config.training.seed))
                add_lora(backbone, config.lora)
        else:
            self._copy.append(copy.deepcopy(backbone).requires_grad_(False).eval())
        # Names, because sharding replaces the parameters.
        self._trained = {n for n, p in backbone.named_parameters() if p.requires_grad or config.backbone == "full"}

    def thaw(self) -> None:
        """Let the backbone be trained: the Trainer froze it as a teacher."""
        for name, parameter in self.backbone.named_parameters():
            parameter.requires_grad_(name in self._trained)

    @torch.no_grad()
    def original_hidden(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return the inputs of the original backbone's head, (B, T, H)."""
        if self._copy:
            original: Any = self._copy[0]
            return last_hidden(original.to(self.backbone.device), **inputs)
        # LoRA leaves the original weights in place: without adapters the backbone is its own teacher.
        with self._without_adapters():
            return last_hidden(self.backbone, **inputs)

    def inside_head(self, hidden: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Return `function(hidden)`, called inside of the forward of the backbone's head, where ZeRO-3 gathers it."""
        project: Any = self.backbone.get_output_embeddings()
        return project(hidden, inside=function)

    def original_head(self) -> OutputHead:
        """Return the original backbone's head; adapters do not change it."""
        return head_of(self._copy[0] if self._copy else self.backbone).detach()

    def trained_state(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights that a checkpoint holds: the heads', and the trained ones of the backbone."""
        return {
            name: tensor
            for name, tensor in state.items()
            if name.startswith("heads.") or name.removeprefix("backbone.") in self._trained
        }

    def merged(self, state: dict[str, Tensor]) -> tuple[PreTrainedModel, dict[str, Tensor]]:
        """Return the backbone to save, and its weights with adapters merged, from its part of a state dict.

        Adapters of a quantised backbone are merged into the checkpoint's original weights: so the result is as exact as
        these, and any server can quantise it again.
        """
        if not is_quantized(self.backbone):
            return self.backbone, merged_state(self.backbone, state)
        config = self._recipe
        code = config.trust_remote_code
        dtype = stored_dtype(load_config(config.target, field="target", trust_remote_code=code))
        stored = load_model(config.target, field="target", dtype=dtype, trust_remote_code=code, device="cpu")
        weights = stored.state_dict()
        plain = {name: name.replace(".base_layer.", ".") for name in state}
        merged = {n: weights.get(plain[n], state[n]) for n in state if "lora_" in n or plain[n] in weights}
        return stored, merged_state(self.backbone, merged)

    @property
    def _keys_to_ignore_on_save(self) -> list[str]:
        """The library's list of weights that checkpoints leave out, so that it does not report them as missing."""
        state = self.state_dict()
        return sorted(state.keys() - self.trained_state(state).keys())

    def tie_weights(self) -> None:
        """Tie the backbone's weights; the library calls this after loading."""
        self.backbone.tie_weights()

    def activation_checkpointing_enable(self, **options: Any) -> None:
        """Recompute the backbone's layers in the backward; the heads' blocks are too small to gain from it."""
        self.backbone.activation_checkpointing_enable(**options)

    @contextmanager
    def _without_adapters(self) -> Iterator[None]:
        """Turn off the backbone's adapters and dropout while the block runs."""
        from peft.tuners.tuners_utils import BaseTunerLayer

        layers = [module for module in self.backbone.modules() if isinstance(module, BaseTunerLayer)]
        training = self.backbone.training
        self.backbone.eval()
        for layer in layers:
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in layers:
                layer.enable_adapters(True)
            self.backbone.train(training)
