"""What a server makes of a drafter: what it counts of live traffic, and whether a new one holds what replay promised.

Live traffic is seen in the server's counters alone, which do not tell texts apart. So the interval of τ is computed
from the accepted tokens by position and the number of texts, with a usual correlation of the drafts of one text. It
holds every τ that the counters allow (`scripts.serving.server_steps`).
"""

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement.intervals import Estimate, format_estimate
from draftsmith.decode.measurement.server_counts import ServerCounts
from draftsmith.decode.progress import time_text
from draftsmith.decode.validation import Count, parse_json, read
from draftsmith.scripts.adapt.config import AdaptConfig
from draftsmith.scripts.serving.client import Client
from draftsmith.scripts.serving.counters import ServerMetrics
from draftsmith.scripts.serving.server_steps import NOTHING, CountedTexts, server_steps
from draftsmith.scripts.stages import NO_GO, Stages
from draftsmith.train.cli import INTERRUPTED, TERMINATED, Terminated
from draftsmith.train.endpoint.http import ServerFailure
from draftsmith.train.files import move_link, remove
from draftsmith.train.job.processes import terminable
from draftsmith.train.provenance import write_json
from draftsmith.train.runs import note_on_interrupt

STATE, LOOKS = "server.json", "looks.jsonl"
LEAST_DRAFTS, LEAST_TEXTS = 500, 16
"""Of a look: with fewer since the last one, nothing is said."""
ALIKE = 0.2
"""Correlation of the accepted tokens of two drafts of one text: 0.15 to 0.19 at T=0 (docs/log/choose.md)."""
UNEQUAL = 2.0
"""Σ m² · texts ÷ (Σ m)² over texts of m drafts, which counters do not tell: 1 where all have as many, 2 where their
standard deviation is their mean."""
NORMAL = 1.96
"""Standard deviations of a 95 % interval."""
STARTING = 600.0
"""Seconds in which a server that was started again must answer."""


@dataclass(frozen=True)
class Unchecked:
    """A drafter that took the deployed one's place, and was not looked at on the server yet."""

    step: str
    """The folder of its step."""
    before: str
    """The drafter that it replaced."""
    command: list[str]
    """What measures it: arguments of `measure`."""


@dataclass(frozen=True)
class Watched:
    """What is known of the server."""

    drafter: str | None = None
    """What the link pointed to at the last look."""
    totals: ServerCounts | None = None
    """Its counters then; None before the first one."""
    texts: Count = 0
    """Those it had finished then."""
    requests: Count = 0
    """Those under way then."""
    tokens: Count | None = None
    """What it had written; None where it does not say."""
    at_first: Estimate | None = None
    """τ of the first look after the last step, with which later ones are compared."""
    unchecked: Unchecked | None = None


def watched(output: Path) -> Watched:
    """Return what earlier calls have seen."""
    path = output / STATE
    return read(Watched, path) if path.is_file() else Watched()


def length_of(counts: ServerCounts, texts: int, tokens: int, under_way: tuple[int, int] = (0, 0)) -> Estimate:
    """Return τ, emitted tokens ÷ drafts, of what a server counted, with an approximate interval.

    The value is None where the counts allow several, and the interval too where they allow none.

    Args:
        counts: of its drafts.
        texts: that ended meanwhile.
        tokens: that it wrote.
        under_way: texts that had begun before and that had not ended: their prompts' tokens may be among those or not.
    """
    before, after = under_way
    begun = {max(texts - before, 0), texts, texts + after}
    found = [server_steps([CountedTexts(counts, tokens, number)]) for number in begun]
    bounds = [each for steps in found if (each := steps.length_bounds()) is not None]
    if not bounds:
        return NOTHING
    drafts, per_pos = counts.num_drafts, counts.num_accepted_tokens_per_pos
    mean = sum(per_pos) / drafts
    # Of a draft with x accepted tokens x² is the sum of 2 i − 1 over its accepted positions i.
    square = sum((2 * i - 1) * accepted for i, accepted in enumerate(per_pos, 1)) / drafts
    alone = ALIKE * UNEQUAL / max(texts, 1) + (1 - ALIKE) / drafts
    spread = NORMAL * math.sqrt(max(square - mean**2, 0.0) * alone)
    most = counts.num_draft_tokens / drafts + 1
    low, high = min(low for low, _ in bounds), max(high for _, high in bounds)
    value = low if high - low < 1e-12 else None
    return Estimate(value, (max(low - spread, 1.0), min(high + spread, most)), int(drafts))


