"""The thread that drafts, with the waiting requests joined to one batch."""

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from draftsmith.scripts.services.draft_protocol import DraftRequest
from draftsmith.scripts.services.serve_draft.texts import DraftTexts

LOGGER = logging.getLogger(__name__)
PREFIX = "draftsmith_draft"
SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MOST_WAITING = 64  # requests; further ones are refused with 503

Key = tuple[str, int]  # a client and its id of a text
Drafts = list[list[int] | None]


@dataclass
class PendingDrafts:
    """A request and its future answer; the request is skipped if the answer is cancelled."""

    request: DraftRequest
    answer: "Future[Drafts]" = field(default_factory=Future)

    @property
    def keys(self) -> list[Key]:
        """The keys of its texts."""
        return [(self.request.client, row.id) for row in self.request.rows]


class ServiceMetrics:
    """The metrics of one service."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        name = f"{PREFIX}_{{}}".format
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        histogram = partial(Histogram, registry=registry)
        self.requests = counter(name("requests"), "Requests for drafts.", ["status"])
        self.seconds = histogram(name("request_seconds"), "From a request's headers to its answer.", buckets=SECONDS)
        self.work_seconds = counter(name("work_seconds"), "Time in which drafts were made.")
        self.rows = counter(name("rows"), "Rows of requests.")
        self.unknown = counter(name("unknown_rows"), "Rows whose text was not known.")
        self.tokens = counter(name("tokens"), "Drafted tokens.")
        self.copied = counter(name("copied_drafts"), "Drafts that were copied.")
        self.batch_rows = histogram(name("batch_rows"), "Rows drafted for together.", buckets=ROWS)
        self.evictions = counter(name("evictions"), "Texts forgotten to make room.")
        self.replaced = counter(name("replaced"), "Drafts that took another's place.")
        self.waiting = gauge(name("waiting_requests"), "Requests that wait.")
        self.texts = gauge(name("texts"), "Texts that are known.")
        self.cached_tokens = gauge(name("cached_tokens"), "Tokens whose keys and values are kept.")


class Worker(threading.Thread):
    """Drafts for one batch after another until it is stopped.

    Only this thread uses the drafter `texts`, until `replace` gives another. A batch has at most `max_batch` rows, and
    no request has more. At most `max_waiting` requests wait.
    """

    def __init__(self, texts: DraftTexts, max_batch: int, metrics: ServiceMetrics, max_waiting: int = MOST_WAITING):
        super().__init__(name="draft", daemon=True)
        self._texts, self._max_batch, self._max_waiting, self._metrics = texts, max_batch, max_waiting, metrics
        self._next: DraftTexts | None = None
        self._waiting: deque[PendingDrafts] = deque()
        self._changed = threading.Condition()
        self._stopped = False

    def submit(self, work: PendingDrafts) -> bool:
        """Queue a request; return whether there was room for it."""
        with self._changed:
            if self._stopped or len(self._waiting) >= self._max_waiting:
                return False
            self._waiting.append(work)
            self._metrics.waiting.set(len(self._waiting))
            self._changed.notify()
        return True

    def replace(self, texts: DraftTexts) -> None:
        """Draft with another drafter from the next batch on; it knows no texts, so clients send each once more."""
        with self._changed:
            self._next = texts

    def stop(self) -> None:
        """Draft for the waiting requests, then end."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self.join()

    def run(self) -> None:
        """Draft until stopped. An error is the answer to its batch's requests, and all texts are forgotten."""
        while batch := self._take():
            evictions, copied = self._texts.evictions, self._texts.copied
            start = time.perf_counter()
            try:
                self._texts.forget([(work.request.client, id_) for work in batch for id_ in work.request.ended])
                rows = [row for work in batch for row in work.request.rows]
                drafts = self._texts.draft([key for work in batch for key in work.keys], rows)
            except Exception as error:
                LOGGER.exception("expected drafts of %d requests, found an error; all texts are forgotten", len(batch))
                self._texts.clear()
                for work in batch:
                    work.answer.set_exception(error)
                continue
            self._metrics.work_seconds.inc(time.perf_counter() - start)
            self._count(drafts, self._texts.evictions - evictions, self._texts.copied - copied)
            for work in batch:
                count = len(work.request.rows)
                work.answer.set_result(drafts[:count])
                drafts = drafts[count:]

    def _take(self) -> list[PendingDrafts]:
        """Wait for requests, and return those that fit together, with each text once; empty at the end."""
        with self._changed:
            batch: list[PendingDrafts] = []
            while not batch:
                self._changed.wait_for(lambda: self._waiting or self._stopped)
                if not self._waiting:
                    return []
                room, keys = self._max_batch, set[Key]()
                while self._waiting:
                    work = self._waiting[0]
                    # A text occurs once in a batch: a client's second request for it waits for the next one.
                    if batch and (len(work.request.rows) > room or keys & set(work.keys)):
                        break
                    self._waiting.popleft()
                    if work.answer.set_running_or_notify_cancel():
                        batch.append(work)
                        room -= len(work.request.rows)
                        keys |= set(work.keys)
            self._metrics.waiting.set(len(self._waiting))
            if self._next is not None:  # between two batches, so that no batch mixes two drafters
                self._texts, self._next = self._next, None
            return batch

    def _count(self, drafts: Sequence[list[int] | None], evictions: int, copied: int) -> None:
        metrics = self._metrics
        metrics.rows.inc(len(drafts))
        metrics.unknown.inc(drafts.count(None))
        metrics.tokens.inc(sum(len(draft) for draft in drafts if draft))
        metrics.batch_rows.observe(len(drafts))
        metrics.evictions.inc(evictions)
        metrics.copied.inc(copied)
        metrics.texts.set(len(self._texts))
        metrics.cached_tokens.set(self._texts.cached_tokens)
