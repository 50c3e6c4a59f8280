"""The Trainer, with a frozen teacher and acceptance as its metric."""

import time
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.distill.config import DistillConfig
from draftsmith.distill.on_policy import coin, continued, prompts_of
from draftsmith.train.acceptance import acceptance_metrics, replay_features, replay_sums
from draftsmith.train.data.collator import IGNORED
from draftsmith.train.lora import merged_state
from draftsmith.train.losses.chunked import chunked_features, chunked_sum
from draftsmith.train.losses.objective import Objective
from draftsmith.train.losses.output_head import OutputHead, head_of, last_hidden, require_split
from draftsmith.train.teacher.cache_reader import cached_distributions
from draftsmith.train.teacher.distributions import CachedDistributions, LiveDistributions, TeacherDistributions
from draftsmith.train.trainer import RecipeTrainer, texts

OfHidden = Callable[[Tensor, OutputHead], Any]
"""(last hidden states (B, T, H), the head) → what the draft's forward is to return."""


class DistillTrainer(RecipeTrainer):
    """Minimises an objective against a frozen target on the completions' positions.

    The loss is the mean over completion tokens. Neither model's logits are ever held whole. Evaluation replays held-out
    completions and reports `alpha`, `greedy_alpha`, `agreement` and `mean_acceptance_length`.
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
        _open(draft)
        self.config = config
        self.objective: Objective = config.objective
        super().__init__(
            draft,
            target,
            tokenizer,
            config,
            train_dataset,
            eval_dataset,
            compute_metrics=acceptance_metrics,
            **kwargs,
        )
        self._written = {"on_policy_tokens": 0.0, "on_policy_seconds": 0.0}

    def changed(self, batches: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
        """Have the draft write the completions of a share of the batches anew."""
        # The same coin on every process: sampling from a sharded draft takes all of them.
        seeds = [(int(self.args.seed), self.state.global_step, part) for part in range(len(batches))]
        chosen = [part for part, seed in enumerate(seeds) if coin(*seed) < self.config.on_policy]
        start = time.perf_counter()
        for part in chosen:
            batches[part] = self._on_policy(self._prepare_inputs(batches[part]), seeds[part])
            self._written["on_policy_tokens"] += float((batches[part]["labels"] != IGNORED).sum())
        self._written["on_policy_seconds"] += time.perf_counter() - start
        return batches

    def deployed_state(self, state_dict: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return the draft's weights with adapters merged."""
        return merged_state(self.model, state_dict)  # type: ignore[arg-type]

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
        teacher = self._teacher_of(inputs, chosen) if objective.needs_target else None

        def loss_of(hidden: Tensor, head: OutputHead) -> Tensor:
            return self._shortfall(objective, hidden[:, :-1][chosen], head, teacher, labels, chosen)

        total = model(**texts(inputs), of_hidden=loss_of)
        loss = self.averaged(total, chosen, num_items_in_batch)
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

        def features_of(p: Tensor | CachedDistributions, q_logits: Tensor, own: Tensor) -> Tensor:
            replayed = replay_features(p, q_logits, own, self.sampler)
            return torch.cat([replayed, self.objective.features(p, q_logits, own)], dim=1)

        with torch.no_grad(), self.compute_loss_context_manager():
            teacher = self._teacher_of(inputs, chosen)
            found = model(
                **texts(inputs),
                of_hidden=lambda hidden, head: chunked_features(
                    features_of,
                    labels[chosen],
                    hidden[:, :-1][chosen],
                    head.cut(self.vocab_size),
                    teacher,
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
        head: OutputHead,
        teacher: TeacherDistributions | None,
        labels: Tensor,
        chosen: Tensor,
    ) -> Tensor:
        """Return the objective summed over the chosen positions, a scalar."""
        args = (labels[chosen], q_hidden, head.cut(self.vocab_size), teacher)
        if not objective.couples:
            weights = torch.ones(len(q_hidden), 1, device=q_hidden.device)
            return chunked_sum(objective.features, weights, *args)[0]
        # Positions of a block weigh each other's gradients: first all values, then the gradients with these weights.
        features = chunked_features(objective.features, *args).requires_grad_(True)
        with torch.enable_grad():
            total = objective.shortfall(features, _follows(chosen))
            (weights,) = torch.autograd.grad(total, features)
        linear = chunked_sum(objective.features, weights, *args)[0]
        return linear - linear.detach() + total.detach()

    def _teacher_of(self, inputs: dict[str, Any], chosen: Tensor) -> TeacherDistributions:
        if "teacher" in inputs:  # read from a cache, in the order of the chosen positions
            return cached_distributions(inputs["teacher"])
        hidden = self.target_hidden(inputs, chosen.device)[:, :-1][chosen]
        return LiveDistributions(hidden, self.target_head(chosen.device))


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
