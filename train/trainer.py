"""The Trainer of all recipes: a frozen target and a model in training.

Two of the methods overridden here are private in the library's Trainer, as are some in `train/job/saving.py`: it has no
public way to set a sampler (`_get_train_sampler`) or to see the gradients' norm before the step (`_get_grad_norm`). So
pyproject bounds the library's version from above.

Shape suffixes: B rows, T positions, H hidden.
"""

import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from types import SimpleNamespace
from typing import Any, Self, cast

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.data import Sampler as DataSampler
from transformers import EarlyStoppingCallback, PreTrainedModel, PreTrainedTokenizerBase, ProgressCallback, TrainerState
from transformers.training_args import OptimizerNames

from draftsmith.decode.cache import rotate_by_text
from draftsmith.decode.draft_models.vocabulary import token_count
from draftsmith.decode.errors import InputError
from draftsmith.decode.sampling import Sampler
from draftsmith.train.data.examples import CompletionCollator, EpochSampler, TrainingData
from draftsmith.train.job.flops import Work
from draftsmith.train.job.optimizer import MuonAdamW
from draftsmith.train.job.resume import JobRecord
from draftsmith.train.job.saving import SavingTrainer
from draftsmith.train.job.step_checks import Deadline, FirstLoss, Learner, Overfit, require_finite
from draftsmith.train.job.telemetry import Telemetry, TrainingProgress
from draftsmith.train.losses.chunked import ChunkSizes
from draftsmith.train.losses.cut_vocabulary import CutVocabulary, LossVocabulary
from draftsmith.train.losses.objective import Objective
from draftsmith.train.losses.output_head import OutputHead, head_of, last_hidden
from draftsmith.train.losses.positions import IGNORED
from draftsmith.train.models import load_config, wants_bounds
from draftsmith.train.options import seconds_of
from draftsmith.train.quantization import quantization_of, teacher_in_words
from draftsmith.train.recipe import RecipeConfig
from draftsmith.train.runs import argument_errors
from draftsmith.train.sharding import check_sharding
from draftsmith.train.teacher.feature_reader import cached_states
from draftsmith.train.teacher.state_cache import StateCache

