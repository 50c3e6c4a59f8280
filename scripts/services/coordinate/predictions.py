"""Predicted speeds of a pair at every load, from a report of `draftsmith measure`: costs times acceptance.

A round of γ drafted tokens emits τ(γ) tokens for d(γ) + t(γ + 1) + o seconds (`decode/planning/costs.py`). All three
costs grow with the rows decoded together. τ comes from replay, for the request's category if the report has it.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement.costs import CostTable, ValidTable
from draftsmith.decode.validation import MOST, Amount, Count, ServerMessage, read
from draftsmith.scripts.services.coordinate.config import ServedPair
from draftsmith.scripts.services.coordinate.routing import Rates

MOST_ROWS = 1024
"""The most concurrent requests with a tabled speed; beyond the measured batch sizes costs are extrapolated linearly."""


# The parts of a report that predictions read.
class _Estimate(ServerMessage):
    value: Annotated[float, Field(ge=1, le=MOST, allow_inf_nan=False)] | None


class _Figures(ServerMessage):
    mean_acceptance_length: Mapping[int, _Estimate]  # γ → τ


class _Drafter(ServerMessage):
    name: str
    tree_nodes: Annotated[Count, Field(ge=1)] | None


class _Curve(_Figures):
    proposer: _Drafter
    temperature: Amount
    verifier: str
    by_category: Mapping[str, _Figures]


class _Recommendation(ServerMessage):
    proposer: str | None
    draft_length: Count | None


class _Costs(ServerMessage):
    tables: Annotated[Sequence[ValidTable], Field(min_length=1)]


class _Report(ServerMessage):
    is_of: Literal["draftsmith.report/1"] = Field(alias="schema")
    costs: _Costs | None
    curves: Sequence[_Curve]
    recommendation: _Recommendation


def predicted_rates(pair: ServedPair) -> Rates:
    """Return a pair's speeds at every load from its report; InputError if that lacks costs, the drafter or its γ."""
    where = f"pairs.{pair.name}.report"
    path = Path(pair.report or "")
    try:
        report = read(_Report, path, where)
    except FileNotFoundError as error:
        raise InputError(f"{where}: expected a report of `draftsmith measure` at {path}, found none") from error
    if report.costs is None:
        raise InputError(f"{where}: expected costs in {path}, found none (measure without --costs none)")
    tables = report.costs.tables
    if pair.draft_length == 0:
        return Rates({table.temperature: {None: list(_plain(table))} for table in tables})
    return _speculative(pair, report, tables, where)


def _plain(table: CostTable) -> Iterator[float]:
    """Yield the speed of plain decoding for each number of rows."""
    name = next(iter(table.drafters))  # the target's costs are the same with any drafter
    for rows in range(1, MOST_ROWS + 1):
        costs = table.at(name, rows)
        yield 1.0 / (costs.verification(1) + max(costs.plain_overhead, 0.0))  # noise may make the overhead negative


def _speculative(pair: ServedPair, report: _Report, tables: Sequence[CostTable], where: str) -> Rates:
    name = pair.drafter or report.recommendation.proposer
    length = pair.draft_length or report.recommendation.draft_length
    if name is None or length is None:
        raise InputError(f"{where}: expected drafter and draft_length with a report that recommends none, found none")
    curves = [curve for curve in report.curves if curve.proposer.name == name]
    if not curves or any(name not in table.drafters for table in tables):
        found = ", ".join(dict.fromkeys(curve.proposer.name for curve in report.curves)) or "none"
        raise InputError(f"pairs.{pair.name}.drafter: expected one of the report's drafters, {found}, found {name!r}")
    by_temperature = {}
    for temperature in dict.fromkeys(curve.temperature for curve in curves):
        table = next((table for table in tables if table.temperature == temperature), tables[0])
        # At T=0 both verifiers accept the same tokens, and the report has only the probabilistic one.
        by_verifier = {curve.verifier: curve for curve in curves if curve.temperature == temperature}
        curve = by_verifier.get(pair.drafts, next(iter(by_verifier.values())))
        tau = _value(curve, length)
        if tau is None:
            known = ", ".join(str(k) for k in curve.mean_acceptance_length if _value(curve, k)) or "none"
            raise InputError(
                f"pairs.{pair.name}.draft_length: expected one with a τ in the report, {known}, found {length}"
            )
        taus: dict[str | None, float] = {None: tau}
        taus |= {
            category: value for category, figures in curve.by_category.items() if (value := _value(figures, length))
        }
        nodes = curve.proposer.tree_nodes
        seconds = [table.at(name, rows).round_seconds(length, nodes) for rows in range(1, MOST_ROWS + 1)]
        by_temperature[temperature] = {category: [value / s for s in seconds] for category, value in taus.items()}
    return Rates(by_temperature)


def _value(figures: _Figures, length: int) -> float | None:
    """Return τ at one γ; None if the report does not know it."""
    estimate = figures.mean_acceptance_length.get(length)
    return None if estimate is None else estimate.value
