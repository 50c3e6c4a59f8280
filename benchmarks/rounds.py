"""`python -m benchmarks.rounds`: kernels and synchronisations of a round, outside the models' forwards.

Counted on tiny random models or on your pair: the counts depend on shapes, rows and drafts, not on weights or on the
machine. A kernel is an operator of aten that is no view and allocates more than room. A synchronisation is where Python
looks at a tensor's value, or makes a tensor of its own values: either waits for a GPU. Of your pair it also reports how
long a compiled round takes, and how much of that is outside the compiled calls.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.common import BenchmarkConfig, main
from benchmarks.timing import TEXT, methods, options_at, prompts, timed_rounds
from draftsmith.decode.cache import layers
from draftsmith.decode.errors import InputError, at_least, require
from draftsmith.decode.proposers.base import Proposer
from draftsmith.decode.proposers.draft_model import DraftModelProposer
from draftsmith.decode.speculative import speculative_generate
from draftsmith.decode.tree import Tree
from draftsmith.scripts.kinds import drafter_specs
from draftsmith.scripts.pair import load_pair
from draftsmith.train.kinds.drafter import Pair
from draftsmith.train.models import load_tokenizer
from draftsmith.train.provenance import environment

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


@dataclass
class BenchRoundsConfig(BenchmarkConfig):
    """Kernels and synchronisations of a round."""

    batch_size: list[int] = field(default_factory=lambda: [1, 8])
    """B, rows decoded together."""
    draft_length: int = 4
    """γ of the chain."""
    target: str | None = None
    """The target of `drafter`; a tiny random model, with drafts of its own, if None."""
    drafter: list[str] = field(default_factory=list)
    """Drafters that are counted, with `target`: `[NAME=]DIR_OR_KIND`. Without, a random draft's chain and tree are."""
    dtype: str = "float32"
    """Dtype of the pair that is timed."""
    max_new_tokens: int = 96
    """Tokens of each row that is timed."""
    repeats: int = 5
    """Batches that each method decodes in its turn; 0 times nothing, and compiles nothing."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, at_least(1), "batch_size", "draft_length", "max_new_tokens")
        require(self, at_least(0), "repeats")
        if (self.target is None) != (not self.drafter):
            raise InputError("target: expected it together with drafter, found one alone")


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


def tiny(seed: int, vocab_size: int = 256) -> PreTrainedModel:
    """Return a random model that is sure enough of its tokens for drafts to be accepted now and then."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=64,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    model.lm_head.weight.data *= 6
    model.generation_config.pad_token_id = 0
    return model.eval().requires_grad_(False)


def random_drafts() -> tuple[PreTrainedModel, dict[str, Drafts]]:
    """Return a random target, and a random draft's chain and tree of 10 nodes."""
    target, draft = tiny(0), tiny(0)
    draft.lm_head.weight.data += 0.05 * torch.randn_like(draft.lm_head.weight)
    models = [draft]
    return target, {
        "chain": (DraftModelProposer(draft), None, models),
        "tree": (DraftModelProposer(draft, TREE), TREE.depth, models),
    }


def load(config: BenchRoundsConfig, dtype: str) -> tuple[Pair, PreTrainedTokenizerBase]:
    """Return the config's target and drafters, and the tokenizer."""
    tokenizer = load_tokenizer(str(config.target), field="target")
    pair = load_pair(str(config.target), tokenizer, drafter_specs(config.drafter, [config.draft_length]), dtype)
    pair.target.generation_config = GenerationConfig(pad_token_id=tokenizer.pad_token_id)
    return pair, tokenizer


def loaded_drafts(config: BenchRoundsConfig) -> tuple[PreTrainedModel, dict[str, Drafts]]:
    """Return the config's target and drafters, to be counted."""
    pair, _ = load(config, "float32")
    return pair.target, {
        each.name: (each.proposer, each.draft_lengths[0], [each.model] if each.model is not None else [])
        for each in pair.drafters
    }


def times(config: BenchRoundsConfig) -> dict[str, dict[str, float]]:
    """Return how long the rounds of the config's drafters take, compiled: see `timing`."""
    pair, tokenizer = load(config, config.dtype)
    ids, figures = tokenizer.encode(TEXT), {}
    for rows in config.batch_size:
        for temperature in (0.0, 1.0):
            options = options_at(temperature, config.max_new_tokens) | {"compiled": True}
            compiled = methods(pair.target, pair.drafters, prompts(ids, rows), options)
            for name, of_method in timed_rounds(compiled, config.repeats).items():
                figures[f"{name}, B = {rows}, T = {temperature:g}"] = of_method
    return figures


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


def bench(config: BenchRoundsConfig) -> dict[str, Any]:
    """Run the benchmark and return the figures."""
    target, drafters = random_drafts() if config.target is None else loaded_drafts(config)
    counts = {
        f"{name}, B = {rows}, T = {temperature:g}": vars(count(target, drafts, rows, temperature, config.draft_length))
        for name, drafts in drafters.items()
        for rows in config.batch_size
        for temperature in (0.0, 1.0)
    }
    timed = {"times": times(config)} if config.target is not None and config.repeats else {}
    return {"environment": environment(torch.device("cpu"), config.dtype), "rounds": counts, **timed}


if __name__ == "__main__":
    main(BenchRoundsConfig, bench)
