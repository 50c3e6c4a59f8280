"""EAGLE-3 heads: one decoder layer that drafts from the target's features, or from its own last state.

EAGLE-3 (Li et al. 2025, arXiv 2503.01840, section 3): at position i the layer sees the embedding of token i + 1 next to
a state of token i, and guesses token i + 2. If the target has seen token i, the state is `fuse`d from the target's
features; for a drafted token it is the layer's own output at the position before. No loss ties that output to features,
so heads may be trained through many such steps (the training-time test).

`unroll` takes the K steps of all rounds at once. A round that begins at position s knows the target's features of
positions up to s. Its step 0 is the layer at position s, as in decoding. Its step k is the layer at position s + k, on
the state of step k − 1 and the embedding of the text's next token. It attends to the keys that step 0 made at the
positions up to s, and to those that steps 1 … k of the same round made, one each. A decoder whose drafts are all
accepted computes the same, and so does training. Tensors of step k have an entry for each round, not for each position:
entry s is the round that begins at s.

Shape suffixes: B rows, T positions, S positions with keys, F features, H hidden, V the target's vocabulary, D the
heads'.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRotaryEmbedding, apply_rotary_pos_emb

from draftsmith.decode.cache.features import check_layers, decoder_layers, default_layers
from draftsmith.decode.cache.kernels import fused_attention
from draftsmith.decode.errors import InputError
from draftsmith.medusa.base import FeatureHeads, LayersConfig, LMHead, Norm, check_named, layer_fields
from draftsmith.medusa.round_attention import Attend, Rounds, same_text, windowed_attention
from draftsmith.medusa.target_states import KeysValues
from draftsmith.train.losses.output_head import OutputHead, head_of

TREE = "eagle_tree"
"""The config's key for a searched tree, as choices: see `Tree.from_choices`."""


class EagleConfig(LayersConfig, LlamaConfig):
    """The shape of the heads, in the names that vLLM, SGLang and SpecForge read (`LlamaForCausalLMEagle3`)."""

    architecture = "LlamaForCausalLMEagle3"

    draft_vocab_size: int = None  # type: ignore[assignment]
    """D, the heads' vocabulary size; V if None is given."""
    target_hidden_size: int = None  # type: ignore[assignment]
    """The width of the target's hidden states; `hidden_size` if None is given."""
    eagle_aux_hidden_state_layer_ids: list[int] = None  # type: ignore[assignment]
    """The depths of the target's features, ascending: the number of layers before each."""
    norm_before_residual: bool = False
    """Whether the residual path around attention begins after the state's norm."""
    norm_before_fc: bool = False
    """Whether the features are normed together before they are fused."""
    fc_norm: bool = False
    """Whether the features of each depth are normed before they are fused."""
    norm_output: bool = False
    """Whether the next step sees the state after the last norm, not before it."""
    base_model_name_or_path: str | None = None
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        self.draft_vocab_size = self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size
        self.target_hidden_size = self.hidden_size if self.target_hidden_size is None else self.target_hidden_size
        super().__post_init__(**{"architectures": [self.architecture], **kwargs})

    def check(self) -> "EagleConfig":
        """Return the config, or raise an InputError that names the first impossible field."""
        self.check_shape("target_hidden_size")
        if self.num_hidden_layers != 1:
            raise InputError(f"num_hidden_layers: expected 1, found {self.num_hidden_layers}")
        depths = self.eagle_aux_hidden_state_layer_ids
        if not isinstance(depths, list) or not depths or not all(type(depth) is int for depth in depths):
            raise InputError(f"eagle_aux_hidden_state_layer_ids: expected a list of depths, found {depths!r}")
        return self


