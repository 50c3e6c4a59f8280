"""The base of runs that train heads."""

from abc import abstractmethod
from typing import Any, TypeVar

from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.medusa.base import DraftingHeads
from draftsmith.medusa.config import HeadsConfig
from draftsmith.train.data.examples import frequent_tokens
from draftsmith.train.launch import TrainingRun
from draftsmith.train.models import whole_weights

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
        return None if count is None else frequent_tokens(self.data, count, self.tokens)
