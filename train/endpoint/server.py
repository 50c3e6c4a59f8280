"""Requests to an inference server: how many at once, how long each is waited for, and when it is sent again."""

import asyncio
import logging
import os
import random
import time
from typing import Any, TypeVar

import httpx2

from draftsmith.decode.errors import InputError, first_line
from draftsmith.decode.validation import answered, parse_json, parsed
from draftsmith.train.data.prepare_config import PrepareConfig

T = TypeVar("T")
FIRST_WAIT, LONGEST_BACKOFF, LONGEST_WAIT = 1.0, 60.0, 600.0  # seconds; the last bounds what Retry-After may ask for
FIRST_REQUESTS, MOST_REQUESTS = 64, 1024
BUSY = (429, 503)
MOST_BYTES = 2**26
"""Of an answer: 32k tokens with their text are a hundredth of it."""

logger = logging.getLogger(__name__)


class Server:
    """Requests to one server, sent again where that may help.

    Raises:
        InputError: the environment variable of the key is not set, or holds no key; the environment names a proxy or
            certificates that cannot be used.
    """

    def __init__(self, config: PrepareConfig):
        self.config = config
        self.url = (config.endpoint or "").rstrip("/")
        self.key = api_key(config.endpoint_key_env, "endpoint_key_env")
        self.window = Window(config.endpoint_concurrency)
        self.client = http_client("endpoint", self.key)
        # SGLang's native API: https://docs.sglang.io/basic_usage/native_api.html
        self.native = self.url.endswith("/generate")
        self.base = self.url.removesuffix("/generate") + "/v1" if self.native else self.url.removesuffix("/completions")

    async def call(self, kind: type[T], path: str, what: str, body: dict[str, Any] | None = None) -> T:
        """Return what a path answers with: to a POST of `body`, or to a GET where there is none.

        Args:
            kind: what is expected; broken JSON is asked for again, an answer that says something else is an error.
            path: of the server's API.
            what: is asked for, for messages.
            body: of the request.

        Raises:
            InputError: it was refused, every try failed, or the deadline has passed; says for `what`, where, and in the
            server's words why.
        """
        url = self.url if self.native and path == "/completions" else self.base + path
        tries, end = self.config.endpoint_retries + 1, time.monotonic() + self.config.endpoint_deadline
        for attempt in range(1, tries + 1):
            wait = min(FIRST_WAIT * 2 ** (attempt - 1), LONGEST_BACKOFF) * random.uniform(0.5, 1)
            left = min(self.config.endpoint_timeout, max(end - time.monotonic(), 0.0))
            try:
                async with asyncio.timeout(left):
                    response, content = await self._request(url, body)
            except TimeoutError:
                found = f"no whole answer within {left:.0f} s"
                self.window.shrink()
            except httpx2.RequestError as error:
                found = f"{type(error).__name__} {error}"
            else:
                status = response.status_code
                if status == 200:
                    try:
                        parse_json(content.decode("utf-8"))
                    except ValueError as error:
                        found = f"broken JSON ({error})"
                    else:
                        self.window.grow()
                        read = parsed if body is None else answered  # a text may be cut in two, a name is not
                        return read(kind, content, f"endpoint: {what} from {url}", self.key)
                else:
                    found = f"{status} {server_words(content) or response.reason_phrase}"
                    if status != 429 and status < 500:
                        raise InputError(self._error(what, url, found))
                    if status in BUSY:
                        self.window.shrink()
                    asked = response.headers.get("Retry-After", "")  # seconds, or a date, which is not looked at
                    wait = min(max(wait, float(asked) if asked.isdecimal() else 0), LONGEST_WAIT)
            late = time.monotonic() + wait > end
            if late or attempt == tries:
                break
            logger.warning("%s; next try in %.0f s", self._error(what, url, found), wait)
            await asyncio.sleep(wait)
        raise InputError(
            f"{self._error(what, url, found)} in the last of {attempt} tries"
            + (f" within endpoint_deadline ({self.config.endpoint_deadline:g} s)" if late else "")
            + "; finished shards are kept, run the same command again"
        )

    async def _request(self, url: str, body: dict[str, Any] | None) -> tuple[httpx2.Response, bytes]:
        """Return an answer and its bytes."""
        content = bytearray()
        async with self.client.stream("GET" if body is None else "POST", url, json=body) as response:
            async for part in response.aiter_bytes():
                content += part
                if len(content) > MOST_BYTES:
                    raise InputError(
                        f"endpoint: expected an answer of at most {MOST_BYTES} bytes from {url}, found more"
                    )
            return response, bytes(content)

    def _error(self, what: str, url: str, found: str) -> str:
        found = found.encode("utf-8", "backslashreplace").decode("utf-8")
        if self.key:  # some servers repeat it when they refuse it
            found = found.replace(self.key, "***")
        return f"endpoint: expected {what} from {url}, found {' '.join(found.split())[:300]}"


class Window:
    """How many requests are under way: a fixed number, or as many as the server takes.

    Without a number, one more for each answer and half as many where the server is busy (Chiu and Jain 1989, "Analysis
    of the increase and decrease algorithms for congestion avoidance"): too few leave a server idle, and from one that
    batches as many as it can, more do no harm but that each waits longer.
    """

    def __init__(self, fixed: int | None):
        self.size, self._fixed, self._taken = fixed or FIRST_REQUESTS, fixed is not None, 0
        self._answered = True  # since it last shrank: what is refused together is refused once
        self._freed = asyncio.Event()

    async def enter(self) -> None:
        """Wait until one request more may be under way."""
        while self._taken >= self.size:
            self._freed.clear()
            await self._freed.wait()
        self._taken += 1

    def leave(self) -> None:
        """Say that a request has ended."""
        self._taken -= 1
        self._freed.set()

    def grow(self) -> None:
        """Say that the server has answered."""
        self._answered = True
        if not self._fixed:
            self.size = min(self.size + 1, MOST_REQUESTS)

    def shrink(self) -> None:
        """Say that the server has too much to do."""
        if self._answered and not self._fixed:
            self.size, self._answered = max(self.size // 2, 1), False


def api_key(variable: str | None, name: str) -> str | None:
    """Return the API key that an environment variable holds; None where no variable is named.

    Raises:
        InputError: it holds none; says by which option (`name`) it was named.
    """
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    # A key with other characters would be printed by the client library's error.
    if not key or not key.isascii() or not key.isprintable():
        raise InputError(f"{name}: expected an API key in the environment variable {variable}, found none")
    return key


def http_client(name: str, key: str | None, connections: int | None = None) -> httpx2.AsyncClient:
    """Return a client that sends a key and waits without end: who asks says how long.

    Args:
        name: the option that named the server, for the message.
        key: the server's API key, if it has one.
        connections: open at once, at most.

    Raises:
        InputError: the environment names a proxy or certificates that cannot be used.
    """
    try:
        return httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else None,
            timeout=None,
            limits=httpx2.Limits(max_connections=connections),
        )
    except Exception as error:  # the environment's words raise anything
        kind = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
        raise InputError(
            f"{name}: expected a proxy and certificates that can be used in the environment, found: "
            f"{kind}{first_line(error)}"
        ) from error


def server_words(content: bytes) -> str:
    """Return the server's words: OpenAI's and vLLM's `error.message`, SGLang's `message`, FastAPI's `detail`."""
    said = content.decode("utf-8", "replace")
    try:
        body = parse_json(said)
    except ValueError:
        return said
    if isinstance(body, dict):
        error = body.get("error", body)
        body = (error.get("message") or error.get("detail") or body) if isinstance(error, dict) else error
    return str(body)
