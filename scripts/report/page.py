"""The report as one page for people, `report.html`: the verdict first, then what it rests on.

The page loads nothing: styles and charts lie in it, and it has no script. A value that is missing reads "–", and a
section of which nothing was measured is left out.
"""

import base64
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from draftsmith.decode.measurement.certificate import Certificate
from draftsmith.decode.measurement.intervals import Estimate, format_estimate
from draftsmith.scripts.report import figures
from draftsmith.scripts.report.figures import at_length, has_value
from draftsmith.scripts.report.types import Comparison, Report, Run
from draftsmith.train.files import write_aside

NONE = "–"
TEXTS, TOKENS_OF_A_TEXT, PROMPT_CHARACTERS, REJECTED_TOKENS = 8, 400, 280, 30
BUCKETS = (0.05, 0.35, 0.65, 0.95)
"""Where one colour of a token's acceptance ends and the next begins."""
KINDS = {"draft": "draft model", "baseline_draft": "stock draft", "medusa": "Medusa heads", "prompt_lookup": "n-grams"}


def write_page(report: Report, path: Path) -> None:
    """Write the page of a report (schema "draftsmith.report/1") aside, then rename: no reader sees half a file."""
    write_aside(path, render_page(report))


def render_page(report: Report) -> str:
    """Return the page of a report as HTML."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"number": number, "estimate": estimate, "bytes": size, "visible": visible}
    source = resources.files("draftsmith.scripts.report").joinpath("report.html.j2").read_text(encoding="utf-8")
    style = figures.styles(report)
    setting = _setting(report)
    rejections = report.rejections
    return environment.from_string(source).render(
        report=report,
        environment=asdict(report.environment),
        style=style,
        verdict=_verdict(report),
        setting=setting,
        kinds=KINDS,
        speedups=figures.speedup_panels(report, style),
        lengths=figures.length_panels(report, style),
        positions=figures.position_panels(report, style),
        categories=figures.category_panels(report, style, setting.draft_length),
        break_even=figures.break_even_panels(report, style),
        break_even_rows=_break_even_rows(report),
        costs=figures.cost_panels(report, style),
        cost_rows=_cost_rows(report, setting.draft_length),
        check=figures.check_panel(report, style),
        groups=_groups(report),
        comparisons=_comparisons(report),
        certificate=_certificate(report),
        texts=_texts(report),
        rejected=[] if rejections is None else rejections.tokens[:REJECTED_TOKENS],
        trees=[(tree.proposer, _picture(tree.svg)) for tree in report.trees],
    )


def number(value: float | None, form: str = ".2f") -> str:
    """Format a number, with a true minus and a narrow space before %; a missing one as "–"."""
    if value is None:
        return NONE
    return typographic(format(value, form))


def typographic(words: str) -> str:
    """Return a formatted number with a true minus and a narrow space before %."""
    return words.replace("-", "\N{MINUS SIGN}").replace("%", "\N{NARROW NO-BREAK SPACE}%")


def estimate(value: Estimate | None, form: str = ".2f", unit: str = "") -> Markup:
    """Format an estimate with its interval; without a value as "–", without an interval alone."""
    words, bracket, ends = typographic(format_estimate(value, form, unit, "interval")).partition(" [")
    return Markup("{}").format(words) + (Markup('<span class="ci">{}{}</span>').format(bracket, ends) if ends else "")


def size(count: float | None) -> str:
    """Format bytes in the largest unit that leaves at least one."""
    if count is None:
        return NONE
    for unit, digits in (("B", 0), ("KiB", 1), ("MiB", 1)):
        if abs(count) < 1024:
            return f"{count:.{digits}f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def visible(text: str, whole: bool = False) -> str:
    """Return a token's text with its whitespace to be seen; what cannot be printed is written as its code.

    Args:
        text: of one token.
        whole: show every space, where the token stands alone; in a text, line breaks and tabs only.
    """
    marks = {"\n": "↵" if whole else "↵\n", "\t": "⇥" if whole else "⇥\t", "\r": "␍"}
    if whole:
        marks[" "] = "␣"
    shown = (marks.get(c) or (c if c.isprintable() else f"\\u{ord(c):04x}") for c in text)
    return "".join(shown) or "∅"


def lossless(entry: Certificate, report: Report) -> tuple[str, str]:
    """Return "yes", "rounding", "no" or "unknown", and what the certificate says in words."""
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


def _verdict(report: Report) -> dict[str, str]:
    chosen, gate = report.recommendation, report.gate
    if chosen.go:
        state, word = "go", "GO"
    elif chosen.proposer is None and (gate is None or gate.passed):
        state, word = "no", "No drafter pays"
    else:
        state, word = "no", "NO-GO"
    return {"state": state, "word": word, "reason": chosen.reason}


@dataclass(frozen=True)
class Setting:
    """The setting that the page opens with."""

    title: str
    proposer: str | None = None
    draft_length: int | None = None
    batch_size: int | None = None
    temperature: float | None = None
    measured: Estimate | None = None
    """Its speed-up."""
    predicted: Estimate | None = None
    length: Estimate | None = None
    """Its τ."""
    lossless: tuple[str, str] = ("unknown", "not checked")
    plain: float | None = None
    """Plain decoding's tokens per second."""
    speed: float | None = None


