"""Settings of `draftsmith tune`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftsmith.decode.errors import InputError, Range, at_least, less_than, more_than, require, require_some
from draftsmith.decode.options import Sampling
from draftsmith.scripts.kinds import Drafters, aliases, only_drafter
from draftsmith.train.cli import values_by_field
from draftsmith.train.options import DRAFT_LENGTH, PromptedTarget

BELOW_ONE = Range("levels of at least 0 and less than 1", lambda level: 0 <= level < 1)
UP_TO_ONE = Range("levels of at least 0 and at most 1", lambda level: 0 <= level <= 1)
ALLOWED = {"typical": BELOW_ONE, "threshold": BELOW_ONE, "cascade": UP_TO_ONE}
LEVELS = {
    "typical": [0.05, 0.1, 0.2, 0.4, 0.8],
    "threshold": [0.05, 0.1, 0.2, 0.4, 0.8],
    "cascade": [0.15, 0.3, 0.5, 0.7, 0.9],
}


@dataclass
class TuneConfig(Sampling, PromptedTarget):
    """Decode prompts by lossy rules at several levels, and find the fastest within the allowed departure."""

    output: str
    """The directory that receives `tune.json`."""
    drafter: Drafters = field(default_factory=list, metadata=aliases())
    """The drafter: `DIR`, or a kind that needs no files, such as prompt_lookup."""
    draft_length: int = 4
    """γ, drafted tokens a round at all levels, for drafters without a tree; lenient rules may pay with a longer one."""
    batch_size: int = 8
    """Prompts decoded together. Acceptance and departure do not depend on it, except for ties in half precision. Speeds
    are those of such batches, with intervals over batches."""
    max_departure: float | None = None
    """The departure from the target that is allowed, below 1. At temperature 0: the share of tokens that are not its
    argmax in their context. Under sampling: the mean total variation between a token's distribution and the target's; a
    text of n tokens is then at most n times as far."""
    levels: dict[str, list[float]] = field(default_factory=lambda: dict(LEVELS))
    """The rules and their levels: ε of typical acceptance, with δ = √ε, as its authors have it; the threshold rule,
    which reads the probability at temperature 1 if the temperature is 0, and refuses even the target's own choice where
    that is unlikely; and the drafter's confidence from which the cascade accepts its tokens."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.drafter = only_drafter(self.drafter)
        require(self, at_least(1), "batch_size")
        require(self, DRAFT_LENGTH, "draft_length")
        require(self, at_least(2), "limit")
        require(self, more_than(0) & less_than(1), "max_departure")
        if not any(self.levels.values()) or not self.levels.keys() <= ALLOWED.keys():
            raise InputError(f"levels: expected levels of {', '.join(ALLOWED)}, found {self.levels}")
        for rule, levels in self.levels.items():
            for level in levels:
                ALLOWED[rule].check(f"levels: {rule}", level)


@dataclass
class LoadConfig:
    """Find the draft length for each load, from measurements of the server at several draft lengths."""

    reports: list[str]
    """Reports of `measure --server` with a baseline server, or their directories: one for each draft length, with the
    same `concurrency` and temperatures."""
    target: str
    """The target: a model directory, hub id or GGUF file."""
    output: str
    """The directory that receives `draft_lengths.json`."""
    drafter: Drafters = field(default_factory=list, metadata=aliases())
    """The drafter that was served, a directory."""

    def __post_init__(self) -> None:
        require_some(self, "reports", "report")
        self.drafter = only_drafter(self.drafter)

    @property
    def path(self) -> str:
        """The drafter's directory."""
        return str(self.drafter[0]).rpartition(":")[2].rpartition("=")[2]

    @property
    def drafter_name(self) -> str:
        """The drafter's name in the file."""
        return Path(self.path).name


def tune_config(arguments: Sequence[str]) -> type[Any]:
    """Return the config class for these arguments: with `reports` LoadConfig, else TuneConfig."""
    return LoadConfig if "reports" in values_by_field(arguments) else TuneConfig
