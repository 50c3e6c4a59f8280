"""`python -m benchmarks.gate`: are the verdicts wrong as seldom as they say? By simulation.

Promises are held against data whose truth is known: a gate says "go" of little that does not pay, also on a machine
that other work slows down; and a server that does as expected is seldom said to depart.
"""

from dataclasses import dataclass, field

from benchmarks.common import BenchmarkConfig
from draftsmith.decode.errors import at_least, one_of, require, require_some

PROMISES = ("gate", "clock", "reconcile")


@dataclass(kw_only=True)
class BenchGateConfig(BenchmarkConfig):
    """Simulate what verdicts rest on, and count how often they are wrong."""

    of: list[str] = field(default_factory=lambda: list(PROMISES))
    """The promises: gate, clock, reconcile."""
    simulations: int = 400
    """Data sets of each kind."""
    settings: list[int] = field(default_factory=lambda: [1, 4, 12, 24])
    """Numbers of settings (drafters × draft lengths) from which the gate takes the best."""
    prompts: list[int] = field(default_factory=lambda: [8, 16, 40, 80])
    """Numbers of prompts that the gate decodes."""
    seed: int = 1
    """The seed of the data."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, one_of(PROMISES), "of")
        require(self, at_least(1), "settings")
        require(self, at_least(5), "prompts")
        for name in ("of", "settings", "prompts"):
            require_some(self, name, "item")