def _setting(report: Report) -> Setting:
    """Return the recommended setting and its figures; where none is, the fastest that was measured, and so named."""
    chosen = report.recommendation
    title, predicted, measured = "Best setting", chosen.predicted_speedup, chosen.measured_speedup
    run: Run | None
    if chosen.proposer is not None:
        run = next((run for run in report.runs if run.setting == chosen.setting), None)
        if chosen.go:
            title = "Recommended setting"
    else:
        timed = [run for run in report.runs if has_value(run.speedup)]
        run = max(timed, key=lambda run: run.speedup.value or 0.0, default=None)
        if run is not None:
            title, predicted = "Fastest setting measured", run.predicted_speedup
    if run is None:
        return Setting(title, *chosen.setting, measured=measured, predicted=predicted)
    length = run.mean_acceptance_length
    return Setting(
        title,
        *run.setting,
        measured=measured if has_value(measured) else run.speedup,
        predicted=predicted,
        length=length if has_value(length) else _replayed_length(report, run),
        lossless=lossless(run.lossless, report),
        plain=_plain_speed(report, run.temperature, run.batch_size),
        speed=run.tokens_per_second.value,
    )


def _replayed_length(report: Report, run: Run) -> Estimate | None:
    for curve in report.curves:
        drafter = curve.proposer.name, curve.temperature
        if drafter == (run.proposer.name, run.temperature) and curve.verifier != "greedy":
            return at_length(curve.mean_acceptance_length, run.draft_length)
    return None


def _plain_speed(report: Report, temperature: float, batch_size: int) -> float | None:
    for plain in report.baseline.by_temperature:
        if (plain.temperature, plain.batch_size) == (temperature, batch_size):
            return plain.tokens_per_second.value
    return None


def _groups(report: Report) -> list[dict[str, Any]]:
    """Return the runs by temperature and batch size, with plain decoding's speed."""
    groups = []
    for temperature, batch in dict.fromkeys((run.temperature, run.batch_size) for run in report.runs):
        runs = [run for run in report.runs if (run.temperature, run.batch_size) == (temperature, batch)]
        rows = [{"run": run, "lossless": lossless(run.lossless, report)} for run in runs]
        plain = _plain_speed(report, temperature, batch)
        groups.append({"temperature": temperature, "batch_size": batch, "plain": plain, "rows": rows})
    return groups


def _certificate(report: Report) -> list[dict[str, Any]]:
    """Return what the certificates say, equal answers of a drafter in a row; nothing where none was checked."""
    if not any(run.lossless.checked for run in report.runs):
        return []
    rows: dict[Any, dict[str, Any]] = {}
    for run in report.runs:
        key = run.proposer.name, run.temperature, lossless(run.lossless, report)
        row: dict[str, Any] = dict(zip(("name", "temperature", "answer"), key, strict=True))
        row = rows.setdefault(key, row | {"draft_lengths": set(), "batch_sizes": set()})
        row["draft_lengths"].add(run.draft_length)
        row["batch_sizes"].add(run.batch_size)
    return list(rows.values())


