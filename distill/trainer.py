"""The Trainer, with a frozen teacher and acceptance as its metric."""

import math
import shutil
import time
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import (
    EarlyStoppingCallback,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
)
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import rotate_checkpoints

from draftsmith.decode.errors import InputError
from draftsmith.decode.sampling import Law
from draftsmith.distill.config import DistillConfig
from draftsmith.distill.drafts import merged_state
from draftsmith.distill.on_policy import coin, continued, prompts_of
from draftsmith.distill.sharding import check_sharding, shard_decoder
from draftsmith.train.acceptance import acceptance_metrics, replay_features, replay_sums
from draftsmith.train.cached_laws import cached_law
from draftsmith.train.data import IGNORED, CompletionCollator, GroupedByLength, sample_ids
from draftsmith.train.heads import Head, head_of, last_hidden, require_split
from draftsmith.train.lean import lean_features, lean_sum
from draftsmith.train.models import tokenizer_size
from draftsmith.train.objective import Objective
from draftsmith.train.runs import move_files, told_of_full_disk
from draftsmith.train.teacher import CachedLaw, LiveLaw, TeacherLaw

OfHidden = Callable[[Tensor, Head], Any]
"""(last hidden states (B, T, H), the head) → what the draft's forward is to return."""


class DistillTrainer(Trainer):
    """`transformers.Trainer` that minimises an objective against a frozen target on the completions' positions.

    The loss is the mean over the completion tokens of the whole global batch: accumulation steps and processes with
    unequal token counts weigh by their tokens, so that the split of a batch does not change it. Neither model's logits
    are ever held whole. Evaluation replays held-out completions and reports `alpha`, `greedy_alpha`, `agreement` and
    `mean_acceptance_length`.
    """

    def __init__(
        self,
        draft: PreTrainedModel,
        target: PreTrainedModel | None,
        tokenizer: PreTrainedTokenizerBase,
        config: DistillConfig,
        train_dataset: Dataset,
        eval_dataset: Dataset | None = None,
        **kwargs: Any,
    ):
        require_split(draft, "draft")
        if target is not None:
            require_split(target, "target")
        _open(draft)
        self.config = config
        super().__init__(
            model=draft,
            args=config.training,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            data_collator=CompletionCollator(tokenizer),
            processing_class=tokenizer,
            compute_metrics=acceptance_metrics,
            **kwargs,
        )
        if config.patience is not None:
            self.add_callback(EarlyStoppingCallback(config.patience))
        self.tokenizer = tokenizer
        self.objective: Objective = config.objective
        self.law = Law.of(config.temperature, config.top_k, config.top_p)
        # Either head may be padded beyond the tokenizer, to different sizes: entries that are no token have no law.
        self.vocab_size = tokenizer_size(tokenizer)
        self.target: Any = None if target is None else target.eval().requires_grad_(False)
        """None where the laws come with the batches, out of a cache."""
        self._head_here: Head | None = None
        if self.target is not None and config.target_sharded:
            self._target_head(self.args.device)
            shard_decoder(self.target, self.args.device)
        elif self.target is not None and config.target_device is None and config.target_quantization is None:
            self.target.to(self.args.device)
        # Makes the Trainer count the completion tokens of the global batch and hand them to `compute_loss`.
        self.model_accepts_loss_kwargs = True
        self._step_samples: list[int] = []
        """Rows of the data set that the current step has seen."""
        self._checkpoints: Path | None = None
        """Where a checkpoint is being written."""
        self._written = {"on_policy_tokens": 0.0, "on_policy_seconds": 0.0}

    def create_accelerator_and_postprocess(self) -> None:
        """Learn what shards the draft, before the library complains of it in its own terms."""
        super().create_accelerator_and_postprocess()
        check_sharding(self.accelerator, self.config.optimizer)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Read the data in an order that the seed and the epoch alone decide, grouped by length or not."""
        loader = super().get_train_dataloader()
        if self.args.train_sampling_strategy == "group_by_length":
            size = self.args.train_batch_size * self.args.gradient_accumulation_steps
            loader.set_sampler(GroupedByLength(self.train_dataset, size, self.args.seed))  # type: ignore[attr-defined]
        return loader

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """Take the batches of a step; in a share of them the draft writes the completions anew.

        What counts then is counted again, whatever the data set said.
        """
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        # The same coin on every process: sampling from a sharded draft takes all of them.
        seeds = [(int(self.args.seed), self.state.global_step, part) for part in range(len(batches))]
        chosen = [part for part, seed in enumerate(seeds) if coin(*seed) < self.config.on_policy]
        start = time.perf_counter()
        for part in chosen:
            batches[part] = self._on_policy(self._prepare_inputs(batches[part]), seeds[part])
            self._written["on_policy_tokens"] += float((batches[part]["labels"] != IGNORED).sum())
        self._written["on_policy_seconds"] += time.perf_counter() - start
        if self.config.prompt_loss:
            batches = [{**batch, "labels": _all_labels(batch)} for batch in batches]
        return batches, self._get_num_items_in_batch(batches, device)

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Take a forward and a backward pass.

        Raises:
            InputError: the loss is not finite; names the samples.
        """
        self._step_samples.extend(inputs["index"].tolist())
        loss = super().training_step(model, inputs, num_items_in_batch)
        if not torch.isfinite(loss):
            raise InputError(self._not_finite("loss", loss.item()))
        return loss

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        grad_norm = super()._get_grad_norm(model, grad_norm)
        # float16 scales its loss, and skips the steps where the scaled gradients overflow.
        if self.accelerator.scaler is None and grad_norm is not None and not math.isfinite(float(grad_norm)):
            raise InputError(self._not_finite("gradient norm", float(grad_norm)))
        self._step_samples.clear()
        return grad_norm

    def _not_finite(self, what: str, value: float) -> str:
        return (
            f"{what}: expected a finite number, found {value} in step {self.state.global_step + 1} on the samples "
            f"{', '.join(sample_ids(self.train_dataset, self._step_samples))}; nothing was learned from them (look at "
            "them, or lower training.learning_rate)"
        )

    def _on_policy(self, batch: dict[str, Tensor], seeds: tuple[int, ...]) -> dict[str, Tensor]:
        draft = self.accelerator.unwrap_model(self.model)
        config = self.config
        generation = GenerationConfig(
            max_new_tokens=config.on_policy_tokens,
            do_sample=True,
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            eos_token_id=_ends(self.target, draft),
            pad_token_id=self.tokenizer.pad_token_id,
            suppress_tokens=list(range(self.vocab_size, draft.config.get_text_config().vocab_size)) or None,
        )
        with self.compute_loss_context_manager():
            made = continued(
                draft,
                prompts_of(batch),
                generation,
                config.max_length,
                (*seeds, self.accelerator.process_index),
                synced=self.is_fsdp_enabled or self.is_deepspeed_enabled,
            )
        return {**made, "index": batch["index"]}

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, with what sampling from the draft has cost since the last time."""
        if "loss" in logs and self.config.on_policy:
            tokens, seconds = self._written.values()
            found = self.accelerator.gather(torch.tensor([[tokens, seconds]], device=self.args.device))
            logs |= {"on_policy_tokens": float(found[:, 0].sum()), "on_policy_seconds": float(found[:, 1].max())}
            self._written = dict.fromkeys(self._written, 0.0)
        super().log(logs, start_time)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save aside, then rename: whatever happens meanwhile, every `checkpoint-N` is whole."""
        directory = Path(str(self.args.output_dir))
        aside = directory / ".checkpoint.partial"
        if self.args.should_save:
            shutil.rmtree(aside, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        self._checkpoints = aside
        try:
            with told_of_full_disk(directory):
                super()._save_checkpoint(model, trial)
        finally:
            self._checkpoints = None
        self.accelerator.wait_for_everyone()
        name = f"checkpoint-{self.state.global_step}"
        if self.state.best_model_checkpoint == str(aside / name):
            self.state.best_model_checkpoint = str(directory / name)
        if self.args.should_save:
            self.state.save_to_json(str(aside / name / TRAINER_STATE_NAME))
            shutil.rmtree(directory / name, ignore_errors=True)
            (aside / name).rename(directory / name)
            aside.rmdir()
            rotate_checkpoints(
                str(directory), self.args.save_total_limit, self.state.best_model_checkpoint, use_mtime=True
            )
        self.accelerator.wait_for_everyone()
        if self.args.push_to_hub:
            super()._push_from_checkpoint(str(directory / name))

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Wait for the checkpoint's own name: uploads run in the background."""

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._checkpoints) if self._checkpoints else super()._get_output_dir(trial)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the draft whole; in checkpoints FSDP keeps it in shards where its `state_dict_type` says so."""
        fsdp = self.accelerator.state.fsdp_plugin if self.is_fsdp_enabled and self._checkpoints is None else None
        if fsdp is None:
            return super().save_model(output_dir, _internal_call)
        kind = fsdp.state_dict_type
        fsdp.set_state_dict_type("FULL_STATE_DICT")  # the library saves nothing otherwise, and says nothing
        super().save_model(output_dir, _internal_call)
        fsdp.set_state_dict_type(kind)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Write the draft: aside, then each file renamed, so that no reader sees half of one."""
        directory = Path(output_dir or str(self.args.output_dir))
        aside = directory / ".draft.partial"
        if self._checkpoints is None:  # a checkpoint is gone on from, adapters and all; a draft is deployed
            state_dict = merged_state(self.model, state_dict)  # type: ignore[arg-type]
        with told_of_full_disk(Path(str(self.args.output_dir))):
            if self.args.should_save:
                shutil.rmtree(aside, ignore_errors=True)
            super()._save(str(aside), state_dict)
            if self.args.should_save:
                move_files(aside, directory)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Return the objective summed over this part's completion tokens ÷ the global batch's token count."""
        labels = inputs["labels"][:, 1:]
        chosen = labels != IGNORED
        objective = self.current_objective() if model.training else self.objective
        law = self._target_law(inputs, chosen) if objective.needs_target else None

        def loss_of(hidden: Tensor, head: Head) -> Tensor:
            return self._shortfall(objective, hidden[:, :-1][chosen], head, law, labels, chosen)

        total = model(**_texts(inputs), of_hidden=loss_of)
        if num_items_in_batch is None:
            loss = total / chosen.sum().clamp(min=1)
        else:
            loss = total / num_items_in_batch
            if self.args.average_tokens_across_devices:
                # Gradients are averaged over processes; the count is already the sum over them.
                loss = loss * self.accelerator.num_processes
        return (loss, {}) if return_outputs else loss

    def current_objective(self) -> Objective:
        """Return what this step minimises: the curriculum begins with the forward KL and ends with the objective."""
        steps = self.config.curriculum * self.state.max_steps
        return self.objective.after(self.state.global_step / steps) if steps else self.objective

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Tensor], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[None, Tensor, Tensor]:
        """Return, in place of logits, each sample's replay sums and loss, (B, 6).

        No loss by itself: the Trainer would average it over batches, whatever their token counts.
        """
        inputs = self._prepare_inputs(inputs)
        labels = inputs["labels"][:, 1:]
        chosen = labels != IGNORED

        def features_of(p: Tensor | CachedLaw, q_logits: Tensor, own: Tensor) -> Tensor:
            replayed = replay_features(p, q_logits, own, self.law)
            return torch.cat([replayed, self.objective.features(p, q_logits, own)], dim=1)

        with torch.no_grad(), self.compute_loss_context_manager():
            law = self._target_law(inputs, chosen)
            found = model(
                **_texts(inputs),
                of_hidden=lambda hidden, head: lean_features(
                    features_of,
                    labels[chosen],
                    hidden[:, :-1][chosen],
                    head.cut(self.vocab_size),
                    law,
                ),
            ).float()
        features = found.new_zeros(*labels.shape, found.shape[1])
        features[chosen] = found
        losses = [
            self.objective.shortfall(features[row][chosen[row]][:, 4:], _follows(chosen[row : row + 1]))
            for row in range(len(labels))
        ]
        sums = replay_sums(features[..., :4], chosen, self.config.draft_length)
        sums = torch.cat([sums, torch.stack(losses)[:, None]], dim=1)
        return None, sums, sums[:, :1]

    def _shortfall(
        self,
        objective: Objective,
        q_hidden: Tensor,
        head: Head,
        law: TeacherLaw | None,
        labels: Tensor,
        chosen: Tensor,
    ) -> Tensor:
        """Return the objective summed over the chosen positions, a scalar."""
        args = (labels[chosen], q_hidden, head.cut(self.vocab_size), law)
        if not objective.couples:
            weights = torch.ones(len(q_hidden), 1, device=q_hidden.device)
            return lean_sum(objective.features, weights, *args)[0]
        # Positions of a block weigh each other's gradients: first all values, then the gradients with these weights.
        features = lean_features(objective.features, *args).requires_grad_(True)
        with torch.enable_grad():
            total = objective.shortfall(features, _follows(chosen))
            (weights,) = torch.autograd.grad(total, features)
        linear = lean_sum(objective.features, weights, *args)[0]
        return linear - linear.detach() + total.detach()

    def _target_law(self, inputs: dict[str, Any], chosen: Tensor) -> TeacherLaw:
        if "teacher" in inputs:  # read from a cache, in the order of the chosen positions
            return cached_law(inputs["teacher"])
        with torch.no_grad():
            hidden = last_hidden(self.target, **_texts(inputs)).to(chosen.device)[:, :-1][chosen]
            return LiveLaw(hidden, self._target_head(chosen.device))

    def _target_head(self, device: torch.device) -> Head:
        """Return the target's head where the loss is taken: of a target elsewhere, a copy that is made once."""
        if self._head_here is None:
            self._head_here = head_of(self.target).cut(self.vocab_size).to(device)
        return self._head_here


