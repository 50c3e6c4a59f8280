"""Layers of a cache with recurrent or convolution states, to whose earlier tokens a row can return.

A state after T tokens does not contain the one after T − 1, so that a rejected draft cannot be dropped from it. A layer
here keeps its states after each of the last tokens, and a row returns to the ones after its last accepted token. A
mixer with a convolution alone gives the layer all inputs of a block, and every state is a slice of them. A mixer with a
recurrent state shows only the last one: `stepwise` feeds it one token at a time. Both use the library's own cache
interface, for any family.

Shape suffixes: B rows, K tokens of a block, W inputs that a convolution looks back to, C channels.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionLayer, get_layer_types_and_kwargs

from draftsmith.decode.cache.layers import Block, IndexedLayer, Layer, Moves, SavedLayer, Slots
from draftsmith.decode.errors import InputError

STATES = ("conv", "linear_attention")  # the library's types of layers with states alone
HYBRIDS = ("hybrid", "hybrid_sliding")  # … and of layers that have keys and values as well
T = TypeVar("T")
State = tuple[str, int]  # "conv" or "recurrent", and the library's number of the state within its layer


class StateLayer(LinearAttentionLayer):
    """One layer's states, `states` of each kind, and those after each of a row's last tokens.

    A later forward may return to `rollback` tokens before the start of the last one.
    """

    is_sliding = False
    name = "layer"  # as an error names it

    def __init__(self, rows: int, states: int = 1, rollback: int = 0):
        super().__init__(number_of_states=states)
        self.rows, self._rollback = rows, rollback
        self.record_past = True  # mixers then hand over all inputs of a convolution, and change no state of it in place
        self._stepped: set[int] | None = None  # the convolutions that the present token of a stepped mixer updated
        self._forget()

    def _forget(self) -> None:
        self._ends: list[list[int]] = []  # the number of each row's tokens before each kept state; −1 where stale
        self._kept: dict[State, list[Tensor]] = {}  # each state after these tokens, (B, …)
        self._present = -1  # which of them are the present ones, if any
        for number in range(self.number_of_states):
            self.has_previous_state[number] = False
            self.is_conv_states_initialized[number] = self.is_recurrent_states_initialized[number] = False
            self.conv_states[number] = self.recurrent_states[number] = None

    @property
    def parts(self) -> Sequence[Any]:
        """The layer's states, which select and rewind themselves."""
        return [self]

    @property
    def is_initialized(self) -> bool:
        """True if there is a state."""
        return bool(self._ends)

    def rewind(self, slots: Slots, tokens: int, whole: bool = False) -> None:
        """Return to each row's states before its slot, and expect those after each of a block's tokens.

        If `whole`, only the last of these are expected.
        """
        chosen = [self._index(row, length) for row, length in enumerate(slots.host)]
        if not any(slots.host):
            self._forget()
        elif set(chosen) != {self._present}:
            for state, kept in self._kept.items():
                self._set(state, _gathered(kept, chosen))
        # Of a row that returns, all later states are stale. One earlier than `rollback` tokens is enough.
        for row, length in enumerate(slots.host):
            for ends in self._ends:
                ends[row] = ends[row] if ends[row] <= length else -1
        floors = [
            max((ends[row] for ends in self._ends if 0 <= ends[row] <= length - self._rollback), default=0)
            for row, length in enumerate(slots.host)
        ]
        needed = [any(end >= floor for end, floor in zip(ends, floors, strict=True)) for ends in self._ends]
        self._kept = {state: _where(kept, needed) for state, kept in self._kept.items()}
        self._ends = _where(self._ends, needed)
        self._ends += [
            [length + step for length in slots.host] for step in ([tokens] if whole else range(1, tokens + 1))
        ]

    def _index(self, row: int, length: int) -> int:
        """Return which kept states are a row's after `length` tokens; −1 for those before all tokens."""
        if not length:
            return -1
        for index in reversed(range(len(self._ends))):
            if self._ends[index][row] == length:
                return index
        found = sorted({ends[row] for ends in self._ends if ends[row] >= 0})
        raise RuntimeError(f"row {row}: expected states after {length} tokens, found those after {found}")

    def _set(self, state: State, states: Tensor) -> None:
        kind, number = state
        if kind == "conv":
            self.conv_states[number], self.is_conv_states_initialized[number] = states, True
            self.conv_kernel_size[number] = states.shape[-1]
        else:
            self.recurrent_states[number], self.is_recurrent_states_initialized[number] = states, True
        self.has_previous_state[number] = True

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: Any
    ) -> Tensor:
        """Append inputs of a convolution, (B, C, K); return them with those that they look back to, (B, C, W + K)."""
        k = conv_states.shape[-1]
        width = conv_kernel_size or self.conv_kernel_size[state_idx] or k
        before = self.conv_states[state_idx] if self.has_previous_state[state_idx] else None
        inputs = conv_states if before is None else torch.cat([before, conv_states], dim=-1)
        filled = nn.functional.pad(inputs, (max(0, width + k - inputs.shape[-1]), 0))
        if self._stepped is None:
            expected = len(self._ends) - len(self._kept.get(("conv", state_idx), ()))
            for last in [k] if expected == 1 else range(1, k + 1):
                self._keep(("conv", state_idx), filled[..., last : last + width])
        else:
            self._stepped.add(state_idx)
        self._set(("conv", state_idx), filled[..., -width:].clone())  # some mixers change it in place at one token
        return inputs

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Set a state, (B, …)."""
        self._set(("recurrent", state_idx), recurrent_states)
        return recurrent_states

    def _keep(self, state: State, states: Tensor) -> None:
        kept = self._kept.setdefault(state, [])
        expected = self.rows, *(kept[0].shape[1:] if kept else states.shape[1:])
        if states.shape != expected:
            raise unknown(self.name, f"a {state[0]} state of shape {expected}", f"one of {tuple(states.shape)}")
        kept.append(states)

    def step(self, forward: Callable[[], Any]) -> Any:
        """Run a mixer's forward of one token, and keep the states after it."""
        self._stepped = set()
        try:
            output = forward()
            for number in range(self.number_of_states):
                if (states := self.recurrent_states[number]) is not None:  # some kernels then change this very tensor
                    self._keep(("recurrent", number), states.clone())
                # Some mixers do not tell of their convolution; with several states, one may be another module's.
                told = number in self._stepped or self.number_of_states == 1
                if told and (states := self.conv_states[number]) is not None:
                    self._keep(("conv", number), states.clone())
        finally:
            self._stepped = None
        return output

    def finish(self) -> None:
        """Keep the states after a forward; an `InputError` if some of a block's are missing."""
        expected = len(self._ends)
        for kind, number in self._all:
            state = kind, number
            states = (self.conv_states if kind == "conv" else self.recurrent_states)[number]
            if states is not None and len(self._kept.get(state, ())) == expected - 1:  # changed in place
                self._keep(state, states.clone())
        for (kind, _), kept in self._kept.items():
            if missing := expected - len(kept):
                raise unknown(self.name, f"a {kind} state after each of {expected} tokens", f"{missing} missing")
        self._present = expected - 1

    def select(self, rows: Sequence[int]) -> None:
        """Keep only some rows."""
        self.rows = len(rows)
        self._ends = [[ends[row] for row in rows] for ends in self._ends]
        for state, kept in self._kept.items():
            self._kept[state] = [states[rows] for states in kept]
            if self._present >= 0:
                self._set(state, self._kept[state][self._present].clone())

    def move(self, moves: Moves) -> None:
        """Raise a `RuntimeError`: a state follows one path of a tree, and its nodes are not fed."""
        raise RuntimeError("states: expected the accepted tokens of a chain, found those of a tree")

    def refill(self, rows: Tensor, other: "StateLayer", width: int) -> None:
        """Begin some rows, (R,) int64, with the states of another cache's R rows."""
        new_rows = rows.tolist()
        ends = [-1] * self.rows
        for row, saved in zip(new_rows, range(len(new_rows)), strict=True):
            for earlier in self._ends:
                earlier[row] = -1
            ends[row] = max(entry[saved] for entry in other._ends)
        for state, kept in self._kept.items():
            states = torch.zeros_like(kept[-1])
            states[rows.to(states.device)] = _gathered(
                other._kept[state], [other._index(row, ends[new]) for row, new in enumerate(new_rows)]
            )
            kept.append(states)
        self._ends.append(ends)
        self._present = -1

    def saved(self, row: int, length: int) -> SavedLayer:
        """Return a copy of a row's states up to `length` tokens.

        It is the number of tokens before each, (N,), and each kind's states, (N, …); (0,) if the layer has none.
        """
        kept = [index for index, ends in enumerate(self._ends) if 0 < ends[row] <= length]
        states = [self._kept.get(state) for state in self._all]
        copies = [
            torch.zeros(0) if s is None else torch.stack([s[index][row] for index in kept]) if kept else s[0][:0]
            for s in states
        ]
        return torch.tensor([self._ends[index][row] for index in kept]), *copies

    def restore(self, rows: Sequence[SavedLayer | None]) -> None:
        """Begin each row with its saved states, if any; at least one row has some."""
        saved = [part for part in rows if part is not None]
        counts = [0 if part is None else len(part[0]) for part in rows]
        for index in range(-max(counts), 0):  # the last states of all rows become one entry
            has = [count >= -index for count in counts]
            self._ends.append(
                [int(part[0][index]) if part and own else -1 for part, own in zip(rows, has, strict=True)]
            )
            for at, state in enumerate(self._all, 1):
                if saved[0][at].ndim > 1:
                    empty = saved[0][at].new_zeros(saved[0][at].shape[1:])
                    kept = [part[at][index] if part and own else empty for part, own in zip(rows, has, strict=True)]
                    self._keep(state, torch.stack(kept))
        self._present = -1

    def returns_to(self, row: int, length: int) -> bool:
        """Return whether a row's states after `length` tokens are kept."""
        return not length or any(ends[row] == length for ends in self._ends)

    @property
    def _all(self) -> list[State]:
        return [(kind, number) for kind in ("conv", "recurrent") for number in range(self.number_of_states)]


