"""A watch over the replicas of the coordinator's deployments: Ray restarts dead ones silently."""

import threading
import time
from collections.abc import Callable, Mapping
from http.client import HTTPConnection, HTTPException

from ray import serve

AWAY = 60.0  # seconds without any replica of a deployment after which the coordinator gives up
STALE = 15.0  # seconds after which the last status from Serve's controller is too old


class ReplicaWatch:
    """Turns the numbers of running replicas into log lines; `wanted` has the replicas of each deployment."""

    def __init__(self, wanted: Mapping[str, int]):
        self.wanted = wanted
        self._known, self._away_since = dict(wanted), dict[str, float]()
        self._silent = False

    def look(self, running: Mapping[str, int] | None, now: float, answers: bool = True) -> list[str]:
        """Return lines on changes.

        `running` has the running replicas of each deployment; None if Serve's controller does not answer, which says
        nothing about the replicas. Then `answers`, whether the coordinator's own port answers, decides.
        """
        lines: list[str] = []
        if self._silent != (running is None):
            self._silent = running is None
            change = "does not answer" if self._silent else "answers again"
            lines.append(f"coordinator: Ray Serve's controller {change}")
        for name, wanted in self.wanted.items():
            count = self._known[name] if running is None else running.get(name, 0)
            if count != self._known[name]:
                lines.append(f"coordinator: {count} of {wanted} replicas of {name} run")
            self._known[name] = count
            if count and (running is not None or answers):
                self._away_since.pop(name, None)
            else:
                self._away_since.setdefault(name, now)
        return lines

    def lost(self, now: float) -> list[str]:
        """Return the deployments without a replica for `AWAY` seconds."""
        return [name for name, since in self._away_since.items() if now - since >= AWAY]


class Status:
    """The status of an application in Serve, polled in a thread because a dead controller blocks."""

    def __init__(self, application: str, every: float):
        self._application, self._every = application, every
        self._status: tuple[float, dict[str, int]] = (time.monotonic(), {})
        threading.Thread(target=self._ask_on, name="status", daemon=True).start()

    def running(self) -> Mapping[str, int] | None:
        """Return the running replicas of each deployment; None if the status is too old."""
        at, counts = self._status
        return counts if time.monotonic() - at < STALE else None

    def _ask_on(self) -> None:
        while True:
            try:
                deployments = serve.status().applications[self._application].deployments
            except Exception:  # a dead controller raises many types
                time.sleep(self._every)
                continue
            counts = {
                name: sum(count for state, count in deployment.replica_states.items() if state == "RUNNING")
                for name, deployment in deployments.items()
            }
            self._status = (time.monotonic(), counts)
            time.sleep(self._every)


def answers(host: str, port: int) -> bool:
    """Return whether a port answers HTTP, with any status."""
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
    wanted: Mapping[str, int], application: str, stopped: threading.Event, say: Callable[[str], None],
    port_answers: Callable[[], bool], every: float = 0.5,
) -> list[str]:  # fmt: skip
    """Watch until `stopped`, or until deployments stay away; return those, and `say` what changes.

    `wanted` has the replicas of each deployment. `port_answers` tells whether the coordinator's own port answers. Serve
    replaces a dead replica in one or two seconds, more than `every`, the seconds between two checks.
    """
    status, replicas = Status(application, every), ReplicaWatch(wanted)
    while not stopped.wait(every):
        running = status.running()
        for line in replicas.look(running, time.monotonic(), running is not None or port_answers()):
            say(line)
        if lost := replicas.lost(time.monotonic()):
            return lost
    return []
