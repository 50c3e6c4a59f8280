"""`python -m draftsmith.medusa.eagle.kept`: what the steps of EAGLE-3 heads keep for their backward, counted twice.

Once as `draftsmith plan` counts, where attention runs by the CPU's kernels, which hold no scores either. And once from
the tensors that autograd saves, where attention runs by CUDA's own operators, on tensors without data.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from draftsmith.decode.cache.kernels import ALIGNED, additive_mask, computing_dtype, cuda_kernel
from draftsmith.decode.errors import at_least, require
from draftsmith.medusa.eagle.config import EaglePlanConfig
from draftsmith.medusa.eagle.heads import EagleHeads
from draftsmith.medusa.eagle.memory import forward_of_steps
from draftsmith.train.cli import parse_config, run
from draftsmith.train.memory.activations import BatchShape, Forward, precision_of, tensors_of, trace_step
from draftsmith.train.memory.setting import GIB, Precision


@dataclass
class KeptConfig(EaglePlanConfig):
    """Count what the K steps of EAGLE-3 heads keep, packed and not, from the config of their run."""

    lengths: list[int] = field(default_factory=lambda: [2048, 8192])
    """Tokens of a row. As many rows are taken as the longest of them has tokens, or one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, at_least(2), "lengths")


class CudaOperators(TorchFunctionMode):
    """A context in which attention over tensors without data runs by the operators that CUDA would run."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not nn.functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        kernel = cuda_kernel(*args, **kwargs)
        if kernel == "math":
            with sdpa_kernel(SDPBackend.MATH):
                return func(*args, **kwargs)
        return _fused(kernel, *args, **kwargs)


def _fused(
    kernel: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    del enable_gqa  # flash sees it by the shapes
    states = [state.to(computing_dtype(state)) for state in (query, key, value)]
    if kernel == "flash":
        return torch.ops.aten._scaled_dot_product_flash_attention(*states, 0.0, is_causal, False, scale=scale)[0]
    if attn_mask is not None:
        dtype = states[0].dtype
        attn_mask = additive_mask(attn_mask, dtype) if attn_mask.dtype == torch.bool else attn_mask.to(dtype)
        if any(stride % ALIGNED for stride in attn_mask.stride()[:-1]):
            attn_mask = attn_mask.clone()
        attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(*states, attn_mask, True, 0.0, is_causal, scale=scale)[0]


def kept_bytes(
    mode: FakeTensorMode, heads: EagleHeads, batch: BatchShape, precision: Precision, forward: Forward
) -> int:
    """Return the bytes of what the backward of K steps needs, and of what the target left; as `trace_step` does."""
    held: dict[int, Tensor] = {}

    def hold(tensor: Tensor) -> Tensor:
        held[tensor.untyped_storage()._cdata] = tensor
        return tensor

    saving = torch.autograd.graph.saved_tensors_hooks(hold, lambda tensor: tensor)
    with mode, CudaOperators(), precision_of(precision), saving:
        steps, seen = forward(heads.train(), batch.inputs(batch.rows))
    for tensor in (*steps, *seen):
        hold(tensor)
    given = {tensor.untyped_storage()._cdata for tensor in tensors_of(heads)}
    return sum(tensor.untyped_storage().nbytes() for number, tensor in held.items() if number not in given)


def count(config: KeptConfig) -> list[tuple[BatchShape, float, float]]:
    """Return for each shape of batch what `plan` counts, and what is saved, in GiB."""
    plan = config.memory_plan()
    precision, heads = plan.setting.precision, plan.drafter(plan.setting)
    found = []
    for packed in (False, True):
        for length in config.lengths:
            batch = BatchShape(length, max(config.lengths) // length, packed)
            forward = forward_of_steps(plan.target(plan.setting.target_dtype), config.num_steps, batch)
            planned = trace_step(plan.mode, heads, batch, precision, False, forward).in_loss(batch.rows)
            saved = kept_bytes(plan.mode, heads, batch, precision, forward)
            found.append((batch, planned / GIB, saved / GIB))
    return found


def main(arguments: Sequence[str]) -> int:
    """Print the table."""
    table = Table("rows", "tokens", "packed", "plan, GiB", "saved, GiB", "ratio", box=None)
    for batch, of_plan, saved in count(parse_config(KeptConfig, arguments)):
        row = [str(batch.rows), f"{batch.length:,}", "yes" if batch.packed else "no"]
        table.add_row(*row, f"{of_plan:.2f}", f"{saved:.2f}", f"{of_plan / saved:.3f}")
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(run(partial(main, sys.argv[1:])))
