"""The HTTP side of the draft service: `/propose`, `/health`, `/metrics`."""

import asyncio
import hmac
import time

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from draftsmith.scripts.services.draft_protocol import (
    MOST_BYTES,
    VERSION,
    DraftAnswer,
    DraftRequest,
    ProtocolError,
    Service,
    decode,
    encode,
)
from draftsmith.scripts.services.http_server import LEFT, BodyError, client_gone, read_body
from draftsmith.scripts.services.serve_draft.worker import PendingDrafts, ServiceMetrics, Worker

JSON = "application/json"
TIMEOUT = 30.0  # seconds after which a request is answered with 504


class DraftApp:
    """Answers requests with a worker's drafts; clients must send the `key` unless it is empty."""

    def __init__(
        self, worker: Worker, service: Service, metrics: ServiceMetrics, key: str = "", timeout: float = TIMEOUT
    ):
        self._worker, self._service, self._metrics = worker, service, metrics
        self._timeout, self._key = timeout, key
        routes = [
            Route("/propose", self._propose, methods=["POST"]),
            Route("/health", self._health),
            Route("/metrics", self._show_metrics),
        ]
        self.app = Starlette(routes=routes)

    async def _propose(self, http: Request) -> Response:
        start = time.perf_counter()
        try:
            async with asyncio.timeout(self._timeout):
                response = await self._answer(http)
        except TimeoutError:
            response = _refusal(504, f"timeout: expected drafts within {self._timeout:g} s, found none")
        except ClientDisconnect:
            response = _refusal(LEFT, "request: expected a client that waits for its answer, found a closed connection")
        except asyncio.CancelledError:  # the server's grace period is over; raising it would log an error
            response = _refusal(503, "service: expected drafts before its end, found none")
        self._metrics.requests.labels(str(response.status_code)).inc()
        self._metrics.seconds.observe(time.perf_counter() - start)
        return response

    async def _answer(self, http: Request) -> Response:
        if not self._allowed(http.headers.get("authorization", "")):
            return _refusal(401, "authorization: expected `Bearer` and this service's key, found neither")
        try:
            request = decode(DraftRequest, await read_body(http, MOST_BYTES))
        except ProtocolError as error:
            return _refusal(400, str(error))
        except BodyError as error:
            return _refusal(413, str(error))
        if len(request.rows) > self._service.max_rows:
            return _refusal(400, f"rows: expected at most {self._service.max_rows}, found {len(request.rows)}")
        work = PendingDrafts(request)
        if not self._worker.submit(work):
            return _refusal(503, "service: expected room for a request, found a full queue")
        answered, leaving = asyncio.wrap_future(work.answer), asyncio.ensure_future(client_gone(http.receive))
        try:
            await asyncio.wait((answered, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            cancelled = answered.cancel()  # nobody waits for these drafts any more
            leaving.cancel()
        if cancelled:
            raise ClientDisconnect
        try:
            drafts = answered.result()
        except Exception as error:
            return _refusal(500, f"service: expected drafts, found {type(error).__name__}")
        return Response(encode(DraftAnswer(VERSION, drafts)), media_type=JSON)

    async def _health(self, http: Request) -> Response:
        if not self._worker.is_alive():
            return _refusal(503, "service: expected a thread that drafts, found none")
        return Response(encode(self._service), media_type=JSON)

    async def _show_metrics(self, http: Request) -> Response:
        return Response(generate_latest(self._metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    def _allowed(self, authorization: str) -> bool:
        # A comparison in constant time, so that its duration does not reveal the key.
        actual = authorization.encode("utf-8", "replace")
        return not self._key or hmac.compare_digest(actual, f"Bearer {self._key}".encode())


def _refusal(status: int, line: str) -> Response:
    return PlainTextResponse(line + "\n", status)
