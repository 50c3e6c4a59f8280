"""A decoder's line to a draft service: a call never takes longer than it may, and a service that is away costs nothing.

One thread does all that touches the network. The decoder waits for it at most the timeout, whatever a name server, a
connection or a trickling answer takes. After a failure the line is down: the thread asks `/health` now and then, and
until the service answers, calls return at once. Standard library alone.
"""

import http.client
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from draftsmith.scripts.services.draft_protocol import MOST_BYTES, ProtocolError, Service, decode_service

PAUSES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Seconds without a call after the first failure, the second in a row, and so on; the last for all further ones."""
SILENCE = 60.0
"""Seconds between two lines of the log at least."""


class LineDown(RuntimeError):
    """A call that got no answer; one line that says why."""


@dataclass(frozen=True)
class Address:
    """Where a service listens."""

    host: str
    port: int | None
    secure: bool
    path: str

    @classmethod
    def of(cls, url: str) -> "Address":
        """Read a URL such as http://127.0.0.1:8100.

        Raises:
            ValueError: not a URL; the line never prints secrets.
        """
        expected = "DRAFT_ENDPOINT: expected a URL such as http://127.0.0.1:8100, found"
        if any(sign in url for sign in "@?#"):
            raise ValueError(f"{expected} one with a user name, password or query")
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:  # a port that is no number
            raise ValueError(f"{expected} {url!r}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
            raise ValueError(f"{expected} {url!r}" if url else f"{expected} none")
        return cls(parts.hostname, port, parts.scheme == "https", parts.path.rstrip("/"))


class DraftLine(threading.Thread):
    """One connection to a draft service, and the thread that uses it.

    Args:
        address: the service's.
        timeout: seconds that a call waits at most.
        key: sent as `Authorization: Bearer KEY`, if not empty.
        log: where it says that the service is there, and why it is not.
    """

    def __init__(self, address: Address, timeout: float, key: str = "", log: logging.Logger | None = None):
        super().__init__(name="draft-line", daemon=True)
        self._address, self.timeout, self._key = address, timeout, key
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._say = Seldom(log or logging.getLogger(__name__))
        self._connection: http.client.HTTPConnection | None = None
        self._calls: list[tuple[bytes, Future[bytes]]] = []
        self._changed = threading.Condition()
        self._failed = 0  # times in a row
        self.service: Service | None = None
        """The service's own description, while the line is up."""

    def ask(self, body: bytes) -> bytes:
        """Return what `/propose` answers.

        Raises:
            LineDown: the line is down, or goes down now.
        """
        call: Future[bytes] = Future()
        with self._changed:
            if self.service is None:
                raise LineDown("the draft service is away")
            self._calls.append((body, call))
            self._changed.notify()
        try:
            return call.result(self.timeout)
        except FutureTimeout:
            error = LineDown(f"expected drafts within {self.timeout:g} s, found none")
            self._down(error)
            raise error from None

    def refuse(self, error: Exception) -> None:
        """Take an answer for none, because of what it says."""
        self._down(error)

    def accept(self) -> None:
        """Take note of an answer that was one."""
        self._failed = 0

    def run(self) -> None:
        """Look for the service while the line is down, and carry calls while it is up."""
        while True:
            if self.service is None:
                if self._failed:
                    time.sleep(PAUSES[min(self._failed, len(PAUSES)) - 1])
                self._look()
                continue
            with self._changed:
                self._changed.wait_for(lambda: self._calls or self.service is None)
                if not self._calls:
                    continue
                body, call = self._calls.pop(0)
            try:
                call.set_result(self._exchange("POST", "/propose", body))
            except Exception as error:  # whatever it was, the caller decodes plainly
                self._hang_up()
                down = LineDown(f"expected drafts, found {_words(error)}")
                self._down(down)
                call.set_exception(down)

    def _look(self) -> None:
        try:
            service = decode_service(self._exchange("GET", "/health"))
        except Exception as error:
            self._hang_up()
            self._down(LineDown(f"expected a draft service, found {_words(error)}"))
            return
        with self._changed:
            self._calls.clear()  # those that nobody waits for any more
            self.service = service
        self._say.info(f"{self._where}: drafts of {service.model}, texts of up to {service.max_length} tokens")

    def _down(self, error: Exception) -> None:
        with self._changed:
            self.service = None
            self._failed += 1
            self._changed.notify()
        self._say.warning(f"{self._where}: {error}; decoding goes on plainly")

    def _exchange(self, method: str, path: str, body: bytes | None = None) -> bytes:
        """Send a request and return the body of its answer; once more where a silent connection had been closed."""
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
            kind = http.client.HTTPSConnection if address.secure else http.client.HTTPConnection
            self._connection = kind(address.host, address.port, timeout=max(self.timeout, 1.0))
        self._connection.request(method, address.path + path, body, self._headers)
        response = self._connection.getresponse()
        content = response.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise ProtocolError(f"answer: expected at most {MOST_BYTES} bytes, found more")
        if response.status != 200:
            words = content[:1000].decode("utf-8", "replace")
            words = words.replace(self._key, "***") if self._key else words  # some servers repeat it
            raise http.client.HTTPException(f"{response.status} {words}")
        return content

    def _hang_up(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    @property
    def _where(self) -> str:
        port = "" if self._address.port is None else f":{self._address.port}"
        return f"draft service {self._address.host}{port}"


class Seldom:
    """A log that says things once a minute at most, so that a service which comes and goes does not fill it."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic):
        self._log, self._clock = log, clock
        self._last: dict[int, float] = {}

    def info(self, line: str) -> None:
        """Say that something is well."""
        self._at(logging.INFO, line)

    def warning(self, line: str) -> None:
        """Say that something is not."""
        self._at(logging.WARNING, line)

    def _at(self, level: int, line: str) -> None:
        now = self._clock()
        if now - self._last.get(level, -SILENCE) >= SILENCE:
            self._last[level] = now
            self._log.log(level, "%s", line)


def _words(error: Any) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}".rstrip(": ")
