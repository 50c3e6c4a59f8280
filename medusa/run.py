"""The base of runs that train heads."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.cache import positions_of
from draftsmith.medusa.base import DraftingHeads
from draftsmith.medusa.config import FeaturesConfig, HeadsConfig
from draftsmith.medusa.seen import TargetStates, seen_before, seen_now
from draftsmith.train.data.examples import frequent_tokens
from draftsmith.train.data.first_look import Text
from draftsmith.train.launch import TrainingRun
from draftsmith.train.models import check_head, whole_weights
from draftsmith.train.teacher.feature_reader import FeatureCollator, FeatureIndex, find_features

Config = TypeVar("Config", bound=HeadsConfig)


class HeadsRun(TrainingRun[Config]):
    """A run that trains heads: those of an earlier run, or new ones."""

    heads_class: type[DraftingHeads]
    heads: Any = None

    def read_small_files(self) -> None:
        """Load the heads that are given."""
        if self.config.heads is not None:
            with whole_weights():
                self.heads = self.heads_class.from_pretrained(self.config.heads).float()

    @property
    def positions(self) -> int | None:
        """As of the target, or of heads that are given, where theirs end before."""
        own = None if self.heads is None else positions_of(self.heads.config)
        return min(filter(None, [own, super().positions]), default=None)

    def make_model(self) -> PreTrainedModel:
        """Return the given heads, or new ones, in float32."""
        new = self.config.heads is None
        with whole_weights():
            if new:
                self.heads = self.new_heads()
            self.check_heads()
            if new and self.begins:
                self.first_look()
        return self.heads  # type: ignore[no-any-return]

    @abstractmethod
    def new_heads(self) -> DraftingHeads:
        """Return new heads for the target, in float32, as the config says."""

    def check_heads(self) -> None:
        """Require that the heads fit what else the run reads."""

    @abstractmethod
    def first_look(self) -> None:
        """Scale new heads by a look at a few texts, and say how they begin."""

    @property
    def token_map(self) -> Tensor | None:
        """The tokens that new heads may draft; None for all."""
        count = self.config.draft_vocabulary
        return None if count is None else frequent_tokens(self.data, count, self.tokens, self.ends)


FeatureConfig = TypeVar("FeatureConfig", bound=FeaturesConfig)


class FeatureRun(HeadsRun[FeatureConfig]):
    """A run that trains heads on features of a target, or on a cache of them."""

    features: FeatureIndex | None = None
    """Of a teacher cache."""

    def read_small_files(self) -> None:
        """Look what a cache holds, and load the heads that are given."""
        if self.config.teacher_cache:
            self.features = find_features(self.config.teacher_cache, self.config, self.tokens)
        super().read_small_files()

    def load_target(self) -> PreTrainedModel | None:
        """Load the target, or its ends alone where a cache has its features."""
        if self.features is None:
            return super().load_target()
        target = self.features.load_target(self.config)
        check_head(target.config, self.tokenizer, "target")
        return target

    def check_heads(self) -> None:
        """Require that a cache has the features that the heads see."""
        if self.features is not None:
            self.features = self.features.of_layers(self.heads.layer_ids)

    def seen_of(self, texts: Sequence[Text]) -> Callable[[Text], TargetStates]:
        """Return what says what the target leaves of some texts, before training begins: itself, or a cache."""
        if self.features is None:
            return partial(seen_now, self.target, self.heads.layer_ids)
        self.features.look_at([text.sample for text in texts])
        return partial(seen_before, self.target, self.features)

    def packed_models(self, model: PreTrainedModel) -> dict[str, PreTrainedModel]:
        """Return the target, unless a cache stands for its forwards."""
        return super().packed_models(model) if self.features is None else {}

    @abstractmethod
    def new_trainer(self, model: PreTrainedModel) -> Any:
        """Return the trainer of these heads."""

    def make_trainer(self, model: PreTrainedModel) -> Any:
        """Return the trainer; its batches have what a cache has of them."""
        trainer = self.new_trainer(model)
        if self.features is not None:
            trainer.data_collator = FeatureCollator(trainer.data_collator, self.features)
            if self.features.window is not None:
                trainer.known_order = True
                self.features.window.follow(trainer)
        return trainer
