"""A model with its key-value cache: blocks of tokens go in at any length, and what was rejected costs nothing to drop.

Keys and values lie in buffers that grow by doubling, up to the length limits: slot i of a row holds its token i. A
forward says where each row's block starts, and attends to the slots before it. So a rollback is no operation at all,
rows of a batch advance by different lengths without holes or padding between their tokens, and shapes can stay fixed
for `torch.compile`, where buffers have their full size from the start.

Shape suffixes: B rows, K tokens of a block, S slots, H heads, D head width, V vocabulary.
"""

import inspect
import weakref
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from draftsmith.decode.errors import InputError

# Attention that takes any additive mask. The fast kernels beyond them know causal masks alone.
ATTENTION = ("eager", "sdpa")
# Compiled forwards are specialised to the buffers' size: few sizes, few compilations.
COMPILED_SLOTS = 256
# Slots that a buffer begins with at least, and is a multiple of while it grows.
SLOTS = 64
# Models whose config says one thing and whose layers do another, which no field of it shows.
UNFIT_TYPES = {"moshi": "whose config names a window that its layers do not have"}


class Places:
    """A slot for each row, known on the host; on the device from the first time that it is asked for."""

    def __init__(self, host: Sequence[int], device: torch.device, tensor: Tensor | None = None):
        self.host, self._device, self._tensor = list(host), device, tensor

    @property
    def tensor(self) -> Tensor:
        """The slots, (B,) int64."""
        if self._tensor is None:
            self._tensor = torch.tensor(self.host, device=self._device)
        return self._tensor

    @property
    def alike(self) -> bool:
        """Whether all rows have the same."""
        return len(set(self.host)) == 1

    def __add__(self, offset: int) -> "Places":
        # Of one slot for all rows the host's number is enough: nothing is computed on the device.
        tensor = None if self._tensor is None and self.alike else self.tensor + offset
        return Places([slot + offset for slot in self.host], self._device, tensor)


class _Block:
    """Where the tokens of the present forward go; all layers share it."""

    start: int | None = 0
    """The first slot, where it is the same for every row."""
    width: int
    """Slots that are attended to."""

    def __init__(self) -> None:
        self._slots: dict[torch.device, Tensor] = {}

    @property
    def slots(self) -> Tensor:
        """The slots, (B, K), or (1, K) for all rows."""
        return next(iter(self._slots.values()))

    @slots.setter
    def slots(self, slots: Tensor) -> None:
        self._slots = {slots.device: slots}

    def slots_on(self, device: torch.device) -> Tensor:
        """Return them on the device of a layer: a model may be spread over several."""
        if device not in self._slots:
            self._slots[device] = self.slots.to(device)
        return self._slots[device]


