"""The coordinator: serves OpenAI's API, `/health` and `/metrics`, and relays each request to the server it chooses.

It knows the load of each server by the requests that it relays itself; those of other clients are not counted.
"""

import asyncio
import hmac
import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any
from uuid import uuid4

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from draftsmith.decode.errors import InputError
from draftsmith.scripts.services.coordinate.config import CoordinatorConfig
from draftsmith.scripts.services.coordinate.relay import BROKEN, Outcome, Relay, RelayedAnswer, error_response, refusal
from draftsmith.scripts.services.coordinate.request import (
    CHAT,
    TEXT,
    ApiError,
    CompletionRequest,
    Keywords,
    read_request,
)
from draftsmith.scripts.services.coordinate.request_log import LogWriter, unstreamed_answer
from draftsmith.scripts.services.coordinate.routing import UNKNOWN, Facts, Rates, Refusal, Router, Server
from draftsmith.scripts.services.http_server import BodyError, asgi_server, read_body
from draftsmith.train.endpoint.http import HttpClient, ServerFailure, api_key

TIMEOUT = 600.0  # seconds for one whole answer
KEEP_ALIVE = 75  # seconds that an idle connection stays open after an answer
MOST_HELD = 1024  # requests that are relayed at once; further ones are refused
MOST_BODY = 4_000_000  # bytes of a request
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
LOGGER = logging.getLogger(__name__)


def predicted(config: CoordinatorConfig) -> dict[str, Rates]:
    """Return the predicted speeds of all pairs with a report; InputError if one cannot be used."""
    with_report = [pair for pair in config.pairs if pair.report is not None]
    if not with_report:
        return {}
    # This imports torch, which nothing else here needs.
    from draftsmith.scripts.services.coordinate.predictions import predicted_rates

    return {pair.name: predicted_rates(pair) for pair in with_report}


