"""An ingress: it reads requests of OpenAI's API, has a server chosen, and passes the answer back."""

import asyncio
import hmac
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from draftsmith.decode.errors import InputError
from draftsmith.scripts.services.coordinate.config import CoordinatorConfig
from draftsmith.scripts.services.coordinate.relay import LeaseOutcome, Relay, RelayedAnswer, refusal
from draftsmith.scripts.services.coordinate.request import INVALID, ApiError, CompletionRequest, Keywords, read_request
from draftsmith.scripts.services.coordinate.request_log import assembled
from draftsmith.scripts.services.coordinate.routing import DOWN, UNKNOWN, Facts, Lease, Refusal
from draftsmith.scripts.services.http_server import BodyError, BodyReader
from draftsmith.train.endpoint.http import HttpClient, api_key

WORD = 2.0
"""Seconds between two words of an ingress on all the leases that it holds."""
PATIENCE = 30.0
"""Seconds that requests wait for a dispatcher that is away."""
UNDER_WAY = 1024
"""Requests that one ingress passes on at once; further ones are refused."""
BODIES = 2**28
"""Bytes of requests' bodies that one ingress reads at once; further ones are refused."""
LOGGER = logging.getLogger(__name__)

Wanted = tuple[Facts, list[str]]
"""A request that a server is wanted for, and those that have failed it."""
Exchange = Callable[[str, list[LeaseOutcome], list[Wanted], list[Lease] | None], Awaitable[list[Lease | Refusal]]]
Entry = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]
"""Of the log: request, answer, what else is known."""


class Line:
    """The line to the dispatcher: has servers chosen, and says what has ended.

    One call at a time takes all that has come up since the one before. What has ended is said in the background, and
    again until it has been heard: not in the requests' own tasks, which are cancelled when their clients leave.

    Args:
        exchange: see `Dispatcher.exchange`.
    """

    def __init__(self, exchange: Exchange):
        self.holder, self.held = uuid4().hex, dict[str, Lease]()
        self._exchange, self._outcomes, self._news = exchange, list[LeaseOutcome](), asyncio.Event()
        self._wanted: list[tuple[Wanted, asyncio.Future[Lease | Refusal]]] = []
        self._talking = asyncio.create_task(self._talk_on())

    async def acquire(self, facts: Facts, tried: list[str]) -> Lease | Refusal:
        """Have a server chosen; what is chosen is held from now on."""
        chosen: asyncio.Future[Lease | Refusal] = asyncio.get_running_loop().create_future()
        self._wanted.append(((facts, list(tried)), chosen))
        self._news.set()
        return await chosen

    def ended(self, outcome: LeaseOutcome) -> None:
        """Note what became of a request."""
        self.held.pop(outcome.lease.id, None)
        self._outcomes.append(outcome)
        self._news.set()

    async def _talk_on(self) -> None:
        loop = asyncio.get_running_loop()
        silent_since, word_at = math.inf, loop.time()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(word_at):
                    await self._news.wait()
            self._news.clear()
            self._wanted = [each for each in self._wanted if not each[1].done()]  # whose clients have not left
            outcomes, wanted = self._outcomes[:], self._wanted[:]
            held = list(self.held.values()) if loop.time() >= word_at else None
            try:
                async with asyncio.timeout(PATIENCE):
                    chosen = await self._exchange(self.holder, outcomes, [each for each, _ in wanted], held)
            except Exception:  # a new dispatcher starts: all is said again, held leases first
                await asyncio.sleep(0.5)
                silent_since, word_at = min(silent_since, loop.time()), loop.time()
                if loop.time() - silent_since < PATIENCE:
                    continue
                outcomes, chosen = [], [Refusal(DOWN)] * len(wanted)
            else:
                silent_since = math.inf
                if held is not None:
                    word_at = loop.time() + WORD
            del self._outcomes[: len(outcomes)], self._wanted[: len(wanted)]
            for (_, future), choice in zip(wanted, chosen, strict=True):
                self._give(future, choice)

    def _give(self, future: asyncio.Future[Lease | Refusal], choice: Lease | Refusal) -> None:
        if isinstance(choice, Lease):
            self.held[choice.id] = choice
        if not future.done():
            future.set_result(choice)
        elif isinstance(choice, Lease):  # its client has left
            self.ended(LeaseOutcome(choice))


