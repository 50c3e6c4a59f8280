"""Muon for the matrices, AdamW for the rest, behind one optimizer that the Trainer can schedule and checkpoint."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel


class MuonAdamW(torch.optim.Optimizer):
    """`torch.optim.Muon` on the hidden matrices and `torch.optim.AdamW` on embeddings, head, norms and biases.

    Muon (Jordan et al. 2024) takes two-dimensional hidden weights only; its updates are scaled to AdamW's root mean
    square (Liu et al. 2025, section 2.2), so that one learning rate and one schedule serve both. The halves share
    their parameter groups with this object: a scheduler that writes `param_groups` drives both. `ends` are the modules
    whose matrices are no hidden ones, by default the model's embeddings and head.
    """

    def __init__(self, model: PreTrainedModel, lr: float, weight_decay: float, ends: Sequence[nn.Module] | None = None):
        if ends is None:
            ends = [model.get_input_embeddings(), model.get_output_embeddings()]
        embeddings = {id(p) for end in ends for p in end.parameters()}
        parameters = [p for p in model.parameters() if p.requires_grad]
        matrices = [p for p in parameters if p.ndim == 2 and id(p) not in embeddings]
        chosen = {id(p) for p in matrices}
        rest = [p for p in parameters if id(p) not in chosen]
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})
        # With adapters there may be no others than matrices, and an optimizer of nothing is an error.
        self._halves: dict[str, torch.optim.Optimizer] = {}
        if matrices:
            self._halves["muon"] = torch.optim.Muon(
                matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
            )
        if rest:
            self._halves["adamw"] = torch.optim.AdamW(rest, lr=lr, weight_decay=0.0, betas=(0.9, 0.95))
        self._share_groups()

    def _share_groups(self) -> None:
        self.param_groups = [group for half in self._halves.values() for group in half.param_groups]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Take one step of both halves; a closure is evaluated once, before them."""
        loss = closure() if closure is not None else None
        for half in self._halves.values():
            half.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return both halves' states under their names."""
        return {name: half.state_dict() for name, half in self._halves.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        for name, half in self._halves.items():
            half.load_state_dict(state_dict[name])
        self._share_groups()
