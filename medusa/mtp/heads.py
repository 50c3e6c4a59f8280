"""A target's MTP layers as a model that drafts, and the steps of all rounds at once.

Position i has token i + 1 and a state of token i: at first the target's, after its last norm, as the library gives it
to its MTP layers. A layer's output is both the head's input and the state that the next step takes. A step sees its
token at that token's position, i + 1 in the first.

With one layer, step k is that layer at the next position, after the keys of the first step: so do servers draft. With
several, step k is layer k, at the same positions with the tokens after them: layer k has keys of its own, made from
layer k − 1's outputs, as the library does it.

Shape suffixes: B rows, T positions, S = T − k rounds of a step, H hidden.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_model
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.modeling_layers import MtpModel

from draftsmith.decode.cache.features import decoder_layers, decoder_of, last_norm
from draftsmith.decode.errors import InputError
from draftsmith.medusa.base import DraftingHeads
from draftsmith.medusa.mtp.native import check_mapping, check_names, load_native, make_layers, stored_layers
from draftsmith.medusa.round_attention import Rounds, same_text
from draftsmith.medusa.target_states import gather_weights
from draftsmith.train.checkpoint import WEIGHTS, check_finite, files_of, mtp_layers, reading_errors, stored_tensors
from draftsmith.train.losses.output_head import head_of
from draftsmith.train.quantization import float_state, own_shapes


class MtpHeads(DraftingHeads):
    """The MTP layers of a target, in the form of a causal LM for `CachedModel`: layer k has the cache's layer k.

    Embeddings, head, rotary positions and the last norm are the target's, and no part of this model.
    """

    title, field, width = "MTP layers", "mtp", "hidden_size"
    token_map = None
    begins_with = "hidden"
    main_input_name = "states"
    _no_split_modules = ["MtpLayer"]  # noqa: RUF012
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = True

    def __init__(self, native: MtpModel, target: PreTrainedModel):
        super().__init__(native.config)
        self.layers: nn.ModuleList = native.layers
        if native.use_shared_post_norm:
            self.shared_post_norm = native.shared_post_norm
        # In a tuple, because the target's parameters are not this model's.
        self._tied = native, target, last_norm(target)
        self.config.draft_vocab_size = self.config.vocab_size = len(head_of(target).weight)
        self.config.num_mtp_layers = len(self.layers)
        self.step = 0
        """The layer that `forward` runs."""

    @property
    def layer_ids(self) -> list[int]:
        """The target's last layer: decoding reads its output before the norm."""
        return [len(decoder_layers(self._tied[1]))]

    @property
    def native(self) -> MtpModel:
        """The library's model of the same layers."""
        return self._tied[0]  # type: ignore[return-value]

    @classmethod
    def of_target(cls, target: PreTrainedModel, layers: int = 1) -> "MtpHeads":
        """Return new layers, begun as the target's last layer of their shape: they see only the states at first.

        Raises:
            InputError: a family for which the library makes no MTP layers, or a target without a layer of their shape.
        """
        native, norm, size = make_layers(target, layers), last_norm(target), target.config.get_text_config().hidden_size
        first = getattr(native.config, "mtp_hidden_states_first", False)
        parts: Any = native.layers
        shapes = own_shapes(parts[0].mtp_block)
        alike = [other for other in decoder_layers(target) if own_shapes(other) == shapes]
        if not alike:
            raise InputError("mtp: expected a target with a layer like its MTP layers to begin with, found none")
        with torch.no_grad(), gather_weights(alike[-1], decoder_of(target)):
            state = float_state(alike[-1], target.dtype)
            for layer in parts:
                layer.mtp_block.load_state_dict(state)
                layer.eh_proj.weight.zero_()
                layer.eh_proj.weight[:, slice(size) if first else slice(size, None)] = torch.eye(size)
                after = native.shared_post_norm if native.use_shared_post_norm else layer.post_norm
                if after is not None and norm is not None:
                    after.load_state_dict(float_state(norm, target.dtype))
        return cls(nn.Module.to(native, target.dtype), target)

    @classmethod
    def native_to(cls, target: PreTrainedModel) -> "MtpHeads":
        """Return the layers that a target ships with, or raise an InputError."""
        return cls(load_native(target), target)

    @classmethod
    def from_directory(cls, path: str, target: PreTrainedModel) -> "MtpHeads":
        """Return trained layers for a target, in its dtype, or raise an InputError if they are none or not its own."""
        heads = cls.as_stored(path, target)
        with reading_errors("mtp", f"MTP layers in {path}"):
            load_model(heads, Path(path) / WEIGHTS)
        check_finite(heads, path, "mtp")
        return nn.Module.to(heads, target.device)

    @classmethod
    def as_shipped(cls, path: str, target: PreTrainedModel) -> "MtpHeads":
        """Return the layers that a target's files hold without their weights, or raise an InputError.

        Hub ids whose weights are not yet here have the layers that their config promises.
        """
        stored = stored_layers(path, target.config)
        unseen = 0 if files_of(path).is_dir() else mtp_layers(target.config)
        native = make_layers(target, unseen or check_names(stored, target.config, path), stored)
        if stored:
            check_mapping(native, target, stored, path)
        return cls(nn.Module.to(native, target.dtype), target)

    @classmethod
    def as_stored(cls, path: str, target: PreTrainedModel) -> "MtpHeads":
        """Return layers for a target in the number and shapes of a directory's tensors, or raise an InputError."""
        stored = stored_tensors(path, "mtp")
        numbers = {int(number[1]) for name in stored if (number := re.match(r"layers\.(\d+)\.", name))}
        if not numbers:
            raise InputError(f"mtp: expected MTP layers that draftsmith trained in {path}, found none")
        heads = cls(nn.Module.to(make_layers(target, 1 + max(numbers), stored), target.dtype), target)
        own = heads.state_dict()
        for name in sorted(own.keys() | stored.keys()):
            shape = tuple(own[name].shape) if name in own else None
            found = stored[name][1] if name in stored else None
            if shape != found:
                raise InputError(f"mtp: expected {name} of {shape} for this target in {path}, found {found}")
        return heads

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return True

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True

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
                self.apply_layer(layer, states, states, order, cache)
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
        return self.native._project_to_logits(states)  # type: ignore[no-any-return]

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the target's embeddings of tokens, (B, T, H), in the layers' dtype."""
        return self.native.embed_tokens(tokens).to(self.device, self.dtype)  # type: ignore[no-any-return]

    def apply_layer(
        self,
        layer: int,
        embeddings: Tensor,
        states: Tensor,
        positions: Tensor,
        cache: Any = None,
        masks: Mapping[str, Tensor | None] | None = None,
    ) -> Tensor:
        """Return a layer's outputs, (B, T, H), of the embeddings of tokens at their positions, and of states.

        The masks are the layer's arguments; without them the library makes them, from the cache if there is one.
        """
        native = self.native
        if masks is None:
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
        position_ids: Tensor,
        past_key_values: Any,
        states: Tensor | None = None,
        features: Tensor | None = None,
        attention_mask: Tensor | Mapping[str, Tensor] | None = None,
        use_cache: bool = True,
        logits_to_keep: int = 0,
        output_hidden_states: bool = False,
    ) -> SimpleNamespace:
        """Run layer `step` at some positions, (B, T), and extend its cache; return its outputs in place of logits.

        `states` are of an earlier step, (B, T, H); otherwise those of the target's `features`, (B, T, F).
        """
        if features is not None:
            states = self.fuse(features)
        assert states is not None
        layer, mask = self.step, attention_mask
        if isinstance(mask, Mapping):
            mask = mask[self.config.layer_types[layer]]
        positions = position_ids.expand(len(input_ids), -1) + 1 + layer
        masks = None if mask is None else {"attention_mask": mask}
        outputs = self.apply_layer(layer, self.embed(input_ids), states, positions, past_key_values, masks)
        return SimpleNamespace(logits=outputs[:, -logits_to_keep:])

    def unroll(
        self, embeddings: Tensor, states: Tensor, positions: Tensor, num_steps: int, texts: Tensor | None = None
    ) -> list[Tensor]:
        """Return the outputs of steps 0 … K − 1 of the rounds that begin at every position, (B, T − k, H) each.

        Entry s of step k has seen the text up to token s + k + 1 and guesses the token after that, in the round whose
        last position with a state of the target is s. Texts of fewer positions than K have fewer steps.

        Args:
            embeddings, states: of the tokens after the positions, and the target's, (B, T, H).
            positions: in each text, (B or 1, T).
            texts: in packed rows a number for each text, (B, T).
        """
        length, several = embeddings.shape[1], len(self.layers) > 1
        visible = None if texts is None else same_text(texts)
        num_steps, steps = min(num_steps, length), [states]
        if num_steps and not several:
            return list(self.rounds_of(embeddings, states, positions, visible)(0, length, num_steps))
        for k in range(num_steps):
            count = length - k
            # Each layer has keys of its own.
            rounds = Rounds(None if visible is None else visible[..., :count, :count], self._window(k))
            with rounds.of(self.config):
                inputs = embeddings[:, k:], steps[-1][:, :count], positions[:, :count] + 1 + k
                # Without a mask of theirs: to look for texts in a row, the library would wait for the device.
                steps.append(self.apply_layer(k, *inputs, None, {"attention_mask": None}))
        return steps[1:]

    def rounds_of(
        self, embeddings: Tensor, states: Tensor, positions: Tensor, visible: Tensor | None = None
    ) -> Callable[[int, int, int], Iterator[Tensor]]:
        """Return (begin, end, K) → the outputs of the steps of one layer in the rounds that begin at these positions.

        Later steps of the last rounds are left out. Arguments are those of `unroll`, and the mask of `same_text`.
        """
        rounds, length = Rounds(visible, self._window(0)), embeddings.shape[1]

        def apply(begin: int, end: int, k: int, states: Tensor) -> Tensor:
            with rounds.of(self.config):
                inputs = embeddings[:, begin + k : end + k], states, positions[:, begin:end] + 1 + k
                return self.apply_layer(0, *inputs, None, {"attention_mask": None})

        whole = apply(0, length, 0, states)

        def steps(begin: int, end: int, num_steps: int) -> Iterator[Tensor]:
            step = whole[:, begin:end]
            yield step
            del rounds.steps[1:]  # those of other rounds
            for k in range(1, num_steps):
                rounds.first, end = begin, max(begin, min(end, length - k))
                step = apply(begin, end, k, step[:, : end - begin])
                yield step

        return steps

    def _window(self, layer: int) -> int | None:
        kinds, window = getattr(self.config, "layer_types", None), getattr(self.config, "sliding_window", None)
        return window if window and (kinds is None or kinds[layer] == "sliding_attention") else None

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        """Scale the logits of all steps; no step sees it, because each begins with a norm of the last one's output."""
        shared, layers = getattr(self, "shared_post_norm", None), list[Any](self.layers)
        norms = [layer.post_norm for layer in layers] if shared is None else [shared]
        for norm in filter(None, norms):
            gain = norm(torch.ones_like(norm.weight))  # families differ: some add 1 to the weight
            norm.weight.add_((factor - 1) * gain)
