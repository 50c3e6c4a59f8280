"""A draft that is replaced while it is served: where its directory is a link, what that points to is looked at."""

import logging
import os
import threading
from collections.abc import Callable

from draftsmith.decode.errors import InputError
from draftsmith.scripts.services.draft_protocol import DraftRow
from draftsmith.scripts.services.serve_draft.metrics import ServiceMetrics
from draftsmith.scripts.services.serve_draft.texts import DraftTexts
from draftsmith.scripts.services.serve_draft.worker import Worker

LOGGER = logging.getLogger(__name__)


class Follower(threading.Thread):
    """Loads what a link points to now beside the draft that is served, and gives it to the worker.

    What cannot be loaded, or does not fit what clients were told at the start, is left out with a line in the log: the
    old draft goes on, until the link moves again.

    Args:
        link: the draft's directory, as it was given.
        texts: the drafter that is served; what it copies from goes on.
        directory: from where it was loaded, without links.
        load: from a directory to a drafter that copies nothing.
        worker: what drafts.
        metrics: what it counts in.
        seconds: between looks.
    """

    def __init__(
        self,
        link: str,
        texts: DraftTexts,
        directory: str,
        load: Callable[[str], DraftTexts],
        worker: Worker,
        metrics: ServiceMetrics,
        seconds: float,
    ):
        super().__init__(name="follow", daemon=True)
        self._link, self._directory, self._load, self._worker = link, directory, load, worker
        self._vocab_size, self._max_length, self._copies = texts.vocab_size, texts.max_length, texts.copies
        self._metrics, self._seconds, self._ended = metrics, seconds, threading.Event()

    def stop(self) -> None:
        """Look no more; what is being loaded is not waited for."""
        self._ended.set()

    def run(self) -> None:
        """Look until stopped."""
        while not self._ended.wait(self._seconds):
            self.look()

    def look(self) -> None:
        """Replace the draft if the link points elsewhere than at the last look."""
        directory = os.path.realpath(self._link)
        if directory == self._directory or not os.path.isdir(directory):  # it may be gone for a moment
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
        except Exception as error:  # whatever it is, the old draft is there
            LOGGER.error("%s: not served, the draft before goes on: %s", directory, error)
            return
        texts.copies = self._copies  # from now on the worker's alone, as before
        self._worker.replace(texts)
        self._metrics.replaced.inc()
        print(f"serving {directory} now", flush=True)


def warm_up(texts: DraftTexts) -> None:
    """Draft once: the first forwards allocate, and show that it can; a text that repeats itself might be copied."""
    texts.draft(["warm-up"], [DraftRow(0, 0, [0, 1], 2)])
    texts.clear()
