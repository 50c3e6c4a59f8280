"""Routing: the pair and the replica that answer a request, by rules, loads and health. Uses no network and no clock."""

import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from draftsmith.scripts.services.coordinate.config import CoordinatorConfig, RoutingRule, ServedPair

UNKNOWN, FULL, DOWN = "unknown", "full", "down"
FAILURES = 3  # consecutive ones, after which a server gets no requests until it is healthy again


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
class Server:
    """A server, as a replica of one pair."""

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
    """A circuit breaker: after `FAILURES` a server gets no requests until a health check succeeds."""

    requests: int = 0  # consecutive failed requests
    looks: int = 0
    """Consecutive failed health checks, counted apart: a server that is shutting down fails them, yet still answers the
    requests that it has begun."""

    @property
    def open(self) -> bool:
        """True if the server gets no requests."""
        return max(self.requests, self.looks) >= FAILURES

    def ended(self, failed: bool) -> None:
        """Count a failed request; an answered one resets the count."""
        self.requests = self.requests + 1 if failed else 0

    def count_check(self, well: bool) -> None:
        """Count a failed health check; a successful one takes back a failed request, and so allows one more attempt."""
        self.looks = 0 if well else self.looks + 1
        if well:
            self.requests = max(min(self.requests, FAILURES) - 1, 0)


class Router:
    """Chooses servers and counts requests in flight. `seed` is for draws among equally loaded replicas."""

    def __init__(self, config: CoordinatorConfig, rates: Mapping[str, Rates], seed: int | None = None):
        self.pairs = {pair.name: pair for pair in config.pairs}
        self.rules, self.rates = config.rules, rates
        self.breakers = {url: Breaker() for pair in config.pairs for url in pair.endpoints}
        self.loads = dict.fromkeys(self.breakers, 0)
        """Requests in flight at each server."""
        self._random = random.Random(seed)

    def acquire(self, facts: Facts, failed_urls: Collection[str] = ()) -> Server | Refusal:
        """Choose a server for a request, and count it as in flight until `release`."""
        candidates = [pair for pair in self.pairs.values() if facts.model in pair.models]
        if not candidates:
            return Refusal(UNKNOWN)
        room = {pair.name: urls for pair in candidates if (urls := self._room(pair, failed_urls))}
        name = next(self._wanted(facts, room), None) or next(iter(room), None)
        if name is None:
            full = any(self._full(pair) and self._well(pair, failed_urls) for pair in candidates)
            return Refusal(FULL if full else DOWN)
        # The least loaded server, at random among equals. One that fails at once has nothing in flight: failures count.
        busy = {url: self.loads[url] + self.breakers[url].requests for url in room[name]}
        url = self._random.choice([url for url in busy if busy[url] == min(busy.values())])
        self.loads[url] += 1
        return Server(name, url)

    def release(self, server: Server) -> None:
        """Count a request as no longer in flight."""
        self.loads[server.url] -= 1

    def load(self, name: str) -> int:
        """Return the number of requests in flight at a pair's servers."""
        return sum(self.loads[url] for url in self.pairs[name].endpoints)

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
        rows = 1 + min(self.loads[url] for url in urls)
        return self.rates[name].tokens_per_second(rows, facts.temperature, facts.category)

    def _full(self, pair: ServedPair) -> bool:
        return pair.max_concurrency is not None and self.load(pair.name) >= pair.max_concurrency

    def _well(self, pair: ServedPair, failed_urls: Collection[str]) -> list[str]:
        return [url for url in pair.endpoints if not self.breakers[url].open and url not in failed_urls]

    def _room(self, pair: ServedPair, failed_urls: Collection[str]) -> list[str]:
        """Return a pair's servers that may get a request."""
        return [] if self._full(pair) else self._well(pair, failed_urls)
