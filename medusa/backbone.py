"""Medusa-2: the backbone in training with its heads, and the law that it had before."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.medusa.config import MedusaTrainingConfig
from draftsmith.medusa.heads import MedusaHeads
from draftsmith.train.heads import Head, head_of, last_hidden
from draftsmith.train.lora import add_lora


class Joint(nn.Module):
    """Heads and backbone as one module for the Trainer; both stay what they are, and are saved apart.

    The backbone as it was is the same one without its adapters, or a frozen copy where all of it is trained.
    """

    def __init__(self, heads: MedusaHeads, backbone: PreTrainedModel, config: MedusaTrainingConfig):
        super().__init__()
        self.heads, self.backbone = heads, backbone
        self._copy: list[PreTrainedModel] = []  # in a list, it is no part of the module
        if config.backbone == "lora":
            add_lora(backbone, config.lora)
        elif config.needs_original:
            self._copy.append(copy.deepcopy(backbone).requires_grad_(False).eval())
        self._trained = [p for p in backbone.parameters() if p.requires_grad or config.backbone == "full"]

    def thaw(self) -> None:
        """Let the backbone be trained, which the Trainer has frozen as the teacher that it is too."""
        for parameter in self._trained:
            parameter.requires_grad_(True)

    def forward(self, then: Callable[["Joint"], Any]) -> Any:
        """Return `then(self)`."""
        return then(self)

    def hidden(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return what the backbone's head sees, (B, T, H)."""
        return last_hidden(self.backbone, **inputs)

    @torch.no_grad()
    def original_hidden(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return what the backbone's head saw before training, (B, T, H)."""
        if self._copy:
            original: Any = self._copy[0]
            return last_hidden(original.to(self.backbone.device), **inputs)
        with self._without_adapters():
            return last_hidden(self.backbone, **inputs)

    def original_head(self) -> Head:
        """Return the backbone's head before training; adapters leave it as it is."""
        head = head_of(self._copy[0] if self._copy else self.backbone)
        return Head(head.weight.detach(), head.bias, head.scale, head.softcap)

    def trained_state(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return what a checkpoint holds: heads, and of the backbone what is trained. The rest is as it was."""
        wanted = {id(parameter) for parameter in self._trained}
        names = {name for name, parameter in self.named_parameters() if id(parameter) in wanted}
        return {name: tensor for name, tensor in state.items() if name.startswith("heads.") or name in names}

    @contextmanager
    def _without_adapters(self) -> Iterator[None]:
        from peft.tuners.tuners_utils import BaseTunerLayer

        layers = [module for module in self.backbone.modules() if isinstance(module, BaseTunerLayer)]
        for layer in layers:
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in layers:
                layer.enable_adapters(True)
