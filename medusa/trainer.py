"""Training of Medusa heads: Medusa-1 on a frozen backbone, Medusa-2 together with it (Cai et al. 2024, section 2.2).

One forward of the backbone feeds all heads, and each head's loss is taken over a chunk of positions at a time: heads ×
tokens × vocabulary is never held. Shape suffixes: B rows, T positions, N chosen positions, K heads, H hidden, V
vocabulary.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import EvalPrediction, PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.replay import expected_rounds_of_starts
from draftsmith.medusa.backbone import Joint
from draftsmith.medusa.config import MedusaTrainingConfig
from draftsmith.medusa.heads import MedusaHeads
from draftsmith.train.acceptance import replay_features
from draftsmith.train.data import IGNORED
from draftsmith.train.heads import Head, head_of, last_hidden
from draftsmith.train.lean import lean_features, lean_sum
from draftsmith.train.lora import merged_state
from draftsmith.train.objective import Objective
from draftsmith.train.runs import save_model
from draftsmith.train.teacher import LiveLaw
from draftsmith.train.trainer import RecipeTrainer, texts

PER_HEAD = ("count", "overlap", "right")


class MedusaTrainer(RecipeTrainer):
    """Minimises Σ_i λ_i · objective of head i, against the target's own law or text, on the completions' positions.

    Evaluation replays held-out completions with a chain of all heads, and reports `mean_acceptance_length`, `alpha`
    (of the first head), and for each head i ≥ 1 `accuracy_i`, the share of its tokens that it puts first, and
    `alpha_i`, its Σ_v min(p, q).
    """

    def __init__(
        self,
        heads: MedusaHeads,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        config: MedusaTrainingConfig,
        train_dataset: Dataset,
        eval_dataset: Dataset | None = None,
        **kwargs: Any,
    ):
        heads.check_fits(target)
        self.config = config
        self.objective: Objective = config.objective
        self.count: int = heads.config.num_heads
        if not config.train_lm_heads:
            for own in heads.all_lm_heads:
                own.requires_grad_(False)
        model: Any = Joint(heads, target, config) if config.joint else heads
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
        self._places: Tensor | None = None
        """For each of the target's tokens its place in a truncated vocabulary, or −1."""
        if heads.token_map is not None:
            self._places = torch.full((heads.config.vocab_size,), -1)
            self._places[heads.token_map.cpu()] = torch.arange(len(heads.token_map))
        self._law_head: Head | None = None

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Return Σ_i λ_i · the objective summed over head i's tokens ÷ the global batch's token count."""
        if self.config.joint:
            total = model(then=lambda joint: self._joint_loss(joint, inputs))
        else:
            hidden = self.target_hidden(inputs, inputs["labels"].device)
            embed, head = self.target.get_input_embeddings(), self._teachers_head(inputs["labels"].device)
            total = model(then=lambda heads: self._heads_loss(heads, hidden, hidden, embed, head, inputs))
        loss = self.averaged(total, inputs["labels"][:, 1:] != IGNORED, num_items_in_batch)
        return (loss, {}) if return_outputs else loss

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Tensor], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[None, Tensor, Tensor]:
        """Return, in place of logits, each sample's tokens, rounds and loss, and three sums a head, (B, 3 + 3K)."""
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            sums = model(then=lambda trained: self._replayed(trained, inputs))
        return None, sums, sums[:, :1]

    def _joint_loss(self, joint: Joint, inputs: dict[str, Tensor]) -> Tensor:
        """Return the weighted sum of the backbone's own loss and of the heads', which learn from what it was."""
        config, batch = self.config, texts(inputs)
        warming = self.state.global_step < config.warmup_heads * self.state.max_steps
        first, head = None, None
        if config.needs_original:
            first, head = joint.original_hidden(batch), joint.original_head().cut(self.vocab_size)
        with torch.set_grad_enabled(not warming and torch.is_grad_enabled()):
            hidden = joint.hidden(batch)
        embed = joint.backbone.get_input_embeddings()
        narrow = None if head is None else self._narrowed(head)
        total = config.heads_weight * self._heads_loss(joint.heads, hidden, first, embed, narrow, inputs)
        if warming:
            return total
        labels = inputs["labels"][:, 1:]
        chosen = labels != IGNORED
        own = hidden[:, :-1][chosen]
        objective = Objective({config.backbone_divergence: 1.0})
        law = LiveLaw(first[:, :-1][chosen], head) if first is not None and head is not None else None
        weights = torch.ones(len(own), 1, device=own.device)
        trained = head_of(joint.backbone).cut(self.vocab_size)
        kept, _ = lean_sum(objective.features, weights, labels[chosen], own, trained, law)
        return total + config.backbone_weight * kept

    def _heads_loss(
        self,
        heads: MedusaHeads,
        hidden: Tensor,
        teachers: Tensor | None,
        embed: nn.Module,
        teachers_head: Head | None,
        inputs: dict[str, Tensor],
    ) -> Tensor:
        """Return the heads' weighted loss, summed over their tokens.

        Args:
            heads: in training, inside of their forward.
            hidden: what the heads see, (B, T, H).
            teachers: what the teacher's head sees, (B, T, H): the same, unless the backbone is in training. None, and
                no head either, where labels are hard.
            embed: the target's embeddings.
            teachers_head: the map from `teachers` to the logits of the tokens that the heads know.
            inputs: a batch.
        """
        total = hidden.new_zeros((), dtype=torch.float32)
        for index in range(self.count):
            at = Positions(inputs, index)
            labels = at.labels
            weights = torch.full((len(labels), 1), self.config.decay**index, device=hidden.device)
            if self._places is not None:
                labels = self._places.to(labels.device)[labels]
                if "cross_entropy" in self.objective.terms:  # a token that cannot be drafted cannot be learned
                    weights = weights * (labels >= 0)[:, None]
                labels = labels.clamp(min=0)
            states = heads.states(index, at.before(hidden), at.embeddings(embed, heads, hidden.dtype))
            law = None
            if self.objective.needs_target and teachers is not None and teachers_head is not None:
                law = LiveLaw(at.teacher(teachers), teachers_head)
            width = None if self._places is not None else self.vocab_size

            def loss_of(
                states: Tensor,
                index: int = index,
                labels: Tensor = labels,
                weights: Tensor = weights,
                law: LiveLaw | None = law,
                width: int | None = width,
            ) -> Tensor:
                own = heads.head(index)
                own = own if width is None else own.cut(width)
                return lean_sum(self.objective.features, weights, labels, states, own, law)[0]

            total = total + heads.lm_head_of(index)(states, then=loss_of)
        return total

    def _replayed(self, trained: Any, inputs: dict[str, Tensor]) -> Tensor:
        """Return the sums of `prediction_step`. Replay asks for the law of deployment over the whole vocabulary."""
        joint = self.config.joint
        heads: MedusaHeads = trained.heads if joint else trained
        backbone = trained.backbone if joint else self.target
        labels = inputs["labels"]
        hidden = last_hidden(backbone, **texts(inputs)).to(labels.device)
        head = head_of(backbone).cut(self.vocab_size) if joint else self.target_head(labels.device)
        chosen = labels[:, 1:] != IGNORED
        rows, length = labels.shape
        a = hidden.new_zeros(rows, length, self.count, dtype=torch.float32)
        sums = []
        for index in range(self.count):
            at = Positions(inputs, index)
            states = heads.states(
                index, at.before(hidden), at.embeddings(backbone.get_input_embeddings(), heads, hidden.dtype)
            )

            def features(p: Any, q_logits: Tensor, own: Tensor) -> Tensor:
                q_logits = heads.widened(q_logits)[..., : self.vocab_size]
                replayed = replay_features(p, q_logits, own, self.law)
                right = (q_logits.argmax(-1) == own).float()
                loss = Objective({"forward_kl": 1.0}, self.config.temperature).features(
                    p, q_logits.clamp(min=torch.finfo(torch.float32).min / 4), own
                )
                return torch.cat([replayed[:, :2], right[:, None], loss], dim=1)

            found = heads.lm_head_of(index)(
                states,
                then=lambda h, i=index, at=at, features=features: lean_features(
                    features, at.labels, h, heads.head(i), LiveLaw(at.teacher(hidden), head)
                ),
            ).float()
            spread = found.new_zeros(rows, length, 4)
            spread[:, : at.chosen.shape[1]][at.chosen] = found
            a[..., index] = spread[..., 0]
            inside = torch.nn.functional.pad(at.chosen, (0, length - at.chosen.shape[1]))
            sums.append(torch.stack([inside.sum(1).float(), spread[..., 1].sum(1), spread[..., 2].sum(1)], dim=1))
            if index == 0:
                loss = spread[..., 3].sum(1)
        # The round that begins with completion token s drafts from the state of the token two before it.
        first = (labels != IGNORED).float().argmax(1)
        at_starts = (first[:, None] + torch.arange(length, device=labels.device) - 2).clamp(min=0, max=length - 1)
        a = a.gather(1, at_starts[..., None].expand(-1, -1, self.count))
        a[:, 0] = 0.0  # the first round has no state to draft from
        lengths = chosen.sum(1)
        rounds = expected_rounds_of_starts(a.double(), lengths).float()
        return torch.cat([lengths[:, None].float(), rounds[:, None], loss[:, None], *sums], dim=1)

    def _teachers_head(self, device: torch.device) -> Head:
        """Return the target's head over the tokens that the heads know: of a truncated vocabulary, those alone."""
        if self._law_head is None:
            self._law_head = self._narrowed(self.target_head(device))
        return self._law_head

    def _narrowed(self, head: Head) -> Head:
        if self._places is None:
            return head
        kept = torch.nonzero(self._places >= 0)[:, 0]
        return head.of(kept[self._places[kept].argsort()].to(head.weight.device))

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """Give heads in joint training a learning rate of their own."""
        optimizer = super().create_optimizer(model)
        if self.config.joint:
            heads = {id(p) for p in self.accelerator.unwrap_model(self.model).heads.parameters()}
            groups = list(optimizer.param_groups)
            optimizer.param_groups.clear()
            for group in groups:
                for own, rate in ((True, self.config.head_learning_rate_multiplier), (False, 1.0)):
                    parameters = [p for p in group["params"] if (id(p) in heads) == own]
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
            joint.heads.save_pretrained(directory, state_dict=parts["heads."])
            merged = merged_state(joint.backbone, parts["backbone."])
            save_model(joint.backbone, self.tokenizer, Path(str(self.args.output_dir)) / "backbone", merged)


