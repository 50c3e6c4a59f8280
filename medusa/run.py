"""The base of runs that train heads."""

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import ModelCard, ModelCardData
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.cache import positions_of
from draftsmith.medusa.base import DraftingHeads
from draftsmith.medusa.config import HeadsConfig
from draftsmith.medusa.target_states import TargetStates, states_from_cache, states_from_forward
from draftsmith.train.data.examples import frequent_tokens
from draftsmith.train.data.first_look import Text
from draftsmith.train.launch import TrainingRun
from draftsmith.train.models import whole_weights
from draftsmith.train.runs import hub_name
from draftsmith.train.teacher.feature_reader import FeatureIndex

Config = TypeVar("Config", bound=HeadsConfig)


class HeadsRun(TrainingRun[Config]):
    """A run that trains new heads, or those of an earlier run."""

    heads_class: type[DraftingHeads]
    trainer_class: type[Any]
    heads: Any = None
    cached: FeatureIndex | None = None

    def read_small_files(self) -> None:
        """Read the index of a cache, and load the heads of an earlier run, if the config names them."""
        super().read_small_files()
        if self.config.heads is not None:
            with whole_weights():
                self.heads = self.earlier_heads()

    def earlier_heads(self) -> Any:
        """Return the heads of an earlier run, in float32."""
        return self.heads_class.from_pretrained(str(self.config.heads)).float()

    @property
    def positions(self) -> int | None:
        """The positions of the target, or of an earlier run's heads if those are fewer."""
        own = None if self.heads is None else positions_of(self.heads.config)
        # Drafts end where either of the two models has no further positions.
        return min(filter(None, [own, super().positions]), default=None)

    def make_model(self) -> PreTrainedModel:
        """Return new heads, or those of an earlier run, in float32."""
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
        """Return new heads for the target, in float32."""

    def check_heads(self) -> None:
        """Require that the heads fit the run's other inputs: a cache must have the features that they see."""
        if self.cached is not None:
            self.cached = self.cached.of_layers(self.heads.layer_ids)

    @property
    def states_of(self) -> Callable[[Text], TargetStates]:
        """A function from a text of the data to its states, from the target or from what replaces it."""
        if self.cached is None:
            return partial(states_from_forward, self.target, self.heads.layer_ids)
        return partial(states_from_cache, self.target, self.cached)

    @abstractmethod
    def first_look(self) -> None:
        """Scale new heads by their loss on a few texts, and print how they begin."""

    def make_trainer(self, model: PreTrainedModel) -> Any:
        """Return the trainer."""
        return self.trainer_class(model, self.target, self.tokenizer, self.config, self.data, self.heldout)

    @property
    def token_map(self) -> Tensor | None:
        """The tokens that new heads may draft; None for all."""
        count = self.config.draft_vocabulary
        return None if count is None else frequent_tokens(self.data, count, self.tokens, self.ends)

    def write_card(self, trainer: Any, output: Path, template: Path, tag: str, **fields: Any) -> None:
        """Write the model card, with the kept step and its acceptance if it was measured."""
        config = trainer.heads.config
        base, tags = config.base_model_name_or_path, [tag, "speculative-decoding"]
        card = ModelCard.from_template(
            ModelCardData(base_model=hub_name(base), library_name="draftsmith", tags=tags),
            str(template),
            config=config,
            base=base,
            parameters=f"{trainer.heads.num_parameters():,}",
            dtype=str(trainer.save_dtype).removeprefix("torch."),
            **fields,
            **trainer.acceptance,
        )
        card.save(output / "README.md")
