"""Muon for the matrices and AdamW for the rest, as one optimizer that the Trainer can schedule and checkpoint."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.train.models import has_fast


class Muon(torch.optim.Muon):
    """`torch.optim.Muon` with float32 products on devices without fast bfloat16.

    The library computes them in bfloat16 everywhere. A CPU without instructions for it emulates them at a tenth of its
    float32 speed: with the embedded draft that was half of a step. Other devices take the library's step.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Take one step; a closure is evaluated once, before it."""
        if all(has_fast("bfloat16", p.device.type) for group in self.param_groups for p in group["params"]):
            return super().step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            rate, momentum = float(group["lr"]), group["momentum"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(parameter.grad)
                mean = state["momentum_buffer"].lerp_(parameter.grad, 1 - momentum)
                update = parameter.grad.lerp(mean, momentum) if group["nesterov"] else mean
                update = orthogonal(update.float(), group["ns_coefficients"], group["ns_steps"], group["eps"])
                parameter.mul_(1 - rate * group["weight_decay"])
                parameter.add_(update, alpha=-0.2 * max(parameter.shape) ** 0.5 * rate)  # "match_rms_adamw"
        return loss


def orthogonal(matrix: Tensor, coefficients: Sequence[float], steps: int, eps: float) -> Tensor:
    """Return a matrix with the same singular vectors and singular values near 1 (Newton–Schulz, Jordan et al. 2024)."""
    a, b, c = coefficients
    wide = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix  # the smaller Gram matrix costs less
    wide = wide / wide.norm().clamp(min=eps)
    for _ in range(steps):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.T if matrix.shape[0] > matrix.shape[1] else wide


class MuonAdamW(torch.optim.Optimizer):
    """`Muon` on the hidden matrices and `torch.optim.AdamW` on embeddings, head, norms and biases.

    Muon (Jordan et al. 2024) is defined for two-dimensional hidden weights. Its updates are scaled to AdamW's root mean
    square (Liu et al. 2025, section 2.2), so that one learning rate and one schedule serve both halves. A scheduler
    that writes `param_groups` drives both, since they are shared. `adamw_modules` are those whose matrices AdamW
    trains, by default the model's embeddings and head.
    """

    def __init__(
        self, model: PreTrainedModel, lr: float, weight_decay: float, adamw_modules: Sequence[nn.Module] | None = None
    ):
        if adamw_modules is None:
            adamw_modules = [model.get_input_embeddings(), model.get_output_embeddings()]
        adamw_ids = {id(p) for module in adamw_modules for p in module.parameters()}
        parameters = [p for p in model.parameters() if p.requires_grad]
        # A matrix of one row, such as a confidence head's, is a vector.
        matrices = [p for p in parameters if p.ndim == 2 and min(p.shape) > 1 and id(p) not in adamw_ids]
        muon_ids = {id(p) for p in matrices}
        rest = [p for p in parameters if id(p) not in muon_ids]
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})
        # With adapters there may be only matrices, and torch refuses an optimizer without parameters.
        self._halves: dict[str, torch.optim.Optimizer] = {}
        if matrices:
            self._halves["muon"] = Muon(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
        if rest:
            self._halves["adamw"] = torch.optim.AdamW(rest, lr=lr, weight_decay=0.0, betas=(0.9, 0.95))
        self._share_groups()

    def _share_groups(self) -> None:
        self.param_groups = [group for half in self._halves.values() for group in half.param_groups]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Take one step with both halves; a closure is evaluated once, before them."""
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
