"""A Trainer that resumes from a checkpoint without an extra step, and reports a damaged one in one line.

From a checkpoint in the middle of the last epoch, the library takes one step too many. On a damaged checkpoint it fails
in many ways, or ignores missing weights. It also saves weights under the names of an architecture's files on the hub
(GPT-NeoX's head is `embed_out` there and `lm_head` here), and then does not find them. Six methods overridden here are
private in the library.
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

WAY_OUT = "remove it to continue from the one before, or give another training.output_dir"


@dataclass(frozen=True)
class StepsTaken:
    """A run's progress when it wrote a checkpoint or ended."""

    global_step: Count  # steps taken
    max_steps: Count  # steps planned
    log_history: list[dict[str, Any]]

    @classmethod
    def of(cls, directory: Path) -> "StepsTaken | None":
        """Read the progress in a checkpoint or a finished run's directory; None if there is none."""
        try:
            return read(cls, directory / TRAINER_STATE_NAME)
        except FileNotFoundError:
            return None


class CheckpointedTrainer(Trainer):
    """`transformers.Trainer` with another way to resume."""

    _resumed_step = 0  # the step of the checkpoint that the run resumes from

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> TrainOutput:
        """Train, or resume from a checkpoint; an InputError says if it is damaged, or of another model."""
        if resume_from_checkpoint is not None:
            with _reading_errors(resume_from_checkpoint):
                progress = StepsTaken.of(Path(resume_from_checkpoint))
                if progress is None:
                    raise InputError(f"expected {TRAINER_STATE_NAME}, found none")
                self._resumed_step = progress.global_step
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def planned_steps(self) -> int:
        """Return the number of steps that the arguments and the data give."""
        return int(super().set_initial_training_values(self.args, self.get_train_dataloader())[-1] or 0)

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        """Return the library's values, but no epochs if all steps are taken."""
        epochs, *others, steps = super().set_initial_training_values(args, dataloader)
        return (0 if self._resumed_step >= (steps or 0) else epochs, *others, steps)

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Find the best checkpoint in the present `output_dir`, which may have been renamed or moved."""
        taken = super()._init_training_state(*args, **kwargs)
        best = Path(str(self.args.output_dir)) / f"checkpoint-{self.state.best_global_step}"
        if best.is_dir():
            self.state.best_model_checkpoint = str(best)
        return taken

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        with _reading_errors(resume_from_checkpoint), self._hub_names_accepted():
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        with _reading_errors(self.state.best_model_checkpoint), self._hub_names_accepted():
            super()._load_best_model()

    @contextmanager
    def _hub_names_accepted(self) -> Iterator[None]:
        """Let the model load weights as `save_pretrained` wrote them; FSDP and DeepSpeed save the model's own names."""
        model: Any = self.model
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            yield
            return

        def rename(module: nn.Module, state: dict[str, Tensor], *_: Any) -> None:
            renamed = to_model_names(module, state)
            state.clear()
            state.update(renamed)

        handle = model.register_load_state_dict_pre_hook(rename)
        try:
            yield
        finally:
            handle.remove()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with _reading_errors(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with _reading_errors(checkpoint):
            super()._load_rng_state(checkpoint)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Raise an error if trained weights are missing or foreign; tied weights count once, frozen ones may miss."""
        model: Any = self.model
        parameters = dict(model.named_parameters(remove_duplicate=False))
        missing, foreign = set(load_result.missing_keys), load_result.unexpected_keys
        missing -= set(getattr(model, "_keys_to_ignore_on_save", None) or ())
        # A tied weight has several names, and a file holds it under one of them: compare tensors, not names.
        loaded = {id(parameter) for name, parameter in parameters.items() if name not in missing}
        lacking = [name for name in missing & parameters.keys() if id(parameters[name]) not in loaded]
        if lacking or foreign:
            problem = f"none for {min(lacking)}" if lacking else f"{foreign[0]}, which it does not have"
            raise InputError(f"weights of another model: {problem}")


def to_model_names(model: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a file's weights under the model's own names, undoing the `revert_weight_conversion` of `save_pretrained`.

    A state whose names the model all knows is returned as it is.
    """
    if state.keys() <= model.state_dict().keys():
        return dict(state)
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:  # the model was not loaded from a file: use those that the library reverts when it saves
        mapping = get_model_conversion_mapping(model, add_legacy=False)
        conversions = [conversion for conversion in mapping if not isinstance(conversion, PrefixChange)]
    renamings = [conversion for conversion in conversions if isinstance(conversion, WeightRenaming)]
    converters = [conversion for conversion in conversions if isinstance(conversion, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    collected: dict[str, Any] = {}
    for saved in sorted(state, key=dot_natural_key):  # experts must come in their order, in which they are stacked
        name, pattern = rename_source_key(saved, renamings, converters)
        if name not in collected:
            collected[name] = WeightRenaming(saved, name) if pattern is None else deepcopy(by_pattern[pattern])
        collected[name].add_tensor(name, saved, pattern or saved, state[saved])
    weights: dict[str, Tensor] = {}
    for name, conversion in collected.items():
        converted = conversion.convert(name, model=model, config=getattr(model, "config", None))
        weights |= {key: value[0] if isinstance(value, list) else value for key, value in converted.items()}
    return weights


@contextmanager
def _reading_errors(checkpoint: Any) -> Iterator[None]:
    """Turn any error while a checkpoint is read into an InputError with the checkpoint's name and the way out."""
    try:
        yield
    except Exception as error:
        if checkpoint is None or lacks_memory(error):
            raise
        problem = f"{checkpoint}: expected a checkpoint of this run, found: {first_line(error)}"
        raise InputError(f"{problem}; {WAY_OUT}") from error
