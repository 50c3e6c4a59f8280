"""A request for a completion: the facts for routing, and the body to forward."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from draftsmith.decode.validation import parse_json
from draftsmith.scripts.services.coordinate.config import RoutingRule
from draftsmith.scripts.services.coordinate.patterns import Pattern
from draftsmith.scripts.services.coordinate.routing import Facts

CATEGORY_HEADER = "x-draftsmith-category"
FORWARDED = ("x-request-id",)  # headers
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SEARCHED = 20_000  # characters at the end of the last user turn that keywords are searched in
DEPTH = 100  # levels of a request's JSON; deeper nesting can be parsed but not written again
INVALID = "invalid_request_error"  # OpenAI's type of a client's error


class ApiError(Exception):
    """A request answered with an error in OpenAI's shape."""

    def __init__(self, status: int, message: str, kind: str = INVALID, param: str | None = None):
        super().__init__(message)
        self.status, self.message, self.kind, self.param = status, message, kind, param

    def body(self) -> dict[str, Any]:
        """Return the body of the answer."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.status}}


@dataclass(frozen=True)
class CompletionRequest:
    """A request for a completion."""

    path: str
    body: Mapping[str, Any]
    facts: Facts
    headers: Mapping[str, str] = field(default_factory=dict)  # to forward: the request's id, if the client sends one
    added: Mapping[str, Any] = field(default_factory=dict)  # fields for the log, which a server may refuse

    @property
    def streams(self) -> bool:
        """True if the answer is a stream of events."""
        return self.body.get("stream") is True

    def content(self, server_model: str | None) -> bytes:
        """Return the body for a server, with the model's name there; None if the names are equal."""
        body = {**self.body, **self.added} | ({} if server_model is None else {"model": server_model})
        return json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogatepass")


def read_request(path: str, content: bytes, headers: Mapping[str, str], keywords: "Keywords") -> CompletionRequest:
    """Parse a request for a completion at the path `CHAT` or `TEXT`; an ApiError names the wrong field."""
    try:
        body = parse_json(content.decode("utf-8"))
    except ValueError as error:  # its message has the place in the body, not its text
        raise ApiError(400, f"body: expected JSON, found: {error}") from error
    if _deep(body):
        raise ApiError(400, f"body: expected at most {DEPTH} levels of JSON, found more")
    if not isinstance(body, dict):
        raise ApiError(400, "body: expected a JSON object, found something else")
    model, field = body.get("model"), "messages" if path == CHAT else "prompt"
    if not isinstance(model, str) or not model:
        raise ApiError(400, "model: expected the name of a model, found none", param="model")
    if not body.get(field):
        raise ApiError(400, f"{field}: expected some, found none", param=field)
    if path == CHAT and not isinstance(body["messages"], list):
        raise ApiError(400, "messages: expected a list, found something else", param="messages")
    facts = Facts(
        model=model,
        category=_category(body, headers),
        temperature=_temperature(body),
        keywords=keywords.found_in(last_turn(body)),
    )
    return CompletionRequest(path, body, facts, {name: headers[name] for name in FORWARDED if name in headers})


def last_turn(body: Mapping[str, Any]) -> str:
    """Return the text of the last user turn, or the prompt; empty if there is none, or for a prompt of ids."""
    messages = body.get("messages")
    if not isinstance(messages, list):
        return _text(body.get("prompt"))
    users = [m for m in messages if isinstance(m, dict) and m.get("role") == "user"]
    return _text(users[-1].get("content")) if users else ""


class Keywords:
    """The rules' regular expressions."""

    def __init__(self, rules: Sequence[RoutingRule]):
        self.patterns: dict[int, list[Pattern]] = {
            index: [Pattern(pattern, "rules.keywords", case=False) for pattern in rule.keywords]
            for index, rule in enumerate(rules)
            if rule.keywords
        }

    def found_in(self, text: str) -> frozenset[int]:
        """Return the numbers of the rules with an expression that a text matches."""
        text = text[-SEARCHED:]
        return frozenset(i for i, patterns in self.patterns.items() if any(p.found_in(text) for p in patterns))


def _deep(value: Any) -> bool:
    """Return whether JSON has more than `DEPTH` levels; without recursion, which deep JSON would exhaust."""
    level = [value]
    for _ in range(DEPTH + 1):
        containers = [value for value in level if isinstance(value, dict | list)]
        level = [part for value in containers for part in (value.values() if isinstance(value, dict) else value)]
        if not level:
            return False
    return True


def _category(body: Mapping[str, Any], headers: Mapping[str, str]) -> str | None:
    metadata = body.get("metadata")
    category = metadata.get("category") if isinstance(metadata, dict) else None
    return category if isinstance(category, str) else headers.get(CATEGORY_HEADER)


def _temperature(body: Mapping[str, Any]) -> float:
    temperature = body.get("temperature")
    try:
        return float(temperature) if isinstance(temperature, int | float) else 1.0  # OpenAI's default
    except OverflowError:
        raise ApiError(400, "temperature: expected a number, found one too large", param="temperature") from None


def _text(content: Any) -> str:
    """Return the text of a message's content: a string, or those of its parts that are text."""
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else part for part in content]
        return "\n".join(part for part in parts if isinstance(part, str))
    return content if isinstance(content, str) else ""
