"""A target's MTP layers as a model that drafts, and the steps of all rounds at once.

Position i has token i + 1 and a state of token i: at first the target's, after its last norm, as the library gives it
to its MTP layers. A layer's output is both the head's input and the state that the next step takes. A step sees its
token at that token's position, i + 1 in the first.

With one layer, step k is that layer at the next position, after the keys of the first step: so do servers draft. With
several, step k is layer k, at the same positions with the tokens after them: layer k has keys of its own, made from
layer k − 1's outputs, as the library does it.

Shape suffixes: B rows, T positions, S = T − k rounds of a step, H hidden.
"""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.modeling_layers import MtpModel

from draftsmith.decode.cache.features import decoder_layers, last_norm
from draftsmith.decode.cache.kernels import additive_mask
from draftsmith.decode.errors import InputError
from draftsmith.medusa.mtp.native import load_native, make_layers
from draftsmith.train.losses.output_head import head_of


class MtpHeads(PreTrainedModel):
    """The MTP layers of a target, in the form of a causal LM for `CachedModel`: layer k has the cache's layer k.

    Embeddings, head, rotary positions and the last norm are the target's, and no part of this model.

    Args:
        native: the library's MTP layers, tied to the target.
        target: the target.
    """

    title, field = "MTP layers", "mtp"
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = True

    def __init__(self, native: MtpModel, target: PreTrainedModel):
        super().__init__(native.config)
        self.layers: nn.ModuleList = native.layers
        if native.use_shared_post_norm:
            self.shared_post_norm = native.shared_post_norm
        # In a tuple, because the target's parameters are not this model's.
        self._tied = native, target, last_norm(target)
        self.config.draft_vocab_size = self.config.vocab_size = len(head_of(target).weight)
        self.layer_ids = [len(decoder_layers(target))]
        self.step = 0
        """The layer that `forward` runs."""

    @classmethod
    def of_target(cls, target: PreTrainedModel, layers: int = 1) -> "MtpHeads":
        """Return new layers, begun as the target's last layer of their shape: they see only the states at first."""
        native, norm, size = make_layers(target, layers), last_norm(target), target.config.get_text_config().hidden_size
        first = getattr(native.config, "mtp_hidden_states_first", False)
        parts: Any = native.layers
        with torch.no_grad():
            for layer in parts:
                shapes = _shapes(layer.mtp_block)
                alike = [other for other in decoder_layers(target) if _shapes(other) == shapes]
                if not alike:
                    raise InputError(
                        "mtp: expected a target with a layer like its MTP layers to begin with, found none"
                    )
                layer.mtp_block.load_state_dict(alike[-1].state_dict())
                layer.eh_proj.weight.zero_()
                layer.eh_proj.weight[:, slice(size) if first else slice(size, None)] = torch.eye(size)
                if layer.post_norm is not None and norm is not None:
                    layer.post_norm.load_state_dict(norm.state_dict())
        return cls(nn.Module.to(native, target.dtype), target)

    @classmethod
    def native_to(cls, target: PreTrainedModel) -> "MtpHeads":
        """Return the layers that a target ships with, or raise an InputError."""
        return cls(load_native(target), target)

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return True

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True

    def get_input_embeddings(self) -> None:  # type: ignore[override]
        """Return None: the embeddings are the target's."""
        return None

    def check_fits(self, target: PreTrainedModel) -> None:
        """Raise an InputError if this is not the target that the layers are tied to."""
        if target is not self._tied[1]:
            raise InputError("mtp: expected the target that the layers are tied to, found another")

    draft_for = check_fits

    @property
    def cached_numbers(self) -> int | None:
        """The keys and values of a token in all layers; None if the layers do not run."""
        cache, order = DynamicCache(), torch.zeros(1, 1, dtype=torch.long, device=self.device)
        states = torch.zeros(1, 1, self.config.hidden_size, dtype=self.dtype, device=self.device)
        try:
            for layer in range(len(self.layers)):
                self.apply_layer(layer, order, states, order, cache)
        except Exception:  # kernels of experts are not there for tensors without data in all dtypes
            return None
        parts: Any = cache.layers
        return sum(int(part.numel()) for layer in parts for part in (layer.keys, layer.values))

    def fuse(self, features: Tensor) -> Tensor:
        """Return the target's last hidden states from the outputs of its last layer, (…, H)."""
        norm = self._tied[2]
        return features if norm is None else norm(features)  # type: ignore[no-any-return]

    def head(self, states: Tensor) -> Tensor:
        """Return the target's logits of a step's outputs, (…, V)."""
        return self._tied[0]._project_to_logits(states)  # type: ignore[no-any-return]

    def apply_layer(
        self, layer: int, tokens: Tensor, states: Tensor, positions: Tensor, cache: Any = None, mask: Any = None
    ) -> Tensor:
        """Return a layer's outputs, (B, T, H), of tokens, (B, T), at their positions, and states, (B, T, H).

        The mask is additive, (B or 1, 1, T, …); without one the library makes it, from the cache if there is one.
        """
        native = self._tied[0]
        embeddings = native.embed_tokens(tokens).to(states.device, states.dtype)
        masks = {"attention_mask": mask}
        if mask is None:
            masks = native.create_masks_for_mtp_layer(layer, embeddings, cache, positions)
        rotation = None
        if native.rotary_emb is not None:
            kinds = {"layer_type": self.config.layer_types[layer]} if native.has_per_layer_rope else {}
            rotation = native.rotary_emb(embeddings, position_ids=positions, **kinds)
        outputs = self.layers[layer](
            embeddings, states, position_embeddings=rotation, position_ids=positions, past_key_values=cache, **masks
        )
        return self.shared_post_norm(outputs) if native.use_shared_post_norm else outputs  # type: ignore[no-any-return]

    def forward(
        self,
        input_ids: Tensor,
        states: Tensor,
        position_ids: Tensor,
        past_key_values: Any,
        attention_mask: Tensor | Mapping[str, Tensor] | None = None,
        use_cache: bool = True,
        logits_to_keep: int = 0,
        output_hidden_states: bool = False,
    ) -> SimpleNamespace:
        """Run layer `step` at some positions, (B, T), and extend its cache; return its outputs in place of logits."""
        layer, mask = self.step, attention_mask
        if isinstance(mask, Mapping):
            mask = mask[self.config.layer_types[layer]]
        positions = position_ids.expand(len(input_ids), -1) + 1 + layer
        outputs = self.apply_layer(layer, input_ids, states, positions, past_key_values, mask)
        return SimpleNamespace(logits=outputs[:, -logits_to_keep:])

    def unroll(self, tokens: Tensor, states: Tensor, num_steps: int) -> list[Tensor]:
        """Return the outputs of steps 0 … K − 1 of the rounds that begin at every position, (1, T − k, H) each.

        Entry s of step k has seen the text up to token s + k + 1 and guesses the token after that, in the round whose
        last position with a state of the target is s. `tokens` are those after the positions, (1, T).
        """
        steps, cache = [states], DynamicCache() if len(self.layers) == 1 else None
        for k in range(num_steps):
            count = tokens.shape[1] - k
            positions = torch.arange(k + 1, k + 1 + count, device=tokens.device)[None]
            inputs = tokens[:, k:], steps[-1][:, :count], positions
            if cache is None:
                steps.append(self.apply_layer(k, *inputs))
            else:
                mask = None if k == 0 else additive_mask(self._visible(count, k), states.dtype)
                steps.append(self.apply_layer(0, *inputs, cache, mask))
        return steps[1:]

    def _visible(self, rounds: int, k: int) -> Tensor:
        """Return the keys that step k ≥ 1 of each round attends to, (1, 1, S, …): those of steps 0 … k in turn.

        These are step 0's up to the round's beginning, and one of each later step.
        """
        own = torch.eye(rounds, dtype=torch.bool, device=self.device)
        keys = [nn.functional.pad(own, (0, k - j)) for j in range(1, k + 1)]
        sees = nn.functional.pad(own.new_ones(rounds, rounds).tril(), (0, k))
        window = getattr(self.config, "sliding_window", None)
        if window and (getattr(self.config, "layer_types", None) or ["sliding_attention"])[0] == "sliding_attention":
            order = torch.arange(rounds + k, device=self.device)
            sees &= order[:rounds, None] + k - order < window  # a step is k positions after its round's beginning
            keys = [part & (k - j < window) for j, part in enumerate(keys, 1)]
        return torch.cat([sees, *keys], dim=1)[None, None]


def _shapes(layer: nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in layer.state_dict().items()}
