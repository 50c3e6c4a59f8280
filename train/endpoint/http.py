"""Requests to an inference server, each sent once, with the same errors, time limits and sizes for all callers."""

import asyncio
import os
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx2

from draftsmith.decode.errors import InputError
from draftsmith.decode.validation import parse, parse_answer, parse_json

T = TypeVar("T")
MOST_BYTES = 2**26  # the size limit of an answer: 32k tokens with their text take a hundredth of it
MOST_WORDS = 300  # the most characters of a server's message that ours quotes
BUSY = frozenset({429, 503})
TEMPORARY = frozenset({408, 425, 429})  # refusals (4xx) that do not mean that the request is wrong


class ServerFailure(RuntimeError):
    """A server's failure to answer properly that is not the input's fault, in one line.

    It is `temporary` if the same request may be answered later, and `busy` if the server has too much to do.
    `retry_after` is the wait in seconds that the server asks for.
    """

    def __init__(self, line: str, temporary: bool = True, busy: bool = False, retry_after: float = 0.0):
        super().__init__(line)
        self.temporary, self.busy, self.retry_after = temporary, busy, retry_after


@cache
def _certificates(file: str | None, directory: str | None) -> ssl.SSLContext:
    """Return the certificate authorities to trust; the arguments are SSL_CERT_FILE and SSL_CERT_DIR, as a cache key.

    Reading them takes longer than a request, and there is a client per server.
    """
    return httpx2.create_ssl_context()


