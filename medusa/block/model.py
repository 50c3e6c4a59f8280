"""Block drafters: DFlash, DSpark, DFlash 2 and Domino.

A few decoder layers draft a whole block in one forward. They see the target's features of the text, fused to one state
for each token, and a block of slots: the embeddings of the text's last token, the anchor, and of S − 1 masks. Attention
inside the block goes both ways, except in layers with a window, which are causal (`BlockConfig.is_causal`). Every
layer's keys and values of the text are maps of the fused states, which no layer changes, so they are computed once,
when the target has seen a token.

DFlash (Chen et al. 2026) reads its guesses from the slots after the anchor. DSpark (DeepSpec, 2026) reads one from each
slot. A head (`draftsmith.medusa.block.heads`) can add to a guess's logits what the tokens drafted before it say.

Embedding and output head are the target's own, frozen, and not part of the drafter. With a cut vocabulary it uses only
these tokens' rows of the head.

Shape suffixes: B rows, T tokens of the text, N anchors, S slots, K guesses, F features, H hidden, R side states of
heads, V the target's vocabulary, D the drafter's.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen3Config
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RotaryEmbedding, rotate_half

from draftsmith.decode.cache.features import check_layers, decoder_layers
from draftsmith.decode.cache.kernels import computing_dtype
from draftsmith.decode.errors import InputError, at_least, at_most, require
from draftsmith.medusa.base import SLIDING, FeatureHeads, LayersConfig, Norm, check_distances, check_named, layer_fields
from draftsmith.medusa.block import heads
from draftsmith.medusa.block.heads.base import SideHead
from draftsmith.medusa.block.heads.dflash2 import Convolution
from draftsmith.medusa.target_states import KeysValues
from draftsmith.train.losses.output_head import OutputHead, head_of

LABELS = {"model_type", "auto_map", "torch_dtype", "_name_or_path", "rope_theta", "rope_scaling", "block_tree"}
"""Fields of config.json that have a reader of their own, or say what another one says too."""


class BlockConfig(LayersConfig, Qwen3Config):
    """The shape of a block drafter, in the names of DeepSpec (`Qwen3DSparkModel`), with the fields of its heads."""

    architecture = "Qwen3DSparkModel"

    draft_vocab_size: int = None  # type: ignore[assignment]
    """D, the drafter's vocabulary size; V if None is given."""
    block_size: int = 8
    """S, slots of a block."""
    target_layer_ids: list[int] = None  # type: ignore[assignment]
    """The target's layers whose outputs it sees, ascending, counted from 0."""
    num_target_layers: int = None  # type: ignore[assignment]
    mask_token_id: int = None  # type: ignore[assignment]
    """The token whose embedding is in the slots after the anchor."""
    anchor_guesses: bool = True
    """Whether the anchor's slot guesses the next token, as in DSpark; in DFlash it guesses nothing."""
    is_causal: bool | None = None
    """Whether slots see none after themselves; None is as in DFlash: they don't in layers of sliding_attention."""
    conv_kernel_size: int = 0
    """The taps of the convolutions around each sublayer (DFlash 2); 0 for none."""
    conv_group_size: int = 16
    """The channels that share the part of a convolution's kernel that depends on the slot."""
    base_model_name_or_path: str | None = None
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        self.draft_vocab_size = self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size
        fields = {name: value for head in heads.HEADS for name, value in head.fields.items()}
        self.use_sliding_window = self.sliding_window is not None  # or Qwen3's config would drop the size
        super().__post_init__(**{"architectures": [self.architecture], **fields, **kwargs})
        if all((kind == SLIDING) == self.is_causal for kind in self.layer_types or ()):
            self.is_causal = None

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Return the config from a file's fields; raise an InputError if there is one that ours do not have."""
        config = super().from_dict(config_dict, **kwargs)
        if name := cls.unknown(config_dict):
            raise InputError(f"{name}: expected a field of draftsmith's drafters, or none, found {config_dict[name]!r}")
        return config

    @classmethod
    def unknown(cls, config_dict: Mapping[str, Any], *others: str) -> str | None:
        """Return the first field that says something, and that neither our drafters nor `others` have."""
        known, fixed = {*LABELS, *others, *(field.name for field in fields(cls))}, dict[str, Any]()  # type: ignore[arg-type]
        for head in heads.HEADS:
            known |= set(head.fields)
            fixed |= head.foreign or {}
        # Nothing is said by what is false, empty, or the only value that ours can have.
        said = {name for name, value in config_dict.items() if value and name not in known and fixed.get(name) != value}
        return min(said, default=None)

    def causal(self, layer: int) -> bool:
        """Return whether a layer's slots see no slot after themselves."""
        return (self.layer_types or [])[layer] == SLIDING if self.is_causal is None else self.is_causal

    @property
    def guesses(self) -> int:
        """K, the number of tokens that a block drafts."""
        return self.block_size - (not self.anchor_guesses)

    @property
    def silent(self) -> int:
        """The number of slots that guess nothing, 0 or 1."""
        return self.block_size - self.guesses

    def check(self) -> "BlockConfig":
        """Return the config, or raise an InputError that names the first impossible field."""
        self.check_shape("num_hidden_layers")
        require(self, at_most(2**12), "num_hidden_layers")
        require(self, at_least(1 if self.anchor_guesses else 2) & at_most(256), "block_size")
        if self.is_causal not in (True, False, None):
            raise InputError(f"is_causal: expected true, false or null, found {self.is_causal!r}")
        if self.sliding_window is not None and self.sliding_window < self.block_size:
            raise InputError(
                f"sliding_window: expected at least the {self.block_size} slots of a block, found {self.sliding_window}"
            )
        Convolution.check(self)
        for head in heads.HEADS:
            require(self, at_least(0) & at_most(2**14), next(iter(head.fields)))
            if head.setting(self):
                head.check(self)
        if len(on := [title for title, side in heads.side_heads(self).items() if side]) > 1:
            raise InputError(f"heads: expected one that adds logits, found a {' and a '.join(on)}")
        if type(self.mask_token_id) is not int or not 0 <= self.mask_token_id < self.vocab_size:
            raise InputError(
                f"mask_token_id: expected a token below {self.vocab_size}, a row of the target's embedding, found "
                f"{self.mask_token_id!r}"
            )
        layers = self.target_layer_ids
        if not isinstance(layers, list) or not layers or not all(type(layer) is int for layer in layers):
            raise InputError(f"target_layer_ids: expected a list of layers, found {layers!r}")
        return self


