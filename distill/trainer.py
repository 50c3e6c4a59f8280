"""The Trainer, with a frozen teacher and acceptance as its metric."""

from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer

from draftsmith.distill.config import DistillConfig
from draftsmith.train.acceptance import acceptance_metrics, replay_statistics
from draftsmith.train.data import IGNORED, CompletionCollator
from draftsmith.train.divergences import per_token
from draftsmith.train.models import tokenizer_size


class DistillTrainer(Trainer):
    """`transformers.Trainer` that minimises a divergence from a frozen target on the completions' positions.

    The loss is the mean over the completion tokens of the whole global batch: accumulation steps and processes with
    unequal token counts weigh by their tokens, so that the split of a batch does not change it. Evaluation replays
    held-out completions and reports `alpha`, `agreement` and `mean_acceptance_length`.
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
        # Either head may be padded beyond the tokenizer, to different sizes: entries that are no token have no law.
        self.vocab_size = tokenizer_size(tokenizer)
        self.target: Any = target.eval().requires_grad_(False)
        self.target.to(self.args.device)
        # Makes the Trainer count the completion tokens of the global batch and hand them to `compute_loss`.
        self.model_accepts_loss_kwargs = True

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Return the divergence summed over this part's completion tokens ÷ the global batch's token count."""
        p_logits, q_logits, labels = self._forward(model, inputs)
        chosen = labels != IGNORED
        values = per_token(
            p_logits[chosen],
            q_logits[chosen],
            self.config.divergence,
            self.config.temperature,
            self.config.beta,
            self.config.alpha,
            labels[chosen],
        )
        if num_items_in_batch is None:
            loss = values.sum() / chosen.sum().clamp(min=1)
        else:
            loss = values.sum() / num_items_in_batch
            if self.args.average_tokens_across_devices:
                # Gradients are averaged over processes; the count is already the sum over them.
                loss = loss * self.accelerator.num_processes
        return (loss, {"logits": q_logits}) if return_outputs else loss

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Tensor], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[None, Tensor, Tensor]:
        """Return, in place of logits, each sample's replay sums and loss, (B, 5).

        No loss by itself: the Trainer would average it over batches, whatever their token counts.
        """
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            p_logits, q_logits, labels = self._forward(model, inputs)
            chosen, config = labels != IGNORED, self.config
            values = torch.zeros(labels.shape, device=labels.device)
            values[chosen] = per_token(
                p_logits[chosen],
                q_logits[chosen],
                config.divergence,
                config.temperature,
                config.beta,
                config.alpha,
                labels[chosen],
            )
            sums = replay_statistics(p_logits, q_logits, labels, config.temperature, config.eval_draft_length)
        sums = torch.cat([sums, values.sum(1, keepdim=True)], dim=1)
        return None, sums, sums[:, :1]

    def _forward(self, model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return p's and q's logits of each next token, (B, T − 1, V), and those tokens, (B, T − 1)."""
        batch = {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"], "use_cache": False}
        with torch.no_grad():
            p_logits = self.target(**batch).logits[:, :-1, : self.vocab_size]
        q_logits = model(**batch).logits[:, :-1, : self.vocab_size]
        return p_logits, q_logits, inputs["labels"][:, 1:]
