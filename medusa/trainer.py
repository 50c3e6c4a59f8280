"""Training of Medusa heads: Medusa-1 on a frozen backbone, Medusa-2 together with it (Cai et al. 2024, section 2.2).

One forward of the backbone feeds all heads, and each head's loss is taken over a chunk of positions at a time: heads ×
tokens × vocabulary is never held. Shape suffixes: B rows, T positions, N chosen positions, K heads, H hidden, V
vocabulary.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import EvalPrediction, PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.errors import InputError
from draftsmith.decode.replay.rounds import expected_rounds_of_starts
from draftsmith.medusa.backbone import Joint
from draftsmith.medusa.config import MedusaTrainingConfig
from draftsmith.medusa.heads import MedusaHeads
from draftsmith.train.data.examples import TrainingData
from draftsmith.train.job.flops import Work
from draftsmith.train.losses.chunked import chunked_features, chunked_objective, chunked_objectives
from draftsmith.train.losses.cut_vocabulary import CutVocabulary
from draftsmith.train.losses.inside_forward import open_forward
from draftsmith.train.losses.objective import Objective
from draftsmith.train.losses.output_head import OutputHead, head_of, last_hidden
from draftsmith.train.losses.positions import LossPositions
from draftsmith.train.optimizer import MuonAdamW
from draftsmith.train.replay_metrics import replay_features
from draftsmith.train.runs import declare_dtype, in_dtype, save_model
from draftsmith.train.teacher.distributions import LiveDistributions
from draftsmith.train.trainer import RecipeTrainer, texts

logger = logging.getLogger(__name__)
PER_HEAD = ("count", "overlap", "right")


class MedusaTrainer(RecipeTrainer):
    """Minimises Σ_i λ_i · objective of head i, against the target's distribution or text, on completions.

    Evaluation replays held-out completions with a chain of all heads, and reports `mean_acceptance_length`, `alpha`
    (of the first head), `loss`, Σ_i λ_i · objective of head i, and for each head i ≥ 1 `accuracy_i`, the share of its
    tokens that it puts first, and `alpha_i`, its Σ_v min(p, q).
    """

    def __init__(
        self,
        heads: MedusaHeads,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        config: MedusaTrainingConfig,
        train_dataset: TrainingData,
        eval_dataset: TrainingData | None = None,
        **kwargs: Any,
    ):
        heads.check_fits(target)
        if heads.config.hydra and config.target_sharded:
            raise InputError(
                "target_sharded: expected false for Hydra heads, which see the target's embeddings, found true"
            )
        self.config = config
        self.objective: Objective = config.objective
        self.count: int = heads.config.num_heads
        if not config.train_lm_heads:
            for lm_head in heads.all_lm_heads:
                lm_head.requires_grad_(False)
        model: Any = Joint(heads, target, config) if config.joint else heads
        # Losses run inside of these: `train/losses/inside_forward.py`.
        open_forward(model, *heads.all_lm_heads, *([target.get_output_embeddings()] if config.joint else []))
        self.heads = heads
        super().__init__(
            model,
            target,
            tokenizer,
            config,
            train_dataset,
            eval_dataset,
            compute_metrics=medusa_metrics,
            **kwargs,
        )
        if config.joint:
            model.thaw()
            self._works = self._works[0], self.trained_work()
        self._cut: CutVocabulary | None = None
        """The tokens of a truncated vocabulary."""
        if heads.token_map is not None:
            self._cut = CutVocabulary(heads.token_map.to(self.args.device), heads.config.vocab_size)
            self.objective = replace(self.objective, partial=True)

    def create_accelerator_and_postprocess(self) -> None:
        """Refuse what joint training cannot be sharded by."""
        super().create_accelerator_and_postprocess()
        if not self.config.joint:
            return
        if self.config.target_quantization and (self.is_deepspeed_enabled or self.is_fsdp_enabled):
            raise InputError(
                "target_quantization: expected none for a backbone that FSDP or DeepSpeed shards, found "
                f"{self.config.target_quantization}"
            )
        if self.config.warmup_heads and self.is_deepspeed_enabled:
            raise InputError(
                "warmup_heads: expected 0 under DeepSpeed, which takes the gradients that a backbone lacks for zeros "
                f"and steps with them, found {self.config.warmup_heads}"
            )

    @property
    def ahead(self) -> int:  # type: ignore[override]
        """Head i looks i + 1 tokens further than the target's own head."""
        return self.count

    def summed_loss(self, model: nn.Module, inputs: dict[str, Any], positions: LossPositions) -> Tensor:
        """Return Σ_i λ_i · the objective summed over head i's tokens; in joint training with the backbone's loss."""
        if self.config.joint:
            return model(inside=lambda: self._joint_loss(inputs, positions))
        hidden, embed = self.target_hidden(inputs), self.target.get_input_embeddings()
        teacher = hidden, self._teacher_head
        return model(inside=lambda: self._heads_loss(hidden, embed, inputs, teacher))

    def replay_sums(self, model: nn.Module, inputs: dict[str, Any], chosen_BT: Tensor) -> Tensor:
        """Return each sample's tokens, rounds and loss, and three sums a head, (B, 3 + 3K)."""
        if not self.config.joint:
            hidden = self.target_hidden(inputs)
            return model(inside=lambda: self._replayed(inputs, chosen_BT, hidden, self.target, self.target_head))
        joint: Joint = self.accelerator.unwrap_model(self.model)

        def replayed(hidden: Tensor) -> Tensor:
            head = head_of(joint.backbone).cut(self.vocab_size)
            return self._replayed(inputs, chosen_BT, hidden, joint.backbone, head)

        return model(inside=lambda: joint.inside_head(last_hidden(joint.backbone, **texts(inputs)), replayed))

    def _joint_loss(self, inputs: dict[str, Any], positions: LossPositions) -> Tensor:
        """Return the weighted sum of the backbone's loss and of the heads', which learn from what it was."""
        config, batch = self.config, texts(inputs)
        joint: Joint = self.accelerator.unwrap_model(self.model)
        warming = self.state.global_step < config.warmup_heads * self.state.max_steps
        with self.clock.phase("teacher"):
            before = joint.original_hidden(batch) if config.needs_original else None
        with torch.set_grad_enabled(not warming and torch.is_grad_enabled()):
            hidden = last_hidden(joint.backbone, **batch)

        def losses(hidden: Tensor) -> Tensor:
            original = None if before is None else (before, joint.original_head().cut(self.vocab_size))
            teacher = None if original is None else (original[0], self._narrowed(original[1]))
            embed = joint.backbone.get_input_embeddings()
            total = config.heads_weight * self._heads_loss(hidden, embed, inputs, teacher)
            if warming:
                return total
            objective = Objective({config.backbone_divergence: 1.0})
            p = None
            if objective.needs_target and original is not None:
                p = LiveDistributions(positions.take(original[0]), original[1])
            trained = head_of(joint.backbone).cut(self.vocab_size)
            labels = positions.next_tokens(inputs["input_ids"])
            with self.clock.phase("loss"):
                kept = chunked_objective(objective, positions.take(hidden), trained, p, labels, sizes=self.sizes)
            return total + config.backbone_weight * kept

        return joint.inside_head(hidden, losses)

    def _heads_loss(
        self, hidden: Tensor, embed: nn.Module, inputs: dict[str, Tensor], teacher: tuple[Tensor, OutputHead] | None
    ) -> Tensor:
        """Return the heads' weighted loss, summed over their tokens; called inside of the model's forward.

        Args:
            hidden: what the heads see, (B, T, H).
            embed: the target's embeddings.
            inputs: a batch.
            teacher: what the teacher's head sees, (B, T, H), and that head, over the tokens that the heads know; None
                where labels are hard.
        """
        heads, at = self.heads, Positions(inputs, self.count)
        labels = at.labels
        if self._cut is not None:
            labels = self._cut.labels(labels)
        p = None
        if self.objective.needs_target and teacher is not None:
            p = LiveDistributions(at.teacher(teacher[0]), teacher[1])
        states = [
            heads.states(i, at.before(i, hidden, heads), at.embeddings(i, embed, heads)) for i in range(self.count)
        ]

        def loss(states: Sequence[Tensor]) -> Tensor:
            learners = [
                (seen, self._trained_head(i), at.learned[i], self.config.decay**i) for i, seen in enumerate(states)
            ]
            with self.clock.phase("loss"):
                return chunked_objectives(self.objective, labels, learners, p, self.sizes)

        return heads.inside_lm_heads(states, loss)

    def _replayed(
        self, inputs: dict[str, Tensor], chosen: Tensor, hidden: Tensor, backbone: PreTrainedModel, head: OutputHead
    ) -> Tensor:
        """Return the sums of `replay_sums`; replay compares distributions over the whole vocabulary."""
        heads, labels = self.heads, inputs["labels"][:, 1:]
        cut = self._cut
        sizes = self.sizes if cut is None else cut.sizes(self.sizes)

        def features(p: Any, q_logits: Tensor, tokens: Tensor) -> Tensor:
            wide = heads.widened(q_logits)[..., : self.vocab_size]
            replayed = replay_features(p, wide, tokens, self.sampler)
            right = (wide.argmax(-1) == tokens).float()
            if cut is not None:
                p, tokens = cut.of_distributions(p), cut.labels(tokens)
            return torch.cat([replayed[:, :2], right[:, None], self.objective.features(p, q_logits, tokens)], dim=1)

        a = hidden.new_zeros(*chosen.shape, self.count, dtype=torch.float32)
        loss, sums = hidden.new_zeros(len(labels), dtype=torch.float32), []
        at, embed = Positions(inputs, self.count), backbone.get_input_embeddings()
        p = LiveDistributions(at.teacher(hidden), head)
        for index in range(self.count):
            states = heads.states(index, at.before(index, hidden, heads), at.embeddings(index, embed, heads))
            features_NK = heads.lm_head_of(index)(
                states,
                inside=lambda h, i=index: chunked_features(features, at.labels, h, self._trained_head(i), p, sizes),
            )
            # The round that begins with a token drafts from the state of the token two before it.
            spread = a.new_zeros(*inputs["labels"].shape, features_NK.shape[1] + 1)
            learned = at.learned[index].bool()
            ones = features_NK.new_ones(len(features_NK), 1)
            spread.flatten(0, 1)[(at.flat - index)[learned]] = torch.cat([features_NK, ones], dim=1).float()[learned]
            a[..., index] = spread[:, :-1, 0]
            each = [self.objective.shortfall(row[:, 3:-1], weights_N=row[:, -1]) for row in spread]
            loss += self.config.decay**index * torch.stack(each)
            sums.append(spread[..., [-1, 1, 2]].sum(1))
        # Completions begin at different columns: the chain starts at the first token of each.
        order = torch.argsort(~chosen, dim=1, stable=True)
        a = a.gather(1, order[..., None].expand_as(a))
        lengths = chosen.sum(1)
        rounds = expected_rounds_of_starts(a.double(), lengths).float()
        return torch.cat([lengths[:, None].float(), rounds[:, None], loss[:, None], *sums], dim=1)

    def _trained_head(self, index: int) -> OutputHead:
        """Return the map of one head to the logits of the tokens that it knows, inside of that head's forward."""
        head = self.heads.head(index)
        return head if self._cut is not None else head.cut(self.vocab_size)

    @cached_property
    def _teacher_head(self) -> OutputHead:
        """The target's head over the tokens that the heads know: of a truncated vocabulary, those alone."""
        return self._narrowed(self.target_head)

    def _narrowed(self, head: OutputHead) -> OutputHead:
        return head if self._cut is None else self._cut.of_head(head)

    def trained_work(self) -> Work | None:
        """Return the arithmetic of the heads, and of a backbone in training; what it was before is counted apart."""
        of_heads = Work.of_maps(*self.heads.maps)
        if not self.config.joint:
            return of_heads
        backbone = Work.of(self.target)
        return None if backbone is None else replace(backbone, head=backbone.head + of_heads.head)

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """Make Muon where it is asked for; give heads in joint training another learning rate than the backbone."""
        made = self.optimizer is None
        if made and self.config.optimizer == "muon":
            heads: Any = self.model
            rate, decay = self.args.learning_rate, self.args.weight_decay
            self.optimizer = MuonAdamW(heads, rate, decay, ends=heads.all_lm_heads)
        optimizer = super().create_optimizer(model)
        if self.config.joint and made:
            of_heads = {id(p) for p in self.accelerator.unwrap_model(self.model).heads.parameters()}
            groups = list(optimizer.param_groups)
            optimizer.param_groups.clear()
            for group in groups:
                for in_heads, rate in ((True, self.config.head_learning_rate_multiplier), (False, 1.0)):
                    parameters = [p for p in group["params"] if (id(p) in of_heads) == in_heads]
                    if parameters:
                        optimizer.add_param_group({**group, "params": parameters, "lr": group["lr"] * rate})
        return optimizer

    def write_model(self, directory: str, state_dict: dict[str, Any] | None) -> None:
        """Write heads; of Medusa-2 the backbone too, in `backbone`, its adapters merged. Checkpoints hold both."""
        if not self.config.joint:
            return super().write_model(directory, state_dict)
        joint: Joint = self.accelerator.unwrap_model(self.model)
        state = joint.state_dict() if state_dict is None else state_dict
        if self._checkpoints is not None:
            return super().write_model(directory, joint.trained_state(state))
        if self.args.should_save:
            parts: dict[str, dict[str, Tensor]] = {"heads.": {}, "backbone.": {}}
            for name, tensor in state.items():
                prefix = next(prefix for prefix in parts if name.startswith(prefix))
                parts[prefix][name.removeprefix(prefix)] = tensor
            joint.heads.save_pretrained(directory, state_dict=in_dtype(parts["heads."], self.save_dtype))
            declare_dtype(Path(directory), self.save_dtype)
            backbone, merged = joint.merged(parts["backbone."])
            merged = in_dtype(merged, self.save_dtype)
            save_model(backbone, self.tokenizer, Path(str(self.args.output_dir)) / "backbone", merged)