class Coordinator:
    """Chooses servers, checks their health, relays requests, counts, and logs.

    `rates` are the predicted speeds of pairs with a report. InputError if a key, or the log, cannot be used.
    """

    def __init__(self, config: CoordinatorConfig, rates: Mapping[str, Rates]):
        self.config, self.router, self.keywords = config, Router(config, rates), Keywords(config.rules)
        self.key, self.begun = api_key(config.key_env, "key_env"), int(time.time())
        self.server_models = {pair.name: pair.server_model for pair in config.pairs}
        self.clients = {
            url: HttpClient(url, f"pairs.{pair.name}", pair.key_env, TIMEOUT, f"pairs.{pair.name}.key_env")
            for pair in config.pairs
            for url in pair.endpoints
        }
        self._metrics = _Metrics()
        self._log = None if config.log is None else LogWriter(config.log)
        self._writing = asyncio.Lock()  # one line after another
        self._checking: asyncio.Task[None] | None = None

    async def started(self) -> uvicorn.Server:
        """Check all servers once, and again and again from now on; return the server to run."""
        await self._check_all()
        self._checking = asyncio.create_task(self._keep_checking())
        return asgi_server(self.app(), KEEP_ALIVE, TIMEOUT)

    def acquire(self, facts: Facts, failed_urls: list[str]) -> Server | Refusal:
        """Choose a server for a request, which counts as in flight until `release`."""
        choice = self.router.acquire(facts, failed_urls)
        if isinstance(choice, Refusal):
            self._metrics.refused.labels(choice.why).inc()
        return choice

    def release(self, server: Server) -> None:
        """Take back a server."""
        self.router.release(server)

    def count(self, outcome: Outcome) -> None:
        """Count the outcome of a request at one server."""
        # No verdict on a 500 that the request itself may have caused.
        if outcome.failed or outcome.status not in (0, BROKEN):
            self.router.breakers[outcome.server.url].ended(outcome.failed)
        self._metrics.count(outcome)

    async def complete(self, request: Request, path: str) -> Response:
        """Answer a request for a completion."""
        self.require_key(request.headers)
        if sum(self.router.loads.values()) >= MOST_HELD:
            raise ApiError(429, "too many requests are under way; try again", "rate_limit_error")
        completion = read_request(path, await self._body(request), request.headers, self.keywords)
        # Token ids cannot be redacted, nor used for training without their tokenizer.
        if self._log is None or not _is_text(completion):
            return Relay(completion, self)
        if self._log.token_ids:
            completion = replace(completion, added={"return_token_ids": True})
        begun = datetime.now(UTC).isoformat(timespec="milliseconds")
        return Relay(completion, self, partial(self._write, self._log, completion, begun))

    async def _body(self, request: Request) -> bytes:
        """Return a request's body; raise ApiError if it is too large, incomplete or late."""
        try:
            async with asyncio.timeout(TIMEOUT):
                return await read_body(request, MOST_BODY)
        except BodyError as error:
            raise ApiError(413, str(error)) from None
        except TimeoutError:
            raise ApiError(408, f"body: expected all of it within {TIMEOUT:g} s, found less") from None
        except ClientDisconnect:
            raise ApiError(400, "body: expected all of it, found a closed connection") from None

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

    async def _write(self, log: LogWriter, completion: CompletionRequest, begun: str, relayed: RelayedAnswer) -> None:
        """Log a request with its answer; a failure is a line in this process's log, without their texts."""
        if relayed.status != 200:
            return
        try:
            answer = await asyncio.to_thread(unstreamed_answer, bytes(relayed.content), completion.streams)
            if answer is None:
                return
            about: dict[str, Any] = {"id": uuid4().hex, "time": begun, "path": completion.path, "pair": relayed.pair}
            about |= {"category": completion.facts.category} if completion.facts.category is not None else {}
            about |= {"seconds": round(relayed.seconds, 6), "first_byte_seconds": round(relayed.first_byte or 0.0, 6)}
            async with self._writing:
                await asyncio.to_thread(log.write, completion.body, answer, about)
        except InputError as error:
            LOGGER.warning("log: an answer of %s is left out: %s", relayed.pair, error)
        except Exception as error:  # a full disk or a failing redaction must not stop other requests
            LOGGER.warning("log: an answer of %s is left out: %s", relayed.pair, type(error).__name__)

    async def _keep_checking(self) -> None:
        while True:
            await asyncio.sleep(self.config.health_seconds)
            await self._check_all()

    async def _check_all(self) -> None:
        await asyncio.gather(*map(self._check, self.clients))

    async def _check(self, url: str) -> None:
        try:
            async with self.clients[url].accepted("/health", timeout=self.config.health_seconds):
                well = True
        except (ServerFailure, InputError):  # the latter is a refusal, such as 404
            well = False
        self.router.breakers[url].count_check(well)

    def app(self) -> Starlette:
        """Return the application."""

        async def chat(request: Request) -> Response:
            return await self.complete(request, CHAT)

        async def text(request: Request) -> Response:
            return await self.complete(request, TEXT)

        async def models(request: Request) -> Response:
            self.require_key(request.headers)
            return JSONResponse({"object": "list", "data": [self.model(name) for name in self.config.models]})

        async def model(request: Request) -> Response:
            self.require_key(request.headers)
            return JSONResponse(self.model(request.path_params["name"]))

        async def health(request: Request) -> Response:
            well = any(not breaker.open for breaker in self.router.breakers.values())
            return Response(status_code=200 if well else 503)

        async def counted(request: Request) -> Response:
            return Response(self._metrics.page(self.router), headers={"Content-Type": CONTENT_TYPE_LATEST})

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


class _Metrics:
    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        histogram = partial(Histogram, registry=registry, buckets=SECONDS)
        name, pair, endpoint = "draftsmith_coordinator_{}".format, ["pair"], ["pair", "endpoint"]
        self.requests = counter(name("requests"), "Requests that were answered, by status", ["pair", "status"])
        self.failures = counter(name("server_failures"), "Servers that failed a request", endpoint)
        self.refused = counter(name("refused"), "Requests that no server was there for", ["why"])
        self.in_flight = gauge(name("in_flight"), "Requests under way", endpoint)
        self.up = gauge(name("endpoint_up"), "1 where a server may get requests", endpoint)
        self.first_byte = histogram(name("first_byte_seconds"), "Until an answer's first byte", pair)
        self.seconds = histogram(name("request_seconds"), "Until an answer's last byte", pair)

    def count(self, outcome: Outcome) -> None:
        """Count the outcome of a request at one server."""
        pair, url = outcome.server.pair, outcome.server.url
        if outcome.failed:
            self.failures.labels(pair, url).inc()
        if outcome.status:
            self.requests.labels(pair, str(outcome.status)).inc()
            self.seconds.labels(pair).observe(outcome.seconds)
        if outcome.first_byte is not None:
            self.first_byte.labels(pair).observe(outcome.first_byte)

    def page(self, router: Router) -> bytes:
        """Return the metrics in Prometheus's text format."""
        for name, pair in router.pairs.items():
            for url in pair.endpoints:
                self.in_flight.labels(name, url).set(router.loads[url])
                self.up.labels(name, url).set(not router.breakers[url].open)
        return generate_latest(self.registry)


def _is_text(completion: CompletionRequest) -> bool:
    body = completion.body
    return isinstance(body.get("messages", body.get("prompt")), list if "messages" in body else str)
