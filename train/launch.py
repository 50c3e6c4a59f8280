"""A training run, from its config to the trained model: the entry point of all kinds of drafters."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from accelerate.utils import gather_object
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from draftsmith.decode.cache import positions_of
from draftsmith.decode.draft_models.vocabulary import token_count
from draftsmith.decode.errors import InputError, at_most
from draftsmith.decode.progress import phase
from draftsmith.train.checkpoint import end_of_sequence_ids, load_generation_config
from draftsmith.train.cli import parse_config
from draftsmith.train.data.examples import TrainingData, require_disjoint_prompts, split_off, training_examples
from draftsmith.train.data.generate import other_target
from draftsmith.train.data.packing import pack, require_packing
from draftsmith.train.data.shards import completion_files
from draftsmith.train.job import ranks
from draftsmith.train.job.checkpointed import StepsTaken
from draftsmith.train.job.kept_step import KeptStep
from draftsmith.train.job.lock import lock_directory
from draftsmith.train.job.processes import keep_few_kernels
from draftsmith.train.job.resume import newest_checkpoint, require_shared
from draftsmith.train.job.step_checks import Overfit
from draftsmith.train.losses.output_head import require_split
from draftsmith.train.models import (
    check_head,
    load_config,
    load_model,
    load_tokenizer,
    resolve_dtype,
    set_attention,
    vocabulary_size,
)
from draftsmith.train.provenance import as_json, recorded_config, write_run_record
from draftsmith.train.recipe import RecipeConfig
from draftsmith.train.runs import last_checkpoint, note_on_interrupt
from draftsmith.train.sharding import load_sharded
from draftsmith.train.teacher.cache_reader import SampleIndex
from draftsmith.train.teacher.feature_reader import find_features, find_served
from draftsmith.train.teacher.state_cache import StateCache
from draftsmith.train.trainer import RecipeTrainer

Config = TypeVar("Config", bound=RecipeConfig)
MORE = "a larger training.max_steps or num_train_epochs continues from there, another training.output_dir begins anew"


@phase("reading completions")
def read_data(config: RecipeConfig, positions: int | None = None) -> tuple[TrainingData, TrainingData | None]:
    """Return the samples to train on and the held-out ones, if any, to measure acceptance on.

    `positions` is the models' context length, or None without a limit. Raise InputError if completions cannot be used,
    are unfinished, were written by another target or differ between processes, or if both sides share prompts.
    """
    size = vocabulary_size(config.target, trust_remote_code=config.trust_remote_code)
    for path in (*config.completions, *config.heldout_directories):
        if not config.unfinished:
            completion_files(path, unfinished=False)
        other = None if config.any_target else other_target(path, config.target)
        if other is not None:
            other = f"{other}, whose config or weights are others; any_target learns from them all the same"
            raise InputError(f"{path}: expected completions that {config.target} wrote, found those of {other}")

    def read(field: str) -> TrainingData:
        options = config.max_length, size, Path(str(config.training.output_dir)), field, positions
        return training_examples(getattr(config, field), *options)

    train, heldout = read("completions"), None
    if config.overfit is not None:
        at_most(len(train)).check("overfit", config.overfit)
        train = heldout = train.select(np.arange(len(train)) < config.overfit)
    elif not isinstance(config.heldout, list):
        train, heldout = split_off(train, config.heldout)
    elif config.heldout:
        heldout = read("heldout")
        require_disjoint_prompts(train, heldout)
    sets = set(gather_object([(train.fingerprint(), heldout and heldout.fingerprint())]))
    if len(sets) > 1:
        raise InputError(f"completions: expected the same samples on all processes, found {len(sets)} different sets")
    return train, heldout


def load_target(config: RecipeConfig, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Load the target directly onto the devices that the config asks for."""
    device, code = config.training.device, config.trust_remote_code
    dtype = resolve_dtype(config.target_dtype, config.target, device=device, trust_remote_code=code)
    if config.target_sharded:
        target = load_sharded(config.target, device, dtype=dtype, trust_remote_code=code)
    else:
        # A target that is trained too may be sharded later, and may not fit one device before.
        on_device = config.target_quantization or not config.trains_target
        options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": code, "device": device if on_device else "cpu"}
        target = load_model(config.target, field="target", quantization=config.target_quantization, **options)
    check_head(target.config, tokenizer, "target")
    set_attention(target, config.attn_implementation)
    return target


