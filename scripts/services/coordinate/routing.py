"""Routing: the pair and the replica that answer a request, by rules, loads and health. Uses no network and no clock.

One `Router` knows all requests in flight, whichever process relays them, so that loads are right with several
processes. A request in flight is a lease: its process holds it and returns it at the end. Leases of a silent holder are
dropped, because that process is dead.
"""

import random
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from uuid import uuid4

from draftsmith.scripts.services.coordinate.config import CoordinatorConfig, RoutingRule, ServedPair

SILENCE = 10.0
"""Seconds without a report after which a holder counts as dead, and a lease that its report omits as lost."""
UNKNOWN, FULL, DOWN = "unknown", "full", "down"


@dataclass(frozen=True)
class Rates:
    """Predicted speeds of a pair: a table, so that routing needs neither a model nor torch."""

    by_temperature: Mapping[float, Mapping[str | None, Sequence[float]]]
    """Temperature → category, None for all prompts together → tokens/s of each of 1, 2, 3, … concurrent requests."""

    def tokens_per_second(self, rows: int, temperature: float, category: str | None = None) -> float:
        """Return the tokens/s of each of `rows` requests; the nearest temperature counts, or all categories."""
        nearest = min(self.by_temperature, key=lambda measured: abs(measured - temperature))
        by_category = self.by_temperature[nearest]
        speeds = by_category.get(category) or by_category[None]
        return speeds[min(rows, len(speeds)) - 1]


@dataclass(frozen=True)
class Facts:
    """The facts of a request that routing needs, without its text."""

    model: str
    category: str | None = None
    temperature: float = 1.0
    keywords: frozenset[int] = frozenset()  # the numbers of the rules whose keywords were found


@dataclass(frozen=True)
class Lease:
    """A request that one server must answer."""

    id: str
    pair: str
    url: str


@dataclass(frozen=True)
class Refusal:
    """No server for a request."""

    why: str
    """`unknown`: no pair serves the model; `full`: all pairs that do are at their limits; `down`: all their servers
    are down."""


@dataclass
class Breaker:
    """A circuit breaker: after `limit` consecutive failures a server gets no requests until a health check succeeds."""

    limit: int
    requests: int = 0  # consecutive failed requests
    looks: int = 0
    """Consecutive failed health checks, counted apart: a server that is shutting down fails them, yet still answers the
    requests that it has begun."""

    @property
    def open(self) -> bool:
        """True if the server gets no requests."""
        return max(self.requests, self.looks) >= self.limit

    def ended(self, failed: bool) -> None:
        """Count a failed request; an answered one resets the count."""
        self.requests = self.requests + 1 if failed else 0

    def count_check(self, well: bool) -> None:
        """Count a failed health check; a successful one takes back a failed request, and so allows one more attempt."""
        self.looks = 0 if well else self.looks + 1
        if well:
            self.requests = max(min(self.requests, self.limit) - 1, 0)


@dataclass
class _Holder:
    """A process that relays requests."""

    heard: float
    leases: dict[str, tuple[Lease, float]] = field(default_factory=dict)  # each with its time


