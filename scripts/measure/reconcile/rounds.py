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
from draftsmith.scripts.report.types import Verifier
from draftsmith.train.files import parse_json, write_aside

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
        InputError: there is none, or it is no such file.
    """
    given = Path(report)
    path = given / ROUNDS if given.is_dir() else given.with_name(ROUNDS)
    try:
        head, *lines = path.read_text(encoding="utf-8").splitlines()
        settings = Settings(**parse_json(head))
        if settings.schema != SCHEMA:
            raise InputError(f"expect: expected schema {SCHEMA} in {path}, found {settings.schema!r}")
        return settings, [ExpectedText(**parse_json(line)) for line in lines]
    except OSError as error:
        raise InputError(
            f"expect: expected a report with rounds.jsonl beside it, found none at {path}; measure again to write it"
        ) from error
    except (ValueError, TypeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"expect: expected the rounds of a report in {path}, found another content") from error