class TrainingRun(ABC, Generic[Config]):
    """A training run of one kind of drafter: `train` calls the methods below in order, and kinds override them."""

    data: TrainingData
    heldout: TrainingData | None
    target: Any
    """The frozen target; with a cache of features its ends alone, with one of distributions None."""
    cached: SampleIndex | None = None
    """The index of the teacher caches, which replace the target's forwards; None without any."""
    state_cache: StateCache | None = None
    """The target's states of texts that it has read; None computes them each time."""

    def __init__(self, config: Config):
        """Read the target's tokenizer and config."""
        code = config.trust_remote_code
        self.config = config
        self.tokenizer = load_tokenizer(config.target, field="target", trust_remote_code=code)
        self.target_config = load_config(config.target, field="target", trust_remote_code=code)
        self.tokens = token_count(self.tokenizer, self.target_config)

    def train(self) -> RecipeTrainer:
        """Train or resume, and leave the model in `config.training.output_dir`."""
        config, args = self.config, self.config.training
        self.read_small_files()
        self.data, self.heldout = read_data(config, self.positions)
        self.target = self.load_target()
        model = self.make_model()
        if config.packing:
            for field, packed in self.packed_models(model).items():
                require_packing(packed, field, args.per_device_train_batch_size)
            self.data = pack(self.data, int(config.max_length or 0), by_source=bool(config.source_weights))
        trainer = self.make_trainer(model)
        trainer.state_cache = self.state_cache
        if self.cached is not None:
            self.cached.feed(trainer)
        run_training(trainer, lambda output: self.finish(trainer, output))
        if config.overfit is not None:
            Overfit.require(trainer.state)
        return trainer

    @property
    def positions(self) -> int | None:
        """The models' context length in tokens; None without a limit."""
        return positions_of(self.target_config)

    @cached_property
    def ends(self) -> list[int]:
        """The tokens that end the target's texts, which every draft must be able to propose."""
        config = self.config
        stored = load_generation_config(config.target, self.target_config, field="target")
        return [token for token in end_of_sequence_ids(stored, self.tokenizer) if token < self.tokens]

    @cached_property
    def begins(self) -> bool:
        """Whether there is no checkpoint to resume from, so that initial weights matter; a collective call."""
        return newest_checkpoint(str(self.config.training.output_dir)) is None

    def read_small_files(self) -> None:
        """Read and check small files first, before completions and weights take their time."""
        if self.config.teacher:
            self.cached = find_served(self.config)
        elif self.config.teacher_cache:
            self.cached = self.find_cached()

    def find_cached(self) -> SampleIndex:
        """Return the index of the teacher caches: the target's last hidden states, unless a kind needs others."""
        return find_features(self.config.teacher_cache, self.config, self.tokens)

    def load_target(self) -> PreTrainedModel | None:
        """Load the target, and require that its logits are a linear map of its hidden states; or what caches need."""
        if self.cached is not None:
            ends = self.cached.load_target(self.config)
            if ends is not None:
                check_head(ends.config, self.tokenizer, "target")
            return ends
        target = load_target(self.config, self.tokenizer)
        require_split(target, "target")
        return target

    @abstractmethod
    def make_model(self) -> Any:
        """Return the model to train."""

    def packed_models(self, model: Any) -> dict[str, PreTrainedModel]:
        """Return the models that must tell the samples of a packed row apart, by config field."""
        return {"target": self.target} if self.cached is None else {}

    @abstractmethod
    def make_trainer(self, model: Any) -> RecipeTrainer:
        """Return the trainer of the model from `make_model`."""

    def finish(self, trainer: Any, output: Path) -> None:
        """Write files such as a model card next to the weights; called by the saving process of each machine."""