class _Layer(CacheLayerMixin):
    """One layer's keys and values, (B, H, S, D)."""

    is_compileable = True
    is_sliding = False

    def __init__(self, block: _Block, rows: int, slots: int, compiled: bool):
        super().__init__()
        self.block, self.rows, self.slots, self.compiled = block, rows, slots, compiled

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        slots = self.slots if self.compiled else 0
        self.keys, self.values = (
            torch.zeros(self.rows, s.shape[1], slots, s.shape[3], dtype=s.dtype, device=s.device)
            for s in (key_states, value_states)
        )
        self.is_initialized = True

    def _grow(self, width: int) -> None:
        """Make room for `width` slots: twice as many as there are, so that copying costs as much as writing."""
        keys, values = cast(Tensor, self.keys), cast(Tensor, self.values)
        slots = min(self.slots, -(-max(width, 2 * keys.shape[2]) // SLOTS) * SLOTS)
        self.keys, self.values = (torch.nn.functional.pad(s, (0, 0, 0, slots - s.shape[2])) for s in (keys, values))

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        block = self.block
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if block.width > cast(Tensor, self.keys).shape[2]:
            self._grow(block.width)
        keys, values = cast(Tensor, self.keys), cast(Tensor, self.values)
        if self.compiled and block.start is None:
            slots = block.slots_on(keys.device)
            if self.rows == 1:
                keys.index_copy_(2, slots[0], key_states)
                values.index_copy_(2, slots[0], value_states)
            else:
                rows = torch.arange(self.rows, device=keys.device)[:, None]
                keys[rows, :, slots] = key_states.transpose(1, 2)
                values[rows, :, slots] = value_states.transpose(1, 2)
            return keys, values
        if block.start is None:
            slots, rows = block.slots_on(keys.device), torch.arange(len(keys), device=keys.device)[:, None]
            keys[rows, :, slots] = key_states.transpose(1, 2)
            values[rows, :, slots] = value_states.transpose(1, 2)
        else:
            keys.narrow(2, block.start, key_states.shape[2]).copy_(key_states)
            values.narrow(2, block.start, key_states.shape[2]).copy_(value_states)
        return keys.narrow(2, 0, block.width), values.narrow(2, 0, block.width)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.block.width, 0

    def get_seq_length(self) -> int:
        return self.block.start or 0

    def get_max_length(self) -> int:
        return self.slots


class CachedModel:
    """A causal LM and the cache of some rows.

    Args:
        model: a model that `check_model` passes.
        rows: B, rows decoded together.
        max_length: tokens of a row at most.
        block: tokens fed in one forward at most, after the prompt; rejected ones need room behind the last length.
        compiled: run blocks through `torch.compile`, with static shapes.
        wants_hidden: keep in `hidden` what the head saw in the last forward.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        rows: int,
        max_length: int,
        block: int = 1,
        compiled: bool = False,
        wants_hidden: bool = False,
    ):
        self.model, self.compiled, self._rows = model, compiled, rows
        self.wants_hidden = wants_hidden
        self.hidden: Tensor | None = None
        """Of the positions whose logits the last forward returned, (B, keep, H)."""
        self._active: list[int] | None = None  # the rows that are left, where shapes are fixed
        config = model.config.get_text_config()
        slots = max_length + block
        if compiled:
            slots = -(-slots // COMPILED_SLOTS) * COMPILED_SLOTS
        self._block = _Block()
        self._layers = [_Layer(self._block, rows, slots, compiled) for _ in range(config.num_hidden_layers)]
        self.cache = Cache(layers=list(self._layers))
        self._dtype, self._device = model.dtype, model.device
        self._minimum = torch.finfo(model.dtype).min
        self._keeps = "logits_to_keep" in _parameters(model)
        self._types = sorted(set(getattr(config, "layer_types", None) or ()))
        self._window: int = getattr(config, "sliding_window", None) or 0
        self._slots, self._last = slots, max_length - 1
        self._range = torch.arange(slots, device=self._device)
        # Where tokens of a tree lie is not where they stand: windows are counted in positions.
        self._positions = torch.zeros(rows, slots, dtype=torch.long, device=self._device) if self._window else None
        self._causal: dict[int, Tensor] = {}
        self._rotary_limit = _rotary_limit(model)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was fed yet."""
        return not self._layers[0].is_initialized

    def prefill_texts(self, texts: Sequence[Tensor]) -> None:
        """Feed texts, B of (T_b,) int64, but for their last tokens, into an empty cache."""
        longest = max(map(len, texts))
        if longest > 1:
            self.prefill(padded(texts, longest)[:, :-1])

    def prefill(self, tokens: Tensor, keep: int = 1) -> Tensor:
        """Feed beginnings of texts, (B, T), padded on the right, into an empty cache.

        Returns:
            The logits of the last `keep` columns, (B, keep, V).
        """
        length = tokens.shape[1]
        self._check_rotary(length)
        self._block.start, self._block.width = 0, length
        positions = self._range[None, :length]
        if self._positions is not None:
            self._positions[:, :length] = positions
        return self._run(tokens, None, positions, keep, compiled=False)

    def feed(
        self,
        tokens: Tensor,
        starts: Sequence[int] | Places,
        keep: int | None = None,
        visible: Tensor | None = None,
        depths: Tensor | None = None,
    ) -> Tensor:
        """Feed a block of tokens to each row.

        Args:
            tokens: (B, K) int64; a row's own block may be shorter: what lies behind it is overwritten later.
            starts: for each row the slot of its first token; all slots before it are attended to.
            keep: return the logits of the last so many tokens; all K if None.
            visible: which of the last N ≥ K slots up to the block's end each token attends to, (K, N) or (B, K, N)
                bool; the slots before those are visible to all. Causal if None.
            depths: each token's position beyond its row's start, (K,) or (B, K); 0…K − 1 if None.

        Returns:
            (B, keep, V).
        """
        k = tokens.shape[1]
        places = starts if isinstance(starts, Places) else Places(starts, self._device)
        self._check_rotary(max(places.host) + k)
        if self._active is not None:
            tokens, places, visible, depths = self._spread(tokens, places.host, visible, depths)
        block, rows = self._block, len(places.host)
        block.start = places.host[0] if not self.compiled and places.alike else None
        block.width = self._slots if self.compiled else max(places.host) + k
        if block.start is not None:
            block.slots = self._range[block.start : block.start + k][None, :]
        else:
            block.slots = places.tensor[:, None] + self._range[:k]
        positions = block.slots if depths is None else block.slots[:, :1] + depths
        if self.compiled or block.width > self._last + 1:
            # Behind a row's own block, where another's is longer: learned positions may end with the length limit.
            positions = positions.clamp(max=self._last)
        if self._positions is not None:
            self._positions.scatter_(1, block.slots.expand(rows, k), positions.expand(rows, k))
        mask: Any = None
        if visible is not None or block.start is None or (depths is not None and self._window):
            mask = self._mask(visible, positions.expand(rows, k))
        elif k > 1 and not self._window:
            # Causal blocks at one length: the library's own mask would cost more than all the rest of the bookkeeping.
            if k not in self._causal:
                above = torch.full((1, 1, k, k), self._minimum, dtype=self._dtype, device=self._device).triu(1)
                self._causal[k] = above
            mask = self._by_type(torch.nn.functional.pad(self._causal[k], (block.start, 0)))
        logits = self._run(tokens, mask, positions, k if keep is None else keep)
        if self._active is None:
            return logits
        if self.hidden is not None:
            self.hidden = self.hidden[self._active]
        return logits[self._active]

    def keep_paths(self, starts: Places, paths: Sequence[Sequence[int]], sources: Tensor | None = None) -> None:
        """Move the accepted tokens of trees, entries `paths` of the blocks that began at `starts`, to behind the roots.

        They are in their places already where a path is 1, 2, 3, … .

        Args:
            starts: the slot of each row's root.
            paths: for each row the places of its accepted tokens in the block.
            sources: the same on the device, (B, D), where shorter paths go on as a chain does; None makes it.
        """
        if all(list(path) == list(range(1, len(path) + 1)) for path in paths):
            return
        depth = max(map(len, paths))
        if sources is None:
            chained = [[*path, *range(len(path) + 1, depth + 1)] for path in paths]
            sources = torch.tensor(chained, device=self._device)
        rows = torch.arange(len(paths), device=self._device) if self._active is None else self._active_rows
        # A block may end with the buffer: what is behind a path then stays where it is.
        first = starts.tensor[:, None]
        to = (first + self._range[1 : depth + 1]).clamp(max=self._slots - 1)
        source = (first + sources).clamp(max=self._slots - 1)
        for layer in self._written:
            keys, values = cast(Tensor, layer.keys), cast(Tensor, layer.values)
            index = rows[:, None].to(keys.device), slice(None), to.to(keys.device)
            moved = index[0], slice(None), source.to(keys.device)
            keys[index], values[index] = keys[moved], values[moved]
        if self._positions is not None:
            self._positions[rows[:, None], to] = to

    def select(self, rows: Sequence[int]) -> None:
        """Go on with some of the rows alone; in fixed shapes the others go on costing what they cost."""
        if self.compiled:
            active = list(range(self._rows)) if self._active is None else self._active
            self._active = [active[row] for row in rows]
            self._active_rows = torch.tensor(self._active, device=self._device)
            return
        for layer in self._written:
            layer.keys, layer.values = cast(Tensor, layer.keys)[rows], cast(Tensor, layer.values)[rows]
        if self._positions is not None:
            self._positions = self._positions[rows]

    @property
    def _written(self) -> list[_Layer]:
        """The layers with keys of their own: some models' last layers read an earlier one's (Gemma 3n, Gemma 4)."""
        return [layer for layer in self._layers if layer.is_initialized]

    def _check_rotary(self, length: int) -> None:
        """Look at the length of the first forward: later ones must not turn what is cached by other angles."""
        limit, self._rotary_limit = self._rotary_limit, None
        if limit is None or self._last < limit[1]:
            return
        kind, most = limit
        if kind == "dynamic" or length <= most:
            raise InputError(
                f"max_length: expected at most {most} tokens, beyond which {type(self.model).__name__}'s {kind} rotary "
                f"embedding changes what the cache holds, found {self._last + 1}"
            )

    def _spread(
        self, tokens: Tensor, starts: Sequence[int], visible: Tensor | None, depths: Tensor | None
    ) -> tuple[Tensor, Places, Tensor | None, Tensor | None]:
        """Put the rows that are left into a block for all rows."""
        all_starts, all_tokens = [0] * self._rows, tokens.new_zeros(self._rows, tokens.shape[1])
        all_tokens[self._active] = tokens
        for row, start in zip(cast(list[int], self._active), starts, strict=True):
            all_starts[row] = start
        spread: list[Tensor | None] = [visible, depths]
        for i, (given, shared) in enumerate(((visible, 2), (depths, 1))):
            if given is not None and given.ndim > shared:
                whole = given.new_zeros(self._rows, *given.shape[1:])
                whole[self._active] = given
                spread[i] = whole
        return all_tokens, Places(all_starts, self._device), spread[0], spread[1]

    def _mask(self, visible: Tensor | None, positions: Tensor) -> Any:
        """Return the additive mask of the block whose tokens have these positions, (B, 1, K, S), by layer type."""
        rows, k = positions.shape
        block_slots, width = self._block.slots, self._block.width
        slots = self._range[:width]
        if visible is None:
            allowed = (slots <= block_slots[:, :, None]).expand(rows, k, width)
        else:
            n = visible.shape[-1]
            base = (block_slots[:, :1] + k - n).clamp(min=0)  # rows that have ended lie at slot 0
            allowed = (slots < base[:, :, None]).expand(rows, k, width).clone()
            block = base + self._range[:n]
            allowed.scatter_(2, block[:, None, :].expand(rows, k, n), visible.expand(rows, k, n))
        full = self._additive(allowed)
        if self._positions is None:
            return self._by_type(full)
        near = positions[:, :, None] - self._positions[:, None, :width] < self._window
        return self._by_type(full, self._additive(allowed & near))

    def _additive(self, allowed: Tensor) -> Tensor:
        mask = torch.zeros(allowed.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(~allowed, self._minimum)[:, None]

    def _by_type(self, full: Tensor, windowed: Tensor | None = None) -> Any:
        """Hand out masks as the library's `create_masks_for_generate` does."""
        windowed = full if windowed is None else windowed
        if self._types:
            return {name: windowed if name == "sliding_attention" else full for name in self._types}
        return windowed

    def _run(self, tokens: Tensor, mask: Any, positions: Tensor, keep: int, compiled: bool | None = None) -> Tensor:
        inputs: dict[str, Any] = {"attention_mask": mask, "position_ids": positions}
        if keep < tokens.shape[1] and self._keeps:
            # A long prompt's logits over a large vocabulary would be the largest tensor of the whole run.
            inputs["logits_to_keep"] = keep
        inputs |= {"input_ids": tokens, "past_key_values": self.cache, "use_cache": True}
        if self.compiled if compiled is None else compiled:
            output = _compiled(self.model)(output_hidden_states=self.wants_hidden, **inputs)
            if self.wants_hidden:
                self.hidden = output.hidden_states[-1][:, -keep:]
                if self.hidden.ndim != 3:
                    raise InputError(
                        f"compiled: expected the last hidden states to be the head's input (B, T, H), found "
                        f"{self.hidden.ndim} dimensions in {type(self.model).__name__}: decode eagerly"
                    )
        elif self.wants_hidden:
            # Not `output_hidden_states`: a long prompt's would be kept of every layer.
            hook = self.model.get_output_embeddings().register_forward_pre_hook(self._see)
            try:
                output = self.model(**inputs)
            finally:
                hook.remove()
            self.hidden = cast(Tensor, self.hidden)[:, -keep:]
        else:
            output = self.model(**inputs)
        return output.logits[:, -keep:].to(self._device)

    def _see(self, head: Any, args: tuple[Tensor, ...]) -> None:
        self.hidden = args[0]


def padded(texts: Iterable[Tensor], width: int) -> Tensor:
    """Put token sequences of at most `width` tokens into one tensor, (B, width), with zeros on the right."""
    return torch.stack([torch.nn.functional.pad(t, (0, width - len(t))) if len(t) < width else t for t in texts])


def _rotary_limit(model: PreTrainedModel) -> tuple[str, int] | None:
    """Return the rope type and the length that its frequencies change at; None where they never do."""
    config = model.config.get_text_config()
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        kind = parameters.get("rope_type")
        if kind == "longrope":
            return kind, parameters["original_max_position_embeddings"]
        if kind == "dynamic":
            return kind, config.max_position_embeddings
    return None


def check_model(model: PreTrainedModel, role: str) -> None:
    """Refuse, by name, models that speculative decoding cannot roll back or does not apply to.

    Raises:
        InputError: the model carries a recurrent state, is an encoder or has one, has no cache, layers of unknown
            attention or no explicit positions, or runs an attention kernel that takes no mask.
    """
    name, config = type(model).__name__, model.config.get_text_config()
    if model.config.is_encoder_decoder:
        raise InputError(f"{role}: expected a decoder-only model, found the encoder-decoder {name}")
    if model._is_stateful:
        raise InputError(
            f"{role}: expected a model with a key-value cache, found {name}, whose recurrent state cannot drop "
            "rejected tokens"
        )
    unknown = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"})
    if unknown:
        raise InputError(f"{role}: expected full or sliding attention layers, found {', '.join(unknown)} in {name}")
    if "local" in (getattr(config, "attention_layers", None) or ()):  # GPT-Neo's, whose window it keeps to itself
        raise InputError(f"{role}: expected full or sliding attention layers, found local ones in {name}")
    if getattr(config, "alibi", False):
        raise InputError(f"{role}: expected positions by position_ids, found alibi in {name}")
    if config.model_type in UNFIT_TYPES:
        raise InputError(f"{role}: expected another model, found {name}, {UNFIT_TYPES[config.model_type]}")
    if config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False):
        raise InputError(f"{role}: expected causal attention, found {name} with is_decoder = False, an encoder")
    if "past_key_values" not in _parameters(model):
        raise InputError(f"{role}: expected a model with a key-value cache, found {name}, which has none")
    if "position_ids" not in _parameters(model):
        raise InputError(f"{role}: expected a model that takes position_ids, found {name}, which does not")
    attention = config._attn_implementation
    if attention not in ATTENTION:
        raise InputError(
            f"{role}: expected attn_implementation {' or '.join(ATTENTION)}, found {attention}, which takes no masks"
        )


@lru_cache(maxsize=64)
def _signature(cls: type) -> frozenset[str]:
    return frozenset(inspect.signature(cls.forward).parameters)  # type: ignore[attr-defined]


def _parameters(model: PreTrainedModel) -> frozenset[str]:
    cls: Any = type(model)
    return _signature(cls)


def _compiled(model: PreTrainedModel) -> Any:
    """Return the model's compiled forward, one for all callers: compiling takes longer than decoding.

    It is kept on the model, which it holds, so that both go together. A copy of the model has the attribute too, but
    wants a forward of its own.
    """
    of, forward = vars(model).get("_draftsmith_forward", (None, None))
    if of is None or of() is not model:
        # Each shape of a block is a specialisation of its own, and there are more of them than torch's limit of 8.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
        forward = torch.compile(model.forward, dynamic=False)
        vars(model)["_draftsmith_forward"] = weakref.ref(model), forward
    return forward


@torch.inference_mode()
def cached_numbers(model: PreTrainedModel) -> int | None:
    """Return how many numbers a cache holds for a token, by running a model; None where it has no keys and values.

    Args:
        model: any causal LM; one on the meta device is enough.
    """
    cache = DynamicCache()
    try:
        model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), past_key_values=cache, use_cache=True)
        layers: Any = cache.layers
        return sum(layer.keys.numel() + layer.values.numel() for layer in layers) or None
    except Exception:  # recurrent states, or a step that needs real values: `check_model` judges those
        return None
