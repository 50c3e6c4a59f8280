"""The coordinator on Ray Serve: ingress replicas as many as are asked for, one dispatcher, one log.

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
from draftsmith.scripts.services.coordinate.door import door
from draftsmith.scripts.services.coordinate.ingress import Entry, Ingress, Wanted
from draftsmith.scripts.services.coordinate.rates import Rates
from draftsmith.scripts.services.coordinate.relay import LeaseOutcome
from draftsmith.scripts.services.coordinate.request_log import LogWriter, record, redactor
from draftsmith.scripts.services.coordinate.routing import Lease, Refusal
from draftsmith.scripts.services.http_server import bounded_server, listening
from draftsmith.train.cli import parse_config
from draftsmith.train.endpoint.http import api_key

KEEP_ALIVE = 75
"""Seconds that a connection stays open after an answer."""
OPTIONS: dict[str, Any] = {
    "max_ongoing_requests": 1024,  # calls of one another
    "ray_actor_options": {"num_cpus": 0},  # they wait for the network most of the time: none takes a core of its own
    "graceful_shutdown_wait_loop_s": 1.0,
}
DISPATCHER, INGRESS = "dispatcher", "ingress"


@serve.deployment(name=DISPATCHER, **OPTIONS)
class DispatcherDeployment:
    """One for all: see `Dispatcher`. If it dies, Serve starts another, and the ingresses report what is under way."""

    async def __init__(self, config: CoordinatorConfig, rates: Mapping[str, Rates]):  # type: ignore[misc]
        self.dispatcher = Dispatcher(config, rates)
        await self.dispatcher.start()

    async def exchange(
        self, holder: str, ended: list[LeaseOutcome], wanted: list[Wanted], held: list[Lease] | None
    ) -> list[Lease | Refusal]:
        """Take an ingress's word and answer it."""
        return self.dispatcher.exchange(holder, ended, wanted, held)

    async def well(self) -> bool:
        """Say whether a request would be answered."""
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
        self.writer, self.redact, self._one = LogWriter(log), redactor(log), asyncio.Lock()

    async def write(self, entry: Entry) -> None:
        """Redact an entry, and write it."""
        async with self._one:
            await asyncio.to_thread(lambda: self.writer.write(record(*entry, self.redact)))


@serve.deployment(name=INGRESS, **OPTIONS)
class IngressDeployment:
    """As many as are needed, each with a server of its own at the one port of its machine.

    Serve's own proxy would pass each request on to it through three of Ray's calls, and bounds neither headers nor
    connections that never ask.
    """

    async def __init__(  # type: ignore[misc]
        self,
        config: CoordinatorConfig,
        dispatcher: DeploymentHandle[Any],
        log: DeploymentHandle[Any] | None,
        begun: int,
    ):
        async def exchange(
            holder: str, ended: list[LeaseOutcome], wanted: list[Wanted], held: list[Lease] | None
        ) -> list[Lease | Refusal]:
            return await dispatcher.exchange.remote(holder, ended, wanted, held)

        async def write(entry: Entry) -> None:
            if log is not None:
                await log.write.remote(entry)

        async def well() -> bool:
            return await dispatcher.well.remote()

        async def metrics() -> bytes:
            return await dispatcher.metrics.remote()

        ingress = Ingress(config, exchange, None if log is None else write, begun)
        self.server = bounded_server(door(ingress, well, metrics), KEEP_ALIVE, config.timeout)
        at = listening(config.host, config.port, shared=True)
        self.serving = asyncio.create_task(self.server.serve([at]))

    async def check_health(self) -> None:
        """Have Serve start another one where this one no longer listens."""
        if self.serving.done():
            raise RuntimeError("the ingress's server has ended")

    async def __del__(self) -> None:  # Serve calls and awaits it, and so lets the requests under way end
        self.server.should_exit = True
        await self.serving


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
        from draftsmith.scripts.services.coordinate.predictions import predicted_rates

        rates = {pair.name: predicted_rates(pair) for pair in with_report}
    log = None
    if config.log is not None:  # what is wrong with it is said before anything starts
        redactor(config.log)
        LogWriter(config.log)
        log = _bound(LogDeployment, config.log)
    ingress: Any = IngressDeployment
    ingress = ingress.options(num_replicas=config.ingress, graceful_shutdown_timeout_s=config.timeout)
    return _bound(ingress, config, _bound(DispatcherDeployment, config, rates), log, int(time.time()))


def _bound(deployment: Any, *arguments: Any) -> Application:
    """Bind a class that `serve.deployment` has made a deployment of, which its type does not say."""
    return deployment.bind(*arguments)


def build(args: dict[str, Any]) -> Application:
    """Return the application for `serve deploy`: the builder that `import_path` names.

    Args:
        args: the fields of `CoordinatorConfig`, or `config`, a file of them.

    Raises:
        InputError: fields that make no config.
    """
    flags = [f"--{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in args.items()]
    return application(parse_config(CoordinatorConfig, flags))