# DeepSpeed warns about a missing GPU on import, even if nothing uses it.
logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to CPU" not in record.getMessage())
READ = ("input_ids", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""The columns of a batch that a model reads."""


class RecipeTrainer(SavingTrainer, ABC):
    """`transformers.Trainer` with a frozen target, whole checkpoints, and errors that name the samples.

    A loss is a sum over the completion tokens of a micro-batch ÷ the token count of the global batch. Micro-batches and
    processes thus weigh by their tokens, and the split of a batch does not change its loss.
    """

    ahead = 0
    """How many tokens after the next one a position also learns: K − 1 where it has K labels."""
    objective: Objective
    vocabulary: LossVocabulary
    cut: CutVocabulary | None
    state_cache: StateCache | None = None
    """The target's states for later epochs and other trainings; None computes them each time."""
    needs_host_arrays = False
    """Whether batches also keep their arrays on the host, to plan computations without a device synchronisation."""

    def __init__(
        self,
        model: PreTrainedModel,
        target: PreTrainedModel | None,
        tokenizer: PreTrainedTokenizerBase,
        config: RecipeConfig,
        train_dataset: TrainingData,
        eval_dataset: TrainingData | None = None,
        **kwargs: Any,
    ):
        self.recipe, self.data = config, train_dataset
        self.target_ends: Any = target
        if config.states_given:  # batches hold the target's states or distributions: it is not run, nor moved
            target = None
        rate_given, width = config.training.learning_rate is not None, model.config.get_text_config().hidden_size
        if not rate_given:
            config.training.learning_rate = config.defaults.learning_rate(width)
        models = [part for part in (model, target) if part is not None]
        bounds = wants_bounds(*(part for part in models if isinstance(part, PreTrainedModel)))
        by_text = any([rotate_by_text(part) for part in models])  # a list: each model must be changed
        options = self.ahead, config.prompt_loss, bounds, self.needs_host_arrays, by_text
        data: dict[str, Any] = {"train_dataset": train_dataset, "eval_dataset": eval_dataset}
        data |= {"data_collator": CompletionCollator(tokenizer, *options), "processing_class": tokenizer}
        with argument_errors():
            super().__init__(model=model, args=config.training, **data, **kwargs)
        if not rate_given:  # only now is it known whether the drafter is sharded
            self.args.learning_rate = config.defaults.learning_rate(width, self.muon)
        if self.pop_callback(ProgressCallback):
            self.add_callback(TrainingProgress)
        if config.patience is not None:
            self.add_callback(EarlyStoppingCallback(config.patience))
        if config.overfit is not None:
            self.add_callback(Overfit())
        if config.stop_after is not None:
            self.add_callback(Deadline(seconds_of(config.stop_after, "stop_after")))
        self.tokenizer = tokenizer
        self.sizes = ChunkSizes.of(self.args.device, config.loss_chunk)
        self.sampler = Sampler.of(config.temperature, config.top_k, config.top_p)
        # Both heads may have more rows than the tokenizer has tokens; the extra rows are cut off everywhere.
        code = config.trust_remote_code
        stored_config = load_config(config.target, trust_remote_code=code)
        target_config = stored_config if target is None else target.config
        self.vocab_size = token_count(tokenizer, target_config)
        quantization = quantization_of(target_config) or quantization_of(stored_config)
        self.teacher = teacher_in_words(quantization, None if target is None else target.dtype)
        self.target: Any = None if target is None else target.eval().requires_grad_(False)
        """None with a teacher cache; `target_ends` has the target's embeddings and head, if the cache has them."""
        placed = config.target_sharded or config.target_quantization
        if self.target is not None and not placed:
            self.target.to(self.args.device)
        self.telemetry = Telemetry(self.args, self.work)
        self.clock = self.telemetry.clock
        # Makes the Trainer count the completion tokens of the global batch and pass the count to `compute_loss`.
        self.model_accepts_loss_kwargs = True
        # The rows of the current step, a tensor for each micro-batch: reading their values would wait for the device.
        self._step_samples: list[Tensor] = []
        self._step_loss = torch.zeros(())
        self._step_tokens: Tensor | int | None = None
        self._first_loss: FirstLoss | None = FirstLoss()  # None after the first step
        # A learning rate chosen for AdamW is too low for Muon, so a line names the optimizer that it applies to.
        if (not rate_given or (self.muon and config.optimizer == "auto")) and self.is_world_process_zero():
            name = "Muon" if self.muon else OptimizerNames(self.args.optim).value
            print(f"optimizer: {name}, learning rate {self.args.learning_rate:g}", file=sys.stderr)

    @classmethod
    def without_data(cls, **parts: Any) -> Self:
        """Return a trainer with these attributes that only computes losses, on fake tensors."""
        trainer = cls.__new__(cls)
        trainer.args, trainer.state = cast(Any, SimpleNamespace(device=torch.device("cpu"))), TrainerState()
        vars(trainer).update(parts)
        return trainer

    def compare_over(self, objective: Objective, tokens_D: Tensor | None, vocab_size: int) -> None:
        """Let the loss compare p and q over some of the target's tokens, or all for None."""
        tokens_D = None if tokens_D is None else tokens_D.to(self.args.device)
        self.vocabulary = LossVocabulary.of(objective, tokens_D, vocab_size)
        self.objective, self.cut = self.vocabulary.objective, self.vocabulary.cut

    @property
    def job(self) -> JobRecord:
        """The properties that a run must share with this one to resume from its checkpoints."""
        fingerprint = self.data.fingerprint(self.recipe.source_weights)
        return JobRecord.of(self.args, self.accelerator, len(self.data), fingerprint, self.recipe.lasting)

    def create_accelerator_and_postprocess(self) -> None:
        """Check precision and sharding, with messages that name our fields."""
        super().create_accelerator_and_postprocess()
        if self.args.fp16 and self.args.device.type == "cpu":  # the library would silently ignore it
            raise InputError("training.fp16: expected a GPU for it, found a CPU; training.bf16 runs on both")
        check_sharding(self.accelerator, self.recipe.optimizer)

    @property
    def muon(self) -> bool:
        """Whether Muon trains the matrices."""
        return self.recipe.uses_muon(sharded=self.is_fsdp_enabled or self.is_deepspeed_enabled)

    @property
    def adamw_modules(self) -> Sequence[nn.Module] | None:
        """The modules whose matrices Muon leaves to AdamW; None for a language model's embeddings and head."""
        return None

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """Create Muon if the recipe uses it, or the optimizer of `training.optim`."""
        if self.optimizer is None and self.muon:
            module: Any = self.model
            self.optimizer = MuonAdamW(module, self.args.learning_rate, self.args.weight_decay, self.adamw_modules)
        return super().create_optimizer(model)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return a loader whose order depends on the seed and the epoch alone."""
        loader: Any = super().get_train_dataloader()
        order = self._get_train_sampler()
        if isinstance(order, EpochSampler):
            loader.set_sampler(order)  # or accelerate does not tell it the epoch when it skips batches on resume
        return loader

    def _get_train_sampler(self, train_dataset: Any = None) -> DataSampler[Any] | None:
        """Return our sampler for source weights, and for lengths, which the library's would read from all rows."""
        grouped = self.args.train_sampling_strategy == "group_by_length"
        if not grouped and not self.recipe.source_weights:
            return super()._get_train_sampler(train_dataset)
        size = self.args.train_batch_size * self.args.world_size * self.args.gradient_accumulation_steps
        return EpochSampler(self.data, self.args.seed, size if grouped else None, self.recipe.source_weights)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """Take the batches of a step, let `step_batches` change them, and count their loss tokens."""
        with self.clock.phase("data"):
            batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        with self.clock.phase("text"):
            batches = self.step_batches(batches)
        if self.recipe.prompt_loss:
            batches = [_with_all_labels(batch) for batch in batches]
        tokens = self._get_num_items_in_batch(batches, device)
        self.telemetry.count(batches, tokens)
        return batches, tokens

    def step_batches(self, batches: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
        """Return the batches that a step learns from; on-policy recipes replace those of the data."""
        return batches

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Run a micro-batch's forward and backward; `_get_grad_norm` checks once a step that the loss is finite."""
        self._step_samples.append(inputs["index"])
        with self.clock.phase("draft"):
            loss = super().training_step(model, inputs, num_items_in_batch)
        self._step_loss, self._step_tokens = loss + self._step_loss, num_items_in_batch
        return loss

    def checked_loss(self, loss_of: Callable[[Sequence[Learner]], Tensor], *learners: Learner) -> Tensor:
        """Return `loss_of(learners)`, a sum over positions, and compare it in the first step with the uniform loss."""
        if self._first_loss is None or self.state.global_step:
            return loss_of(learners)
        return self._first_loss.beside_uniform(loss_of, learners)

    @property
    @abstractmethod
    def bad_start_cause(self) -> str:
        """The reason why a loss may begin above the uniform one, and a remedy."""

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        grad_norm = super()._get_grad_norm(model, grad_norm)
        # Under float16 scaled gradients may overflow: the scaler skips such steps, so their norm is not an error.
        norm = grad_norm if self.accelerator.scaler is None else None
        require_finite(self.accelerator, self._step_loss, norm, self._samples_of_step, self.state.global_step + 1)
        if self._first_loss is not None:
            self._first_loss.tell(self.accelerator, self._step_tokens, self.bad_start_cause)
            self._first_loss = None
        self._step_samples, self._step_loss = [], torch.zeros(())
        return grad_norm

    def _samples_of_step(self) -> list[str]:
        return self.data.sample_ids(torch.cat(self._step_samples).tolist())

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Return a micro-batch's summed loss ÷ the token count of the global batch (its own, if that is None)."""
        total = self.summed_loss(model, inputs)
        loss = total / (max(len(inputs["positions"][0]), 1) if num_items_in_batch is None else num_items_in_batch)
        if num_items_in_batch is not None and self.args.average_tokens_across_devices:
            # Gradients are averaged over processes, but the count is their sum already.
            loss = loss * self.accelerator.num_processes
        return (loss, {}) if return_outputs else loss

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Tensor], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[None, Tensor, Tensor]:
        """Return each sample's replay sums in place of logits; one is its summed loss, divided by the tokens later."""
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            sums = self.replay_sums(model, inputs, inputs["labels"][:, 1:] != IGNORED)
        return None, sums, sums[:, :1]

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate as the library does, as a phase of its own on the clock."""
        with self.clock.phase("evaluation"):
            return super().evaluate(*args, **kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, and add to a training loss the telemetry of the steps since the last log."""
        if "loss" in logs:
            logs |= self.telemetry.entries(self.state)
        super().log(logs, start_time)

    def trained_work(self) -> Work | None:
        """Return the arithmetic of the trained model, which is a causal LM unless a recipe overrides this."""
        return Work.of(self.model)  # type: ignore[arg-type]

    @cached_property
    def works(self) -> tuple[Work | None, Work | None]:
        """The arithmetic of the target, None without one or if it is not known, and of the trained model."""
        return None if self.target is None else Work.of(self.target), self.trained_work()

    def work(self, positions: float, seen: float, tokens: float) -> float | None:
        """Return the operations of some steps; `seen` is the sum over tokens of the tokens that each attends to."""
        teacher, student = self.works
        if student is None or (teacher is None and self.target is not None):
            return None
        frozen = 0.0 if teacher is None else teacher.forward(positions, seen, tokens)
        return frozen + student.step(positions, seen, tokens)

    @abstractmethod
    def summed_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """Return the loss of a batch, summed over the positions whose next token has a label."""

    @abstractmethod
    def replay_sums(self, model: nn.Module, inputs: dict[str, Any], chosen_BT: Tensor) -> Tensor:
        """Return each sample's sums for `compute_metrics`, (B, columns), over the positions `chosen_BT`, (B, T − 1)."""

    def target_hidden(self, inputs: dict[str, Any]) -> Tensor:
        """Return the target's last hidden states of a batch, (B, T, H), on the device of the loss."""
        if "teacher" in inputs:  # from a cache, perhaps in another dtype than the head's
            return cached_states(inputs["teacher"])["hidden"].to(self.target_head.weight.dtype)

        def states_of(batch: dict[str, Tensor]) -> Tensor:
            moved = send_to_device(batch, self.target.device)
            return last_hidden(self.target, **moved).to(self.args.device)

        with torch.no_grad(), self.clock.phase("teacher"):
            if self.state_cache is None or "position_ids" in inputs:
                return states_of(texts(inputs))
            return self.state_cache.of(inputs, lambda ids: states_of({"input_ids": ids}))

    @cached_property
    def target_head(self) -> OutputHead:
        """The target's head on the device of the loss."""
        return head_of(self.target_ends).cut(self.vocab_size).to(self.args.device)

    @cached_property
    def teacher_head(self) -> OutputHead:
        """The rows of the target's head that the objective needs."""
        return self.vocabulary.teacher_head(self.target_head)


def texts(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the columns of a batch that a model reads: tokens, and the bounds of samples in packed rows."""
    return {name: inputs[name] for name in READ if name in inputs}


def _with_all_labels(batch: dict[str, Any]) -> dict[str, Any]:
    """Return a batch that labels prompt tokens too, except padding and the first token of each text."""
    ids_BT, positions = batch["input_ids"], batch["text_positions"]
    labels_BT, labelled_N = torch.full_like(ids_BT, IGNORED), positions[0] + 1
    labels_BT.view(-1)[labelled_N] = ids_BT.flatten()[labelled_N]
    labelled = {**batch, "labels": labels_BT, "positions": positions}
    if "host" in batch:
        labelled["host"] = batch["host"] | {"positions": batch["host"]["text_positions"]}
    return labelled