def look(config: AdaptConfig, output: Path) -> tuple[str | None, bool]:
    """Read the server's counters; return what to say of the traffic since the last look, and whether τ fell.

    Looks are kept in `looks.jsonl`. A server that does not answer, or shows no counters, is said, and nothing more.
    """
    try:
        metrics = asyncio.run(_metrics(config))
    except (ServerFailure, InputError) as failure:
        return str(failure), False
    before, drafter = watched(output), os.path.realpath(config.drafter)
    totals, texts, tokens = metrics.counters, metrics.finished or 0, metrics.generated_tokens
    if tokens is None:
        return "the server does not count the tokens that it writes, so that its τ is not known", False
    now = replace(before, drafter=drafter, totals=totals, texts=texts, requests=metrics.requests, tokens=tokens)
    if before.totals is None or before.tokens is None or before.drafter != drafter:
        _keep(output, replace(now, at_first=None))
        return None, False
    counted, ended, written = totals - before.totals, texts - before.texts, tokens - before.tokens
    least = counted.num_drafts, counted.num_draft_tokens, ended, written, *counted.num_accepted_tokens_per_pos
    if min(least) < 0:  # the server was started again, and counts from nothing
        before = replace(before, totals=ServerCounts(), texts=0, requests=0, tokens=0)
        _keep(output, before)
        counted, ended, written = totals, texts, tokens
    if counted.num_drafts < LEAST_DRAFTS or ended < LEAST_TEXTS:  # they count with what comes
        return None, False
    length = length_of(counted, ended, written, (before.requests, metrics.requests))
    if length.ci95 is None:
        _keep(output, now)
        counts = f"{counted.num_drafts:,} drafts for {written:,} tokens in {ended} texts"
        return f"the server's τ is not known: {counts} fit no way of counting that is known", False
    first = before.at_first or length
    assert first.ci95 is not None
    fell = length.ci95[1] < first.ci95[0]
    line = {"time": time.time(), "drafter": drafter, "counts": counted.to_dict(), "texts": ended, "fell": fell}
    with (output / LOOKS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line | {"tokens": written, "mean_acceptance_length": asdict(length)}) + "\n")
    _keep(output, replace(now, at_first=first))
    said = f"the server's τ since the last look: {_between(length)}"
    if first is not length:
        said += f"; {_between(first)} in the first one after the last step"
    return said + (": it fell" if fell else ""), fell


def _between(length: Estimate) -> str:
    if length.value is None and length.ci95 is not None:
        return f"between {length.ci95[0]:.2f} and {length.ci95[1]:.2f}"
    return format_estimate(length, spread="interval")


def look_anew(output: Path) -> None:
    """Compare later looks with the next one: what was to be learned from the traffic until now is learned."""
    _keep(output, replace(watched(output), at_first=None))


def replaced(config: AdaptConfig, output: Path, step: Path, before: str, command: list[str]) -> None:
    """Note a drafter that the link points to now, and restart the server where that is how it comes to load it."""
    unchecked = None if config.server is None else Unchecked(str(step), before, command)
    for stale in ("check", "server"):  # of a server that was not started again
        remove(step / stale)
    _keep(output, Watched(unchecked=unchecked))
    _restart(config)


