"""Which kernel attention gets on CUDA, in forwards and under each drafter: never the one that holds all scores."""

from collections.abc import Callable

import pytest
import torch
from conftest import tiny_llama
from families import tiny_model
from torch.nn import functional
from trained_parallel import as_parallel

from draftsmith.decode import (
    DraftModelProposer,
    LookaheadProposer,
    ParallelDraftProposer,
    PromptLookupProposer,
    Proposer,
    Tree,
    speculative_generate,
)
from draftsmith.decode.cache.kernels import ALIGNED, CudaKernels, additive_mask, cuda_kernel, fused_attention
from draftsmith.distill.parallel.model import parallel_hidden
from draftsmith.medusa import MedusaHeads, MedusaProposer
from draftsmith.medusa.eagle.heads import EagleHeads
from draftsmith.medusa.eagle.proposer import EagleProposer
from draftsmith.medusa.target_states import TargetStates
from draftsmith.medusa.trainer import states_of_steps

BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32
VOCAB = 23
TREE = Tree.from_choices([(0,), (1,), (0, 0), (1, 0)])


def states(heads: int, width: int, dtype: torch.dtype, length: int = 5, learns: bool = False) -> torch.Tensor:
    return torch.empty(2, heads, length, width, dtype=dtype, device="meta", requires_grad=learns)


@pytest.mark.parametrize(
    ("dtype", "width", "options", "expected"),
    [
        (BFLOAT16, 128, {}, "flash"),
        (BFLOAT16, 128, {"grouped": True}, "flash"),
        (BFLOAT16, 256, {"grouped": True}, "flash"),
        (BFLOAT16, 128, {"masked": True}, "efficient"),
        (BFLOAT16, 128, {"masked": True, "grouped": True}, "math"),
        (BFLOAT16, 264, {}, "efficient"),
        (BFLOAT16, 264, {"grouped": True}, "math"),
        (BFLOAT16, 260, {}, "math"),
        (BFLOAT16, 100, {"masked": True}, "math"),
        (BFLOAT16, 200, {"learns": True, "grouped": True}, "math"),
        (BFLOAT16, 200, {"learns": True}, "efficient"),
        (BFLOAT16, 128, {"keys": 3}, "efficient"),
        (FLOAT32, 128, {}, "efficient"),
        (FLOAT32, 36, {}, "efficient"),
        (FLOAT32, 34, {}, "math"),
        (FLOAT32, 128, {"grouped": True}, "math"),
        (torch.float64, 128, {}, "math"),
        (BFLOAT16, 128, {"unnamed groups": True, "grouped": True}, "math"),
    ],
)
def test_the_rules_of_cuda(dtype, width, options, expected):
    learns, masked, grouped = (options.get(name, False) for name in ("learns", "masked", "grouped"))
    query, keys = states(4, width, dtype, learns=learns), options.get("keys", 5)
    key = states(2 if grouped else 4, width, dtype, keys, learns)
    mask = torch.empty(2, 1, 5, keys, dtype=torch.bool, device="meta") if masked else None
    named = grouped and "unnamed groups" not in options
    assert cuda_kernel(query, key, key, mask, is_causal=not masked, enable_gqa=named) == expected


def test_autocast_decides_the_dtype():
    query = torch.empty(1, 4, 5, 16)
    assert cuda_kernel(query, query[:, :2], query[:, :2], enable_gqa=True) == "math"
    with torch.autocast("cpu", BFLOAT16):
        assert cuda_kernel(query, query[:, :2], query[:, :2].bfloat16(), enable_gqa=True) == "flash"


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
@pytest.mark.parametrize("masked", [True, False])
def test_the_numbers_are_those_of_groups(dtype, masked):
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, heads, 9, 16).to(dtype).requires_grad_() for heads in (6, 2, 2))
    visible = (torch.rand(2, 1, 9, 9) < 0.5) | torch.eye(9, dtype=torch.bool) if masked else None
    mask = None if visible is None else additive_mask(visible, dtype)
    with CudaKernels() as kernels:
        found = fused_attention(query, key, value, mask, is_causal=not masked)
    assert "math" not in kernels.chosen
    expected = functional.scaled_dot_product_attention(
        query, key, value, visible, is_causal=not masked, enable_gqa=True
    )
    close = {"atol": 1e-5, "rtol": 1e-5} if dtype == FLOAT32 else {"atol": 2e-2, "rtol": 2e-2}
    torch.testing.assert_close(found, expected, **close)
    weights = torch.randn_like(found)
    ours, theirs = (torch.autograd.grad((each * weights).sum(), (query, key, value)) for each in (found, expected))
    torch.testing.assert_close(ours, theirs, **close)


