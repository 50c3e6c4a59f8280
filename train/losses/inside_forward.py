"""The one way into a forward: how a loss runs where the weights are.

The chunked loss needs the weight of an output head, not the head's output. But a wrapper holds weights and gradients
together inside of a forward alone: FSDP2 and DeepSpeed ZeRO-3 gather a module's weights when its forward begins and
scatter them when it ends, DDP collects the gradients of what its forward returned, and autocast is on in between. So
the loss runs inside of the model's forward, and inside of its output head's.

What is patched: `open_forward` replaces the `forward` of one module object, not of its class. The new forward knows one
keyword more, `inside`, a function. With it, the forward returns what the function makes of the forward's arguments.
Without it, the forward does what it did before. Trainers open what they train when they are made.

Shape suffixes: B rows, T positions, H hidden.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.train.losses.output_head import OutputHead, head_of, last_hidden


def open_forward(*modules: nn.Module) -> None:
    """Let the forward of each module take `inside=function`, and return `function(*args, **kwargs)` in its place."""
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
    """Return what to call inside of a causal LM's forward for `function` to get its hidden states and its head.

    Use: `wrapped(**inputs, inside=inside_model(model, function))`, where `wrapped` is the model or a wrapper around it.

    Args:
        model: a causal LM; it and its output embeddings were opened with `open_forward`.
        function: of the last hidden states, hidden_BTH, and the head.
        hidden_of: makes them of the model and of the inputs that the forward is given.
    """
    project: Any = model.get_output_embeddings()

    def run(**inputs: Any) -> Any:
        hidden_BTH = hidden_of(model, **inputs)
        return project(hidden_BTH, inside=lambda hidden_BTH: function(hidden_BTH, head_of(model)))

    return run
