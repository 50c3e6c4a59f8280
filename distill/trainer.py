"""The trainer of draft models, with a frozen teacher and acceptance as its metric.

Shape suffixes: B rows, T positions, N loss positions, H hidden, V vocabulary, K features. A position is that of the
token before the predicted one, so a row has T − 1 positions.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.cache import positions_of
from draftsmith.decode.draft_models.cut_vocabulary import kept_tokens
from draftsmith.distill.config import DistillConfig
from draftsmith.train.checkpoint import end_of_sequence_ids
from draftsmith.train.data.decoding import complete
from draftsmith.train.data.examples import TrainingData
from draftsmith.train.data.samples import mixed_seed
from draftsmith.train.job.step_checks import Learner
from draftsmith.train.lora import merged_state
from draftsmith.train.losses.chunked import ChunkSizes, chunked_features, chunked_objective
from draftsmith.train.losses.distributions import CachedDistributions, LiveDistributions, WholeDistributions
from draftsmith.train.losses.output_head import OutputHead, inside_model, open_forward, require_split
from draftsmith.train.losses.positions import IGNORED, LossPositions
from draftsmith.train.replay_metrics import acceptance_metrics, replay_features, replay_sums
from draftsmith.train.teacher.cache_reader import cached_distributions
from draftsmith.train.trainer import RecipeTrainer, texts


class DistillTrainer(RecipeTrainer):
    """A trainer that minimises an objective against a frozen target on the completions' positions.

    The loss is the mean over completion tokens. Neither model's logits are ever in memory as a whole. Evaluation
    replays held-out completions and reports `alpha`, `greedy_alpha`, `agreement` and `mean_acceptance_length`.
    """

    def __init__(
        self,
        draft: PreTrainedModel,
        target: PreTrainedModel | None,
        tokenizer: PreTrainedTokenizerBase,
        config: DistillConfig,
        train_dataset: TrainingData,
        eval_dataset: TrainingData | None = None,
        **kwargs: Any,
    ):
        require_split(draft, "draft")
        open_forward(draft, draft.get_output_embeddings())  # the loss runs inside both: see `output_head.py`
        self.draft, self.config = draft, config
        super().__init__(
            draft, target, tokenizer, config, train_dataset, eval_dataset, compute_metrics=acceptance_metrics, **kwargs
        )
        self.compare_over(config.objective, kept_tokens(draft.config), self.vocab_size)
        self._written = {"on_policy_tokens": 0.0, "on_policy_seconds": 0.0}

    def step_batches(self, batches: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
        """Replace the completions of a share of the batches by the draft's own, which the target scores.

        Generalized knowledge distillation (Agarwal et al. 2023, algorithm 1) and DistillSpec (Zhou et al. 2023, section
        4.2) train a student on its own text, so that it meets its mistakes.
        """
        # The seed is the same on every process, since sampling from a sharded draft takes all of them.
        seeds = [(int(self.args.seed), self.state.global_step, part) for part in range(len(batches))]
        on_policy = [part for part, seed in enumerate(seeds) if mixed_seed(*seed) < self.config.on_policy * 2**63]
        start = time.perf_counter()
        for part in on_policy:
            batches[part] = self._on_policy(self._prepare_inputs(batches[part]), seeds[part])
            self._written["on_policy_tokens"] += float((batches[part]["labels"] != IGNORED).sum())
        self._written["on_policy_seconds"] += time.perf_counter() - start
        return batches

    def deployed_state(self, state_dict: dict[str, Any] | None) -> dict[str, Any]:
        """Return the draft's weights with adapters merged."""
        return merged_state(self.model, state_dict)  # type: ignore[arg-type]

    def _on_policy(self, batch: dict[str, Any], seeds: tuple[int, ...]) -> dict[str, Any]:
        draft = self.accelerator.unwrap_model(self.model)
        config = self.config
        generation = GenerationConfig(
            max_new_tokens=config.on_policy_tokens,
            do_sample=True,
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            eos_token_id=end_of_sequence_ids(self.target.generation_config, self.tokenizer) or None,
            pad_token_id=self.tokenizer.pad_token_id,
            suppress_tokens=self.forbidden_tokens or None,
        )
        with self.compute_loss_context_manager():
            samples = continue_prompts(
                draft,
                prompts_of(batch),
                generation,
                min(filter(None, [config.max_length, positions_of(draft.config)]), default=None),
                mixed_seed(*seeds, self.accelerator.process_index),
                synced=self.is_fsdp_enabled or self.is_deepspeed_enabled,
            )
        written = {**self._prepare_inputs(self.data_collator(samples)), "index": batch["index"]}
        if "host" in batch:
            written["host"]["index"] = batch["host"]["index"]
        return written

    @property
    def forbidden_tokens(self) -> list[int]:
        """The tokens that the draft must not write: padding rows of its head, and tokens that it cannot propose."""
        rows: int = self.draft.config.get_text_config().vocab_size
        allowed = range(self.vocab_size) if self.cut is None else self.cut.tokens_D.tolist()
        return sorted(set(range(rows)) - set(allowed))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, and add the cost of sampling from the draft since the last log."""
        if "loss" in logs and self.config.on_policy:
            tokens, seconds = self._written.values()
            ranks = self.accelerator.gather(torch.tensor([[tokens, seconds]], device=self.args.device))
            logs |= {"on_policy_tokens": float(ranks[:, 0].sum()), "on_policy_seconds": float(ranks[:, 1].max())}
            self._written = dict.fromkeys(self._written, 0.0)
        super().log(logs, start_time)

    def summed_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """Return the objective summed over this part's completion tokens."""
        positions, objective = LossPositions(inputs["positions"][0]), self.objective
        labels_N = self.vocabulary.labels(positions.next_tokens(inputs["input_ids"]))
        teacher = self.loss_distributions(inputs, positions) if objective.needs_target else None
        sizes = self.vocabulary.sizes(self.sizes)

        def objective_of(learners: Sequence[Learner]) -> Tensor:
            ((hidden_NH, head),) = learners
            return chunked_objective(objective, hidden_NH, head, teacher, labels_N, sizes)

        def loss_of(hidden_BTH: Tensor, head: OutputHead) -> Tensor:
            with self.clock.phase("loss"):
                return self.checked_loss(objective_of, (positions.take(hidden_BTH), self.loss_head(head)))

        return model(**texts(inputs), inside=inside_model(self.draft, loss_of))

    @property
    def block(self) -> dict[str, Any]:
        """The card's fields for a draft that drafts several tokens in one forward; empty for others."""
        return {}

    @property
    def bad_start_cause(self) -> str:
        """The likely cause of a bad first loss."""
        if self.config.draft is not None:
            return f"look whether {self.config.draft} was made for text like this, and loads whole (draftsmith doctor)"
        if self.config.init.config is not None:
            return "random weights are too large for this shape; look at initializer_range in init.config"
        return "the layers that are left do not follow each other; try other init.layers, or more of them"

    def replay_sums(self, model: nn.Module, inputs: dict[str, Any], chosen_BT: Tensor) -> Tensor:
        """Return each sample's replay sums and loss, (B, 6)."""
        positions = LossPositions(inputs["positions"][0])
        labels_N, teacher = positions.next_tokens(inputs["input_ids"]), self._teacher_of(inputs, positions)

        def features(hidden_BTH: Tensor, head: OutputHead) -> Tensor:
            hidden_NH, head = positions.take(hidden_BTH), self.loss_head(head)
            return chunked_features(self.evaluation_features, labels_N, hidden_NH, head, teacher, self.evaluation_sizes)

        features_NK = model(**texts(inputs), inside=inside_model(self.draft, features)).float()
        # Back to rows, without the last position, which predicts no token of the text.
        features_BTK = features_NK.new_zeros(*inputs["input_ids"].shape, features_NK.shape[1])
        features_BTK.flatten(0, 1).index_copy_(0, positions.flat_N, features_NK)
        features_BTK = features_BTK[:, :-1]
        losses = [losses_T.sum() for losses_T in features_BTK[..., 4] * chosen_BT.float()]
        sums = replay_sums(features_BTK[..., :4], chosen_BT, self.config.draft_length)
        return torch.cat([sums, torch.stack(losses)[:, None]], dim=1)

    def loss_head(self, head: OutputHead) -> OutputHead:
        """Return the rows of the draft's head for the tokens that it proposes."""
        return head.cut(self.vocab_size) if self.cut is None else self.cut.of_head(head)

    def loss_distributions(
        self, inputs: dict[str, Any], positions: LossPositions
    ) -> LiveDistributions | WholeDistributions | CachedDistributions:
        """Return p over the tokens that the draft proposes."""
        teacher = self._teacher_of(inputs, positions)
        if isinstance(teacher, LiveDistributions):
            teacher = replace(teacher, head=self.teacher_head)
        return self.vocabulary.distributions(teacher)

    def evaluation_features(self, p: Tensor | CachedDistributions, q_logits_PV: Tensor, labels_P: Tensor) -> Tensor:
        """Return the four features of replay, over all tokens, followed by those of the loss."""
        cut, wide_PV = self.cut, q_logits_PV if self.cut is None else self.cut.widened(q_logits_PV)
        replayed_PK = replay_features(p, wide_PV, labels_P, self.sampler)
        teacher = p if cut is None else cut.of_distributions(p)
        return torch.cat(
            [replayed_PK, self.objective.features(teacher, q_logits_PV, self.vocabulary.labels(labels_P))], dim=1
        )

    @property
    def evaluation_sizes(self) -> ChunkSizes:
        """The chunk sizes of an evaluation, which holds p of all tokens and q of those that the draft proposes."""
        return self.sizes if self.cut is None else self.cut.sizes(self.sizes)

    def _teacher_of(self, inputs: dict[str, Any], positions: LossPositions) -> LiveDistributions | CachedDistributions:
        cached = inputs.get("teacher", {})
        if "log_p" in cached:  # distributions, in the order of the loss positions
            return cached_distributions(cached)
        return LiveDistributions(positions.take(self.target_hidden(inputs)), self.target_head)


