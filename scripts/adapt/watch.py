"""The server's side of `adapt`: its counters of live traffic, and a check that a new drafter keeps replay's promise.

Counters do not tell texts apart. The interval of τ is therefore computed from the accepted tokens by position and the
number of texts, with a typical correlation between the drafts of one text. It covers every τ that the counters allow
(`scripts.serving.server_steps`).
"""

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement.intervals import Estimate, format_estimate
from draftsmith.decode.measurement.server_counts import ServerCounts
from draftsmith.decode.progress import time_text
from draftsmith.decode.validation import Count, parse_json, read
from draftsmith.scripts.adapt.config import AdaptConfig
from draftsmith.scripts.serving.client import metrics_of
from draftsmith.scripts.serving.server_steps import NOTHING, CountedTexts, server_steps
from draftsmith.scripts.stages import NO_GO, Stages
from draftsmith.train.cli import INTERRUPTED, TERMINATED, Terminated
from draftsmith.train.endpoint.client import Client
from draftsmith.train.endpoint.http import ServerFailure
from draftsmith.train.files import move_link, remove
from draftsmith.train.job.processes import terminable
from draftsmith.train.provenance import write_json
from draftsmith.train.runs import note_on_interrupt

T = TypeVar("T")
STATE, LOOKS = "server.json", "looks.jsonl"
LEAST_DRAFTS, LEAST_TEXTS = 500, 16  # below these, counts accumulate until a later look
ALIKE = 0.2
"""Correlation of the accepted tokens of two drafts of one text: 0.15 to 0.19 at T=0 (docs/log/choose.md)."""
UNEQUAL = 2.0
"""Σ m² · texts ÷ (Σ m)² over texts of m drafts, which counters do not show: 1 if all texts have equally many, 2 if
their standard deviation equals their mean."""
NORMAL = 1.96  # standard deviations of a 95 % interval
STARTING = 600.0  # seconds until a restarted server must answer


@dataclass(frozen=True)
class Unchecked:
    """A swapped-in drafter that was not yet measured on the server."""

    step: str  # the folder of its step
    before: str  # the drafter that it replaced
    command: list[str]  # arguments of `measure`


@dataclass(frozen=True)
class ServerState:
    """State of the server at the last look."""

    drafter: str | None = None  # the target of the link
    totals: ServerCounts | None = None  # the server's counters; None before the first look
    texts: Count = 0  # finished
    requests: Count = 0  # in flight
    tokens: Count | None = None  # written; None if the server does not count them
    at_first: Estimate | None = None  # τ of the first look after the last step, the baseline of later looks
    unchecked: Unchecked | None = None


def read_server_state(output: Path) -> ServerState:
    """Return the state that earlier calls wrote."""
    path = output / STATE
    return read(ServerState, path) if path.is_file() else ServerState()


def acceptance_length(counts: ServerCounts, texts: int, tokens: int, under_way: tuple[int, int] = (0, 0)) -> Estimate:
    """Return τ, emitted tokens ÷ drafts, from a server's counters, with an approximate interval.

    The value is None if the counters allow several, and so is the interval if they allow none.

    Args:
        counts: the draft counters.
        texts: texts that ended in the period.
        tokens: tokens written in the period.
        under_way: requests in flight at its start and at its end: the tokens of their prompts may be counted or not.
    """
    before, after = under_way
    begun = {max(texts - before, 0), texts, texts + after}
    estimates = [server_steps([CountedTexts(counts, tokens, number)]) for number in begun]
    bounds = [interval for steps in estimates if (interval := steps.length_bounds()) is not None]
    if not bounds:
        return NOTHING
    drafts, per_pos = counts.num_drafts, counts.num_accepted_tokens_per_pos
    mean = sum(per_pos) / drafts
    # For a draft with x accepted tokens, x² is the sum of 2 i − 1 over its accepted positions i.
    square = sum((2 * i - 1) * accepted for i, accepted in enumerate(per_pos, 1)) / drafts
    # Variance of a mean over correlated drafts: a part shared within each text, and an independent part.
    alone = ALIKE * UNEQUAL / max(texts, 1) + (1 - ALIKE) / drafts
    spread = NORMAL * math.sqrt(max(square - mean**2, 0.0) * alone)
    most = counts.num_draft_tokens / drafts + 1
    low, high = min(low for low, _ in bounds), max(high for _, high in bounds)
    value = low if high - low < 1e-12 else None
    return Estimate(value, (max(low - spread, 1.0), min(high + spread, most)), int(drafts))


