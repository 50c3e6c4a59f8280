"""`rounds.jsonl`: the target's texts and what each drafter's rounds accept of them, token by token.

A report has sums; a server counts other sums (`draftsmith.decode.measurement.server_counts`). Out of this file what any
server must count is computed without the models: `draftsmith measure --server … --expect`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypedDict

from draftsmith.decode.errors import InputError
from draftsmith.decode.validation import Amount, Count, Finite, Share, TokenId, file_bytes, parsed
from draftsmith.scripts.report.types import Verifier
from draftsmith.train.files import write_aside

SCHEMA: Literal["draftsmith.rounds/1"] = "draftsmith.rounds/1"
ROUNDS = "rounds.jsonl"


Length = Annotated[int, Field(ge=1, le=2**31)]


class NamedDrafter(TypedDict):
    """Kind and path of a drafter."""

    kind: str
    path: str | None


@with_config(ConfigDict(extra="forbid"))
class FilterSettings(TypedDict, total=False):
    """How the target's distribution was cut: the fields of `Filters`."""

    top_k: Count
    top_p: Share
    min_p: Share
    repetition_penalty: Amount
    no_repeat_ngram_size: Count


@dataclass(frozen=True)
class RoundsSettings:
    """The first line: what holds for all texts."""

    schema: Literal["draftsmith.rounds/1"]
    target: str
    dtype: str
    """Of the target."""
    max_new_tokens: Length
    draft_length: Length
    """γ up to which acceptance is known."""
    drafters: Mapping[str, NamedDrafter]
    """By name, their kind and path."""
    filters: FilterSettings
    """How the target's distribution was cut."""


@dataclass(frozen=True)
class ExpectedText:
    """One text that the target wrote, and what is accepted of it."""

    prompt: str
    """The prompt's id."""
    temperature: Amount
    prompt_ids: Sequence[TokenId]
    tokens: Sequence[TokenId]
    """The text, and behind its end as many tokens as a round may draft there."""
    length: Count
    """Tokens of the text."""
    margins: Sequence[Finite] | None
    """At T=0, by how much of the largest logit each token of the text is ahead of the second; null under sampling."""
    accepted: Mapping[str, Mapping[Verifier, list[Share] | list[list[Share]]]]
    """By drafter and verifier: of each token the probability that a round accepts it, where that depends on the text
    alone; else, as for heads, a row for each token a round may start at, of its γ drafts."""
    drafted: Mapping[str, list[Count]] = field(default_factory=dict)
    """By drafter, where some rounds draft fewer than γ tokens, as copies do: how many, for each token a round may start
    at."""

    def acceptance(self, drafter: str, verifier: Verifier, draft_length: int) -> np.ndarray | None:
        """Return what a round that starts at each token accepts, (T, γ); None where it is not known."""
        values = self.accepted.get(drafter, {}).get(verifier)
        if values is None:
            return None
        array = np.asarray(values, dtype=np.float64)
        if array.ndim == 1:
            padded = np.pad(array, (0, draft_length - 1))
            return np.lib.stride_tricks.sliding_window_view(padded, draft_length)
        return array[:, :draft_length] if array.shape[1] >= draft_length else None

    def lengths(self, drafter: str) -> np.ndarray | None:
        """Return how many tokens a round that starts at each token drafts, (T,); None where it is always γ."""
        return np.asarray(self.drafted[drafter]) if drafter in self.drafted else None


def write_rounds(path: Path, settings: RoundsSettings, texts: Sequence[ExpectedText]) -> None:
    """Write the file aside, then rename."""
    lines = [json.dumps(line, separators=(",", ":")) for line in (asdict(settings), *map(asdict, texts))]
    write_aside(path, "\n".join(lines) + "\n")


def read_rounds(report: str) -> tuple[RoundsSettings, list[ExpectedText]]:
    """Read the file that lies beside a report.

    Args:
        report: the report.json, its directory, or the file itself.

    Raises:
        InputError: there is none, or it is no such file; names the line.
    """
    given = Path(report)
    path = given / ROUNDS if given.is_dir() else given.with_name(ROUNDS)
    try:
        head, *lines = file_bytes(path).split(b"\n")
    except FileNotFoundError as error:
        raise InputError(
            f"expect: expected a report with rounds.jsonl beside it, found none at {path}; measure again to write it"
        ) from error
    settings, texts = parsed(RoundsSettings, head, f"expect: {path}:1"), list[ExpectedText]()
    for number, line in enumerate(lines, 2):
        if line.strip():
            where = f"expect: {path}:{number}"
            texts.append(parsed(ExpectedText, line, where))
            _check(texts[-1], settings, where)
    return settings, texts


def _check(text: ExpectedText, settings: RoundsSettings, where: str) -> None:
    """Require a text whose acceptance by known drafters is known up to the draft length behind its end.

    Raises:
        InputError: names the field.
    """
    starts = text.length + settings.draft_length - 1
    if not text.length <= min(len(text.tokens), settings.max_new_tokens):
        raise InputError(f"{where}: length: expected at most {len(text.tokens)} tokens, found {text.length}")
    if text.margins is not None and len(text.margins) < text.length:
        raise InputError(f"{where}: margins: expected {text.length}, found {len(text.margins)}")
    for drafter, by_verifier in text.accepted.items():
        if drafter not in settings.drafters:
            raise InputError(f"{where}: accepted: expected drafters of the first line, found {drafter!r}")
        for values in by_verifier.values():
            widths = {len(row) for row in values if isinstance(row, list)}
            if len(values) < starts or len(widths) > 1 or 0 in widths:
                raise InputError(
                    f"{where}: accepted.{drafter}: expected {starts} probabilities or rows of them, found {len(values)}"
                )
        lengths = text.drafted.get(drafter)
        if lengths is not None and len(lengths) < starts:
            raise InputError(f"{where}: drafted.{drafter}: expected {starts} numbers, found {len(lengths)}")
