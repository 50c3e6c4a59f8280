"""The choice for people: choose.html, and a table in the terminal."""

from dataclasses import replace
from pathlib import Path

from rich.console import Console

from draftsmith.decode.measurement.intervals import Estimate, format_estimate
from draftsmith.decode.progress import time_text
from draftsmith.scripts.choose.config import NONE
from draftsmith.scripts.choose.forecast import Outlook
from draftsmith.scripts.choose.result import Choice, Standing, by_name
from draftsmith.scripts.report.charts import Series, Style, limits, line_chart
from draftsmith.scripts.report.figures import Panel
from draftsmith.scripts.report.page import css, template
from draftsmith.scripts.summary import DOUBTFUL, figures_table, print_doubts
from draftsmith.train.files import write_atomically
from draftsmith.train.kinds.quantities import count


def way_text(outlook: Outlook) -> str:
    """Return a candidate's way to draft in words."""
    way = outlook.way
    return f"{way.draft_length}" if way.last is None else f"copies {way.draft_length}, else {way.last}"


def _style(choice: Choice) -> dict[str, Style]:
    return {standing.name: Style(number) for number, standing in enumerate(choice.standings)}


def _now(standing: Standing, temperature: str, rows: int) -> Outlook:
    return next(outlook for outlook in standing.outlooks if (outlook.temperature, outlook.rows) == (temperature, rows))


def _panels(choice: Choice) -> list[Panel]:
    """Draw each candidate's speed-up, now and forecast, over its text: a panel for each temperature and batch size."""
    style, panels = _style(choice), []
    for outlook in choice.standings[0].outlooks:
        series, estimates = list[Series](), list[Estimate]()
        for standing in choice.standings:
            here = _now(standing, outlook.temperature, outlook.rows)
            now, trained_on = here.now, standing.trials[-1].tokens
            ahead = here.foretold and here.tokens > trained_on
            if ahead and here.forecast.ci95 is None:
                now = replace(now, ci95=None)  # a band that ends in a point would suggest a certain forecast
            points = {trained_on / 1000: now}
            if ahead:
                points[here.tokens / 1000] = here.forecast
            points = {x: estimate for x, estimate in points.items() if estimate.value is not None}
            estimates += points.values()
            dropped = standing.dropped_after is not None
            series.append(Series(style[standing.name], points, "other_curve" if dropped else "curve"))
        title = f"T = {outlook.temperature}, {outlook.rows} at a time"
        span = limits(estimates, 1.0)
        panels.append((title, line_chart(title, series, "thousand tokens of text", "speed-up", span, 1.0, False)))
    return panels


def write_page(choice: Choice, path: Path) -> None:
    """Write choose.html to a temporary file, then rename it."""
    page = template("draftsmith.scripts.choose", "choose.html.j2").render(
        css=css(), choice=choice, none=NONE, won=by_name(choice.standings).get(choice.winner), style=_style(choice),
        panels=_panels(choice), doubtful=DOUBTFUL, way=way_text, time=time_text, count=count,
    )  # fmt: skip
    write_atomically(path, page)


def print_choice(choice: Choice, output: Path, console: Console | None = None) -> None:
    """Print the candidates, the choice and the next commands; the table fits 80 columns."""
    console = console or Console()
    for number, outlook in enumerate(choice.standings[0].outlooks):
        table = figures_table(
            ("candidate", "γ", "τ", "now", "forecast", "at tokens"),
            "candidate",
            f"T={outlook.temperature}, {outlook.rows} at a time: speed-up",
            "brackets: 95 % interval; dropped ones last" if number == 0 else None,
        )
        for standing in choice.standings:
            here = _now(standing, outlook.temperature, outlook.rows)
            trained = standing.command is not None
            table.add_row(
                standing.name if standing.dropped_after is None else f"({standing.name})",
                way_text(here),
                format_estimate(here.mean_acceptance_length, spread="none"),
                format_estimate(here.now, unit="×", spread="none"),
                _forecast(here.forecast) if trained and here.foretold else "–",
                count(round(here.tokens)) if trained and here.foretold else "–",
                style="bold" if standing.name == choice.winner else "",
            )
        console.print(table)
        console.print()
    for line in choice.failed.values():
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    console.print(f"{choice.winner}: {choice.reason}", highlight=False, soft_wrap=True)
    for line in choice.notes:
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    print_doubts(console, choice.doubts)
    spent = ", ".join(f"{stage} {time_text(seconds)}" for stage, seconds in choice.ledger.items())
    console.print(f"{time_text(choice.spent)} spent: {spent}", highlight=False, soft_wrap=True)
    for command in choice.commands:
        console.print(f"  {command}", highlight=False, soft_wrap=True, markup=False)
    console.print(f"page: {output / 'choose.html'}", highlight=False, soft_wrap=True, markup=False)


def _forecast(estimate: Estimate) -> str:
    return format_estimate(estimate, unit="×", spread="interval")
