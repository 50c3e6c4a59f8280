"""EAGLE-3 heads: one decoder layer that drafts from the target's features, or from its own last state.

EAGLE-3 (Li et al. 2025, arXiv 2503.01840, section 3): at place i the layer sees the embedding of token i + 1 beside a
state of token i, and guesses token i + 2. The state is `fuse`d from the target's features of token i where the target
has seen that token; of a drafted token it is what the layer itself gave at the place before. What it gives is bound to
no feature of the target's, so it may be trained through many such steps (the training-time test).

Shape suffixes: B rows, T places, S places with keys, F features, H hidden, V the target's vocabulary, D the heads'.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from draftsmith.decode.cache.features import check_layers, decoder_layers, default_layers
from draftsmith.decode.cache.kernels import fused_attention
from draftsmith.decode.errors import SIZE, InputError, at_least, at_most, finite, more_than, require
from draftsmith.medusa.base import DraftingHeads, LayersConfig, LMHead, Norm, check_ids, check_named
from draftsmith.medusa.seen import KeysValues, rope_of
from draftsmith.train.losses.output_head import OutputHead, head_of

TREE = "eagle_tree"
"""The key of the config that holds the tree that was searched for heads, as choices: see `Tree.from_choices`."""


class EagleConfig(LayersConfig, LlamaConfig):
    """The shape of the heads, in the names that vLLM, SGLang and SpecForge read (`LlamaForCausalLMEagle3`)."""

    architecture = "LlamaForCausalLMEagle3"

    draft_vocab_size: int = None  # type: ignore[assignment]
    """D, tokens that the heads can draft; V if None is given."""
    target_hidden_size: int = None  # type: ignore[assignment]
    """The width of the target's hidden states; `hidden_size` if None is given."""
    eagle_aux_hidden_state_layer_ids: list[int] = None  # type: ignore[assignment]
    """After how many of the target's layers its features are taken, ascending."""
    norm_before_residual: bool = False
    """Whether the residual path around attention begins behind the state's norm, or before."""
    norm_before_fc: bool = False
    """Whether features are normed together before they are fused."""
    fc_norm: bool = False
    """Whether each depth's features are normed before they are fused."""
    norm_output: bool = False
    """Whether the next step sees the state behind the last norm, or before."""
    base_model_name_or_path: str | None = None
    """The target that they were trained on."""
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        self.draft_vocab_size = self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size
        self.target_hidden_size = self.hidden_size if self.target_hidden_size is None else self.target_hidden_size
        super().__post_init__(**{"architectures": [self.architecture], **kwargs})

    def check(self) -> "EagleConfig":
        """Return the config, or raise an InputError that names the first field that cannot be."""
        sizes = ("hidden_size", "target_hidden_size", "vocab_size", "draft_vocab_size", "intermediate_size")
        for allowed in (at_least(1), SIZE):
            require(self, allowed, *sizes, "num_attention_heads", "num_key_value_heads", "head_dim")
        require(self, at_most(2**12), "num_attention_heads", "head_dim")
        require(self, at_least(1) & at_most(2**40), "max_position_embeddings")
        require(self, finite(more_than(0)), "rms_norm_eps")
        queries, keys = self.num_attention_heads, self.num_key_value_heads or self.num_attention_heads
        if queries % keys:
            raise InputError(f"num_key_value_heads: expected a divisor of {queries} heads, found {keys}")
        if self.num_hidden_layers != 1:
            raise InputError(f"num_hidden_layers: expected 1, found {self.num_hidden_layers}")
        if self.draft_vocab_size > self.vocab_size:
            raise InputError(
                f"draft_vocab_size: expected at most the vocabulary's {self.vocab_size} tokens, found "
                f"{self.draft_vocab_size}"
            )
        depths = self.eagle_aux_hidden_state_layer_ids
        if not isinstance(depths, list) or not depths or not all(type(depth) is int for depth in depths):
            raise InputError(f"eagle_aux_hidden_state_layer_ids: expected a list of depths, found {depths!r}")
        return self


