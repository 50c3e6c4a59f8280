"""A Trainer whose checkpoints and models are always whole on disk, even if a write is interrupted."""

from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi
from torch import nn
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

from draftsmith.train.files import atomic_files, remove, replace_path
from draftsmith.train.job.checkpointed import CheckpointedTrainer
from draftsmith.train.job.kept_step import KeptStep
from draftsmith.train.models import DTYPES, load_config, stored_dtype
from draftsmith.train.runs import argument_errors, declare_dtype, full_disk_reported, in_dtype


class SavingTrainer(CheckpointedTrainer):
    """A Trainer that writes under another name, then renames. Subclasses set `recipe`, `job` and `clock`."""

    recipe: Any
    job: Any
    clock: Any
    _checkpoints: Path | None = None  # the directory of the checkpoint being written
    _best_alone: int | None = None  # the step of a checkpoint that was saved only because it was the best so far
    _superseded: int | None = None  # such a step, after a better one was found

    @property
    def kept_step(self) -> KeptStep:
        """The step whose weights the run leaves when it ends."""
        state, metric = self.state, str(self.args.metric_for_best_model or "mean_acceptance_length")
        best = self.args.load_best_model_at_end and state.best_model_checkpoint is not None
        step = int(state.best_global_step or 0) if best else state.global_step
        greater = self.args.greater_is_better is not False
        return KeptStep.of(step, state.global_step, metric.removeprefix("eval_"), greater, state.log_history)

    @property
    def kept_evaluation(self) -> dict[str, float]:
        """The kept step's metrics on held-out text; empty without such text."""
        step = self.kept_step.step
        log = [entry for entry in self.state.log_history if entry["step"] == step and "eval_alpha" in entry]
        return log[-1] if log else {}

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """Save the best step so far, even if no checkpoint is due."""
        best = super()._determine_best_metric(metrics, trial)
        there = (Path(str(self.args.output_dir)) / f"checkpoint-{self.state.global_step}").is_dir()
        if best and self.args.load_best_model_at_end:
            self._superseded = self._best_alone
            self._best_alone = None if self.control.should_save or there else self.state.global_step
            self.control.should_save = True
        return best

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save under another name, then rename: every `checkpoint-N` is whole, even after a kill."""
        directory = Path(str(self.args.output_dir))
        aside = directory / ".checkpoint.partial"
        if self.args.should_save:
            remove(aside)
        self.accelerator.wait_for_everyone()
        self._checkpoints = aside
        try:
            with full_disk_reported(directory), self.clock.phase("saving"):
                super()._save_checkpoint(model, trial)
        finally:
            self._checkpoints = None
        self.accelerator.wait_for_everyone()
        name = f"checkpoint-{self.state.global_step}"
        if self.state.best_model_checkpoint == str(aside / name):
            self.state.best_model_checkpoint = str(directory / name)
        if self.args.should_save:
            self.state.save_to_json(str(aside / name / TRAINER_STATE_NAME))
            self.job.write(aside / name)
            replace_path(aside / name, directory / name)
            remove(aside)
            if self._superseded is not None:
                remove(directory / f"checkpoint-{self._superseded}")
            rotate_checkpoints(
                str(directory), self.args.save_total_limit, self.state.best_model_checkpoint, use_mtime=True
            )
        self._superseded = None
        self.accelerator.wait_for_everyone()

    def upload(self) -> None:
        """Upload `output_dir` without checkpoints; `push_to_hub` would save the weights again, unfinished."""
        if not self.is_world_process_zero():
            return
        with argument_errors():
            HfApi().upload_folder(
                repo_id=str(self.hub_model_id),
                folder_path=str(self.args.output_dir),
                commit_message="End of training",
                token=self.args.hub_token,
                revision=self.args.hub_revision,
                ignore_patterns=["_*", ".*", f"{PREFIX_CHECKPOINT_DIR}-*"],
            )

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._checkpoints) if self._checkpoints else super()._get_output_dir(trial)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the whole model; in checkpoints, FSDP may keep it in shards as its `state_dict_type` says."""
        fsdp = self.accelerator.state.fsdp_plugin if self.is_fsdp_enabled and self._checkpoints is None else None
        if fsdp is None:
            return super().save_model(output_dir, _internal_call)
        kind = fsdp.state_dict_type
        fsdp.set_state_dict_type("FULL_STATE_DICT")  # otherwise the library saves nothing, silently
        super().save_model(output_dir, _internal_call)
        fsdp.set_state_dict_type(kind)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Write the model's files under other names, then rename each, so that no reader sees half a file."""
        directory = Path(output_dir or str(self.args.output_dir))
        if not self.args.should_save:
            return  # this process has only helped to gather the weights
        with full_disk_reported(Path(str(self.args.output_dir))), atomic_files(directory) as aside:
            self.write_model(str(aside), state_dict)

    def write_model(self, directory: str, state_dict: dict[str, Any] | None) -> None:
        """Write the model into a directory: as it trains for a checkpoint, otherwise as it is deployed."""
        if self._checkpoints is not None:
            return super()._save(directory, state_dict)
        super()._save(directory, in_dtype(self.deployed_state(state_dict), self.save_dtype))
        declare_dtype(Path(directory), self.save_dtype)

    def deployed_state(self, state_dict: dict[str, Any] | None) -> dict[str, Any]:
        """Return the weights to deploy; recipes override this if checkpoints hold others."""
        return self.accelerator.unwrap_model(self.model).state_dict() if state_dict is None else state_dict

    @cached_property
    def save_dtype(self) -> torch.dtype:
        """The dtype of the deployed weights."""
        name, config = self.recipe.save_dtype, self.recipe
        if name == "auto":
            name = stored_dtype(load_config(config.stored_as, trust_remote_code=config.trust_remote_code))
        return DTYPES[name]