def look(config: AdaptConfig, output: Path) -> tuple[str | None, bool]:
    """Read the server's counters; return a message on the traffic since the last look, and whether τ fell.

    Looks are appended to `looks.jsonl`. If the server does not answer or shows no counters, the message says only that.
    """
    try:
        metrics = asyncio.run(_ask(config, metrics_of))
    except (ServerFailure, InputError) as failure:
        return str(failure), False
    before, drafter = read_server_state(output), os.path.realpath(config.drafter)
    totals, texts, tokens = metrics.counters, metrics.finished or 0, metrics.generated_tokens
    if tokens is None:
        return "the server does not count the tokens that it writes, so that its τ is not known", False
    now = replace(before, drafter=drafter, totals=totals, texts=texts, requests=metrics.requests, tokens=tokens)
    if before.totals is None or before.tokens is None or before.drafter != drafter:
        _keep(output, replace(now, at_first=None))
        return None, False
    counted, ended, written = totals - before.totals, texts - before.texts, tokens - before.tokens
    least = counted.num_drafts, counted.num_draft_tokens, ended, written, *counted.num_accepted_tokens_per_pos
    if min(least) < 0:  # counters restart from zero with the server
        before = replace(before, totals=ServerCounts(), texts=0, requests=0, tokens=0)
        _keep(output, before)
        counted, ended, written = totals, texts, tokens
    if counted.num_drafts < LEAST_DRAFTS or ended < LEAST_TEXTS:  # too few: they are part of the next look
        return None, False
    length = acceptance_length(counted, ended, written, (before.requests, metrics.requests))
    if length.ci95 is None:
        _keep(output, now)
        counts = f"{counted.num_drafts:,} drafts for {written:,} tokens in {ended} texts"
        return f"the server's τ is not known: {counts} fit no known way of counting", False
    first = before.at_first or length
    assert first.ci95 is not None
    fell = length.ci95[1] < first.ci95[0]
    line = {"time": time.time(), "drafter": drafter, "counts": counted.to_dict(), "texts": ended, "fell": fell}
    with (output / LOOKS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line | {"tokens": written, "mean_acceptance_length": asdict(length)}) + "\n")
    _keep(output, replace(now, at_first=first))
    message = f"the server's τ since the last look: {_between(length)}"
    if first is not length:
        message += f"; {_between(first)} in the first one after the last step"
    return message + (": it fell" if fell else ""), fell


def _between(length: Estimate) -> str:
    if length.value is None and length.ci95 is not None:
        return f"between {length.ci95[0]:.2f} and {length.ci95[1]:.2f}"
    return format_estimate(length, spread="interval")


def reset_baseline(output: Path) -> None:
    """Make the next look the baseline of later ones: the traffic until now has been learned from."""
    _keep(output, replace(read_server_state(output), at_first=None))


def record_swap(config: AdaptConfig, output: Path, step: Path, before: str, command: list[str]) -> None:
    """Record the drafter that was swapped in, and restart the server if the config has a command for it."""
    unchecked = None if config.server is None else Unchecked(str(step), before, command)
    for stale in ("check", "server"):  # results from before the restart
        remove(step / stale)
    _keep(output, ServerState(unchecked=unchecked))
    _restart(config)


def check(config: AdaptConfig, output: Path) -> tuple[str, bool] | None:
    """Measure the last swapped-in drafter on the server, and take it back if acceptance is below the promise.

    Returns a message and whether the drafter stays, or None if there is nothing to check.

    Raises:
        InputError: a server that does not answer, or whose counters cannot be read.
    """
    unchecked = read_server_state(output).unchecked
    if unchecked is None:
        return None
    step = Path(unchecked.step)
    Stages(step / "check").run("server", ["measure", *unchecked.command])
    report = parse_json((step / "server/report.json").read_text(encoding="utf-8"))
    alpha, gate, within = report["runs"][0]["alpha"], report["gate"], report["server"]["counted"][0]["alpha_within"]
    # An unknown α is no reason to go back, nor is one that may be as good as promised.
    unsure = alpha["ci95"] is None and (within is None or within[1] > gate["min_alpha"])
    stays = gate["passed"] or unsure
    if not stays:
        if os.path.realpath(config.drafter) == os.path.realpath(step / "drafter"):
            move_link(Path(config.drafter), unchecked.before)
        _restart(config)
    # Counting starts anew: the requests of the check were not traffic.
    _keep(output, ServerState())
    why = gate["failures"][0] if gate["failures"] else "α is above what was promised"
    result = "holds" if gate["passed"] else "is not known" if stays else "is below what was promised"
    return f"acceptance on the server {result}: {why}", stays


def loop(argv: Sequence[str], seconds: float) -> int:
    """Run steps, each in a process of its own to free memory; return an exit code. Only the first may not fail."""
    command, first = [sys.executable, "-m", "draftsmith.scripts.cli", "adapt", *argv, "--watch=null"], True
    with terminable(), note_on_interrupt(lambda: "no further step begins; the same command continues"):
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
            if isinstance(interruption, Terminated):  # SIGTERM reached this process only, Ctrl-C both
                process.terminate()
            process.wait()  # the step saves its state
            raise


async def _ask(config: AdaptConfig, question: Callable[[Client], Awaitable[T]]) -> T:
    async with Client(str(config.server), "server", config.server_key_env, timeout=10.0) as client:
        return await question(client)


def _keep(output: Path, state: ServerState) -> None:
    write_json(output / STATE, state)


def _restart(config: AdaptConfig) -> None:
    """Run the command that restarts the server, and wait until the server answers; InputError if it does not."""
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
            asyncio.run(_ask(config, Client.models))
        except ServerFailure:
            time.sleep(1.0)
        else:
            return
    raise InputError(f"restart: expected {config.server} to answer within {time_text(STARTING)}, found no answer")