def _comparisons(report: Report) -> list[dict[str, Any]]:
    """Return the comparisons by temperature and verifier: those of a γ that was decoded, then the others."""
    decoded = {run.draft_length for run in report.runs}
    pairs = list(dict.fromkeys((one.proposer, one.other) for one in report.comparisons))
    groups = []
    for key in dict.fromkeys((one.temperature, one.verifier) for one in report.comparisons):
        known = [
            one
            for one in report.comparisons
            if (one.temperature, one.verifier) == key and has_value(one.mean_acceptance_length)
        ]
        known.sort(key=lambda one: (pairs.index((one.proposer, one.other)), one.draft_length))
        first = [one for one in known if one.draft_length in decoded] or known
        others = [one for one in known if one not in first]
        if known:
            sentences = [[_sentence(one) for one in part] for part in (first, others)]
            groups.append({"temperature": key[0], "verifier": key[1], "first": sentences[0], "others": sentences[1]})
    return groups


def _sentence(one: Comparison) -> dict[str, Any]:
    """Say who is ahead and by how much."""
    names, length, alpha, more = (one.proposer, one.other), one.mean_acceptance_length, one.alpha, one.more_prompts
    if length.value is not None and length.value < 0:
        names, length, alpha = names[::-1], length.scaled(-1), alpha.scaled(-1)
    if more == 0:
        ending = "told apart"
    elif more is None:
        ending = "nothing tells them apart"
    else:
        ending = f"{more:,} more {'prompt' if more == 1 else 'prompts'} to tell these apart"
    return {
        "ahead": names[0],
        "behind": names[1],
        "length": length,
        "alpha": alpha if has_value(alpha) else None,
        "draft_length": one.draft_length,
        "told": more == 0,
        "ending": ending,
    }


def _break_even_rows(report: Report) -> list[dict[str, Any]]:
    """Return α and, by γ, break-even α of each drafter, temperature and batch size."""
    return [
        {
            "name": curve.proposer.name,
            "temperature": curve.temperature,
            "batch_size": batch,
            "alpha": curve.alpha,
            "thresholds": sorted(by_length.items()),
        }
        for curve in report.curves
        if curve.verifier != "greedy" and has_value(curve.alpha)
        for batch, by_length in curve.break_even_alpha.items()
        if by_length
    ]


def _cost_rows(report: Report, draft_length: int | None) -> list[dict[str, Any]]:
    """Return what drafting and verifying cost in units of t(1), by batch size and drafter."""
    if report.costs is None:
        return []
    rows = []
    for batch, target in report.costs.target_seconds.items():
        one = target[1]
        verified = None if draft_length is None else target.get(draft_length + 1)
        for name, by_batch in report.costs.draft_seconds_per_token.items():
            if batch in by_batch:
                step = by_batch[batch]
                rows.append(
                    {
                        "batch_size": batch,
                        "name": name,
                        "one": one,
                        "verify": None if verified is None else verified / one,
                        "step": step,
                        "ratio": step / one,
                        "overhead": report.costs.overhead_seconds[name][batch],
                    }
                )
    return rows


def _texts(report: Report) -> list[dict[str, Any]]:
    """Return the texts whose tokens are coloured by acceptance: 0, rejected, to 4, accepted."""
    return [
        {
            "category": text.category,
            "prompt": ("…" if len(text.prompt) > PROMPT_CHARACTERS else "") + text.prompt[-PROMPT_CHARACTERS:],
            "tokens": [
                {"text": t.text, "acceptance": t.acceptance, "bucket": sum(t.acceptance >= bound for bound in BUCKETS)}
                for t in text.tokens[:TOKENS_OF_A_TEXT]
            ],
            "left_out": max(len(text.tokens) - TOKENS_OF_A_TEXT, 0),
        }
        for text in (report.rejections.texts[:TEXTS] if report.rejections is not None else [])
    ]


def _picture(svg: str) -> str:
    """Return a picture's address: as an image, an SVG of a report from elsewhere can neither run nor load a thing."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()
