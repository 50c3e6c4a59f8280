"""An ingress: serves OpenAI's API, `/health` and `/metrics`, gets a server for each request, and relays the answers."""

import asyncio
import hmac
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from draftsmith.decode.errors import InputError
from draftsmith.scripts.services.coordinate.config import CoordinatorConfig
from draftsmith.scripts.services.coordinate.relay import LeaseOutcome, Relay, RelayedAnswer, error_response, refusal
from draftsmith.scripts.services.coordinate.request import (
    CHAT,
    INVALID,
    TEXT,
    ApiError,
    CompletionRequest,
    Keywords,
    read_request,
)
from draftsmith.scripts.services.coordinate.request_log import unstreamed_answer
from draftsmith.scripts.services.coordinate.routing import DOWN, UNKNOWN, Facts, Lease, Refusal
from draftsmith.scripts.services.http_server import BodyError, BodyReader
from draftsmith.train.endpoint.http import HttpClient, api_key

REPORT_SECONDS = 2.0  # between two reports of all leases that an ingress holds
PATIENCE = 30.0  # seconds that requests wait for a dispatcher that is away
MOST_HELD = 1024  # requests that an ingress relays at once; further ones are refused
BODIES = 2**28  # bytes of requests' bodies that an ingress reads at once; further ones are refused
HEALTH_SECONDS, METRICS_SECONDS = 0.5, 5.0  # wait for the dispatcher; callers of /health have short timeouts too
LOGGER = logging.getLogger(__name__)

ServerRequest = tuple[Facts, list[str]]  # a request that needs a server, and the servers that have failed it
Exchange = Callable[
    [str, list[LeaseOutcome], list[ServerRequest], list[Lease] | None], Awaitable[list[Lease | Refusal]]
]
LogEntry = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]  # of the log: request, answer, further facts


class Line:
    """The line to the dispatcher: gets servers for requests and reports outcomes through `Dispatcher.exchange`.

    One call at a time carries everything since the last one. Outcomes are reported in the background and repeated until
    a call succeeds. The requests' own tasks cannot do that, because they are cancelled when their clients leave.
    """

    def __init__(self, exchange: Exchange):
        self.holder, self.held = uuid4().hex, dict[str, Lease]()
        self._exchange, self._outcomes, self._news = exchange, list[LeaseOutcome](), asyncio.Event()
        self._wanted: list[tuple[ServerRequest, asyncio.Future[Lease | Refusal]]] = []
        self._talking = asyncio.create_task(self._talk_on())

    async def acquire(self, facts: Facts, failed_urls: list[str]) -> Lease | Refusal:
        """Return a server's lease, held from now on, or a refusal."""
        future: asyncio.Future[Lease | Refusal] = asyncio.get_running_loop().create_future()
        self._wanted.append(((facts, list(failed_urls)), future))
        self._news.set()
        return await future

    def ended(self, outcome: LeaseOutcome) -> None:
        """Queue the outcome of a request for the next report."""
        self.held.pop(outcome.lease.id, None)
        self._outcomes.append(outcome)
        self._news.set()

    async def _talk_on(self) -> None:
        loop = asyncio.get_running_loop()
        silent_since, report_at = math.inf, loop.time()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(report_at):
                    await self._news.wait()
            self._news.clear()
            # Clients that have left need no server any more.
            self._wanted = [(request, future) for request, future in self._wanted if not future.done()]
            outcomes, wanted = self._outcomes[:], self._wanted[:]
            held = list(self.held.values()) if loop.time() >= report_at else None
            try:
                async with asyncio.timeout(PATIENCE):
                    choices = await self._exchange(self.holder, outcomes, [request for request, _ in wanted], held)
            except Exception:  # a new dispatcher is starting: repeat everything, beginning with the held leases
                await asyncio.sleep(0.5)
                silent_since, report_at = min(silent_since, loop.time()), loop.time()
                if loop.time() - silent_since < PATIENCE:
                    continue
                outcomes, choices = [], [Refusal(DOWN)] * len(wanted)
            else:
                silent_since = math.inf
                if held is not None:
                    report_at = loop.time() + REPORT_SECONDS
            # What was added during the call stays for the next one.
            del self._outcomes[: len(outcomes)], self._wanted[: len(wanted)]
            for (_, future), choice in zip(wanted, choices, strict=True):
                self._give(future, choice)

    def _give(self, future: asyncio.Future[Lease | Refusal], choice: Lease | Refusal) -> None:
        if isinstance(choice, Lease):
            self.held[choice.id] = choice
        if not future.done():
            future.set_result(choice)
        elif isinstance(choice, Lease):  # the client has left meanwhile: return the lease
            self.ended(LeaseOutcome(choice))


