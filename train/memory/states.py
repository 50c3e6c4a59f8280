"""Weights, gradients and optimiser states: sums of tensor sizes, divided over GPUs as each strategy divides them.

Rajbhandari et al. 2020 (ZeRO, section 3.1) call them model states. Those of a step are in `trace`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from draftsmith.decode.errors import InputError
from draftsmith.train.losses.output_head import head_of
from draftsmith.train.memory.machines import Strategy
from draftsmith.train.memory.trace import Precision

Placement = Literal["whole", "sharded", "8bit", "4bit", "elsewhere"]
"""The place of a target on the GPUs that train the drafter."""

# DeepSpeed's stage3_max_live_parameters: weights that ZeRO-3 keeps gathered, as long as they will be used again.
LIVE_PARAMETERS = 10**9
ADAM = ("adamw_torch", "adamw_torch_fused", "paged_adamw", "paged_adamw_32bit", "adamw_anyprecision", "stable_adamw")
OPTIMIZERS = (*ADAM, "adafactor", "sgd")


@dataclass(frozen=True)
class Weights:
    """The counts of a model's numbers."""

    all: int  # parameters, tied ones once
    trained: int  # parameters with gradients
    buffers: int  # bytes of tables that are no parameters
    largest_unit: int  # parameters of the largest part that FSDP gathers at a time: a layer, or untied embeddings
    tail: int  # parameters that FSDP leaves gathered: those of the head and of the final norm
    bucket: int  # numbers that DeepSpeed reduces together, twice: the Trainer's "auto" is the hidden size squared

    @classmethod
    def of_module(cls, module: nn.Module, hidden_size: int) -> "Weights":
        """Count the numbers of any module, which FSDP gathers as one."""
        numbers = _count(module.parameters())
        trained = _count(p for p in module.parameters() if p.requires_grad)
        return cls(numbers, trained, sum(buffer.nbytes for buffer in module.buffers()), 0, numbers, hidden_size**2)

    @classmethod
    def of(cls, model: PreTrainedModel) -> "Weights":
        """Count the numbers of a causal LM."""
        embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
        ends = {id(p) for end in (embeddings, head) for p in end.parameters()}
        layers = _layers(model)
        units = [_count(layer.parameters()) for layer in layers] + [_count(embeddings.parameters())]
        inside = {id(p) for layer in layers for p in layer.parameters()} | ends
        rest = [p for p in model.parameters() if id(p) not in inside]
        return cls(
            all=_count(model.parameters()),
            trained=_count(p for p in model.parameters() if p.requires_grad),
            buffers=sum(buffer.nbytes for buffer in model.buffers()),
            largest_unit=max(units),
            tail=_count(head.parameters()) + _count(rest),
            bucket=model.config.get_text_config().hidden_size ** 2,
        )


