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
    """A target with its drafter, or without one: servers that give the same answers."""

    name: str
    """Its name in rules, metrics and logs."""
    models: list[str]
    """Model names in requests that this pair serves."""
    endpoints: list[str]
    """The replicas: URLs of OpenAI-compatible servers, such as http://127.0.0.1:8000, that already use the drafter."""
    server_model: str | None = None
    """The model's name on these servers if it differs from the name in the request."""
    key_env: str | None = None
    """The environment variable with their API key."""
    max_concurrency: int | None = None
    """The most requests in flight, over all replicas; further ones go to the next rule. Null: no limit."""
    report: str | None = None
    """The report.json of `draftsmith measure` for this pair, from which a rule's `best` predicts its speed."""
    drafter: str | None = None
    """The report's drafter that runs on these servers; null: the recommended one."""
    draft_length: int | None = None
    """γ on these servers; 0: they decode plainly; null: the recommended one."""
    drafts: str = GREEDY
    """Drafting of these servers under sampling: `greedy` (vLLM's and SGLang's default) or `probabilistic`."""

    def __post_init__(self) -> None:
        where = f"pairs.{self.name}."
        if not re.fullmatch(r"[\w.-]+", self.name, re.ASCII):  # part of headers and metrics
            raise InputError(f"pairs.name: expected letters, digits, - and _, found {self.name!r}")
        require_some(self, "models", "model name", where)
        require_some(self, "endpoints", "URL", where)
        self.endpoints = [checked_url(url, f"{where}endpoints") for url in self.endpoints]
        require(self, at_least(1), "max_concurrency", prefix=where)
        require(self, at_least(0), "draft_length", prefix=where)
        require(self, one_of((GREEDY, PROBABILISTIC)), "drafts", prefix=where)
        _require_once(self.endpoints, f"{where}endpoints")


@dataclass
class RoutingRule:
    """A destination for requests that meet all conditions; without conditions it takes every request."""

    pair: str | None = None
    """The pair that takes the request."""
    best: list[str] = field(default_factory=list)
    """Or candidates: the pair that is predicted to write the most tokens/s for this request at its present load."""
    model: str | None = None
    """The requested model; * and ? stand for any characters."""
    category: list[str] = field(default_factory=list)
    """Categories. A request names one: as `metadata.category` of its body, or in x-draftsmith-category."""
    keywords: list[str] = field(default_factory=list)
    """Regular expressions (RE2). One must be found in the last user turn, ignoring case."""
    load_of: str | None = None
    """The pair whose load the following conditions read."""
    load_at_least: int | None = None
    """The pair has at least this many requests in flight."""
    load_below: int | None = None
    """The pair has fewer requests in flight."""

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
        """The pairs that the rule names."""
        return list(self.best) if self.pair is None else [self.pair]


@dataclass
class Redaction:
    """A replacement in all texts before they are written."""

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
    """A log of requests and their answers, training text for the next draft."""

    path: str
    """A .jsonl file, opened anew for each line, so that other programs may move it away."""
    redact: list[Redaction] = field(default_factory=list)
    """Replacements in prompts and answers, in this order."""
    token_ids: bool = False
    """Ask the servers for the token ids that they read and write (`return_token_ids`), which a draft then learns
    exactly. Clients get them too. Not with a redaction, because nothing can be redacted in them."""

    def __post_init__(self) -> None:
        if not self.path.endswith(".jsonl"):
            raise InputError(f"log.path: expected a file named .jsonl, found {self.path!r}")
        if self.token_ids and self.redact:
            raise InputError("log.token_ids: expected false with a redaction, found true")


@dataclass
class CoordinatorConfig:
    """Serve OpenAI's API in front of several servers: rules, load and measured costs choose the pair that answers."""

    pairs: list[ServedPair]
    """Targets with their drafters, as they are served."""
    rules: list[RoutingRule] = field(default_factory=list)
    """Rules in order: the first that a request meets, and that has a pair for its model with room, takes it. If none
    does, the first pair for its model with room."""
    host: str = "127.0.0.1"
    """The address to listen at."""
    port: int = 8200
    """The port to listen at."""
    key_env: str | None = None
    """The environment variable with the API key that clients must send; null: no key is required."""
    log: Log | None = None
    """Write requests and their answers to a file; without it no prompt is written anywhere."""
    health_seconds: float = 2.0
    """Seconds between two health checks of a server, and the timeout of one."""

    def __post_init__(self) -> None:
        require_some(self, "pairs", "pair")
        require(self, at_least(1), "port")
        require(self, finite(more_than(0)), "health_seconds")
        if self.port > 65535:
            raise InputError(f"port: expected at most 65535, found {self.port}")
        _require_once([pair.name for pair in self.pairs], "pairs.name")
        key_of = dict[str, str | None]()
        for pair in self.pairs:
            for url in pair.endpoints:
                if key_of.setdefault(url, pair.key_env) != pair.key_env:
                    raise InputError(f"pairs.{pair.name}.key_env: expected one key for {url}, found two")
        by_name = {pair.name: pair for pair in self.pairs}
        for rule in self.rules:
            for name in (*rule.pairs, *([rule.load_of] if rule.load_of else [])):
                if name not in by_name:
                    raise InputError(f"rules: expected one of the pairs {', '.join(by_name)}, found {name!r}")
            for name in rule.best:
                if by_name[name].report is None:
                    raise InputError(f"rules.best: expected a pair with a report, found {name!r} without")

    @property
    def models(self) -> list[str]:
        """All model names, each once."""
        return list(dict.fromkeys(model for pair in self.pairs for model in pair.models))


def _require_once(names: Sequence[str], what: str) -> None:
    twice = [name for index, name in enumerate(names) if name in names[:index]]
    if twice:
        raise InputError(f"{what}: expected each once, found {twice[0]} again")
