"""The one process that knows all loads: it chooses servers, looks after their health, and counts.

Ingress processes may be many, on several machines. Each asks here before it passes a request on and says here when it
has ended, so that loads are right whichever of them a request came through. The price is one call within the cluster
a request. What other clients ask the same servers is not seen.
"""

import asyncio
import time
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from draftsmith.decode.errors import InputError
from draftsmith.scripts.coordinate.config import CoordinatorConfig
from draftsmith.scripts.coordinate.rates import Rates
from draftsmith.scripts.coordinate.relay import Outcome
from draftsmith.scripts.coordinate.routing import DOWN, Facts, Lease, Refusal, Router
from draftsmith.scripts.serving.client import Client, ServerFailure

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
"""Bounds of the histograms."""


class Dispatcher:
    """Chooses servers for all ingress processes.

    Args:
        config: pairs and rules.
        rates: predicted speeds of the pairs that have a report.
    """

    def __init__(self, config: CoordinatorConfig, rates: Mapping[str, Rates]):
        self.config, self.router = config, Router(config, rates)
        self.clients = {
            url: Client(url, f"pairs.{pair.name}", pair.key_env, config.health_seconds)
            for pair in config.pairs
            for url in pair.endpoints
        }
        self._metrics = _Metrics()
        self._looking: asyncio.Task[None] | None = None
        self._stopping = False

    async def start(self) -> None:
        """Look at all servers once, and then again and again."""
        await self._look()
        self._looking = asyncio.create_task(self._look_on())

    async def acquire(self, facts: Facts, holder: str, tried: list[str]) -> Lease | Refusal:
        """Choose a server for a request; see `Router.acquire`."""
        now = time.monotonic()
        chosen = Refusal(DOWN) if self._stopping else self.router.acquire(facts, holder, tried, now)
        if isinstance(chosen, Refusal):
            self._metrics.refused.labels(chosen.why).inc()
        return chosen

    async def heard(self, holder: str, ended: list[Outcome], held: list[Lease]) -> None:
        """Take an ingress's word: what has become of requests, and which it still passes on."""
        for outcome in ended:
            breaker = self.router.breakers.get(outcome.lease.url)
            if breaker is not None and (outcome.failed or outcome.status):  # neither: its client left before an answer
                breaker.ended(outcome.failed)
            self._metrics.count(outcome)
        self.router.heard(holder, [outcome.lease.id for outcome in ended], held, time.monotonic())

    async def well(self) -> bool:
        """Say whether any server may get requests."""
        return any(not breaker.open for breaker in self.router.breakers.values())

    async def drain(self, seconds: float) -> None:
        """Take no further requests, and wait until none is under way, but no longer than that."""
        self._stopping = True
        until = time.monotonic() + seconds
        while any(self.router.loads().values()) and time.monotonic() < until:
            await asyncio.sleep(0.1)
            self.router.forget_the_dead(time.monotonic())

    async def metrics(self) -> bytes:
        """Return what was counted, in Prometheus's text format."""
        loads = self.router.loads()
        for name, pair in self.router.pairs.items():
            for url in pair.endpoints:
                self._metrics.in_flight.labels(name, url).set(loads[url])
                self._metrics.up.labels(name, url).set(not self.router.breakers[url].open)
        return generate_latest(self._metrics.registry)

    async def _look_on(self) -> None:
        while True:
            await asyncio.sleep(self.config.health_seconds)
            await self._look()

    async def _look(self) -> None:
        async with asyncio.TaskGroup() as group:
            for url in self.clients:
                group.create_task(self._look_at(url))

    async def _look_at(self, url: str) -> None:
        breaker = self.router.breakers[url]
        try:
            await self.clients[url].get_text(self.config.health_path)
        except (ServerFailure, InputError):  # an answer that refuses is none of a server that is well
            breaker.looked_at(well=False)
        else:
            breaker.looked_at(well=True)


class _Metrics:
    """The counters."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        name, by_pair = "draftsmith_coordinator", ["pair"]
        self.requests = Counter(
            f"{name}_requests", "Requests that were answered, by status", [*by_pair, "status"], registry=registry
        )
        self.failures = Counter(
            f"{name}_server_failures", "Servers that failed a request", [*by_pair, "endpoint"], registry=registry
        )
        self.refused = Counter(f"{name}_refused", "Requests that no server was there for", ["why"], registry=registry)
        self.in_flight = Gauge(f"{name}_in_flight", "Requests under way", [*by_pair, "endpoint"], registry=registry)
        self.up = Gauge(
            f"{name}_endpoint_up", "1 where a server may get requests", [*by_pair, "endpoint"], registry=registry
        )
        self.first_byte = Histogram(
            f"{name}_first_byte_seconds", "Until an answer's first byte", by_pair, registry=registry, buckets=SECONDS
        )
        self.seconds = Histogram(
            f"{name}_request_seconds", "Until an answer's last byte", by_pair, registry=registry, buckets=SECONDS
        )

    def count(self, outcome: Outcome) -> None:
        """Count what became of a request at one server."""
        pair = outcome.lease.pair
        if outcome.failed:
            self.failures.labels(pair, outcome.lease.url).inc()
        if outcome.status:
            self.requests.labels(pair, str(outcome.status)).inc()
            self.seconds.labels(pair).observe(outcome.seconds)
        if outcome.first_byte is not None:
            self.first_byte.labels(pair).observe(outcome.first_byte)
