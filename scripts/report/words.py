"""Phrases on a run that page, table and summary share."""

from collections.abc import Iterable

from draftsmith.decode.measurement.intervals import format_estimate
from draftsmith.scripts.report.entries import ByLoad
from draftsmith.scripts.report.types import Report, Run

MOST_NAMED = 4  # the most settings that a headline names; more are counted


def setting_names(
    settings: Iterable[tuple[float, int]], at_once: str = "batch size {}"
) -> dict[tuple[float, int], str]:
    """Name temperatures and batch sizes, such as "T = 0", as briefly as possible."""
    settings = list(settings)
    temperatures, sizes = ({setting[index] for setting in settings} for index in (0, 1))
    names = {}
    for temperature, rows in settings:
        parts = [f"T = {temperature:g}"] if len(temperatures) > 1 or len(sizes) == 1 else []
        parts += [at_once.format(rows)] if len(sizes) > 1 else []
        names[temperature, rows] = ", ".join(parts)
    return names


def headline(report: Report) -> str:
    """Return the verdict of each setting, the deciding ones first: "GO at T = 0: 1.39×; at T = 1: …, not shown"."""
    verdicts = report.recommendation.settings
    if len(verdicts) < 2:
        return report.verdict
    if len(verdicts) > MOST_NAMED:
        refused = report.verdict == "NO-GO"
        count = sum(verdict.go != refused for verdict in verdicts)
        return f"{'NO-GO' if refused else 'GO'} in {count} of {len(verdicts)} settings"
    names = _verdict_names(report)
    least = 1.0 if report.gate is None or report.gate.min_speedup is None else report.gate.min_speedup
    refused, parts, word = report.verdict == "NO-GO", list[str](), ""
    for verdict in sorted(verdicts, key=lambda verdict: verdict.go == refused):
        faster, part = verdict.speedup, f"at {names[verdict.temperature, verdict.batch_size]}"
        if faster is not None and faster.value is not None:
            shown = faster.ci95 is not None and faster.ci95[0] > least  # at 95 %; the gate may require more
            part += f": {format_estimate(faster, unit='×', spread='none' if verdict.go or shown else 'interval')}"
            if not (verdict.go or refused or shown):
                parts.append(f"{part}, not shown")
                continue
        own = "GO" if verdict.go else "NO-GO"
        parts.append(part if own == word else f"{own} {part}")
        word = own
    return "; ".join(parts)


def gate_words(report: Report) -> str:
    """Name the settings that the gate depends on, unless it depends on all."""
    verdicts = report.recommendation.settings
    names = _verdict_names(report)
    deciding = [names[verdict.temperature, verdict.batch_size] for verdict in verdicts if verdict.decides]
    return f" at {'; '.join(deciding)}" if len(deciding) < len(verdicts) else ""


def _verdict_names(report: Report) -> dict[tuple[float, int], str]:
    settings = [(verdict.temperature, verdict.batch_size) for verdict in report.recommendation.settings]
    return setting_names(settings, "batch size {}" if report.server is None else "{} at once")


def turns(run: Run) -> str | None:
    """Describe the shares of rounds and of tokens of drafters that take turns; None without turns or rounds."""
    sources = run.sources or {}
    rounds = sum(counts.num_drafts for counts in sources.values())
    tokens = sum(counts.num_emitted_tokens for counts in sources.values())
    if not rounds or not tokens:
        return None
    words, units = [], (" of rounds", " of tokens")
    for name, counts in sources.items():
        rate, share = 100 * counts.num_drafts / rounds, 100 * counts.num_emitted_tokens / tokens
        words.append(f"{name} {rate:.0f} %{units[0]}, {share:.0f} %{units[1]}")
        units = ("", "")  # only the first drafter names the units
    return "; ".join(words)


def load_words(load: ByLoad) -> str:
    """Describe the best draft length by batch size, such as "1 to 4: γ = 3; 5 to 8: do not draft"."""
    parts = []
    for span in load.ranges:
        where = f"{span.first}" if span.first == span.last else f"{span.first} to {span.last}"
        parts.append(f"{where}: " + (f"γ = {span.draft_length}" if span.draft_length else "do not draft"))
    return "; ".join(parts)
