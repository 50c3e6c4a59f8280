"""The report's main figures as a table in the terminal, and the verdict below."""

from rich.console import Console
from rich.text import Text

from draftsmith.decode.measurement.intervals import format_estimate
from draftsmith.scripts.report.types import Report, Run
from draftsmith.scripts.summary import figures_table


def print_report(report: Report, console: Console | None = None) -> None:
    """Print the report's main figures, a row for plain decoding and one for each run; it fits 80 columns."""
    environment = report.environment
    has_tree = any(run.proposer.verified_nodes(run.draft_length) != run.draft_length for run in report.runs)
    batched = any(run.batch_size > 1 for run in report.runs)
    columns = ["T", *(["B"] if batched else []), "drafter", "γ", "α", "acc.", "τ", "tok/s", "speed-up", "τ over stock"]
    table = figures_table(
        columns,
        "drafter",
        f"{_prompts(report)}, {environment.dtype}, {environment.device}, {environment.threads} threads",
        "α: 1 - TV(p, q). acc.: accepted ÷ drafted tokens. τ: tokens per target forward.\n"
        "±: half of the 95 % interval, bootstrapped over prompts."
        + ("\nmedusa/n: heads that draft a tree of n nodes; a round accepts one path." if has_tree else ""),
    )
    for plain in report.baseline.by_temperature:
        setting = [f"{plain.temperature:g}", *([str(plain.batch_size)] if batched else [])]
        speed = f"{plain.tokens_per_second.value:.0f}"
        table.add_row(*setting, "plain", "", "", "", "1.00", speed, "1.00×", "", style="dim")
        for run in report.runs:
            if (run.temperature, run.batch_size) == (plain.temperature, plain.batch_size):
                gains = run.gain_over_baseline_draft
                table.add_row(
                    *setting,
                    _drafter(run),
                    str(run.draft_length),
                    format_estimate(run.alpha, spread="none"),
                    format_estimate(run.draft_acceptance_rate, ".0%", spread="none"),
                    format_estimate(run.mean_acceptance_length),
                    f"{run.tokens_per_second.value:.0f}",
                    format_estimate(run.speedup, unit="×"),
                    "" if gains is None else format_estimate(gains.mean_acceptance_length, "+.2f"),
                )
        table.add_section()
    console = console or Console()
    console.print(table)
    chosen = report.recommendation
    word = ("GO  ", "bold green") if chosen.go else ("NO-GO  ", "bold red")
    console.print(Text.assemble(word, chosen.reason))  # as one text, for it wraps by its whole width


def _drafter(run: Run) -> str:
    nodes = run.proposer.verified_nodes(run.draft_length)
    return run.proposer.name if nodes == run.draft_length else f"{run.proposer.name}/{nodes}"


def _prompts(report: Report) -> str:
    decoded, replayed = report.prompts.count, report.prompts.replayed
    return f"{decoded} prompts" + (f" ({replayed} for α, τ over stock)" if replayed > decoded else "")
