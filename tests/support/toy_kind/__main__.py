"""How a table is trained, and what that takes."""

from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy

from draftsmith.train.job.defaults import Defaults
from draftsmith.train.launch import TrainingRun, launch
from draftsmith.train.losses.positions import LossPositions
from draftsmith.train.memory.plan import TrainingPlan
from draftsmith.train.recipe import RecipeConfig
from draftsmith.train.replay_metrics import acceptance_metrics, replay_features, replay_sums
from draftsmith.train.trainer import RecipeTrainer, texts
from toy_kind.table import Table, TableConfig


@dataclass
class ToyConfig(RecipeConfig):
    defaults = Defaults(rate=0.1)


class ToyTrainer(RecipeTrainer):
    bad_start_cause = "a table begins at random"
    adamw_modules = ()

    def trained_work(self):
        return None

    def summed_loss(self, model, inputs):
        positions = LossPositions(inputs["positions"][0])
        logits_NV = positions.take(model(**texts(inputs)))
        return cross_entropy(logits_NV, positions.next_tokens(inputs["input_ids"]), reduction="sum")

    def replay_sums(self, model, inputs, chosen_BT):
        q_BTV, labels_BT = model(**texts(inputs))[:, :-1, : self.vocab_size], inputs["input_ids"][:, 1:]
        p_BTV = self.target_head(self.target_hidden(inputs)[:, :-1])
        features_NK = replay_features(p_BTV.flatten(0, 1), q_BTV.flatten(0, 1), labels_BT.flatten(), self.sampler)
        losses_BT = cross_entropy(q_BTV.transpose(1, 2), labels_BT, reduction="none") * chosen_BT
        sums = replay_sums(features_NK.unflatten(0, labels_BT.shape), chosen_BT, 4)
        return torch.cat([sums, losses_BT.sum(1, keepdim=True)], dim=1)


class ToyRun(TrainingRun[ToyConfig]):
    def make_model(self) -> Table:
        torch.manual_seed(self.config.training.seed)  # the same weights on all processes, and in a run that goes on
        return Table(TableConfig(self.target_config.get_text_config().vocab_size))

    def make_trainer(self, model: Table) -> ToyTrainer:
        given = model, self.target, self.tokenizer, self.config, self.data, self.heldout
        return ToyTrainer(*given, compute_metrics=acceptance_metrics)


class ToyPlan(TrainingPlan):
    trainer_class = ToyTrainer

    def build(self) -> Table:
        return Table(TableConfig(self.target_shape.get_text_config().vocab_size))


def main(argv=None) -> None:
    launch(ToyConfig, lambda config: ToyRun(config).train(), argv, prog="toy_kind")
