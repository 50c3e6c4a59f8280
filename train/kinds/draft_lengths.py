"""draft_lengths.json: γ by batch size, in the form that vLLM loads.

`measure` writes it, `export --draft_lengths` puts it into a launch line. vLLM takes the draft length of a step from the
number of requests in it (0.32: `vllm/v1/spec_decode/dynamic/utils.py`): inclusive ranges from 1 on, and beyond
the last one its length goes on.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from typing_extensions import TypedDict

from draftsmith.decode.errors import InputError
from draftsmith.decode.validation import Amount, Count, read

SCHEMA = "draftsmith.draft_lengths/1"
NUM, BY_BATCH_SIZE = "num_speculative_tokens", "num_speculative_tokens_per_batch_size"
"""Keys of vLLM's speculative config."""

ALIKE = 0.99
"""Of the best goodput, from which a smaller batch's draft length is kept: a change that wins nothing is noise."""

Range = tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)], Count]


def _joined(ranges: list[Range]) -> list[Range]:
    """Return ranges that follow one another from 1 on."""
    ends = [0, *(last for _, last, _ in ranges)]
    for (first, last, _), before in zip(ranges, ends, strict=False):
        if first != before + 1 or last < first:
            raise ValueError(f"expected a range that begins at {before + 1}, found {first} to {last}")
    return ranges


class OfDrafter(TypedDict):
    """γ by batch size of one drafter."""

    path: str | None
    temperatures: list[Amount]
    num_speculative_tokens: Count
    num_speculative_tokens_per_batch_size: Annotated[list[Range], Field(min_length=1), AfterValidator(_joined)]


class DraftLengths(TypedDict):
    """The file."""

    schema: Literal["draftsmith.draft_lengths/1"]
    target: str
    drafters: dict[str, OfDrafter]


def chosen_lengths(goodput: Mapping[int, Mapping[int, float]]) -> dict[int, int]:
    """Return by batch size the draft length of the greatest goodput; that of the size before where it is as good.

    Args:
        goodput: by batch size, then draft length; 0 is plain decoding.
    """
    chosen, before = dict[int, int](), None
    for rows, of in sorted(goodput.items()):
        best = max(of, key=lambda k: of[k])
        if before is None or of[before] < ALIKE * of[best]:
            before = best
        chosen[rows] = before
    return chosen


def ranges(chosen: Mapping[int, int], most: int) -> list[Range]:
    """Return draft lengths by ranges of batch sizes, (first, last, γ), without gaps, from 1 to `most`.

    Args:
        chosen: by batch size; the smallest stands for those below it, too.
        most: the last batch size.
    """
    found: list[Range] = []
    sizes = sorted(chosen)
    for rows, following in zip([1, *sizes[1:]], [*sizes[1:], most + 1], strict=True):
        length = chosen[max(rows, sizes[0])]
        if found and found[-1][2] == length:
            found[-1] = found[-1][0], following - 1, length
        else:
            found.append((rows, following - 1, length))
    return found


def entry(path: str | None, temperatures: Sequence[float], of: Sequence[Range]) -> OfDrafter:
    """Return what the file has of a drafter."""
    return OfDrafter(
        path=path,
        temperatures=list(temperatures),
        num_speculative_tokens=max(length for _, _, length in of),
        num_speculative_tokens_per_batch_size=list(of),
    )


def of_drafter(file: str, path: str) -> OfDrafter:
    """Return the entry of the drafter in a directory; the only drafter of a file lies wherever it lies.

    Raises:
        InputError: no such file, or none of this drafter.
    """
    drafters = _drafters(file, "draft_lengths")
    here = [each for each in drafters.values() if each["path"] is not None and _same(each["path"], path)]
    found = here[0] if here else next(iter(drafters.values())) if len(drafters) == 1 else None
    if found is None:
        names = ", ".join(drafters) or "none"
        raise InputError(f"draft_lengths: expected a drafter at {path} in {file}, found {names}")
    return found


def named(file: str, name: str, field: str) -> OfDrafter:
    """Return the entry of the drafter of a name; the only drafter of a file is called whatever it is called.

    Args:
        file: that `measure` or `tune` wrote.
        name: the drafter's, in a report.
        field: the option that named the file, for messages.

    Raises:
        InputError: no such file, or no drafter of that name.
    """
    drafters = _drafters(file, field)
    if len(drafters) == 1:
        return next(iter(drafters.values()))
    if name not in drafters:
        raise InputError(f"{field}: expected {name} in {file}, found {', '.join(drafters) or 'none'}")
    return drafters[name]


def _drafters(file: str, field: str) -> dict[str, OfDrafter]:
    try:
        return read(DraftLengths, Path(file), field)["drafters"]
    except FileNotFoundError as error:
        raise InputError(f"{field}: expected a file that `measure` wrote at {file}, found none") from error


def length_at(of: OfDrafter, rows: int) -> int:
    """Return γ for a batch of so many rows; beyond the last range its length goes on."""
    ranges = of["num_speculative_tokens_per_batch_size"]
    return next((length for _, last, length in ranges if rows <= last), ranges[-1][2])


def speculative_fields(file: str, path: str) -> dict[str, object]:
    """Return the fields of vLLM's speculative config for the drafter in a directory.

    Raises:
        InputError: as of `of_drafter`, or a drafter that pays at no load.
    """
    found = of_drafter(file, path)
    if found["num_speculative_tokens"] == 0:
        raise InputError(f"draft_lengths: expected a batch size at which the drafter pays in {file}, found none")
    ranges = found["num_speculative_tokens_per_batch_size"]
    if len(ranges) == 1:  # no table: with one vLLM falls back to piecewise CUDA graphs
        return {NUM: found["num_speculative_tokens"]}
    return {NUM: found["num_speculative_tokens"], BY_BATCH_SIZE: [list(each) for each in ranges]}


def _same(one: str, other: str) -> bool:
    return Path(one).resolve() == Path(other).resolve()
