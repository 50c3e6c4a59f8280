"""The first run on a GPU: what is right there, and how fast it is, in a given number of minutes."""

from dataclasses import dataclass, field

from benchmarks.common import BenchmarkConfig
from draftsmith.decode.errors import InputError, finite, more_than, require


@dataclass
class BenchGpuConfig(BenchmarkConfig):
    """Try draftsmith on a GPU: what is right there, and how fast it is."""

    minutes: float = 9.0
    """When to stop; what comes last is left out."""
    only: list[str] = field(default_factory=list)
    """Beginnings of names: run these cases alone, such as [completions, train, law float32]; all if empty."""
    output: str | None = "runs/gpu/first-run.json"
    """The file of results, written after each case; what cases need lies next to it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, finite(more_than(0)), "minutes")
        if self.output is None:
            raise InputError("output: expected a file for the results, found none")
