"""Slots of keys and values, and each layer's buffers of them.

`CachedModel` and programs leave a layer's state to the layer. One with a state other than keys and values implements
the public methods of `Layer`; see `draftsmith.decode.cache.states`.

Shape suffixes: B rows, K tokens of a block, S slots, H heads, D head width.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, cast

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

# The fewest slots of a buffer, which grows in multiples of it.
SLOTS = 64

READ_AT_ONCE = {"cpu"}  # devices whose values the host reads and writes without a transfer
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Numpy's integers by their number of bytes, since it has no bfloat16."""
SavedLayer = tuple[Tensor, ...]  # one row's state in one layer: keys and values, (H, T, D) each
Axes = Mapping[int, str]
"""The axes of a program's input whose sizes vary, by symbols: b rows, k tokens, j one more, l columns kept, m of the
last slots, n slots that are attended to, s all slots."""


class Slots:
    """A slot for each row: numbers on the host, and a tensor on the device that is made when it is first used."""

    def __init__(self, host: Sequence[int], device: torch.device, tensor: Tensor | None = None):
        self.host, self._device, self._tensor = list(host), device, tensor
        self._base: tuple[Slots, int] | None = None

    @property
    def tensor(self) -> Tensor:
        """The slots, (B,) int64."""
        if self._tensor is None:
            if self._device.type in READ_AT_ONCE and len(self.host) == 1:
                self._tensor = _of_one_row(self.host[0], self._device)
            elif self._base is None or self._device.type in READ_AT_ONCE:
                self._tensor = torch.tensor(self.host, device=self._device)
            else:
                base, offset = self._base
                self._tensor = base.tensor + offset
        return self._tensor

    @property
    def alike(self) -> bool:
        """True if all rows have the same slot."""
        return len(set(self.host)) == 1

    def __add__(self, offset: int) -> "Slots":
        moved = Slots([slot + offset for slot in self.host], self._device)
        # Where all rows have one slot, the host's number is enough, and the device computes nothing.
        if self._tensor is not None or not self.alike:
            moved._base = self, offset
        return moved


@lru_cache(maxsize=1 << 16)
def _of_one_row(slot: int, device: torch.device) -> Tensor:
    # The same slots recur in every text, and nothing writes to these tensors.
    return torch.tensor([slot], device=device)


class Block:
    """The slots of the present forward's tokens, shared by all layers."""

    start: int | None = 0  # the first slot; None where rows differ
    width: int  # one more than the last slot that is attended to
    reach: int = 0  # the first slot that layers with a window attend to

    def __init__(self) -> None:
        self._slots: dict[torch.device, Tensor] = {}
        self._rows: dict[torch.device, Tensor] = {}

    @property
    def slots(self) -> Tensor:
        """The slots, (B, K), or (1, K) for all rows."""
        return next(iter(self._slots.values()))

    @slots.setter
    def slots(self, slots: Tensor) -> None:
        self._slots = {slots.device: slots}

    def slots_on(self, device: torch.device) -> Tensor:
        """Return the slots on the device of a layer, since a model may be spread over several."""
        if device not in self._slots:
            self._slots[device] = self.slots.to(device)
        return self._slots[device]

    def rows_of(self, states: Tensor) -> Tensor:
        """Return the indices of rows, (B, 1), on the device of states, (B, …); made once for all layers."""
        rows = self._rows.get(states.device)
        if rows is None or rows.shape[0] != states.shape[0]:
            rows = self._rows[states.device] = torch.arange(states.shape[0], device=states.device)[:, None]
        return rows


