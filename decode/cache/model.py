"""A model with its key-value cache: it takes blocks of tokens at any length, and dropping rejected ones is free.

Slot i of a row holds the keys and values of its token i. A forward gets the slot where each row's block starts, and
attends to the slots before it. So a rollback needs no operation, and rows advance by different lengths without holes or
padding. Buffers grow by doubling; those of compiled forwards have full size from the start.

Shape suffixes: B rows, K tokens of a block, S slots, H heads, D head width, V vocabulary.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.cache.attention import Grouped, attends_in_groups
from draftsmith.decode.cache.checks import ALIBI, parameters_of, runs_in_programs
from draftsmith.decode.cache.features import Features, collect_states
from draftsmith.decode.cache.forward import BlockForward, Forward, has_head
from draftsmith.decode.cache.layers import READ_AT_ONCE, Block, Moves, SavedLayer, Slots
from draftsmith.decode.cache.masks import Masks, count_slots, spans_of
from draftsmith.decode.cache.program import Program, Programs
from draftsmith.decode.cache.rotary import rotary_limit
from draftsmith.decode.cache.states import LayeredCache, StateLayer, make_layers
from draftsmith.decode.cache.stepwise import Stepwise
from draftsmith.decode.errors import InputError

STEP = 16  # programs attend to a multiple of this many slots, since kernels prefer such masks
SHORT = 128  # the longest prompts, in tokens, that a program reads; the library's products are better for longer ones
SavedRow = Sequence[SavedLayer | None]  # a row's state in each layer; None for a layer that reads an earlier layer's


class CachedModel:
    """A causal LM and the cache of some rows.

    Args:
        model: a model that `check_rollback` accepts.
        rows: B, rows decoded together.
        block: the most tokens fed in one forward after the prompt; rejected ones need room after the last length.
        wants_hidden: keep the head's input of the last forward in `hidden`.
        rollback: the most tokens taken back from one forward to the next, which layers with a window must not forget;
            two blocks if None.
        wants_features: keep the outputs of the model's layers at these depths in `features`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        rows: int,
        max_length: int,
        block: int = 1,
        compiled: bool = False,
        wants_hidden: bool = False,
        rollback: int | None = None,
        wants_features: Sequence[int] = (),
    ):
        self.model, self._rows = model, rows
        self.wants_hidden = wants_hidden
        self.hidden: Tensor | None = None
        """The head's input at the positions whose logits the last forward returned, (B, keep, H)."""
        self.likeliest: Tensor | None = None
        """The likeliest token at each position of the last block, (B, K), if it ran compiled; see `likeliest`."""
        self.features = Features()
        """The features of all positions, (B, T, F) for each forward since it was last emptied."""
        self._depths = list(wants_features)
        config = model.config.get_text_config()
        slots = max_length + block
        self._block = Block()
        compiled = self.compiled = compiled and runs_in_programs(model)
        self._window, chunk = spans_of(config)
        most = 2 * block + 2
        rollback = most if rollback is None else rollback
        layers = make_layers(config, self._block, rows, slots, compiled, rollback, min(rollback, most))
        self.cache = LayeredCache(layers, self._block)
        self._layers = [part for layer in layers for part in layer.parts]
        self._states = [layer for layer in self._layers if isinstance(layer, StateLayer)]
        self._stepwise = Stepwise(model, layers) if self._states else None
        self._device = model.device
        self._attention: Any = Grouped(model) if attends_in_groups(model) else nullcontext()
        if config.model_type in ALIBI:
            count_slots(model)
        parameters = parameters_of(model)
        self._keeps = "logits_to_keep" in parameters
        named = "past_key_values" in parameters or "cache_params" not in parameters  # Mamba has another name for it
        self._cache_name = "past_key_values" if named else "cache_params"
        self._takes_positions = named or "position_ids" in parameters
        self._largest = block
        self._slots, self._last = slots, max_length - 1
        if compiled:
            self._programs, self._has_head = Programs.of(model), has_head(model)
            self._ready: dict[tuple[Hashable, ...], Program] = {}  # by name, and the names of further inputs
            self._chains: dict[tuple[int, int, int], list[Tensor]] = {}
            self._ranges: dict[int, Tensor] = {}
            self._last_position = torch.tensor(self._last, device=self._device)
        self._range = torch.arange(slots, device=self._device)
        # Windows are counted in positions, and a tree's tokens have slots that differ from their positions.
        self._positions = (
            torch.zeros(rows, slots, dtype=torch.long, device=self._device) if self._window or chunk else None
        )
        self._masks = Masks(model, self._range)
        self._rotary_limit = rotary_limit(model)

    @property
    def has_states(self) -> bool:
        """True if layers have states: what may be dropped again must then be fed as a block, apart from the text."""
        return bool(self._states)

    @property
    def is_empty(self) -> bool:
        """True if nothing was fed yet."""
        return not any(layer.is_initialized for layer in self._layers)

    def prefill_texts(self, texts: Sequence[Tensor]) -> None:
        """Feed texts, B of (T_b,) int64, without their last tokens, into an empty cache."""
        longest = max(map(len, texts))
        self._check_rotary(min(map(len, texts)) - 1)
        if self._states and min(map(len, texts)) < longest:
            self._prefill_apart(texts)
        elif longest > 1:
            self.prefill(pad_right(texts, longest)[:, :-1])

    def _prefill_apart(self, texts: Sequence[Tensor]) -> None:
        """Feed texts of different lengths, those of one length at a time: padding would change a recurrent state."""
        rows: list[SavedRow] = [[] for _ in texts]
        features: dict[int, Tensor] = {}
        for length in sorted({len(text) for text in texts if len(text) > 1}):
            alike = [row for row, text in enumerate(texts) if len(text) == length]
            part = CachedModel(self.model, len(alike), self._last + 1, wants_features=self._depths)
            part.prefill_texts([texts[row] for row in alike])
            for place, row in enumerate(alike):
                rows[row] = part.saved(place, length - 1)
                if part.features:
                    features[row] = part.features[0][place]
        self.restore(rows)
        if features:
            nothing = next(iter(features.values()))[:0]
            parts = [features.get(row, nothing) for row in range(len(texts))]
            self.features.append(torch.nn.utils.rnn.pad_sequence(parts, batch_first=True))

    def refill(self, rows: Sequence[int], texts: Sequence[Tensor]) -> None:
        """Feed texts, (T_b,) int64, without their last tokens, to some rows; `rollback` must be the greatest length."""
        fresh = CachedModel(self.model, len(rows), self._last + 1)
        fresh.prefill_texts(texts)
        width, indices = max(map(len, texts)) - 1, torch.tensor(rows, device=self._device)
        for layer, new in zip(self._layers, fresh._layers, strict=True):
            if new.is_initialized:
                layer.refill(indices, new, width)
        if self._positions is not None:
            self._positions[indices, :width] = self._range[:width]

    def saved(self, row: int, length: int) -> SavedRow:
        """Return a copy of a row's first slots, for `restore`; `rollback` must be the greatest length."""
        return [layer.saved(row, length) if layer.is_initialized else None for layer in self._layers]

    def returns_to(self, row: int, place: int) -> bool:
        """Return whether a row can be fed from a slot on: layers with states return to few tokens."""
        return all(layer.returns_to(row, place) for layer in self._states)

    def restore(self, rows: Sequence[SavedRow]) -> None:
        """Fill an empty cache of the model with each row's saved slots; a row without any has an empty list."""
        if not any(rows):
            return
        for index, layer in enumerate(self._layers):
            saved = [row[index] if row else None for row in rows]
            if any(part is not None for part in saved):
                layer.restore(saved)
        if self._positions is not None:
            self._positions[:] = self._range

    def prefill(self, tokens: Tensor, keep: int = 1, further: Mapping[str, Tensor] | None = None) -> Tensor:
        """Feed beginnings of texts, (B, T) int64, padded on the right, into an empty cache.

        `further` are the model's other inputs by name, (B, T, …). Returns the last `keep` logits, (B, keep, V).
        """
        length = tokens.shape[1]
        self._check_rotary(length)
        starts = Slots([0] * len(tokens), self._device)
        # A program already loaded also serves a short prompt; none is compiled for it.
        if not further and tokens.numel() <= SHORT and self._is_compiled:
            return self._feed_compiled(tokens, starts, None, None, {}, keep)
        self._block.start, self._block.width, self._block.reach = 0, length, 0
        for layer in self._states:
            layer.rewind(starts, length, whole=True)
        positions = self._range[None, :length]
        if self._positions is not None:
            self._positions[:, :length] = positions
        return self._run(tokens, None, positions, keep, further, whole=True)

    def feed(
        self,
        tokens: Tensor,
        starts: Sequence[int] | Slots,
        keep: int | None = None,
        visible: Tensor | None = None,
        depths: Tensor | None = None,
        further: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Feed a block of tokens to each row; return the logits of the last `keep` tokens, (B, keep, V).

        Args:
            tokens: (B, K) int64; a row's own block may be shorter, and the padding after it is overwritten later.
            starts: the slot of each row's first token; it attends to all slots before it.
            keep: all K if None.
            visible: the slots, among the last N ≥ K up to the block's end, that each token attends to, (K, N) or (B, K,
                N) bool; earlier slots are visible to all. Causal if None.
            depths: each token's position beyond its row's start, (K,) or (B, K); 0…K − 1 if None.
            further: the model's other inputs by name, (B, K, …).
        """
        rows, k = tokens.shape
        slots = starts if isinstance(starts, Slots) else Slots(starts, self._device)
        self._check_rotary(min(slots.host) + k)
        if self.compiled:
            return self._feed_compiled(tokens, slots, visible, depths, further or {}, keep or k)
        if self._states and visible is not None:
            raise RuntimeError("states: expected a chain, found a block whose tokens do not follow one another")
        positions = self._placed(slots, k, depths)
        mask = self._masks.of_block(self._block, rows, positions, self._positions, visible, depths is not None)
        return self._run(tokens, mask, positions, k if keep is None else keep, further)

    def keep_paths(self, starts: Slots, paths: Sequence[Sequence[int]], sources: Tensor | None = None) -> None:
        """Move accepted tokens of trees, entries `paths` of the blocks that began at slots `starts`, after the roots.

        `sources` are the paths on the device, (B, D), where shorter ones continue as a chain; made here if None.
        """
        if all(list(path) == list(range(1, len(path) + 1)) for path in paths):
            return
        moves = Moves(starts, paths, sources, self._range)
        for layer in self._written:
            layer.move(moves)
        if self._positions is None:
            return
        if self._device.type in READ_AT_ONCE:
            for row, slot, _ in moves.on_host:
                self._positions[row, slot] = slot
        else:
            rows, to, _ = moves.on_device
            self._positions[rows, to] = to

    def select(self, rows: Sequence[int]) -> None:
        """Keep only some rows."""
        for layer in self._layers:
            layer.select(rows)
        if self._positions is not None:
            self._positions = self._positions[rows]

    @property
    def _written(self) -> list[Any]:
        """The layers with their own state; some models' last layers read an earlier layer's (Gemma 3n, Gemma 4)."""
        return [layer for layer in self._layers if layer.is_initialized]

    def _check_rotary(self, length: int) -> None:
        """Check the shortest text of the first forward: later ones may not turn cached keys by other angles."""
        limit, self._rotary_limit = self._rotary_limit, None
        if limit is None or self._last < limit[1]:
            return
        kind, most = limit
        if kind == "dynamic" or length <= most:
            raise InputError(
                f"max_length: expected at most {most} tokens, beyond which {type(self.model).__name__}'s {kind} rotary "
                f"embedding changes what the cache holds, found {self._last + 1}"
            )

    def _placed(self, slots: Slots, k: int, depths: Tensor | None) -> Tensor:
        """Set the slots of a block of K tokens for the layers; return its positions, (1 or B, K)."""
        for layer in self._layers:
            layer.rewind(slots, k)
        block = self._block
        block.start = slots.host[0] if slots.alike else None
        block.width = max(slots.host) + k
        # A tree's nodes have positions by their depth, at most `_largest` before their slots.
        first = min(slots.host) - (0 if depths is None else self._largest)
        block.reach = max(0, first - self._window + 1)
        if block.start is not None:
            block.slots = self._range[block.start : block.start + k][None, :]
        else:
            block.slots = slots.tensor[:, None] + self._range[:k]
        positions = block.slots if depths is None else block.slots[:, :1] + depths
        if block.width > self._last + 1:
            # Padding after a row's own block: learned positions may end with the length limit.
            positions = positions.clamp(max=self._last)
        if self._positions is not None:
            shape = len(slots.host), k
            self._positions.scatter_(1, block.slots.expand(shape), positions.expand(shape))
        return positions

    def _run(
        self,
        tokens: Tensor,
        mask: Any,
        positions: Tensor,
        keep: int,
        further: Mapping[str, Tensor] | None,
        whole: bool = False,
    ) -> Tensor:
        inputs: dict[str, Any] = {"attention_mask": mask, "position_ids": positions, **(further or {})}
        if keep < tokens.shape[1] and self._keeps:
            # A long prompt's logits over a large vocabulary would be the run's largest tensor. Told only their number,
            # Gemma 4's layers that read an earlier layer's keys drop the other queries, with the features there, and
            # take the rest for a causal block from slot 0. Told the columns, they drop none.
            columns = whole and (keep > 1 or self._depths)
            inputs["logits_to_keep"] = torch.arange(-keep, 0) if columns else keep
        inputs |= {"input_ids": tokens, self._cache_name: self.cache, "use_cache": True}
        if not self._takes_positions:
            del inputs["position_ids"]
        stepwise = self._stepwise if self._stepwise and tokens.shape[1] > 1 and not whole else nullcontext()
        with self._attention, stepwise, collect_states(self.model, self.wants_hidden, self._depths) as states:
            output = self.model(**inputs)
        for layer in self._states:
            layer.finish()
        self.likeliest = None
        self._keep(states.hidden, states.features, keep)
        if self.compiled and not self._programs.templates:
            self._programs.templates = [layer.template for layer in self._layers]
        return output.logits[:, -keep:].to(self._device)

    def _keep(self, hidden: Tensor | None, features: Sequence[Tensor], keep: int) -> None:
        if hidden is not None:
            self.hidden = hidden[:, -keep:]
        self.features += features

    def _feed_compiled(
        self,
        tokens: Tensor,
        slots: Slots,
        visible: Tensor | None,
        depths: Tensor | None,
        further: Mapping[str, Tensor],
        keep: int,
    ) -> Tensor:
        rows, k = tokens.shape
        if visible is None or depths is None:
            shape = self._chain(rows, k, keep)
        else:
            visible, depths = visible.expand(rows, -1, -1).contiguous(), depths.expand(rows, -1).contiguous()
            shape = [visible, depths, self._range[k - keep : k]]
        outputs = self.compute(None, lambda block: block, tokens, slots, k, shape, further)
        self.likeliest = outputs[1]
        self._keep(outputs[2] if self.wants_hidden else None, outputs[2 + self._has_head :], keep)
        return outputs[0]

    def compute(
        self,
        name: Hashable,
        make: Callable[[BlockForward], Forward],
        tokens: Tensor,
        slots: Slots,
        reach: int,
        inputs: Sequence[Any],
        further: Mapping[str, Tensor],
    ) -> list[Tensor]:
        """Run a program that feeds a block of tokens, (B, K) int64, to each row, and perhaps more tokens after it.

        Args:
            name: the program's key among those of this object.
            make: turns the model's `BlockForward` into the program's forward; called at its first use.
            tokens: (B, K) int64.
            slots: the slot of each row's first token.
            reach: the number of slots written, from a row's first token on.
            further: the model's other inputs by name, (B, K, …).
        """
        if self.is_empty:
            # Buffers are like those of an earlier cache of the model; in the first one the model itself makes them.
            for layer, template in zip(self._layers, self._programs.templates, strict=False):
                if template is not None:
                    layer.lazy_initialization(*template)
        if self.is_empty:
            self.prefill(tokens[:, :1], further={name: states[:, :1] for name, states in further.items()})
            self.features.clear()
        for layer in self._layers:
            layer.rewind(slots, reach)
        end = max(slots.host) + reach
        extras = [*further.values(), *([] if self._positions is None else [self._positions])]
        count = min(self._slots, -(-end // STEP) * STEP)
        if count not in self._ranges:
            self._ranges[count] = self._range[:count]
        all_inputs = [
            tokens.contiguous(),
            slots.tensor,
            self._ranges[count],
            self._last_position,
            *inputs,
            [states.contiguous() for states in extras],
            [states for layer in self._written for states in layer.tensors],
        ]
        if (program := self._ready.get((name, *further))) is None:
            written = [layer.is_initialized for layer in self._layers]
            forward = make(BlockForward(self.model, tuple(further), self._depths, written))
            program = self._ready[name, *further] = self._programs.get(forward, all_inputs)
        return program(*all_inputs)

    @property
    def _is_compiled(self) -> bool:
        """True if the model's program for blocks is loaded, with templates of its buffers."""
        if not self.compiled or not self._programs.templates:
            return False
        written = [template is not None for template in self._programs.templates]
        return self._programs.has(BlockForward(self.model, (), self._depths, written))

    def _chain(self, rows: int, k: int, keep: int) -> list[Tensor]:
        """Return `visible`, `depths` and `kept` of a chain; see `BlockForward`."""
        if (rows, k, keep) not in self._chains:
            visible = torch.ones(rows, k, k, dtype=torch.bool, device=self._device).tril()
            self._chains[rows, k, keep] = [visible, self._range[:k].repeat(rows, 1), self._range[k - keep : k]]
        return self._chains[rows, k, keep]


def pad_right(texts: Iterable[Tensor], width: int) -> Tensor:
    """Stack token sequences of at most `width` tokens, (B, width), with zeros on the right."""
    return torch.stack([torch.nn.functional.pad(t, (0, width - len(t))) if len(t) < width else t for t in texts])