class HttpClient:
    """A client for requests to one server; an asynchronous context manager.

    Paths are added to `url`. `name` is the option that gave the URL, for messages, and `key_field` the option that
    named `key_env`, the environment variable with the API key. `timeout` is in seconds, for one whole answer. A missing
    key raises an InputError.
    """

    def __init__(
        self, url: str, name: str, key_env: str | None = None, timeout: float = 600.0, key_field: str | None = None
    ):
        self.url, self.name, self.timeout = url, name, timeout
        self.key = api_key(key_env, key_field or f"{name}_key_env")
        self._client = httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {self.key}"} if self.key else None,
            timeout=None,
            limits=httpx2.Limits(max_connections=None),
            verify=_certificates(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR")),
        )

    async def __aenter__(self) -> Self:
        """Return the client."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the connections."""
        await self._client.aclose()

    @asynccontextmanager
    async def stream(
        self,
        method: str,
        path: str,
        what: str = "an answer",
        timeout: float | None = None,
        connect: float | None = None,
        **request: Any,
    ) -> AsyncIterator[httpx2.Response]:
        """Yield the answer to a request with any status, before its body is read.

        `what` names the answer in messages. `timeout` is in seconds, for the whole answer; `connect`, within it, for
        the connection. `request` holds httpx's `json`, or `content` and `headers`.

        Raises:
            ServerFailure: no answer, an answer that breaks off, or none within the timeout.
        """
        where, seconds = f"{self.url}{path}", self.timeout if timeout is None else timeout
        waits = httpx2.Timeout(None, connect=connect)
        try:
            async with (
                asyncio.timeout(seconds),
                self._client.stream(method, where, timeout=waits, **request) as response,
            ):
                yield response
        except TimeoutError as error:
            raise self.failure(what, where, f"no whole answer within {seconds:.3g} s", busy=True) from error
        except httpx2.RequestError as error:
            raise self.failure(what, where, f"{type(error).__name__} {error}") from error

    @asynccontextmanager
    async def accepted(
        self, path: str, body: Any = None, what: str = "an answer", timeout: float | None = None, **request: Any
    ) -> AsyncIterator[httpx2.Response]:
        """Yield the answer to a POST of `body`, or to a GET without one, if the server accepts the request (200).

        Raises:
            InputError: the request is refused (4xx).
            ServerFailure: as `stream`, and for any other status.
        """
        async with self.stream(
            "GET" if body is None else "POST", path, what, timeout, json=body, **request
        ) as response:
            status = response.status_code
            if status != 200:
                words = server_words(await self.whole_body(response)) or response.reason_phrase
                retry_after = response.headers.get("Retry-After", "")  # seconds; a date is ignored
                failure = self.failure(
                    what,
                    f"{self.url}{path}",
                    f"{status} {words}",
                    busy=status in BUSY,
                    retry_after=float(retry_after) if retry_after.isdecimal() else 0.0,
                )
                raise InputError(str(failure)) if status < 500 and status not in TEMPORARY else failure
            yield response

    async def get_text(self, path: str) -> str:
        """Return the text at a path; raises as `accepted`."""
        async with self.accepted(path) as response:
            return (await self.whole_body(response)).decode("utf-8", "replace")

    async def fetch(
        self, kind: type[T], path: str, body: Any = None, what: str | None = None, timeout: float | None = None
    ) -> T:
        """Return the JSON answer to a POST of `body`, or to a GET without one, as an instance of `kind`.

        It raises as `accepted`, and a ServerFailure if the answer does not fit `kind`.
        """
        async with self.accepted(path, body, what or "an answer", timeout) as response:
            content = await self.whole_body(response)
        return self.read(kind, content, path, what, names=body is None)

    def read(self, kind: type[T], content: str | bytes, path: str, what: str | None = None, names: bool = False) -> T:
        """Return the JSON from a path as an instance of a class, or raise a ServerFailure, temporary if it is no JSON.

        With `names`, strings must be whole; otherwise a text may be cut within a character (`parse_answer`).
        """
        where = f"{self.name}: {f'{what} from ' if what else ''}{self.url}{path}"
        try:
            return (parse if names else parse_answer)(kind, content, where, self.key)
        except InputError as error:
            raise ServerFailure(self.hidden(str(error)), temporary=not _is_json(content)) from error

    async def whole_body(self, response: httpx2.Response) -> bytes:
        """Return an answer's body; raise a ServerFailure if it is too long."""
        content = bytearray()
        async for part in response.aiter_bytes():
            content += part
            if len(content) > MOST_BYTES:
                raise self.too_long(str(response.url))
        return bytes(content)

    async def events(self, path: str, body: Any, marked: bool = True) -> AsyncIterator[str]:
        """Yield the data of server-sent events as they arrive, up to `[DONE]` if `marked`; raises as `accepted`."""
        # llama-server, which marks no end, closes the connection after a stream without saying that it will.
        headers = {} if marked else {"Connection": "close"}
        async with self.accepted(path, body, headers=headers) as response:
            async for line in self._lines(response):
                if line.startswith("data:"):
                    data = line[5:].strip()
                    if data == "[DONE]":
                        return
                    yield data
        if marked:
            raise self.broken_off(path)

    async def _lines(self, response: httpx2.Response) -> AsyncIterator[str]:
        """Yield an answer's lines as they arrive. Only line feeds end them: JSON may hold U+2028 and the like."""
        rest = bytearray()
        async for part in response.aiter_bytes():
            rest += part
            if b"\n" in part:
                *lines, rest = rest.split(b"\n")
                for line in lines:
                    yield line.decode("utf-8", "replace")
            if len(rest) > MOST_BYTES:
                raise self.too_long(str(response.url))
        yield rest.decode("utf-8", "replace")

    def failure(self, what: str, where: str, problem: str, **about: Any) -> ServerFailure:
        """Return the failure of a server that gave something unexpected; `about` goes to `ServerFailure`."""
        return ServerFailure(f"{self.name}: expected {what} from {where}, found {self.hidden(problem)}", **about)

    def broken_off(self, path: str) -> ServerFailure:
        """Return the failure of an answer that ends too early."""
        return self.failure("a whole answer", f"{self.url}{path}", "one that breaks off")

    def too_long(self, where: str) -> ServerFailure:
        """Return the failure of an answer beyond the size limit."""
        return self.failure(f"an answer of at most {MOST_BYTES} bytes", where, "more", temporary=False)

    def hidden(self, words: str) -> str:
        """Return a server's message on one line, without the API key, which some servers repeat."""
        words = words.replace(self.key, "***") if self.key else words  # before the cut, which could leave half a key
        return " ".join(words.encode("utf-8", "backslashreplace").decode("utf-8").split())[:MOST_WORDS]


def api_key(variable: str | None, name: str) -> str | None:
    """Return the API key in an environment variable, named by the option `name`; None if no variable is named."""
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    # The client library's error would print a key with other characters.
    if not key or not key.isascii() or not key.isprintable():
        raise InputError(f"{name}: expected an API key in the environment variable {variable}, found none")
    return key


def server_words(content: bytes) -> str:
    """Return the server's message: OpenAI's and vLLM's `error.message`, SGLang's `message`, FastAPI's `detail`."""
    text = content.decode("utf-8", "replace")
    try:
        body = parse_json(text)
    except ValueError:
        return text
    if isinstance(body, dict):
        error = body.get("error", body)
        body = (error.get("message") or error.get("detail") or body) if isinstance(error, dict) else error
    return str(body)


def _is_json(content: str | bytes) -> bool:
    try:
        parse_json(content)
    except ValueError:
        return False
    return True
