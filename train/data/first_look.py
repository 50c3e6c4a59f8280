"""The scale of weights that are copied from a target: chosen by a look at a few texts before the first step.

A draft of some of the target's layers, and heads that guess further ahead, are as sure as the target was and less often
right, so that they begin above the loss of uniform distributions. One number for all logits mends that: as it goes to
zero they become uniform. Shape suffixes: T positions of a text, N positions of all, V vocabulary, H hidden, K guesses
of a position, S scales.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor

from draftsmith.train.data.examples import TrainingData
from draftsmith.train.job.processes import is_first
from draftsmith.train.losses.cut_vocabulary import CutVocabulary
from draftsmith.train.losses.output_head import OutputHead
from draftsmith.train.losses.positions import IGNORED

SCALES = tuple(2.0**-i for i in range(6))
TEXTS, POSITIONS, CONTEXT = 8, 16, 128
"""How many texts are looked at, how many tokens of the completion of each, and how many tokens up to these."""
LOGITS = 2**24
"""Held at a time."""

T = TypeVar("T")


def chosen_once(choose: Callable[[], T], together: bool = False) -> T:
    """Return what the first process chooses, on all processes.

    Args:
        choose: called by the first process.
        together: have all processes call it, since a forward of a sharded model takes all of them.
    """
    values: list[Any] = broadcast_object_list([choose() if together or is_first() else None])
    return values[0]  # type: ignore[no-any-return]


def say_once(line: str) -> None:
    """Print a line on stderr, of one process alone."""
    if is_first():
        print(line, file=sys.stderr)


@dataclass(frozen=True)
class Text:
    """A piece of a text that is learned from."""

    ids_T: Tensor
    labels_T: Tensor
    """The tokens that are a completion's, −100 elsewhere."""
    sample: Mapping[str, Any] = field(default_factory=dict)
    """The row of `TrainingData` that it is of."""
    start: int = 0
    """Where in it."""

    def ahead(self, count: int) -> Tensor:
        """Return for each position the token that lies `count` further, (T,), −100 where it is none to learn."""
        return torch.cat([self.labels_T[count:], self.labels_T.new_full((min(count, len(self.labels_T)),), IGNORED)])


def few_texts(data: TrainingData, count: int | None = None, tokens: int | None = None) -> list[Text]:
    """Return the beginnings of some completions, each behind its prompt, evenly spaced over rows of single samples.

    Args:
        data: single samples.
        count: how many texts; `TEXTS` if None.
        tokens: how many of each completion, `POSITIONS` if None; with those before them at most `CONTEXT`.
    """
    count, tokens, texts = count or TEXTS, tokens or POSITIONS, []
    for row in torch.linspace(0, len(data) - 1, min(count, len(data))).long().tolist():
        sample = data[row]
        labels = torch.tensor(sample["labels"])
        places = (labels != IGNORED).nonzero()
        end = int(places[0, 0]) + tokens if len(places) else 0
        piece = slice(max(0, end - CONTEXT), end)
        texts.append(Text(torch.tensor(sample["input_ids"])[piece], labels[piece], sample, piece.start))
    return [text for text in texts if len(text.ids_T) > 1]


@torch.no_grad()
def losses_of_scales(hidden_NH: Tensor, head: OutputHead, labels_NK: Tensor) -> Tensor:
    """Return the cross entropies of guesses, (S, K), if the hidden states were scaled down: nats, each a mean.

    Args:
        hidden_NH: what the head sees.
        head: on the same device.
        labels_NK: what is guessed from each position, −100 for nothing.
    """
    sums, counts = torch.zeros(len(SCALES), labels_NK.shape[1]), (labels_NK != IGNORED).sum(0).clamp(min=1)
    chunk = max(1, LOGITS // len(head.weight))
    for hidden, labels in zip(hidden_NH.split(chunk), labels_NK.split(chunk), strict=True):
        projected = torch.nn.functional.linear(hidden.to(head.weight.dtype), head.weight).float()
        for place, scale in enumerate(SCALES):
            logits = head.finish(projected * scale + (0.0 if head.bias is None else head.bias.float()))
            log_q = logits.gather(1, labels.clamp(min=0)) - logits.logsumexp(1, keepdim=True)
            sums[place] -= log_q.where(labels != IGNORED, 0.0).sum(0).cpu()
    return sums / counts.cpu()


def best_scale(
    states: Sequence[Tensor], labels_N: Tensor, head: OutputHead, cut: CutVocabulary | None, tokens: int
) -> float:
    """Return the scale of least loss, of states that guess a token each.

    Args:
        states: what the head sees, (N, H) together.
        labels_N: the guessed tokens.
        head: on the same device.
        cut: what it can guess; None for all.
        tokens: of the tokenizer; a head of all may have more rows.
    """
    if cut is None:
        head = head.cut(tokens)
    else:
        labels_N = cut.labels(labels_N)
    return SCALES[int(losses_of_scales(torch.cat(list(states)), head, labels_N[:, None])[:, 0].argmin())]


def stacked(texts: Sequence[Text], values: Sequence[Tensor], reach: int) -> tuple[Tensor, Tensor]:
    """Return the values of positions from which something is guessed, (N, …), and the tokens that are, (N, K).

    Args:
        texts: the texts.
        values: of the positions of each, (T, …).
        reach: K; guess k is the token 1 + k further.
    """
    chosen, labels = [], []
    for text, value in zip(texts, values, strict=True):
        labels_TK = torch.stack([text.ahead(1 + k) for k in range(reach)], dim=1).to(value.device)
        some = (labels_TK != IGNORED).any(1)
        chosen.append(value[some])
        labels.append(labels_TK[some])
    return torch.cat(chosen), torch.cat(labels)
