"""The report as one page for people, `report.html`: the verdict first, then its evidence.

The page contains its styles and charts, loads nothing, and has no script. Missing values are shown as "–", and sections
without measurements are left out.
"""

from dataclasses import asdict, dataclass
from functools import cache, partial
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from draftsmith.decode.measurement.certificate import Certificate
from draftsmith.decode.measurement.intervals import Estimate, format_estimate
from draftsmith.scripts.kinds import title_of
from draftsmith.scripts.report import figures
from draftsmith.scripts.report.entries import Latency
from draftsmith.scripts.report.figures import has_value
from draftsmith.scripts.report.types import Comparison, Report, Run
from draftsmith.scripts.report.words import headline, load_words, turns
from draftsmith.scripts.summary import DOUBTFUL

NONE = "–"
MUCH_REPEATED = 0.25  # the share of repeated n-grams from which the page warns, more than code or tables usually have
SERVERS = {"vllm": "vLLM", "sglang": "SGLang", "llama.cpp": "llama.cpp", "other": "a server"}
SOURCES = {
    "answers": "each answer, counted by the server",
    "parts": "the server's counters; intervals by the parts that answers came in, which match them step by step",
    "counters": "the server's counters of all requests together",
}
"""The evidence for acceptance."""


def render_page(report: Report) -> str:
    """Return the page of a report as HTML."""
    style = figures.styles(report)
    opening = _opening(report)
    return template("draftsmith.scripts.report", "report.html.j2").render(
        css=css(),
        report=report,
        environment=asdict(report.environment),
        style=style,
        opening=opening,
        headline=headline(report),
        winners=report.winners(),
        repeated=_repeated(report),
        settings=list(dict.fromkeys((run.temperature, run.batch_size) for run in report.runs)),
        plain={(run.temperature, run.batch_size): run.tokens_per_second for run in report.plain_runs()},
        lossless=partial(lossless, report=report),
        turns=[(run, words) for run in report.runs if (words := turns(run)) is not None],
        title_of=title_of,
        servers=SERVERS,
        sources=SOURCES,
        setting_words=partial(figures.setting_words, report),
        latency=partial(_latency, report),
        milliseconds=lambda seconds: number(seconds and 1000 * seconds, ",.1f"),
        # A server has a single γ: no charts over γ.
        speedups=[] if report.server else figures.speedup_panels(report, style),
        lengths=[] if report.server else figures.length_panels(report, style),
        groups=figures.group_rows(report, (opening.run or report.recommendation).draft_length),
        error=report.prediction_error(),
        load_words=load_words,
        doubtful=DOUBTFUL,
        comparisons=_comparisons(report),
    )


@cache
def template(package: str, name: str) -> Template:
    """Return a page's template, compiled once because compiling takes longer than rendering."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"number": number, "estimate": estimate}
    environment.tests |= {"measured": has_value}
    return environment.from_string(resources.files(package).joinpath(name).read_text(encoding="utf-8"))


@cache
def css() -> Markup:
    """Return the style of every page."""
    return Markup(resources.files("draftsmith.scripts.report").joinpath("page.css").read_text(encoding="utf-8"))


def number(value: float | None, form: str = ".2f") -> str:
    """Format a number as `typographic` does, None as "–"."""
    return NONE if value is None else typographic(format(value, form))


def typographic(words: str) -> str:
    """Return a formatted number with a true minus and a narrow space before %."""
    return words.replace("-", "\N{MINUS SIGN}").replace("%", "\N{NARROW NO-BREAK SPACE}%")


def estimate(value: Estimate | None, form: str = ".2f", unit: str = "") -> Markup:
    """Format an estimate with its interval, if it has one; "–" without a value."""
    words, bracket, ends = typographic(format_estimate(value, form, unit, "interval")).partition(" [")
    return Markup("{}").format(words) + (Markup('<span class="ci">{}{}</span>').format(bracket, ends) if ends else "")


def lossless(entry: Certificate, report: Report) -> tuple[str, str]:
    """Return "yes", "rounding", "no" or "unknown", and the certificate's result in words."""
    if not entry.checked:
        return "unknown", "not checked" + (f": {entry.reason}" if entry.reason else "")
    if entry.p_value is not None:
        return (
            "yes" if entry.passed else "no",
            f"distribution test over {entry.tokens:,} tokens: p = {entry.p_value:.2g}",
        )
    words = f"{entry.prompts_identical} of {report.prompts.count} texts identical"
    if entry.identical:
        return "yes", words
    words += f", {entry.near_ties} part at a near-tie" if entry.near_ties else ""
    words += f", {entry.departures} depart" if entry.departures else ""
    return "rounding" if entry.passed else "no", words


