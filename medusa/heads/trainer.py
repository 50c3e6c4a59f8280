"""Training of Medusa heads: Medusa-1 on a frozen backbone, Medusa-2 together with it (Cai et al. 2024, section 2.2).

One forward of the backbone feeds all heads, and each head's loss is computed on a chunk of positions at a time, so that
heads × tokens × vocabulary is never held. Shape suffixes: B rows, T positions, N chosen positions, K heads, H hidden, V
vocabulary.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.errors import InputError
from draftsmith.medusa.base import LMHead
from draftsmith.medusa.heads.backbone import Joint
from draftsmith.medusa.heads.config import MedusaTrainingConfig
from draftsmith.medusa.heads.model import MedusaHeads
from draftsmith.medusa.trainer import ChainPositions, FeaturesOf, HeadsTrainer
from draftsmith.train.data.examples import TrainingData
from draftsmith.train.job.flops import Work
from draftsmith.train.losses.chunked import chunked_objective
from draftsmith.train.losses.distributions import LiveDistributions
from draftsmith.train.losses.objective import Objective
from draftsmith.train.losses.output_head import OutputHead, head_of, last_hidden, open_forward
from draftsmith.train.losses.positions import LossPositions
from draftsmith.train.runs import declare_dtype, in_dtype, save_model
from draftsmith.train.trainer import texts

HEADS_WEIGHT = 0.2  # the weight of the heads' losses where the backbone is trained too


def new_heads(config: MedusaTrainingConfig, target: PreTrainedModel, token_map: Tensor | None) -> MedusaHeads:
    """Return float32 heads for a training run, which begin as copies of the target's own."""
    return MedusaHeads.of_target(  # type: ignore[no-any-return]
        target,
        config.num_heads,
        token_map=token_map,
        num_hidden_layers=config.num_layers,
        original_lm_head=config.lm_heads == "shared",
        hydra=config.hydra,
        base_model_name_or_path=config.target,
    ).float()


