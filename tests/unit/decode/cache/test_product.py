"""Products with packed weights: the reference of what programs compute by product.cpp."""

import pytest
import torch

from draftsmith.decode.cache.product import block_product, packed, packs


@pytest.mark.parametrize("outputs", [5, 16, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_weight_gives_the_same_products(outputs, dtype):
    weight, rows = torch.randn(outputs, 7).to(dtype), torch.randn(2, 3, 7).to(dtype)
    product = block_product(rows, packed(weight), outputs)
    assert product.dtype == dtype
    torch.testing.assert_close(product, torch.nn.functional.linear(rows, weight))


def test_float32_takes_half_the_bytes_where_that_changes_no_number():
    weight = torch.randn(16, 8)
    assert packed(weight).dtype == torch.float32
    halved = packed(weight.bfloat16().float())
    assert halved.dtype == torch.bfloat16 and halved.shape == (1, 8, 16)
    assert torch.equal(halved[0].T.float(), weight.bfloat16().float())
    weight = weight.bfloat16().float()
    weight[3, 2] += 1e-6
    assert packed(weight).dtype == torch.float32


def test_what_the_kernel_does_not_know_is_the_librarys():
    assert packs(torch.zeros(1, 1)) and not packs(torch.zeros(1, 1).half()) and not packs(torch.zeros(1, 1).double())
    assert not packs(torch.zeros(1, 1, device="meta"))