class Moves:
    """The slots to which accepted tokens of trees are moved, each from a later one.

    The tokens are entries `paths` of the blocks that began at slots `starts`, and follow the roots. On the device are
    `sources`, the paths, (B, D), where shorter ones continue as a chain, made here if None; and `slots_S`, 0 … S − 1.
    """

    def __init__(self, starts: Slots, paths: Sequence[Sequence[int]], sources: Tensor | None, slots_S: Tensor):
        self._starts, self._paths, self._sources, self._slots_S = starts, paths, sources, slots_S

    @cached_property
    def on_host(self) -> list[tuple[int, int, int]]:
        """Each move as (row, to, source). Paths ascend, so that a slot is read before it is overwritten."""
        return [
            (row, root + slot, root + node)
            for row, (root, path) in enumerate(zip(self._starts.host, self._paths, strict=True))
            for slot, node in enumerate(path, 1)
            if slot != node
        ]

    @cached_property
    def on_device(self) -> tuple[Tensor, Tensor, Tensor]:
        """Rows, (B, 1), and the slots to write and to read, (B, D)."""
        depth, device = max(map(len, self._paths)), self._slots_S.device
        sources = self._sources
        if sources is None:
            chained = [[*path, *range(len(path) + 1, depth + 1)] for path in self._paths]
            sources = torch.tensor(chained, device=device)
        first, last = self._starts.tensor[:, None], len(self._slots_S) - 1
        # A block may end with the buffer: slots after a path then stay as they are.
        to, source = (first + self._slots_S[1 : depth + 1]).clamp(max=last), (first + sources).clamp(max=last)
        return torch.arange(len(self._paths), device=device)[:, None], to, source


