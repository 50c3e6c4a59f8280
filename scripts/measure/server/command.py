"""`draftsmith measure --server`: does the drafter of a server that runs pay, and does its acceptance hold?"""

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from draftsmith.scripts.measure.server.build import build_report
from draftsmith.scripts.measure.server.config import MeasureServerConfig
from draftsmith.scripts.measure.server.expectation import read_expectation, require_known
from draftsmith.scripts.measure.server.observe import Observed, forget, observe, read_asked
from draftsmith.scripts.report.page import write_page
from draftsmith.scripts.report.summary import append_summary, markdown
from draftsmith.scripts.report.table import print_report
from draftsmith.scripts.report.types import Report
from draftsmith.train.cli import parse_config
from draftsmith.train.data.shards import output_directory
from draftsmith.train.endpoint.http import ServerFailure
from draftsmith.train.files import require_writable, write_aside
from draftsmith.train.provenance import write_json

FILES = ("report.json", "report.html", "summary.md")
KEPT = "the turns that were measured"


def measure_server(config: MeasureServerConfig) -> tuple[Report, Observed]:
    """Measure as the config says, write the report into its output directory, and return it and what it rests on.

    What a run has finished is kept in the output directory until it ends well: after a kill or a failure the same
    command goes on from there.

    Raises:
        InputError: bad input, a server that cannot be used, settings that are not those of the unfinished run there, or
            a full disk.
        ServerFailure: a server failed before a whole setting was measured.
    """
    output = require_writable(config.output, *FILES)
    expectation = read_expectation(config)
    if expectation is not None:
        config = replace(config, drafter=expectation.drafter)
    prompts = read_asked(config)
    if expectation is not None:
        require_known(expectation, config, prompts)
    with output_directory(output, lambda: KEPT):
        observed = asyncio.run(observe(config, prompts))
        if observed.failure is not None and not observed.blocks:
            raise observed.failure
        report = build_report(observed, expectation)
        write_json(output / "report.json", report)
        write_page(report, output / "report.html")
        write_aside(output / "summary.md", markdown(report))
        if observed.failure is None:
            forget(config)
    return report, observed


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print table and verdict, and say where the report is.

    Returns:
        0; 3 where a gate did not pass; 1 where a server failed on the way.
    """
    config = parse_config(MeasureServerConfig, argv, prog="draftsmith measure")
    try:
        report, observed = measure_server(config)
        failure = observed.failure
    except ServerFailure as error:
        failure = error
    else:
        print_report(report)
        print(f"report: {Path(config.output) / 'report.html'}, and report.json and summary.md beside it")
        append_summary(report)
    if failure is not None:
        print(f"error: {failure}; {KEPT} are kept in {config.output}, run the same command again", file=sys.stderr)
        return 1
    return 3 if report.gate is not None and not report.gate.passed else 0
