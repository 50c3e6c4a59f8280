"""The scale of weights copied from a target, chosen on a few texts before the first step.

A draft made of some of the target's layers, and heads that guess further ahead, are as confident as the target and less
often right. So their loss begins above that of uniform distributions. Scaling the logits down mends that, since logits
near zero are uniform. Shape suffixes: T positions of a text, N positions of all texts, V vocabulary, H hidden, K
guesses per position, S scales.
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
"""The number of texts, of completion tokens in each, and of tokens up to the last of these."""
LOGITS = 2**24  # the number of logits held at a time

T = TypeVar("T")


def choose_once(choose: Callable[[], T], together: bool = False) -> T:
    """Return the first process's choice on all processes.

    `together` calls `choose` on all of them, since a sharded model's forward needs all.
    """
    values: list[Any] = broadcast_object_list([choose() if together or is_first() else None])
    return values[0]  # type: ignore[no-any-return]


def print_once(line: str) -> None:
    """Print a line on stderr, from the first process only."""
    if is_first():
        print(line, file=sys.stderr)


@dataclass(frozen=True)
class Text:
    """A piece of a training text, which starts at `start` in `sample`, a row of `TrainingData`."""

    ids_T: Tensor
    labels_T: Tensor  # the tokens of completions, −100 elsewhere
    sample: Mapping[str, Any] = field(default_factory=dict)
    start: int = 0

    def ahead(self, count: int) -> Tensor:
        """Return the label `count` positions further for each position, (T,), −100 if there is none."""
        return torch.cat([self.labels_T[count:], self.labels_T.new_full((min(count, len(self.labels_T)),), IGNORED)])


def few_texts(data: TrainingData, count: int | None = None, tokens: int | None = None) -> list[Text]:
    """Return the beginnings of some completions after their prompts, evenly spaced over rows of single samples.

    There are `count` texts (default `TEXTS`), each with `tokens` of its completion (default `POSITIONS`) and at most
    `CONTEXT` tokens in all.
    """
    count, tokens, texts = count or TEXTS, tokens or POSITIONS, []
    for row in torch.linspace(0, len(data) - 1, min(count, len(data))).long().tolist():
        sample = data[row]
        labels = torch.tensor(sample["labels"])
        predicted = (labels != IGNORED).nonzero()
        end = int(predicted[0, 0]) + tokens if len(predicted) else 0
        piece = slice(max(0, end - CONTEXT), end)
        texts.append(Text(torch.tensor(sample["input_ids"])[piece], labels[piece], sample, piece.start))
    return [text for text in texts if len(text.ids_T) > 1]


@torch.no_grad()
def losses_of_scales(hidden_NH: Tensor, head: OutputHead, labels_NK: Tensor) -> Tensor:
    """Return the mean cross entropy of each guess, (S, K) in nats, for hidden states multiplied by each scale.

    `hidden_NH` is the head's input, on the same device. Labels of −100 are no guesses.
    """
    sums, counts = torch.zeros(len(SCALES), labels_NK.shape[1]), (labels_NK != IGNORED).sum(0).clamp(min=1)
    chunk = max(1, LOGITS // len(head.weight))
    for hidden, labels in zip(hidden_NH.split(chunk), labels_NK.split(chunk), strict=True):
        projected = torch.nn.functional.linear(hidden.to(head.weight.dtype), head.weight).float()
        for index, scale in enumerate(SCALES):
            logits = head.finish(projected * scale + (0.0 if head.bias is None else head.bias.float()))
            log_q = logits.gather(1, labels.clamp(min=0)) - logits.logsumexp(1, keepdim=True)
            sums[index] -= log_q.where(labels != IGNORED, 0.0).sum(0).cpu()
    return sums / counts.cpu()


def best_scale(
    states: Sequence[Tensor], labels_N: Tensor, head: OutputHead, cut: CutVocabulary | None, tokens: int
) -> float:
    """Return the scale with the least loss, for hidden `states` (N, H) in pieces that guess one token each.

    `cut` is the vocabulary of the guesses, None for all. A head of all may have more rows than there are `tokens`.
    """
    if cut is None:
        head = head.cut(tokens)
    else:
        labels_N = cut.labels(labels_N)
    return SCALES[int(losses_of_scales(torch.cat(list(states)), head, labels_N[:, None])[:, 0].argmin())]


def stack_guesses(texts: Sequence[Text], values: Sequence[Tensor], reach: int) -> tuple[Tensor, Tensor]:
    """Return the values of positions that guess any token, (N, …), and the tokens guessed, (N, K).

    `values` are those of each text's positions, (T, …). K is `reach`: guess k is the token 1 + k positions further.
    """
    chosen, labels = [], []
    for text, value in zip(texts, values, strict=True):
        labels_TK = torch.stack([text.ahead(1 + k) for k in range(reach)], dim=1).to(value.device)
        guesses = (labels_TK != IGNORED).any(1)
        chosen.append(value[guesses])
        labels.append(labels_TK[guesses])
    return torch.cat(chosen), torch.cat(labels)
