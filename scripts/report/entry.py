"""The base of a report's entries, and the ranges of their values."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeVar


class Limited:
    """Keywords that the JSON Schema has for a value in addition to its type."""

    def __init__(self, **keywords: Any):
        self.keywords = keywords

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        return handler(schema) | self.keywords


class Entry:
    """A part of a report. The schema forbids other keys, and takes its descriptions from the docstrings."""

    __pydantic_config__: ClassVar = {"extra": "forbid", "use_attribute_docstrings": True}


Value = TypeVar("Value")
ByNumber = Annotated[Mapping[int, Value], Limited(propertyNames={"pattern": "^[1-9][0-9]*$"})]
"""A mapping by batch size, draft length or tokens of a forward."""
Name = Annotated[str, Limited(minLength=1)]
"""A drafter's name, short and unique."""
NonEmpty = Annotated[Sequence[Value], Limited(minItems=1)]
Count = Annotated[int, Limited(minimum=0)]
Positive = Annotated[int, Limited(minimum=1)]
NotNegative = Annotated[float, Limited(minimum=0)]
AboveZero = Annotated[float, Limited(exclusiveMinimum=0)]
Share = Annotated[float, Limited(minimum=0, maximum=1)]
Temperature = NotNegative
