"""From what was decoded and replayed to `report.json`."""

import json
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

import torch
from transformers import PreTrainedModel

from draftsmith.decode import Counts, Replay
from draftsmith.decode.cache import cached_numbers
from draftsmith.decode.measurement.intervals import Estimate, Interval, difference_interval, ratio, ratio_difference
from draftsmith.decode.measurement.repetition import count_repeated_ngrams
from draftsmith.scripts.measure.estimates import emitted_and_rounds, rows_of, speed, speedup
from draftsmith.scripts.measure.predictions import advice, costs_entry, curve_of, planner_check, predicted_speedup
from draftsmith.scripts.measure.rejections import breaks
from draftsmith.scripts.measure.side_by_side import Group, Method, Row
from draftsmith.scripts.measure.state import PROBABILISTIC, Measured
from draftsmith.scripts.measure.verdict import comparisons, judge
from draftsmith.scripts.pair import STOCK
from draftsmith.train.provenance import environment

SCHEMA = "draftsmith.report/1"


def report_schema() -> dict[str, Any]:
    """Return the JSON Schema of a report (draft 2020-12), which ships with the package."""
    found: dict[str, Any] = json.loads(
        resources.files("draftsmith.scripts.report").joinpath("report.schema.json").read_text(encoding="utf-8")
    )
    return found


def build_report(
    measured: Measured, min_speedup: float | None = None, min_gain: float | None = None, confidence: float = 0.95
) -> dict[str, Any]:
    """Return the report of one run of `measure`; what is not measured is None.

    Intervals are bootstrapped over prompts; comparisons are paired over prompts.
    """
    plain = {(t, b): own for (t, b, method), own in measured.observations.items() if method == Method()}
    runs = [_run(measured, *key, own) for key, own in measured.observations.items() if key[2] != Method()]
    decoded = max(len(rows_of(own)) for own in plain.values())
    lengths = sorted({method.draft_length for _, _, method in measured.observations if method != Method()})
    curves = [curve_of(measured, *key, replay) for key, replay in measured.replays.items()]
    gains = {
        (run["temperature"], run["proposer"]["name"], run["draft_length"]): gain
        for run in runs
        if (gain := _gain(measured, run["temperature"], _method(run), confidence)) is not None
    }
    gate, recommendation = judge(
        runs, measured.observations, gains, min_speedup, min_gain, confidence, advice(curves, runs)
    )
    return {
        "schema": SCHEMA,
        "environment": environment(measured.target.device, measured.dtype),
        "target": {
            "path": measured.target_path,
            "parameters": measured.target.num_parameters(),
            "dtype": measured.dtype,
        },
        "prompts": {
            "path": measured.prompts_path,
            "count": decoded,
            "replayed": len(measured.prompts),
            "categories": {name: len(places) for name, places in measured.categories().items()},
        },
        "baseline": {
            "tokens_per_second": speed([group for own in plain.values() for group in own]),
            "by_temperature": [
                {
                    "temperature": t,
                    "batch_size": b,
                    "tokens_per_second": speed(own),
                    "repeated_ngram_share": _repeated(own),
                }
                for (t, b), own in plain.items()
            ],
        },
        "runs": runs,
        "curves": curves,
        "comparisons": comparisons(measured.replays, lengths),
        "costs": costs_entry(measured),
        "planner_check": planner_check(runs),
        "memory": _memory(measured),
        "breaks": breaks(measured),
        "trees": list(measured.trees),
        "gate": gate,
        "recommendation": recommendation,
    }


def _run(
    measured: Measured, temperature: float, batch_size: int, method: Method, own: Sequence[Group]
) -> dict[str, Any]:
    drafter, rows = measured.drafter(method.drafter), rows_of(own)
    counts = sum((row.counts for row in rows), Counts())
    replay = measured.replays.get((temperature, drafter.name, PROBABILISTIC))
    plain = measured.observations[temperature, batch_size, Method()]
    known = replay or measured.first_heads.get((temperature, drafter.name))
    return {
        "proposer": drafter.to_dict(),
        "draft_length": method.draft_length,
        "rule": "exact",
        "temperature": temperature,
        "batch_size": batch_size,
        "counts": counts.to_dict(),
        "alpha": None if known is None else known.alpha,
        "draft_acceptance_rate": ratio(
            [row.counts.num_accepted_tokens for row in rows], [row.counts.num_draft_tokens for row in rows]
        ),
        "mean_acceptance_length": ratio(*emitted_and_rounds(rows)),
        "acceptance_per_position": counts.acceptance_per_position(),
        "conditional_acceptance": counts.conditional_acceptance(),
        "speedup": speedup(own, plain),
        "predicted_speedup": predicted_speedup(measured, temperature, drafter, method.draft_length, own, plain),
        "tokens_per_second": speed(own),
        "gain_over_baseline_draft": _gains(measured, temperature, batch_size, method, own),
        "replay": None if replay is None else _replayed(measured, replay, rows, method.draft_length, temperature),
        "lossless": measured.lossless[temperature, batch_size, method],
        "by_category": _by_category(measured, own, plain),
        "repeated_ngram_share": _repeated(own),
    }


