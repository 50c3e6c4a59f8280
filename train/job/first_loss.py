"""The first loss of a run beside that of a drafter that knows nothing: what begins above it was lost on the way.

Shape suffixes: N positions, H hidden.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from draftsmith.train.losses.output_head import OutputHead

Learner = tuple[Tensor, OutputHead]
"""What a head sees, (N, H), and that head."""

NOISE = 1.05
"""Random weights begin a little above the uniform loss, for their logits differ."""


class FirstLoss:
    """Sums the losses of a run's first step, and beside each the loss of uniform distributions in its place."""

    def __init__(self) -> None:
        self._sums: Tensor | None = None
        self._tokens = 0

    def beside_uniform(self, loss_of: Callable[[Sequence[Learner]], Tensor], learners: Sequence[Learner]) -> Tensor:
        """Return `loss_of(learners)`, a sum over positions, and remember it with that of heads whose logits are 0."""
        loss = loss_of(learners)
        seen_NH, head = learners[0]
        self._tokens = len(head.weight)
        blank = OutputHead(head.weight.new_zeros(self._tokens, 1))
        with torch.no_grad():
            uniform = loss_of([(seen_NH.new_zeros(len(seen_NH), 1), blank)] * len(learners))
        pair = torch.stack([loss.detach(), uniform]).float()
        self._sums = pair if self._sums is None else self._sums + pair
        return loss

    def tell(self, accelerator: Accelerator, count: Any, cause: str) -> None:
        """Warn where the loss is above the uniform one; all processes call this together, at the end of the step.

        Args:
            accelerator: of the processes.
            count: the tokens of the whole step, that the logged loss is divided by.
            cause: what the reason may be, and what to do.
        """
        if self._sums is None:  # the run resumed from a checkpoint
            return
        sums: Any = accelerator.reduce(self._sums, "sum")
        loss, uniform = (sums / count).tolist()
        if loss > NOISE * uniform and accelerator.is_main_process:
            print(
                f"warning: the first loss is {loss:.2f}, where {uniform:.2f} is that of a drafter that holds all "
                f"{self._tokens:,} tokens for equally likely: {cause}",
                file=sys.stderr,
            )
