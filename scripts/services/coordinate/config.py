"""Settings of `draftsmith coordinate`."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from draftsmith.decode.errors import InputError, at_least, finite, more_than, one_of, require, require_some
from draftsmith.scripts.services.coordinate.patterns import Pattern
from draftsmith.train.options import checked_url

GREEDY, PROBABILISTIC = "greedy", "probabilistic"


@dataclass
class ServedPair:
    """A target with its drafter, or without one: servers that answer alike."""

    name: str
    """Its name in rules, metrics and logs."""
    models: list[str]
    """The model names that requests may ask for."""
    endpoints: list[str]
    """The replicas: URLs of OpenAI-compatible servers, such as http://127.0.0.1:8000. The drafter is theirs already."""
    server_model: str | None = None
    """The model's name on these servers, if it is not the name in the request."""
    key_env: str | None = None
    """The environment variable that holds their API key."""
    max_concurrency: int | None = None
    """Requests under way at once, over all replicas; further ones go to the next rule. No limit if not given."""
    report: str | None = None
    """The report.json that `draftsmith measure` left for this pair: its costs and acceptance say how fast it is at what
    load. A rule's `best` compares this."""
    drafter: str | None = None
    """Which of the report's drafters runs on these servers; the recommended one if not given."""
    draft_length: int | None = None
    """γ on these servers; 0: they decode plainly. The recommended one if not given."""
    draft_lengths: str | None = None
    """draft_lengths.json of `measure` or `tune`, in place of one γ: these servers draft by their load."""
    drafts: str = GREEDY
    """How these servers draft under sampling: `greedy` (vLLM's and SGLang's default) or `probabilistic`."""

    def __post_init__(self) -> None:
        where = f"pairs.{self.name}."
        if not re.fullmatch(r"[\w.-]+", self.name, re.ASCII):  # it goes into headers and metrics
            raise InputError(f"pairs.name: expected letters, digits, - and _, found {self.name!r}")
        require_some(self, "models", "model name", where)
        require_some(self, "endpoints", "URL", where)
        self.endpoints = [checked_url(url, f"{where}endpoints") for url in self.endpoints]
        require(self, at_least(1), "max_concurrency", prefix=where)
        require(self, at_least(0), "draft_length", prefix=where)
        require(self, one_of((GREEDY, PROBABILISTIC)), "drafts", prefix=where)
        if self.draft_lengths is not None and (self.report is None or self.draft_length is not None):
            found = "no report" if self.report is None else "a draft_length"
            raise InputError(f"{where}draft_lengths: expected a report beside it and no draft_length, found {found}")
        _require_once(self.endpoints, f"{where}endpoints")


@dataclass
class RoutingRule:
    """Where requests go that meet all of its conditions; one without conditions takes all that come to it."""

    pair: str | None = None
    """To this pair."""
    best: list[str] = field(default_factory=list)
    """Or to the one of these that is predicted to write most tokens/s for this request, at the load that it has."""
    model: str | None = None
    """The request asks for this model; * and ? stand for any characters."""
    category: list[str] = field(default_factory=list)
    """The request says one of these: as `metadata.category` of its body, or in the header x-draftsmith-category."""
    keywords: list[str] = field(default_factory=list)
    """One of these regular expressions (RE2) is found in the last user turn, whatever its case."""
    load_of: str | None = None
    """The pair whose requests under way are looked at."""
    load_at_least: int | None = None
    """Minimum requests in flight there."""
    load_below: int | None = None
    """It has fewer requests in flight."""

    def __post_init__(self) -> None:
        if (self.pair is None) == (not self.best):
            raise InputError(f"rules: expected either pair or best, found {'both' if self.best else 'none'}")
        if (self.load_of is None) != (self.load_at_least is None and self.load_below is None):
            raise InputError("rules.load_of: expected it together with load_at_least or load_below, found one alone")
        require(self, at_least(0), "load_at_least", prefix="rules.")
        require(self, at_least(1), "load_below", prefix="rules.")
        for pattern in self.keywords:
            Pattern(pattern, "rules.keywords", case=False)

    @property
    def pairs(self) -> list[str]:
        """The pairs that it names."""
        return list(self.best) if self.pair is None else [self.pair]


