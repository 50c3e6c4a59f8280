"""A directory of completions on disk: its manifest and its shards, both written so that a kill damages nothing."""

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NotRequired

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict

from draftsmith.decode.errors import InputError
from draftsmith.decode.validation import Amount, Count, Share, read
from draftsmith.train.files import DISK_FULL, remove, write_atomically
from draftsmith.train.job.lock import lock_directory

SCHEMA = "draftsmith.completions/1"
MANIFEST = "manifest.json"
COLUMNS = pa.schema(
    [
        ("id", pa.string()),
        ("category", pa.string()),  # null if the prompt has none
        ("prompt_length", pa.int32()),
        ("input_ids", pa.list_(pa.int32())),  # prompt and completion, no padding
        # 0 on the prompt, 1 on the completion with its end-of-sequence token; in a given conversation, 1 on every turn
        # of the assistant, and the prompt ends before the first
        ("loss_mask", pa.list_(pa.int8())),
        ("finish_reason", pa.string()),  # "stop": with an end-of-sequence token; "length": cut; "given"
    ]
)
MIXED = COLUMNS.append(pa.field("temperature", pa.float32()))
"""The columns of completions at several temperatures, with the temperature of each."""

MOST_IDS = 2**31
SOURCE_FLAGS = {"answers": "answers", "model": "endpoint_model"}
"""The fields that say where completions come from, and the flags that set them."""

logger = logging.getLogger(__name__)


@with_config(ConfigDict(extra="allow"))
class LawSettings(TypedDict, total=False):
    """The sampling of texts, among other settings."""

    temperature: Amount
    top_k: Count
    top_p: Share


class Named(TypedDict):
    """The schema of a manifest."""

    schema: str


class BaseManifest(Named):
    """The fields of every manifest; those with a `path` are compared by their other entries."""

    target: dict[str, Any]
    versions: dict[str, Any]
    source: NotRequired[dict[str, Any]]
    prompts: NotRequired[dict[str, Any]]


@with_config(ConfigDict(extra="allow"))
class Manifest(BaseManifest):
    """A manifest whose settings are compared and not read."""

    settings: dict[str, Any]


@with_config(ConfigDict(extra="allow"))
class CompletionsManifest(BaseManifest):
    """The manifest of completions."""

    settings: LawSettings
    shards: Count


@contextmanager
def output_directory(output: Path, kept: Callable[[], str], first: bool = True) -> Iterator[None]:
    """Make a directory for shards, remove files that a kill left half written, and report a failure in one line.

    `kept()` says what was written so far, such as "6 of 11 completions", for the message if the disk is full. Of
    several processes, only the `first` makes and tidies the directory, before the others write.
    """
    try:
        with lock_directory(output) if first else nullcontext():
            for leftover in output.glob(".*.partial") if first else ():
                remove(leftover)
            yield
    except KeyboardInterrupt as error:
        error.add_note(f"{kept()} are kept in {output}")
        raise
    except OSError as error:
        if error.errno is None or error.errno not in DISK_FULL:
            raise
        raise InputError(
            f"output: {DISK_FULL[error.errno]} for {output}: {kept()} are kept; "
            "free some space and run the same command again"
        ) from error


def read_shard(
    path: Path, schema: pa.Schema = COLUMNS, *, row_group: int | None = None, columns: list[str] | None = None
) -> pa.Table | None:
    """Read a shard, or some of its columns or one row group; None if it is missing, damaged or of another schema."""
    try:
        # Not pq.read_table: it would take `name=value` in a directory's name for a column.
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            mixed = schema is COLUMNS and file.schema_arrow.equals(MIXED)
            if not mixed and not file.schema_arrow.equals(schema):
                return None
            return file.read(columns) if row_group is None else file.read_row_group(row_group, columns)
    except (OSError, pa.ArrowException):
        return None


def write_shard(path: Path, shard: pa.Table, **options: Any) -> None:
    """Write a shard whole or not at all; `options` are those of `pyarrow.parquet.write_table`."""
    buffer = pa.BufferOutputStream()
    pq.write_table(shard, buffer, compression="zstd", write_page_checksum=True, **options)
    write_atomically(path, buffer.getvalue().to_pybytes())


def completion_files(path: str, unfinished: bool = True) -> list[Path]:
    """Return the shards of a directory of completions; if some are missing, warn, or fail unless `unfinished`."""
    directory = Path(path)
    if not directory.is_dir():
        raise InputError(f"{path}: expected a directory of completions, found none")
    manifest, files = read_manifest(directory), sorted(directory.glob("shard-*.parquet"))
    if manifest is None or not files:
        missing = f"no {MANIFEST}" if manifest is None else "no shards"
        raise InputError(f"{path}: expected completions written by draftsmith prepare, found {missing}")
    if len(files) > manifest["shards"]:
        raise InputError(f"{path}: expected {manifest['shards']} shards, as {MANIFEST} says, found {len(files)}")
    if len(files) < manifest["shards"]:
        if not unfinished:
            raise InputError(
                f"{path}: expected all {manifest['shards']} shards, found {len(files)}; run draftsmith prepare again, "
                "or learn from these with unfinished: true"
            )
        logger.warning("%s: unfinished, %d of %d shards are there", path, len(files), manifest["shards"])
    return files


