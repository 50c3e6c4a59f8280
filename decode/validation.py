"""Checked reading of others' data: answers of servers and engines, files of earlier runs, manifests.

A reader states what it expects as a pydantic class, or as a dataclass annotated with the types below. JSON types are
strict: a string is not a number, true is not 1, 3.0 is not an integer. NaN and infinity are not numbers.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from draftsmith.decode.errors import InputError

MOST = 2**53  # the largest count: every integer up to it is exact as a float

Count = Annotated[int, Field(ge=0, le=MOST)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Amount = Annotated[float, Field(ge=0, le=MOST, allow_inf_nan=False)]
"""Seconds, bytes, expected counts: from zero to the largest count."""
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]

EXPECTED = {
    "missing": "a value",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a text",
    "list_type": "a list",
    "tuple_type": "a list",
    "too_short": "at least {min_length} of it",
    "greater_than": "more than {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "less_than": "less than {lt:g}",
    "less_than_equal": "at most {le:g}",
    "literal_error": "{expected}",
}
"""Pydantic's types of errors in our words; other types keep pydantic's words."""

T = TypeVar("T")
_adapters: dict[Any, TypeAdapter[Any]] = {}
"""Adapters by class: making one takes a millisecond, using it a thousandth of that."""
_HALF = re.compile("[\ud800-\udfff]")


class ServerMessage(BaseModel):
    """A message expected from a server; a subclass has a field for each value that is read."""

    model_config = ConfigDict(frozen=True, protected_namespaces=())


def parse(kind: type[T], text: str | bytes, where: str, secret: str | None = None) -> T:
    """Return JSON as an instance of a pydantic model, dataclass or `TypedDict`, or a list or dictionary of them.

    Raises:
        InputError: invalid JSON, or the first field that does not match; names `where`, a file or URL, hides `secret`.
    """
    try:
        return _adapter(kind).validate_json(text, strict=True)
    except ValidationError as error:
        raise InputError(_line(error.errors(include_url=False)[0], where, secret)) from None


def parse_answer(kind: type[T], text: str | bytes, where: str, secret: str | None = None) -> T:
    """Return a server's JSON as `parse` does, with U+FFFD for half a surrogate pair."""
    try:
        return parse(kind, text, where, secret)
    except InputError:
        # A server that cuts a text in two may write half a surrogate pair, which Python's JSON reads and Unicode lacks.
        try:
            whole = json.dumps(parse_json(text), ensure_ascii=False)
        except (ValueError, RecursionError):
            whole = ""
        if not _HALF.search(whole):
            raise
        return parse(kind, _HALF.sub("\ufffd", whole), where, secret)


def validate(kind: Any, value: Any, where: str) -> Any:
    """Return a Python value validated as in `parse`; a type with `Strict(False)` takes 3.0 and "3" as 3."""
    try:
        return _adapter(kind).validate_python(value)
    except ValidationError as error:
        raise InputError(_line(error.errors(include_url=False)[0], where, None)) from None


def read(kind: type[T], path: Path, field: str = "") -> T:
    """Return a JSON file's content as `parse` does; messages begin with `field`, the option that named it."""
    return parse(kind, file_bytes(path), ": ".join(filter(None, [field, str(path)])))


def file_bytes(path: Path) -> bytes:
    """Return a file's bytes; raises FileNotFoundError, or an InputError if it cannot be read."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise InputError(f"{path}: expected a file that can be read, found: {error.strerror}") from error


def parse_json(text: str | bytes) -> Any:
    """Return JSON of any shape; raises a JSONDecodeError, also for deep nesting and numbers too long for Python."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise
    except RecursionError as error:
        raise json.JSONDecodeError("nested too deeply", str(text), 0) from error
    except ValueError as error:
        raise json.JSONDecodeError("a number of too many digits", str(text), 0) from error


def require_tokens(ids: Sequence[int], vocab_size: int, where: str) -> None:
    """Raise an `InputError` that names `where` and the first id outside a vocabulary, if any."""
    for token in ids:
        if not 0 <= token < vocab_size:
            raise InputError(f"{where}: expected tokens below {vocab_size}, the target's, found {token}")


def _adapter(kind: Any) -> TypeAdapter[Any]:
    if kind not in _adapters:
        _adapters[kind] = TypeAdapter(kind)
    return _adapters[kind]


def _line(error: ErrorDetails, where: str, secret: str | None) -> str:
    if error["type"] == "json_invalid":
        fault = str(error["ctx"]["error"]).replace("recursion limit exceeded", "nested too deeply")
        return ": ".join(filter(None, [where, f"expected JSON, found: {fault}"]))
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error["loc"]).removeprefix(".")
    context: Mapping[str, Any] = error.get("ctx", {})
    if error["type"] == "value_error":  # one of our own checks, with a complete message
        return ": ".join(filter(None, [where, place, str(context["error"])]))
    words = EXPECTED.get(error["type"])
    expected = error["msg"].removeprefix("Input should be ") if words is None else words.format(**context)
    value = "none" if error["type"] == "missing" else short_text(error["input"], secret)
    return ": ".join(filter(None, [where, place, f"expected {expected}, found {value}"]))


def short_text(value: Any, secret: str | None = None) -> str:
    """Return the beginning of a value on one line, for a message, with a key hidden."""
    words = repr(value)
    return (words.replace(secret, "***") if secret else words)[:60]  # hidden first: a cut may leave half a key