def _count(parameters: Iterable[Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def target_bytes(target: PreTrainedModel, placement: Placement, gpus: int) -> dict[str, float]:
    """Return the bytes that a frozen target takes on each GPU at all times.

    * "whole": all of it, in its own dtype.
    * "sharded": a share of the decoder, two layers and the embeddings gathered while it computes, and a whole head.
    * "8bit", "4bit": linear maps but the head in a byte or half of one (Dettmers et al. 2022 and 2023, with a float32
      scale for a row, or for 64 numbers), and one of them at a time in the dtype of computing.
    * "elsewhere": with those who compute its states, and a head here.
    """
    dtype, weights = head_of(target).weight.dtype, Weights.of(target)
    if placement == "whole":
        return {f"target: weights in {dtype}, whole".replace("torch.", ""): float(weights.all * dtype.itemsize)}
    head = head_of(target).weight
    if placement == "elsewhere":
        return {"target: the head": float(head.nbytes)}
    if placement == "sharded":
        embeddings = target.get_input_embeddings().weight
        decoder = weights.all - (0 if embeddings is head else head.numel())
        layers = [_count(layer.parameters()) for layer in _layers(target)]
        gathered = 2 * max(layers) + decoder - sum(layers)
        return {
            "target: a share of the weights, the head whole": dtype.itemsize * (decoder / gpus + head.numel()),
            "target: gathered weights": float(dtype.itemsize * gathered),
        }
    linear = [
        module.weight
        for module in target.modules()
        if isinstance(module, nn.Linear | Conv1D) and module.weight is not head
    ]
    numbers, rows = _count(linear), sum(len(weight) for weight in linear)
    small = numbers + 4 * rows if placement == "8bit" else numbers / 2 + 4 * numbers / 64
    return {
        f"target: weights in {placement}, whole": small + (weights.all - numbers) * dtype.itemsize,
        "target: a matrix in the dtype of computing": float(max(map(Tensor.numel, linear)) * dtype.itemsize),
    }


def _layers(model: PreTrainedModel) -> list[nn.Module]:
    return [module for part in model.modules() if isinstance(part, nn.ModuleList) for module in part]


def optimizer_bytes(model: nn.Module, name: str, adamw_modules: Sequence[nn.Module]) -> int:
    """Return the bytes of an optimiser's states for the parameters that train, not sharded.

    AdamW has two float32 moments and a step count for each tensor; "muon" (`MuonAdamW`) one momentum for matrices that
    are neither embeddings nor head, and AdamW's for the rest. `name` is muon or one of `OPTIMIZERS`;
    `adamw_modules` are those of `MuonAdamW`.
    """
    if name not in (*OPTIMIZERS, "muon"):
        raise InputError(f"training.optim: expected one of {', '.join(OPTIMIZERS)}, found {name!r}")
    adamw_ids = {id(p) for module in adamw_modules for p in module.parameters()}
    total = 0
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        n, is_matrix = parameter.numel(), parameter.ndim == 2 and min(parameter.shape) > 1
        if name == "sgd":
            continue
        if name == "adafactor":
            total += 4 * (sum(parameter.shape) if parameter.ndim == 2 else n)
        elif name == "muon" and is_matrix and id(parameter) not in adamw_ids:
            total += 4 * n
        else:
            total += 8 * n + 4
    return total


def step_bytes(name: str, trained: int, strategy: Strategy, gpus: int) -> float:
    """Return the bytes that an optimiser takes for a moment: √v of all tensors, and under ZeRO float32 gradients."""
    copies = (name == "adamw_torch") + strategy.startswith("zero")
    return 4.0 * copies * trained / (1 if strategy == "ddp" else gpus)


def held_bytes(
    weights: Weights, states: int, strategy: Strategy, gpus: int, precision: Precision, label: str
) -> dict[str, float]:
    """Return the bytes that a trained model takes on each GPU at all times, by their use.

    * DDP: everything whole, and buckets of the gradients' size to send them from (`gradient_as_bucket_view` is off).
    * ZeRO (Rajbhandari et al. 2020, section 5): working weights and gradients in the precision of computing, and
      float32 weights with the states, divided over the GPUs from stage 1 on, gradients from 2 on, working weights from
      3 on.
    * FSDP2: float32 weights, gradients and states divided; two layers gathered at a time, and head and norm always.
    `states` are `optimizer_bytes`; `label` is the model's name in the table.
    """
    working = 2 if precision == "half" else 4
    if strategy == "ddp":
        return {
            f"{label}: weights": 4 * weights.all + weights.buffers,
            f"{label}: gradients": 4 * weights.trained,
            f"{label}: DDP's buckets": 4 * weights.trained if gpus > 1 else 0,
            f"{label}: optimiser states": states,
        }
    if strategy == "fsdp2":
        gathered = weights.tail + 2 * weights.largest_unit if gpus > 1 else 0
        return {
            f"{label}: weights": 4 * weights.all / gpus + weights.buffers,
            f"{label}: gradients": 4 * weights.trained / gpus,
            f"{label}: optimiser states": states / gpus,
            f"{label}: gathered weights": working * gathered,
            f"{label}: gradients on their way": working * min(gathered, weights.trained),
        }
    stage = int(strategy[-1])
    gathered = min(weights.all, LIVE_PARAMETERS) if stage == 3 and gpus > 1 else 0
    return {
        f"{label}: weights": working * weights.all / (gpus if stage == 3 else 1) + weights.buffers,
        f"{label}: float32 weights": 4 * weights.trained / gpus,
        f"{label}: gradients": working * weights.trained / (gpus if stage >= 2 else 1),
        f"{label}: optimiser states": states / gpus,
        f"{label}: gathered weights": working * gathered,
        f"{label}: ZeRO's buckets": 2 * working * min(weights.bucket, weights.trained),
    }
