"""Slots of keys and values, and each layer's buffers of them.

Shape suffixes: B rows, K tokens of a block, S slots, H heads, D head width.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

# The fewest slots of a buffer, which grows in multiples of it.
SLOTS = 64

READ_AT_ONCE = {"cpu"}  # devices whose values the host reads and writes without a transfer
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Numpy's integers by their number of bytes, since it has no bfloat16."""
SavedLayer = tuple[Tensor, Tensor]  # keys and values of one row in one layer, (H, T, D) each


class Places:
    """A slot for each row: numbers on the host, and a tensor on the device that is made when it is first used."""

    def __init__(self, host: Sequence[int], device: torch.device, tensor: Tensor | None = None):
        self.host, self._device, self._tensor = list(host), device, tensor
        self._base: tuple[Places, int] | None = None

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

    def __add__(self, offset: int) -> "Places":
        moved = Places([slot + offset for slot in self.host], self._device)
        # Where all rows have one slot, the host's number is enough, and the device computes nothing.
        if self._tensor is not None or not self.alike:
            moved._base = self, offset
        return moved


@lru_cache(maxsize=1 << 16)
def _of_one_row(place: int, device: torch.device) -> Tensor:
    # The same slots recur in every text, and nothing writes to these tensors.
    return torch.tensor([place], device=device)


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
        keys, values = cast(Tensor, self.keys), cast(Tensor, self.values)
        drop = 0
        if self.is_sliding:  # slots that neither a window nor a rollback can reach any more
            drop = min(max(0, self.block.reach - self._rollback - self.first), keys.shape[2])
        self.first, used = self.first + drop, keys.shape[2] - drop
        slots = -(-max(self.block.width - self.first, 2 * used) // SLOTS) * SLOTS
        padding = (0, 0, 0, min(self.slots - self.first, slots) - used)
        self.keys, self.values = (torch.nn.functional.pad(s[:, :, drop:], padding) for s in (keys, values))

    def move(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Copy slots on the host, each (row, to, source) with a later source; numpy takes a microsecond each."""
        for states in (self.keys, self.values):
            bits = cast(Tensor, states).view(BITS[cast(Tensor, states).element_size()]).numpy()
            for row, to, source in moves:
                bits[row, :, to - self.first] = bits[row, :, source - self.first]

    def refill(self, rows: Tensor, other: "Layer", width: int) -> None:
        """Begin some rows, (R,) int64, with the first `width` slots of another cache's R rows."""
        if width > cast(Tensor, self.keys).shape[2]:
            self.block.width = width
            self._grow()
        for old, new in ((self.keys, other.keys), (self.values, other.values)):
            cast(Tensor, old)[rows.to(cast(Tensor, old).device), :, :width] = cast(Tensor, new)[:, :, :width]

    def saved(self, row: int, length: int) -> SavedLayer:
        """Return copies of a row's first slots: keys and values, (H, length, D) each."""
        keys, values = cast(Tensor, self.keys), cast(Tensor, self.values)
        return keys[row, :, :length].clone(), values[row, :, :length].clone()

    def restore(self, rows: Sequence[SavedLayer | None]) -> None:
        """Begin each row with its saved slots, if any; at least one row has some."""
        pairs = {row: saved for row, saved in enumerate(rows) if saved is not None}
        width = max(keys.shape[1] for keys, _ in pairs.values())
        slots = min(self.slots, -(-width // SLOTS) * SLOTS)
        example = next(iter(pairs.values()))
        self.keys, self.values = (s.new_zeros(self.rows, s.shape[0], slots, s.shape[2]) for s in example)
        for row, (keys, values) in pairs.items():
            self.keys[row, :, : keys.shape[1]], self.values[row, :, : values.shape[1]] = keys, values
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the block's keys and values, (B, H, K, D); return those that it attends to, (B, H, S, D)."""
        block = self.block
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if block.width - self.first > cast(Tensor, self.keys).shape[2]:
            self._grow()
        keys, values = cast(Tensor, self.keys), cast(Tensor, self.values)
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
