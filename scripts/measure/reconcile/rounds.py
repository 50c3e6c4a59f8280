"""`rounds.jsonl`: the target's texts and what each drafter's rounds accept of them, token by token.

A report has sums; a server counts other sums (`draftsmith.decode.measurement.server_counts`). Out of this file what any
server must count is computed without the models: `draftsmith measure --server … --expect`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from draftsmith.decode.errors import InputError
from draftsmith.decode.options import Filters
from draftsmith.decode.validation import parse_json
from draftsmith.scripts.report.types import Verifier
from draftsmith.train.files import write_aside

SCHEMA = "draftsmith.rounds/1"
ROUNDS = "rounds.jsonl"


@dataclass(frozen=True)
class Settings:
    """The first line: what holds for all texts."""

    schema: str
    target: str
    dtype: str
    """Of the target."""
    max_new_tokens: int
    draft_length: int
    """γ up to which acceptance is known."""
    drafters: Mapping[str, Mapping[str, Any]]
    """By name, their kind and path."""
    filters: Mapping[str, Any]
    """What was left of the target's distribution: top_k and its like."""


@dataclass(frozen=True)
class ExpectedText:
    """One text that the target wrote, and what is accepted of it."""

    prompt: str
    """The prompt's id."""
    temperature: float
    prompt_ids: Sequence[int]
    tokens: Sequence[int]
    """The text, and so many tokens behind its end as a round may draft there."""
    length: int
    """Tokens of the text."""
    margins: Sequence[float] | None
    """At T=0, by how much of the largest logit each token of the text is ahead of the second; null under sampling."""
    accepted: Mapping[str, Mapping[Verifier, Sequence[Any]]]
    """By drafter and verifier: of each token the probability that a round accepts it, where that depends on the text
    alone; else, as for heads, a row for each token a round may start at, of its γ drafts."""

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


def write_rounds(path: Path, settings: Settings, texts: Sequence[ExpectedText]) -> None:
    """Write the file aside, then rename."""
    lines = [json.dumps(line, separators=(",", ":")) for line in (asdict(settings), *map(asdict, texts))]
    write_aside(path, "\n".join(lines) + "\n")


def read_rounds(report: str) -> tuple[Settings, list[ExpectedText]]:
    """Read the file that lies beside a report.

    Args:
        report: the report.json, its directory, or the file itself.

    Raises:
        InputError: there is none, or it is no such file; names the line.
    """
    given, number = Path(report), 1
    path = given / ROUNDS if given.is_dir() else given.with_name(ROUNDS)
    try:
        head, *lines = path.read_text(encoding="utf-8").splitlines()
        settings, texts = Settings(**parse_json(head)), list[ExpectedText]()
        if settings.schema != SCHEMA:
            raise InputError(f"expect: expected schema {SCHEMA} in {path}, found {settings.schema!r}")
        _check_settings(settings)
        for line in lines:
            number += 1
            texts.append(ExpectedText(**parse_json(line)))
            _check_text(texts[-1], settings.draft_length)
        return settings, texts
    except OSError as error:
        raise InputError(
            f"expect: expected a report with rounds.jsonl beside it, found none at {path}; measure again to write it"
        ) from error
    except (ValueError, TypeError, AttributeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"expect: expected the rounds of a report in {path}, found another content in its line {number}"
        ) from error


def _check_settings(settings: Settings) -> None:
    """Require a first line that can be worked with, by a `ValueError` or another that a wrong type raises."""
    lengths = settings.max_new_tokens, settings.draft_length
    drafters = settings.drafters.values()
    if (
        not all(type(length) is int and length > 0 for length in lengths)
        or not all(isinstance(about, dict) and "path" in about for about in drafters)
        or not settings.filters.keys() <= Filters.__annotations__.keys()
    ):
        raise ValueError("other settings")


def _check_text(text: ExpectedText, draft_length: int) -> None:
    """Require a text whose acceptance is known up to the draft length behind its end; raises as `_check_settings`."""
    ids, margins = (text.prompt_ids, text.tokens), text.margins or []
    if (
        not isinstance(text.prompt, str)
        or not all(isinstance(of, list) and all(type(token) is int for token in of) for of in ids)
        or not 0 <= text.length <= len(text.tokens)
        or not all(isinstance(number, int | float) for number in (text.temperature, *margins))
    ):
        raise ValueError("another text")
    for values in (of for by_verifier in text.accepted.values() for of in by_verifier.values()):
        accepted = np.asarray(values, dtype=np.float64)
        starts = text.length + draft_length - 1
        if accepted.ndim not in (1, 2) or len(accepted) < starts or not ((accepted >= 0) & (accepted <= 1)).all():
            raise ValueError("no probabilities")
