"""Traces of deep models from those of shallow ones: layers that are alike allocate and release alike.

A model of n layers and one of n + 1 are traced. What the deeper one's bytes do beside those of the other is what one
layer adds, once in the forward and once in the backward, and stands there for each layer more.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from torch import nn

from draftsmith.decode.cache.features import decoder_of

FEW = 2
"""Layers of the shallow model: the first and the last, which stand beside other things than layers."""
OWN = ("layer_idx", "layer_id", "training", "gradient_checkpointing")
"""What layers that are alike may differ in: their numbers, and what a trace sets of those that it runs."""


@dataclass(frozen=True)
class Course:
    """How the bytes that live go up and down."""

    start: int
    turns: tuple[int, ...]
    """What is allocated and released in turn, each until the other begins; the last of it brings the end."""

    @property
    def end(self) -> int:
        """The bytes at its end."""
        return self.start + sum(self.turns)

    @property
    def peak(self) -> int:
        """The most bytes at any time."""
        return max(accumulate(self.turns, initial=self.start))

    def grown(self, other: "Course", times: int) -> "Course | None":
        """Return the course of a model with `times` more layers, where `other` is of one with one more.

        None if the other does more than to do something of this once again.
        """
        more = len(other.turns) - len(self.turns)
        same = next((i for i, (a, b) in enumerate(zip(self.turns, other.turns, strict=False)) if a != b), None)
        same = len(self.turns) if same is None else same
        if more < 0 or other.turns[same + more :] != self.turns[same:]:
            return None
        start = self.start + times * (other.start - self.start)
        return Course(start, self.turns[:same] + times * other.turns[same : same + more] + self.turns[same:])


def traced_by_layers(model: nn.Module, trace: Callable[[], Sequence[Course]]) -> Sequence[Course]:
    """Return what `trace` does of a model; of one with many layers that are alike, by what it does of a few.

    Args:
        model: any; changed during the call.
        trace: runs the model's decoder as it is at the time, and asks for no layer by its number.
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
    """Return what `trace` does of a whole model: the reference, and what is asked for layers by their numbers."""
    del model
    return trace()


def like_layers(model: Any) -> tuple[nn.Module, str] | None:
    """Return the module that has a model's layers and their name in it; None if they are few or not alike."""
    if not hasattr(model, "get_decoder"):
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
    """Return all by which a layer may differ from others: its parts, their sizes and what they are set to."""
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
    """A context in which a module has no more than the first of its layers."""
    whole: Any = getattr(owner, name)
    setattr(owner, name, whole[:count])
    try:
        yield
    finally:
        setattr(owner, name, whole)