def run_training(trainer: RecipeTrainer, finish: Callable[[Path], None] | None = None) -> None:
    """Train or resume, measure, and write the trained model and the record of the run to `output_dir`.

    The saving process of each machine calls `finish` with `output_dir` once the weights are written.
    """
    config, args = trainer.recipe, trainer.args
    output = Path(str(args.output_dir))
    with phase("looking for a checkpoint"):
        require_shared(args, trainer.accelerator)
        newest = newest_checkpoint(str(output))
        if newest is not None:
            trainer.job.require_resumable(newest)
        checkpoint = None if newest is None else str(newest)
        state = _finished(trainer, checkpoint)
    if state is not None:
        trainer.state = state
        if trainer.is_world_process_zero():
            steps, planned, kept = state.global_step, state.max_steps, KeptStep.left_in(output)
            early = f"it ended early, at step {steps} of {planned}"
            done = f"all {steps} steps are done" if steps >= planned else early
            done = f"training: {done}, and what was trained is in {output}"
            names = ", ".join(_changed(as_json(config), recorded_config(output)))
            changed = names and f"other settings than that run's change nothing: {names}; "
            print(f"{done}{'' if kept is None else f': {kept}'}; {changed}{MORE}", file=sys.stderr)
        return

    def note() -> str | None:
        last = last_checkpoint(str(output))
        return last and f"{Path(last).name} is kept in {output}"

    with note_on_interrupt(note):
        trainer.train(resume_from_checkpoint=checkpoint)
        if trainer.eval_dataset is not None and trainer.kept_step.score is None:
            trainer.evaluate()
        with phase("saving what was trained"):
            trainer.save_model(_internal_call=True)  # does not push yet
            trainer.save_state()
            if args.should_save:
                if finish is not None:
                    finish(output)
                trainer.job.write(output)
                write_run_record(output, config, args.device, trainer.kept_step)
            trainer.accelerator.wait_for_everyone()  # no process returns before the model is complete
    if trainer.is_world_process_zero():
        print(f"training: done, and what was trained is in {output}: {trainer.kept_step}", file=sys.stderr)
    if args.push_to_hub:
        with phase("uploading"):
            trainer.upload()


def _finished(trainer: RecipeTrainer, checkpoint: str | None) -> TrainerState | None:
    """Return the state of a finished run in `output_dir`, if it took all the steps that this run plans.

    A run that its patience ended early is finished too. Without a checkpoint, config and data must be the same. All
    processes call this together, and the first decides.
    """
    output = Path(str(trainer.args.output_dir))

    def found() -> TrainerState | None:
        recorded = recorded_config(output)
        progress = None if recorded is None else StepsTaken.of(output)
        if progress is None or trainer.planned_steps() > progress.max_steps:
            return None
        if checkpoint is None and not (recorded == as_json(trainer.recipe) and trainer.job.is_of(output)):
            return None
        return TrainerState.load_from_json(str(output / TRAINER_STATE_NAME))

    (state, *_) = gather_object([found()])
    return state


def _changed(now: Any, then: Any, prefix: str = "") -> Iterator[str]:
    """Yield the names of the settings that differ between two configs as JSON."""
    if isinstance(now, dict) and isinstance(then, dict):
        for name, value in now.items():
            yield from _changed(value, then.get(name, value), f"{prefix}.{name}" if prefix else name)
    elif now != then:
        yield prefix


def launch(kind: type[Config], recipe: Callable[[Config], Any], argv: Sequence[str] | None, prog: str) -> None:
    """Parse the config, train, and destroy the process group, or gloo may abort after correct output.

    After an exception the group is left, since destroying it waits for the other ranks; `ranks.run_rank` ends those.
    """
    config = parse_config(kind, argv, prog=prog)
    keep_few_kernels()
    ranks.watch(config.training.device)
    args = config.training
    alone = lock_directory(Path(str(args.output_dir)), "training.output_dir") if args.should_save else nullcontext()
    with alone:
        recipe(config)
    ranks.finish()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
