"""The one process that knows all loads: it chooses servers, checks their health, and counts.

Each ingress, on any machine, asks here for a server and reports here when a request has ended, so that loads are right
whichever ingress a request came through. One call carries all questions and reports of an ingress since the last, so
calls get cheaper with load. Requests of other clients to the same servers are not counted.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from draftsmith.decode.errors import InputError
from draftsmith.scripts.services.coordinate.config import CoordinatorConfig
from draftsmith.scripts.services.coordinate.relay import BROKEN, LeaseOutcome
from draftsmith.scripts.services.coordinate.routing import DOWN, Facts, Lease, Rates, Refusal, Router
from draftsmith.train.endpoint.http import HttpClient, ServerFailure

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Dispatcher:
    """Chooses servers for all ingress processes; `rates` are the predicted speeds of pairs with a report."""

    def __init__(self, config: CoordinatorConfig, rates: Mapping[str, Rates]):
        self.config, self.router = config, Router(config, rates)
        self.clients = {
            url: HttpClient(url, f"pairs.{pair.name}", pair.key_env, config.health_seconds)
            for pair in config.pairs
            for url in pair.endpoints
        }
        self._metrics = _Metrics()
        self._looking: asyncio.Task[None] | None = None
        self._stopping = False

    async def start(self) -> None:
        """Check all servers once, then keep checking them in the background."""
        await self._look()
        self._looking = asyncio.create_task(self._look_on())

    def exchange(
        self, holder: str, ended: Sequence[LeaseOutcome], requests: Sequence[tuple[Facts, list[str]]],
        held: Sequence[Lease] | None,
    ) -> list[Lease | Refusal]:  # fmt: skip
        """Take an ingress's report of `ended` leases; return a server for each request: see `Router.acquire`.

        Each request comes with the servers that have failed it. `held` has all other leases of the ingress `holder`;
        None if they are not reported.
        """
        now = time.monotonic()
        for outcome in ended:
            breaker = self.router.breakers.get(outcome.lease.url)
            # No verdict if the client left before an answer, or on a 500 that the request itself may have caused.
            if breaker is not None and (outcome.failed or outcome.status not in (0, BROKEN)):
                breaker.ended(outcome.failed)
            self._metrics.count(outcome)
        self.router.ended(holder, [outcome.lease.id for outcome in ended], now)
        if held is not None:
            self.router.heard(holder, held, now)
        return [self._acquire(facts, holder, failed_urls, now) for facts, failed_urls in requests]

    def _acquire(self, facts: Facts, holder: str, failed_urls: Sequence[str], now: float) -> Lease | Refusal:
        choice = Refusal(DOWN) if self._stopping else self.router.acquire(facts, holder, failed_urls, now)
        if isinstance(choice, Refusal):
            self._metrics.refused.labels(choice.why).inc()
        return choice

    async def well(self) -> bool:
        """Return whether a request would be answered: some server is up, and the dispatcher is not stopping."""
        return not self._stopping and any(not breaker.open for breaker in self.router.breakers.values())

    async def drain(self, seconds: float) -> None:
        """Refuse further requests, and wait up to `seconds` until none is in flight."""
        self._stopping = True
        until = time.monotonic() + seconds
        while any(self.router.loads().values()) and time.monotonic() < until:
            await asyncio.sleep(0.1)
            self.router.drop_silent_holders(time.monotonic())

    async def metrics(self) -> bytes:
        """Return the metrics in Prometheus's text format."""
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
            await self.clients[url].get_text("/health")
        except (ServerFailure, InputError):  # the latter is a refusal, such as 404
            breaker.count_check(well=False)
        else:
            breaker.count_check(well=True)


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

    def count(self, outcome: LeaseOutcome) -> None:
        """Count the outcome of a request at one server."""
        pair = outcome.lease.pair
        if outcome.failed:
            self.failures.labels(pair, outcome.lease.url).inc()
        if outcome.status:
            self.requests.labels(pair, str(outcome.status)).inc()
            self.seconds.labels(pair).observe(outcome.seconds)
        if outcome.first_byte is not None:
            self.first_byte.labels(pair).observe(outcome.first_byte)