class Layer(CacheLayerMixin):
    """One layer's keys and values, (B, H, S, D), in buffers of at most `slots`; `whole` allocates all at once.

    A token attends to `window` positions, its own included; 0 means all before it. A later forward may return to
    `rollback` slots before `Block.reach`.
    """

    def __init__(self, block: Block, rows: int, slots: int, whole: bool, window: int = 0, rollback: int = 0):
        super().__init__()
        self.block, self.rows, self.slots, self.whole = block, rows, slots, whole
        self.is_sliding, self._rollback = window > 0, rollback
        self.first = 0  # the slot that the buffers begin with; a layer with a window forgets the slots before it

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make buffers like the first keys and values, (B, H, K, D)."""
        slots = self.slots if self.whole else 0
        self.keys, self.values = (
            torch.zeros(self.rows, s.shape[1], slots, s.shape[3], dtype=s.dtype, device=s.device)
            for s in (key_states, value_states)
        )
        self.is_initialized = True

    def _grow(self) -> None:
        """Make room: twice the slots in use, so that copying costs no more than writing."""
        (keys, values), drop = self.tensors, 0
        if self.is_sliding:  # slots that neither a window nor a rollback can reach any more
            drop = min(max(0, self.block.reach - self._rollback - self.first), keys.shape[2])
        self.first, used = self.first + drop, keys.shape[2] - drop
        slots = -(-max(self.block.width - self.first, 2 * used) // SLOTS) * SLOTS
        padding = (0, 0, 0, min(self.slots - self.first, slots) - used)
        self.keys, self.values = (torch.nn.functional.pad(s[:, :, drop:], padding) for s in (keys, values))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Its state, which programs read and write: keys and values, (B, H, S, D)."""
        return cast(Tensor, self.keys), cast(Tensor, self.values)

    @property
    def axes(self) -> Sequence[Axes]:
        """The varying axes of each of `tensors`."""
        return [{0: "b", 2: "s"}] * 2

    @property
    def template(self) -> tuple[Tensor, ...] | None:
        """The arguments of `lazy_initialization` for an equal layer, without memory; None if it has no state."""
        return tuple(states[:0, :, :0].clone() for states in self.tensors) if self.is_initialized else None

    def take_from(self, tensors: list[Tensor]) -> None:
        """Take the first of these as its `tensors`, and remove them from the list."""
        self.keys, self.values, self.is_initialized = tensors.pop(0), tensors.pop(0), True

    @property
    def parts(self) -> Sequence[Any]:
        """The layer's buffers, which move, select and rewind themselves."""
        return [self]

    def finish(self) -> None:
        """Do what is to be done after a forward."""

    def rewind(self, slots: Slots, tokens: int, whole: bool = False) -> None:
        """Forget each row's tokens from its place on, where a block of tokens begins."""
        # Keys and values stay: the block overwrites its slots, and nothing attends to later ones.

    def select(self, rows: Sequence[int]) -> None:
        """Keep only some rows."""
        self.rows = len(rows)
        if self.is_initialized:
            self.keys, self.values = (states[rows] for states in self.tensors)

    def move(self, moves: Moves) -> None:
        """Copy the slots of accepted tokens."""
        for states in self.tensors:
            if states.device.type in READ_AT_ONCE:  # numpy takes a microsecond for each move
                bits = states.view(BITS[states.element_size()]).numpy()
                for row, to, source in moves.on_host:
                    bits[row, :, to - self.first] = bits[row, :, source - self.first]
            else:
                rows, new, old = (part.to(states.device) for part in moves.on_device)
                states[rows, :, new - self.first] = states[rows, :, old - self.first]

    def refill(self, rows: Tensor, other: "Layer", width: int) -> None:
        """Begin some rows, (R,) int64, with the first `width` slots of another cache's R rows."""
        if width > self.tensors[0].shape[2]:
            self.block.width = width
            self._grow()
        for old, new in zip(self.tensors, other.tensors, strict=True):
            old[rows.to(old.device), :, :width] = new[:, :, :width]

    def saved(self, row: int, length: int) -> SavedLayer:
        """Return a copy of a row's state after `length` tokens."""
        return tuple(states[row, :, :length].clone() for states in self.tensors)

    def restore(self, rows: Sequence[SavedLayer | None]) -> None:
        """Begin each row with its saved slots, if any; at least one row has some."""
        saved = {row: states for row, states in enumerate(rows) if states is not None}
        width = max(keys.shape[1] for keys, _ in saved.values())
        slots = min(self.slots, -(-width // SLOTS) * SLOTS)
        example = next(iter(saved.values()))
        self.keys, self.values = (s.new_zeros(self.rows, s.shape[0], slots, s.shape[2]) for s in example)
        for row, (keys, values) in saved.items():
            self.keys[row, :, : keys.shape[1]], self.values[row, :, : values.shape[1]] = keys, values
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the block's keys and values, (B, H, K, D); return those that it attends to, (B, H, S, D)."""
        block = self.block
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if block.width - self.first > self.tensors[0].shape[2]:
            self._grow()
        keys, values = self.tensors
        reach = block.reach if self.is_sliding else 0
        if reach < self.first:
            raise RuntimeError(f"a window from slot {reach} on, found the slots before {self.first} forgotten")
        if block.start is None:  # a slot of its own for each row: indices, where a slice is not enough
            slots, rows = block.slots_on(keys.device), block.rows_of(keys)
            slots = slots - self.first if self.first else slots
            keys[rows, :, slots] = key_states.transpose(1, 2)
            values[rows, :, slots] = value_states.transpose(1, 2)
        else:
            keys.narrow(2, block.start - self.first, key_states.shape[2]).copy_(key_states)
            values.narrow(2, block.start - self.first, key_states.shape[2]).copy_(value_states)
        attended = reach - self.first, block.width - reach
        return keys.narrow(2, *attended), values.narrow(2, *attended)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of slots that are attended to, and the first of them."""
        reach = self.block.reach if self.is_sliding else 0
        return self.block.width - reach, reach

    def get_seq_length(self) -> int:
        """Return the first slot of the block; 0 where rows differ."""
        return self.block.start or 0

    def get_max_length(self) -> int:
        """Return the greatest S."""
        return self.slots


class IndexedLayer(Layer):
    """A layer with the keys of an index, by which each token selects the slots that it attends to (DeepSeek-V3.2)."""

    def __init__(self, block: Block, rows: int, slots: int, whole: bool, window: int = 0, rollback: int = 0):
        super().__init__(block, rows, slots, whole, window, rollback)
        self.index = Layer(block, rows, slots, whole)
        self.indexer_position_ids: Tensor | None = None  # some models keep positions here

    @property
    def parts(self) -> Sequence[Any]:
        """The buffers of keys and values, and those of the index."""
        return [self, self.index]

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Write the index's keys of the block, (B, K, D); return those of all slots, (B, S, D)."""
        keys = indexer_key_states[:, None]
        return self.index.update(keys, keys[..., :0])[0][:, 0]
