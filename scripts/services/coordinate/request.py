"""A request for a completion: the facts that routing needs, and the body that is sent on."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from draftsmith.decode.validation import parse_json
from draftsmith.scripts.services.coordinate.config import RoutingRule
from draftsmith.scripts.services.coordinate.patterns import Pattern
from draftsmith.scripts.services.coordinate.routing import Facts

CATEGORY_HEADER = "x-draftsmith-category"
PASSED_ON = ("x-request-id",)
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SEARCHED = 20_000
"""Characters of the last user turn, from its end, that keywords are looked for in."""

DEPTH = 100
"""Levels of a request's JSON; what is nested deeper can be read, but not written again."""


INVALID = "invalid_request_error"
"""OpenAI's word for what the client did wrong."""


class ApiError(Exception):
    """A request that is answered with an error, in OpenAI's shape."""

    def __init__(self, status: int, message: str, kind: str = INVALID, param: str | None = None):
        super().__init__(message)
        self.status, self.message, self.kind, self.param = status, message, kind, param

    def body(self) -> dict[str, Any]:
        """Return what is answered."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.status}}


@dataclass(frozen=True)
class CompletionRequest:
    """A request for a completion."""

    path: str
    body: Mapping[str, Any]
    facts: Facts
    headers: Mapping[str, str] = field(default_factory=dict)
    """Headers that are sent on: the request's id, if the client names one."""

    @property
    def streams(self) -> bool:
        """Whether the answer is to come in parts."""
        return self.body.get("stream") is True

    def content(self, server_model: str | None) -> bytes:
        """Return the body for a server that calls the model by another name, or by the same."""
        body = dict(self.body) if server_model is None else {**self.body, "model": server_model}
        return json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogatepass")


def read_request(path: str, content: bytes, headers: Mapping[str, str], keywords: "Keywords") -> CompletionRequest:
    """Read a request for a completion.

    Args:
        path: `CHAT` or `TEXT`.
        content: its body.
        headers: its headers, by lower-case names.
        keywords: of the rules.

    Raises:
        ApiError: it is no JSON object with a model and with messages or a prompt; says which field and why.
    """
    try:
        body = parse_json(content.decode("utf-8"))
    except ValueError as error:  # whose message would repeat none of it but where it breaks off
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
    return CompletionRequest(path, body, facts, {name: headers[name] for name in PASSED_ON if name in headers})


def last_turn(body: Mapping[str, Any]) -> str:
    """Return the text of the last user turn, or the prompt; empty if there is none, as in a prompt of ids."""
    messages = body.get("messages")
    if not isinstance(messages, list):
        return _text(body.get("prompt"))
    users = [m for m in messages if isinstance(m, dict) and m.get("role") == "user"]
    return _text(users[-1].get("content")) if users else ""


class Keywords:
    """The rules' regular expressions."""

    def __init__(self, rules: Sequence[RoutingRule]):
        self.patterns: dict[int, list[Pattern]] = {
            place: [Pattern(pattern, "rules.keywords", case=False) for pattern in rule.keywords]
            for place, rule in enumerate(rules)
            if rule.keywords
        }

    def found_in(self, text: str) -> frozenset[int]:
        """Return the rules, by their place, one of whose expressions is found in a text."""
        text = text[-SEARCHED:]
        return frozenset(p for p, patterns in self.patterns.items() if any(each.found_in(text) for each in patterns))


def _deep(value: Any) -> bool:
    """Say whether JSON has more than `DEPTH` levels."""
    level = [value]
    for _ in range(DEPTH + 1):
        level = [
            part
            for each in level
            if isinstance(each, dict | list)
            for part in (each.values() if isinstance(each, dict) else each)
        ]
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
    """Return the text of a message's content: a string, or parts of which some are text."""
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else part for part in content]
        return "\n".join(part for part in parts if isinstance(part, str))
    return content if isinstance(content, str) else ""