def prompts_of(batch: dict[str, Tensor]) -> list[Tensor]:
    """Return the token ids of each sample before its first loss token; packed rows are separated."""
    prompts = []
    for row, (ids, labels) in enumerate(zip(batch["input_ids"], batch["labels"], strict=True)):
        starts = [0]
        if "position_ids" in batch:
            starts = (batch["position_ids"][row] == 0).nonzero()[:, 0].tolist()
        for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
            inside = (labels[start:end] != IGNORED).nonzero()[:, 0]
            if len(inside):  # padding after packed samples has no loss tokens
                prompts.append(ids[start : start + int(inside[0])])
    return prompts


def continue_prompts(
    draft: PreTrainedModel,
    prompts: list[Tensor],
    generation: GenerationConfig,
    max_length: int | None,
    seed: int,
    synced: bool,
) -> list[dict[str, list[int]]]:
    """Sample the draft's continuations of prompts, and return `input_ids` and `labels`, which are −100 on prompts.

    `eos_token_id` of the generation config is a list or None. `max_length` limits prompt and continuation together.
    `synced` runs empty forwards until every process is done, for a sharded draft.
    """
    # `generate` takes missing fields from the model's own config, whose penalties are not part of our sampling.
    training, config = draft.training, draft.generation_config
    draft.eval().generation_config = generation
    ids = [prompt.tolist() for prompt in prompts]
    completions = complete(draft, generation, ids, seed, device=prompts[0].device, synced=synced)
    draft.train(training).generation_config = config
    return [
        {
            "input_ids": (prompt + completion.ids)[:max_length],
            "labels": ([IGNORED] * len(prompt) + completion.ids)[:max_length],
        }
        for prompt, completion in zip(ids, completions, strict=True)
    ]