@dataclass(frozen=True)
class Opening:
    """The setting at the top of the page, with its speed-ups."""

    title: str
    run: Run | None
    predicted: Estimate | None = None
    measured: Estimate | None = None


def _opening(report: Report) -> Opening:
    """Return the recommended setting, or without one the fastest measured setting, under another title."""
    chosen = report.recommendation
    if report.verdict == "GO IN PART":
        verdict = next(verdict for verdict in chosen.settings if verdict.go)
        best = next((run for run in report.runs if run.key == verdict.key), None)
        return Opening("A setting that pays", best, best.predicted_speedup if best else None, verdict.speedup)
    if chosen.proposer is not None:
        run = next((run for run in report.runs if run.key == chosen.key), None)
        title = "Recommended setting" if chosen.go else "Best setting"
        if report.server is not None:  # all settings must pass
            title = "The setting that decides" if len(report.runs) > 1 else "Setting"
        return Opening(title, run, chosen.predicted_speedup, chosen.measured_speedup)
    if report.server is not None:
        return Opening("Setting" if len(report.runs) == 1 else "First setting", report.runs[0])
    timed = [run for run in report.runs if has_value(run.speedup)]
    if not timed:
        return Opening("", None)
    run = max(timed, key=lambda run: run.speedup.value or 0.0)
    return Opening("Fastest setting measured", run, run.predicted_speedup, run.speedup)


def _repeated(report: Report) -> float | None:
    """Return the greatest share of repeated n-grams, if it is large enough for a warning."""
    shares = [run.repeated_ngram_share for run in report.plain_runs()] + [
        run.repeated_ngram_share for run in report.runs
    ]
    most = max((share for share in shares if share is not None), default=0.0)
    return most if most >= MUCH_REPEATED else None


def _latency(report: Report, temperature: float, concurrency: int) -> Latency | None:
    """Return the latency of requests to the server in a setting."""
    latencies = report.server.latencies if report.server else ()
    settings = {(wait.temperature, wait.concurrency): wait for wait in latencies if wait.role == "server"}
    return settings.get((temperature, concurrency))


def _comparisons(report: Report) -> list[dict[str, Any]]:
    """Return the comparisons by temperature and verifier, first those whose γ was decoded."""
    decoded = {run.draft_length for run in report.runs}
    groups: dict[tuple[float, str], list[Comparison]] = {}
    for pair in report.comparisons:
        group = groups.setdefault((pair.temperature, pair.verifier), [])
        group += [pair] if has_value(pair.mean_acceptance_length) else []
    entries = []
    for (temperature, verifier), group in groups.items():
        if group:
            first = [pair for pair in group if pair.draft_length in decoded] or group
            entry: dict[str, Any] = {"temperature": temperature, "verifier": verifier}
            entry["first"] = [_sentence(pair) for pair in first]
            entry["others"] = [_sentence(pair) for pair in group if pair not in first]
            entries.append(entry)
    return entries


def _sentence(pair: Comparison) -> dict[str, Any]:
    """Describe which drafter is ahead, and by how much."""
    names, length, alpha = (pair.proposer, pair.other), pair.mean_acceptance_length, pair.alpha
    if length.value is not None and length.value < 0:
        names, length, alpha = names[::-1], length.scaled(-1), alpha.scaled(-1)
    told = length.ci95 is not None and length.ci95[0] > 0
    close = "too few prompts to tell them apart" if length.ci95 is None else "too close to tell them apart"
    return {
        "ahead": names[0],
        "other": names[1],
        "length": length,
        "alpha": alpha,
        "draft_length": pair.draft_length,
        "told": told,
        "ending": "told apart" if told else close,
    }
