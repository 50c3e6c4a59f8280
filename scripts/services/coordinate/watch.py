"""Whether the replicas of the coordinator's deployments live: Ray starts dead ones anew, and says nothing of it."""

import threading
import time
from collections.abc import Callable, Mapping
from http.client import HTTPConnection, HTTPException

from ray import serve

AWAY = 60.0
"""Seconds without any replica of a deployment after which nothing is to be hoped for."""
STALE = 15.0
"""Seconds after which the last word of Serve's controller is too old to go by."""


class ReplicaWatch:
    """Says what becomes of the replicas.

    Args:
        wanted: replicas of each deployment.
    """

    def __init__(self, wanted: Mapping[str, int]):
        self.wanted = wanted
        self._known, self._away_since = dict(wanted), dict[str, float]()
        self._silent = False

    def look(self, running: Mapping[str, int] | None, now: float, answers: bool = True) -> list[str]:
        """Return lines on what has changed.

        Args:
            running: replicas of each deployment that run; None where Serve's controller does not answer, which says
                nothing of the replicas.
            now: seconds.
            answers: whether the coordinator's own port does; looked at where the controller does not.
        """
        said: list[str] = []
        if self._silent != (running is None):
            self._silent = running is None
            said.append(f"coordinator: Ray Serve's controller {'does not answer' if self._silent else 'answers again'}")
        for name, wanted in self.wanted.items():
            count = self._known[name] if running is None else running.get(name, 0)
            if count != self._known[name]:
                said.append(f"coordinator: {count} of {wanted} replicas of {name} run")
            self._known[name] = count
            if count and (running is not None or answers):
                self._away_since.pop(name, None)
            else:
                self._away_since.setdefault(name, now)
        return said

    def lost(self, now: float) -> list[str]:
        """Return the deployments that have had no replica for `AWAY` seconds."""
        return [name for name, since in self._away_since.items() if now - since >= AWAY]


class Status:
    """Serve's word on an application, asked for in a thread, because a dead controller does not answer."""

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


def answers(host: str, port: int) -> bool:
    """Say whether anything at a port answers HTTP, whatever it says."""
    connection = HTTPConnection(host, port, timeout=5)
    try:
        connection.request("GET", "/health")
        connection.getresponse().read()
        return True
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


def watch(
    wanted: Mapping[str, int],
    application: str,
    stopped: threading.Event,
    say: Callable[[str], None],
    there: Callable[[], bool],
    every: float = 0.5,
) -> list[str]:
    """ReplicaWatch until stopped, or until a deployment stays away; return those that do.

    Args:
        wanted: replicas of each deployment.
        application: its name in Serve.
        stopped: ends the watch.
        say: takes lines on what has changed.
        there: says whether the coordinator's own port answers.
        every: seconds between two looks; a replica that dies is replaced in one or two.
    """
    status, replicas = Status(application, every), ReplicaWatch(wanted)
    while not stopped.wait(every):
        running = status.running()
        for line in replicas.look(running, time.monotonic(), running is not None or there()):
            say(line)
        if lost := replicas.lost(time.monotonic()):
            return lost
    return []
