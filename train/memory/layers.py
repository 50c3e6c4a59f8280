"""Traces of deep models from traces of shallow ones, since equal layers allocate and release alike.

A model of n layers and one of n + 1 are traced. The traces' difference is one layer's cost, in the forward or in the
backward; it is repeated for each further layer.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from torch import nn

from draftsmith.decode.cache.features import decoder_of

FEW = 2
"""The layers of the shallow model: the first and the last, whose neighbours are no layers."""
OWN = ("layer_idx", "layer_id", "training", "gradient_checkpointing")
"""Attributes that equal layers may differ in: their numbers, and those that a trace sets on the layers that it runs."""


@dataclass(frozen=True)
class Course:
    """The rise and fall of the living bytes."""

    start: int
    turns: tuple[int, ...]  # the changes from one turn to the next, up and down by turns

    @property
    def end(self) -> int:
        """The bytes at the end."""
        return self.start + sum(self.turns)

    @property
    def peak(self) -> int:
        """The most bytes."""
        return max(accumulate(self.turns, initial=self.start))

    def grown(self, other: "Course", times: int) -> "Course | None":
        """Return the course of a model with `times` more layers, given that of a model with one more.

        None if the other differs in more than one repetition.
        """
        more = len(other.turns) - len(self.turns)
        same = next((i for i, (a, b) in enumerate(zip(self.turns, other.turns, strict=False)) if a != b), None)
        same = len(self.turns) if same is None else same
        if more < 0 or other.turns[same + more :] != self.turns[same:]:
            return None
        start = self.start + times * (other.start - self.start)
        return Course(start, self.turns[:same] + times * other.turns[same : same + more] + self.turns[same:])


def traced_by_layers(model: nn.Module, trace: Callable[[], Sequence[Course]]) -> Sequence[Course]:
    """Return `trace()` for a model; if it has many equal layers, computed from traces of a few.

    The model is changed during the call. `trace` runs its decoder as it then is, and asks for no layer by its number.
    """
    found = like_layers(model)
    if found is None:
        return trace()
    depth = len(getattr(*found))
    with first_layers(*found, FEW):
        few = trace()
    with first_layers(*found, FEW + 1):
        more = trace()
    grown = [one.grown(other, depth - FEW) for one, other in zip(few, more, strict=True)]
    known = [course for course in grown if course is not None]
    return known if len(known) == len(grown) else trace()


def traced_whole(model: nn.Module, trace: Callable[[], Sequence[Course]]) -> Sequence[Course]:
    """Return `trace()` for a whole model: the reference, and the way for traces that ask for layers by number."""
    del model
    return trace()


def like_layers(model: Any) -> tuple[nn.Module, str] | None:
    """Return the module that has a model's layers, and their name in it; None if they are few or not equal."""
    if not hasattr(model, "get_decoder") or model.get_decoder() is model:
        return None
    decoder = decoder_of(model)
    lists = [name for name, part in decoder.named_children() if type(part) is nn.ModuleList]
    if len(lists) != 1:
        return None
    layers, kinds = getattr(decoder, lists[0]), getattr(decoder.config, "layer_types", None) or []
    if len(layers) <= 2 * FEW + 1 or len(set(kinds)) > 1:
        return None
    first = _marks(layers[0])
    return (decoder, lists[0]) if all(_marks(layer) == first for layer in layers[1:]) else None


def _marks(layer: nn.Module) -> list[Any]:
    """Return all that may differ between layers: parts, sizes and settings."""
    plain = (bool, int, float, str, tuple, type(None))
    return [
        (
            name,
            type(part),
            [(k, v) for k, v in vars(part).items() if isinstance(v, plain) and k not in OWN],
            [(k, p.shape, p.dtype, p.requires_grad) for k, p in part.named_parameters(recurse=False)],
            [(k, b.shape, b.dtype) for k, b in part.named_buffers(recurse=False)],
        )
        for name, part in layer.named_modules()
    ]


@contextmanager
def first_layers(owner: nn.Module, name: str, count: int) -> Iterator[None]:
    """A context in which a module has only the first of its layers."""
    whole: Any = getattr(owner, name)
    setattr(owner, name, whole[:count])
    try:
        yield
    finally:
        setattr(owner, name, whole)


@contextmanager
def shallow(*models: nn.Module | None) -> Iterator[None]:
    """A context in which models of many equal layers have one, for traces that do not count them."""
    with ExitStack() as stack:
        for found in filter(None, map(like_layers, filter(None, models))):
            stack.enter_context(first_layers(*found, 1))
        yield
