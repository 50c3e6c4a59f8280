"""Which pair and which replica answer a request: rules, loads, health. No network, no clock but what it is given.

One `Router` knows all requests that are under way, whichever process passes them on, so that loads are right with
several of them. A request under way is a lease: it is held by the process that passes it on, given back when it ends,
and dropped where its holder is silent, for that process is dead.
"""

import random
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from uuid import uuid4

from draftsmith.scripts.services.coordinate.config import CoordinatorConfig, RoutingRule, ServedPair
from draftsmith.scripts.services.coordinate.rates import Rates

SILENCE = 10.0
"""Seconds without a word after which a holder of leases is dead, and a lease that it does not name for lost."""
UNKNOWN, FULL, DOWN = "unknown", "full", "down"


@dataclass(frozen=True)
class Facts:
    """Facts of a request that routing needs; none of its text."""

    model: str
    category: str | None = None
    temperature: float = 1.0
    keywords: frozenset[int] = frozenset()
    """The rules, by their place, whose keywords were found."""


@dataclass(frozen=True)
class Lease:
    """A request that one server has to answer."""

    id: str
    pair: str
    url: str


@dataclass(frozen=True)
class Refusal:
    """No server for a request."""

    why: str
    """`unknown`: no pair serves the model; `full`: all that do have as many requests as they may; `down`: none of
    their servers is well."""


@dataclass
class Breaker:
    """Whether a server gets requests: not after `limit` consecutive failures, until a health check finds it well."""

    limit: int
    requests: int = 0
    """That failed, one after the other."""
    looks: int = 0
    """Failures of either kind, counted apart: a server that is about to end says so when it is looked at, and still
    answers what it has begun."""

    @property
    def open(self) -> bool:
        """Whether it gets none."""
        return max(self.requests, self.looks) >= self.limit

    def ended(self, failed: bool) -> None:
        """Count a request that failed, or forget those that did before one that was answered."""
        self.requests = self.requests + 1 if failed else 0

    def looked_at(self, well: bool) -> None:
        """Count a look that found no well server; one that did takes a failure back.

        So a server that says it is well, and fails all the same, may try once a look, and one more failure is enough.
        """
        self.looks = 0 if well else self.looks + 1
        if well:
            self.requests = max(min(self.requests, self.limit) - 1, 0)


@dataclass
class _Holder:
    """A process that passes requests on."""

    heard: float
    leases: dict[str, tuple[Lease, float]] = field(default_factory=dict)
    """Each with the time that it was given."""


class Router:
    """Chooses, and keeps count.

    Args:
        config: pairs and rules.
        rates: predicted speeds of the pairs that have a report.
        seed: of the draws between replicas with as many requests.
    """

    def __init__(self, config: CoordinatorConfig, rates: Mapping[str, Rates], seed: int | None = None):
        self.pairs = {pair.name: pair for pair in config.pairs}
        self.rules, self.rates = config.rules, rates
        self.breakers = {url: Breaker(config.failures) for pair in config.pairs for url in pair.endpoints}
        self._holders: dict[str, _Holder] = {}
        self._random = random.Random(seed)

    def acquire(self, facts: Facts, holder: str, tried: Collection[str], now: float) -> Lease | Refusal:
        """Choose who answers a request, and count it as under way.

        Args:
            facts: of the request.
            holder: the process that passes it on.
            tried: servers that have failed it.
            now: seconds.
        """
        self.forget_the_dead(now)
        candidates = [pair for pair in self.pairs.values() if facts.model in pair.models]
        if not candidates:
            return Refusal(UNKNOWN)
        room = {pair.name: urls for pair in candidates if (urls := self._room(pair, tried))}
        name = next(self._wanted(facts, room), None) or next(iter(room), None)
        if name is None:
            full = any(self._full(pair) and self._well(pair, tried) for pair in candidates)
            return Refusal(FULL if full else DOWN)
        loads = self.loads()
        # A server that fails at once has nothing under way: its failures count as if they were.
        busy = {url: loads[url] + self.breakers[url].requests for url in room[name]}
        url = self._random.choice([url for url in busy if busy[url] == min(busy.values())])
        lease = Lease(uuid4().hex, name, url)
        known = self._holders.setdefault(holder, _Holder(now))
        known.heard, known.leases[lease.id] = now, (lease, now)
        return lease

    def ended(self, holder: str, leases: Iterable[str], now: float) -> None:
        """Take a holder's word that leases have ended."""
        known = self._holders.setdefault(holder, _Holder(now))
        known.heard = now
        for i in leases:
            known.leases.pop(i, None)

    def heard(self, holder: str, held: Iterable[Lease], now: float) -> None:
        """Take a holder's word that these are all the leases that it holds.

        Those that are not known here are counted again, for this router may be younger than they are; those that it
        does not name are dropped, but for such as may still be on their way to it.
        """
        known = self._holders.setdefault(holder, _Holder(now))
        named = {lease.id: lease for lease in held if lease.url in self.breakers}
        kept = {i: (lease, given) for i, (lease, given) in known.leases.items() if i in named or now - given < SILENCE}
        known.heard, known.leases = now, {i: (lease, now) for i, lease in named.items()} | kept

    def forget_the_dead(self, now: float) -> None:
        """Drop the leases of holders that are silent."""
        dead = [name for name, holder in self._holders.items() if now - holder.heard > SILENCE]
        for name in dead:
            del self._holders[name]

    def loads(self) -> dict[str, int]:
        """Return the requests under way at each server."""
        loads = dict.fromkeys(self.breakers, 0)
        for holder in self._holders.values():
            for lease, _ in holder.leases.values():
                loads[lease.url] += 1
        return loads

    def load(self, name: str) -> int:
        """Return the requests under way at a pair's servers."""
        loads = self.loads()
        return sum(loads[url] for url in self.pairs[name].endpoints)

    def _wanted(self, facts: Facts, room: Mapping[str, Sequence[str]]) -> Iterator[str]:
        """Give the pairs with room that the rules name for a request, in their order."""
        for place, rule in enumerate(self.rules):
            names = [name for name in rule.pairs if name in room]
            if names and self._meets(facts, rule, place):
                yield max(names, key=lambda name: self._rate(name, facts, room[name])) if rule.best else names[0]

    def _meets(self, facts: Facts, rule: RoutingRule, place: int) -> bool:
        if rule.model is not None and not fnmatchcase(facts.model, rule.model):
            return False
        if (rule.category and facts.category not in rule.category) or (rule.keywords and place not in facts.keywords):
            return False
        if rule.load_of is None:
            return True
        load = self.load(rule.load_of)
        return (rule.load_at_least is None or load >= rule.load_at_least) and (
            rule.load_below is None or load < rule.load_below
        )

    def _rate(self, name: str, facts: Facts, urls: Sequence[str]) -> float:
        """Return the tokens/s that a pair is predicted to write for this request, were it the next at a server."""
        loads = self.loads()
        rows = 1 + min(loads[url] for url in urls)
        return self.rates[name].tokens_per_second(rows, facts.temperature, facts.category)

    def _full(self, pair: ServedPair) -> bool:
        return pair.max_concurrency is not None and self.load(pair.name) >= pair.max_concurrency

    def _well(self, pair: ServedPair, tried: Collection[str]) -> list[str]:
        return [url for url in pair.endpoints if not self.breakers[url].open and url not in tried]

    def _room(self, pair: ServedPair, tried: Collection[str]) -> list[str]:
        """Return the servers of a pair that may get a request."""
        return [] if self._full(pair) else self._well(pair, tried)
