"""`draftsmith measure`: acceptance by replay, speed by the clock, and the verdict whether a drafter pays.

With `--server` a running server is measured from outside.
"""

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from draftsmith.decode.errors import InputError
from draftsmith.decode.progress import phase
from draftsmith.scripts.engines.offline.jobs import EngineFailure
from draftsmith.scripts.measure import round_costs
from draftsmith.scripts.measure.build import measured_report
from draftsmith.scripts.measure.certify import certify_recommended
from draftsmith.scripts.measure.config import LLAMA_CPP, MeasureConfig
from draftsmith.scripts.measure.every_round import rounds_settings
from draftsmith.scripts.measure.predictions import draft_lengths
from draftsmith.scripts.measure.server import observe as server
from draftsmith.scripts.measure.server.config import MeasureServerConfig, measure_config
from draftsmith.scripts.measure.server.entries import server_report
from draftsmith.scripts.measure.server.expectation import read_expectation, require_known
from draftsmith.scripts.measure.stages import run_stages
from draftsmith.scripts.measure.state import Measured
from draftsmith.scripts.measure.unfinished import Unfinished
from draftsmith.scripts.pair import load_decoding, read_tokens
from draftsmith.scripts.report.page import render_page
from draftsmith.scripts.report.rounds import ROUNDS, rounds_text
from draftsmith.scripts.report.table import print_report
from draftsmith.scripts.report.types import Report
from draftsmith.train.cli import parse_config
from draftsmith.train.data.shards import output_directory
from draftsmith.train.endpoint.http import ServerFailure
from draftsmith.train.files import require_writable, write_atomically
from draftsmith.train.job.lock import lock_directory
from draftsmith.train.provenance import write_json

DRAFT_LENGTHS = "draft_lengths.json"
FILES = ("report.json", "report.html")


def measure(config: MeasureConfig) -> Report:
    """Measure as the config says, write the report to its output directory, and return it.

    Finished work is kept there until the run ends well: after a kill or a failure the same command continues.

    Raises:
        InputError: bad input, another run's unfinished work, or a full disk.
    """
    output = require_writable(config.output, *FILES, DRAFT_LENGTHS, ROUNDS)
    tokenizer, prompts, encoded = read_tokens(
        config.target, config, config.prompts, config.replay_limit or config.limit
    )
    forecast = config.costs == LLAMA_CPP
    count = len(encoded if forecast else encoded[: config.limit])
    if max(config.batch_size) > count:
        raise InputError(
            f"batch_size: expected at most the {count} prompts that are decoded, found {max(config.batch_size)}"
        )
    drafters, unfinished, code = config.specs, Unfinished(config), config.trust_remote_code
    if forecast:
        round_costs.check(config)
    pair, compiled = load_decoding(
        config.target, tokenizer, drafters, config.dtype, config.threads, not forecast and config.compiled, code
    )
    pair.check_positions(max(map(len, encoded)), config.max_new_tokens)
    config = replace(config, compiled=compiled)
    kept = unfinished.of_run(config, pair, prompts, encoded)
    with output_directory(output, lambda: "the batches that were decoded"), kept:
        measured = Measured(config, pair, prompts, encoded, failures=unfinished.failures)
        run_stages(measured, unfinished)
        certify_recommended(measured, unfinished)
        with phase("report"):
            report = measured_report(measured)
            _write(report, output)
        if report.by_load:
            write_json(output / DRAFT_LENGTHS, draft_lengths(measured, report.by_load))
        write_atomically(output / ROUNDS, rounds_text(rounds_settings(measured), measured.rounds))
    return report


def measure_server(config: MeasureServerConfig) -> Report:
    """Measure a server as the config says, write the report to its output directory, and return it.

    Raises:
        InputError: bad input, an unusable server, or a full disk.
        ServerFailure: a server failed before a whole setting was measured.
    """
    output = require_writable(config.output, *FILES)
    expectation = read_expectation(config)
    if expectation is not None:
        config = replace(config, drafter=expectation.drafter)
    prompts = server.read_load_prompts(config)
    if expectation is not None:
        require_known(expectation, config, prompts)
    with lock_directory(output):
        observed = asyncio.run(server.observe(config, prompts))
        if observed.failure is not None and not observed.blocks:
            raise observed.failure
        report = server_report(observed, expectation)
        _write(report, output)
    return report


def _write(report: Report, output: Path) -> None:
    write_json(output / "report.json", report)
    write_atomically(output / "report.html", render_page(report))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure drafters or a server, print the table and the verdict, and return the exit code.

    It is 0, or 3 if a gate did not pass, or nothing pays and a text is not the target's. If parts failed, it is 2 where
    input or memory is to blame for all, else 1; 1 if a server failed, llama.cpp's among them.
    """
    config = parse_config(measure_config(sys.argv[1:] if argv is None else argv), argv, prog="draftsmith measure")
    failure = None
    try:
        report = measure_server(config) if isinstance(config, MeasureServerConfig) else measure(config)
    except (ServerFailure, EngineFailure) as error:
        failure = str(error)
    else:
        print_report(report)
        print(f"report: {Path(config.output) / 'report.html'}, and report.json next to it")
        if report.server is not None and report.failures:
            failure = report.failures[0].error
    if failure is not None:
        print(f"error: {failure}", file=sys.stderr)
        return 1
    if report.failures:
        return min(part.exit_code for part in report.failures)
    lossy = report.verdict == "NO-GO" and any(verdict.departs for verdict in report.recommendation.settings)
    return 3 if lossy or (report.gate is not None and not report.gate.passed) else 0
