"""The forwards that programs compute: a model's, over a block of tokens, and others built from it.

Shape suffixes: B rows, K tokens of a block, M of the last slots, N slots that are attended to, S slots, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from draftsmith.decode.cache.checks import parameters_of
from draftsmith.decode.cache.features import collect_states
from draftsmith.decode.cache.layers import Axes, Block
from draftsmith.decode.cache.masks import Masks
from draftsmith.decode.cache.states import make_layers

NO_TOKEN = -1  # replaces a token where the logits are NaN


class Forward(nn.Module, ABC):
    """A module that a program computes, from tensors and lists of tensors.

    Its own buffers are part of the program; the tensors of its `model` are those of the present model. `key` sets it
    apart from other forwards of the model, and becomes part of the program's name.
    """

    sources: Sequence[str] = ()
    """Files with the code that it runs, in addition to those of its own class and of programs."""

    def __init__(self, model: nn.Module, key: tuple[Any, ...]):
        super().__init__()
        self.model, self.key = model, (type(self).__qualname__, *key)

    @property
    def title(self) -> str:
        """The name of the program in progress messages."""
        return f"the forward of {type(self.model).__name__}"

    @abstractmethod
    def axes(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Return the varying axes of each input, in the inputs' nesting."""


class BlockForward(Forward):
    """The forward of a causal LM over a block of tokens after each row's slots.

    `further` names the model's inputs other than tokens, and `depths` the layers whose features it returns. `written`
    says which layers have their own state; others read an earlier layer's.
    """

    def __init__(self, model: PreTrainedModel, further: Sequence[str], depths: Sequence[int], written: Sequence[bool]):
        super().__init__(model, (tuple(further), tuple(depths), tuple(written)))
        self.further, self._depths, self._written = tuple(further), tuple(depths), list(written)
        self._keeps = "logits_to_keep" in parameters_of(model)
        config = self._config = model.config.get_text_config()
        self.window: int = getattr(config, "sliding_window", None) or 0

    def reading(self, further: Sequence[str]) -> "BlockForward":
        """Return the same forward with other further inputs."""
        return BlockForward(self.model, further, self._depths, self._written)  # type: ignore[arg-type]

    def axes(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Return the varying axes of each input."""
        *_, extras, _ = inputs
        block = {0: "b", 1: "k"}
        return block, {0: "b"}, {0: "n"}, {}, block | {2: "m"}, block, {0: "l"}, *self.trailing_axes(extras)

    def trailing_axes(self, extras: Sequence[Tensor]) -> tuple[list[Axes], list[Axes]]:
        """Return the axes of `extras` and `cached`."""
        extra_axes: list[Axes] = [{0: "b", 1: "k"} for _ in extras]
        if self.window:
            extra_axes[-1] = {0: "b", 1: "s"}
        layers = make_layers(self._config, Block(), 0, 0, True)
        return extra_axes, [
            axes for layer, written in zip(layers, self._written, strict=True) if written for axes in layer.axes
        ]

    def forward(
        self,
        tokens: Tensor,
        starts: Tensor,
        slots_N: Tensor,
        last: Tensor,
        visible: Tensor,
        depths: Tensor,
        kept: Tensor,
        extras: list[Tensor],
        cached: list[Tensor],
    ) -> list[Tensor]:
        """Run the model over a block.

        Args:
            tokens: (B, K) int64.
            starts: the slot of each row's first token, (B,) int64.
            last: the greatest position, () int64.
            visible: which of the last M ≥ K slots up to the block's end each token attends to, (B, K, M) bool.
            depths: each token's position beyond its row's start, (B, K) int64.
            kept: the columns whose logits are wanted, (L,) int64.
            extras: the `further` inputs, (B, K, …), and with sliding layers the positions of the tokens in all slots,
                (B, S) int64, which are written.
            cached: the tensors of the layers that have their own, which are written: see `Layer.tensors`.

        Returns:
            Logits, (B, L, V); the likeliest tokens, (B, L), see `likeliest`; the head's input, (B, L, H), where the
            model has a head; the features that are wanted, (B, K, F).
        """
        extras, cached = list(extras), list(cached)
        rows, k = tokens.shape
        further = {name: extras.pop(0) for name in self.further}
        block = Block()
        block.start, block.width = None, slots_N.shape[0]
        block.slots = starts[:, None] + torch.arange(k, device=tokens.device)
        # Padding after a row's own block may pass the greatest position.
        positions = torch.minimum(starts[:, None] + depths, last)
        cached_BS = extras[0] if self.window else None
        if cached_BS is not None:
            cached_BS.scatter_(1, block.slots, positions)
        model: Any = self.model
        # Not in the model's dtype: weights that are lent to it may have another.
        masks = Masks(model, slots_N, cached[0].dtype)
        # The library's cache over the given buffers; they are written in place.
        layers = make_layers(self._config, block, rows, 0, True)
        for layer, written in zip(layers, self._written, strict=True):
            if written:
                layer.take_from(cached)
        with collect_states(model, has_head(model), self._depths) as states:
            output = model(
                input_ids=tokens,
                attention_mask=masks.by_slot(block, positions, cached_BS, visible),
                position_ids=positions,
                past_key_values=Cache(layers=list(layers)),
                use_cache=True,
                **({"logits_to_keep": kept} if self._keeps else {}),
                **further,
            )
        logits, hidden = output.logits, states.hidden
        if not self._keeps:
            logits, hidden = logits[:, kept], None if hidden is None else hidden[:, kept]
        return [logits, likeliest(logits), *([] if hidden is None else [hidden]), *states.features]


def likeliest(scores: Tensor) -> Tensor:
    """Return the index of the greatest score, (…, V) → (…): the first of equal ones, `NO_TOKEN` if any is NaN."""
    # Compilers vectorise these two passes, which they do not with an argmax. No score equals a greatest one of NaN.
    size = scores.shape[-1]
    order = torch.arange(size, dtype=torch.int32, device=scores.device)
    first = torch.where(scores == scores.amax(-1, keepdim=True), order, size).amin(-1).long()
    return torch.where(first == size, NO_TOKEN, first)


def has_head(model: PreTrainedModel) -> bool:
    """Return whether a model has its own output head, whose input a program returns."""
    return model.get_output_embeddings() is not None
