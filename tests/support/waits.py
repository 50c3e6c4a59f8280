"""Counting what would make a GPU's host wait: reading numbers, and choosing by a mask, whose sum it must know."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
READS = {aten._local_scalar_dense.default, aten.is_nonzero.default, aten.nonzero.default, aten.masked_select.default}
BY_MASK = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}


class Waits(TorchDispatchMode):
    """Keeps the names of them in `seen`, but for those while it is `paused`."""

    def __init__(self):
        super().__init__()
        self.seen: list[str] = []
        self.paused = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        masks = args[1] if func in BY_MASK else ()
        if func in READS or any(mask is not None and mask.dtype == torch.bool for mask in masks):
            self._note(str(func))
        return func(*args, **(kwargs or {}))

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count in this block, with what no dispatch shows: whole tensors that are read."""
        reads = {name: getattr(torch.Tensor, name) for name in ("tolist", "numpy", "cpu")}

        def noted(name: str):
            def read(tensor, *args, **kwargs):
                self._note(name)
                return reads[name](tensor, *args, **kwargs)

            return read

        with mock.patch.multiple(torch.Tensor, **{name: noted(name) for name in reads}), self:
            yield

    def _note(self, name: str) -> None:
        if not self.paused:
            self.seen.append(name)
