"""The protocol between a decoder and a draft service, version 1: JSON over HTTP. Uses the standard library only.

`POST /propose` asks for drafts of many texts at once. The service remembers texts, and a text is sent in pieces:

    {"version": 1, "client": "9f…", "rows": [{"id": 7, "start": 120, "tokens": [11, 12], "want": 4}], "ended": [3],
     "report": {"failures": 0, "plain_rounds": 0}}

The text of row 7 is the first 120 tokens that the service has of it, and these two. A round's bytes therefore do not
grow with the text, and repeating a piece is harmless. Ids are the client's own; it never names those in `ended` again.
`report` counts the client's failures since its last answered call. The answer

    {"version": 1, "drafts": [[13, 14, 15, 16]]}

has a draft for each row in order, at most as long as wanted, or `null` if the service does not have the text up to
`start`, after a restart or an eviction: the client then sends the row from 0.

`GET /health` answers 200 and a `Service` when drafts may be asked for.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

VERSION = 1
MOST_BYTES = 8 << 20  # of a request's or an answer's body
MOST_TOKENS = 1 << 19  # of all rows of a request, so that they fit
NUMBERS = 1 << 31  # tokens and lengths are below it
IDS = 1 << 53  # ids are below it, the limit of whole numbers in other languages' JSON


class ProtocolError(ValueError):
    """An invalid message; the error is one line, `field: expected …, found …`."""


@dataclass(frozen=True)
class DraftRow:
    """One text, and the length of the draft to make for it."""

    id: int
    start: int  # tokens that the service has already
    tokens: list[int]  # the tokens after them, up to the text's end
    want: int  # γ; 0 only sends the text


@dataclass(frozen=True)
class ClientReport:
    """A client's counts since its last answered call."""

    failures: int = 0  # calls without an answer
    plain_rounds: int = 0  # rounds without drafts because the service was away


@dataclass(frozen=True)
class DraftRequest:
    """One round of one client."""

    client: str  # distinguishes the ids of clients
    rows: list[DraftRow]
    ended: list[int]
    report: ClientReport


@dataclass(frozen=True)
class Service:
    """The answer of `/health`."""

    version: int
    model: str
    vocab_size: int  # drafted tokens are below it
    max_length: int  # tokens of a text, including drafted ones
    max_rows: int  # of a request
    max_draft_length: int  # γ


def encode_request(request: DraftRequest) -> bytes:
    """Return a request's body."""
    # Not `asdict`, whose copies of all lists would take most of a round's time here.
    rows = [vars(row) for row in request.rows]
    message = {"version": VERSION, "client": request.client, "rows": rows, "ended": request.ended}
    return _bytes(message | {"report": vars(request.report)})


def decode_request(body: bytes) -> DraftRequest:
    """Parse a request's body; a ProtocolError names the field."""
    message = _object(body, "request")
    _fields(message, "request", ("version", "client", "rows", "ended", "report"))
    _version(message)
    client = message["client"]
    if not (isinstance(client, str) and 0 < len(client) <= 64 and client.isascii() and client.isalnum()):
        raise ProtocolError(f"client: expected up to 64 letters and digits, found {_shown(client)}")
    rows = []
    for index, row in enumerate(_list(message["rows"], "rows")):
        name = f"rows[{index}]"
        _fields(row, name, ("id", "start", "tokens", "want"))
        id_, start = _number(row["id"], f"{name}.id", IDS), _number(row["start"], f"{name}.start")
        tokens = _numbers(row["tokens"], f"{name}.tokens", NUMBERS)
        if not start + len(tokens):
            raise ProtocolError(f"{name}: expected a text of at least one token, found none")
        rows.append(DraftRow(id_, start, tokens, _number(row["want"], f"{name}.want")))
    if len({row.id for row in rows}) < len(rows):
        raise ProtocolError("rows: expected each id once, found one twice")
    if (sent := sum(len(row.tokens) for row in rows)) > MOST_TOKENS:
        raise ProtocolError(f"rows: expected at most {MOST_TOKENS} tokens in all, found {sent}")
    _fields(message["report"], "report", ("failures", "plain_rounds"))
    report = ClientReport(**{key: _number(value, f"report.{key}") for key, value in message["report"].items()})
    return DraftRequest(client, rows, _numbers(message["ended"], "ended", IDS), report)


def encode_drafts(drafts: Sequence[list[int] | None]) -> bytes:
    """Return an answer's body."""
    return _bytes({"version": VERSION, "drafts": drafts})


def decode_drafts(body: bytes, rows: Sequence[DraftRow]) -> list[list[int] | None]:
    """Parse the answer to some rows; raise ProtocolError if it does not fit them."""
    message = _object(body, "answer")
    _fields(message, "answer", ("version", "drafts"))
    _version(message)
    drafts = _list(message["drafts"], "drafts")
    if len(drafts) != len(rows):
        raise ProtocolError(f"drafts: expected {len(rows)}, found {len(drafts)}")
    for index, (draft, row) in enumerate(zip(drafts, rows, strict=True)):
        if draft is not None and len(_numbers(draft, f"drafts[{index}]", NUMBERS)) > row.want:
            raise ProtocolError(f"drafts[{index}]: expected at most {row.want} tokens, found {len(draft)}")
    return drafts


def encode_service(service: Service) -> bytes:
    """Return the body of the answer of `/health`."""
    return _bytes(asdict(service))


def decode_service(body: bytes) -> Service:
    """Parse the answer of `/health`; raise ProtocolError if it is no draft service, or one of another version."""
    message = _object(body, "health")
    _version(message)  # first, because another version may have other fields
    _fields(message, "health", [field.name for field in fields(Service)])
    model = message.pop("model")
    if not isinstance(model, str):
        raise ProtocolError(f"health.model: expected a text, found {_shown(model)}")
    return Service(model=model, **{name: _number(value, f"health.{name}") for name, value in message.items()})


def _bytes(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _object(body: bytes, name: str) -> dict[str, Any]:
    if len(body) > MOST_BYTES:
        raise ProtocolError(f"{name}: expected at most {MOST_BYTES} bytes, found {len(body)}")
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"{name}: expected JSON, found {' '.join(str(error).split())[:200]}") from error
    if not isinstance(value, dict):
        raise ProtocolError(f"{name}: expected an object, found {_shown(value)}")
    return value


def _fields(value: Any, name: str, expected: Sequence[str]) -> None:
    if not isinstance(value, dict) or value.keys() != set(expected):
        found = ", ".join(map(str, value))[:200] if isinstance(value, dict) else _shown(value)
        raise ProtocolError(f"{name}: expected the fields {', '.join(expected)}, found {found or 'none'}")


def _version(message: dict[str, Any]) -> None:
    if type(message.get("version")) is not int or message["version"] != VERSION:
        raise ProtocolError(f"version: expected {VERSION}, found {_shown(message.get('version'))}")


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise ProtocolError(f"{name}: expected a list, found {_shown(value)}")
    return value


def _number(value: Any, name: str, end: int = NUMBERS) -> int:
    if type(value) is not int or not 0 <= value < end:  # True is an int to isinstance
        raise ProtocolError(f"{name}: expected a whole number from 0 to {end - 1}, found {_shown(value)}")
    return value


def _numbers(value: Any, name: str, end: int) -> list[int]:
    for number in _list(value, name):
        if type(number) is not int or not 0 <= number < end:
            _number(number, name, end)
    return value  # type: ignore[no-any-return]


def _shown(value: Any) -> str:
    return repr(value)[:80]
