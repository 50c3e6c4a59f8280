"""Counters of a draft service, in Prometheus's format."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

PREFIX = "draftsmith_draft"
SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class ServiceMetrics:
    """The counters of one service."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        name = f"{PREFIX}_{{}}".format
        self.requests = Counter(name("requests"), "Requests for drafts.", ["status"], registry=registry)
        self.seconds = Histogram(
            name("request_seconds"), "From a request's headers to its answer.", buckets=SECONDS, registry=registry
        )
        self.work_seconds = Counter(name("work_seconds"), "Time in which drafts were made.", registry=registry)
        self.rows = Counter(name("rows"), "Rows of requests.", registry=registry)
        self.unknown = Counter(name("unknown_rows"), "Rows whose text was not known.", registry=registry)
        self.tokens = Counter(name("tokens"), "Drafted tokens.", registry=registry)
        self.copied = Counter(name("copied_drafts"), "Drafts that were copied.", registry=registry)
        self.batch_rows = Histogram(name("batch_rows"), "Rows drafted for together.", buckets=ROWS, registry=registry)
        self.evictions = Counter(name("evictions"), "Texts forgotten to make room.", registry=registry)
        self.replaced = Counter(name("replaced"), "Drafts that took another's place.", registry=registry)
        self.waiting = Gauge(name("waiting_requests"), "Requests that wait.", registry=registry)
        self.texts = Gauge(name("texts"), "Texts that are known.", registry=registry)
        self.cached_tokens = Gauge(name("cached_tokens"), "Tokens whose keys and values are kept.", registry=registry)
        self.client_failures = Counter(
            name("client_failures"), "Calls without an answer, as clients report them.", registry=registry
        )
        self.client_plain_rounds = Counter(
            name("client_plain_rounds"), "Rounds that clients decoded plainly, as they report them.", registry=registry
        )
