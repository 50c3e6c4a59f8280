"""The layers that a carved draft keeps, and the scale of its last norm, chosen by the loss on a few texts.

Layers that were not adjacent meet a residual stream of another size and direction. The effect differs by family: on
SmolLM2-135M the first 4 of 30 layers begin far better than evenly spaced ones, on the embedded target far worse.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.decode.cache.features import last_norm
from draftsmith.decode.validation import read
from draftsmith.train.data.first_look import SCALES, Text, choose_once, losses_of_scales, print_once, stack_guesses
from draftsmith.train.losses.output_head import head_of, last_hidden
from draftsmith.train.provenance import write_json

CHOICE = ".carving.json"  # the file next to a run's checkpoints that records the choice


@dataclass(frozen=True)
class Carving:
    """The layers that a draft keeps of the target, and the scale of its last norm's output."""

    layers: list[int]
    scale: float = 1.0

    def write(self, file: Path) -> None:
        """Write the choice for resumed runs."""
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, asdict(self))

    @classmethod
    def read(cls, file: Path) -> "Carving | None":
        """Read the choice of an earlier run; None if there is none."""
        return read(cls, file) if file.is_file() else None


def ways_to_keep(evenly: list[int], depth: int) -> list[list[int]]:
    """Return the candidates for a number of layers: evenly spaced ones, the first, and the first with the last."""
    count = len(evenly)
    candidates = [evenly, list(range(count)), [*range(count - 1), depth - 1]]
    return [layers for i, layers in enumerate(candidates) if layers not in candidates[:i]]


def choose(
    ways: Sequence[list[int]], view: Callable[[list[int]], PreTrainedModel], texts: Sequence[Text], tokens: int
) -> Carving:
    """Return the layers and the scale of the last norm with the least loss on the texts, and print them.

    `view` makes the draft of some layers, which may share the target's tensors. `tokens` is the tokenizer's size; the
    target's head may have more rows. All processes return the same choice.
    """

    def best_candidate() -> tuple[float, list[int], float, float]:
        candidates = []
        # At most three forwards, on at most eight texts.
        for layers in ways:
            model = view(layers)
            with torch.no_grad():
                hidden = [last_hidden(model, input_ids=text.ids_T[None].to(model.device))[0] for text in texts]
            hidden_NH, labels_NK = stack_guesses(texts, hidden, 1)
            losses = losses_of_scales(hidden_NH, head_of(model).cut(tokens), labels_NK)[:, 0].tolist()
            best = min(range(len(SCALES) if last_norm(model) else 1), key=losses.__getitem__)
            candidates.append((losses[best], layers, SCALES[best], losses[0]))
        return min(candidates)

    loss, layers, scale, plain = choose_once(best_candidate)
    print_once(
        f"init: layers {', '.join(map(str, layers))}, the last norm × {scale:.2g}: the loss begins at {loss:.2f} "
        f"({plain:.2f} without the factor, {math.log(tokens):.2f} if all {tokens:,} tokens were equally likely)"
    )
    return Carving(layers, scale)


@torch.no_grad()
def scale_norm(norm: nn.Module, scale: float) -> None:
    """Scale a norm's output, bias included, whether its family multiplies by w or by 1 + w."""
    weight = next(p for name, p in norm.named_parameters() if name.endswith("weight"))
    weight.add_((scale - 1) * gain_of(norm, len(weight)))
    for name, parameter in norm.named_parameters():
        if name.endswith("bias"):
            parameter.mul_(scale)


@torch.no_grad()
def gain_of(norm: nn.Module, size: int) -> Tensor:
    """Return the factors of a norm, (H,), in any family's parametrisation."""
    # Inputs of mean 0 (nearly, for odd sizes), so large that the norm's epsilon vanishes; the difference drops a bias.
    parameter = next(norm.parameters())
    signs = torch.ones(size, dtype=parameter.dtype, device=parameter.device)
    signs[1::2] = -1
    return (norm(1024 * signs) - norm(-1024 * signs)) / 2 * signs
