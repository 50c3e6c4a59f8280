"""The weights of compiled forwards on CPUs: copies laid out for blocks of a few tokens.

Such a block reads every weight for little arithmetic: weights are stored in the order in which `product` reads them,
and linear layers with the same input are one product.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from draftsmith.decode.cache.product import block_product, can_pack, pack_weight

TOGETHER = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
"""Names of linear layers in one module that have the same input, in most families."""


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's parameters and buffers by name, shared ones under each of their names."""
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


@dataclass(frozen=True)
class Group:
    """Linear layers that are one product; `names` are in the parent, and `path` is the first one's in the model."""

    parent: nn.Module
    names: tuple[str, ...]
    path: str

    @property
    def layers(self) -> list[nn.Module]:
        """The linear layers."""
        return [self.parent._modules[name] for name in self.names]  # type: ignore[misc]

    def lay_out_weights(self) -> dict[str, Tensor]:
        """Return the weight, and the bias if there is one, by their names in the model."""
        weight = torch.cat([layer.get_parameter("weight").detach() for layer in self.layers])
        # The library reads half-precision weights faster with the inputs' axis outside.
        laid = {f"{self.path}.weight": pack_weight(weight) if can_pack(weight) else weight.t().contiguous().t()}
        if self.layers[0].bias is not None:
            laid[f"{self.path}.bias"] = torch.cat([layer.get_parameter("bias").detach() for layer in self.layers])
        return laid


def groups(model: nn.Module) -> Iterator[Group]:
    """Yield a model's linear layers on a CPU, grouped where they have the same input."""
    for path, parent in model.named_modules():
        # First the layers that may be together, then each of the others alone.
        plain = {name for name, child in parent._modules.items() if _is_plain(child)}
        for names in (*(names for names in TOGETHER if _alike(parent, names, plain)), *((name,) for name in plain)):
            if plain.issuperset(names):
                plain -= set(names)
                yield Group(parent, names, f"{path}.{names[0]}" if path else names[0])


def _is_plain(child: nn.Module | None) -> bool:
    # Of subclasses only linear maps under another name.
    return (
        isinstance(child, nn.Linear)
        and type(child).forward is nn.Linear.forward
        and child.weight.device.type == "cpu"
        and not child._forward_hooks
    )


def _alike(parent: nn.Module, names: Sequence[str], plain: set[str]) -> bool:
    layers = [parent.get_submodule(name) for name in names if name in plain]
    kinds = {(layer.in_features, layer.bias is None, layer.get_parameter("weight").dtype) for layer in layers}
    return len(layers) == len(names) and len(kinds) == 1


def lay_out_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's tensors for `lend_weights`; the copies take the weights' memory again."""
    weights = {name: tensor.detach() for name, tensor in tensors(model).items()}
    for group in groups(model):
        weights |= group.lay_out_weights()
    return weights


@contextmanager
def lend_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Let linear layers compute with weights from `lay_out_weights` in this block."""
    replaced: list[tuple[nn.Module, str, nn.Module]] = []
    try:
        for group in list(groups(model)):
            layers = group.layers
            whole = _Whole(weights, group.path, [layer.get_parameter("weight").shape[0] for layer in layers])
            for index, (name, layer) in enumerate(zip(group.names, layers, strict=True)):
                replaced.append((group.parent, name, layer))
                group.parent._modules[name] = whole if index == 0 else _Part(whole, index)
        yield
    finally:
        for parent, name, layer in replaced:
            parent._modules[name] = layer


@dataclass
class _Last:
    """The last product."""

    inputs: Tensor | None = None
    parts: Sequence[Tensor] = ()


class _Whole(nn.Module):
    """Several linear layers as one, in the place of the first."""

    def __init__(self, weights: Mapping[str, Tensor], path: str, sizes: Sequence[int]):
        super().__init__()
        self.weight = nn.Parameter(weights[f"{path}.weight"], requires_grad=False)
        bias = weights.get(f"{path}.bias")
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.in_features, self.out_features = self.weight.shape[1], sizes[0]
        self.sizes = list(sizes)
        self._packed = self.weight.dim() == 3
        # Not attributes of the module: an export warns of tensors that appear there.
        self._last = _Last()

    def part(self, index: int, inputs: Tensor) -> Tensor:
        """Return one layer's output; the product is computed once for an input."""
        if self._last.inputs is not inputs:
            self._last.inputs = inputs
            self._last.parts = self._product(inputs).split(self.sizes, dim=-1)
        return self._last.parts[index]

    def _product(self, inputs: Tensor) -> Tensor:
        if not self._packed:
            return nn.functional.linear(inputs, self.weight, self.bias)
        product: Tensor = block_product(inputs.contiguous(), self.weight, sum(self.sizes))
        return product if self.bias is None else product + self.bias

    def forward(self, inputs: Tensor) -> Tensor:
        return self.part(0, inputs)


class _Part(nn.Module):
    """One of the other layers of a group."""

    def __init__(self, whole: _Whole, index: int):
        super().__init__()
        self._whole, self._index = [whole], index  # in a list: no submodule
        self.in_features, self.out_features = whole.in_features, whole.sizes[index]

    def forward(self, inputs: Tensor) -> Tensor:
        return self._whole[0].part(self._index, inputs)
