"""Checked reading of what others wrote: answers of servers and engines, files of earlier runs, manifests.

A reader says what it expects as a class of pydantic's, or as a dataclass whose fields are annotated with the types
below; `parsed` returns an instance, or says in one line which field is otherwise. JSON's types are taken as they are: a
text is no number, true is no 1, 3.0 is no whole number, and NaN and infinity are no numbers. Other fields are
ignored.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from draftsmith.decode.errors import InputError

MOST = 2**53
"""The largest count: every whole number up to it is one in a float, too."""

Count = Annotated[int, Field(ge=0, le=MOST)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Amount = Annotated[float, Field(ge=0, le=MOST, allow_inf_nan=False)]
"""Seconds, bytes, expected counts: nothing below zero, nor beyond what is counted."""
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
"""Pydantic's kinds of errors in our words; of others its own are taken."""

T = TypeVar("T")
_adapters: dict[Any, TypeAdapter[Any]] = {}
"""By class: to make one takes a millisecond, to use it a thousandth."""
_HALF = re.compile("[\ud800-\udfff]")


class Said(BaseModel):
    """What a server is expected to say; a subclass has a field for each thing that is read."""

    model_config = ConfigDict(frozen=True, protected_namespaces=())


def parsed(kind: type[T], text: str | bytes, where: str, secret: str | None = None) -> T:
    """Return what JSON says, as an instance of a class.

    Args:
        kind: a pydantic model, a dataclass, a `TypedDict`, or a list or dictionary of them.
        text: the JSON.
        where: the file or URL, for the message.
        secret: a key, which some servers repeat: it is not shown.

    Raises:
        InputError: it is no JSON, nested too deeply (200), or otherwise than the class says; names the first field.
    """
    try:
        return _adapter(kind).validate_json(text, strict=True)
    except ValidationError as error:
        raise InputError(_line(error.errors(include_url=False)[0], where, secret)) from None


def answered(kind: type[T], text: str | bytes, where: str, secret: str | None = None) -> T:
    """Return what a server's JSON says, as `parsed` does.

    A server that cuts a text in two may write half of a surrogate pair, which Python's JSON has and Unicode has not:
    U+FFFD stands for it.
    """
    try:
        return parsed(kind, text, where, secret)
    except InputError:
        try:
            whole = json.dumps(parse_json(text), ensure_ascii=False)
        except (ValueError, RecursionError):
            whole = ""
        if not _HALF.search(whole):
            raise
        return parsed(kind, _HALF.sub("\ufffd", whole), where, secret)


def checked(kind: Any, value: Any, where: str) -> Any:
    """Return a value that is no JSON, as `parsed` does; a type with `Strict(False)` takes 3.0 and "3" for a 3."""
    try:
        return _adapter(kind).validate_python(value)
    except ValidationError as error:
        raise InputError(_line(error.errors(include_url=False)[0], where, None)) from None


def read(kind: type[T], path: Path, field: str = "") -> T:
    """Return what a JSON file says, as `parsed` does.

    Args:
        kind: as of `parsed`.
        path: the file.
        field: the option that named it, for the message.

    Raises:
        FileNotFoundError: there is none.
        InputError: it cannot be read, or says something else; names the file and the field.
    """
    return parsed(kind, file_bytes(path), ": ".join(filter(None, [field, str(path)])))


def file_bytes(path: Path) -> bytes:
    """Return a file's bytes.

    Raises:
        FileNotFoundError: there is none.
        InputError: it cannot be read.
    """
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise InputError(f"{path}: expected a file that can be read, found: {error.strerror}") from error


def parse_json(text: str | bytes) -> Any:
    """Return what JSON says, where no class says what is expected of it.

    Raises:
        JSONDecodeError: it is none, or nested too deeply, or holds a number of too many digits for Python.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise
    except RecursionError as error:
        raise json.JSONDecodeError("nested too deeply", str(text), 0) from error
    except ValueError as error:
        raise json.JSONDecodeError("a number of too many digits", str(text), 0) from error


def require_tokens(ids: Sequence[int], vocab_size: int, where: str) -> None:
    """Require that ids are a vocabulary's.

    Raises:
        InputError: names `where` and the first that is not.
    """
    for token in ids:
        if not 0 <= token < vocab_size:
            raise InputError(f"{where}: expected tokens below {vocab_size}, the target's, found {token}")


def _adapter(kind: Any) -> TypeAdapter[Any]:
    if kind not in _adapters:
        _adapters[kind] = TypeAdapter(kind)
    return _adapters[kind]


def _line(error: ErrorDetails, where: str, secret: str | None) -> str:
    """Return one of pydantic's errors in one line."""
    if error["type"] == "json_invalid":
        found = str(error["ctx"]["error"]).replace("recursion limit exceeded", "nested too deeply")
        return ": ".join(filter(None, [where, f"expected JSON, found: {found}"]))
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error["loc"]).removeprefix(".")
    context: Mapping[str, Any] = error.get("ctx", {})
    if error["type"] == "value_error":  # of a check of ours, which says all of it
        return ": ".join(filter(None, [where, place, str(context["error"])]))
    words = EXPECTED.get(error["type"])
    expected = error["msg"].removeprefix("Input should be ") if words is None else words.format(**context)
    found = "none" if error["type"] == "missing" else shown(error["input"], secret)
    return ": ".join(filter(None, [where, place, f"expected {expected}, found {found}"]))


def shown(value: Any, secret: str | None = None) -> str:
    """Return the beginning of a value on one line, for a message, without a key."""
    words = repr(value)
    return (words.replace(secret, "***") if secret else words)[:60]  # before it is cut, which may leave half a key
