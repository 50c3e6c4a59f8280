"""The one process that knows all loads: it chooses servers, looks after their health, and counts.

Ingress processes may be many, on several machines. Each asks here before it passes a request on and says here when it
has ended, so that loads are right whichever of them a request came through. One call at a time takes all that an
ingress has to ask and to say, so the more requests there are, the fewer calls each costs. Requests that other clients
send to the same servers are not seen.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from draftsmith.decode.errors import InputError
from draftsmith.scripts.services.coordinate.config import CoordinatorConfig
from draftsmith.scripts.services.coordinate.rates import Rates
from draftsmith.scripts.services.coordinate.relay import BROKEN, LeaseOutcome
from draftsmith.scripts.services.coordinate.routing import DOWN, Facts, Lease, Refusal, Router
from draftsmith.train.endpoint.http import HttpClient, ServerFailure

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
            url: HttpClient(url, f"pairs.{pair.name}", pair.key_env, config.health_seconds)
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

    def exchange(
        self,
        holder: str,
        ended: Sequence[LeaseOutcome],
        wanted: Sequence[tuple[Facts, list[str]]],
        held: Sequence[Lease] | None,
    ) -> list[Lease | Refusal]:
        """Take an ingress's word and answer it.

        Args:
            holder: the ingress.
            ended: what has become of requests.
            wanted: requests that a server is wanted for, each with those that have failed it.
            held: all leases that it has, those that have just ended left out; None: nothing is said of them.

        Returns:
            For each request that is wanted, see `Router.acquire`.
        """
        now = time.monotonic()
        for outcome in ended:
            breaker = self.router.breakers.get(outcome.lease.url)
            # Neither: its client left before an answer, or a 500 that may be the request's own doing.
            if breaker is not None and (outcome.failed or outcome.status not in (0, BROKEN)):
                breaker.ended(outcome.failed)
            self._metrics.count(outcome)
        self.router.ended(holder, [outcome.lease.id for outcome in ended], now)
        if held is not None:
            self.router.heard(holder, held, now)
        return [self._acquire(facts, holder, tried, now) for facts, tried in wanted]

    def _acquire(self, facts: Facts, holder: str, tried: Sequence[str], now: float) -> Lease | Refusal:
        chosen = Refusal(DOWN) if self._stopping else self.router.acquire(facts, holder, tried, now)
        if isinstance(chosen, Refusal):
            self._metrics.refused.labels(chosen.why).inc()
        return chosen

    async def well(self) -> bool:
        """Say whether a request would be answered: some server may get it, and this does not end."""
        return not self._stopping and any(not breaker.open for breaker in self.router.breakers.values())

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
        except (ServerFailure, InputError):  # a healthy server does not refuse
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

    def count(self, outcome: LeaseOutcome) -> None:
        """Count what became of a request at one server."""
        pair = outcome.lease.pair
        if outcome.failed:
            self.failures.labels(pair, outcome.lease.url).inc()
        if outcome.status:
            self.requests.labels(pair, str(outcome.status)).inc()
            self.seconds.labels(pair).observe(outcome.seconds)
        if outcome.first_byte is not None:
            self.first_byte.labels(pair).observe(outcome.first_byte)
