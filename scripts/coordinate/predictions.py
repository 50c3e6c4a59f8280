"""Speeds of a pair at every load, from the report that `draftsmith measure` left: costs times acceptance.

A round of γ drafted tokens emits τ(γ) tokens for d(γ) + t(γ + 1) + o seconds (`decode/planner.py`), and all three grow
with the rows that are decoded together. τ is replayed, and of a request's category where the report knows it.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement.costs import CostTable
from draftsmith.decode.validation import parse_json
from draftsmith.scripts.coordinate.config import Pair
from draftsmith.scripts.coordinate.rates import Rates

SCHEMA = "draftsmith.report/1"
MOST_ROWS = 1024
"""Requests at once that speeds are tabled for; beyond the measured batch sizes costs are a line."""


def predicted_rates(pair: Pair) -> Rates:
    """Return how fast a pair writes at every load, as its report has it.

    Args:
        pair: says which report, and which drafter and draft length its servers run.

    Raises:
        InputError: no such report, or one without costs, or without this drafter or draft length.
    """
    where = f"pairs.{pair.name}.report"
    path = Path(pair.report or "")
    try:
        report: Any = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{where}: expected a report of `draftsmith measure` at {path}, found: {error}") from error
    if not isinstance(report, dict) or report.get("schema") != SCHEMA:
        raise InputError(f"{where}: expected schema {SCHEMA} in {path}, found another")
    try:
        if report["costs"] is None:
            raise InputError(f"{where}: expected costs in {path}, found none (measure without --measure_costs false)")
        tables = [CostTable.from_dict(table) for table in report["costs"]["tables"]]
        if pair.draft_length == 0:
            return Rates({table.temperature: {None: list(_plain(table))} for table in tables})
        return _speculative(pair, report, tables, where)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise InputError(f"{where}: expected a whole report in {path}, found one with {error!r}") from error


def _plain(table: CostTable) -> Iterator[float]:
    """Give the speed of plain decoding for each number of rows."""
    name = next(iter(table.drafters))  # the target's costs are the same beside any
    for rows in range(1, MOST_ROWS + 1):
        costs = table.at(name, rows)
        yield 1.0 / (costs.verification(1) + max(costs.plain_overhead, 0.0))  # noise may leave it below zero


def _speculative(pair: Pair, report: Mapping[str, Any], tables: list[CostTable], where: str) -> Rates:
    recommended = report["recommendation"]
    name = pair.drafter or recommended["proposer"]
    length = pair.draft_length or recommended["draft_length"]
    if name is None or length is None:
        raise InputError(f"{where}: expected drafter and draft_length beside a report that recommends none, found none")
    curves = [curve for curve in report["curves"] if curve["proposer"]["name"] == name]
    if not curves:
        found = ", ".join(dict.fromkeys(curve["proposer"]["name"] for curve in report["curves"])) or "none"
        raise InputError(f"pairs.{pair.name}.drafter: expected one of the report's drafters, {found}, found {name!r}")
    by_temperature = {}
    for temperature in dict.fromkeys(curve["temperature"] for curve in curves):
        table = next((table for table in tables if table.temperature == temperature), tables[0])
        # At T=0 both verifiers accept the same, and the report has the probabilistic one alone.
        of_it = {curve["verifier"]: curve for curve in curves if curve["temperature"] == temperature}
        curve = of_it.get(pair.drafts, next(iter(of_it.values())))
        if str(length) not in curve["mean_acceptance_length"]:
            known = ", ".join(curve["mean_acceptance_length"])
            raise InputError(
                f"pairs.{pair.name}.draft_length: expected one that the report has, {known}, found {length}"
            )
        lengths = {None: curve["mean_acceptance_length"]} | {
            category: figures["mean_acceptance_length"] for category, figures in curve["by_category"].items()
        }
        nodes = curve["proposer"]["tree_nodes"]
        seconds = [table.at(name, rows).round_seconds(length, nodes) for rows in range(1, MOST_ROWS + 1)]
        by_temperature[temperature] = {
            category: [emitted / round_seconds for round_seconds in seconds]
            for category, estimates in lengths.items()
            if (emitted := estimates[str(length)]["value"]) is not None
        }
    return Rates(by_temperature)
