"""`draftsmith serve-draft` as a subprocess."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from engine import DRAFT, ENVIRONMENT, Served, end, wait_for
from fated import start
from prometheus_client.parser import text_string_to_metric_families


def start_draft_service(draft: Path | str, port: int, log: Path, *flags: str) -> subprocess.Popen[bytes]:
    """Start it, and do not wait until it answers."""
    command = [sys.executable, "-m", "draftsmith.scripts.cli", "serve-draft", "--drafter", str(draft)]
    with log.open("ab") as output:
        flags = ("--port", str(port), "--dtype", "float32", "--threads", "1", *flags)
        return start([*command, *flags], output, {"OMP_NUM_THREADS": ENVIRONMENT["OMP_NUM_THREADS"]})


@dataclass
class DraftedFor:
    """A vLLM that asks a draft service."""

    server: Served
    draft: subprocess.Popen[bytes]
    port: int
    log: Path
    """The service's, as is the port."""

    @property
    def service(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def restart(self, draft: Path | str = DRAFT) -> None:
        self.draft = start_draft_service(draft, self.port, self.log)
        wait_for(f"{self.service}/health", self.draft, self.log)


@contextmanager
def draft_service(draft: Path | str, port: int, log: Path, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start it, wait until it answers, and end it."""
    process = start_draft_service(draft, port, log, *flags)
    try:
        wait_for(f"http://127.0.0.1:{port}/health", process, log)
        yield process
    finally:
        end(process)


def totals(metrics: str, prefix: str) -> dict[str, float]:
    """Return the samples of a `/metrics` whose names begin so, by the rest of the name, summed over labels."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if sample.name.startswith(prefix):
                name = sample.name.removeprefix(prefix)
                found[name] = found.get(name, 0.0) + sample.value
    return found
