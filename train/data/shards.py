"""A directory of completions on disk: its manifest, its shards, both written so that a kill harms nothing."""

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
from draftsmith.train.files import NO_ROOM, remove, write_aside
from draftsmith.train.job.lock import locked

SCHEMA = "draftsmith.completions/1"
MANIFEST = "manifest.json"
COLUMNS = pa.schema(
    [
        ("id", pa.string()),
        ("category", pa.string()),  # null where the prompt has none
        ("prompt_length", pa.int32()),
        ("input_ids", pa.list_(pa.int32())),  # prompt and completion, no padding
        # 0 on the prompt, 1 on the completion, its end-of-sequence token included; of a given conversation, 1 on every
        # turn of the assistant's, and the prompt ends where the first begins
        ("loss_mask", pa.list_(pa.int8())),
        ("finish_reason", pa.string()),  # "stop": it ended with an end-of-sequence token; "length": it was cut; "given"
    ]
)
MIXED = COLUMNS.append(pa.field("temperature", pa.float32()))
"""Of completions at several temperatures, which say at which each was written."""

MOST_IDS = 2**31
UNNAMED: dict[str, Any] = {
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "system_prompt": None,
    "chat_template_kwargs": {},
    "target_quantization": None,
    "temperatures": [],
    "window": False,
}
"""Settings that older manifests do not name, and what they were."""
SOURCE_FLAGS = {"answers": "answers", "model": "endpoint_model"}
"""What says where completions come from, and the flags that set it."""

logger = logging.getLogger(__name__)


class CompletionsRef(TypedDict):
    """Completions that a cache is of."""

    path: str
    sha256: str
    """Of their manifest."""


@with_config(ConfigDict(extra="allow"))
class LawSettings(TypedDict, total=False):
    """The law that texts were sampled by, among other settings."""

    temperature: Amount
    top_k: Count
    top_p: Share


class Named(TypedDict):
    """What says of which kind a manifest is."""

    schema: str


class BaseManifest(Named):
    """What every manifest has; what has a `path` is compared by what else is said of it."""

    target: dict[str, Any]
    versions: dict[str, Any]
    source: NotRequired[dict[str, Any]]
    prompts: NotRequired[dict[str, Any]]


@with_config(ConfigDict(extra="allow"))
class Manifest(BaseManifest):
    """One whose settings are compared, and not read."""

    settings: dict[str, Any]
    completions: NotRequired[list[CompletionsRef]]


@with_config(ConfigDict(extra="allow"))
class CompletionsManifest(BaseManifest):
    """That of completions."""

    settings: LawSettings
    shards: Count


@contextmanager
def output_directory(output: Path, kept: Callable[[], str], first: bool = True) -> Iterator[None]:
    """Make a directory to write shards in, without what a kill left half written, and tell of a failure in one line.

    Args:
        output: the directory; its parents are made too.
        kept: says what is there when the disk is full, such as "6 of 11 completions".
        first: of several processes that write there, one alone makes it and tidies it up, before the others write.

    Raises:
        InputError: the directory cannot be made or written in, another run writes there, or the disk is full; what
            was written is kept.
    """
    try:
        with locked(output) if first else nullcontext():
            for leftover in output.glob(".*.partial") if first else ():
                remove(leftover)
            yield
    except KeyboardInterrupt as error:
        error.add_note(f"{kept()} are kept in {output}")
        raise
    except OSError as error:
        if error.errno is None or error.errno not in NO_ROOM:
            raise
        raise InputError(
            f"output: {NO_ROOM[error.errno]} for {output}: {kept()} are kept; "
            "free some space and run the same command again"
        ) from error


def read_shard(
    path: Path, schema: pa.Schema = COLUMNS, *, row_group: int | None = None, columns: list[str] | None = None
) -> pa.Table | None:
    """Read a shard, checksums and all; None where there is none, or one that is cut, damaged or of other columns.

    Args:
        path: the file.
        schema: of completions, or of a teacher cache.
        row_group: read this one alone.
        columns: read these alone.
    """
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
    """Write a shard whole or not at all; `options` are those of `pyarrow.parquet.write_table`.

    Raises:
        OSError: the disk is full, or cannot be written; nothing is left behind.
    """
    buffer = pa.BufferOutputStream()
    pq.write_table(shard, buffer, compression="zstd", write_page_checksum=True, **options)
    write_aside(path, buffer.getvalue().to_pybytes())


def completion_files(path: str, unfinished: bool = True) -> list[Path]:
    """Return the shards of a directory of completions.

    Args:
        path: the directory.
        unfinished: where shards are missing, return those that are there, with a warning.

    Raises:
        InputError: no such directory, no manifest or one of another schema, no shards, or not all of them.
    """
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
                "or learn from these with --unfinished"
            )
        logger.warning("%s: unfinished, %d of %d shards are there", path, len(files), manifest["shards"])
    return files


