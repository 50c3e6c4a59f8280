"""The output head: the step from a decoder's last hidden states to its logits.

A loss in chunks never holds all logits: it needs the hidden states, and the head's weight. But FSDP2 and DeepSpeed
ZeRO-3 gather a module's weights only during its forward, DDP collects the gradients of the forward's result, and
autocast is on only inside. So the loss runs inside the model's forward and inside its output head's: `open_forward`.

Shape suffixes: B rows, T positions, H hidden, V vocabulary, D some of its tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.decode.cache.features import decoder_of
from draftsmith.decode.draft_models.cut_vocabulary import CutHead
from draftsmith.decode.errors import InputError
from draftsmith.decode.progress import phase
from draftsmith.decode.replay.texts import fixed_packing


@dataclass(frozen=True)
class OutputHead:
    """A linear map to logits, and the changes that some families make to its output."""

    weight: Tensor  # (V, H)
    bias: Tensor | None = None  # (V,)
    scale: float = 1.0  # multiplies the logits (Cohere's `logit_scale`; Granite divides by `logits_scaling`)
    softcap: float | None = None  # logits become c·tanh(logits / c) (Gemma 2, section 2)
    side_weight: Tensor | None = None
    """(V, R): a second map, from R numbers after the H hidden ones; its output is added. It is a tensor of its own, so
    that either map can be frozen."""

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return logits, (…, V), of hidden states (…, H), or (…, H + R)."""
        return self.finish(self.project(hidden))

    def project(self, hidden: Tensor) -> Tensor:
        """Apply the linear maps alone."""
        if self.side_weight is None:
            return torch.nn.functional.linear(hidden, self.weight, self.bias)
        hidden, side = hidden.split([self.weight.shape[1], self.side_weight.shape[1]], dim=-1)
        return torch.nn.functional.linear(hidden, self.weight, self.bias) + torch.nn.functional.linear(
            side, self.side_weight
        )

    def finish(self, logits: Tensor) -> Tensor:
        """Apply the family's scale and soft cap to the linear map's output."""
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits

    def to(self, device: torch.device) -> "OutputHead":
        """Return the head on a device, without a copy if it is there."""
        return self._changed(lambda tensor: tensor.to(device))

    def of(self, tokens_D: Tensor) -> "OutputHead":
        """Return a copy of the head with the rows of some tokens, int64, in their order."""
        return self._changed(lambda tensor: tensor[tokens_D])

    def cut(self, vocab_size: int) -> "OutputHead":
        """Return a view of the first `vocab_size` rows; gradients flow to the whole head."""
        return self._changed(lambda tensor: tensor[:vocab_size])

    def detach(self) -> "OutputHead":
        """Return the head as a constant, without gradients."""
        return self._changed(Tensor.detach)

    def _changed(self, change: Callable[[Tensor], Tensor]) -> "OutputHead":
        optional = {"bias": self.bias, "side_weight": self.side_weight}
        changed: dict[str, Any] = {name: change(tensor) for name, tensor in optional.items() if tensor is not None}
        return replace(self, weight=change(self.weight), **changed)


def head_of(model: PreTrainedModel) -> OutputHead:
    """Return a causal LM's head, tied or not. `require_split` checks that the family changes logits in no other way."""
    module: Any = model.get_output_embeddings()
    config = model.config.get_text_config()
    scale = getattr(config, "logit_scale", None) or 1.0
    scale /= getattr(config, "logits_scaling", None) or 1.0
    return OutputHead(
        module.weight, getattr(module, "bias", None), scale, getattr(config, "final_logit_softcapping", None)
    )


def last_hidden(model: PreTrainedModel, **inputs: Any) -> Tensor:
    """Return the input of the head, (B, T, H); rows with `position_ids` are packed."""
    decoder = decoder_of(model)
    with fixed_packing("position_ids" in inputs):
        return decoder(use_cache=False, **inputs).last_hidden_state


def open_forward(*modules: nn.Module) -> None:
    """Let the forward of each module take `inside=function`, and return `function(*args, **kwargs)` in its place.

    Trainers open the modules that they train: the objects, not their classes.
    """
    for module in modules:
        module.forward = _opened(module.forward)


def _opened(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def forward(*args: Any, inside: Callable[..., Any] | None = None, **kwargs: Any) -> Any:
        return (original if inside is None else inside)(*args, **kwargs)

    return forward


def inside_model(
    model: PreTrainedModel,
    function: Callable[[Tensor, OutputHead], Any],
    hidden_of: Callable[..., Tensor] = last_hidden,
) -> Callable[..., Any]:
    """Return a function for a causal LM's forward to call, which passes its hidden states and its head to `function`.

    Use: `wrapped(**inputs, inside=inside_model(model, function))`, where `wrapped` is the model or a wrapper around it.
    The model and its output embeddings must have been opened with `open_forward`. `hidden_of` computes hidden_BTH from
    the model and the forward's inputs.
    """
    project: Any = model.get_output_embeddings()

    def run(**inputs: Any) -> Any:
        hidden_BTH = hidden_of(model, **inputs)
        return project(hidden_BTH, inside=lambda hidden_BTH: function(hidden_BTH, head_of(model)))

    return run


@torch.no_grad()
@phase("looking at the head")
def require_split(model: PreTrainedModel, field: str) -> None:
    """Require that a model's logits equal `head_of(model)` applied to `last_hidden`, in a short forward.

    Otherwise it changes its logits in another way, which no chunked loss can follow.
    """
    if isinstance(model.get_output_embeddings(), CutHead):
        raise InputError(f"{field}: expected a model with its whole head, as load_model returns it, found a cut one")
    training, matches = model.training, False
    model.eval()
    try:
        vocab_size: int = model.config.get_text_config().vocab_size
        ids = torch.arange(1, 5, device=model.device).remainder(vocab_size)[None]
        whole = model(input_ids=ids, use_cache=False).logits
        parts = head_of(model)(last_hidden(model, input_ids=ids))
        # The same operations on the same numbers, but half precision rounds differently in another order.
        tolerance = 1e-4 if whole.dtype in (torch.float32, torch.float64) else 0.05
        matches = whole.shape == parts.shape and bool((whole - parts).abs().max() <= tolerance * whole.abs().max())
    except (AttributeError, TypeError):
        pass
    finally:
        model.train(training)
    if not matches:
        raise InputError(
            f"{field}: expected a model whose logits are its head's, found {type(model).__name__}, which does more"
        )


def text_states(target: PreTrainedModel, sequence: Tensor, prompt_length: int) -> Tensor:
    """Return the hidden states from which the target predicts each token after the prompt, (N, H)."""
    if not 1 <= prompt_length < len(sequence):
        raise InputError(
            f"sequence: expected a prompt and a text, found {prompt_length} tokens of prompt among {len(sequence)}"
        )
    return last_hidden(target, input_ids=sequence[None, :-1].to(target.device))[0, prompt_length - 1 :]