class Ingress:
    """Answers requests.

    Args:
        config: pairs, limits, the key.
        exchange: see `Line`.
        write: writes an entry of the log; None where there is none.
        begun: when the coordinator was started, in seconds since 1970: what it says of each model.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        exchange: Exchange,
        write: Callable[[Entry], Awaitable[None]] | None,
        begun: int,
    ):
        self.config, self._write = config, write
        self.line, self.keywords = Line(exchange), Keywords(config.rules)
        self.key, self.begun = api_key(config.key_env, "key_env"), begun
        self.clients = {
            url: HttpClient(url, f"pairs.{pair.name}", pair.key_env, config.timeout)
            for pair in config.pairs
            for url in pair.endpoints
        }
        self.server_models = {pair.name: pair.server_model for pair in config.pairs}
        self._bodies = BodyReader(config.max_body_bytes, max(BODIES, config.max_body_bytes))
        self._writing: set[asyncio.Task[None]] = set()

    async def complete(self, request: Request, path: str) -> Response:
        """Answer a request for a completion."""
        self.require_key(request.headers)
        if len(self.line.held) >= UNDER_WAY:
            raise ApiError(429, "too many requests are under way; try again", "rate_limit_error")
        content = await self._body(request)
        asked = read_request(path, content, request.headers, self.keywords)
        # Ids cannot be redacted, nor learned from without the tokenizer that made them.
        logged = None if self._write is None or not _is_text(asked) else self._logged(asked)
        return Relay(asked, self.line, self.clients, self.server_models, logged)

    async def _body(self, request: Request) -> bytes:
        """Return a request's body.

        Raises:
            ApiError: it is too large, does not come whole or in time, or too many come at once.
        """
        try:
            async with asyncio.timeout(self.config.timeout):
                return await self._bodies.read(request)
        except BodyError as error:
            raise ApiError(error.status, str(error), "server_error" if error.status == 503 else INVALID) from None
        except TimeoutError:
            seconds = f"{self.config.timeout:g} s"
            raise ApiError(408, f"body: expected all of it within {seconds}, found less") from None
        except ClientDisconnect:
            raise ApiError(400, "body: expected all of it, found a closed connection") from None

    def models(self) -> dict[str, Any]:
        """Return the list of models, in OpenAI's shape."""
        return {"object": "list", "data": [self.model(name) for name in self.config.models]}

    def model(self, name: str) -> dict[str, Any]:
        """Return one model, in OpenAI's shape.

        Raises:
            ApiError: it is not served.
        """
        if name not in self.config.models:
            raise refusal(Refusal(UNKNOWN), name)
        return {"id": name, "object": "model", "created": self.begun, "owned_by": "draftsmith"}

    def require_key(self, headers: Mapping[str, str]) -> None:
        """Require the key of a client, where one is asked for.

        Raises:
            ApiError: it is another, or none.
        """
        if self.key is not None:
            given = headers.get("authorization", "")
            if not hmac.compare_digest(given.encode(), f"Bearer {self.key}".encode()):
                line = "authorization: expected the API key, found another or none"
                raise ApiError(401, line, "authentication_error")

    def _logged(self, asked: CompletionRequest) -> Callable[[RelayedAnswer], Awaitable[None]]:
        """Return what writes a request and its answer once that has gone out."""
        begun = datetime.now(UTC).isoformat(timespec="milliseconds")

        async def logged(kept: RelayedAnswer) -> None:
            # In a task of its own, which the client's leaving does not cancel; waited for, so that a server that is
            # stopped writes it before it ends.
            writing = asyncio.create_task(self._log(asked, kept, begun))
            self._writing.add(writing)
            writing.add_done_callback(self._writing.discard)
            await asyncio.shield(writing)

        return logged

    async def _log(self, asked: CompletionRequest, kept: RelayedAnswer, begun: str) -> None:
        """Write a request and its answer; what cannot be written is a line in this process's log, without its texts."""
        if kept.status != 200 or self._write is None:
            return
        try:
            answer = await asyncio.to_thread(assembled, bytes(kept.content), asked.streams)
            if answer is None:
                return
            about: dict[str, Any] = {"id": uuid4().hex, "time": begun, "path": asked.path, "pair": kept.pair}
            about |= {"category": asked.facts.category} if asked.facts.category is not None else {}
            about |= {"seconds": round(kept.seconds, 6), "first_byte_seconds": round(kept.first_byte or 0.0, 6)}
            await self._write((dict(asked.body), answer, about))
        except InputError as error:
            LOGGER.warning("log: an answer of %s is left out: %s", kept.pair, error)
        except Exception as error:  # a disk that is full, a redaction that fails: other requests go on
            LOGGER.warning("log: an answer of %s is left out: %s", kept.pair, type(error).__name__)


def _is_text(asked: CompletionRequest) -> bool:
    return isinstance(asked.body.get("messages", asked.body.get("prompt")), list if "messages" in asked.body else str)
