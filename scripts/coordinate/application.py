"""The coordinator on Ray Serve: ingress replicas as many as are asked for, one dispatcher, one log.

`serve deploy configs/serve/ray.yaml` builds it on a cluster, `draftsmith coordinate` on this machine.
"""

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from ray import serve
from ray.exceptions import RayError
from ray.serve import Application
from ray.serve.handle import DeploymentHandle
from starlette.exceptions import HTTPException

from draftsmith.scripts.coordinate.asked import CHAT, TEXT, Refused
from draftsmith.scripts.coordinate.config import CoordinatorConfig, Log
from draftsmith.scripts.coordinate.dispatcher import Dispatcher
from draftsmith.scripts.coordinate.ingress import Entry, Ingress, refused_response
from draftsmith.scripts.coordinate.rates import Rates
from draftsmith.scripts.coordinate.relay import Outcome
from draftsmith.scripts.coordinate.request_log import Writer, record, redactor
from draftsmith.scripts.coordinate.routing import DOWN, Facts, Lease, Refusal
from draftsmith.train.cli import parse_config
from draftsmith.train.endpoint.server import api_key

UNDER_WAY = 1024
"""Requests that one replica passes on at once; further ones wait in Serve."""
OPTIONS: dict[str, Any] = {
    "max_ongoing_requests": UNDER_WAY,
    "ray_actor_options": {"num_cpus": 0},  # they wait for the network most of the time: none takes a core of its own
    "graceful_shutdown_wait_loop_s": 1.0,
}
DISPATCHER = "dispatcher"
TRIES = 10
"""Calls of a dispatcher that may have died, before a request is refused."""

api = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)


@api.exception_handler(Refused)
async def _refused(request: Request, error: Refused) -> JSONResponse:
    return refused_response(error)


@api.exception_handler(Exception)
async def _failed(request: Request, error: Exception) -> JSONResponse:
    return refused_response(Refused(500, "the coordinator failed", "server_error"))  # its log says how


@api.exception_handler(HTTPException)
async def _unknown(request: Request, error: HTTPException) -> JSONResponse:
    return refused_response(Refused(error.status_code, f"{request.url.path}: {error.detail}"))


@serve.deployment(name=DISPATCHER, **OPTIONS)
class DispatcherDeployment:
    """One for all: see `Dispatcher`. Serve starts another where it dies, and that one is told what is under way."""

    async def __init__(self, config: CoordinatorConfig, rates: Mapping[str, Rates]):  # type: ignore[misc]
        self.dispatcher = Dispatcher(config, rates)
        await self.dispatcher.start()

    async def acquire(self, facts: Facts, holder: str, tried: list[str]) -> Lease | Refusal:
        """Choose a server."""
        return await self.dispatcher.acquire(facts, holder, tried)

    async def heard(self, holder: str, ended: list[Outcome], held: list[Lease]) -> None:
        """Take an ingress's word."""
        await self.dispatcher.heard(holder, ended, held)

    async def well(self) -> bool:
        """Say whether any server may get requests."""
        return await self.dispatcher.well()

    async def drain(self, seconds: float) -> None:
        """Take no further requests, and wait for those that are under way."""
        await self.dispatcher.drain(seconds)

    async def metrics(self) -> bytes:
        """Return what was counted."""
        return await self.dispatcher.metrics()


@serve.deployment(name="log", **OPTIONS)
class LogDeployment:
    """One for all, for there is one file."""

    def __init__(self, log: Log):
        self.writer, self.redact, self._one = Writer(log), redactor(log), asyncio.Lock()

    async def write(self, entry: Entry) -> None:
        """Redact an entry, and write it."""
        async with self._one:
            await asyncio.to_thread(lambda: self.writer.write(record(*entry, self.redact)))


@serve.deployment(name="ingress", **OPTIONS)
@serve.ingress(api)
class IngressDeployment:
    """As many as are needed."""

    async def __init__(  # type: ignore[misc]
        self, config: CoordinatorConfig, dispatcher: DeploymentHandle[Any], log: DeploymentHandle[Any] | None
    ):
        self.dispatcher = dispatcher

        async def choose(facts: Facts, holder: str, tried: list[str]) -> Lease | Refusal:
            for _ in range(TRIES):
                with suppress(RayError):  # it died: the next call waits for the one that Serve starts
                    return await dispatcher.acquire.remote(facts, holder, tried)
                await asyncio.sleep(0.5)
            return Refusal(DOWN)

        async def heard(holder: str, ended: list[Outcome], held: list[Lease]) -> None:
            await dispatcher.heard.remote(holder, ended, held)

        async def write(entry: Entry) -> None:
            if log is not None:
                await log.write.remote(entry)

        self.ingress = Ingress(config, choose, heard, None if log is None else write)

    @api.post(CHAT)
    async def chat(self, request: Request) -> Response:
        """Answer messages."""
        return await self.ingress.complete(request, CHAT)

    @api.post(TEXT)
    async def text(self, request: Request) -> Response:
        """Continue a text."""
        return await self.ingress.complete(request, TEXT)

    @api.get("/v1/models")
    async def models(self, request: Request) -> dict[str, Any]:
        """List the models."""
        self.ingress.require_key(request.headers)
        return self.ingress.models()

    @api.get("/health")
    async def health(self) -> Response:
        """Say whether any server is well."""
        return Response(status_code=200 if await self.dispatcher.well.remote() else 503)

    @api.get("/metrics")
    async def metrics(self) -> Response:
        """Return what was counted, of all ingress replicas together."""
        return Response(await self.dispatcher.metrics.remote(), media_type="text/plain; version=0.0.4")


def application(config: CoordinatorConfig) -> Application:
    """Return the application of a config, to be run by Serve.

    Raises:
        InputError: a key that is not there, a report that cannot be read, a redaction that cannot be loaded.
    """
    api_key(config.key_env, "key_env")
    for pair in config.pairs:
        api_key(pair.key_env, f"pairs.{pair.name}.key_env")
    rates: dict[str, Rates] = {}
    with_report = [pair for pair in config.pairs if pair.report is not None]
    if with_report:  # torch, which nothing else here needs
        from draftsmith.scripts.coordinate.predictions import predicted_rates

        rates = {pair.name: predicted_rates(pair) for pair in with_report}
    log = None
    if config.log is not None:
        redactor(config.log)  # what is wrong with it is said before anything starts
        log = _bound(LogDeployment, config.log)
    ingress: Any = IngressDeployment
    return _bound(
        ingress.options(num_replicas=config.ingress), config, _bound(DispatcherDeployment, config, rates), log
    )


def _bound(deployment: Any, *arguments: Any) -> Application:
    """Bind a class that `serve.deployment` has made a deployment of, which its type does not say."""
    return deployment.bind(*arguments)


def build(args: dict[str, Any]) -> Application:
    """Return the application for `serve deploy`: the builder that `import_path` names.

    Args:
        args: the fields of `CoordinatorConfig`, or `config`, a file of them; host and port are Serve's there.

    Raises:
        InputError: fields that make no config.
    """
    flags = [f"--{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in args.items()]
    return application(parse_config(CoordinatorConfig, flags))
