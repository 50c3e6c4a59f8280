"""A decoder's connection to a draft service: calls have a time limit, and an absent service costs nothing.

One thread does all networking. The decoder waits for it up to the timeout, however long name resolution, connecting or
a slow answer takes. After a failure the line is down: the thread polls `/health`, and calls return at once until the
service answers.
"""

import http.client
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partialmethod
from typing import Any
from urllib.parse import SplitResult, urlsplit

from draftsmith.scripts.services.draft_protocol import MOST_BYTES, ProtocolError, Service, decode

PAUSES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)  # seconds after the first, second, … failure in a row
SILENCE = 60.0  # the least seconds between two log lines of a level


class LineDown(RuntimeError):
    """A call without an answer; the message says why in one line."""


def checked_url(url: str) -> SplitResult:
    """Parse a URL such as http://127.0.0.1:8100; a ValueError for another one contains no secrets."""
    expected = "DRAFT_ENDPOINT: expected a URL such as http://127.0.0.1:8100, found"
    if any(sign in url for sign in "@?#"):
        raise ValueError(f"{expected} one with a user name, password or query")
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # an invalid port
        usable = False
    if not usable:
        raise ValueError(f"{expected} {url!r}" if url else f"{expected} none")
    return parts


class DraftLine(threading.Thread):
    """A connection to a draft service, and the thread that uses it.

    A call waits at most `timeout` seconds. A `key` is sent as `Authorization: Bearer KEY`. The log says whether the
    service answers, and why not.
    """

    def __init__(self, address: SplitResult, timeout: float, key: str = "", log: logging.Logger | None = None):
        super().__init__(name="draft-line", daemon=True)
        self._address, self.timeout, self._key = address, timeout, key
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._say = ThrottledLog(log or logging.getLogger(__name__))
        self._connection: http.client.HTTPConnection | None = None
        self._calls: list[tuple[bytes, Future[bytes]]] = []
        self._changed = threading.Condition()
        self._failed = 0  # times in a row
        self.service: Service | None = None  # the answer of /health; None while the line is down

    def ask(self, body: bytes) -> bytes:
        """Return the answer of `/propose`; raise LineDown if there is none in time."""
        call: Future[bytes] = Future()
        with self._changed:
            if self.service is None:
                raise LineDown("the draft service is away")
            self._calls.append((body, call))
            self._changed.notify()
        try:
            return call.result(self.timeout)
        except FutureTimeout:  # the thread may get an answer yet, which nobody reads
            error = LineDown(f"expected drafts within {self.timeout:g} s, found none")
            self.refuse(error)
            raise error from None

    def accept(self) -> None:
        """Record a valid answer."""
        self._failed = 0

    def run(self) -> None:
        """Poll the service while the line is down, and make calls while it is up."""
        while True:
            if self.service is None:
                if self._failed:
                    time.sleep(PAUSES[min(self._failed, len(PAUSES)) - 1])
                self._look()
                continue
            with self._changed:
                # A caller that times out takes the line down without a call: wake up for that too.
                self._changed.wait_for(lambda: self._calls or self.service is None)
                if not self._calls:
                    continue
                body, call = self._calls.pop(0)
            try:
                call.set_result(self._exchange("POST", "/propose", body))
            except Exception as error:  # after any error the caller decodes plainly
                self._hang_up()
                down = LineDown(f"expected drafts, found {_words(error)}")
                self.refuse(down)
                call.set_exception(down)

    def _look(self) -> None:
        try:
            service = decode(Service, self._exchange("GET", "/health"))
        except Exception as error:
            self._hang_up()
            self.refuse(LineDown(f"expected a draft service, found {_words(error)}"))
            return
        with self._changed:
            self._calls.clear()  # calls that have timed out
            self.service = service
        self._say.info(f"{self._where}: drafts of {service.model}, texts of up to {service.max_length} tokens")

    def refuse(self, error: Exception) -> None:
        """Take the line down after an error, which may be an invalid answer."""
        with self._changed:
            self.service = None
            self._failed += 1
            self._changed.notify()
        self._say.warning(f"{self._where}: {error}; decoding continues plainly")

    def _exchange(self, method: str, path: str, body: bytes | None = None) -> bytes:
        """Send a request and return the body of its answer; retry once if the server had closed an idle connection."""
        fresh = self._connection is None
        try:
            return self._exchange_once(method, path, body)
        except (http.client.RemoteDisconnected, ConnectionError):
            if fresh:
                raise
            self._hang_up()
            return self._exchange_once(method, path, body)

    def _exchange_once(self, method: str, path: str, body: bytes | None) -> bytes:
        address = self._address
        if self._connection is None:
            kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
            self._connection = kind(str(address.hostname), address.port, timeout=max(self.timeout, 1.0))
        self._connection.request(method, address.path.rstrip("/") + path, body, self._headers)
        response = self._connection.getresponse()
        content = response.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise ProtocolError(f"answer: expected at most {MOST_BYTES} bytes, found more")
        if response.status != 200:
            message = content[:1000].decode("utf-8", "replace")
            message = message.replace(self._key, "***") if self._key else message  # some servers echo the key
            raise http.client.HTTPException(f"{response.status} {message}")
        return content

    def _hang_up(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    @property
    def _where(self) -> str:
        return f"draft service {self._address.netloc}"


class ThrottledLog:
    """A log that writes at most once a minute, so that a service that comes and goes does not fill it."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic):
        self._log, self._clock = log, clock
        self._last: dict[int, float] = {}

    def _at(self, level: int, line: str) -> None:
        now = self._clock()
        if now - self._last.get(level, -SILENCE) >= SILENCE:
            self._last[level] = now
            self._log.log(level, "%s", line)

    info, warning = partialmethod(_at, logging.INFO), partialmethod(_at, logging.WARNING)


def _words(error: Any) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}".rstrip(": ")
