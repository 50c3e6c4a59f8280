"""`python -m draftsmith.scripts.bench.door`: what the coordinator costs; straight to servers and through it, in turns.

The servers are stubs in this process that answer after a set time, so that all else is the door's. Each client sends
its next request when the one before is answered.
"""

from dataclasses import dataclass

from draftsmith.decode.errors import finite, more_than, require
from draftsmith.scripts.bench.common import BenchmarkConfig


@dataclass
class BenchDoorConfig(BenchmarkConfig):
    """Time requests with and without the coordinator in front."""

    clients: int = 12
    """Clients that ask at once."""
    servers: int = 2
    """Servers behind the door."""
    seconds: float = 0.05
    """That a server takes for an answer."""
    requests: int = 20
    """Requests of a client in each turn, after one that is not timed."""
    rounds: int = 5
    """Turns of each way."""
    ingress: int = 1
    """Processes of the coordinator that pass requests on."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, finite(more_than(0)), "seconds")
