"""`rounds.jsonl`: the target's texts, and which tokens of them each drafter's rounds accept.

A report has sums, and a server counts other sums (`draftsmith.decode.measurement.server_counts`). From this file any
server's counts are computed without the models: `draftsmith measure --server … --expect`.
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
from draftsmith.decode.validation import Amount, Count, Finite, Share, TokenId, file_bytes, parse
from draftsmith.scripts.report.types import Verifier

SCHEMA: Literal["draftsmith.rounds/1"] = "draftsmith.rounds/1"
ROUNDS = "rounds.jsonl"
Length = Annotated[int, Field(ge=1, le=2**31)]


class NamedDrafter(TypedDict):
    """Kind and path of a drafter."""

    kind: str
    path: str | None


@with_config(ConfigDict(extra="forbid"))
class FilterSettings(TypedDict, total=False):
    """The fields of `Filters` that cut the target's distribution."""

    top_k: Count
    top_p: Share
    min_p: Share
    repetition_penalty: Amount
    no_repeat_ngram_size: Count


@dataclass(frozen=True)
class RoundsSettings:
    """The first line, which holds for all texts.

    `draft_length` is the γ up to which acceptance is known; `drafters` are by name.
    """

    schema: Literal["draftsmith.rounds/1"]
    target: str
    dtype: str
    max_new_tokens: Length
    draft_length: Length
    drafters: Mapping[str, NamedDrafter]
    filters: FilterSettings


@dataclass(frozen=True)
class ExpectedText:
    """One text of the target, and its acceptance."""

    prompt: str
    temperature: Amount
    prompt_ids: Sequence[TokenId]
    tokens: Sequence[TokenId]
    """The text, and after its end the tokens that a round may draft there."""
    length: Count
    margins: Sequence[Finite] | None
    """At T=0, each token's margin over the second as a share of the largest logit; null under sampling."""
    accepted: Mapping[str, Mapping[Verifier, list[Share] | list[list[Share]]]]
    """Each token's probability to be accepted, by drafter and verifier, if it depends on the text alone. Otherwise, as
    for heads, a row of γ probabilities for each token that a round may start at."""
    drafted: Mapping[str, list[Count]] = field(default_factory=dict)
    """Tokens of each round, by drafter, if some rounds draft fewer than γ tokens, as copies do."""

    def acceptance(self, drafter: str, verifier: Verifier, draft_length: int) -> np.ndarray | None:
        """Return the acceptance of a round that starts at each token, (T, γ); None if unknown."""
        values = self.accepted.get(drafter, {}).get(verifier)
        if values is None:
            return None
        array = np.asarray(values, dtype=np.float64)
        if array.ndim == 1:
            padded = np.pad(array, (0, draft_length - 1))
            return np.lib.stride_tricks.sliding_window_view(padded, draft_length)
        return array[:, :draft_length] if array.shape[1] >= draft_length else None

    def lengths(self, drafter: str) -> np.ndarray | None:
        """Return the tokens that a round starting at each token drafts, (T,); None if always γ."""
        return np.asarray(self.drafted[drafter]) if drafter in self.drafted else None


def rounds_text(settings: RoundsSettings, texts: Sequence[ExpectedText]) -> str:
    """Return the file's text."""
    lines = (asdict(settings), *map(asdict, texts))
    return "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)


def read_rounds(report: str) -> tuple[RoundsSettings, list[ExpectedText]]:
    """Read the rounds next to a report, given as report.json, its directory or the file; or raise InputError."""
    location = Path(report)
    path = location / ROUNDS if location.is_dir() else location.with_name(ROUNDS)
    try:
        head, *lines = file_bytes(path).split(b"\n")
    except FileNotFoundError as error:
        raise InputError(
            f"expect: expected a report with rounds.jsonl next to it, found none at {path}; measure again to write it"
        ) from error
    settings, texts = parse(RoundsSettings, head, f"expect: {path}:1"), list[ExpectedText]()
    for number, line in enumerate(lines, 2):
        if line.strip():
            where = f"expect: {path}:{number}"
            texts.append(parse(ExpectedText, line, where))
            _check(texts[-1], settings, where)
    return settings, texts


def _check(text: ExpectedText, settings: RoundsSettings, where: str) -> None:
    """Require that a text's acceptance is known up to γ tokens past its end, for known drafters."""
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