class StateAndAttentionLayer(StateLayer, CacheLayerMixin):  # type: ignore[override,misc]
    """A layer with states, and with the keys and values of an attention of its own."""

    def __init__(self, attention: Layer, states: int = 1, rollback: int = 0):
        StateLayer.__init__(self, attention.rows, states, rollback)
        self.attention, self.is_sliding = attention, attention.is_sliding  # type: ignore[misc]

    @property
    def parts(self) -> Sequence[Any]:
        """The attention's buffers, and the states."""
        return [self.attention, self]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the block's keys and values: see `Layer`."""
        return self.attention.update(key_states, value_states, *args, **kwargs)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of slots that are attended to, and the first of them."""
        return self.attention.get_mask_sizes(query_length)

    def get_seq_length(self) -> int:
        """Return the first slot of the block."""
        return self.attention.get_seq_length()


class LayeredCache(Cache):
    """A cache for which a model may have lost all layers with attention, as an early exit does."""

    def __init__(self, layers: list[Any], block: Block):
        super().__init__(layers=layers)
        self._block = block
        self._attends = any(isinstance(layer, CacheLayerMixin) for layer in layers)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the first slot of the block; see `Layer`."""
        return super().get_seq_length(layer_idx) if self._attends else self._block.start or 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the number of slots that are attended to, and the first of them."""
        return super().get_mask_sizes(query_length, layer_idx) if self._attends else (self._block.width, 0)


def unknown(name: str, expected: str, found: str) -> InputError:
    """Return the error for a layer whose states the decoder cannot follow, as of a family that it does not know."""
    return InputError(
        f"{name}: expected {expected}, found {found}, so that rejected tokens cannot be dropped; prepare, cache, "
        "training, replay and measure --server take such a model"
    )


def returns_to(saved: Sequence[SavedLayer | None], length: int) -> bool:
    """Return whether a row that was saved holds all states after `length` tokens."""
    ends = [part[0].tolist() for part in saved if part is not None and part[0].ndim == 1]  # keys have three dimensions
    return not length or all(length in kept for kept in ends)


def _gathered(kept: Sequence[Tensor], chosen: Sequence[int]) -> Tensor:
    """Return each row's state, (B, …), of those kept; zeros for −1."""
    if len(set(chosen)) == 1 and chosen[0] >= 0 and len(chosen) == len(kept[0]):
        return kept[chosen[0]].clone()
    return torch.stack([kept[i][row] if i >= 0 else torch.zeros_like(kept[0][0]) for row, i in enumerate(chosen)])


