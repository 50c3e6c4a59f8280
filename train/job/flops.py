"""The arithmetic of a forward or a step, and the peak of a device: for use rates and for plans.

The usual count (Kaplan et al. 2020, section 2.1; Chowdhery et al. 2022, appendix B): two operations a multiply-add, the
matrix products and attention alone, a causal one at half its square; what checkpointing computes twice counts once.
"""

from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from draftsmith.decode.draft_models.cut_vocabulary import has_whole_head, kept_tokens


@dataclass(frozen=True)
class Device:
    """What the maker says of a device."""

    tflops: float
    """Dense bfloat16 operations a second, in 10¹²."""
    terabytes: float
    """Bytes a second out of its memory, in 10¹²."""


DEVICES = {
    "B200": Device(2250, 8.0),
    "H200": Device(989, 4.8),
    "H100 PCIe": Device(756, 2.0),
    "H100": Device(989, 3.35),
    "A100": Device(312, 2.0),
    "L40S": Device(362, 0.864),
    "L40": Device(181, 0.864),
    "L4": Device(121, 0.3),
    "A10G": Device(70, 0.6),
    "A10": Device(125, 0.6),
    "RTX 4090": Device(165, 1.0),
    "RTX 3090": Device(71, 0.936),
}
"""By what their names hold, the longer name first."""


def known_device(name: str) -> Device | None:
    """Return a device by the name that its driver gives, such as "NVIDIA H100 80GB HBM3"; None for others."""
    return next((device for part, device in DEVICES.items() if part in name), None)


@dataclass(frozen=True)
class Work:
    """Multiply-adds of a forward, by what they are taken over."""

    decoder: int
    """For each position."""
    head: int
    """For each position whose logits are made."""
    attention: int
    """For each position that a position sees, itself included."""
    trained: float = 1.0
    """The share of the matrices that has gradients."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> "Work | None":
        """Count a causal LM's; None for mixtures of experts, of whose weights a token uses some."""
        if any(parameter.ndim == 3 for parameter in model.parameters()):
            return None
        config, head = model.config.get_text_config(), model.get_output_embeddings()
        numbers = {module: _multiply_adds(module) for module in model.modules() if module is not head}
        trained = sum(n for module, n in numbers.items() if n and next(module.parameters()).requires_grad)
        decoder = sum(numbers.values())
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        attention = 2 * config.num_hidden_layers * config.num_attention_heads * width
        logits = _multiply_adds(head)
        kept_D = kept_tokens(model.config)
        if kept_D is not None and has_whole_head(model):
            logits = logits * len(kept_D) // config.vocab_size
        return cls(decoder, logits, attention, trained / max(decoder, 1))

    @classmethod
    def of_maps(cls, *parts: nn.Module) -> "Work":
        """Count linear maps that are taken where logits are made, such as drafting heads', as often as given."""
        return cls(0, sum(_multiply_adds(module) for part in parts for module in part.modules()), 0)

    def forward(self, positions: float, seen: float, logits: float) -> float:
        """Return the operations of a forward.

        Args:
            positions: tokens that go in.
            seen: summed over them, the tokens that each sees.
            logits: positions whose logits are made.
        """
        return 2 * (self.decoder * positions + self.attention * seen + self.head * logits)

    def step(self, positions: float, seen: float, logits: float) -> float:
        """Return the operations of a forward and its backward: once more to the inputs, and once to what is trained."""
        return (2 + self.trained) * self.forward(positions, seen, logits)


def _multiply_adds(module: nn.Module | None) -> int:
    if isinstance(module, nn.Linear):  # quantised ones too, whose weights have another shape
        return module.in_features * module.out_features
    return module.weight.numel() if isinstance(module, Conv1D) else 0
