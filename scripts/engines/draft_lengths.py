"""draft_lengths.json: γ by batch size, in the form that vLLM loads.

`measure` writes it, and `export --draft_lengths` puts it into a launch line. vLLM takes the draft length of a step from
the number of requests in it (0.32: `vllm/v1/spec_decode/dynamic/utils.py`), by inclusive ranges from 1; the last one's
length also holds beyond it.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field
from typing_extensions import TypedDict

from draftsmith.decode.errors import InputError
from draftsmith.decode.validation import Amount, Count, parse_json, read

SCHEMA = "draftsmith.draft_lengths/1"
NUM, BY_BATCH_SIZE = "num_speculative_tokens", "num_speculative_tokens_per_batch_size"
"""Keys of vLLM's speculative config."""

ALIKE = 0.99  # the share of the best goodput at which the draft length of the next smaller batch is kept

Range = tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)], Count]


def _joined(ranges: list[Range]) -> list[Range]:
    """Return the ranges; raise ValueError if they have gaps or do not begin at 1."""
    ends = [0, *(last for _, last, _ in ranges)]
    for (first, last, _), before in zip(ranges, ends, strict=False):
        if first != before + 1 or last < first:
            raise ValueError(f"expected a range that begins at {before + 1}, found {first} to {last}")
    return ranges


class DrafterLengths(TypedDict):
    """One drafter's γ by batch size."""

    path: str | None
    temperatures: list[Amount]
    num_speculative_tokens: Count
    num_speculative_tokens_per_batch_size: Annotated[list[Range], Field(min_length=1), AfterValidator(_joined)]


class DraftLengths(TypedDict):
    """The contents of the file."""

    schema: Literal["draftsmith.draft_lengths/1"]
    target: str
    drafters: dict[str, DrafterLengths]


def chosen_lengths(goodput: Mapping[int, Mapping[int, float]]) -> dict[int, int]:
    """Return by batch size the draft length of the greatest goodput, or the previous size's if it is about as good.

    `goodput` is by batch size, then draft length, where 0 is plain decoding.
    """
    chosen, kept = dict[int, int](), None
    for rows, by_length in sorted(goodput.items()):
        best = max(by_length, key=lambda k: by_length[k])
        if kept is None or by_length[kept] < ALIKE * by_length[best]:
            kept = best
        chosen[rows] = kept
    return chosen


def ranges(chosen: Mapping[int, int], most: int) -> list[Range]:
    """Return ranges of batch sizes with one draft length, (first, last, γ), without gaps, from 1 to `most`."""
    merged: list[Range] = []
    sizes = sorted(chosen)
    for rows, following in zip([1, *sizes[1:]], [*sizes[1:], most + 1], strict=True):
        length = chosen[max(rows, sizes[0])]  # the smallest measured size also counts for smaller ones
        if merged and merged[-1][2] == length:
            merged[-1] = merged[-1][0], following - 1, length
        else:
            merged.append((rows, following - 1, length))
    return merged


def entry(path: str | None, temperatures: Sequence[float], spans: Sequence[Range]) -> DrafterLengths:
    """Return a drafter's entry of the file."""
    return DrafterLengths(
        path=path,
        temperatures=list(temperatures),
        num_speculative_tokens=max(length for _, _, length in spans),
        num_speculative_tokens_per_batch_size=list(spans),
    )


def drafter_entry(file: str, path: str) -> DrafterLengths:
    """Return the entry of the drafter in a directory, or the only entry; raise InputError without such an entry."""
    try:
        drafters = read(DraftLengths, Path(file), "draft_lengths")["drafters"]
    except FileNotFoundError as error:
        raise InputError(f"draft_lengths: expected a file that `measure` wrote at {file}, found none") from error
    if len(drafters) == 1:
        return next(iter(drafters.values()))
    for drafter in drafters.values():
        if drafter["path"] is not None and Path(drafter["path"]).resolve() == Path(path).resolve():
            return drafter
    names = ", ".join(drafters) or "none"
    raise InputError(f"draft_lengths: expected a drafter at {path} in {file}, found {names}")


def speculative_fields(file: str, path: str) -> dict[str, object]:
    """Return the fields of vLLM's speculative config for a drafter; raise InputError if it pays at no load."""
    drafter = drafter_entry(file, path)
    if drafter["num_speculative_tokens"] == 0:
        raise InputError(f"draft_lengths: expected a batch size at which the drafter pays in {file}, found none")
    ranges = drafter["num_speculative_tokens_per_batch_size"]
    if len(ranges) == 1:  # with a table, vLLM falls back to piecewise CUDA graphs
        return {NUM: drafter["num_speculative_tokens"]}
    return {NUM: drafter["num_speculative_tokens"], BY_BATCH_SIZE: [list(bounds) for bounds in ranges]}


def with_speculative(line: str, fields: Mapping[str, Any]) -> str:
    """Return a line of `vllm_command` with fields added to its speculative config or replaced there."""
    words = shlex.split(line)
    speculative = parse_json(words[-1]) | dict(fields)
    return shlex.join([*words[:-1], json.dumps(speculative, separators=(",", ":"))])
