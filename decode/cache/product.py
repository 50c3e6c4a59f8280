"""Products of a few rows with a large weight, for compiled programs on CPUs, by `product.cpp`.

The libraries' kernels are made for many rows: on an AMD processor with AVX2 they reach half the memory's speed for one
row, and take twice as long for four. This one reads a weight once for all rows, as bfloat16 if that changes no number.
Shape suffixes: K inputs, N outputs, O blocks of 16 outputs.
"""

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

BLOCK = 16  # outputs stored together; `BLOCK` of product.cpp
SOURCES = [__file__, str(Path(__file__).with_suffix(".cpp"))]
DTYPES = (torch.float32, torch.bfloat16)


def can_pack(weight: Tensor) -> bool:
    """Return whether this kernel computes products with a weight, (N, K)."""
    if weight.device.type != "cpu" or weight.dtype not in DTYPES:
        return False
    # With instructions for bfloat16 tiles the library's products are far faster.
    return weight.dtype == torch.float32 or not torch.cpu._is_amx_tile_supported()


def pack_weight(weight: Tensor) -> Tensor:
    """Return a weight, (N, K), in blocks of outputs, (O, K, 16), in bfloat16 if that changes no number."""
    halved = weight.to(torch.bfloat16)
    weight = halved if bool((halved.to(weight.dtype) == weight).all()) else weight
    outputs, inputs = weight.shape
    blocks = -(-outputs // BLOCK)
    whole = torch.nn.functional.pad(weight, (0, 0, 0, blocks * BLOCK - outputs))
    return whole.view(blocks, BLOCK, inputs).transpose(1, 2).contiguous()


@torch.library.custom_op("draftsmith::block_product", mutates_args=())
def block_product(rows: Tensor, weight: Tensor, outputs: int) -> Tensor:
    """Return rows (…, K) times a packed weight (O, K, 16), as (…, N) in the rows' dtype: the programs' reference."""
    whole = weight.transpose(1, 2).flatten(0, 1)[:outputs]
    return torch.nn.functional.linear(rows, whole.to(rows.dtype))


@block_product.register_fake
def _(rows: Tensor, weight: Tensor, outputs: int) -> Tensor:
    return rows.new_empty(*rows.shape[:-1], outputs)


@lru_cache
def in_programs() -> dict[str, Any]:
    """Return the compiler's settings by which programs compute `block_product` with product.cpp."""
    source = Path(SOURCES[1]).read_text()
    function = (
        "AOTITorchError aoti_torch_cpu_block_product(AtenTensorHandle rows, AtenTensorHandle weight, int64_t outputs, "
        "AtenTensorHandle* product) { return draftsmith::product_into(rows, weight, outputs, product); }"
    )
    # The compiler puts "extern" before this text, which it takes for a declaration in a block of C functions.
    text = f'"C++" {{\n{source}\n}}\nextern "C" {function}'
    return {"aot_inductor.custom_ops_to_c_shims": {torch.ops.draftsmith.block_product.default: [text]}}
