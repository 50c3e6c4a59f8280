"""`draftsmith measure --server`: whether the drafter of a running server pays, and whether its acceptance holds."""

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from draftsmith.scripts.measure.server.build import build_report
from draftsmith.scripts.measure.server.config import MeasureServerConfig
from draftsmith.scripts.measure.server.expectation import read_expectation, require_known
from draftsmith.scripts.measure.server.observe import Observed, observe, read_load_prompts
from draftsmith.scripts.measure.unfinished import DIRECTORY
from draftsmith.scripts.report.page import write_page
from draftsmith.scripts.report.summary import append_summary, markdown
from draftsmith.scripts.report.table import print_report
from draftsmith.scripts.report.types import Report
from draftsmith.train.cli import parse_config
from draftsmith.train.data.shards import output_directory
from draftsmith.train.endpoint.http import ServerFailure
from draftsmith.train.files import remove, require_writable, write_atomically
from draftsmith.train.provenance import write_json

FILES = ("report.json", "report.html", "summary.md")
KEPT = "the turns that were measured"


def measure_server(config: MeasureServerConfig) -> tuple[Report, Observed]:
    """Measure as the config says, write the report to its output directory; return it with the observations.

    Finished work is kept there until the run ends well: after a kill or a failure the same command continues.

    Raises:
        InputError: bad input, an unusable server, another run's unfinished work, or a full disk.
        ServerFailure: a server failed before a whole setting was measured.
    """
    output = require_writable(config.output, *FILES)
    expectation = read_expectation(config)
    if expectation is not None:
        config = replace(config, drafter=expectation.drafter)
    prompts = read_load_prompts(config)
    if expectation is not None:
        require_known(expectation, config, prompts)
    with output_directory(output, lambda: KEPT):
        observed = asyncio.run(observe(config, prompts))
        if observed.failure is not None and not observed.blocks:
            raise observed.failure
        report = build_report(observed, expectation)
        write_report(report, output)
        if observed.failure is None:
            remove(output / DIRECTORY)
    return report, observed


def write_report(report: Report, output: Path) -> None:
    """Write `report.json`, `report.html` and `summary.md`."""
    write_json(output / "report.json", report)
    write_page(report, output / "report.html")
    write_atomically(output / "summary.md", markdown(report))


def show_report(report: Report, output: str) -> None:
    """Print the table and the report's place, and append the summary to CI's page."""
    print_report(report)
    print(f"report: {Path(output) / 'report.html'}, and report.json and summary.md next to it")
    append_summary(report)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table and the verdict; return 0, 3 if a gate did not pass, or 1 if a server failed."""
    config = parse_config(MeasureServerConfig, argv, prog="draftsmith measure")
    try:
        report, observed = measure_server(config)
        failure = observed.failure
    except ServerFailure as error:
        failure = error
    else:
        show_report(report, config.output)
    if failure is not None:
        print(f"error: {failure}; {KEPT} are kept in {config.output}, run the same command again", file=sys.stderr)
        return 1
    return 3 if report.gate is not None and not report.gate.passed else 0