def _method(run: Mapping[str, Any]) -> Method:
    return Method(run["proposer"]["name"], run["draft_length"])


def _gain(
    measured: Measured, temperature: float, method: Method, confidence: float
) -> tuple[Estimate, Interval | None] | None:
    """Return how much a drafter's replayed τ is above the stock draft's on the same texts, at the same γ.

    Beside the estimate it returns its interval at the confidence level; None where the two cannot be compared.
    """
    own = measured.replays.get((temperature, method.drafter, PROBABILISTIC))
    stock, k = measured.replays.get((temperature, STOCK, PROBABILISTIC)), method.draft_length
    if own is None or stock is None or method.drafter == STOCK or k not in stock.draft_lengths:
        return None
    columns = *own.tokens_and_rounds(k), *stock.tokens_and_rounds(k)
    return ratio_difference(*columns), difference_interval(*columns, confidence=confidence)


def _gains(
    measured: Measured, temperature: float, batch_size: int, method: Method, own: Sequence[Group]
) -> dict[str, Any] | None:
    stock = measured.observations.get((temperature, batch_size, Method(STOCK, method.draft_length)))
    if stock is None or method.drafter == STOCK:
        return None
    gain, _ = _gain(measured, temperature, method, 0.95) or (Estimate(None, None, 0), None)
    return {  # replayed on the same texts for both, without the noise of what each of them happened to decode
        "mean_acceptance_length": gain,
        "decoded_mean_acceptance_length": ratio_difference(
            *emitted_and_rounds(rows_of(own)), *emitted_and_rounds(rows_of(stock))
        ),
        "speedup": speedup(own, stock),
    }


def _replayed(measured: Measured, replay: Replay, rows: Sequence[Row], k: int, temperature: float) -> dict[str, Any]:
    """Return the replayed τ of the target's texts, and whether that of the decoded prompts' agrees with the decoder's.

    At T=0 both are of the same texts, and the rounds must be equal, prompt by prompt. Under sampling the texts differ,
    and in half precision the parallel forward rounds near-ties otherwise: there they agree where the 95 % interval of
    the paired difference holds zero (one honest run in twenty falls outside).
    """
    tokens, rounds = replay.tokens_and_rounds(k)
    agrees: bool | None
    if temperature == 0 and measured.target.dtype in (torch.float32, torch.float64):
        agrees = all(row.counts.num_drafts == rounds[row.prompt] for row in rows)
    else:
        decoded = [tokens[row.prompt] for row in rows], [rounds[row.prompt] for row in rows]
        interval = ratio_difference(*emitted_and_rounds(rows), *decoded).ci95
        agrees = None if interval is None else interval[0] <= 0 <= interval[1]
    return {"mean_acceptance_length": replay.mean_acceptance_length[k], "agrees": agrees}


def _memory(measured: Measured) -> dict[str, Any]:
    def cached(model: PreTrainedModel | None) -> int | None:
        numbers = None if model is None else cached_numbers(model)
        return None if numbers is None else numbers * measured.target.dtype.itemsize

    return {
        "target_bytes": sum(p.numel() * p.element_size() for p in measured.target.parameters()),
        "target_cache_bytes_per_token": cached(measured.target),
        "drafters": {
            drafter.name: {
                "weights_bytes": drafter.weights_bytes,
                # Heads and n-grams keep nothing of the text.
                "cache_bytes_per_token": cached(drafter.model) if "draft" in drafter.kind else 0,
            }
            for drafter in measured.drafters
        },
    }


def _by_category(measured: Measured, own: Sequence[Group], plain: Sequence[Group]) -> dict[str, Any]:
    decoded = {row.prompt for row in rows_of(own)}
    found = {}
    for name, places in measured.categories().items():
        chosen = decoded & set(places)
        if not chosen:
            continue
        rows = [row for row in rows_of(own) if row.prompt in chosen]
        found[name] = {
            "prompts": len(rows),
            "mean_acceptance_length": ratio(*emitted_and_rounds(rows)),
            # Of batches that hold it alone, for a batch has one clock.
            "speedup": _pure_speedup(own, plain, chosen),
        }
    return found


def _pure_speedup(own: Sequence[Group], plain: Sequence[Group], chosen: set[int]) -> Estimate:
    pure = [
        (group, base) for group, base in zip(own, plain, strict=True) if all(row.prompt in chosen for row in group.rows)
    ]
    return speedup([group for group, _ in pure], [base for _, base in pure])


def _repeated(groups: Sequence[Group]) -> float | None:
    counted = [count_repeated_ngrams(row.tokens) for row in rows_of(groups)]
    repeated, total = (sum(x) for x in zip(*counted, strict=True))
    return repeated / total if total else None
