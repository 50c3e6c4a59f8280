"""What the loss costs at the shapes of Qwen3, counted on tensors without data: it must not grow unseen.

Operators of 2 texts of 1,760 tokens and a vocabulary of 151,936, with the chunks of an 80 GiB GPU. A tensor without
data has no values, so that any look at one, which on a GPU is a synchronisation, raises.
"""

from collections import Counter

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from draftsmith.train.losses.chunked import ChunkSizes, chunked_objective
from draftsmith.train.losses.distributions import CachedDistributions, LiveDistributions
from draftsmith.train.losses.objective import Objective
from draftsmith.train.losses.output_head import OutputHead
from draftsmith.train.losses.positions import LossPositions
from draftsmith.train.memory.trace import LiveBytes

V, ROWS, LENGTH = 151_936, 2, 1760
N = ROWS * (LENGTH - 1)
SIZES = ChunkSizes.on_gpu(80 * 2**30)
QWEN = {"temperature": 0.7, "top_k": 20, "top_p": 0.8}
# Operators a position, and float32 tensors of a chunk's size at the peak: live teacher, cached one.
OBJECTIVES = {
    "forward KL": (Objective(), 0.07, 0.095, 5),
    "JSD": (Objective({"jsd": 1.0}), 0.1, 0.13, 9),
    "skewed reverse KL": (Objective({"skew_reverse_kl": 1.0}), 0.08, 0.11, 8),
    "forward KL, top-k and top-p": (Objective(**QWEN), 0.11, 0.1, 5),
    "NLA": (Objective({"nla": 1.0}), 0.08, 0.11, 5),
    "LK": (Objective({"lk_hybrid": 1.0}), 0.11, 0.13, 6),
    "LK, top-k and top-p": (Objective({"lk_hybrid": 1.0}, **QWEN), 0.18, 0.19, 8),
}


class Operators(TorchDispatchMode):
    """Counts operators, and those that sort a whole vocabulary or wait for a value."""

    def __init__(self):
        super().__init__()
        self.counts, self.sorts, self.waits = Counter(), 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        if name.startswith("aten.") and "promote_types" not in name:
            self.counts[name] += 1
            self.sorts += "sort" in name and args[0].shape[-1] >= V
            self.waits += "_local_scalar_dense" in name or "lift_fresh" in name
        return func(*args, **(kwargs or {}))

    def total(self) -> int:
        return sum(self.counts.values())


def teacher(hidden: int, cached: bool) -> LiveDistributions | CachedDistributions:
    if cached:
        ids, log_p = torch.zeros(N, 32, dtype=torch.int32), torch.zeros(N, 32).half()
        return CachedDistributions(ids, log_p, *torch.zeros(2, N))
    half = {"dtype": torch.bfloat16}
    return LiveDistributions(torch.zeros(N, hidden, **half), OutputHead(torch.zeros(V, hidden, **half)))


@pytest.mark.parametrize(
    ("name", "cached", "hidden"),
    [*((name, cached, 1024) for name in OBJECTIVES for cached in (False, True)), ("forward KL", False, 4096)],
)
def test_few_operators_no_sort_of_a_vocabulary_and_no_wait(name, cached, hidden):
    objective, live_most, cached_most, tensors = OBJECTIVES[name]
    with FakeTensorMode():
        batch = torch.zeros(ROWS, LENGTH, hidden, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.zeros(V, hidden, dtype=torch.bfloat16, requires_grad=True)
        flat = torch.zeros(N, dtype=torch.long)
        ids, law = torch.zeros(ROWS, LENGTH, dtype=torch.long), teacher(4096, cached)
        with LiveBytes() as live, Operators() as seen:
            positions = LossPositions(flat)
            hidden_NH, labels = positions.take(batch), positions.next_tokens(ids)
            args = (hidden_NH, OutputHead(weight), law, labels)
            loss = chunked_objective(objective, *args, sizes=SIZES)
            peak = live.peak
            loss.backward()
    assert seen.total() / N <= (cached_most if cached else live_most) <= 0.31, seen.counts.most_common(12)
    assert seen.sorts == 0 and seen.waits == 0
    # The head's gradient in float32 and in its own precision, those of the hidden states, p's and q's logits.
    gradients = weight.numel() * (4 + 2 + 2) + 3 * 2 * batch.numel()
    assert peak <= gradients + 2 * 2 * SIZES.chunk + tensors * 4 * SIZES.part, (peak - gradients) / SIZES.part


def test_chunks_follow_the_memory_of_a_gpu():
    sizes = {memory: ChunkSizes.on_gpu(memory * 2**30).chunk for memory in (16, 24, 40, 79.1, 80, 141)}
    assert list(sizes.values()) == [2**25, 2**25, 2**26, 2**27, 2**27, 2**28]
    assert ChunkSizes.on_gpu(80 * 2**30, 1000) == ChunkSizes(1000, 1000)
    assert ChunkSizes.of(torch.device("cpu"), 1600) == ChunkSizes(1600, 200)
    assert ChunkSizes.of(torch.device("cpu")).chunk == 2**24
