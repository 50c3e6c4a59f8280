"""The report in a few lines of markdown for pull requests."""

import logging

from draftsmith.decode.measurement.intervals import format_estimate
from draftsmith.scripts.report.types import Report
from draftsmith.scripts.report.words import headline, load_words, turns
from draftsmith.train.kinds.quantities import count_of

logger = logging.getLogger(__name__)


def markdown(report: Report) -> str:
    """Return the verdict, the runs and the settings in markdown."""
    chosen, gate = report.recommendation, report.gate
    lines = [f"## draftsmith: {headline(report)}", "", chosen.reason, ""]
    if report.failures:
        lines += [*(f"* Failed: {failure.what}: {failure.error}" for failure in report.failures), ""]
    if len(chosen.settings) > 1:
        verdicts = [f"* {'GO' if verdict.go else 'NO-GO'}: {verdict.reason}" for verdict in chosen.settings]
        lines += ["By setting:", "", *verdicts, ""]
    if gate is not None:
        required = " and ".join(part.what for part in gate.parts)
        result = "passed" if gate.passed else "failed"
        lines += [f"Gate: {required}, {gate.confidence:.0%} confidence: {result}."]
        lines += [*(f"* {failure}" for failure in gate.failures), ""]
    lines += ["| T | B | drafter | γ | α | τ | speed-up | predicted |", "|---|---|---|---|---|---|---|---|"]
    for run in report.runs:
        cells = [
            f"{run.temperature:g}",
            str(run.batch_size),
            run.proposer.name,
            str(run.draft_length),
            format_estimate(run.alpha, spread="none"),
            format_estimate(run.shown_length, spread="interval"),
            format_estimate(run.speedup, unit="×", spread="interval"),
            format_estimate(run.predicted_speedup, unit="×", spread="none"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    taking_turns = [
        f"* {run.proposer.name}, γ = {run.draft_length}, T = {run.temperature:g}, B = {run.batch_size}: {words}"
        for run in report.runs
        if (words := turns(run)) is not None
    ]
    lines += ["", "Who drafted, and wrote:", "", *taking_turns] if taking_turns else []
    loads = [f"* {load.proposer}: {load_words(load)}" for load in report.by_load if len(load.goodput) > 1]
    lines += ["", "Draft length by texts at a time:", "", *loads] if loads else []
    lines += ["", f"{_measured(report)} τ: tokens per target forward, bonus included; 95 % intervals over prompts."]
    return "\n".join(lines) + "\n"


def _measured(report: Report) -> str:
    """Describe the prompts and the machine or servers of the figures."""
    environment, prompts = report.environment, report.prompts
    if report.server is None:
        return (
            f"{prompts.count} prompts decoded, {prompts.replayed} replayed; {environment.device}, {environment.dtype}, "
            f"{count_of(environment.threads, 'thread')}."
        )
    servers = [f"{s.kind} {s.version or ''} at {s.url}".replace("  ", " ") for s in report.server.servers]
    warnings = "".join(f" {warning}" for warning in report.server.warnings)
    return f"{prompts.count} prompts sent to {' and '.join(servers)}; B: requests at once.{warnings}"
