"""The report's main figures as a table in the terminal, with the verdict below."""

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from draftsmith.decode.clock import speed
from draftsmith.decode.measurement.intervals import format_estimate
from draftsmith.scripts.report.entries import Reconciliation
from draftsmith.scripts.report.types import Report, Run
from draftsmith.scripts.report.words import headline, load_words, turns
from draftsmith.scripts.summary import figures_table, print_doubts
from draftsmith.train.kinds.quantities import count_of


def print_report(report: Report, console: Console | None = None) -> None:
    """Print the report's main figures in 80 columns, with a row for plain decoding and one for each run."""
    has_tree = any(run.proposer.verified_nodes(run.draft_length) != run.draft_length for run in report.runs)
    batched = any(run.batch_size > 1 for run in report.runs)
    last = "τ over stock" if report.server is None else "TTFT, ms"
    columns = ["T", *(["B"] if batched else []), "drafter", "γ", "α", "acc.", "τ", "tok/s", "speed-up", last]
    table = figures_table(
        columns,
        "drafter",
        _title(report),
        ("α: 1 - TV(p, q)." if report.server is None else "α: accepted ÷ tried tokens.")
        + " acc.: accepted ÷ drafted tokens. τ: tokens per target forward.\n"
        "±: half of the 95 % interval, bootstrapped over prompts."
        + ("\nname/n: drafts a tree of n nodes; a round accepts one path." if has_tree else "")
        + ("" if report.server is None else "\nB: requests at once. TTFT: median time to the first token."),
    )
    plain = {(run.temperature, run.batch_size): run for run in report.plain_runs()}
    for temperature, rows in dict.fromkeys([*plain, *((run.temperature, run.batch_size) for run in report.runs)]):
        setting = [f"{temperature:g}", *([str(rows)] if batched else [])]
        if (temperature, rows) in plain:
            rate = speed(plain[temperature, rows].tokens_per_second.value)
            end = _first_token(report, "baseline_server", temperature, rows)
            table.add_row(*setting, "plain", "", "", "", "1.00", rate, "1.00×", end, style="dim")
        for run in report.runs:
            if (run.temperature, run.batch_size) == (temperature, rows):
                gains = run.gain_over_baseline_draft
                table.add_row(
                    *setting,
                    escape(_drafter(run)),
                    str(run.draft_length),
                    format_estimate(run.alpha, spread="none"),
                    format_estimate(run.draft_acceptance_rate, ".0%", spread="none"),
                    format_estimate(run.shown_length),
                    speed(run.tokens_per_second.value),
                    format_estimate(run.speedup, unit="×"),
                    _first_token(report, "server", temperature, rows)
                    if gains is None
                    else format_estimate(gains.mean_acceptance_length, "+.2f"),
                )
        table.add_section()
    console = console or Console()
    if report.runs:
        console.print(table)
    for run in report.runs:
        if (words := turns(run)) is not None:
            where = f"γ={run.draft_length}, T={run.temperature:g}{f', B={run.batch_size}' if batched else ''}"
            console.print(Text.assemble((f"{_drafter(run)}, {where}: ", "dim"), words))
    for load in report.by_load:
        if len(load.goodput) > 1:  # the table covers one text at a time
            console.print(Text.assemble((f"{load.proposer}, texts at a time: ", "dim"), load_words(load)))
    if report.forecasts:
        console.print(_forecasts(report))
    if report.environment.timed is not None:
        console.print(Text.assemble(("timing  ", "dim"), report.environment.timed))
    _print_verdict(report, console)
    print_doubts(console, report.costs.doubts if report.costs else [])
    for warning in report.server.warnings if report.server else ():
        console.print(Text.assemble(("warning  ", "yellow"), warning))
    for reconciliation in report.server.reconciliations if report.server else ():
        _print_reconciliation(reconciliation, console)


def _forecasts(report: Report) -> Table:
    columns = ["T", "slots", "drafter", "γ", "τ", "round, ms", "tokens", "speed-up", "requests"]
    caption = "Rounds by llama-server's clock, τ by replay. tokens: a round, in\n"
    caption += "tokens of plain decoding. requests: the speed-up with prompts.\n"
    caption += "±: of each at 95 %; the intervals of the verdict hold together."
    table = figures_table(columns, "drafter", f"Forecast for llama.cpp: {_prompts(report)}", caption)
    for one in report.forecasts:
        price = one.round_seconds * 1000, one.round_seconds / one.plain_seconds
        setting = f"{one.temperature:g}", str(one.slots), escape(one.proposer), str(one.draft_length)
        figures = (format_estimate(one.mean_acceptance_length), *(f"{value:.2f}" for value in price))
        requests = format_estimate(one.request_speedup, unit="×", spread="none")
        table.add_row(*setting, *figures, format_estimate(one.speedup, unit="×"), requests)
    return table


def _print_verdict(report: Report, console: Console) -> None:
    """Print the verdict and, if several settings were measured, the verdict of each."""
    styles, chosen = {"GO": "bold green", "NO-GO": "bold red"}, report.recommendation
    words, style = headline(report), styles.get(report.verdict, "bold")
    if len(chosen.settings) < 2:
        console.print(Text.assemble((f"{words}  ", style), chosen.reason))  # one text, so that it wraps as a whole
        return
    console.print(Text(words, style))
    console.print(Text(chosen.reason))
    for verdict in chosen.settings:
        word = "GO" if verdict.go else "NO-GO"
        console.print(Text.assemble((f"  {word:5}  ", styles[word]), verdict.reason))


def _print_reconciliation(result: Reconciliation, console: Console) -> None:
    """Print whether a server agrees with a report, and if not, possible causes and what to try."""
    counts, expectation = result.counted, result.expected
    counted = f"{counts.num_accepted_tokens:,.0f} of {counts.num_draft_tokens:,.0f} drafted tokens accepted"
    expected = f"{expectation.num_accepted_tokens:,.0f} of {expectation.num_draft_tokens:,.0f}"
    where = f"T={result.temperature:g}, {result.concurrency} at once: "
    style = ("as expected  ", "green") if result.agrees else ("departs  ", "bold red")
    console.print(Text.assemble(style, f"{where}{counted}; {expected} in {result.report}"))
    for cause in result.causes:
        console.print(Text.assemble((f"  {cause.name}  ", "yellow"), f"{cause.evidence}. Try: {cause.remedy}"))


def _first_token(report: Report, role: str, temperature: float, rows: int) -> str:
    """Return a server's median time to the first token in milliseconds; empty for other measurements."""
    for latency in report.server.latencies if report.server else ():
        if (latency.role, latency.temperature, latency.concurrency) == (role, temperature, rows):
            return "–" if latency.first_token.p50 is None else f"{1000 * latency.first_token.p50:.0f}"
    return ""


def _title(report: Report) -> str:
    environment = report.environment
    if report.server is None:
        threads = count_of(environment.threads, "thread")
        runs = f"plain decoding and drafts {environment.dtype}, all {'compiled' if environment.compiled else 'eager'}"
        return f"{_prompts(report)}, {environment.device}, {threads}\n{runs}"
    served = report.server.servers[0]
    return f"{_prompts(report)}, {served.model} at {served.url}"


def _drafter(run: Run) -> str:
    nodes = run.proposer.verified_nodes(run.draft_length)
    return run.proposer.name if nodes == run.draft_length else f"{run.proposer.name}/{nodes}"


def _prompts(report: Report) -> str:
    decoded, replayed = report.prompts.count, report.prompts.replayed or 0
    return f"{decoded} prompts" + (f" ({replayed} for α and τ)" if replayed > decoded else "")