class Positions:
    """Where heads learn: places c. There the teacher predicts the token c + 1, and head i from the state at c − 1 − i.

    All places are head 0's. Head i learns at those where the tokens c − i … c + 1 are all a completion's, one text:
    heads draft after a token that the target has just written, which is c − i. A text's first token has no label, so
    that no window reaches into the next text of a packed row. So all heads have one p.
    """

    def __init__(self, inputs: dict[str, Any], count: int):
        self.ids_N: Tensor = inputs["input_ids"].flatten()
        """Of the flattened batch."""
        windows: Sequence[Tensor] = inputs["positions"][1 : 1 + count]
        self.flat = windows[0] + 1
        """(N,): c, in the flattened batch."""
        self.labels = self.ids_N[self.flat + 1]
        """(N,)."""
        self.learned = [torch.zeros(len(self.flat), device=self.flat.device) for _ in windows]
        """For each head whether it learns, (N,) float32 of 0 and 1."""
        for index, (starts, learned) in enumerate(zip(windows, self.learned, strict=True)):
            learned[torch.searchsorted(self.flat, starts + index + 1)] = 1.0

    def before(self, index: int, hidden: Tensor, heads: MedusaHeads) -> Tensor:
        """Return what a head sees of hidden states (B, T, H), in the heads' precision, (N, H); anything elsewhere."""
        return hidden.flatten(0, 1).index_select(0, (self.flat - 1 - index).clamp(min=0)).to(heads.dtype)

    def teacher(self, hidden: Tensor) -> Tensor:
        """Return what the teacher's head sees, (N, H)."""
        return hidden.flatten(0, 1).index_select(0, self.flat)

    def embeddings(self, index: int, embed: nn.Module, heads: MedusaHeads) -> Tensor | None:
        """Return the embeddings of the index + 1 tokens up to c, constants, (N, index + 1, H); None of Medusa heads."""
        if not heads.config.hydra:
            return None
        places = torch.stack([(self.flat - index + j).clamp(min=0) for j in range(index + 1)], dim=1)
        with torch.no_grad():
            seen = self.ids_N[places]
            return embed(seen.to(next(embed.parameters()).device)).to(seen.device, heads.dtype)


def medusa_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """Turn gathered sums, (samples, 3 + 3K), into ratios over tokens; `loss` is what the heads minimise."""
    sums = np.asarray(prediction.predictions, dtype=np.float64).sum(0)
    tokens, rounds, loss = sums[:3]
    heads = sums[3:].reshape(-1, len(PER_HEAD))
    metrics = {"mean_acceptance_length": float(tokens / rounds), "loss": float(loss / tokens)}
    for index, (count, overlap, right) in enumerate(heads, 1):
        metrics[f"accuracy_{index}"] = float(right / max(count, 1))
        metrics[f"alpha_{index}"] = float(overlap / max(count, 1))
    metrics["alpha"] = metrics["alpha_1"]
    return metrics
