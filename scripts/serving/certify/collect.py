"""Requests for a server's texts, and a file of its answers, which outlives a failure."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement import LEAST_TOKENS
from draftsmith.decode.validation import Amount, Count, TokenId, file_bytes, parse
from draftsmith.scripts.serving.certify.config import CertifyConfig

FURTHER = 16
"""The most requested texts, as a multiple of the number that would do if none ended early."""


@dataclass(frozen=True)
class TextRequest:
    """One text to request.

    `index` is its own among its temperature's texts, and `prompt` the index of its prompt.
    """

    temperature: float
    index: int
    prompt: int


def stages(config: CertifyConfig, prompts: int) -> list[list[TextRequest]]:
    """Return the requests in the order in which they are sent; a stage begins when the one before has ended.

    At T=0 each prompt is asked once, and with `repeat` all again in another order: rows meet others, and caches are
    warm. Under sampling each prompt is asked twice in a row before the next, round and round: rows of the same prompt
    and of others meet, and so faults between either kind show.
    """
    passes = [_passes(config, temperature, prompts) for temperature in config.temperature]
    if not config.mixed:
        return [stage for stages in passes for stage in stages]
    # Spread each temperature's queue evenly over the whole run.
    queues = [[request for stage in stages for request in stage] for stages in passes]
    spread = [((i + 0.5) / len(queue), q, request) for q, queue in enumerate(queues) for i, request in enumerate(queue)]
    return [[request for _, _, request in sorted(spread, key=lambda item: item[:2])]]


def _passes(config: CertifyConfig, temperature: float, prompts: int) -> list[list[TextRequest]]:
    if temperature > 0:
        return [[TextRequest(temperature, i, i // 2 % prompts) for i in range(config.texts)]]
    first = [TextRequest(temperature, i, i) for i in range(prompts)]
    order = random.Random(config.seed).sample(range(prompts), prompts)
    return [first, [TextRequest(temperature, prompts + i, i) for i in order]] if config.repeat else [first]


def extra_requests(
    config: CertifyConfig, prompts: int, temperature: float, texts: Sequence[tuple[list[int], str]]
) -> list[TextRequest]:
    """Return extra requests, if the sampled texts ended before the test has enough tokens.

    `texts` are those received. No requests if they suffice, or are so short that more would not help.
    """
    received = sum(len(tokens) for tokens, _ in texts)
    most = FURTHER * config.texts
    missing = LEAST_TOKENS - received
    if temperature == 0 or missing <= 0 or len(texts) >= most:
        return []
    needed = len(texts) + -(-missing * len(texts) // max(received, len(texts)))
    return [TextRequest(temperature, i, i // 2 % prompts) for i in range(len(texts), min(needed, most))]


def text_pairs(count: int) -> dict[str, list[tuple[int, int]]]:
    """Return pairs of indices of one temperature's texts that ran together: see `stages`."""
    return {
        "rows of the same prompt": [(i, i + 1) for i in range(0, count - 1, 2)],
        "rows of two prompts": [(i, i + 2) for i in range(count - 2) if i % 4 < 2],
    }


LINE: Any = tuple[Amount, Count, list[TokenId], Literal["stop", "length"]]
"""A text's temperature and index, its tokens, and why it ended."""


class TextStore:
    """The texts that a server has written, a line each in a file: token ids, and why each ended."""

    def __init__(self, path: Path, most: int, vocab_size: int | None):
        """Read an earlier run's texts; lines that a kill cut off or that are malformed are requested again.

        `most` is the tokens of a text; ids must be below `vocab_size`, if it is known here.
        """
        self._path = path
        self.texts: dict[tuple[float, int], tuple[list[int], str]] = {}
        for line in file_bytes(path).split(b"\n") if path.exists() else []:
            try:
                temperature, index, tokens, reason = parse(LINE, line, str(path))
            except InputError:
                continue
            if len(tokens) <= most and (vocab_size is None or max(tokens, default=0) < vocab_size):
                self.texts[temperature, index] = tokens, reason

    def add(self, request: TextRequest, tokens: list[int], reason: str) -> None:
        """Store one text."""
        self.texts[request.temperature, request.index] = tokens, reason
        with self._path.open("a", encoding="utf-8") as file:
            # A newline first ends a line that a kill cut off.
            file.write("\n" + json.dumps([request.temperature, request.index, tokens, reason]))

    def of(self, temperature: float) -> list[tuple[list[int], str]]:
        """Return the texts of a temperature, in the order of their indices."""
        return [self.texts[key] for key in sorted(key for key in self.texts if key[0] == temperature)]