class Positions:
    """Where head `index` learns: position t where tokens t + 1 … t + 2 + index belong to one text.

    It guesses token t + 2 + index from the hidden state at t; the teacher's law of that token is at t + 1 + index. Both
    t + 1 and the token itself are a completion's: heads draft after a token that the target has just written.
    """

    def __init__(self, inputs: dict[str, Tensor], index: int):
        self.index, self.ids, labels = index, inputs["input_ids"], inputs["labels"]
        self.width = max(labels.shape[1] - index - 2, 0)
        end = 1 + self.width
        self.chosen = (labels[:, 1:end] != IGNORED) & (labels[:, index + 2 : index + 2 + self.width] != IGNORED)
        """(B, T − index − 2) bool."""
        if "position_ids" in inputs:  # packed: samples follow each other in a row
            places = inputs["position_ids"]
            self.chosen &= places[:, index + 2 :] == places[:, : self.width] + index + 2
        self.labels = labels[:, index + 2 : index + 2 + self.width][self.chosen]
        """(N,)."""

    def before(self, hidden: Tensor) -> Tensor:
        """Return what the head sees of hidden states (B, T, H), (N, H)."""
        return hidden[:, : self.width][self.chosen]

    def teacher(self, hidden: Tensor) -> Tensor:
        """Return what the teacher's head sees for the same tokens, (N, H)."""
        return hidden[:, self.index + 1 : self.index + 1 + self.width][self.chosen]

    def embeddings(self, embed: nn.Module, heads: MedusaHeads, dtype: torch.dtype) -> Tensor | None:
        """Return the embeddings of the tokens t + 1 … t + 1 + index, (N, index + 1, H); None of Medusa heads."""
        if not heads.config.hydra:
            return None
        seen = [self.ids[:, 1 + j : 1 + j + self.width][self.chosen] for j in range(self.index + 1)]
        with torch.no_grad():
            return embed(torch.stack(seen, dim=1)).to(dtype)


