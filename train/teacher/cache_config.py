"""What `draftsmith cache` is told."""

from dataclasses import dataclass

from draftsmith.decode.errors import at_least, at_most, finite, more_than, require, require_some
from draftsmith.train.options import ModelOptions, TargetOptions


@dataclass
class CacheConfig(ModelOptions, TargetOptions):
    """Write down the target's distributions on its completions, for drafts to train on without it; resumable."""

    target: str
    """The target model: a directory or a hub id."""
    completions: list[str]
    """Completion directories (`draftsmith prepare`)."""
    output: str
    """The directory that receives the cache; an unfinished one is resumed."""
    k: int = 32
    """Tokens of each distribution that are kept one by one; the others as one."""
    temperature: float = 1.0
    """The deployment's temperature; a draft can be trained on the cache at this one only."""
    top_k: int = 0
    """The deployment's top-k; 0 for all."""
    top_p: float = 1.0
    """The deployment's top-p; 1 for all."""
    batch_size: int = 16
    """Samples of a forward, of similar length."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_some(self, "completions", "directory")
        require(self, at_least(1), "k", "batch_size")
        require(self, finite(more_than(0)), "temperature")
        require(self, at_least(0), "top_k")
        require(self, more_than(0) & at_most(1), "top_p")
