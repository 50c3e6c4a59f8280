"""Kernels and synchronisations of a round, outside the models' forwards.

Counted on tiny random models: the counts depend on shapes, rows and drafts, not on weights or on the machine. A kernel
is an operator of aten that is no view and allocates more than room. A synchronisation is where Python looks at a
tensor's value, or makes a tensor of its own values: either waits for a GPU.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from conftest import tiny_llama
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from transformers import PreTrainedModel

from draftsmith.decode.cache import layers
from draftsmith.decode.proposers.base import Proposer
from draftsmith.decode.proposers.draft_model import DraftModelProposer
from draftsmith.decode.speculative import speculative_generate
from draftsmith.decode.tree import Tree

TREE = Tree.from_choices([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 0, 0, 0)])
# What reads a tensor's values, or makes a tensor of Python's: on a GPU both wait for it.
SYNCHRONISES = {
    torch.Tensor.tolist,
    torch.Tensor.item,
    torch.Tensor.__bool__,
    torch.Tensor.__int__,
    torch.Tensor.__float__,
    torch.Tensor.__index__,
    torch.Tensor.cpu,
    torch.Tensor.new_tensor,
    torch.tensor,
    torch.from_numpy,
}
INDEXES = {torch.Tensor.__getitem__, torch.Tensor.__setitem__}
NO_KERNEL = {"aten::empty", "aten::new_empty", "aten::empty_strided", "aten::detach", "aten::lift_fresh", "aten::alias"}
DATA_DEPENDENT = {"aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::repeat_interleave"}


Drafts = tuple[Proposer, int | None, Sequence[PreTrainedModel]]
"""A proposer, γ if it has its own, and the models whose forwards are not counted."""


@dataclass
class RoundCounts:
    """Work of one round outside the models' forwards."""

    kernels: int = 0
    synchronisations: int = 0


class _Kernels(TorchDispatchMode):
    def __init__(self, counter: "RoundCounter"):
        super().__init__()
        self.counter = counter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split(".")[0]
        self.counter.now.kernels += not func.is_view and name not in NO_KERNEL
        self.counter.now.synchronisations += name in DATA_DEPENDENT
        return func(*args, **(kwargs or {}))


class _Synchronisations(TorchFunctionMode):
    def __init__(self, counter: "RoundCounter"):
        super().__init__()
        self.counter = counter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # An index that is a list becomes a tensor on the way.
        index = args[1] if func in INDEXES else None
        listed = any(isinstance(part, list) for part in (index if isinstance(index, tuple) else (index,)))
        self.counter.now.synchronisations += func in SYNCHRONISES or listed
        # numpy's argmax on a CPU: a kernel of torch's elsewhere.
        self.counter.now.kernels += func is torch.Tensor.numpy
        return func(*args, **(kwargs or {}))


class RoundCounter:
    """Counts the rounds of one call of the decoder."""

    def __init__(self) -> None:
        self.rounds: list[tuple[int, RoundCounts]] = []
        """The rows and the counts of each round, from one draft to the next."""
        self.now = RoundCounts()

    @contextmanager
    def counting(self, proposer: Proposer, *models: PreTrainedModel) -> Iterator[None]:
        """Count what happens inside, without the models' forwards."""
        propose = proposer.propose
        forwards = [model.forward for model in models]

        def begun(contexts: Any, draft_lengths: Any) -> Any:
            self.now = RoundCounts()
            self.rounds.append((len(contexts), self.now))
            return propose(contexts, draft_lengths)

        def apart(forward: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                with _disable_current_modes(), torch._C.DisableTorchFunction():
                    return forward(*args, **kwargs)

            return call

        patched: Any = [proposer, *models]
        try:
            patched[0].propose = begun
            for model, forward in zip(patched[1:], forwards, strict=True):
                model.forward = apart(forward)
            layers.READ_AT_ONCE.clear()  # as on a GPU
            with _Kernels(self), _Synchronisations(self):
                yield
        finally:
            layers.READ_AT_ONCE.add("cpu")
            for thing in patched:
                vars(thing).pop("propose", None)
                vars(thing).pop("forward", None)

    def median(self) -> RoundCounts:
        """Return the median of the rounds with all rows, without the first two and the last."""
        rows = max(rows for rows, _ in self.rounds)
        counted = [counts for rows_then, counts in self.rounds[2:] if rows_then == rows][:-1]
        return RoundCounts(
            round(median(counts.kernels for counts in counted)),
            round(median(counts.synchronisations for counts in counted)),
        )


def random_drafts() -> tuple[PreTrainedModel, dict[str, Drafts]]:
    """Return a random target, and a random draft's chain and tree of 10 nodes."""
    target, draft = tiny_llama(0, 256), tiny_llama(0, 256)
    draft.lm_head.weight.data += 0.05 * torch.randn_like(draft.lm_head.weight)
    models = [draft]
    return target, {
        "chain": (DraftModelProposer(draft), None, models),
        "tree": (DraftModelProposer(draft, TREE), TREE.depth, models),
    }


def count(target: PreTrainedModel, drafts: Drafts, rows: int, temperature: float, draft_length: int = 4) -> RoundCounts:
    """Count a round of one drafter."""
    proposer, own_length, models = drafts
    size = min(256, target.config.get_text_config().vocab_size)
    ids = torch.randint(1, size, (rows, 8), generator=torch.Generator().manual_seed(1))
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    counter, draft_length = RoundCounter(), own_length or draft_length
    with counter.counting(proposer, target, *models):
        speculative_generate(target, proposer, ids, draft_length=draft_length, max_new_tokens=64, top_k=0, **sampling)
    return counter.median()
