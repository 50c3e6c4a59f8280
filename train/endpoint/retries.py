"""Many requests at once, and requests that are sent again after failures: how many, how often, with which waits."""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

from draftsmith.decode.errors import InputError
from draftsmith.train.data.prepare_config import PrepareConfig
from draftsmith.train.endpoint.client import KEY, Client, server_key
from draftsmith.train.endpoint.http import HttpClient, ServerFailure

T = TypeVar("T")
FIRST_WAIT, LONGEST_BACKOFF, LONGEST_WAIT = 1.0, 60.0, 600.0  # seconds; the last bounds Retry-After
TIMEOUT, TRIES = 600.0, 9  # the seconds of an answer, and the requests for it
FIRST_REQUESTS, MOST_REQUESTS = 64, 1024

logger = logging.getLogger(__name__)


class RetryingClient(Client):
    """A client of the server of `prepare`, which sends requests for whole answers again."""

    def __init__(self, config: PrepareConfig):
        self.config, self.window = config, Window()
        root = (config.endpoint or "").rstrip("/").removesuffix("/completions")
        HttpClient.__init__(self, root, "endpoint", server_key(), TIMEOUT, KEY)

    async def fetch(
        self, kind: type[T], path: str, body: Any = None, what: str | None = None, timeout: float | None = None
    ) -> T:
        """Return the JSON answer as an instance of `kind`, from the first request that succeeds.

        Broken JSON is requested again, but JSON that does not fit `kind` is an error. The InputError says whether the
        server refused, or every try failed.
        """
        path = path.removeprefix("/v1")  # the URL has it, or another root
        for attempt in range(1, TRIES + 1):
            try:
                answer = await super().fetch(kind, path, body, what, timeout)
            except ServerFailure as error:
                failure = error
            else:
                self.window.grow()
                return answer
            if not failure.temporary:
                raise InputError(str(failure)) from failure
            if failure.busy:
                self.window.shrink()
            if attempt < TRIES:
                backoff = min(FIRST_WAIT * 2 ** (attempt - 1), LONGEST_BACKOFF) * random.uniform(0.5, 1)
                wait = min(max(backoff, failure.retry_after), LONGEST_WAIT)
                logger.warning("%s; next try in %.0f s", failure, wait)
                await asyncio.sleep(wait)
        again = "finished shards are kept, run the same command again"
        raise InputError(f"{failure} in the last of {TRIES} tries; {again}")


class Window:
    """A limit of requests sent at once, which adapts to the server.

    It grows by one for each answer, and halves when the server is busy (Chiu and Jain 1989, "Analysis of
    the increase and decrease algorithms for congestion avoidance"). Too few requests leave a server idle; too many only
    wait longer.
    """

    def __init__(self, size: int | None = None):
        self.size, self._taken = size or FIRST_REQUESTS, 0
        self._answered = True  # since the last shrink: requests refused together count once
        self._freed = asyncio.Event()

    async def enter(self) -> None:
        """Wait until one more request may be sent."""
        while self._taken >= self.size:
            self._freed.clear()
            await self._freed.wait()
        self._taken += 1

    def leave(self) -> None:
        """Record the end of a request."""
        self._taken -= 1
        self._freed.set()

    def grow(self) -> None:
        """Record an answer of the server."""
        self._answered = True
        self.size = min(self.size + 1, MOST_REQUESTS)

    def shrink(self) -> None:
        """Record that the server is busy."""
        if self._answered:
            self.size, self._answered = max(self.size // 2, 1), False


async def ask_all(items: Iterable[T], ask: Callable[[T], Awaitable[None]], window: Window) -> None:
    """Await `ask` of each item, in order, as many at once as the window allows.

    The first error cancels all other requests, and is raised alone.
    """

    async def work(item: T) -> None:
        try:
            await ask(item)
        finally:
            window.leave()

    try:
        async with asyncio.TaskGroup() as group:
            for item in items:
                await window.enter()
                group.create_task(work(item))
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