class MedusaTrainer(HeadsTrainer):
    """The trainer that minimises Σ_i decay^i · objective of head i on completions, against the target or their text."""

    cause_of_bad_new_heads = "they begin with the target's head, which is made for the next token alone"

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
        model: Any = Joint(heads, target, config) if config.joint else heads
        # Their losses run inside of their forwards: `train/losses/output_head.py`.
        open_forward(model, *heads.all_lm_heads, *([target.get_output_embeddings()] if config.joint else []))
        count = heads.config.num_heads
        super().__init__(heads, model, target, tokenizer, config, train_dataset, eval_dataset, count=count, **kwargs)
        if config.states_given and heads.config.hydra:  # before the head, whose weights may be the same
            self.embed.to(self.args.device)
        if config.joint:
            model.thaw()

    def create_accelerator_and_postprocess(self) -> None:
        """Refuse kinds of sharding that joint training does not support."""
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

    def summed_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """Return Σ_i decay^i · the objective summed over head i's tokens; in joint training add the backbone's loss."""
        if self.config.joint:
            return model(inside=lambda: self._joint_loss(inputs))
        hidden = self.target_hidden(inputs)
        teacher = hidden, self.teacher_head
        return model(inside=lambda: self._heads_loss(hidden, self.embed, inputs, teacher))

    def replay_sums(self, model: nn.Module, inputs: dict[str, Any], chosen_BT: Tensor) -> Tensor:
        """Return each sample's tokens, rounds and loss, and three sums for each head, (B, 3 + 3K)."""
        if not self.config.joint:
            hidden = self.target_hidden(inputs)
            return model(inside=lambda: self._replayed(inputs, chosen_BT, hidden, self.embed, self.target_head))
        joint: Joint = self.accelerator.unwrap_model(self.model)

        def replayed(hidden: Tensor) -> Tensor:
            head = head_of(joint.backbone).cut(self.vocab_size)
            return self._replayed(inputs, chosen_BT, hidden, joint.backbone.get_input_embeddings(), head)

        # The backbone that is evaluated is the one in training.
        return model(inside=lambda: joint.inside_head(last_hidden(joint.backbone, **texts(inputs)), replayed))

    def _joint_loss(self, inputs: dict[str, Any]) -> Tensor:
        """Return the backbone's loss plus `HEADS_WEIGHT` times the heads'; both learn from the original backbone."""
        config, batch, positions = self.config, texts(inputs), LossPositions(inputs["positions"][0])
        joint: Joint = self.accelerator.unwrap_model(self.model)
        warming = self.state.global_step < config.warmup_heads * self.state.max_steps
        with self.clock.phase("teacher"):
            teacher_hidden = joint.original_hidden(batch)
        # While only the heads are trained, the backbone needs no graph.
        with torch.set_grad_enabled(not warming and torch.is_grad_enabled()):
            hidden = last_hidden(joint.backbone, **batch)

        def losses(hidden: Tensor) -> Tensor:
            original_head = joint.original_head().cut(self.vocab_size)
            teacher = teacher_hidden, self.vocabulary.teacher_head(original_head)
            embed = joint.backbone.get_input_embeddings()
            total = HEADS_WEIGHT * self._heads_loss(hidden, embed, inputs, teacher)
            if warming:
                return total
            # Self-distillation: the backbone's teacher is its original.
            p = LiveDistributions(positions.take(teacher_hidden), original_head)
            backbone_head = head_of(joint.backbone).cut(self.vocab_size)
            labels = positions.next_tokens(inputs["input_ids"])
            with self.clock.phase("loss"):
                backbone_loss = chunked_objective(
                    Objective({"forward_kl": 1.0}), positions.take(hidden), backbone_head, p, labels, sizes=self.sizes
                )
            return total + backbone_loss

        return joint.inside_head(hidden, losses)

    def _heads_loss(
        self, hidden: Tensor, embed: nn.Module, inputs: dict[str, Tensor], teacher: tuple[Tensor, OutputHead] | None
    ) -> Tensor:
        """Return the heads' weighted loss, summed over their tokens; called inside of the model's forward.

        `hidden`, (B, T, H), is the heads' input; `teacher` is that of `chain_loss`.
        """
        heads, positions = self.heads, ChainPositions(inputs, self.count)
        states = [
            heads.states(i, positions.head_inputs(i, hidden, heads), positions.embeddings(i, embed, heads))
            for i in range(self.count)
        ]

        def losses(states: Sequence[Tensor]) -> Tensor:
            # Of a head that all share there is one view, so that the chunked loss holds one gradient of it.
            shared = self._loss_head(0) if heads.config.original_lm_head else None
            learners = [(state, shared or self._loss_head(i)) for i, state in enumerate(states)]
            return self.chain_loss(positions, learners, teacher)

        return heads.inside_lm_heads(states, losses)

    def _replayed(
        self, inputs: dict[str, Tensor], chosen: Tensor, hidden: Tensor, embed: nn.Module, head: OutputHead
    ) -> Tensor:
        """Return the sums of `replay_sums`, from distributions over the whole vocabulary."""
        heads, positions = self.heads, ChainPositions(inputs, self.count)

        def features(index: int, features_of: FeaturesOf) -> Tensor:
            states = heads.states(
                index, positions.head_inputs(index, hidden, heads), positions.embeddings(index, embed, heads)
            )
            # Inside of the head's forward its weight is whole.
            inside = lambda states: features_of(states, self._loss_head(index))  # noqa: E731
            return heads.lm_head_of(index)(states, inside=inside)

        return self.chain_sums(positions, chosen, LiveDistributions(positions.teacher(hidden), head), features)

    def _loss_head(self, index: int) -> OutputHead:
        """Return one head's map to logits over its vocabulary, inside of its language-model head's forward."""
        return self.loss_head(self.heads.head(index))

    def trained_work(self) -> Work | None:
        """Return the arithmetic of the heads and of a backbone in training; the original's is counted separately."""
        maps = Work.of_maps(*self.heads.maps)
        if not self.config.joint:
            return maps
        backbone = Work.of(self.target)
        return None if backbone is None else replace(backbone, head=backbone.head + maps.head)

    @property
    def adamw_modules(self) -> list[LMHead]:
        """The heads' language-model heads."""
        return self.heads.all_lm_heads

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """In joint training, give the heads another learning rate than the backbone."""
        is_new = self.optimizer is None
        optimizer = super().create_optimizer(model)
        if self.config.joint and is_new:
            head_ids = {id(p) for p in self.accelerator.unwrap_model(self.model).heads.parameters()}
            groups = list(optimizer.param_groups)
            # Split each group in two, so that weight decay and other options stay.
            optimizer.param_groups.clear()
            for group in groups:
                for in_heads, rate in ((True, self.config.head_learning_rate_multiplier), (False, 1.0)):
                    parameters = [p for p in group["params"] if (id(p) in head_ids) == in_heads]
                    if parameters:
                        optimizer.add_param_group({**group, "params": parameters, "lr": group["lr"] * rate})
        return optimizer

    def write_model(self, directory: str, state_dict: dict[str, Any] | None) -> None:
        """Write heads, and for Medusa-2 the merged backbone, in `backbone`; checkpoints hold both unmerged."""
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