def read_completions(file: Path, vocab_size: int | None = None) -> pa.Table:
    """Read a shard of completions.

    Args:
        file: the shard.
        vocab_size: what the ids of its tokens must be below; not looked at if None.

    Raises:
        InputError: names the file, which is damaged or holds what `prepare` does not write.
    """
    shard = read_shard(file)
    if shard is None:
        raise InputError(f"{file}: expected a shard of completions, found a damaged file; run draftsmith prepare again")
    if (fault := _fault(shard, vocab_size)) is not None:
        raise InputError(f"{file}: expected samples as draftsmith prepare writes them, found {fault}")
    return shard


def _fault(shard: pa.Table, vocab_size: int | None) -> str | None:
    """Return the first thing in a shard of completions that cannot be."""
    flat = {name: pc.list_flatten(shard[name]) for name in ("input_ids", "loss_mask")}
    for name in ("id", "prompt_length", "input_ids", "loss_mask"):
        if shard[name].null_count or (name in flat and flat[name].null_count):
            return f"nothing in place of {name}"
    lengths, masked, prompts = (
        column.to_numpy()
        for column in (
            pc.list_value_length(shard["input_ids"]),
            pc.list_value_length(shard["loss_mask"]),
            shard["prompt_length"],
        )
    )
    ids, mask = (flat[name].to_numpy() for name in ("input_ids", "loss_mask"))
    if (lengths != masked).any():
        return "a loss_mask of another length than its input_ids"
    if ((prompts < 1) | (prompts > lengths)).any():
        return "a prompt_length that is none of its tokens"
    if ((mask != 0) & (mask != 1)).any():
        return f"{mask[(mask != 0) & (mask != 1)][0]} in loss_mask"
    beyond = (ids < 0) | (ids >= (vocab_size or MOST_IDS))
    if beyond.any():
        return f"token {ids[beyond][0]}" + ("" if vocab_size is None else f" beside a vocabulary of {vocab_size}")
    return None


def read_manifest(directory: Path, expected: str = SCHEMA, kind: Any = None) -> dict[str, Any] | None:
    """Read the manifest of a directory of completions, or of another schema; None where there is none.

    Args:
        directory: where it lies.
        expected: its schema.
        kind: what else it says, a kind of `BaseManifest`.

    Raises:
        InputError: it is no JSON, of another schema, or without a field.
    """
    path = directory / MANIFEST
    try:
        found = read(Named, path)["schema"]
    except FileNotFoundError:
        return None
    if found != expected:
        raise InputError(f"{path}: expected schema {expected!r}, found {found!r}")
    if kind is None:
        kind = CompletionsManifest if expected == SCHEMA else Manifest
    manifest: dict[str, Any] = read(kind, path)
    return manifest


def settle_manifest(directory: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest of a new directory, or require that the one there was begun from the same settings and inputs.

    Of completions, of teacher caches and of what `measure` has finished. `settings` must agree field by field;
    `completions`, and whatever has a `path`, such as `prompts` and `target`, by everything but that, and `source` by
    everything but its `endpoint`, since files and servers may move. Other `versions` are warned of: libraries may
    sample otherwise, and a long run should survive an upgrade.

    Raises:
        InputError: names the first difference, and the way out.
        OSError: the disk is full, or cannot be written.
    """
    before = read_manifest(directory, manifest["schema"])
    if before is None:
        if any(directory.glob("*shard-*.parquet")):
            raise InputError(f"output: expected {MANIFEST} beside the shards in {directory}, found none")
        write_aside(directory / MANIFEST, json.dumps(manifest, indent=2) + "\n")
        return
    way_out = f"; {directory} was begun otherwise: give another --output, or remove it"
    source = {"answers": "target"}  # what manifests without it mean
    sources = [each.get("source", source) for each in (before, manifest)]
    settings = UNNAMED | before["settings"]
    compared = [(flag, *(each.get(name) for each in sources)) for name, flag in SOURCE_FLAGS.items()]
    compared += [(name, settings.get(name), value) for name, value in manifest["settings"].items()]
    for name, then, now in compared:
        if then != now:
            raise InputError(f"{name}: expected {then!r}, found {now!r}{way_out}")
    for name in sorted(name for name, value in manifest.items() if isinstance(value, dict) and "path" in value):
        was = before[name] if isinstance(before.get(name), dict) else {}
        for part in sorted((manifest[name].keys() | was.keys()) - {"path"}):
            then, now = was.get(part), manifest[name].get(part)
            if then != now:
                raise InputError(
                    f"{name}: expected {was.get('path')} as it was ({part}: {then}), "
                    f"found {manifest[name]['path']} ({part}: {now}){way_out}"
                )
    parts = [each.get("completions", []) for each in (before, manifest)]
    if [part["sha256"] for part in parts[0]] != [part["sha256"] for part in parts[1]]:
        then, now = (", ".join(part["path"] for part in each) for each in parts)
        raise InputError(f"completions: expected {then} as they were, found {now}{way_out}")
    if before["versions"] != manifest["versions"]:
        logger.warning("%s: begun with %s, resumed with %s", directory, before["versions"], manifest["versions"])