class EagleAttention(nn.Module):
    """Llama's attention on an embedding and a state, 2H wide."""

    def __init__(self, config: EagleConfig):
        super().__init__()
        heads, key_heads = config.num_attention_heads, config.num_key_value_heads or config.num_attention_heads
        self.head_dim: int = config.head_dim or config.hidden_size // heads
        queries, keys = heads * self.head_dim, key_heads * self.head_dim
        width, bias = 2 * config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(width, queries, bias=bias)
        self.k_proj = nn.Linear(width, keys, bias=bias)
        self.v_proj = nn.Linear(width, keys, bias=bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=bias)

    def project(self, seen_BTE: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, KeysValues]:
        """Return queries, (B, heads, T, width), and these positions' keys and values, all rotated."""
        queries, keys, values = (
            project(seen_BTE).unflatten(-1, (project.out_features // self.head_dim, self.head_dim)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        queries, keys = apply_rotary_pos_emb(queries, keys, *rotation)
        return queries, KeysValues(keys, values)


def attention(before: KeysValues | None, mask: Tensor | None) -> Attend:
    """Return the attention of positions to themselves and to `before`, the keys and values of other positions.

    The mask, (B or 1, 1, T, S), is added to the scores, or True where a query sees a key. Without one each position
    sees itself and those before it.
    """

    def attend(queries: Tensor, current: KeysValues) -> Tensor:
        if before is not None:
            current = KeysValues(*(torch.cat(pair, 2) for pair in zip(before, current, strict=True)))
        return fused_attention(queries, *current, mask, is_causal=mask is None)

    return attend


class EagleLayer(GradientCheckpointingLayer):
    """The decoder layer; the caller decides which keys are seen."""

    def __init__(self, config: EagleConfig):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm, self.hidden_norm = Norm(size, eps), Norm(size, eps)
        self.post_attention_layernorm = Norm(size, eps)
        self.self_attn, self.mlp = EagleAttention(config), LlamaMLP(config)

    def forward(
        self, embeddings_BTH: Tensor, states_BTH: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend
    ) -> tuple[Tensor, KeysValues]:
        """Return the layer's output, (B, T, H), and these positions' own keys and values."""
        # Attention sees embedding and state, each with its own norm; the residual path has only the state.
        normed = self.hidden_norm(states_BTH)
        residual = normed if self.norm_before_residual else states_BTH
        seen_BTE = torch.cat([self.input_layernorm(embeddings_BTH), normed], dim=-1)
        queries, current = self.self_attn.project(seen_BTE, rotation)
        hidden = residual + self.self_attn.o_proj(attend(queries, current).transpose(1, 2).flatten(2))
        return hidden + self.mlp(self.post_attention_layernorm(hidden)), current


class Step(NamedTuple):
    """The outputs of a step: `states` feed the next step and `hidden` the head, (B, T, H) each.

    `own` holds the keys and values of these positions.
    """

    states: Tensor
    hidden: Tensor
    own: KeysValues


class EagleHeads(FeatureHeads):
    """The draft of EAGLE-3; it also sees the target's embeddings.

    Its tensors have the names of the EAGLE authors. Where D < V, the buffer `t2d`, (V,) bool, marks the target's tokens
    that `d2t` names.
    """

    config_class = EagleConfig
    title, field, width, tokens = "EAGLE-3 heads", "eagle", "target_hidden_size", "d2t"
    depths = "eagle_aux_hidden_state_layer_ids"
    begins_with = "features"
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
        self.t2d: Tensor | None
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64) if cut else None)
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool) if cut else None)
        self.post_init()

    @classmethod
    def of_target(
        cls, target: PreTrainedModel, token_map: Tensor | None = None, layer_ids: list[int] | None = None, **shape: Any
    ) -> "EagleHeads":
        """Return untrained heads for a target: its head's rows, and a layer of its sizes with random weights.

        Args:
            token_map: the target's ids that the heads may draft, (D,) int64; all if None.
            layer_ids: the depths of the features; `default_layers` if None.
            **shape: further fields of `EagleConfig`, such as `intermediate_size` or `norm_output`.

        Raises:
            InputError: depths or tokens that the target does not have, or a target without rotary positions.
        """
        layers = len(decoder_layers(target))
        depths = default_layers(layers) if layer_ids is None else layer_ids
        check_layers(depths, layers, "layer_ids")
        token_map = cls.sorted_tokens(target, token_map)
        fields = {
            **layer_fields(target, token_map),
            "eagle_aux_hidden_state_layer_ids": list(depths),
            "num_hidden_layers": 1,
        }
        heads = cls(EagleConfig(**{**fields, **shape}))
        rows = head_of(target).weight
        with torch.no_grad():
            # The target's rows for these tokens are a good start for the heads' own head.
            heads.lm_head.weight.copy_(rows if token_map is None else rows[token_map.to(rows.device)])
        if token_map is not None:
            heads.set_tokens(token_map)
        return heads

    @property
    def cached_numbers(self) -> int:
        """The size of the layer's cache for a token, in numbers."""
        attention = self.midlayer.self_attn
        return attention.k_proj.out_features + attention.v_proj.out_features

    @property
    def layer_ids(self) -> list[int]:
        """The depths of the target's features, ascending: the number of layers before each."""
        return self.config.eagle_aux_hidden_state_layer_ids

    def set_tokens(self, token_map: Tensor) -> None:
        """Set the target's ids that the heads may draft, ascending, (D,) int64, each once."""
        assert self.d2t is not None and self.t2d is not None
        ids = token_map.to(self.d2t.device)
        # Servers add a drafted id to its entry to get the target's id.
        self.d2t.copy_(ids - torch.arange(len(ids), device=ids.device))
        self.t2d.zero_()[ids] = True

    def check_tokens(self, field: str = "d2t", stored: Mapping[str, Tensor] | None = None) -> None:
        """Check the ids of `d2t`, and that `t2d` names the same tokens."""
        super().check_tokens(field)
        ids = self.token_map
        if ids is not None and self.t2d is not None and ids.device.type != "meta":
            check_named(ids, self.t2d, field)

    @property
    def loss_map(self) -> nn.Module:
        """The language-model head."""
        return self.lm_head

    @property
    def head(self) -> OutputHead:
        """The map from `Step.hidden` to logits over the heads' vocabulary."""
        return OutputHead(self.lm_head.weight)

    def fuse(self, features_BTF: Tensor) -> Tensor:
        """Return states, (B, T, H), from the target's features of the same positions."""
        config = self.config
        if config.norm_before_fc:
            features_BTF = self.input_norm(features_BTF)
        if config.fc_norm:
            # One norm for each depth, whose features can differ in scale.
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
        """Take one step at some positions.

        Args:
            embeddings: the target's embeddings of the next tokens, (B, T, H).
            states: the states of these positions' tokens, `fuse`d or from a step before, (B, T, H).
            positions: in the text, (B, T) int64.
            before: keys and values of other positions.
            mask: see `attention`. Without one, and without other positions, each sees those in its window.
            attend: the attention, in place of these two.
        """
        window = self.config.window_of(0)
        if mask is None and before is None and window is not None:
            attend = attend or partial(windowed_attention, window=window)
        return self.step(embeddings, states, positions, attend or attention(before, mask))

    def step(self, embeddings: Tensor, states: Tensor, positions: Tensor, attend: Attend) -> Step:
        """Take one step, as `forward` does, for calls inside of a forward of the heads."""
        # In a nested forward accelerate's autocast wrapper would return float32, which the K steps would keep.
        rotation = self.rotary(embeddings, positions)
        raw, current = self.midlayer(embeddings, states, rotation, attend)
        hidden = self.norm(raw)
        return Step(hidden if self.config.norm_output else raw, hidden, current)

    def unroll(
        self, embeddings: Tensor, features: Tensor, positions: Tensor, num_steps: int, texts: Tensor | None = None
    ) -> list[Tensor]:
        """Return the head's inputs in steps 0 … K − 1 of the rounds that begin at every position, (B, T − k, H) each.

        Entry s of step k is at position s + k: it has seen the text up to token s + k + 1 and guesses token s + k + 2.
        It is meaningless if position s + k belongs to another text, or to padding.

        Args:
            embeddings: the target's embeddings of the next tokens, (B, T, H).
            features: the target's features of the tokens at these positions, (B, T, F).
            positions: the index of each position within its text, (B or 1, T) int64.
            texts: in packed rows a number for each text, (B, T), such as (positions == 0).cumsum(1).
        """
        return list(self.rounds_of(embeddings, features, positions, texts)(0, embeddings.shape[1], num_steps))

    def rounds_of(
        self, embeddings: Tensor, features: Tensor, positions: Tensor, texts: Tensor | None = None
    ) -> Callable[[int, int, int], Iterator[Tensor]]:
        """Return (begin, end, K) → the head's inputs in the steps of the rounds that begin at these positions.

        A later step has no entry for rounds that would pass the last position. Arguments are those of `unroll`.
        """
        length, query_heads = embeddings.shape[1], self.config.num_attention_heads
        rounds = Rounds(None if texts is None else same_text(texts), self.config.window_of(0))
        whole = self.step(embeddings, self.fuse(features), positions, rounds.after([], query_heads))

        def steps(begin: int, end: int, num_steps: int) -> Iterator[Tensor]:
            states, keys_values = whole.states[:, begin:end], [whole.own]
            yield whole.hidden[:, begin:end]
            for k in range(1, num_steps):
                stop = max(begin, min(end, length - k))
                attend = rounds.after(keys_values, query_heads, first=begin)
                inputs = embeddings[:, begin + k : stop + k], states[:, : stop - begin]
                step = self.step(*inputs, positions[:, begin + k : stop + k], attend)
                states = step.states
                keys_values.append(step.own)
                yield step.hidden

        return steps
