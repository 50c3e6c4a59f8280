"""The layers that a carved draft keeps, and the scale of its last norm: chosen by the loss on a few texts.

Layers that were not neighbours meet a residual stream of another size and direction, how much so differs by family: on
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
from draftsmith.train.data.first_look import SCALES, Text, chosen_once, losses_of_scales, say_once, stacked
from draftsmith.train.losses.output_head import head_of, last_hidden
from draftsmith.train.provenance import write_json

CHOICE = ".carving.json"
"""The file beside a run's checkpoints that says what was chosen."""


@dataclass(frozen=True)
class Carving:
    """What a draft keeps of the target."""

    layers: list[int]
    scale: float = 1.0
    """Of what leaves the last norm."""

    def write(self, file: Path) -> None:
        """Write it for runs that resume."""
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, asdict(self))

    @classmethod
    def read(cls, file: Path) -> "Carving | None":
        """Read what an earlier run wrote; None where there is none."""
        return read(cls, file) if file.is_file() else None


def ways_to_keep(evenly: list[int], depth: int) -> list[list[int]]:
    """Return the layers that may be kept where their number was given: evenly spaced, the first, the first and last."""
    count = len(evenly)
    found = [evenly, list(range(count)), [*range(count - 1), depth - 1]]
    return [layers for place, layers in enumerate(found) if layers not in found[:place]]


def choose(
    ways: Sequence[list[int]], view: Callable[[list[int]], PreTrainedModel], texts: Sequence[Text], tokens: int
) -> Carving:
    """Return the way, and the scale of the last norm, whose loss on the texts is the least; the same on all processes.

    At most three forwards of a draft on at most eight texts. One line says what was chosen.

    Args:
        ways: layers that may be kept.
        view: makes the draft of some layers, which may share the target's tensors.
        texts: what to look at.
        tokens: of the tokenizer; the target's head may have more rows.
    """

    def look() -> tuple[float, list[int], float, float]:
        found = []
        for layers in ways:
            model = view(layers)
            with torch.no_grad():
                hidden = [last_hidden(model, input_ids=text.ids_T[None].to(model.device))[0] for text in texts]
            hidden_NH, labels_NK = stacked(texts, hidden, 1)
            losses = losses_of_scales(hidden_NH, head_of(model).cut(tokens), labels_NK)[:, 0].tolist()
            best = min(range(len(SCALES) if last_norm(model) else 1), key=losses.__getitem__)
            found.append((losses[best], layers, SCALES[best], losses[0]))
        return min(found)

    loss, layers, scale, plain = chosen_once(look)
    say_once(
        f"init: layers {', '.join(map(str, layers))}, the last norm × {scale:.2g}: the loss begins at {loss:.2f} "
        f"({plain:.2f} without the factor, {math.log(tokens):.2f} if all {tokens:,} tokens were equally likely)"
    )
    return Carving(layers, scale)


@torch.no_grad()
def scale_norm(norm: nn.Module, scale: float) -> None:
    """Multiply what a norm returns, of the kinds that multiply by w and by 1 + w; a bias too."""
    weight = next(p for name, p in norm.named_parameters() if name.endswith("weight"))
    weight.add_((scale - 1) * gain_of(norm, len(weight)))
    for name, parameter in norm.named_parameters():
        if name.endswith("bias"):
            parameter.mul_(scale)


@torch.no_grad()
def gain_of(norm: nn.Module, size: int) -> Tensor:
    """Return what a norm multiplies by, (H,), however its family stores it."""
    parameter = next(norm.parameters())
    signs = torch.ones(size, dtype=parameter.dtype, device=parameter.device)
    signs[1::2] = -1  # of mean 0 (nearly so, of an odd number), and so large that the norm's epsilon is nothing
    return (norm(1024 * signs) - norm(-1024 * signs)) / 2 * signs
