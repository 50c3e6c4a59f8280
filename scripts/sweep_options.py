"""Settings that `choose`, `align` and `adapt` share: how the target's text is written, and drafters trained on it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from draftsmith.decode.errors import InputError, at_least, finite, require, require_some
from draftsmith.train.cli import Floats, flags_of, numbers, parse_config
from draftsmith.train.data.prepare_config import PrepareConfig
from draftsmith.train.options import ModelOptions, nondefault_fields


@dataclass(kw_only=True)
class SweepOptions(ModelOptions):
    """A target, its text, and the training of drafters on it."""

    target: str
    """The target: a model directory, hub id or GGUF file."""
    output: str
    """The directory that receives everything; a second run continues from its content."""
    learning: dict[str, Any] = field(default_factory=dict)
    """Fields of every training run, such as {packing: true, max_length: 2048, training.bf16: true, processes: 8}."""
    writing: dict[str, Any] = field(default_factory=dict)
    """Fields of every `prepare`, such as {top_p: 0.9, max_prompt_tokens: 512, endpoint: http://localhost:8000/v1}."""
    max_new_tokens: int = 128
    """The most tokens of a text."""
    temperature: Floats = field(default_factory=lambda: [0.0, 1.0])
    """Temperatures of deployment, separated by commas; text is written at each."""
    seed: int = 0
    """Seed of sampling and of the choice of prompts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.temperature = sorted(set(numbers(self.temperature, float, "temperature")))
        require_some(self, "temperature", "number")
        require(self, finite(at_least(0)), "temperature")
        require(self, at_least(1), "max_new_tokens")
        require(self, at_least(0), "seed")
        _ = self.text

    @cached_property
    def text(self) -> PrepareConfig:
        """The settings of `prepare`, apart from the temperature."""
        try:
            return parse_config(PrepareConfig, flags_of(self._written("prompts", "output")))
        except InputError as error:
            raise InputError(f"writing: {error}") from error

    def prepare(self, prompts: Path, output: object, **fields: Any) -> list[str]:
        """Return the command that lets the target complete prompts, at each temperature unless `fields` say another."""
        temperatures = ",".join(f"{temperature:g}" for temperature in self.temperature)
        return ["prepare", *flags_of(self._written(prompts, output) | {"temperatures": temperatures} | fields)]

    def _written(self, prompts: object, output: object) -> dict[str, Any]:
        files = {"target": self.target, "prompts": prompts, "output": output, "seed": self.seed}
        return files | nondefault_fields(self, ("max_new_tokens", "trust_remote_code")) | self.writing

    def texts(self) -> dict[str, Any]:
        """Return how prompts are read and texts sampled, apart from the temperature, as fields of other commands."""
        return nondefault_fields(self.text)

    def training(self, own: dict[str, Any], completions: Sequence[str], output: object) -> dict[str, Any]:
        """Return the fields of a training; `own` are those of the drafter."""
        fields: dict[str, Any] = {"target": self.target, "completions": list(completions)}
        fields |= {"top_k": self.text.top_k, "top_p": self.text.top_p, "trust_remote_code": self.trust_remote_code}
        return fields | self.learning | own | {"training.output_dir": str(output)}
