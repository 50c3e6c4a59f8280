"""Mixers with a recurrent state take a block one token at a time, so that their layer keeps every state of it.

The library's kernels show the state after a block's last token alone. `Stepwise` feeds them the tokens of a block in
turn, with the kernel of plain decoding, while all other modules see the block at once.

Shape suffixes: B rows, K tokens of a block, H hidden.
"""

import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from draftsmith.decode.cache.states import StateLayer, unknown


@lru_cache(maxsize=1024)
def mentions(cls: Any, name: str) -> bool:
    """Return whether a module's own code names a method or field, as of the cache."""
    try:
        return f".{name}" in inspect.getsource(cls)
    except (OSError, TypeError):  # a class without source
        return False


_CLASSES: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()


def classes_of(model: nn.Module) -> Any:
    """Return the classes of a model's modules, collected once: each text asks for them."""
    if model not in _CLASSES:
        _CLASSES[model] = {type(module) for module in model.modules()}
    return _CLASSES[model]


def recurrent_mixers(model: nn.Module) -> list[Any]:
    """Return the modules of a model that update a recurrent state of the library's cache."""
    modules: Any = model.modules()
    return [module for module in modules if mentions(module.__class__, "update_recurrent_state")]


def uses_states(model: nn.Module) -> bool:
    """Return whether modules of a model keep states in the library's cache."""
    classes = classes_of(model)
    return any(mentions(cls, "update_recurrent_state") or mentions(cls, "update_conv_state") for cls in classes)


class Stepwise:
    """A context in which a model's mixers with a recurrent state take a block one token at a time.

    What does not depend on the state is computed for the block at once, so that its weights are read once: a mixer's
    products with its input, and the product that is its output. One thread at a time is within a model's context.
    """

    def __init__(self, model: nn.Module, layers: Sequence[Any]):
        self._lock, self._mixers = _LOCKS.setdefault(model, threading.RLock()), []
        by_index: dict[Any, StateLayer] = dict(enumerate(layers))
        for module in recurrent_mixers(model):
            layer = by_index.get(index := getattr(module, "layer_idx", None))
            if not isinstance(layer, StateLayer):
                raise unknown(type(module).__name__, "the number of a layer with a state in layer_idx", str(index))
            self._mixers.append(_Mixer(module, layer))

    def __enter__(self) -> None:
        self._lock.acquire()
        for mixer in self._mixers:
            mixer.forward.replace(mixer.step_through)

    def __exit__(self, *_: object) -> None:
        for mixer in self._mixers:
            mixer.forward.restore()
        self._lock.release()


class _Forward:
    """A module's forward, replaced for a while."""

    def __init__(self, module: nn.Module):
        self.module: Any = module

    def replace(self, forward: Callable[..., Any]) -> None:
        self._own = self.module.__dict__.get("forward")  # that of a hook, as accelerate's
        self.original = self.module.forward
        self.module.forward = forward

    def restore(self) -> None:
        if self._own is None:
            del self.module.forward
        else:
            self.module.forward = self._own


_LOCKS: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
# The names of a mixer's products with its input, and of the product that is its output, if there is one.
_PRODUCTS: WeakKeyDictionary[nn.Module, tuple[list[str], str | None]] = WeakKeyDictionary()


class _Mixer:
    """A mixer and the layer with its state."""

    def __init__(self, module: nn.Module, layer: StateLayer):
        self.forward, self._layer = _Forward(module), layer
        self._linear = {name: _Forward(part) for name, part in module.named_modules() if isinstance(part, nn.Linear)}

    def step_through(self, *args: Any, **kwargs: Any) -> Any:
        """Run the mixer over a block, (B, K, H), one token at a time."""
        states: Tensor = args[0] if args else kwargs["hidden_states"]
        k, outputs = states.shape[1], []
        columns = [[_column(part, token, k) for part in (args, kwargs)] for token in range(k)]
        before, last = _PRODUCTS.get(self.forward.module, ([], None))
        products = {name: self._linear[name].module(states) for name in before}
        for token, (step_args, step_kwargs) in enumerate(columns):
            column = step_args[0] if step_args else step_kwargs["hidden_states"]
            ready = {name: product[:, token : token + 1] for name, product in products.items()}
            step = partial(self.forward.original, *step_args, **step_kwargs)
            outputs.append(self._layer.step(partial(self._run, step, column, ready, last)))
        output = _joined(outputs)
        if last is None:
            return output
        product = self._linear[last].module
        return product(output) if isinstance(output, Tensor) else (product(output[0]), *output[1:])

    def _run(self, step: Callable[[], Any], column: Tensor, ready: Mapping[str, Tensor], last: str | None) -> Any:
        """Run one token's step with the products of its input that are ready, and without the last one."""
        seen: dict[str, tuple[Tensor, Tensor]] = {}

        def multiply(name: str, states: Tensor) -> Tensor:
            if name == last:
                return states
            product = ready[name] if name in ready and states is column else self._linear[name].original(states)
            seen[name] = states, product
            return product

        for name, linear in self._linear.items():
            linear.replace(partial(multiply, name))
        try:
            output = step()
        finally:
            for linear in self._linear.values():
                linear.restore()
        if self.forward.module not in _PRODUCTS:
            first = output if isinstance(output, Tensor) else output[0]
            ends = [name for name, (_, product) in seen.items() if product is first]
            starts = [name for name, (states, _) in seen.items() if states is column and name not in ends]
            _PRODUCTS[self.forward.module] = starts, ends[0] if ends else None
        return output


def _column(value: Any, token: int, k: int) -> Any:
    """Return a token's part of a mixer's argument: a column of each tensor over the block."""
    if isinstance(value, Tensor):
        return value[:, token : token + 1] if value.ndim > 1 and value.shape[1] == k else value
    if isinstance(value, list | tuple):
        return type(value)(_column(item, token, k) for item in value)
    return {name: _column(item, token, k) for name, item in value.items()} if isinstance(value, dict) else value


def _joined(outputs: Sequence[Any]) -> Any:
    if isinstance(outputs[0], Tensor):
        return torch.cat(list(outputs), dim=1)
    return tuple(_joined(part) if isinstance(part[0], Tensor) else part[-1] for part in zip(*outputs, strict=True))
