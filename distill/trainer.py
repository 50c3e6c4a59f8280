"""The Trainer, with a frozen teacher and acceptance as its metric."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer

from draftsmith.decode.sampling import Law
from draftsmith.distill.config import DistillConfig
from draftsmith.train.acceptance import acceptance_metrics, replay_features, replay_sums
from draftsmith.train.data import IGNORED, CompletionCollator
from draftsmith.train.heads import Head, head_of, last_hidden, require_split
from draftsmith.train.lean import lean_features, lean_sum
from draftsmith.train.models import tokenizer_size
from draftsmith.train.objective import Objective

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
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        config: DistillConfig,
        train_dataset: Dataset,
        eval_dataset: Dataset | None = None,
        **kwargs: Any,
    ):
        for field, model in (("draft", draft), ("target", target)):
            require_split(model, field)
        _open(draft)
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
        self.config = config
        self.objective: Objective = config.objective
        self.law = Law.of(config.temperature, config.top_k, config.top_p)
        # Either head may be padded beyond the tokenizer, to different sizes: entries that are no token have no law.
        self.vocab_size = tokenizer_size(tokenizer)
        self.target: Any = target.eval().requires_grad_(False)
        self.target.to(self.args.device)
        self._target_head = head_of(self.target).cut(self.vocab_size)
        # Makes the Trainer count the completion tokens of the global batch and hand them to `compute_loss`.
        self.model_accepts_loss_kwargs = True

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
        p_hidden = self._target_hidden(inputs, chosen) if objective.needs_target else None

        def loss_of(hidden: Tensor, head: Head) -> Tensor:
            return self._shortfall(objective, hidden[:, :-1][chosen], head, p_hidden, labels, chosen)

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

        def features_of(p_logits: Tensor, q_logits: Tensor, own: Tensor) -> Tensor:
            replayed = replay_features(p_logits, q_logits, own, self.law)
            return torch.cat([replayed, self.objective.features(p_logits, q_logits, own)], dim=1)

        with torch.no_grad(), self.compute_loss_context_manager():
            p_hidden = self._target_hidden(inputs, chosen)
            found = model(
                **_texts(inputs),
                of_hidden=lambda hidden, head: lean_features(
                    features_of,
                    labels[chosen],
                    hidden[:, :-1][chosen],
                    head.cut(self.vocab_size),
                    p_hidden,
                    self._target_head,
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
        p_hidden: Tensor | None,
        labels: Tensor,
        chosen: Tensor,
    ) -> Tensor:
        """Return the objective summed over the chosen positions, a scalar."""
        args = (labels[chosen], q_hidden, head.cut(self.vocab_size), p_hidden, self._target_head)
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

    def _target_hidden(self, inputs: dict[str, Tensor], chosen: Tensor) -> Tensor:
        with torch.no_grad():
            return last_hidden(self.target, **_texts(inputs))[:, :-1][chosen]


def _texts(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"]}


def _follows(chosen: Tensor) -> Tensor:
    """Say which of the chosen positions, (B, T) bool, come right after a chosen one; one behind the other, (N,)."""
    return (chosen & torch.nn.functional.pad(chosen, (1, 0))[:, :-1])[chosen]


def _open(draft: PreTrainedModel) -> None:
    """Let the draft's forward hand its hidden states and head to a function, and return what that makes of them.

    The loss has to be taken inside the forward: wrappers (DDP, FSDP, ZeRO, autocast) hold weights and gradients
    together there alone. Without `of_hidden` the forward is what it was.
    """
    original = draft.forward

    @wraps(original)
    def forward(*args: Any, of_hidden: OfHidden | None = None, **kwargs: Any) -> Any:
        if of_hidden is None:
            return original(*args, **kwargs)
        return of_hidden(last_hidden(draft, **kwargs), head_of(draft))

    draft.forward = forward  # type: ignore[method-assign]