def medusa_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """Turn gathered sums, (samples, 3 + 3K), into ratios over tokens; `loss` is the first head's forward KL."""
    sums = np.asarray(prediction.predictions, dtype=np.float64).sum(0)
    tokens, rounds, loss = sums[:3]
    heads = sums[3:].reshape(-1, len(PER_HEAD))
    found = {"mean_acceptance_length": float(tokens / rounds), "loss": float(loss / max(heads[0, 0], 1))}
    for index, (count, overlap, right) in enumerate(heads, 1):
        found[f"accuracy_{index}"] = float(right / max(count, 1))
        found[f"alpha_{index}"] = float(overlap / max(count, 1))
    found["alpha"] = found["alpha_1"]
    return found


def frequent_tokens(dataset: Dataset, count: int) -> Tensor:
    """Return the `count` tokens that completions hold most often, ascending, (D,) int64; ties go to the lower id."""
    counts = np.zeros(1, dtype=np.int64)
    for labels in dataset["labels"]:
        kept = np.asarray(labels)
        found = np.bincount(kept[kept != IGNORED])
        if len(found) > len(counts):
            counts = np.pad(counts, (0, len(found) - len(counts)))
        counts[: len(found)] += found
    ranked = np.argsort(-counts, kind="stable")[:count]
    return torch.from_numpy(np.sort(ranked))
