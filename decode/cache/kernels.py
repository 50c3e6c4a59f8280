"""The kernel that PyTorch's attention chooses on CUDA, and ways around the slowest one.

`scaled_dot_product_attention` has two kernels there that hold no scores, and a fallback, "math", that holds all of them
in float32: queries × keys a head, kept for the backward. It falls back silently. The rules are those of torch 2.13
(`aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`) for GPUs of compute capability 8.0 and more:

| kernel    | dtypes                      | head width             | mask | groups of query heads |
|-----------|-----------------------------|------------------------|------|-----------------------|
| flash     | float16, bfloat16           | at most 256            | none | yes                   |
| efficient | float16, bfloat16, float32  | any multiple of 8 or 4 | any  | no                    |

cuDNN's kernel takes masks together with groups, but only newer GPUs prefer it, and only for some widths: nothing here
relies on it.
"""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

HALF = (torch.float16, torch.bfloat16)
WIDEST = 256  # the widest heads that flash takes
ALIGNED = 16
"""Rows of a mask begin at a multiple of this many entries; else the efficient kernel copies it at every call."""


def computing_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype in which a matrix product of a tensor is computed, under autocast or not."""
    device = tensor.device.type
    castable = tensor.dtype != torch.float64 and torch.amp.is_autocast_available(device)
    return torch.get_autocast_dtype(device) if castable and torch.is_autocast_enabled(device) else tensor.dtype


def flash_takes(query: Tensor, masked: bool = False) -> bool:
    """Return whether the flash kernel takes queries, (…, width), with keys and values as wide, and with groups."""
    width, learns = query.shape[-1], query.requires_grad and torch.is_grad_enabled()
    # Compute capabilities 8.6, 8.9 and 12 have no backward of some widths.
    narrow = width <= WIDEST and not (learns and 192 < width <= 224)
    return narrow and not masked and computing_dtype(query) in HALF


def cuda_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> str:
    """Return the kernel, "flash", "efficient" or "math", that CUDA would run for these arguments, even without data."""
    del dropout_p, scale  # both kernels take any
    states = query, key, value
    dtypes = {computing_dtype(state) for state in states}
    heads = {state.shape[1] for state in states} if query.ndim == 4 else set()
    fits = (
        all(state.ndim == 4 and state.shape[2] > 0 and state.stride(-1) == 1 for state in states)
        and len({len(state) for state in states}) == len(dtypes) == 1
        and (len(heads) == 1 or (enable_gqa and key.shape[1] == value.shape[1]))
    )
    if not fits:
        return "math"
    square = query.shape[2] == key.shape[2] or not is_causal
    if flash_takes(query, attn_mask is not None) and square and query.shape[-1] == key.shape[-1] == value.shape[-1]:
        return "flash"
    (dtype,) = dtypes
    multiple = 8 if dtype in HALF else 4
    aligned = query.shape[-1] == key.shape[-1] and not query.shape[-1] % multiple and not value.shape[-1] % multiple
    by_rows = attn_mask is None or attn_mask.stride(-1) == 1
    if len(heads) == 1 and aligned and by_rows and dtype in (*HALF, torch.float32):
        return "efficient"
    return "math"


class CudaKernels:
    """A context in which attention runs the math kernel where CUDA would, on any device, for traces and tests."""

    def __init__(self) -> None:
        self.chosen: list[str] = []  # the kernel of each call, in order
        self._entered: list[Any] = []

    def __enter__(self) -> "CudaKernels":
        # The function itself is replaced, so that a backward's recomputation meets the same kernel.
        attend = nn.functional.scaled_dot_product_attention
        self._entered.append(attend)

        def chosen(*args: Any, **options: Any) -> Tensor:
            self.chosen.append(cuda_kernel(*args, **options))
            with sdpa_kernel(SDPBackend.MATH) if self.chosen[-1] == "math" else nullcontext():
                return attend(*args, **options)

        nn.functional.scaled_dot_product_attention = chosen  # type: ignore[assignment]
        return self

    def __exit__(self, *error: Any) -> None:
        nn.functional.scaled_dot_product_attention = self._entered.pop()


def fused_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    """Attend as `scaled_dot_product_attention`, in groups of query heads where CUDA has a kernel for them.

    `query` and the result are (B, heads, T, width), `key` and `value` (B, key heads, S, width).
    """
    grouped = query.shape[1] != key.shape[1]
    if grouped and not flash_takes(query, mask is not None):
        # The numbers are the same, and memory grows with positions, where the math kernel's grows with their square.
        key, value = (repeat_heads(states, query.shape[1]) for states in (key, value))
        grouped = False
    return nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=grouped, **options)


def repeat_heads(states: Tensor, heads: int) -> Tensor:
    """Repeat keys or values, (B, key heads, S, width), for each query head of their group, (B, heads, S, width)."""
    return states.repeat_interleave(heads // states.shape[1], dim=1)


def additive_mask(visible: Tensor, dtype: torch.dtype, hidden: float = float("-inf")) -> Tensor:
    """Return a mask to add to scores, 0 where an entry is visible, (…, T, S), else `hidden`; its rows are `ALIGNED`."""
    # Given bools, kernels make such a mask at each call, which the backward keeps.
    *shape, length = visible.shape
    mask = torch.zeros(*shape, length + -length % ALIGNED, dtype=dtype, device=visible.device)[..., :length]
    return mask.masked_fill_(~visible, hidden)
