"""The arithmetic of a forward or a step, and the peak rates of devices, for utilisation and for plans.

The count is the usual one (Kaplan et al. 2020, section 2.1; Chowdhery et al. 2022, appendix B): two operations per
multiply-add; matrix products and attention alone, causal attention at half its square; recomputation is not counted,
and neither are the updates of recurrent states and the choice of experts.
"""

from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from draftsmith.decode.cache.states import STATES, layer_kinds
from draftsmith.decode.draft_models.cut_vocabulary import has_whole_head, kept_tokens

DEVICES = {
    "B200": 2250, "H200": 989, "H100 PCIe": 756, "H100": 989, "A100": 312, "L40S": 362, "L40": 181, "L4": 121,
    "A10G": 70, "A10": 125, "RTX 4090": 165, "RTX 3090": 71,
}  # fmt: skip
"""Dense bfloat16 operations a second in 10¹², as makers state them, by a part of a device's name; longer ones first."""


def known_speed(name: str) -> int | None:
    """Return the operations of a device with a driver's name, such as "NVIDIA H100 80GB HBM3"; None if unknown."""
    return next((speed for part, speed in DEVICES.items() if part in name), None)


@dataclass(frozen=True)
class Work:
    """The multiply-adds of a forward, by the unit that they are multiplied with."""

    decoder: int  # per position
    head: int  # per position whose logits are computed
    attention: int  # per pair of a position and one that it attends to, itself included
    trained: float = 1.0  # the share of the matrices that gets gradients

    @classmethod
    def of(cls, model: PreTrainedModel) -> "Work | None":
        """Count those of a causal LM; None where the number of experts that a token uses is not known."""
        config, head = model.config.get_text_config(), model.get_output_embeddings()
        used = getattr(config, "num_experts_per_tok", getattr(config, "num_experts_per_token", None))
        stacks = [stack for module in model.modules() for stack in _experts(module)]
        if any(used is None or not stack.is_floating_point() for stack in stacks):
            return None
        numbers = {module: _multiply_adds(module, used) for module in model.modules() if module is not head}
        trained = sum(n for module, n in numbers.items() if n and next(module.parameters()).requires_grad)
        decoder = sum(numbers.values())
        attention = 0
        for layer, kind in zip(config.per_layer_config, layer_kinds(config)[0], strict=True):
            if kind not in STATES:
                heads = layer.num_attention_heads
                attention += 2 * heads * (getattr(layer, "head_dim", None) or layer.hidden_size // heads)
        logits = _multiply_adds(head)
        kept_D = kept_tokens(model.config)
        if kept_D is not None and has_whole_head(model):
            logits = logits * len(kept_D) // config.vocab_size
        return cls(decoder, logits, attention, trained / max(decoder, 1))

    @classmethod
    def of_maps(cls, *parts: nn.Module) -> "Work":
        """Count linear maps that are applied where logits are computed, such as drafting heads, repeats included."""
        return cls(0, sum(_multiply_adds(module) for part in parts for module in part.modules()), 0)

    def forward(self, positions: float, seen: float, logits: float) -> float:
        """Return the operations of a forward over `positions` tokens, which computes logits at `logits` positions.

        `seen` is the sum over tokens of the tokens that each attends to.
        """
        return 2 * (self.decoder * positions + self.attention * seen + self.head * logits)

    def step(self, positions: float, seen: float, logits: float) -> float:
        """Return the operations of a forward and its backward, to the inputs and to the trained weights."""
        return (2 + self.trained) * self.forward(positions, seen, logits)


def _experts(module: nn.Module) -> list[nn.Parameter]:
    """Return the matrices of a module's experts, stacked (experts, …, …); those in packed integers have more axes."""
    own = [] if isinstance(module, nn.Conv1d) else module.parameters(recurse=False)
    return [p for p in own if p.ndim == 3 or (p.ndim > 3 and not p.is_floating_point())]


def _multiply_adds(module: nn.Module | None, used: int | None = None) -> int:
    """Return those of a position; `used` is the number of experts that a token uses, each in its turn."""
    if isinstance(module, nn.Linear):  # quantised ones too, whose weights have another shape
        return module.in_features * module.out_features
    if isinstance(module, Conv1D | nn.Conv1d):
        return module.weight.numel()
    return sum(stack[0].numel() * used for stack in _experts(module)) if module is not None and used else 0
