"""The JSON Schema of a report (draft 2020-12), generated from its dataclasses."""

from typing import Any

from pydantic import TypeAdapter

from draftsmith.scripts.report.types import SCHEMA, Report


def report_schema() -> dict[str, Any]:
    """Return the JSON Schema of `Report`, in which objects have all their keys and no others."""
    schema = TypeAdapter(Report).json_schema(mode="serialization")
    for part in (schema, *schema["$defs"].values()):
        part |= {"additionalProperties": False, "required": list(part["properties"])}
        for field in part["properties"].values():
            for noise in ("title", "default"):
                field.pop(noise, None)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": SCHEMA}
