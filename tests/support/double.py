"""Arithmetic in float64 throughout: the library computes recurrences in float32 for any dtype of the model."""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class InDouble(TorchFunctionMode):
    """Takes float64 wherever float32 is asked for, so that rounding is 1e-13 and anything larger is a fault."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = Tensor.double if func is Tensor.float else func
        args = [torch.float64 if value is torch.float32 else value for value in args]
        kwargs = {name: torch.float64 if value is torch.float32 else value for name, value in (kwargs or {}).items()}
        return func(*args, **kwargs)
