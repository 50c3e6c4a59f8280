"""Metrics of a draft service, in Prometheus's format."""

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

PREFIX = "draftsmith_draft"
SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class ServiceMetrics:
    """The metrics of one service."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        name = f"{PREFIX}_{{}}".format
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        histogram = partial(Histogram, registry=registry)
        self.requests = counter(name("requests"), "Requests for drafts.", ["status"])
        self.seconds = histogram(name("request_seconds"), "From a request's headers to its answer.", buckets=SECONDS)
        self.work_seconds = counter(name("work_seconds"), "Time in which drafts were made.")
        self.rows = counter(name("rows"), "Rows of requests.")
        self.unknown = counter(name("unknown_rows"), "Rows whose text was not known.")
        self.tokens = counter(name("tokens"), "Drafted tokens.")
        self.copied = counter(name("copied_drafts"), "Drafts that were copied.")
        self.batch_rows = histogram(name("batch_rows"), "Rows drafted for together.", buckets=ROWS)
        self.evictions = counter(name("evictions"), "Texts forgotten to make room.")
        self.replaced = counter(name("replaced"), "Drafts that took another's place.")
        self.waiting = gauge(name("waiting_requests"), "Requests that wait.")
        self.texts = gauge(name("texts"), "Texts that are known.")
        self.cached_tokens = gauge(name("cached_tokens"), "Tokens whose keys and values are kept.")