class EagleAttention(nn.Module):
    """Llama's attention, whose queries, keys and values see an embedding and a state, 2H wide."""

    def __init__(self, config: EagleConfig):
        super().__init__()
        heads, key_heads = config.num_attention_heads, config.num_key_value_heads or config.num_attention_heads
        self.head_dim: int = config.head_dim or config.hidden_size // heads
        queries, keys = heads * self.head_dim, key_heads * self.head_dim
        seen, bias = 2 * config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(seen, queries, bias=bias)
        self.k_proj = nn.Linear(seen, keys, bias=bias)
        self.v_proj = nn.Linear(seen, keys, bias=bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=bias)

    def project(self, seen_BTE: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, KeysValues]:
        """Return queries, (B, heads, T, width), and keys and values of these places alone, rotated to them."""
        queries, keys, values = (
            project(seen_BTE).unflatten(-1, (project.out_features // self.head_dim, self.head_dim)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        queries, keys = apply_rotary_pos_emb(queries, keys, *rotation)
        return queries, KeysValues(keys, values)


Attend = Callable[[Tensor, KeysValues], Tensor]
"""From queries, and keys and values of the same places, to what they attend to, (B, heads, T, width)."""


def attention(before: KeysValues | None, mask: Tensor | None) -> Attend:
    """Return the attention of places that see others before them, and themselves.

    Args:
        before: keys and values of other places, which come first.
        mask: to add to the scores, or True where a query sees a key, (B or 1, 1, T, S); None: each place sees itself
            and those before.
    """

    def attend(queries: Tensor, current: KeysValues) -> Tensor:
        seen = (
            current
            if before is None
            else KeysValues(*(torch.cat(pair, 2) for pair in zip(before, current, strict=True)))
        )
        return fused_attention(queries, *seen, mask, is_causal=mask is None)

    return attend


class EagleLayer(GradientCheckpointingLayer):
    """The decoder layer; the caller says which keys are seen."""

    def __init__(self, config: EagleConfig):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm, self.hidden_norm = Norm(size, eps), Norm(size, eps)
        self.post_attention_layernorm = Norm(size, eps)
        self.self_attn, self.mlp = EagleAttention(config), LlamaMLP(config)

    def forward(
        self,
        embeddings_BTH: Tensor,
        states_BTH: Tensor,
        rotation: tuple[Tensor, Tensor],
        attend: Attend,
    ) -> tuple[Tensor, KeysValues]:
        """Return the layer's output, (B, T, H), and the keys and values of these places alone."""
        normed = self.hidden_norm(states_BTH)
        residual = normed if self.norm_before_residual else states_BTH
        seen_BTE = torch.cat([self.input_layernorm(embeddings_BTH), normed], dim=-1)
        queries, current = self.self_attn.project(seen_BTE, rotation)
        hidden = residual + self.self_attn.o_proj(attend(queries, current).transpose(1, 2).flatten(2))
        return hidden + self.mlp(self.post_attention_layernorm(hidden)), current


class Step(NamedTuple):
    """What one step of the heads gives."""

    states: Tensor
    """What the next step sees in place of features, (B, T, H)."""
    hidden: Tensor
    """What the language-model head sees, (B, T, H)."""
    own: KeysValues
    """Of these places alone."""


class EagleHeads(DraftingHeads):
    """The draft of EAGLE-3, which sees the target's embeddings besides.

    Its tensors have the names of the EAGLE authors. `d2t`, (D,) int64, is each drafted id's distance to the target's
    id, and `t2d`, (V,) bool, says which of the target's tokens the heads know; both are there where D < V.
    """

    config_class = EagleConfig
    title, field, width, tokens = "EAGLE-3 heads", "eagle", "target_hidden_size", "d2t"
    main_input_name = "states"
    supports_gradient_checkpointing = True
    _no_split_modules = ["EagleLayer", "LMHead"]  # noqa: RUF012

    def __init__(self, config: EagleConfig):
        super().__init__(config.check())
        depths = len(config.eagle_aux_hidden_state_layer_ids)
        wide, eps = config.target_hidden_size * depths, config.rms_norm_eps
        if config.norm_before_fc:
            self.input_norm = Norm(wide, eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(Norm(config.target_hidden_size, eps) for _ in range(depths))
        self.fc = nn.Linear(wide, config.hidden_size, bias=False)
        self.midlayer = EagleLayer(config)
        self.norm = Norm(config.hidden_size, eps)
        self.lm_head = LMHead(config.hidden_size, config.draft_vocab_size, bias=False)
        self.rotary = LlamaRotaryEmbedding(config)
        cut = config.draft_vocab_size < config.vocab_size
        self.d2t: Tensor | None
        self.t2d: Tensor | None
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64) if cut else None)
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool) if cut else None)
        self.post_init()

    @classmethod
    def of_target(
        cls,
        target: PreTrainedModel,
        token_map: Tensor | None = None,
        layer_ids: list[int] | None = None,
        **shape: Any,
    ) -> "EagleHeads":
        """Return untrained heads for a target: its head's rows, and a layer of its sizes with random weights.

        Args:
            target: a causal LM.
            token_map: ids of the target's that the heads may draft, ascending, (D,) int64; all if None.
            layer_ids: after how many layers features are taken; `default_layers` if None.
            **shape: further fields of `EagleConfig`, such as `intermediate_size` or `norm_output`.

        Raises:
            InputError: depths that the target does not have, a token map with an id twice or beyond the vocabulary, or
                a target without rotary positions.
        """
        head, text = head_of(target), target.config.get_text_config()
        vocab_size, hidden_size = head.weight.shape
        layers = len(decoder_layers(target))
        depths = default_layers(layers) if layer_ids is None else layer_ids
        check_layers(depths, layers, "layer_ids")
        if token_map is not None:
            check_ids(token_map, vocab_size, "token_map")
            token_map = None if len(token_map) == vocab_size else token_map.sort().values
        heads, inner = text.num_attention_heads, getattr(text, "intermediate_size", None) or 4 * hidden_size
        fields = {
            "hidden_size": hidden_size,
            "vocab_size": vocab_size,
            "draft_vocab_size": vocab_size if token_map is None else len(token_map),
            "eagle_aux_hidden_state_layer_ids": list(depths),
            "num_hidden_layers": 1,
            "num_attention_heads": heads,
            "num_key_value_heads": getattr(text, "num_key_value_heads", None) or heads,
            "head_dim": getattr(text, "head_dim", None) or hidden_size // heads,
            "intermediate_size": inner[-1] if isinstance(inner, list | tuple) else inner,
            "max_position_embeddings": text.max_position_embeddings,
            "rms_norm_eps": getattr(text, "rms_norm_eps", 1e-6),
            "rope_parameters": rope_of(text),
        }
        made = cls(EagleConfig(**{**fields, **shape}))
        with torch.no_grad():
            rows = head.weight if token_map is None else head.weight[token_map.to(head.weight.device)]
            made.lm_head.weight.copy_(rows)
        if token_map is not None:
            made.set_tokens(token_map)
        return made

    @property
    def cached_numbers(self) -> int:
        """How many numbers the cache of the layer holds for a token."""
        attention = self.midlayer.self_attn
        return attention.k_proj.out_features + attention.v_proj.out_features

    @property
    def layer_ids(self) -> list[int]:
        """After how many of the target's layers its features are taken, ascending."""
        return self.config.eagle_aux_hidden_state_layer_ids

    @property
    def token_map(self) -> Tensor | None:
        """The target's ids that the heads may draft, ascending, (D,) int64; None where they may draft all."""
        return None if self.d2t is None else self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def set_tokens(self, token_map: Tensor) -> None:
        """Say which of the target's ids the heads may draft, ascending, (D,) int64, each once."""
        assert self.d2t is not None and self.t2d is not None
        ids = token_map.to(self.d2t.device)
        self.d2t.copy_(ids - torch.arange(len(ids), device=ids.device))
        self.t2d.zero_()[ids] = True

    def check_tokens(self, field: str = "d2t") -> None:
        """Check `d2t` as ids of all heads are, and that `t2d` names the same tokens."""
        super().check_tokens(field)
        ids = self.token_map
        if ids is None or self.t2d is None or ids.device.type == "meta":
            return
        check_named(ids, self.t2d, field)

    def check_fits(self, target: PreTrainedModel) -> None:
        """Raise an InputError where a target has another width, vocabulary or fewer layers than the heads need."""
        super().check_fits(target)
        check_layers(self.layer_ids, len(decoder_layers(target)), "eagle_aux_hidden_state_layer_ids")

    @property
    def head(self) -> OutputHead:
        """The map from `Step.hidden` to logits over the heads' vocabulary, (D, H)."""
        return OutputHead(self.lm_head.weight)

    def fuse(self, features_BTF: Tensor) -> Tensor:
        """Return states, (B, T, H), of the target's features of these places."""
        config = self.config
        if config.norm_before_fc:
            features_BTF = self.input_norm(features_BTF)
        if config.fc_norm:
            parts = features_BTF.chunk(len(self.fc_norm), dim=-1)
            features_BTF = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(features_BTF)

    def forward(
        self,
        embeddings: Tensor,
        states: Tensor,
        positions: Tensor,
        before: KeysValues | None = None,
        mask: Tensor | None = None,
        attend: Attend | None = None,
    ) -> Step:
        """Take one step at some places.

        Args:
            embeddings: the target's, of the tokens behind these places, (B, T, H).
            states: of the tokens at these places: `fuse`d, or the states of a step before, (B, T, H).
            positions: of these places in the text, (B, T) int64.
            before: keys and values of other places, which come first.
            mask: True where a place sees another, (B or 1, 1, T, S), S those before and these; None: itself and those
                before it, where `before` is None.
            attend: in place of these two, what queries attend to.
        """
        return self.step(embeddings, states, positions, attend or attention(before, mask))

    def step(self, embeddings: Tensor, states: Tensor, positions: Tensor, attend: Attend) -> Step:
        """Take one step, as `forward` does, inside of a forward of the heads: no wrapper sees what goes in and out.

        Under autocast accelerate's would turn it into float32, which K steps then keep.
        """
        rotation = self.rotary(embeddings, positions)
        raw, current = self.midlayer(embeddings, states, rotation, attend)
        hidden = self.norm(raw)
        return Step(hidden if self.config.norm_output else raw, hidden, current)
