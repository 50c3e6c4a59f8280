"""CUDA graphs of programs: all kernels of a call launched as one, for inputs at unchanged addresses.

Off unless `$DRAFTSMITH_CUDA_GRAPHS` is 1: no GPU has ever run it.
"""

import os
from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

FLAG = "DRAFTSMITH_CUDA_GRAPHS"  # the environment variable that turns them on
MOST = 64  # the most graphs kept of a program: one for each shape of its inputs and each address of the caches
FEWEST_SLOTS = 256
"""The fewest slots that programs attend to, then powers of two, since each number of slots is a graph."""
Run = Callable[[list[Tensor]], list[Tensor]]
Captured = tuple[Callable[[], None], list[Tensor]]  # a function that repeats a call, and the outputs that it writes to


def enabled(device: torch.device) -> bool:
    """Return whether programs on this device run as graphs."""
    return device.type == "cuda" and os.environ.get(FLAG) == "1"


def capture(call: Callable[[], list[Tensor]]) -> Captured:
    """Capture a call on the present CUDA device; it must have run before, so that nothing is loaded on the way."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = call()
    return graph.replay, outputs


class Graphs:
    """The graphs of a program; `capture` makes a graph of a call.

    `stays` marks inputs used at their own address, such as caches, which the program writes to; others are copied.
    """

    def __init__(self, run: Run, stays: Sequence[bool], capture: Callable[..., Captured] = capture):
        self._run, self._stays, self._capture = run, list(stays), capture
        self._graphs: OrderedDict[tuple[object, ...], _Graph] = OrderedDict()

    def clear(self) -> None:
        """Forget all graphs, since the program has other weights now."""
        self._graphs.clear()

    def __call__(self, inputs: list[Tensor]) -> list[Tensor]:
        """Return the program's outputs, in tensors of the caller's own."""
        pointers = [tensor.data_ptr() if stays else None for tensor, stays in zip(inputs, self._stays, strict=True)]
        key = *pointers, *(tensor.shape for tensor in inputs)
        if key in self._graphs:
            self._graphs.move_to_end(key)
            return self._graphs[key](inputs)
        outputs = self._run(inputs)
        # A capture's replay writes to the caches once more: the same numbers to the same slots.
        self._graphs[key] = _Graph(self._run, inputs, self._stays, self._capture)
        if len(self._graphs) > MOST:
            self._graphs.popitem(last=False)
        return outputs


class _Graph:
    def __init__(self, run: Run, inputs: Sequence[Tensor], stays: Sequence[bool], capture: Callable[..., Captured]):
        own = [tensor if stay else tensor.clone() for tensor, stay in zip(inputs, stays, strict=True)]
        self._replay, self._outputs = capture(lambda: run(own))
        # Inputs at their own address are not held: the address is part of the key.
        self._copied = [(at, tensor) for at, (tensor, stay) in enumerate(zip(own, stays, strict=True)) if not stay]

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        for at, tensor in self._copied:
            tensor.copy_(inputs[at])
        self._replay()
        return [output.clone() for output in self._outputs]