def check_samples(path: str, ids: pa.ChunkedArray) -> None:
    """Require that the completions of a directory are not empty, and that their ids are unique."""
    if not len(ids):
        raise InputError(f"{path}: expected completions, found shards without samples")
    if pc.count_distinct(ids).as_py() < len(ids):
        names = ids.value_counts()
        twice = names.filter(pc.greater(names.field("counts"), 1)).field("values")
        raise InputError(f"{path}: expected each sample once, found {twice[0].as_py()!r} again")


def read_completions(file: Path, vocab_size: int | None = None) -> pa.Table:
    """Read a shard of completions, and check its samples."""
    shard = read_shard(file)
    if shard is None:
        raise InputError(f"{file}: expected a shard of completions, found a damaged file; run draftsmith prepare again")
    if (fault := _fault(shard, vocab_size)) is not None:
        raise InputError(f"{file}: expected samples as draftsmith prepare writes them, found {fault}")
    return shard


def _fault(shard: pa.Table, vocab_size: int | None) -> str | None:
    """Return the first error in a shard of completions."""
    flat = {name: pc.list_flatten(shard[name]) for name in ("input_ids", "loss_mask")}
    for name in ("id", "prompt_length", "input_ids", "loss_mask"):
        if shard[name].null_count or (name in flat and flat[name].null_count):
            return f"nothing in place of {name}"
    lengths, mask_lengths, prompts = (
        column.to_numpy()
        for column in (
            pc.list_value_length(shard["input_ids"]),
            pc.list_value_length(shard["loss_mask"]),
            shard["prompt_length"],
        )
    )
    ids, mask = (flat[name].to_numpy() for name in ("input_ids", "loss_mask"))
    if (lengths != mask_lengths).any():
        return "a loss_mask of another length than its input_ids"
    if ((prompts < 1) | (prompts > lengths)).any():
        return "a prompt_length that is none of its tokens"
    if ((mask != 0) & (mask != 1)).any():
        return f"{mask[(mask != 0) & (mask != 1)][0]} in loss_mask"
    beyond = (ids < 0) | (ids >= (vocab_size or MOST_IDS))
    if beyond.any():
        return f"token {ids[beyond][0]}" + ("" if vocab_size is None else f" with a vocabulary of {vocab_size}")
    return None


def schema_of(directory: Path) -> str | None:
    """Return the schema that a directory's manifest names; None if there is none."""
    try:
        return read(Named, directory / MANIFEST)["schema"]
    except FileNotFoundError:
        return None


def read_manifest(directory: Path, expected: str = SCHEMA, kind: Any = None) -> dict[str, Any] | None:
    """Read a directory's manifest of a schema, as a kind of `BaseManifest`; None if there is none.

    Raises:
        InputError: the file is no JSON, of another schema, or lacks a field.
    """
    path, schema = directory / MANIFEST, schema_of(directory)
    if schema is None:
        return None
    if schema != expected:
        raise InputError(f"{path}: expected schema {expected!r}, found {schema!r}")
    if kind is None:
        kind = CompletionsManifest if expected == SCHEMA else Manifest
    manifest: dict[str, Any] = read(kind, path)
    return manifest


def settle_manifest(directory: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest of a new directory, or require that the one there has the same settings and inputs.

    `settings` must agree field by field. Fields with a `path`, such as `prompts` and `target`, are compared without it,
    and `source` without its `endpoint`, since files and servers may move. Other `versions` give only a warning:
    libraries may sample differently, but a long run should survive an upgrade.
    """
    before = read_manifest(directory, manifest["schema"])
    if before is None:
        if any(directory.glob("*shard-*.parquet")):
            raise InputError(f"output: expected {MANIFEST} with the shards in {directory}, found none")
        write_atomically(directory / MANIFEST, json.dumps(manifest, indent=2) + "\n")
        return
    way_out = f"; {directory} was begun with other settings: give another --output, or remove it"
    sources = [written.get("source", {}) for written in (before, manifest)]
    compared = [(flag, *(side.get(name) for side in sources)) for name, flag in SOURCE_FLAGS.items()]
    compared += [(name, before["settings"].get(name), value) for name, value in manifest["settings"].items()]
    for name, old, new in compared:
        if old != new:
            raise InputError(f"{name}: expected {old!r}, found {new!r}{way_out}")
    for name in sorted(name for name, value in manifest.items() if isinstance(value, dict) and "path" in value):
        previous = before[name] if isinstance(before.get(name), dict) else {}
        for part in sorted((manifest[name].keys() | previous.keys()) - {"path"}):
            old, new = previous.get(part), manifest[name].get(part)
            if old != new:
                raise InputError(
                    f"{name}: expected {previous.get('path')} as it was ({part}: {old}), "
                    f"found {manifest[name]['path']} ({part}: {new}){way_out}"
                )
    if before["versions"] != manifest["versions"]:
        logger.warning("%s: begun with %s, resumed with %s", directory, before["versions"], manifest["versions"])
