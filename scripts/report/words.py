"""Phrases on a report's figures that page, table and summary share."""

from collections.abc import Iterable, Mapping
from typing import TypeVar

from draftsmith.decode.measurement.intervals import format_estimate
from draftsmith.scripts.report.entries import ByLoad, Grouping
from draftsmith.scripts.report.types import Report, Run

MOST_NAMED = 4  # the most settings that a headline names; more are counted
Value = TypeVar("Value")


def at_length(by_length: Mapping[int, Value], draft_length: int | None) -> Value | None:
    """Return the entry of this γ, or the only entry, as trees have."""
    if len(by_length) == 1:
        return next(iter(by_length.values()))
    return None if draft_length is None else by_length.get(draft_length)


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
    """Return the verdict of each setting, those of its own word first: "GO at T = 0: 1.39×; at T = 1: …, not shown"."""
    verdicts = report.recommendation.settings
    if len(verdicts) < 2:
        return report.verdict
    if len(verdicts) > MOST_NAMED:
        refused = report.verdict == "NO-GO"
        count = sum(verdict.go != refused for verdict in verdicts)
        return f"{'NO-GO' if refused else 'GO'} in {count} of {len(verdicts)} settings"
    settings = [(verdict.temperature, verdict.batch_size) for verdict in verdicts]
    names = setting_names(settings, "batch size {}" if report.server is None else "{} at once")
    least = 1.0 if report.gate is None or report.gate.min_speedup is None else report.gate.min_speedup
    refused, parts, word = report.verdict == "NO-GO", list[str](), ""
    for verdict in sorted(verdicts, key=lambda verdict: verdict.go == refused):
        faster, part = verdict.speedup, f"at {names[verdict.temperature, verdict.batch_size]}"
        if verdict.departs:
            part += ": not the target's text"
        elif faster is not None and faster.value is not None:
            shown = faster.ci95 is not None and faster.ci95[0] > least  # at 95 %; the gate may require more
            part += f": {format_estimate(faster, unit='×', spread='none' if verdict.go or shown else 'interval')}"
            if not (verdict.go or refused or shown):
                parts.append(f"{part}, not shown")
                continue
        own = "GO" if verdict.go else "NO-GO"
        parts.append(part if own == word else f"{own} {part}")
        word = own
    return "; ".join(parts)


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


def group_words(grouping: Grouping, name: str) -> str:
    """Return what a group is called: a category by its name, a length of context as "1k to 2k"."""
    if grouping == "category":
        return name
    end = int(name) // 1024
    return f"{end // 2}k to {end}k" if end > 1 else "below 1k"


def load_words(load: ByLoad) -> str:
    """Describe the best draft length by batch size, such as "1 to 4: γ = 3; 5 to 8: do not draft"."""
    parts = []
    for span in load.ranges:
        where = f"{span.first}" if span.first == span.last else f"{span.first} to {span.last}"
        parts.append(f"{where}: " + (f"γ = {span.draft_length}" if span.draft_length else "do not draft"))
    return "; ".join(parts)
