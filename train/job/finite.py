"""One look a step at whether numbers are finite, shared by all processes: each look waits for the device."""

import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor
from torch.distributed.tensor import DTensor

from draftsmith.decode.errors import InputError

NAMED = 32
"""Samples that a message names."""


def require_finite(
    accelerator: Accelerator, loss: Tensor, norm: Any, samples: Callable[[], list[str]], step: int
) -> None:
    """Require a finite loss on each process and a finite norm of the gradients; all processes call it together.

    Args:
        accelerator: of the processes.
        loss: this process's, summed over its parts of the step, ().
        norm: of all gradients; None where it may be infinite.
        samples: names those that this process has seen in the step.
        step: its number.

    Raises:
        InputError: on the process whose loss is not finite, or the first where the norm alone is not; names that
            process and its samples, or those of all.
        SystemExit: on the others: it is said there.
    """
    seen = loss.detach().float()
    if norm is not None:
        whole = norm.full_tensor() if isinstance(norm, DTensor) else torch.as_tensor(norm, device=seen.device)
        seen = seen + 0.0 * whole.float()  # NaN, if either is not finite
    if accelerator.reduce((~seen.isfinite()).float()).item() == 0:
        return
    rank, found = accelerator.process_index, float(loss)
    losses = gather_object([(rank, found)])
    lost = [(place, value) for place, value in losses if not math.isfinite(value)]
    names = samples() if not lost or lost[0][0] == rank else []
    if not lost:
        names = gather_object(names)
    what, (place, value) = ("loss", lost[0]) if lost else ("gradient norm", (0, float(whole)))
    if place != rank:
        sys.exit(2)
    where = f" on rank {rank}" if lost and len(losses) > 1 else ""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    raise InputError(
        f"{what}: expected a finite number, found {value}{where} in step {step} on the samples "
        f"{', '.join(names[:NAMED])}{more}; nothing that was learned from them is kept (look at them, or lower "
        "training.learning_rate)"
    )
