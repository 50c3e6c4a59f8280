"""The coordinator on Ray Serve: any number of ingress replicas, one dispatcher, one log.

`serve deploy configs/serve/ray.yaml` builds it on a cluster, `draftsmith coordinate` on this machine.
"""

import asyncio
import json
import time
from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.handle import DeploymentHandle

from draftsmith.scripts.services.coordinate.config import CoordinatorConfig, Log
from draftsmith.scripts.services.coordinate.dispatcher import Dispatcher
from draftsmith.scripts.services.coordinate.ingress import Ingress, LogEntry, ServerRequest, ingress_app
from draftsmith.scripts.services.coordinate.relay import LeaseOutcome
from draftsmith.scripts.services.coordinate.request_log import LogWriter, record, redactor
from draftsmith.scripts.services.coordinate.routing import Lease, Rates, Refusal
from draftsmith.scripts.services.http_server import bounded_server, open_socket
from draftsmith.train.cli import parse_config
from draftsmith.train.endpoint.http import api_key

KEEP_ALIVE = 75  # seconds that an idle connection stays open after an answer
OPTIONS: dict[str, Any] = {
    "max_ongoing_requests": 1024,  # calls between the deployments
    "ray_actor_options": {"num_cpus": 0},  # they mostly wait for the network: none reserves a core
    "graceful_shutdown_wait_loop_s": 1.0,
}
DISPATCHER, INGRESS = "dispatcher", "ingress"


@serve.deployment(name=DISPATCHER, **OPTIONS)
class DispatcherDeployment:
    """The only dispatcher: see `Dispatcher`. If it dies, Serve starts another, and ingresses report their leases."""

    async def __init__(self, config: CoordinatorConfig, rates: Mapping[str, Rates]):  # type: ignore[misc]
        self.dispatcher = Dispatcher(config, rates)
        await self.dispatcher.start()

    async def exchange(
        self, holder: str, ended: list[LeaseOutcome], requests: list[ServerRequest], held: list[Lease] | None
    ) -> list[Lease | Refusal]:
        """Exchange news with an ingress: see `Dispatcher.exchange`."""
        return self.dispatcher.exchange(holder, ended, requests, held)

    async def well(self) -> bool:
        """Return whether a request would be answered."""
        return await self.dispatcher.well()

    async def drain(self, seconds: float) -> None:
        """Refuse further requests, and wait for those in flight."""
        await self.dispatcher.drain(seconds)

    async def metrics(self) -> bytes:
        """Return the metrics of all ingresses."""
        return await self.dispatcher.metrics()


@serve.deployment(name="log", **OPTIONS)
class LogDeployment:
    """The only writer of the log, because there is one file."""

    def __init__(self, log: Log):
        self.writer, self.redact, self._lock = LogWriter(log), redactor(log), asyncio.Lock()

    async def write(self, entry: LogEntry) -> None:
        """Redact an entry and write it."""
        async with self._lock:
            await asyncio.to_thread(lambda: self.writer.write(record(*entry, self.redact)))


@serve.deployment(name=INGRESS, **OPTIONS)
class IngressDeployment:
    """An ingress, with its own server at the port that all ingresses of a machine share.

    Serve's own proxy would add three Ray calls to each request, and limits neither headers nor idle connections.
    """

    async def __init__(  # type: ignore[misc]
        self,
        config: CoordinatorConfig,
        dispatcher: DeploymentHandle[Any],
        log: DeploymentHandle[Any] | None,
        begun: int,
    ):
        async def exchange(
            holder: str, ended: list[LeaseOutcome], requests: list[ServerRequest], held: list[Lease] | None
        ) -> list[Lease | Refusal]:
            return await dispatcher.exchange.remote(holder, ended, requests, held)

        async def write(entry: LogEntry) -> None:
            if log is not None:
                await log.write.remote(entry)

        async def well() -> bool:
            return await dispatcher.well.remote()

        async def metrics() -> bytes:
            return await dispatcher.metrics.remote()

        ingress = Ingress(config, exchange, None if log is None else write, begun)
        self.server = bounded_server(ingress_app(ingress, well, metrics), KEEP_ALIVE, config.timeout)
        socket = open_socket(config.host, config.port, shared=True)
        self.serving = asyncio.create_task(self.server.serve([socket]))

    async def check_health(self) -> None:
        """Raise if this ingress no longer listens, so that Serve replaces it."""
        if self.serving.done():
            raise RuntimeError("the ingress's server has ended")

    async def __del__(self) -> None:  # Serve awaits it, so that requests in flight are answered first
        self.server.should_exit = True
        await self.serving


def application(config: CoordinatorConfig) -> Application:
    """Return the Serve application for a config; raise InputError if a key, report or redaction cannot be loaded."""
    api_key(config.key_env, "key_env")
    for pair in config.pairs:
        api_key(pair.key_env, f"pairs.{pair.name}.key_env")
    rates: dict[str, Rates] = {}
    with_report = [pair for pair in config.pairs if pair.report is not None]
    if with_report:  # this imports torch, which nothing else here needs
        from draftsmith.scripts.services.coordinate.predictions import predicted_rates

        rates = {pair.name: predicted_rates(pair) for pair in with_report}
    log = None
    if config.log is not None:  # errors in its settings are raised before anything starts
        redactor(config.log)
        LogWriter(config.log)
        log = _bound(LogDeployment, config.log)
    ingress: Any = IngressDeployment
    ingress = ingress.options(num_replicas=config.ingress, graceful_shutdown_timeout_s=config.timeout)
    return _bound(ingress, config, _bound(DispatcherDeployment, config, rates), log, int(time.time()))


def _bound(deployment: Any, *arguments: Any) -> Application:
    """Bind a class that `serve.deployment` has made a deployment, which its type does not show."""
    return deployment.bind(*arguments)


def build(args: dict[str, Any]) -> Application:
    """Return the application for `serve deploy` from the fields of `CoordinatorConfig`, or `config`, a file of them."""
    flags = [f"--{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in args.items()]
    return application(parse_config(CoordinatorConfig, flags))