class Ingress:
    """Answers requests, and gives log entries to `write`, if there is a log.

    `begun` is the coordinator's start in seconds since 1970, which the list of models repeats as their creation time.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        exchange: Exchange,
        write: Callable[[LogEntry], Awaitable[None]] | None,
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
        if len(self.line.held) >= MOST_HELD:
            raise ApiError(429, "too many requests are under way; try again", "rate_limit_error")
        content = await self._body(request)
        completion = read_request(path, content, request.headers, self.keywords)
        # Token ids cannot be redacted, nor used for training without their tokenizer.
        logged = None if self._write is None or not _is_text(completion) else self._logged(completion)
        if logged is not None and self.config.log is not None and self.config.log.token_ids:
            completion = replace(completion, added={"return_token_ids": True})
        return Relay(completion, self.line, self.clients, self.server_models, logged)

    async def _body(self, request: Request) -> bytes:
        """Return a request's body; raise ApiError if it is too large, incomplete or late, or too many arrive."""
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
        """Return one model in OpenAI's shape; raise ApiError if it is not served."""
        if name not in self.config.models:
            raise refusal(Refusal(UNKNOWN), name)
        return {"id": name, "object": "model", "created": self.begun, "owned_by": "draftsmith"}

    def require_key(self, headers: Mapping[str, str]) -> None:
        """Raise ApiError if a key is required and the client has not sent it."""
        if self.key is not None:
            authorization = headers.get("authorization", "")
            if not hmac.compare_digest(authorization.encode(), f"Bearer {self.key}".encode()):
                line = "authorization: expected the API key, found another or none"
                raise ApiError(401, line, "authentication_error")

    def _logged(self, completion: CompletionRequest) -> Callable[[RelayedAnswer], Awaitable[None]]:
        """Return a function that logs a request with its answer after the answer is out."""
        begun = datetime.now(UTC).isoformat(timespec="milliseconds")

        async def logged(answer: RelayedAnswer) -> None:
            # In a task of its own, which survives the client's leaving; awaited, so that a stopping server finishes it.
            writing = asyncio.create_task(self._log(completion, answer, begun))
            self._writing.add(writing)
            writing.add_done_callback(self._writing.discard)
            await asyncio.shield(writing)

        return logged

    async def _log(self, completion: CompletionRequest, relayed: RelayedAnswer, begun: str) -> None:
        """Log a request with its answer; a failure is a line in this process's log, without their texts."""
        if relayed.status != 200 or self._write is None:
            return
        try:
            answer = await asyncio.to_thread(unstreamed_answer, bytes(relayed.content), completion.streams)
            if answer is None:
                return
            about: dict[str, Any] = {"id": uuid4().hex, "time": begun, "path": completion.path, "pair": relayed.pair}
            about |= {"category": completion.facts.category} if completion.facts.category is not None else {}
            about |= {"seconds": round(relayed.seconds, 6), "first_byte_seconds": round(relayed.first_byte or 0.0, 6)}
            await self._write((dict(completion.body), answer, about))
        except InputError as error:
            LOGGER.warning("log: an answer of %s is left out: %s", relayed.pair, error)
        except Exception as error:  # a full disk or a failing redaction must not stop other requests
            LOGGER.warning("log: an answer of %s is left out: %s", relayed.pair, type(error).__name__)


def _is_text(completion: CompletionRequest) -> bool:
    body = completion.body
    return isinstance(body.get("messages", body.get("prompt")), list if "messages" in body else str)


def ingress_app(
    ingress: Ingress, well: Callable[[], Awaitable[bool]], metrics: Callable[[], Awaitable[bytes]]
) -> Starlette:
    """Return an ingress's application; `well` and `metrics` ask the dispatcher, which knows all ingresses."""

    async def chat(request: Request) -> Response:
        return await ingress.complete(request, CHAT)

    async def text(request: Request) -> Response:
        return await ingress.complete(request, TEXT)

    async def models(request: Request) -> Response:
        ingress.require_key(request.headers)
        return JSONResponse(ingress.models())

    async def model(request: Request) -> Response:
        ingress.require_key(request.headers)
        return JSONResponse(ingress.model(request.path_params["name"]))

    async def health(request: Request) -> Response:
        try:
            async with asyncio.timeout(HEALTH_SECONDS):
                return Response(status_code=200 if await well() else 503)
        except Exception:  # the dispatcher is away
            return Response(status_code=503)

    async def counted(request: Request) -> Response:
        try:
            async with asyncio.timeout(METRICS_SECONDS):
                return Response(await metrics(), media_type="text/plain; version=0.0.4")
        except Exception:
            return error_response(ApiError(503, "metrics: expected the dispatcher, found none", "server_error"))

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error_response(error)

    async def unknown(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return error_response(ApiError(error.status_code, f"{request.url.path}: {error.detail}"))

    async def failed(request: Request, error: Exception) -> Response:
        return error_response(ApiError(500, "the coordinator failed", "server_error"))  # details are in its log

    return Starlette(
        routes=[
            Route(CHAT, chat, methods=["POST"]),
            Route(TEXT, text, methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/health", health),
            Route("/metrics", counted),
        ],
        exception_handlers={ApiError: refused, HTTPException: unknown, Exception: failed},
    )
