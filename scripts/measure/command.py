"""`draftsmith measure`: does a drafter pay? Acceptance by replay, speed by the clock, and costs, which join the two."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement.costs import CostTable
from draftsmith.decode.progress import phase
from draftsmith.distill.kind import DraftModel
from draftsmith.scripts.kinds import BASELINE, STOCK, drafter_specs
from draftsmith.scripts.measure.build import build_report
from draftsmith.scripts.measure.config import MeasureConfig, measure_config
from draftsmith.scripts.measure.cost_file import load_costs
from draftsmith.scripts.measure.predictions import draft_lengths
from draftsmith.scripts.measure.reconcile.every_round import rounds_settings
from draftsmith.scripts.measure.reconcile.rounds import ROUNDS, write_rounds
from draftsmith.scripts.measure.server.command import main as server_main
from draftsmith.scripts.measure.server.config import MeasureServerConfig
from draftsmith.scripts.measure.stages import observe
from draftsmith.scripts.measure.state import Measured
from draftsmith.scripts.measure.unfinished import SETTINGS, Unfinished
from draftsmith.scripts.pair import read_tokens
from draftsmith.scripts.programs import Order, compile_side_by_side
from draftsmith.scripts.report.page import write_page
from draftsmith.scripts.report.summary import append_summary, markdown
from draftsmith.scripts.report.table import print_report
from draftsmith.scripts.report.types import Report
from draftsmith.scripts.settings import load_fastest
from draftsmith.train.cli import parse_config
from draftsmith.train.data.prompts import read_prompts
from draftsmith.train.data.shards import output_directory
from draftsmith.train.files import require_writable, write_aside
from draftsmith.train.kinds.drafter import DrafterSpec
from draftsmith.train.kinds.untrained import PromptLookup
from draftsmith.train.provenance import write_json

DRAFT_LENGTHS = "draft_lengths.json"
"""γ by load, for servers."""
FILES = ("report.json", "report.html", "summary.md", "costs.json", DRAFT_LENGTHS, ROUNDS)


def measure(config: MeasureConfig) -> Report:
    """Measure as the config says, write the report into its output directory, and return it.

    What a run has finished is kept in the output directory until it ends well: after a kill or a failure the same
    command goes on from there.

    Raises:
        InputError: bad input, settings that are not those of the unfinished run there, or a full disk.
    """
    output = require_writable(config.output, *FILES)
    prompts = read_prompts(config.prompts, limit=config.replay_limit or config.limit)
    tokenizer, encoded = read_tokens(config.target, config, prompts)
    count = len(encoded[: config.limit])
    if max(config.batch_size) > count:
        raise InputError(
            f"batch_size: expected at most the {count} prompts that are decoded, found {max(config.batch_size)}"
        )
    drafters = _drafters(config)
    pair, settings = load_fastest(
        config.target,
        tokenizer,
        drafters,
        config.dtype,
        config.threads,
        config.compiled,
        config.trust_remote_code,
        kept=Unfinished.directory(config) / SETTINGS,
    )
    pair.check_positions(max(map(len, encoded)), config.max_new_tokens)
    config = replace(config, compiled=settings.compiled)
    if settings.compiled:
        specs = [replace(spec, dtype=settings.draft_dtypes.get(str(spec.path))) for spec in drafters]
        order = Order(config.target, settings.dtype, settings.threads, config.trust_remote_code)
        options = [config.options(temperature) for temperature in config.temperature]
        compile_side_by_side(pair, order, specs, options)
    tables: list[CostTable] | None = None if config.measure_costs else []
    if config.costs is not None:  # others' are refused before a text is decoded
        tables = load_costs(Path(config.costs), config, pair)
    with output_directory(output, lambda: "the batches that were decoded"):
        unfinished = Unfinished(config, pair, prompts, encoded)
        settings.to_file(unfinished.settings)
        measured = Measured(config, pair, settings, prompts, encoded, failures=unfinished.failures)
        observe(measured, tables, unfinished)
        with phase("report"):
            report = build_report(measured)
            write_json(output / "report.json", report)
            write_page(report, output / "report.html")
        write_aside(output / "summary.md", markdown(report))
        if report.by_load:
            write_json(output / DRAFT_LENGTHS, draft_lengths(measured, report.by_load))
        write_rounds(output / ROUNDS, rounds_settings(measured), measured.rounds)
        unfinished.end()
    return report


def _drafters(config: MeasureConfig) -> list[DrafterSpec]:
    """Return what is to be measured, the draft to beat behind the other draft models."""
    specs = drafter_specs(config.drafter, config.draft_length)
    ngrams = f"{config.prompt_lookup_min}-{config.prompt_lookup_max}"
    specs = [replace(spec, path=spec.path or ngrams) if spec.kind == PromptLookup.name else spec for spec in specs]
    if config.baseline_draft is not None:
        place = sum(spec.kind == DraftModel.name for spec in specs)
        specs.insert(place, DrafterSpec(BASELINE, config.baseline_draft, STOCK, config.draft_length))
    of = config.draft_length_of
    if unknown := of.keys() - {spec.name for spec in specs}:
        names = ", ".join(str(spec.name) for spec in specs)
        raise InputError(f"draft_length_of: expected drafters out of {names}, found {min(unknown)}")
    return [replace(spec, draft_lengths=of.get(str(spec.name), spec.draft_lengths)) for spec in specs]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure drafters, or a server; print table and verdict, and say where the report is.

    Returns:
        0; 3 where a gate did not pass; where parts failed, 2 if input or memory is to blame for all of them, else 1.
    """
    if measure_config(sys.argv[1:] if argv is None else argv) is MeasureServerConfig:
        return server_main(argv)
    config = parse_config(MeasureConfig, argv, prog="draftsmith measure")
    report = measure(config)
    print_report(report)
    print(f"report: {Path(config.output) / 'report.html'}, and report.json and summary.md beside it")
    append_summary(report)
    if report.failures:
        return min(failure.exit_code for failure in report.failures)
    return 3 if report.gate is not None and not report.gate.passed else 0
