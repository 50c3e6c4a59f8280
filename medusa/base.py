"""The base of all drafting heads: loading, the tokens that they may draft, and checks that they fit a target.

Shape suffixes: V the target's vocabulary, D the tokens that heads may draft.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.utils import logging

from draftsmith.decode.cache import positions_of
from draftsmith.decode.cache.features import check_layers, decoder_layers
from draftsmith.decode.cache.kernels import computing_dtype
from draftsmith.decode.errors import SIZE, InputError, at_least, at_most, finite, more_than, require
from draftsmith.train.checkpoint import check_rope, check_rope_keys, load_heads, reading_errors, require_config
from draftsmith.train.losses.output_head import head_of

logger = logging.get_logger(__name__)

SPREAD = 0.5
"""The largest standard deviation σ of a random layer's logits: its loss is σ²/2 nats above the uniform one."""
MIN_IDS = 8
"""With fewer entries `check_distances` cannot tell ids from distances."""
WINDOWS = ("layer_types", "use_sliding_window", "sliding_window", "max_window_layers")
FULL, SLIDING = "full_attention", "sliding_attention"


class LMHead(nn.Linear):
    """A linear map to logits; sharded training wraps it by this class name."""


class Norm(LlamaRMSNorm):
    """Llama's norm, with its output in the dtype that the next map computes in."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the normed hidden states, (…, H)."""
        # Under autocast the library's norm returns float32, and the backward keeps a copy for each map after it.
        return super().forward(hidden_states).to(computing_dtype(self.weight))


@torch.no_grad()
def begin_nearly_uniform(norm: nn.Module, rows: Tensor, most: float = SPREAD) -> None:
    """Scale the norm before the output head, so that random layers draft from a nearly uniform distribution.

    Their logits' standard deviation is then `most` at most. The head's rows, (D, H), are the target's: otherwise the
    first loss would be far above that of a uniform distribution.
    """
    spread = rows.float().square().sum(-1).mean().sqrt()
    # A normed state has entries of about 1, so its logits spread by the length of a row.
    cast(Tensor, norm.weight).div_((spread / most).clamp(min=1.0))


class NamedConfig(PretrainedConfig):
    """A config that is saved with the architecture that servers look for, not with our class's name."""

    architecture: ClassVar[str]

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """Save as the library does, with this architecture."""
        self.architectures = [self.architecture]
        super().save_pretrained(*args, **kwargs)


def windows_of(raw: Mapping[str, Any], layers: int, positions: int) -> dict[str, Any]:
    """Return `layer_types` and `sliding_window` from a config.json, or raise an InputError if its fields contradict."""
    size, kinds, used = raw.get("sliding_window"), raw.get("layer_types"), raw.get("use_sliding_window")
    if kinds is None:
        # Older configs of Qwen have a window that `use_sliding_window` turns off, or that begins after the last layer;
        # older ones of Mistral have a window if they name its size. A window of all positions is none.
        first = raw.get("max_window_layers")
        after_all = type(first) is int and first >= layers
        if used is not False and not after_all and type(size) is int and size < positions:
            raise InputError(f"sliding_window: expected layer_types that say which layers have it, found {size} alone")
        kinds = []
    if all(kind == FULL for kind in kinds):  # perhaps as many as the target has
        kinds = [FULL] * layers
    if used is False and SLIDING in kinds:
        raise InputError("use_sliding_window: expected true with layers of sliding_attention, found false")
    return {"layer_types": kinds, "sliding_window": size if SLIDING in kinds else None}


