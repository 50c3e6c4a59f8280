"""The JSON Schema of a report (draft 2020-12), generated from its dataclasses.

`python -m draftsmith.scripts.report.schema` writes the file that ships with the package.
"""

import json
from importlib import resources
from pathlib import Path
from typing import Any

from draftsmith.scripts.report.types import SCHEMA, Report

PATH = Path(__file__).with_name("report.schema.json")


def report_schema() -> dict[str, Any]:
    """Return the JSON Schema of a report, as it ships with the package."""
    source = resources.files("draftsmith.scripts.report").joinpath(PATH.name).read_text(encoding="utf-8")
    schema: dict[str, Any] = json.loads(source)
    return schema


def generated_schema() -> dict[str, Any]:
    """Return the JSON Schema of `Report`, in which objects have all their keys and no others."""
    from pydantic import TypeAdapter

    schema = TypeAdapter(Report).json_schema(mode="serialization")
    for part in (schema, *schema["$defs"].values()):
        part |= {"additionalProperties": False, "required": list(part["properties"])}
        for field in part["properties"].values():
            for noise in ("title", "default"):
                field.pop(noise, None)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": SCHEMA}


if __name__ == "__main__":
    PATH.write_text(json.dumps(generated_schema(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