def _texts(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return what a model reads of a batch: packed rows have positions in place of a mask."""
    return {name: inputs[name] for name in ("input_ids", "attention_mask", "position_ids") if name in inputs}


def _all_labels(batch: dict[str, Tensor]) -> Tensor:
    """Return the tokens of prompts and completions as labels, (B, T), but for the first of each text and padding."""
    ids = batch["input_ids"]
    if "position_ids" in batch:  # packed: padding has position 0, as the first token of a text has
        return ids.where(batch["position_ids"] > 0, IGNORED)
    labels = ids.where(batch["attention_mask"] == 1, IGNORED)
    labels[:, 0] = IGNORED
    return labels


def _ends(target: PreTrainedModel, draft: PreTrainedModel) -> list[int] | None:
    """Return the end-of-sequence ids, the target's before the draft's."""
    for model in (target, draft):
        ends: Any = model.generation_config.eos_token_id  # type: ignore[union-attr]
        if ends is not None:
            return [ends] if isinstance(ends, int) else list(ends)
    return None


def _follows(chosen: Tensor) -> Tensor:
    """Say which of the chosen positions, (B, T) bool, come right after a chosen one; one behind the other, (N,)."""
    return (chosen & torch.nn.functional.pad(chosen, (1, 0))[:, :-1])[chosen]


def _open(draft: PreTrainedModel) -> None:
    """Let the draft's forward hand its hidden states and head to a function, and return what that makes of them.

    The loss has to be taken inside the forward, and inside that of the head: wrappers (DDP, FSDP, ZeRO, autocast) hold
    weights and gradients together there alone. Without `of_hidden` both forwards are what they were.
    """
    head: Any = draft.get_output_embeddings()
    original, project = draft.forward, head.forward

    @wraps(original)
    def forward(*args: Any, of_hidden: OfHidden | None = None, **kwargs: Any) -> Any:
        if of_hidden is None:
            return original(*args, **kwargs)
        return head(last_hidden(draft, **kwargs), of_hidden=of_hidden)

    @wraps(project)
    def taken(hidden: Tensor, of_hidden: OfHidden | None = None) -> Any:
        return project(hidden) if of_hidden is None else of_hidden(hidden, head_of(draft))

    draft.forward = forward  # type: ignore[method-assign]
    head.forward = taken
