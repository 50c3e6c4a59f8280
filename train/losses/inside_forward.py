"""Running a loss inside a model's forward, where its weights are.

The chunked loss needs the weight of an output head, not its output. But FSDP2 and DeepSpeed ZeRO-3 gather a module's
weights only during its forward, DDP collects the gradients of the forward's result, and autocast is on only inside. So
the loss runs inside the model's forward and inside its output head's.

`open_forward` replaces the `forward` of one module object, not of its class. The new forward takes one more keyword,
`inside`, a function that it calls in place of the original. Trainers open the modules that they train.

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