def check(config: AdaptConfig, output: Path) -> tuple[str, bool] | None:
    """Measure the drafter that came last on the server, and take it back if acceptance is below what was promised.

    Returns:
        What to say, and whether the drafter stays; None where there is nothing to check.

    Raises:
        InputError: a server that does not answer, or whose counters cannot be read.
    """
    unchecked = watched(output).unchecked
    if unchecked is None:
        return None
    step = Path(unchecked.step)
    Stages(step / "check").run("server", ["measure", *unchecked.command])
    report = parse_json((step / "server/report.json").read_text(encoding="utf-8"))
    alpha, gate, within = report["runs"][0]["alpha"], report["gate"], report["server"]["counted"][0]["alpha_within"]
    # What is not known is no reason to go back, nor what may be as good as was promised.
    unsure = alpha["ci95"] is None and (within is None or within[1] > gate["min_alpha"])
    stays = gate["passed"] or unsure
    if not stays:
        if os.path.realpath(config.drafter) == os.path.realpath(step / "drafter"):
            move_link(Path(config.drafter), unchecked.before)
        _restart(config)
    # Counted from now on: what the check asked for was no traffic.
    _keep(output, Watched())
    why = gate["failures"][0] if gate["failures"] else "α is above what was promised"
    found = "holds" if gate["passed"] else "is not known" if stays else "is below what was promised"
    return f"acceptance on the server {found}: {why}", stays


def loop(argv: Sequence[str], seconds: float) -> int:
    """Do one step after the other, each in a process of its own, which leaves nothing in memory; return an exit code.

    The first step must be possible; what goes wrong later is said, and tried again.
    """
    command, first = [sys.executable, "-m", "draftsmith.scripts.cli", "adapt", *argv, "--watch=null"], True
    with terminable(), note_on_interrupt(lambda: "no step is begun any more; the same command goes on"):
        while True:
            code = _ended(command)
            if code in (INTERRUPTED, TERMINATED, -signal.SIGINT, -signal.SIGTERM):
                return INTERRUPTED if code in (INTERRUPTED, -signal.SIGINT) else TERMINATED
            if first and code not in (0, NO_GO):
                return code
            first = False
            print(f"next look in {time_text(seconds)}", flush=True)
            time.sleep(seconds)


def _ended(command: list[str]) -> int:
    with subprocess.Popen(command) as process:
        try:
            return process.wait()
        except KeyboardInterrupt as interruption:
            if isinstance(interruption, Terminated):  # Ctrl-C went to both
                process.terminate()
            process.wait()  # it keeps what it has
            raise


async def _metrics(config: AdaptConfig) -> ServerMetrics:
    async with _client(config) as client:
        return await client.metrics()


async def _models(config: AdaptConfig) -> None:
    async with _client(config) as client:
        await client.models()


def _client(config: AdaptConfig) -> Client:
    return Client(str(config.server), "server", config.server_key_env, timeout=10.0)


def _keep(output: Path, state: Watched) -> None:
    write_json(output / STATE, state)


def _restart(config: AdaptConfig) -> None:
    """Run the command that restarts the server, and wait until it answers.

    Raises:
        InputError: it fails, or the server does not answer.
    """
    if config.restart is None:
        return
    words = config.restart_words()
    print(f"restart: {config.restart}", flush=True)
    try:
        code = subprocess.run(words, check=False).returncode
    except OSError as error:
        raise InputError(f"restart: expected a command that can be run, found {words[0]}: {error.strerror}") from error
    if code != 0:
        raise InputError(f"restart: expected exit code 0 of {config.restart}, found {code}")
    if config.server is None:
        return
    end = time.monotonic() + STARTING
    while time.monotonic() < end:
        try:
            asyncio.run(_models(config))
        except ServerFailure:
            time.sleep(1.0)
        else:
            return
    raise InputError(f"restart: expected {config.server} to answer within {time_text(STARTING)}, found no answer")