class LayersConfig(NamedConfig):
    """A config of decoder layers: a file may describe rotation and attention in several fields."""

    if TYPE_CHECKING:
        max_position_embeddings: int
        vocab_size: int
        draft_vocab_size: int
        num_attention_heads: int
        num_key_value_heads: int | None
        num_hidden_layers: int

    layer_types: list[str] | None = None
    """For each layer full_attention or sliding_attention; None is the latter for all layers if there is a window."""
    sliding_window: int | None = None
    """The window: how many positions layers of sliding_attention see, the query's own included."""

    def __post_init__(self, **kwargs: Any) -> None:
        if self.layer_types is None:
            self.layer_types = [FULL if self.sliding_window is None else SLIDING] * self.num_hidden_layers
        super().__post_init__(**kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Return the config from a file's fields; raise an InputError if they contradict each other, or are foreign."""
        if named := config_dict.get("speculators_model_type"):
            raise InputError(f"a file of speculators ({named}): import it first, by export --import_from")
        check_rope_keys(config_dict)  # the library would silently take one of two contradictory fields
        check_rope(config_dict)
        layers = config_dict.get("num_hidden_layers", cls.num_hidden_layers)
        positions = config_dict.get("max_position_embeddings") or cls.max_position_embeddings
        windows = windows_of(config_dict, layers, positions)
        return super().from_dict({k: v for k, v in config_dict.items() if k not in WINDOWS} | windows, **kwargs)

    def window_of(self, layer: int) -> int | None:
        """Return the positions that a layer sees, the query's own included; None for all before it."""
        return self.sliding_window if (self.layer_types or [FULL])[layer] == SLIDING else None

    @property
    def windows(self) -> str:
        """A clause for users that names the layers' window, empty without one."""
        kinds = self.layer_types or []
        layers = "" if FULL not in kinds else f" in {kinds.count(SLIDING)} of {len(kinds)} layers"
        return f", a window of {self.sliding_window} positions{layers}" if SLIDING in kinds else ""

    def check_shape(self, *sizes: str) -> None:
        """Raise an InputError that names the first impossible field; `sizes` are the subclass's own ones."""
        sizes = ("hidden_size", "vocab_size", "draft_vocab_size", "intermediate_size", *sizes)
        for allowed in (at_least(1), SIZE):
            require(self, allowed, *sizes, "num_attention_heads", "num_key_value_heads", "head_dim")
        require(self, at_most(2**12), "num_attention_heads", "head_dim")
        require(self, at_least(1) & at_most(2**40), "max_position_embeddings")
        require(self, finite(more_than(0)), "rms_norm_eps")
        kinds, window, count = self.layer_types or [], self.sliding_window, self.num_hidden_layers
        if others := [kind for kind in kinds if kind not in (FULL, SLIDING)]:
            raise InputError(f"layer_types: expected layers of {FULL} or {SLIDING}, found {others[0]}")
        if len(kinds) != count:
            raise InputError(f"layer_types: expected one for each of {count} layers, found {len(kinds)}")
        if SLIDING in kinds:
            if type(window) is not int:
                raise InputError(
                    f"sliding_window: expected the size of the window of {SLIDING}, found {window or 'none'}"
                )
            require(self, at_least(1), "sliding_window")
        queries, keys = self.num_attention_heads, self.num_key_value_heads or self.num_attention_heads
        if queries % keys:
            raise InputError(f"num_key_value_heads: expected a divisor of {queries} heads, found {keys}")
        rope: dict[str, Any] = cast(Any, self).rope_parameters
        if layers := [kind for kind, fields in rope.items() if isinstance(fields, Mapping)]:
            raise InputError(f"rope_parameters: expected one rotation for all layers, found one for {layers[0]}")
        if (kind := rope["rope_type"]) not in FIXED:
            raise InputError(f"rope_type: expected {FIXED_ONES}, found {kind}")
        if self.draft_vocab_size > self.vocab_size:
            raise InputError(
                f"draft_vocab_size: expected at most the vocabulary's {self.vocab_size} tokens, found "
                f"{self.draft_vocab_size}"
            )


FIXED = ("default", "linear", "llama3", "yarn")
"""The types of rotations whose angles depend on the position alone; others change with the text's length."""
FIXED_ONES = f"angles that don't change with the text's length ({', '.join(FIXED)})"
THETA, HEAD, POSITIONS = 10_000.0, 64, 2**17
"""The rope_theta, the width of an attention head and the positions of heads where a target has none."""


def rope_of(config: PretrainedConfig) -> dict[str, Any]:
    """Return the last layer's rotary positions as `rope_parameters` of whole heads, or raise an InputError.

    Heads get a default rotation where the target has none, or one whose angles change with the text's length, which
    servers do by other rules than the library. A warning names it.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    if not rope:
        text = "target: %s has no rotary positions; those of the heads have rope_theta %g"
        logger.warning(text, config.model_type, THETA)
        return {"rope_type": "default", "rope_theta": THETA}
    if "rope_theta" not in rope:  # a family whose kinds of layers rotate by different angles, or not at all
        kind = (getattr(config, "layer_types", None) or [None])[-1]
        rope = rope.get(kind) or next((values for values in rope.values() if isinstance(values, dict)), {})
    if "rope_theta" not in rope:
        raise InputError(
            f"target: expected a rope_theta in the config's rope_parameters, found none ({config.model_type})"
        )
    if (kind := rope.get("rope_type", "default")) not in FIXED:
        text = "target: %s has %s rotary positions; those of the heads have rope_theta %g alone"
        logger.warning(text, config.model_type, kind, rope["rope_theta"])
        return {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    return {name: value for name, value in rope.items() if name != "partial_rotary_factor"}


def layer_fields(target: PreTrainedModel, token_map: Tensor | None) -> dict[str, Any]:
    """Return the fields of a `LayersConfig` with the target's sizes, for drafts of the tokens in `token_map`."""
    layers = target.config.get_text_config().per_layer_config
    text, (vocab_size, hidden_size) = layers[-1], head_of(target).weight.shape
    inner = getattr(text, "intermediate_size", None) or 4 * hidden_size
    # A target without attention, such as Mamba, has no head width to copy: ours is about `HEAD`.
    attends = getattr(text, "num_attention_heads", None) is not None
    heads = text.num_attention_heads if attends else max(1, hidden_size // HEAD)
    return {
        "hidden_size": hidden_size,
        "vocab_size": vocab_size,
        "draft_vocab_size": vocab_size if token_map is None else len(token_map),
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(text, "num_key_value_heads", None) or heads,
        # Gemma 4 has two widths, and kernels for the greater one, 512, are few and slow.
        "head_dim": (attends and min(getattr(layer, "head_dim", None) or 0 for layer in layers))
        or hidden_size // heads,
        # Gemma 3n has a size for each layer.
        "intermediate_size": inner[-1] if isinstance(inner, list | tuple) else inner,
        "max_position_embeddings": positions_of(text) or POSITIONS,
        "rms_norm_eps": getattr(text, "rms_norm_eps", 1e-6),
        "rope_parameters": rope_of(text),
    }


class DraftingHeads(PreTrainedModel):
    """Heads that draft for a target, which stays an ordinary model outside of them.

    `save_pretrained`, `from_pretrained` and `push_to_hub` are the library's, in safetensors.
    """

    base_model_prefix = ""
    title: ClassVar[str]
    """Their name in messages."""
    field: ClassVar[str]
    """The option that names them."""
    width: ClassVar[str]
    """The field of their config that holds the target's hidden size."""
    tokens: ClassVar[str]
    """The tensor that lists the tokens that they may draft."""
    begins_with: ClassVar[str]
    """The target's states that unrolled rounds begin with: a field of `TargetStates`."""

    if TYPE_CHECKING:

        @property
        def token_map(self) -> Tensor | None:
            """The target's ids that they may draft, (D,) int64; None where they may draft all."""

    @property
    def layer_ids(self) -> list[int]:
        """The depths of the target's features that they see, ascending: the number of layers before each."""
        return []

    @property
    def loss_map(self) -> nn.Module | None:
        """The map whose weight a loss reads inside of its forward; None for heads that use the target's head alone."""
        return None

    @classmethod
    def from_pretrained(cls, path: str | Path, *args: Any, **kwargs: Any) -> Self:  # type: ignore[override]
        """Load heads that `save_pretrained` wrote; raise an InputError if a part is missing, damaged or wrong."""
        heads: Self = load_heads(cls, super().from_pretrained, path, cls.title, *args, **kwargs)
        heads.check_tokens(f"{path}: {cls.tokens}")
        return heads

    @classmethod
    def without_weights(cls, path: str | Path) -> Self:
        """Return heads on the meta device, in the shape of a directory's config.json, or raise an InputError."""
        require_config(path, cls.title)
        with reading_errors(str(path), f"{cls.title} (config.json)"):
            config = cls.config_class.from_pretrained(path)  # type: ignore[union-attr]
        with reading_errors(str(path), f"a config of {cls.title}"), torch.device("meta"):
            return cls(config)

    def get_input_embeddings(self) -> None:  # type: ignore[override]
        """Return None: the embeddings that heads see are the target's."""
        return None

    def check_tokens(self, field: str, stored: Mapping[str, Tensor] | None = None) -> None:
        """Raise an InputError that names the field unless the ids that they may draft are distinct and below V.

        For another tool's file `stored` has all of its tensors, for subclasses that check some of them.
        """
        ids = self.token_map
        if ids is not None and ids.device.type != "meta":
            check_ids(ids, self.config.vocab_size, field)

    def check_fits(self, target: PreTrainedModel) -> None:
        """Raise an InputError if the target's hidden size or vocabulary is not the one that they were made for."""
        vocab_size, hidden_size = head_of(target).weight.shape
        for name, found, expected in (
            ("hidden_size", getattr(self.config, self.width), hidden_size),
            ("vocab_size", self.config.vocab_size, vocab_size),
        ):
            if found != expected:
                raise InputError(f"{self.field}: expected heads with the target's {name} {expected}, found {found}")

    def widened(self, logits: Tensor) -> Tensor:
        """Return logits over the target's vocabulary, (…, V), from logits over the heads' vocabulary, (…, D)."""
        ids = self.token_map
        if ids is None:
            return logits
        # The target's other tokens are never drafted.
        wide = logits.new_full((*logits.shape[:-1], self.config.vocab_size), float("-inf"))
        wide[..., ids] = logits
        return wide


class FeatureHeads(DraftingHeads):
    """Heads on the features of some of the target's layers.

    Where D < V, the buffer `d2t`, (D,) int64, holds each drafted id's distance to the target's id.
    """

    depths: ClassVar[str]
    """The field of their config that names the target's layers."""
    d2t: Tensor | None

    @property
    def token_map(self) -> Tensor | None:
        """The target's ids that they may draft, ascending, (D,) int64; None where they may draft all."""
        return None if self.d2t is None else self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def check_fits(self, target: PreTrainedModel) -> None:
        """Raise an InputError if the target's width, vocabulary or number of layers does not fit."""
        super().check_fits(target)
        check_layers(self.layer_ids, len(decoder_layers(target)), self.depths)

    @staticmethod
    def sorted_tokens(target: PreTrainedModel, token_map: Tensor | None) -> Tensor | None:
        """Return checked ids of a draft vocabulary, ascending; None for the whole vocabulary."""
        vocab_size = len(head_of(target).weight)
        if token_map is None:
            return None
        check_ids(token_map, vocab_size, "token_map")
        return None if len(token_map) == vocab_size else token_map.sort().values


def check_ids(ids: Tensor, vocab_size: int, field: str) -> None:
    """Raise an InputError if ids of a draft vocabulary are out of range or not distinct."""
    if bool(((ids < 0) | (ids >= vocab_size)).any()) or len(ids.unique()) != len(ids):
        raise InputError(f"{field}: expected different ids below {vocab_size}, found others")


def check_named(ids: Tensor, t2d: Tensor, field: str) -> None:
    """Raise an InputError unless `t2d`, (V,) bool, is true at the ids of a draft vocabulary alone."""
    if not torch.equal(t2d.nonzero()[:, 0], ids.sort().values):
        raise InputError(f"{field}: expected the tokens that t2d names, found others")


def drop_whole_maps(directory: Path, config: Any, tensors: dict[str, Tensor]) -> None:
    """Drop `d2t` and `t2d` of a whole vocabulary, which other tools store; InputError unless they are the identity."""
    if config.draft_vocab_size == config.vocab_size and (d2t := tensors.pop("d2t", None)) is not None:
        if d2t.any():
            raise InputError(f"{directory}: expected a d2t of zeros with the whole vocabulary, found another")
        tensors.pop("t2d", None)


def check_distances(d2t: Tensor, field: str) -> None:
    """Raise an InputError if `d2t`, (D,), holds ids in place of distances; for files without a `t2d`."""
    # Distances are equal where ids are consecutive, as some are in each useful vocabulary.
    if len(d2t) >= MIN_IDS and bool((d2t.diff() > 0).all()):
        raise InputError(
            f"{field}: expected each id's distance to its place, found numbers that always grow, as ids do"
        )