@dataclass
class Redaction:
    """Text that is replaced before anything is written."""

    pattern: str
    """A regular expression (RE2)."""
    replacement: str = "[redacted]"
    """Its replacement; \\1 is the first group."""

    def __post_init__(self) -> None:
        Pattern(self.pattern, "log.redact.pattern", case=True).check_replacement(
            self.replacement, "log.redact.replacement"
        )


@dataclass
class Log:
    """A log of requests and their answers, for the next draft to learn from."""

    path: str
    """A .jsonl file; full ones beside it end in .1.jsonl, .2.jsonl, …"""
    redact: list[Redaction] = field(default_factory=list)
    """Replacements in prompts and answers, in this order."""
    redact_with: str | None = None
    """A function of yours that texts go through last: `package.module:function`, str → str."""
    max_bytes: int = 100_000_000
    """A file is full at this size."""
    files: int = 10
    """Full files that are kept; the oldest is removed."""

    def __post_init__(self) -> None:
        if not self.path.endswith(".jsonl"):
            raise InputError(f"log.path: expected a file named .jsonl, found {self.path!r}")
        require(self, at_least(1000), "max_bytes", prefix="log.")
        require(self, at_least(1), "files", prefix="log.")
        if self.redact_with is not None and not re.fullmatch(r"[\w.]+:\w+", self.redact_with):
            raise InputError(f"log.redact_with: expected package.module:function, found {self.redact_with!r}")


@dataclass
class CoordinatorConfig:
    """Answer OpenAI's API in front of several servers: rules, load and measured costs say which pair answers."""

    pairs: list[ServedPair]
    """Targets with their drafters, as they are served."""
    rules: list[RoutingRule] = field(default_factory=list)
    """Looked at in turn: the first that fits a request, and has a pair for its model with room, takes it. Where none
    does, the first pair for its model with room."""
    host: str = "127.0.0.1"
    """The address to answer at."""
    port: int = 8200
    """The port to answer at."""
    ingress: int = 1
    """Processes that pass requests on. One is enough for a laptop; they share one view of all loads."""
    key_env: str | None = None
    """The environment variable that holds the API key that clients must send; none is asked for if not given."""
    log: Log | None = None
    """Write requests and their answers to a file; without it no prompt is written anywhere."""
    timeout: float = 600.0
    """Seconds for one whole answer."""
    max_body_bytes: int = 4_000_000
    """Of a request; a larger one is refused."""
    health_path: str = "/health"
    """A path that a healthy server answers with 200."""
    health_seconds: float = 2.0
    """Between two health checks of a server, and the longest that one takes."""
    failures: int = 3
    """Consecutive failures after which a server gets no requests until it is healthy again."""

    def __post_init__(self) -> None:
        require_some(self, "pairs", "pair")
        require(self, at_least(1), "port", "max_body_bytes", "failures", "ingress")
        require(self, finite(more_than(0)), "timeout", "health_seconds")
        if self.port > 65535:
            raise InputError(f"port: expected at most 65535, found {self.port}")
        if not re.fullmatch(r"/[!-~]*", self.health_path):  # what else goes into a request's line may end it
            raise InputError(
                f"health_path: expected a path such as /health, in ASCII and without spaces, found {self.health_path!r}"
            )
        _require_once([pair.name for pair in self.pairs], "pairs.name")
        key_of = dict[str, str | None]()
        for pair in self.pairs:
            for url in pair.endpoints:
                if key_of.setdefault(url, pair.key_env) != pair.key_env:
                    raise InputError(f"pairs.{pair.name}.key_env: expected one key for {url}, found two")
        known = {pair.name: pair for pair in self.pairs}
        for rule in self.rules:
            for name in (*rule.pairs, *([rule.load_of] if rule.load_of else [])):
                if name not in known:
                    raise InputError(f"rules: expected one of the pairs {', '.join(known)}, found {name!r}")
            for name in rule.best:
                if known[name].report is None:
                    raise InputError(f"rules.best: expected a pair with a report, found {name!r} without")

    @property
    def models(self) -> list[str]:
        """All model names, each once."""
        return list(dict.fromkeys(model for pair in self.pairs for model in pair.models))


def _require_once(names: Sequence[str], what: str) -> None:
    twice = [name for place, name in enumerate(names) if name in names[:place]]
    if twice:
        raise InputError(f"{what}: expected each once, found {twice[0]} again")
