"""Whether the replicas of the coordinator's deployments live: Ray starts dead ones anew, and says nothing of it."""

import threading
import time
from collections.abc import Callable, Mapping

from ray import serve

AWAY = 60.0
"""Seconds without any replica of a deployment after which nothing is to be hoped for."""
STALE = 15.0
"""Seconds after which what Serve said last counts for nothing: its controller does not answer."""


class Watch:
    """Says what becomes of the replicas.

    Args:
        wanted: replicas of each deployment.
    """

    def __init__(self, wanted: Mapping[str, int]):
        self.wanted = wanted
        self._known, self._away_since = dict(wanted), dict[str, float]()

    def look(self, running: Mapping[str, int] | None, now: float) -> list[str]:
        """Return lines on what has changed.

        Args:
            running: replicas of each deployment that run; None where nobody says.
            now: seconds.
        """
        said: list[str] = []
        for name, wanted in self.wanted.items():
            count = 0 if running is None else running.get(name, 0)
            if count != self._known[name]:
                said.append(f"coordinator: {count} of {wanted} replicas of {name} run")
            self._known[name] = count
            if count:
                self._away_since.pop(name, None)
            else:
                self._away_since.setdefault(name, now)
        return said

    def lost(self, now: float) -> list[str]:
        """Return the deployments that have had no replica for `AWAY` seconds."""
        return [name for name, since in self._away_since.items() if now - since >= AWAY]


class Status:
    """What Serve says of an application, asked for in a thread: a controller that is dead does not answer."""

    def __init__(self, application: str, every: float):
        self._application, self._every = application, every
        self._said: tuple[float, dict[str, int]] = (time.monotonic(), {})
        threading.Thread(target=self._ask_on, name="status", daemon=True).start()

    def running(self) -> Mapping[str, int] | None:
        """Return the replicas of each deployment that run; None where nobody has said so lately."""
        at, counts = self._said
        return counts if time.monotonic() - at < STALE else None

    def _ask_on(self) -> None:
        while True:
            try:
                deployments = serve.status().applications[self._application].deployments
            except Exception:  # what is said of a dead controller is of many kinds
                time.sleep(self._every)
                continue
            counts = {
                name: sum(count for state, count in each.replica_states.items() if state == "RUNNING")
                for name, each in deployments.items()
            }
            self._said = (time.monotonic(), counts)
            time.sleep(self._every)


def watch(
    wanted: Mapping[str, int],
    application: str,
    stopped: threading.Event,
    say: Callable[[str], None],
    every: float = 2.0,
) -> list[str]:
    """Watch until told to stop, or until a deployment stays away; return those that do."""
    status, replicas = Status(application, every), Watch(wanted)
    while not stopped.wait(every):
        now = time.monotonic()
        for line in replicas.look(status.running(), now):
            say(line)
        if lost := replicas.lost(now):
            return lost
    return []
