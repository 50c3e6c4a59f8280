"""The step whose weights a run leaves in its `output_dir`, and its score on held-out text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.decode.validation import Count, read
from draftsmith.train.provenance import RUN_RECORD


@dataclass(frozen=True)
class KeptStep:
    """The step whose weights are kept, and its score among the steps that were measured on held-out text."""

    step: Count
    last_step: Count
    metric: str
    measured: Count  # the number of steps measured
    score: float | None  # the step's score; None if it was not measured
    last_score: float | None
    best_step: Count | None  # the best measured step, whether its weights are kept or not
    best_score: float | None

    @classmethod
    def of(cls, step: int, last: int, metric: str, greater: bool, log: Sequence[Mapping[str, Any]]) -> "KeptStep":
        """Return a step's place in a trainer's log."""
        scores = {entry["step"]: entry[f"eval_{metric}"] for entry in log if f"eval_{metric}" in entry}
        best, best_score = next(iter(sorted(scores.items(), key=lambda entry: entry[1], reverse=greater)), (None, None))
        return cls(step, last, metric, len(scores), scores.get(step), scores.get(last), best, best_score)

    @classmethod
    def left_in(cls, directory: Path) -> "KeptStep | None":
        """Return the record that a run left next to its weights; None if there is none, or an older one."""
        try:
            return read(_Record, directory / RUN_RECORD).kept
        except FileNotFoundError:
            return None

    def __str__(self) -> str:
        name = f"step {self.step} of {self.last_step}" if self.step != self.last_step else f"step {self.step}, the last"
        if self.score is None:
            return f"{name}; no held-out text compared it with others"
        score = f"{self.metric} {self.score:.3f}"
        if self.measured == 1:
            return f"{name}: {score} on held-out text, and no other step was measured"
        if self.score != self.best_score:
            best = f"the best that was measured, step {self.best_step}, had {self.best_score:.3f}"
            return f"{name}: {score} on held-out text; {best}"
        last = "" if self.last_score is None or self.step == self.last_step else f"; the last has {self.last_score:.3f}"
        return f"{name}: {score}, the best of {self.measured} on held-out text{last}"


@dataclass(frozen=True)
class _Record:
    kept: KeptStep | None = None