def _where(items: Iterable[T], flags: Sequence[bool]) -> list[T]:
    return [item for item, flag in zip(items, flags, strict=True) if flag]


def make_layers(
    config: Any, block: Block, rows: int, slots: int, whole: bool, rollback: int = 0, states_back: int = 0
) -> list[Any]:
    """Return the empty layers of a model's cache, from its text config; `whole` ones keep what is outside a window.

    A later forward may return to `rollback` slots before the start of the last one, or `states_back` where there are
    states.
    """
    kinds, options = layer_kinds(config)
    window = 0 if whole else getattr(config, "sliding_window", None) or 0
    layers: list[Any] = []
    for kind, option in zip(kinds, options, strict=True):
        states = option.get("number_of_states", 1)
        attention = IndexedLayer if kind == "indexed_attention" else Layer
        if kind in STATES:
            layers.append(StateLayer(rows, states, states_back))
            continue
        part = attention(block, rows, slots, whole, window if "sliding" in kind else 0, rollback)
        layers.append(StateAndAttentionLayer(part, states, states_back) if kind in HYBRIDS else part)
    for index, layer in enumerate(layers):
        if isinstance(layer, StateLayer):
            layer.name = f"layer {index} of {config.model_type}"
    return layers


def layer_kinds(config: Any) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the library's type of each layer of a text config, and its options for the layer's cache."""
    layers, named = config.num_hidden_layers, getattr(config, "layer_types", None)
    view: Any = config if config.is_heterogeneous else _Alike(config, layers if named else 1)
    kinds, options = get_layer_types_and_kwargs(view)
    times = layers if len(kinds) == 1 else 1
    return (kinds * times)[:layers], (options * times)[:layers]


class _Alike:
    """A config whose layers are alike: the library's view of each layer takes longer than a small forward."""

    def __init__(self, config: Any, layers: int):
        self._config, self.per_layer_config = config, [config] * layers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)