def default_target_layers(layers: int, count: int) -> list[int]:
    """Return the target's layers, counted from 0, that a drafter of `count` layers sees, as in DFlash and DSpark.

    They are spread evenly from the second layer to the third from the end; for one layer it is the middle one. Shallow
    targets give fewer.
    """
    if count == 1 or layers < 5:
        return [layers // 2]  # also used if there are not enough layers to spread over
    return sorted({round(1 + i * (layers - 4) / (count - 1)) for i in range(count)})


Embed = Callable[[Tensor], Tensor]
"""The target's embedding of tokens."""
Attend = Callable[[Tensor, KeysValues], Tensor]
"""A function from the queries of slots, and the slots' keys and values, to attended values, (B, heads, Q, width)."""


class BlockAttention(nn.Module):
    """Qwen3's attention: the queries and keys of each head are normed."""

    def __init__(self, config: BlockConfig):
        super().__init__()
        heads, key_heads = config.num_attention_heads, config.num_key_value_heads or config.num_attention_heads
        width = self.head_dim = config.head_dim or config.hidden_size // heads
        size, bias = config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(size, heads * width, bias=bias)
        self.k_proj = nn.Linear(size, key_heads * width, bias=bias)
        self.v_proj = nn.Linear(size, key_heads * width, bias=bias)
        self.o_proj = nn.Linear(heads * width, size, bias=bias)
        self.q_norm, self.k_norm = (Norm(width, config.rms_norm_eps) for _ in range(2))

    def queries(self, states: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """Return queries of these positions, (B, heads, T, width)."""
        return rotate(self.q_norm(self._by_head(self.q_proj(states))).transpose(1, 2), rotation)

    def keys_values(self, states: Tensor, rotation: tuple[Tensor, Tensor]) -> KeysValues:
        """Return keys and values of these positions, (B, key-value heads, T, width) each."""
        keys = rotate(self.k_norm(self._by_head(self.k_proj(states))).transpose(1, 2), rotation)
        return KeysValues(keys, self._by_head(self.v_proj(states)).transpose(1, 2))

    def _by_head(self, projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (-1, self.head_dim))


def rotate(heads: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Return queries or keys, (B, heads, T, width), rotated to their positions; `rotation` is (B, T, width) twice."""
    cosines, sines = (part[:, None].to(heads.dtype) for part in rotation)
    return heads * cosines + rotate_half(heads) * sines


class BlockLayer(GradientCheckpointingLayer):
    """A decoder layer like Qwen3's over the slots of a block; the caller decides which keys they see."""

    def __init__(self, config: BlockConfig):
        super().__init__()
        self.self_attn, self.mlp = BlockAttention(config), Qwen3MLP(config)
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        for name in ("attention_conv", "mlp_conv"):
            self.register_module(name, Convolution(config) if config.conv_kernel_size else None)

    def forward(self, states: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """Return the layer's outputs for slots, (B, Q, H)."""

        def attention(normed: Tensor) -> Tensor:
            # Slots have queries, keys and values; the text has only keys and values (`context`).
            queries, own = self.self_attn.queries(normed, rotation), self.self_attn.keys_values(normed, rotation)
            return self.self_attn.o_proj(attend(queries, own).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

        def around(name: str, normed: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
            convolution: Any = getattr(self, name)
            return sublayer(normed) if convolution is None else convolution(normed, sublayer)

        states = states + around("attention_conv", self.input_layernorm(states), attention)
        return states + around("mlp_conv", self.post_attention_layernorm(states), self.mlp)


class BlockDrafter(FeatureHeads):
    """The layers of DFlash, DSpark, DFlash 2 and Domino; embedding and output head are the target's."""

    config_class = BlockConfig
    title, field, width, tokens = "a block drafter", "block", "hidden_size", "d2t"
    depths = "target_layer_ids"
    main_input_name = "states"
    supports_gradient_checkpointing = True
    # Its layers are not FSDP units, because their keys and values of the text are computed outside of their forwards.
    _no_split_modules = ["LMHead"]  # noqa: RUF012

    def __init__(self, config: BlockConfig):
        super().__init__(config.check())
        size, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(size * len(config.target_layer_ids), size, bias=False)
        self.hidden_norm, self.norm = Norm(size, eps), Norm(size, eps)
        self.layers = nn.ModuleList(BlockLayer(config) for _ in range(config.num_hidden_layers))
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        for head in heads.HEADS:
            made = head(config, heads.side_width(config)) if head.setting(config) else None
            self.register_module(head.name, made)
        cut = config.draft_vocab_size < config.vocab_size
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64) if cut else None)
        self.post_init()

    @classmethod
    def of_target(
        cls,
        target: PreTrainedModel,
        mask_token: int,
        layers: int = 1,
        token_map: Tensor | None = None,
        layer_ids: list[int] | None = None,
        **shape: Any,
    ) -> "BlockDrafter":
        """Return an untrained drafter with the target's sizes and random layers.

        Args:
            token_map: the target's ids that it may draft, (D,) int64; all if None.
            layer_ids: the target's layers that it sees, counted from 0; `default_target_layers` of two or more if None.
            **shape: further fields of `BlockConfig`, such as `block_size`, or of its heads.

        Raises:
            InputError: layers or tokens that the target does not have, or a target without rotary positions.
        """
        count = len(decoder_layers(target))
        depths = default_target_layers(count, max(2, layers)) if layer_ids is None else layer_ids
        check_layers([layer + 1 for layer in depths], count, "target_layer_ids")
        token_map = cls.sorted_tokens(target, token_map)
        fields = {
            **layer_fields(target, token_map),
            "target_layer_ids": list(depths),
            "num_target_layers": count,
            "mask_token_id": mask_token,
            "num_hidden_layers": layers,
        }
        drafter = cls(BlockConfig(**{**fields, **shape}))
        if token_map is not None:
            assert drafter.d2t is not None
            drafter.d2t.copy_(token_map - torch.arange(len(token_map), device=token_map.device))
        return drafter

    @property
    def cached_numbers(self) -> int:
        """The size of the layers' cache for a token, in numbers."""
        attention: Any = self.layers[0].self_attn
        return len(self.layers) * (attention.k_proj.out_features + attention.v_proj.out_features)

    @property
    def layer_ids(self) -> list[int]:
        """The depths of the target's features, ascending: the number of layers before each."""
        return [layer + 1 for layer in self.config.target_layer_ids]

    def check_tokens(self, field: str = "d2t", stored: Mapping[str, Tensor] | None = None) -> None:
        """Check the ids of `d2t`, and with the other tensors of its file that it holds distances."""
        super().check_tokens(field)
        ids, tensors = self.token_map, stored or {}
        if ids is None or self.d2t is None or ids.device.type == "meta":
            return
        if "t2d" in tensors:
            check_named(ids, tensors["t2d"].bool(), field)
        elif "lm_head.weight" not in tensors:  # a file's own head is compared with the target's rows instead
            check_distances(self.d2t, field)

    def head_for(self, target: PreTrainedModel) -> OutputHead:
        """Return the target's output head, with only the rows of the tokens that it may draft."""
        head, ids = head_of(target), self.token_map
        return head if ids is None else head.of(ids.to(head.weight.device))

    def fuse(self, features_BTF: Tensor) -> Tensor:
        """Return one state for each token, (B, T, H), from the target's features."""
        return self.hidden_norm(self.fc(features_BTF))

    def seen_slots(self, device: torch.device) -> Tensor:
        """Return which slots of a block each slot sees, (S, S) bool, in layers without a window."""
        seen_SS = torch.ones(self.config.block_size, self.config.block_size, dtype=torch.bool, device=device)
        return seen_SS.tril() if self.config.is_causal else seen_SS

    def block(self, anchors: Tensor, embed: Embed) -> Tensor:
        """Return the embeddings in the slots of blocks, (…, S, H); `anchors` are the tokens of the first slots, (…)."""
        slots = anchors[..., None].repeat_interleave(self.config.block_size, dim=-1)
        slots[..., 1:] = self.config.mask_token_id
        return self.embedded(slots, embed)

    def embedded(self, tokens: Tensor, embed: Embed) -> Tensor:
        """Return the target's embeddings of tokens, in the drafter's dtype and on its device."""
        return embed(tokens).to(self.norm.weight.device, computing_dtype(self.norm.weight))  # type: ignore[no-any-return]

    def forward(self, states: Tensor, positions: Tensor, attend: Callable[[int], Attend]) -> Tensor:
        """Return the output head's inputs for all slots of blocks, (B, Q, H).

        `states` are from `block`, (B, Q, H); `positions` are in the text, (B, Q); `attend` returns a layer's attention.
        """
        return self.hidden(states, positions, attend)

    def hidden(self, states: Tensor, positions: Tensor, attend: Callable[[int], Attend]) -> Tensor:
        """Run the layers over blocks, as `forward` does, for calls inside of a forward of the drafter."""
        # A nested forward would leave autocast on: accelerate enters the same context for both.
        rotation = self.rotary_emb(states, positions)
        for index, layer in enumerate(self.layers):
            states = layer(states, rotation, attend(index))
        return self.norm(states)

    def context(self, states: Tensor, positions: Tensor) -> list[KeysValues]:
        """Return each layer's keys and values of the text, from fused states, (B, T, H), and positions, (B or 1, T)."""
        rotation, layers = self.rotary_emb(states, positions), list[Any](self.layers)
        return [layer.self_attn.keys_values(states, rotation) for layer in layers]

    def guessing(self, hidden: Tensor) -> Tensor:
        """Return the slots that guess, (…, K, H), from all slots, (…, S, H)."""
        return hidden[..., self.config.silent :, :]  # DFlash's anchor slot guesses nothing

    @property
    def side_head(self) -> Any:
        """The `SideHead`, or None."""
        return next((head for head in self.children() if isinstance(head, SideHead)), None)

    @property
    def loss_map(self) -> nn.Module | None:
        """The map of the head that adds logits."""
        return None if self.side_head is None else self.side_head.out

    def read(self, before: Tensor, embed: Embed) -> Tensor:
        """Return what the head that adds logits sees of the tokens before guesses; `embed` is the target's."""
        head = self.side_head
        return before if head is None or not head.embeds else self.embedded(before, embed)

    def sides(self, hidden: Tensor, before: Tensor, embed: Embed) -> Tensor | None:
        """Return side states of the first slots' guesses, (…, J or J − 1, R), or None without a head that adds logits.

        `hidden` are all slots' states, (…, S, H); `before` the tokens before the first slots, (…, J) int64.
        """
        head = self.side_head
        return None if head is None else self.guessing(head.forced(hidden, self.read(before, embed)))

    def head_states(self, hidden: Tensor, before: Tensor, embed: Embed) -> Tensor:
        """Return the inputs of `whole_head` for all guesses, (…, K, H + R); (…, K, H) without a head that adds logits.

        `hidden` are all slots' states, (…, S, H); `before` the token before each slot's, (…, S) int64.
        """
        side, guessing = self.sides(hidden, before, embed), self.guessing(hidden)
        return guessing if side is None else torch.cat([guessing, side.to(hidden.dtype)], dim=-1)

    def whole_head(self, head: OutputHead) -> OutputHead:
        """Return the target's head of the drafted tokens, with `SideHead.out` next to it.

        So the logits of guesses are one linear map of `head_states`, and losses need not know the head; but a head with
        `candidates` also takes the other tokens away.
        """
        side_head = self.side_head
        return head if side_head is None else replace(head, side_weight=side_head.out.weight)

    def confidence(self, hidden: Tensor, before: Tensor, embed: Embed) -> Tensor:
        """Return the logit of each guess's acceptance, if those before it were accepted (DSpark), as many as `sides`.

        It depends on the tokens before the guess but not on the guess, so cutting drafts by it is lossless. Arguments
        are those of `sides`.
        """
        head: Any = self.confidence_head
        side = self.sides(hidden, before, embed) if head.sees_side else None
        return head.logits(self.guessing(hidden[..., : before.shape[-1], :]), side)

    def logits(self, hidden: Tensor, side: Tensor | None, head: OutputHead) -> Tensor:
        """Return the logits of guesses over the D tokens, (…, D), from their states and side states, (…, R)."""
        projected = head.project(hidden.to(head.weight.dtype))  # the target may be in another dtype
        if side is None:
            return head.finish(projected)
        side_head = self.side_head
        if side_head.candidates is None:
            return head.finish(projected + side_head.out(side))
        plain, tokens = projected.topk(side_head.candidates)
        # All rows of the map: programs pack its weight, and no row of it could be read alone.
        chosen = head.finish(plain + side_head.out(side).gather(-1, tokens))
        nothing = chosen.new_full((*chosen.shape[:-1], projected.shape[-1]), -torch.inf)
        return nothing.scatter(-1, tokens, chosen)
