"""Replacement of a draft while it is served: follows the link that its directory is."""

import logging
import os
import threading
from collections.abc import Callable

from draftsmith.decode.errors import InputError
from draftsmith.scripts.services.draft_protocol import DraftRow
from draftsmith.scripts.services.serve_draft.texts import DraftTexts
from draftsmith.scripts.services.serve_draft.worker import ServiceMetrics, Worker

LOGGER = logging.getLogger(__name__)
SECONDS = 2.0  # between two checks of the link


class Follower(threading.Thread):
    """Loads the draft that a link points to, while the old one serves, and gives it to the worker.

    A draft that cannot be loaded, or does not fit what clients were told at the start, is skipped with a log line, and
    the old one stays until the link moves again. `directory` is where `texts` was loaded from, with links resolved.
    `load` returns a drafter without copies; those of `texts` stay. The link is checked every `seconds`.
    """

    def __init__(
        self, link: str, texts: DraftTexts, directory: str, load: Callable[[str], DraftTexts], worker: Worker,
        metrics: ServiceMetrics, seconds: float = SECONDS,
    ):  # fmt: skip
        super().__init__(name="follow", daemon=True)
        self._link, self._directory, self._load, self._worker = link, directory, load, worker
        self._vocab_size, self._max_length, self._copies = texts.vocab_size, texts.max_length, texts.copies
        self._metrics, self._seconds, self._ended = metrics, seconds, threading.Event()

    def stop(self) -> None:
        """Stop to follow, without waiting for a draft that is being loaded."""
        self._ended.set()

    def run(self) -> None:
        """Check the link until stopped."""
        while not self._ended.wait(self._seconds):
            self.look()

    def look(self) -> None:
        """Replace the draft if the link has moved since the last check."""
        directory = os.path.realpath(self._link)
        if directory == self._directory or not os.path.isdir(directory):  # the link may be missing for a moment
            return
        self._directory = directory
        try:
            texts = self._load(directory)
            if (texts.vocab_size, texts.max_length) != (self._vocab_size, self._max_length):
                raise InputError(
                    f"expected a vocabulary of {self._vocab_size} and texts of {self._max_length} tokens, which "
                    f"clients were told, found {texts.vocab_size} and {texts.max_length}"
                )
            warm_up(texts)
        except Exception as error:  # after any error the old draft still serves
            LOGGER.error("%s: not served, the draft before stays: %s", directory, error)
            return
        texts.copies = self._copies  # used by the worker's thread only, as before
        self._worker.replace(texts)
        self._metrics.replaced.inc()
        print(f"serving {directory} now", flush=True)


def warm_up(texts: DraftTexts) -> None:
    """Draft once, which allocates memory and shows that the model can draft; no repetition in the text, so no copy."""
    texts.draft(["warm-up"], [DraftRow(0, 0, [0, 1], 2)])
    texts.clear()