def test_rows_of_a_mask_lie_where_no_kernel_copies_them():
    mask = additive_mask(torch.ones(2, 1, 7, 7, dtype=torch.bool).tril(), FLOAT32)
    assert mask.shape == (2, 1, 7, 7) and all(stride % ALIGNED == 0 for stride in mask[..., :5, :5].stride()[:-1])
    assert mask[0, 0, 0].tolist() == [0.0] + [float("-inf")] * 6


def test_calls_run_by_the_math_kernel_where_cuda_has_no_other():
    query = torch.randn(1, 4, 5, 16, requires_grad=True)
    kept: list[tuple[int, ...]] = []
    with (
        CudaKernels() as kernels,
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape), lambda t: t),
    ):
        functional.scaled_dot_product_attention(query, query, query, is_causal=True)
        assert (4, 5, 5) not in kept
        functional.scaled_dot_product_attention(query, query[:, :2], query[:, :2], is_causal=True, enable_gqa=True)
    assert kernels.chosen == ["efficient", "math"] and (4, 5, 5) in kept


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
@pytest.mark.parametrize("width", [16, 200, 248, 256])
@pytest.mark.parametrize("packed", [True, False])
def test_no_step_of_training_falls_back(dtype, width, packed):
    target = tiny_llama(0, VOCAB, layers=4, head_dim=width)
    heads = EagleHeads.of_target(target).to("meta", dtype)
    shapes = ((2, 12, 32), (2, 12, 32), (2, 12, 96))
    seen = TargetStates(*(torch.empty(shape, dtype=dtype, device="meta") for shape in shapes))
    positions = torch.ones(2, 12, dtype=torch.long, device="meta") if packed else None
    places = torch.ones(20, dtype=torch.long, device="meta")
    with CudaKernels() as kernels:
        steps = states_of_steps(heads, seen, positions, places, 3)
    torch.stack(steps).sum().backward()
    assert len(kernels.chosen) == 3 and "math" not in kernels.chosen
    taken = {16: [True] * 3, 200: [False] * 3, 248: [True] * 3, 256: [True, False, False]}[width]
    flash = dtype == BFLOAT16 and not packed
    assert kernels.chosen == ["flash" if flash and takes else "efficient" for takes in taken]


def test_nor_does_a_parallel_draft():
    draft = tiny_model("llama", attn_implementation="sdpa").to(BFLOAT16)
    ids = torch.ones(2, 9, dtype=torch.long)
    with CudaKernels() as kernels:
        parallel_hidden(draft, ids, ids, ids, ids)
    assert set(kernels.chosen) == {"efficient"}


SHAPE = Tree.from_choices([(0,), (1,), (0, 0), (0, 1), (0, 0, 0)])
PROMPTS = {"one": [[5, 6, 7]], "ragged rows": [[0, 0, 5, 6, 7], [3, 1, 4, 1, 5]]}


def model(seed: int, layers: int = 4) -> torch.nn.Module:
    """Of four query heads in two groups, as wide as kernels want them."""
    return tiny_llama(seed, layers=layers, hidden=64).to(torch.bfloat16)


TARGET = model(0)
DRAFTERS: dict[str, Callable[[], Proposer]] = {
    "draft": lambda: DraftModelProposer(model(1, 1)),
    "draft, tree": lambda: DraftModelProposer(model(1, 1), SHAPE),
    "parallel": lambda: ParallelDraftProposer(as_parallel(model(1, 1), 90, 4)),
    "lookup": PromptLookupProposer,
    "lookahead": LookaheadProposer,
    "Medusa": lambda: MedusaProposer(MedusaHeads.of_target(TARGET, 3), SHAPE),
    "Hydra": lambda: MedusaProposer(MedusaHeads.of_target(TARGET, 3, hydra=True), SHAPE),
    "EAGLE-3": lambda: EagleProposer(EagleHeads.of_target(TARGET)),
    "EAGLE-3, tree": lambda: EagleProposer(EagleHeads.of_target(TARGET), SHAPE),
}


@pytest.mark.parametrize("rows", PROMPTS)
@pytest.mark.parametrize("name", DRAFTERS)
def test_no_drafter_s_rounds_fall_to_the_math_kernel(name, rows):
    prompts = torch.tensor(PROMPTS[rows])
    with CudaKernels() as kernels:
        speculative_generate(
            TARGET, DRAFTERS[name](), prompts, (prompts != 0).long(), draft_length=3, max_new_tokens=8, do_sample=False
        )
    assert len(kernels.chosen) > 8 and "math" not in kernels.chosen, set(kernels.chosen)
