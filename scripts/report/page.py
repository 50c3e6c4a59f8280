"""The report as one page for people, `report.html`: the verdict first, then what it rests on.

The page loads nothing: styles and charts lie in it, and it has no script. A value that is missing reads "–", and a
section of which nothing was measured is left out.
"""

import base64
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from draftsmith.decode.measurement.intervals import Estimate, format_estimate
from draftsmith.scripts.report import figures
from draftsmith.scripts.report.figures import Report, at_length, has_value
from draftsmith.train.files import write_aside

NONE = "–"
FALSE_ALARM = 1e-4
"""An honest decoder fails the law test with this probability."""
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
    return environment.from_string(source).render(
        report=report,
        style=style,
        verdict=_verdict(report),
        setting=setting,
        kinds=KINDS,
        drafters=list(
            {one["proposer"]["name"]: one["proposer"] for one in (*report["curves"], *report["runs"])}.values()
        ),
        speedups=figures.speedup_panels(report, style),
        lengths=figures.length_panels(report, style),
        positions=figures.position_panels(report, style),
        categories=figures.category_panels(report, style, setting["draft_length"]),
        break_even=figures.break_even_panels(report, style),
        break_even_rows=_break_even_rows(report),
        costs=figures.cost_panels(report, style),
        cost_rows=_cost_rows(report, setting["draft_length"]),
        check=figures.check_panel(report, style),
        groups=_groups(report),
        comparisons=_comparisons(report),
        certificate=_certificate(report),
        texts=_texts(report),
        rejected=((report["breaks"] or {}).get("tokens") or [])[:REJECTED_TOKENS],
        trees=[(tree["proposer"], _picture(tree["svg"])) for tree in report["trees"]],
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


def lossless(entry: Mapping[str, Any], report: Report) -> tuple[str, str]:
    """Return "yes", "rounding", "no" or "unknown", and what was found in words."""
    if not entry["checked"]:
        reason = entry.get("reason")
        return "unknown", "not checked" + (f": {reason}" if reason else "")
    if entry["p_value"] is not None:
        passed = entry.get("passed")
        if passed is None:
            passed = entry["p_value"] > FALSE_ALARM
        tokens = "" if entry.get("tokens") is None else f" over {entry['tokens']:,} tokens"
        return "yes" if passed else "no", f"law test{tokens}: p = {entry['p_value']:.2g}"
    same, near, total = entry["prompts_identical"], entry.get("near_ties"), report["prompts"]["count"]
    words = "texts identical" if same is None else f"{same} of {total} texts identical"
    if entry["identical"] is None:
        return "unknown", words
    if entry["identical"]:
        return "yes", words
    departures = entry.get("departures")
    if departures is None and near is not None and same is not None:
        departures = total - same - near
    words += f", {near} part at a near-tie" if near else ""
    words += f", {departures} depart" if departures else ""
    passed = entry.get("passed")
    if passed or (passed is None and departures == 0):
        return "rounding", words
    return "no", words


def _verdict(report: Report) -> dict[str, Any]:
    chosen, gate = report["recommendation"], report["gate"]
    if chosen is None:
        return {"state": "unknown", "word": "No recommendation", "reason": "Nothing was compared."}
    if chosen["go"]:
        state, word = "go", "GO"
    elif chosen["proposer"] is None and (gate is None or gate["passed"]):
        state, word = "no", "No drafter pays"
    else:
        state, word = "no", "NO-GO"
    return {"state": state, "word": word, "reason": chosen["reason"]}


def _setting(report: Report) -> dict[str, Any]:
    """Return the recommended setting and its figures; where none is, the fastest that was measured, and so named."""
    chosen = report["recommendation"] or {}
    setting: dict[str, Any] = {
        "title": "Recommended setting" if chosen.get("go") else "Best setting",
        "proposer": None,
        "draft_length": None,
    }
    run: Mapping[str, Any] | None
    if chosen.get("proposer") is not None:
        setting |= {key: chosen[key] for key in ("proposer", "draft_length", "batch_size", "temperature")}
        setting |= {"measured": chosen["measured_speedup"], "predicted": chosen["predicted_speedup"]}
        run = next((run for run in report["runs"] if _key(run) == _key_of(setting)), None)
    else:
        timed = [run for run in report["runs"] if has_value(run["speedup"])]
        run = max(timed, key=lambda run: run["speedup"].value, default=None)
        if run is None:
            return setting
        setting |= dict(zip(("proposer", "draft_length", "batch_size", "temperature"), _key(run), strict=True))
        setting |= {"title": "Fastest setting measured", "measured": None, "predicted": run["predicted_speedup"]}
    setting |= {"length": None, "lossless": ("unknown", "not checked"), "plain": None, "speed": None, "path": None}
    if run is not None:
        if not has_value(setting["measured"]):
            setting["measured"] = run["speedup"]
        setting["length"], setting["speed"] = run["mean_acceptance_length"], run["tokens_per_second"].value
        setting["path"] = run["proposer"]["path"]
        if run["lossless"]:
            setting["lossless"] = lossless(run["lossless"], report)
        setting["plain"] = _plain_speed(report, run["temperature"], run["batch_size"])
    if not has_value(setting["length"]):
        setting["length"] = _replayed_length(report, setting)
    return setting


def _key(run: Mapping[str, Any]) -> tuple[Any, ...]:
    return run["proposer"]["name"], run["draft_length"], run["batch_size"], run["temperature"]


def _key_of(setting: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(setting[key] for key in ("proposer", "draft_length", "batch_size", "temperature"))


def _replayed_length(report: Report, setting: Mapping[str, Any]) -> Estimate | None:
    for curve in report["curves"]:
        own = curve["proposer"]["name"], curve["temperature"]
        if own == (setting["proposer"], setting["temperature"]) and curve["verifier"] != "greedy":
            found: Estimate | None = at_length(curve["mean_acceptance_length"], setting["draft_length"])
            return found
    return None


def _plain_speed(report: Report, temperature: float, batch_size: int) -> float | None:
    for plain in report["baseline"]["by_temperature"]:
        if (plain["temperature"], plain.get("batch_size", 1)) == (temperature, batch_size):
            speed: float | None = plain["tokens_per_second"].value
            return speed
    return None


def _groups(report: Report) -> list[dict[str, Any]]:
    """Return the runs by temperature and batch size, with plain decoding's speed."""
    found = []
    for temperature, batch in dict.fromkeys((run["temperature"], run["batch_size"]) for run in report["runs"]):
        runs = [run for run in report["runs"] if (run["temperature"], run["batch_size"]) == (temperature, batch)]
        rows = [
            {"run": run, "lossless": lossless(run["lossless"], report) if run["lossless"] else None} for run in runs
        ]
        plain = _plain_speed(report, temperature, batch)
        found.append({"temperature": temperature, "batch_size": batch, "plain": plain, "rows": rows})
    return found


def _certificate(report: Report) -> list[dict[str, Any]]:
    """Return what was found of each drafter and temperature, equal findings in a row; nothing if none was checked."""
    checked = [run for run in report["runs"] if run["lossless"]]
    if not any(run["lossless"]["checked"] for run in checked):
        return []
    rows: dict[Any, dict[str, Any]] = {}
    for run in checked:
        key = run["proposer"]["name"], run["temperature"], lossless(run["lossless"], report)
        row = dict(zip(("name", "temperature", "found"), key, strict=True)) | {"draft_lengths": [], "batch_sizes": []}
        row = rows.setdefault(key, row)
        for name in ("draft_length", "batch_size"):
            row[f"{name}s"] = sorted({*row[f"{name}s"], run[name]})
    return list(rows.values())


def _comparisons(report: Report) -> list[dict[str, Any]]:
    """Return the comparisons by temperature and verifier: those of a γ that was decoded, then the others."""
    decoded = {run["draft_length"] for run in report["runs"]}
    pairs = list(dict.fromkeys((one["proposer"], one["other"]) for one in report["comparisons"]))
    found = []
    for key in dict.fromkeys((one["temperature"], one["verifier"]) for one in report["comparisons"]):
        own = [one for one in report["comparisons"] if (one["temperature"], one["verifier"]) == key]
        own.sort(key=lambda one: (pairs.index((one["proposer"], one["other"])), one["draft_length"]))
        known = [one for one in own if has_value(one["mean_acceptance_length"])]
        first = [one for one in known if one["draft_length"] in decoded] or known
        others = [one for one in known if one not in first]
        if known:
            sentences = [[_sentence(one) for one in part] for part in (first, others)]
            found.append({"temperature": key[0], "verifier": key[1], "first": sentences[0], "others": sentences[1]})
    return found


def _sentence(one: Mapping[str, Any]) -> dict[str, Any]:
    """Say who is ahead and by how much."""
    names, length, alpha = (one["proposer"], one["other"]), one["mean_acceptance_length"], one["alpha"]
    if length.value < 0:
        names, length, alpha = names[::-1], length.scaled(-1), alpha and alpha.scaled(-1)
    more, told = one["more_prompts"], one["more_prompts"] == 0
    if told:
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
        "draft_length": one["draft_length"],
        "told": told,
        "ending": ending,
    }


def _break_even_rows(report: Report) -> list[dict[str, Any]]:
    """Return α and, by γ, break-even α of each drafter, temperature and batch size."""
    return [
        {
            "name": curve["proposer"]["name"],
            "temperature": curve["temperature"],
            "batch_size": int(batch),
            "alpha": curve["alpha"],
            "thresholds": sorted((int(k), a) for k, a in by_length.items()),
        }
        for curve in report["curves"]
        if curve["verifier"] != "greedy" and has_value(curve["alpha"])
        for batch, by_length in curve["break_even_alpha"].items()
        if by_length
    ]


def _cost_rows(report: Report, draft_length: int | None) -> list[dict[str, Any]]:
    """Return what drafting and verifying cost in units of t(1), by batch size and drafter."""
    costs, rows = report["costs"] or {}, []
    for batch, target in (costs.get("target_seconds") or {}).items():
        one = target.get("1")
        for name, by_batch in (costs.get("draft_seconds_per_token") or {}).items():
            step = by_batch.get(batch)
            rows.append(
                {
                    "batch_size": int(batch),
                    "name": name,
                    "one": one,
                    "verify": _over(target.get(str((draft_length or 0) + 1)), one) if draft_length else None,
                    "step": step,
                    "ratio": _over(step, one),
                    "overhead": ((costs.get("overhead_seconds") or {}).get(name) or {}).get(batch),
                }
            )
    return rows


def _over(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole


def _texts(report: Report) -> list[dict[str, Any]]:
    """Return the texts whose tokens are coloured by acceptance: 0, rejected, to 4, accepted."""
    return [
        {
            "category": text["category"],
            "prompt": ("…" if len(text["prompt"]) > PROMPT_CHARACTERS else "") + text["prompt"][-PROMPT_CHARACTERS:],
            "tokens": [
                {"text": t["text"], "acceptance": t["acceptance"], "bucket": _bucket(t["acceptance"])}
                for t in text["tokens"][:TOKENS_OF_A_TEXT]
            ],
            "left_out": max(len(text["tokens"]) - TOKENS_OF_A_TEXT, 0),
        }
        for text in ((report["breaks"] or {}).get("texts") or [])[:TEXTS]
    ]


def _bucket(acceptance: float | None) -> int:
    return 2 if acceptance is None else sum(acceptance >= bound for bound in BUCKETS)


def _picture(svg: str) -> str:
    """Return a picture's address: as an image, an SVG of a report from elsewhere can neither run nor load a thing."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()
