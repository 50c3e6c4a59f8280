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
from draftsmith.decode.cache.states import STATES
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


def ways_to_keep(evenly: list[int], kinds: Sequence[str]) -> list[list[int]]:
    """Return the candidates for a number of layers: evenly spaced ones, the first, and the first with the last.

    Of a target with layers of states, each candidate has layers with attention.
    """
    count, attending = len(evenly), attention_layers(kinds)
    candidates = [evenly, list(range(count)), [*range(count - 1), evenly[-1] if attending else len(kinds) - 1]]
    candidates = [layers for layers in candidates if not attending or not attending.isdisjoint(layers)]
    return [layers for i, layers in enumerate(candidates) if layers not in candidates[:i]]


def attention_layers(kinds: Sequence[str]) -> set[int]:
    """Return the layers with attention of a target that has layers of states as well; none for other targets."""
    attending = {index for index, kind in enumerate(kinds) if kind not in (*STATES, "dummy")}
    return set() if set(STATES).isdisjoint(kinds) else attending


def alternating_layers(kinds: Sequence[str], count: int) -> list[int]:
    """Return layers whose kinds alternate as the target's do, evenly spaced, the last one the last with attention.

    Their kinds are those of `count` adjacent layers that end with attention, and so whole periods if there are enough;
    among such, the nearest to the target's proportions, and with states if any are.
    """
    attending = attention_layers(kinds)

    def difference(window: Sequence[str]) -> tuple[bool, float]:
        wanted = {kind: count * kinds.count(kind) / len(kinds) for kind in kinds}
        return set(STATES).isdisjoint(window), sum(abs(window.count(kind) - n) for kind, n in wanted.items())

    # Layers without either may stand between the two, so that few adjacent ones would have no states.
    orders = [range(len(kinds)), [index for index, kind in enumerate(kinds) if kind != "dummy"]]
    windows = [
        [kinds[index] for index in order[end + 1 - count : end + 1]]
        for order in orders
        for end in reversed(range(count - 1, len(order)))
        if order[end] in attending
    ]
    pattern = min(windows or [list(kinds[:count])], key=difference)
    earliest = [-1]
    for kind in pattern:
        earliest.append(kinds.index(kind, earliest[-1] + 1))
    end = max(index for index, kind in enumerate(kinds) if kind == pattern[-1])
    layers, after = list[int](), end + 1
    for place in reversed(range(count)):
        even = end - (count - 1 - place) * end / max(count - 1, 1)
        # The nearest layer of this kind that leaves room for those before it.
        fitting = [index for index in range(earliest[place + 1], after) if kinds[index] == pattern[place]]
        after = min(fitting, key=lambda index: abs(index - even))
        layers.insert(0, after)
    return layers


def describe(layers: Sequence[int], kinds: Sequence[str]) -> str:
    """Return the number of layers of each kind, and which they are."""
    groups = {kind: [index for index in layers if kinds[index] == kind] for kind in dict.fromkeys(kinds)}
    return ", ".join(
        f"{len(group)} {'other' if kind == 'dummy' else kind} ({', '.join(map(str, group))})"
        for kind, group in groups.items()
        if group
    )


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
