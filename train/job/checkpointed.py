"""A Trainer that resumes from a checkpoint: it takes no step beyond the last, and says what is wrong with it.

The library takes one step more from a checkpoint in the middle of the last epoch, and fails on a damaged one in many
ways, or passes over weights that are missing. It also saves weights under the names that an architecture's files have
on the hub (GPT-NeoX's head is `embed_out` there and `lm_head` here), and does not find them again. Six methods that
are overridden here are private in it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import Trainer
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import TrainOutput

from draftsmith.decode.errors import InputError, first_line, lacks_memory
from draftsmith.decode.validation import Count, read

WAY_OUT = "remove it, to go on from what is before it, or give resume false and another training.output_dir"


@dataclass(frozen=True)
class StepsTaken:
    """How far a run was when it wrote this."""

    global_step: Count
    """Steps that were taken."""
    max_steps: Count
    """Steps that were to be taken."""
    log_history: list[dict[str, Any]]

    @classmethod
    def of(cls, directory: Path) -> "StepsTaken | None":
        """Read what a checkpoint, or a run that has ended, says; None where there is nothing.

        Raises:
            InputError: what is there is damaged.
        """
        try:
            return read(cls, directory / TRAINER_STATE_NAME)
        except FileNotFoundError:
            return None


class CheckpointedTrainer(Trainer):
    """`transformers.Trainer`, but for how it resumes."""

    _reached = -1
    """Steps of the checkpoint that it resumes from."""

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> TrainOutput:
        """Train, or resume from a checkpoint.

        Raises:
            InputError: a checkpoint that is damaged, or of another model.
        """
        if resume_from_checkpoint is not None:
            with _told(resume_from_checkpoint):
                progress = StepsTaken.of(Path(resume_from_checkpoint))
                if progress is None:
                    raise InputError(f"expected {TRAINER_STATE_NAME}, found none")
                self._reached = progress.global_step
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def planned_steps(self) -> int:
        """Return how many steps the arguments ask for, of these data."""
        return int(super().set_initial_training_values(self.args, self.get_train_dataloader())[-1] or 0)

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        """Return what the library reckons, and no epochs to go through where all steps are taken."""
        epochs, *others, steps = super().set_initial_training_values(args, dataloader)
        return (0 if self._reached >= (steps or 0) else epochs, *others, steps)

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Find the best checkpoint where `output_dir` is now: it may have another name, or another place."""
        taken = super()._init_training_state(*args, **kwargs)
        best = Path(str(self.args.output_dir)) / f"checkpoint-{self.state.best_global_step}"
        if best.is_dir():
            self.state.best_model_checkpoint = str(best)
        return taken

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        with _told(resume_from_checkpoint), self._names_of_the_hub_understood():
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        with _told(self.state.best_model_checkpoint), self._names_of_the_hub_understood():
            super()._load_best_model()

    @contextmanager
    def _names_of_the_hub_understood(self) -> Iterator[None]:
        """Have the model load weights as `save_pretrained` wrote them; FSDP and DeepSpeed save them as they train."""
        model: Any = self.model
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            yield
            return

        def rename(module: nn.Module, state: dict[str, Tensor], *_: Any) -> None:
            renamed = as_trained(module, state)
            state.clear()
            state.update(renamed)

        handle = model.register_load_state_dict_pre_hook(rename)
        try:
            yield
        finally:
            handle.remove()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with _told(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with _told(checkpoint):
            super()._load_rng_state(checkpoint)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Require that a checkpoint has what is trained: tied weights are there once, frozen ones need not be."""
        model: Any = self.model
        parameters = dict(model.named_parameters(remove_duplicate=False))
        missing, beside = set(load_result.missing_keys), load_result.unexpected_keys
        missing -= set(getattr(model, "_keys_to_ignore_on_save", None) or ())
        there = {id(parameter) for name, parameter in parameters.items() if name not in missing}
        lacking = [name for name in missing & parameters.keys() if id(parameters[name]) not in there]
        if lacking or beside:
            found = f"none for {min(lacking)}" if lacking else f"{beside[0]}, which it does not have"
            raise InputError(f"weights of another model: {found}")


def as_trained(model: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return weights as a model holds them: the way back from `revert_weight_conversion` of `save_pretrained`.

    Args:
        model: what they are of.
        state: as they are in a file; those of which the model knows each name stay as they are.
    """
    if state.keys() <= model.state_dict().keys():
        return dict(state)
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:  # not from a file: what the library then reverts when it saves
        mapping = get_model_conversion_mapping(model, add_legacy=False)
        conversions = [each for each in mapping if not isinstance(each, PrefixChange)]
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    of_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    collected: dict[str, Any] = {}
    for saved in sorted(state, key=dot_natural_key):  # experts in their order, as they are stacked
        name, pattern = rename_source_key(saved, renamings, converters)
        if name not in collected:
            collected[name] = WeightRenaming(saved, name) if pattern is None else deepcopy(of_pattern[pattern])
        collected[name].add_tensor(name, saved, pattern or saved, state[saved])
    found: dict[str, Tensor] = {}
    for name, conversion in collected.items():
        for each, value in conversion.convert(name, model=model, config=getattr(model, "config", None)).items():
            found[each] = value[0] if isinstance(value, list) else value
    return found


@contextmanager
def _told(checkpoint: Any) -> Iterator[None]:
    """Turn whatever reading a checkpoint raises into one line.

    Raises:
        InputError: names the checkpoint, and the way out.
    """
    try:
        yield
    except Exception as error:
        if checkpoint is None or lacks_memory(error):
            raise
        found = f"{checkpoint}: expected a checkpoint of this run, found: {first_line(error)}"
        raise InputError(f"{found}; {WAY_OUT}") from error
