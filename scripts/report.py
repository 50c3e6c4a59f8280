"""From observations to `report.json` and a table in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from draftsmith.decode import Counts
from draftsmith.decode.intervals import Estimate, rate_ratio, ratio, ratio_difference
from draftsmith.decode.replay import ReplayedText
from draftsmith.decode.text import count_repeated_ngrams
from draftsmith.medusa import MedusaHeads
from draftsmith.train.provenance import environment

if TYPE_CHECKING:
    from draftsmith.scripts.measure import (
        MeasureConfig,
        Method,
        Observation,
        Observations,
        ReplayedTree,
        Replays,
    )

SCHEMA = "draftsmith.report/1"


def build_report(
    config: MeasureConfig, models: dict[str, PreTrainedModel], observations: Observations, replays: Replays
) -> dict[str, Any]:
    """Return the report of one run of `measure`; what is not measured is None.

    Intervals are bootstrapped over prompts; comparisons are paired over prompts.
    """
    target = models["target"]
    plain = {t: seen for (t, method), seen in observations.items() if method.kind == "plain"}
    runs = [
        _run(config, models, temperature, method, seen, plain[temperature], observations, replays)
        for (temperature, method), seen in observations.items()
        if method.kind != "plain"
    ]
    return {
        "schema": SCHEMA,
        "environment": environment(target.device, config.dtype),
        "target": {"path": config.target, "parameters": target.num_parameters(), "dtype": config.dtype},
        "prompts": {
            "path": config.prompts,
            "count": len(next(iter(plain.values()))),
            "replayed": len(next(iter(replays.values()))),
        },
        "baseline": {
            "tokens_per_second": _speed([o for seen in plain.values() for o in seen]),
            "by_temperature": [
                {"temperature": t, "tokens_per_second": _speed(seen), "repeated_ngram_share": _repeated(seen)}
                for t, seen in plain.items()
            ],
        },
        "runs": runs,
        "costs": None,
        "recommendation": None,
    }


def _run(
    config: MeasureConfig,
    models: dict[str, PreTrainedModel],
    temperature: float,
    method: Method,
    seen: list[Observation],
    plain: list[Observation],
    observations: Observations,
    replays: Replays,
) -> dict[str, Any]:
    counts = sum((o.counts for o in seen), Counts())
    texts = replays[temperature, method.kind]
    replayed, gain = _replayed_length(texts, method.draft_length), None
    if method.kind == "draft" and config.baseline_draft:
        stock = replace(method, kind="baseline_draft")
        other = observations[temperature, stock]
        replayed_stock = _replayed_length(replays[temperature, stock.kind], method.draft_length)
        gain = {  # replayed on the same texts for both, without the noise of what each of them happened to decode
            "mean_acceptance_length": replayed and replayed_stock and ratio_difference(*replayed, *replayed_stock),
            "decoded_mean_acceptance_length": ratio_difference(*_acceptance_length(seen), *_acceptance_length(other)),
            "speedup": _speedup(seen, other),
        }
    return {
        "proposer": _proposer(config, models, method),
        "draft_length": method.draft_length,
        "rule": "exact",
        "temperature": temperature,
        "batch_size": 1,
        "counts": counts.to_dict(),
        "alpha": ratio([float(r.overlap.sum()) for r in texts], [len(r.overlap) for r in texts]),
        "draft_acceptance_rate": ratio(
            [o.counts.num_accepted_tokens for o in seen], [o.counts.num_draft_tokens for o in seen]
        ),
        "mean_acceptance_length": ratio(*_acceptance_length(seen)),
        "acceptance_per_position": counts.acceptance_per_position(),
        "conditional_acceptance": counts.conditional_acceptance(),
        "speedup": _speedup(seen, plain),
        "predicted_speedup": None,
        "tokens_per_second": _speed(seen),
        "gain_over_baseline_draft": gain,
        "replay": replayed and _replay(seen, *replayed, temperature),
        "lossless": _lossless(seen, plain, temperature),
        "by_category": _by_category(seen, plain),
        "repeated_ngram_share": _repeated(seen),
    }


def _proposer(config: MeasureConfig, models: dict[str, PreTrainedModel], method: Method) -> dict[str, Any]:
    model = models[method.kind]
    path = {"draft": config.draft, "baseline_draft": config.baseline_draft, "medusa": config.medusa}[method.kind]
    proposer: dict[str, Any] = {"kind": method.kind, "path": path, "parameters": model.num_parameters()}
    if isinstance(model, MedusaHeads):
        tree, _ = model.tree.pruned(method.draft_length)
        proposer |= {"heads": model.config.num_heads, "tree_nodes": len(tree)}
    return proposer


def _replayed_length(
    texts: Sequence[ReplayedText | ReplayedTree], draft_length: int
) -> tuple[list[int], list[float]] | None:
    """Return tokens and rounds of each text; None where replay does not apply."""
    rounds = [r for text in texts if (r := text.rounds(draft_length)) is not None]
    return ([len(text) for text in texts], rounds) if len(rounds) == len(texts) else None


def _acceptance_length(seen: list[Observation]) -> tuple[list[int], list[int]]:
    return [o.counts.num_emitted_tokens for o in seen], [o.counts.num_drafts for o in seen]


def _tokens_and_seconds(seen: list[Observation]) -> tuple[list[int], list[float]]:
    return [len(o.tokens) for o in seen], [o.seconds for o in seen]


def _speed(seen: list[Observation]) -> dict[str, Any]:
    speeds = sorted(len(o.tokens) / o.seconds for o in seen)
    return {"median": speeds[len(speeds) // 2], **ratio(*_tokens_and_seconds(seen))}


def _speedup(seen: list[Observation], plain: list[Observation]) -> Estimate:
    """Tokens per second ÷ those of the other method on the same prompts."""
    return rate_ratio(*_tokens_and_seconds(seen), *_tokens_and_seconds(plain))


def _replay(seen: list[Observation], tokens: list[int], rounds: list[float], temperature: float) -> dict[str, Any]:
    """Replayed τ of the target's texts, and whether that of the decoded prompts' texts agrees with the decoder's own.

    At T=0 both are of the same texts and the rounds must be equal, prompt by prompt; under sampling the texts differ,
    and they agree where the 95 % interval of the paired difference holds zero (one honest run in twenty falls outside).
    """
    decoded = tokens[: len(seen)], rounds[: len(seen)]
    agrees: bool | None
    if temperature == 0:
        agrees = all(abs(o.counts.num_drafts - r) < 1e-6 for o, r in zip(seen, decoded[1], strict=True))
    else:
        interval = ratio_difference(*_acceptance_length(seen), *decoded)["ci95"]
        agrees = None if interval is None else interval[0] <= 0 <= interval[1]
    return {"mean_acceptance_length": ratio(tokens, rounds), "agrees": agrees}


def _lossless(seen: list[Observation], plain: list[Observation], temperature: float) -> dict[str, Any]:
    if temperature > 0:
        return {"checked": False, "identical": None, "prompts_identical": None, "p_value": None}
    same = sum(o.tokens == p.tokens for o, p in zip(seen, plain, strict=True))
    return {"checked": True, "identical": same == len(seen), "prompts_identical": same, "p_value": None}


def _by_category(seen: list[Observation], plain: list[Observation]) -> dict[str, Any]:
    names = sorted({o.category for o in seen if o.category is not None})

    def of(name: str) -> dict[str, Any]:
        chosen = [(o, p) for o, p in zip(seen, plain, strict=True) if o.category == name]
        own, other = [o for o, _ in chosen], [p for _, p in chosen]
        return {
            "prompts": len(own),
            "mean_acceptance_length": ratio(*_acceptance_length(own)),
            "speedup": _speedup(own, other),
        }

    return {name: of(name) for name in names}


def _repeated(seen: list[Observation]) -> float | None:
    repeated, total = (sum(x) for x in zip(*(count_repeated_ngrams(o.tokens) for o in seen), strict=True))
    return repeated / total if total else None


def print_report(report: dict[str, Any], console: Console | None = None) -> None:
    """Print the report's main figures, a row for plain decoding and one for each run; it fits 80 columns."""
    environment = report["environment"]
    has_tree = any(_drafter(run).startswith("medusa/") for run in report["runs"])
    table = Table(
        title=f"{_prompts(report)}, {environment['dtype']}, {environment['device']}, {environment['threads']} threads",
        title_justify="left",
        caption="α: 1 - TV(p, q). accepted: of the drafted tokens. τ: tokens per target forward.\n"
        "±: half of the 95 % interval, bootstrapped over prompts."
        + ("\nmedusa/n: heads that draft a tree of n nodes, of which a round accepts one path." if has_tree else ""),
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for name in ("T", "drafter", "γ", "α", "accepted", "τ", "tok/s", "speed-up", "τ over stock"):
        table.add_column(name, justify="left" if name == "drafter" else "right", no_wrap=True)
    for base in report["baseline"]["by_temperature"]:
        temperature = base["temperature"]
        speed = f"{base['tokens_per_second']['value']:.0f}"
        table.add_row(f"{temperature:g}", "plain", "", "", "", "1.00", speed, "1.00×", "", style="dim")
        for run in report["runs"]:
            if run["temperature"] == temperature:
                gain = (run["gain_over_baseline_draft"] or {}).get("mean_acceptance_length")
                table.add_row(
                    f"{temperature:g}",
                    _drafter(run),
                    str(run["draft_length"]),
                    _cell(run["alpha"], "{:.2f}", interval=False),
                    _cell(run["draft_acceptance_rate"], "{:.0%}", interval=False),
                    _cell(run["mean_acceptance_length"], "{:.2f}"),
                    f"{run['tokens_per_second']['value']:.0f}",
                    _cell(run["speedup"], "{:.2f}×"),
                    _cell(gain, "{:+.2f}") if gain else "",
                )
        table.add_section()
    (console or Console()).print(table)


def _drafter(run: dict[str, Any]) -> str:
    proposer = run["proposer"]
    if proposer["kind"] != "medusa":
        return {"draft": "draft", "baseline_draft": "stock"}[proposer["kind"]]
    nodes = proposer["tree_nodes"]
    return "medusa" if nodes == run["draft_length"] else f"medusa/{nodes}"


def _prompts(report: dict[str, Any]) -> str:
    decoded, replayed = report["prompts"]["count"], report["prompts"]["replayed"]
    return f"{decoded} prompts" + (f" ({replayed} for α, τ over stock)" if (replayed or 0) > decoded else "")


def _cell(estimate: Estimate | None, form: str, interval: bool = True) -> str:
    if estimate is None or estimate["value"] is None:
        return "–"
    bounds = estimate.get("ci95")
    spread = f" ±{(bounds[1] - bounds[0]) / 2:.2f}" if interval and bounds else ""
    return form.format(estimate["value"]) + spread
