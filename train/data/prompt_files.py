"""Records of prompts, read from files, directories and data sets on the hub, each with its place for error messages."""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from draftsmith.decode.errors import InputError, first_line
from draftsmith.decode.validation import parse_json

Located = tuple[str, Any]  # a record's place, such as "prompts.jsonl:7", and the record


def read_records(source: str, split: str) -> Iterator[Located]:
    """Return the records of a file, a directory or a hub id, `NAME` or `NAME:CONFIG`."""
    path = Path(source)
    readers: dict[str, Callable[[Path], Iterator[Located]]] = {
        ".jsonl": _jsonl,
        ".json": _json,
        ".txt": _lines_as_prompts,
        ".md": _lines_as_prompts,
        ".parquet": _parquet,
    }
    reader = readers.get(path.suffix.lower())
    if path.is_file():
        if reader is None:
            raise InputError(
                f"{source}: expected a file named {', '.join(readers)}, found {path.suffix or path.name!r}"
            )
        return reader(path)
    # A path that looks local but is missing would otherwise be looked up on the hub: a slow and confusing failure.
    looks_local = path.is_absolute() or source.startswith(".") or source.count("/") > 1
    if not source or (not path.is_dir() and (reader is not None or looks_local)):
        raise InputError(f"{source}: expected a file of prompts, found nothing there")
    return _dataset(source, split)


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: expected a readable file, found: {error.strerror}") from error
    # Split bytes, not text: str.splitlines also cuts at U+2028, which JSON allows inside a string.
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        where = f"{path}:{number}"
        try:
            yield where, line.removesuffix(b"\r").decode("utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"{where}: expected UTF-8, found byte 0x{line[error.start]:02x}") from error


def _lines_as_prompts(path: Path) -> Iterator[Located]:
    return ((where, {"prompt": line}) for where, line in _lines(path) if line.strip())


def _jsonl(path: Path) -> Iterator[Located]:
    for where, line in _lines(path):
        if line.strip():
            try:
                yield where, parse_json(line)
            except json.JSONDecodeError as error:
                raise InputError(
                    f"{where}: expected a JSON object, found: {error.msg} (column {error.colno})"
                ) from error


def _json(path: Path) -> Iterator[Located]:
    text = "\n".join(line for _, line in _lines(path)).strip()
    if text[:1] not in {"", "["}:
        raise InputError(
            f"{path}: expected an array of records, found {text[0]!r} (a file of one record a line is named .jsonl)"
        )
    try:
        return _rows(parse_json(text or "[]"), str(path))
    except json.JSONDecodeError as error:
        raise InputError(f"{path}:{error.lineno}: expected JSON, found: {error.msg} (column {error.colno})") from error


def _parquet(path: Path) -> Iterator[Located]:
    try:
        with pq.ParquetFile(path) as file:
            rows = (row for batch in file.iter_batches() for row in map(_without_nulls, batch.to_pylist()))
            yield from _rows(rows, str(path))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: expected a Parquet file, found: {first_line(error)}") from error


def _dataset(source: str, split: str) -> Iterator[Located]:
    # A directory may have a colon in its name; a hub id may not.
    name, _, config = (source, "", "") if Path(source).is_dir() else source.partition(":")
    import datasets  # takes most of a second, which a prompt from the command line should not wait for

    try:
        dataset = datasets.load_dataset(name, config or None, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise InputError(
            f"{source}: expected a file, a directory or a data set with split {split!r}, found: {first_line(error)}"
        ) from error
    return _rows(map(_without_nulls, dataset), f"{source}[{split}]")


def _without_nulls(value: Any, in_tools: bool = False) -> Any:
    """Return a row without null keys in its tools and calls: Arrow gives each object the keys of all rows."""
    if isinstance(value, dict):
        return {
            name: _without_nulls(item, in_tools or name in ("tools", "tool_calls", "functions"))
            for name, item in value.items()
            if not in_tools or item is not None
        }
    return [_without_nulls(item, in_tools) for item in value] if isinstance(value, list) else value


def _rows(rows: Iterable[Any], source: str) -> Iterator[Located]:
    return ((f"{source}: row {number}", row) for number, row in enumerate(rows, start=1))
