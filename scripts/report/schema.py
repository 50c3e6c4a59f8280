"""The JSON Schema of a report (draft 2020-12), generated from its dataclasses.

`python -m draftsmith.scripts.report.schema` writes the file that ships with the package.
"""

import json
from dataclasses import fields
from importlib import resources
from pathlib import Path
from typing import Any

from draftsmith.decode import Counts
from draftsmith.decode.measurement.certificate import Certificate
from draftsmith.decode.measurement.costs import CostTable, DraftCosts
from draftsmith.decode.measurement.intervals import Estimate
from draftsmith.scripts.kinds import REPORTED
from draftsmith.scripts.report.types import SCHEMA, Gate, ProposerEntry, Recommendation, Report, SettingVerdict, Speed

PATH = Path(__file__).with_name("report.schema.json")

Keywords = dict[str, Any]
NULL, NUMBER, TEXT, BOOLEAN = ({"type": name} for name in ("null", "number", "string", "boolean"))
AT_LEAST_0, AT_LEAST_1, SHARE = {"minimum": 0}, {"minimum": 1}, {"minimum": 0, "maximum": 1}


def _properties(**properties: Keywords) -> Keywords:
    return {"properties": properties}


def _values(keywords: Keywords) -> Keywords:
    return {"additionalProperties": keywords}


def _figures_of_kinds() -> list[Keywords]:
    """Return rules by which each figure is a number for kinds that have it, and null for the others.

    There is no rule for the nodes of a tree if a kind drafts with or without one.
    """
    rules: list[Keywords] = []
    for figure in (field.name for field in fields(ProposerEntry) if field.default is None):
        having = [name for name, kind in REPORTED.items() if kind is not None and figure in kind.figures]
        free = [
            name for name, kind in REPORTED.items() if figure == "tree_nodes" and kind is not None and kind.tree_key
        ]
        lacking = [name for name in REPORTED if name not in having + free]
        for names, value in ((having, NUMBER), (lacking, NULL)):
            rules.append({"if": _properties(kind={"enum": names}), "then": _properties(**{figure: value})})
    return rules


RULES: dict[type, Keywords] = {
    Estimate: {"if": _properties(value=NULL), "then": _properties(ci95=NULL)},
    Speed: _properties(value=NUMBER | {"exclusiveMinimum": 0}),
    ProposerEntry: {"allOf": _figures_of_kinds()},
    Certificate: {
        **_properties(
            prompts_identical=AT_LEAST_0, near_ties=AT_LEAST_0, departures=AT_LEAST_0, p_value=SHARE, tokens=AT_LEAST_0
        ),
        "if": _properties(checked={"const": False}),
        "then": _properties(identical=NULL, p_value=NULL, passed=NULL, reason=TEXT),
        "else": _properties(passed=BOOLEAN),
    },
    Gate: {
        "if": _properties(passed={"const": True}),
        "then": _properties(failures={"maxItems": 0}),
        "else": _properties(failures={"minItems": 1}),
    },
    Recommendation: {
        "if": _properties(go={"const": True}),
        "then": _properties(proposer=TEXT, draft_length=NUMBER, batch_size=NUMBER, temperature=NUMBER),
    },
    SettingVerdict: {
        "if": _properties(go={"const": True}),
        "then": _properties(proposer=TEXT, draft_length=NUMBER),
    },
    Counts: _values({**AT_LEAST_0, "items": AT_LEAST_0}),
    DraftCosts: _properties(start=AT_LEAST_0, step=AT_LEAST_0, prefill=AT_LEAST_0),
    CostTable: _properties(
        context=AT_LEAST_1,
        temperature=AT_LEAST_0,
        prompt=AT_LEAST_1,
        target_seconds=_values(_values(AT_LEAST_0)),
        prefill_seconds=_values(AT_LEAST_0),
    ),
}
"""Rules that types cannot express: relations between fields, and ranges in classes of other packages."""


def report_schema() -> dict[str, Any]:
    """Return the JSON Schema of a report, as it ships with the package."""
    source = resources.files("draftsmith.scripts.report").joinpath(PATH.name).read_text(encoding="utf-8")
    schema: dict[str, Any] = json.loads(source)
    return schema


def generated_schema() -> dict[str, Any]:
    """Return the JSON Schema of `Report`, in which objects have all their keys and no others, and `RULES` hold."""
    from pydantic import TypeAdapter

    schema = TypeAdapter(Report).json_schema(mode="serialization")
    for part in (schema, *schema["$defs"].values()):
        part |= {"additionalProperties": False, "required": list(part["properties"])}
        for field in part["properties"].values():
            for noise in ("title", "default"):
                field.pop(noise, None)
    for kind, rule in RULES.items():
        schema["$defs"][kind.__name__]["allOf"] = [rule]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": SCHEMA}


if __name__ == "__main__":
    PATH.write_text(json.dumps(generated_schema(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