class Router:
    """Chooses servers and counts requests in flight. `seed` is for draws among equally loaded replicas."""

    def __init__(self, config: CoordinatorConfig, rates: Mapping[str, Rates], seed: int | None = None):
        self.pairs = {pair.name: pair for pair in config.pairs}
        self.rules, self.rates = config.rules, rates
        self.breakers = {url: Breaker(config.failures) for pair in config.pairs for url in pair.endpoints}
        self._holders: dict[str, _Holder] = {}
        self._random = random.Random(seed)

    def acquire(self, facts: Facts, holder: str, failed_urls: Collection[str], now: float) -> Lease | Refusal:
        """Choose a server for a request of the process `holder`, and count it as in flight."""
        self.drop_silent_holders(now)
        candidates = [pair for pair in self.pairs.values() if facts.model in pair.models]
        if not candidates:
            return Refusal(UNKNOWN)
        room = {pair.name: urls for pair in candidates if (urls := self._room(pair, failed_urls))}
        name = next(self._wanted(facts, room), None) or next(iter(room), None)
        if name is None:
            full = any(self._full(pair) and self._well(pair, failed_urls) for pair in candidates)
            return Refusal(FULL if full else DOWN)
        loads = self.loads()
        # The least loaded server, at random among equals. One that fails at once has nothing in flight: failures count.
        busy = {url: loads[url] + self.breakers[url].requests for url in room[name]}
        url = self._random.choice([url for url in busy if busy[url] == min(busy.values())])
        lease = Lease(uuid4().hex, name, url)
        process = self._holders.setdefault(holder, _Holder(now))
        process.heard, process.leases[lease.id] = now, (lease, now)
        return lease

    def ended(self, holder: str, leases: Iterable[str], now: float) -> None:
        """Drop a holder's leases that have ended."""
        process = self._holders.setdefault(holder, _Holder(now))
        process.heard = now
        for i in leases:
            process.leases.pop(i, None)

    def heard(self, holder: str, held: Iterable[Lease], now: float) -> None:
        """Replace a holder's leases by its report of all that it holds.

        Unknown ones are counted again, because this router may have been restarted. Leases missing from the report are
        dropped, unless they are so young that the holder may not have received them yet.
        """
        process = self._holders.setdefault(holder, _Holder(now))
        reported = {lease.id: lease for lease in held if lease.url in self.breakers}
        young = {i: (lease, at) for i, (lease, at) in process.leases.items() if i in reported or now - at < SILENCE}
        process.heard, process.leases = now, {i: (lease, now) for i, lease in reported.items()} | young

    def drop_silent_holders(self, now: float) -> None:
        """Drop the leases of silent holders."""
        dead = [name for name, holder in self._holders.items() if now - holder.heard > SILENCE]
        for name in dead:
            del self._holders[name]

    def loads(self) -> dict[str, int]:
        """Return the number of requests in flight at each server."""
        loads = dict.fromkeys(self.breakers, 0)
        for holder in self._holders.values():
            for lease, _ in holder.leases.values():
                loads[lease.url] += 1
        return loads

    def load(self, name: str) -> int:
        """Return the number of requests in flight at a pair's servers."""
        loads = self.loads()
        return sum(loads[url] for url in self.pairs[name].endpoints)

    def _wanted(self, facts: Facts, room: Mapping[str, Sequence[str]]) -> Iterator[str]:
        """Yield the pairs with room that the rules name for a request, in order."""
        for index, rule in enumerate(self.rules):
            names = [name for name in rule.pairs if name in room]
            if names and self._meets(facts, rule, index):
                yield max(names, key=lambda name: self._rate(name, facts, room[name])) if rule.best else names[0]

    def _meets(self, facts: Facts, rule: RoutingRule, index: int) -> bool:
        if rule.model is not None and not fnmatchcase(facts.model, rule.model):
            return False
        if (rule.category and facts.category not in rule.category) or (rule.keywords and index not in facts.keywords):
            return False
        if rule.load_of is None:
            return True
        load = self.load(rule.load_of)
        return (rule.load_at_least is None or load >= rule.load_at_least) and (
            rule.load_below is None or load < rule.load_below
        )

    def _rate(self, name: str, facts: Facts, urls: Sequence[str]) -> float:
        """Return a pair's predicted tokens/s for this request, as the next one at its least loaded server."""
        loads = self.loads()
        rows = 1 + min(loads[url] for url in urls)
        return self.rates[name].tokens_per_second(rows, facts.temperature, facts.category)

    def _full(self, pair: ServedPair) -> bool:
        return pair.max_concurrency is not None and self.load(pair.name) >= pair.max_concurrency

    def _well(self, pair: ServedPair, failed_urls: Collection[str]) -> list[str]:
        return [url for url in pair.endpoints if not self.breakers[url].open and url not in failed_urls]

    def _room(self, pair: ServedPair, failed_urls: Collection[str]) -> list[str]:
        """Return a pair's servers that may get a request."""
        return [] if self._full(pair) else self._well(pair, failed_urls)
