"""Checks of a training step: finite numbers, a first loss no worse than a uniform guess, and the run's time limit.

Shape suffixes: N positions, H hidden.
"""

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from draftsmith.decode.errors import InputError
from draftsmith.decode.progress import time_text
from draftsmith.train.losses.output_head import OutputHead

NAMED = 32  # the most samples that a message names

Learner = tuple[Tensor, OutputHead]  # a head's hidden states, (N, H), and the head

NOISE = 1.2  # the tolerance above the uniform loss: random weights begin above it, since their logits differ


def require_finite(
    accelerator: Accelerator, loss: Tensor, norm: Any, samples: Callable[[], list[str]], step: int
) -> None:
    """Require a finite loss on each process and a finite gradient norm; all processes call this together.

    `loss` is this process's, summed over its parts of the step. `norm` is that of all gradients; None where it may be
    infinite. The process with the first infinite loss raises an InputError that names its `samples`; if only the norm
    is not finite, the first process names all. The others exit silently.
    """
    # Both numbers and all processes share one check, because reading a result waits for the device.
    checked = loss.detach().float()
    if norm is not None:
        whole = norm.full_tensor() if isinstance(norm, DTensor) else torch.as_tensor(norm, device=checked.device)
        checked = checked + 0.0 * whole.float()  # NaN if either is not finite
    if accelerator.reduce((~checked.isfinite()).float()).item() == 0:
        return
    rank, own_loss = accelerator.process_index, float(loss)
    losses = gather_object([(rank, own_loss)])
    infinite = [(other, value) for other, value in losses if not math.isfinite(value)]
    names = samples() if not infinite or infinite[0][0] == rank else []
    if not infinite:
        names = gather_object(names)
    what, (speaker, value) = ("loss", infinite[0]) if infinite else ("gradient norm", (0, float(whole)))
    if speaker != rank:
        sys.exit(2)
    where = f" on rank {rank}" if infinite and len(losses) > 1 else ""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    raise InputError(
        f"{what}: expected a finite number, found {value}{where} in step {step} on the samples "
        f"{', '.join(names[:NAMED])}{more}; nothing that was learned from them is kept (look at them, or lower "
        "training.learning_rate)"
    )


class FirstLoss:
    """The sums of a run's losses in its first step, and of the losses of uniform distributions in their place.

    A drafter that starts from trained weights and begins above the uniform loss has lost something on the way.
    """

    def __init__(self) -> None:
        self._sums: Tensor | None = None
        self._tokens = 0

    def beside_uniform(self, loss_of: Callable[[Sequence[Learner]], Tensor], learners: Sequence[Learner]) -> Tensor:
        """Return `loss_of(learners)`, a sum over positions; record it, and that of heads whose logits are all 0."""
        loss = loss_of(learners)
        states_NH, head = learners[0]
        self._tokens = len(head.weight)
        blank = OutputHead(head.weight.new_zeros(self._tokens, 1))
        with torch.no_grad():
            uniform = loss_of([(states_NH.new_zeros(len(states_NH), 1), blank)] * len(learners))
        pair = torch.stack([loss.detach(), uniform]).float()
        self._sums = pair if self._sums is None else self._sums + pair
        return loss

    def tell(self, accelerator: Accelerator, count: Any, cause: str) -> None:
        """Warn if the loss is above the uniform one, with the probable `cause`; all processes call this together.

        `count` is the number of tokens in the whole step, by which the logged loss is divided too.
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


class Overfit(TrainerCallback):  # type: ignore[misc]
    """The end of training once replay accepts each guess almost always, on the samples that are learned from."""

    enough = 0.95

    @staticmethod
    def reached(metrics: Mapping[str, float]) -> float:
        """Return the least `alpha` of all guesses; NaN is less than any."""
        alphas = [value for name, value in metrics.items() if name.startswith("eval_alpha")]
        return -1.0 if any(map(math.isnan, alphas)) else min(alphas)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, metrics: Any = None, **_: Any
    ) -> None:
        """Stop training if that is enough."""
        control.should_training_stop |= self.reached(metrics) >= self.enough

    @classmethod
    def require(cls, state: TrainerState) -> None:
        """Raise InputError if it was not enough in the last evaluation of a run, or tell that it was."""
        last = next(entry for entry in reversed(state.log_history) if "eval_alpha" in entry)
        found = f"{cls.reached(last):.3f} after {last['step']} steps"
        if cls.reached(last) < cls.enough:
            remedy = "something on the way is wrong, or it needs more training.max_steps or another learning rate"
            raise InputError(f"overfit: expected each guess's alpha to reach {cls.enough}, found {found}: {remedy}")
        if state.is_world_process_zero:
            print(f"overfit: each guess's alpha has reached {found}; now measure on their prompts", file=sys.stderr)


class Deadline(TrainerCallback, ExportableState):  # type: ignore[misc]
    """A time limit, which ends training after the first step past it; the first process's clock decides for all.

    A checkpoint keeps the seconds trained so far, and a run resumed from it counts them.
    """

    def __init__(self, seconds: float):
        self.seconds, self._begin = seconds, 0.0

    def state(self) -> dict[str, Any]:
        """Return the state to keep in a checkpoint."""
        trained = time.perf_counter() - self._begin
        return {"args": {"seconds": self.seconds}, "attributes": {"trained": trained}}

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Start the clock."""
        # Read here: the Trainer restores callbacks only on request, and then with the old limit.
        callbacks: Any = state.stateful_callbacks
        kept = callbacks.setdefault(type(self).__name__, {})
        trained = kept.get("attributes", {}).get("trained", 0.0) if state.global_step else 0.0
        self._begin = time.perf_counter() - trained

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Stop training past the limit; the last step is evaluated and saved as usual."""
        over = time.perf_counter() - self._begin >= self.seconds
        if args.world_size > 1:  # all processes must stop after the same step
            decision = torch.tensor(over, device=args.device)
            dist.broadcast(decision, 0)
            over = bool(decision)
        if not over or state.global_step >= state.max_steps:
            return
        control.should_training_stop = True
        # Stopping ends the epoch, so the "epoch" strategies save and evaluate by themselves.
        control.should_save |= args.save_strategy == "steps"
        control.should_evaluate |= args.eval_strategy == "steps"
        if state.is_world_process_zero:
            print(
                f"training: its {time_text(self.seconds)} are over after step {state.global_step} of {state.max_steps}",
                file=sys.stderr,
            )
