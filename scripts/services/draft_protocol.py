"""The protocol between a decoder and a draft service, version 2: JSON over HTTP. Uses pydantic, which vLLM brings.

`POST /propose` asks for drafts of many texts at once. The service remembers texts, and a text is sent in pieces:

    {"version": 2, "client": "9f…", "rows": [{"id": 7, "start": 120, "tokens": [11, 12], "want": 4}], "ended": [3]}

The text of row 7 is the first 120 tokens that the service has of it, and these two. A round's bytes therefore do not
grow with the text, and repeating a piece is harmless. Ids are the client's own; it never names those in `ended` again.
The answer

    {"version": 2, "drafts": [[13, 14, 15, 16]]}

has a draft for each row in order, at most as long as wanted, or `null` if the service does not have the text up to
`start`, after a restart or an eviction: the client then sends the row from 0.

`GET /health` answers 200 and a `Service` when drafts may be asked for.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

VERSION: Literal[2] = 2
MOST_BYTES = 8 << 20  # of a request's or an answer's body
MOST_TOKENS = 1 << 19  # of all rows of a request, so that they fit
CONFIG = ConfigDict(strict=True, extra="forbid")
Number = Annotated[int, Field(ge=0, lt=1 << 31)]  # a token or a length
Id = Annotated[int, Field(ge=0, lt=1 << 53)]  # below the limit of whole numbers in other languages' JSON


class ProtocolError(ValueError):
    """An invalid message; the error is one line that names the field."""


@dataclass(frozen=True, config=CONFIG)
class DraftRow:
    """One text, and the length of the draft to make for it."""

    id: Id
    start: Number  # tokens that the service has already
    tokens: list[Number]  # the tokens after them, up to the text's end
    want: Number  # γ; 0 only sends the text

    def __post_init__(self) -> None:
        if not self.start + len(self.tokens):
            raise ValueError("expected a text of at least one token, found none")


@dataclass(frozen=True, config=CONFIG)
class DraftRequest:
    """One round of one client."""

    version: Literal[2]
    client: Annotated[str, Field(pattern="^[0-9A-Za-z]{1,64}$")]  # distinguishes the ids of clients
    rows: list[DraftRow]
    ended: list[Id]

    def __post_init__(self) -> None:
        if len({row.id for row in self.rows}) < len(self.rows):
            raise ValueError("rows: expected each id once, found one twice")
        if (sent := sum(len(row.tokens) for row in self.rows)) > MOST_TOKENS:
            raise ValueError(f"rows: expected at most {MOST_TOKENS} tokens in all, found {sent}")


@dataclass(frozen=True, config=CONFIG)
class DraftAnswer:
    """The drafts of a request's rows."""

    version: Literal[2]
    drafts: list[list[Number] | None]


@dataclass(frozen=True, config=CONFIG)
class Service:
    """The answer of `/health`."""

    version: Literal[2]
    model: str
    vocab_size: Number  # drafted tokens are below it
    max_length: Number  # tokens of a text, including drafted ones
    max_rows: Number  # of a request
    max_draft_length: Number  # γ


Message = TypeVar("Message", DraftRequest, DraftAnswer, Service)
ADAPTERS = {kind: TypeAdapter[Any](kind) for kind in (DraftRequest, DraftAnswer, Service)}


def encode(message: DraftRequest | DraftAnswer | Service) -> bytes:
    """Return a message's body."""
    return ADAPTERS[type(message)].dump_json(message)


def decode(kind: type[Message], body: bytes) -> Message:
    """Parse a body; a ProtocolError names the field, the version before all others."""
    if len(body) > MOST_BYTES:
        raise ProtocolError(f"{kind.__name__}: expected at most {MOST_BYTES} bytes, found {len(body)}")
    try:
        message: Message = ADAPTERS[kind].validate_json(body)
    except ValidationError as error:
        wrong: Any = min(error.errors(include_url=False), key=lambda one: one["loc"] != ("version",))
        place = ".".join(map(str, (kind.__name__, *wrong["loc"])))
        raise ProtocolError(f"{place}: {wrong['msg']}, found {wrong['input']!r:.80}") from None
    return message


def decode_drafts(body: bytes, rows: Sequence[DraftRow]) -> list[list[int] | None]:
    """Parse the answer to some rows; raise ProtocolError if it does not fit them."""
    drafts = decode(DraftAnswer, body).drafts
    if len(drafts) != len(rows):
        raise ProtocolError(f"drafts: expected {len(rows)}, found {len(drafts)}")
    for index, (draft, row) in enumerate(zip(drafts, rows, strict=True)):
        if draft is not None and len(draft) > row.want:
            raise ProtocolError(f"drafts[{index}]: expected at most {row.want} tokens, found {len(draft)}")
    return drafts
