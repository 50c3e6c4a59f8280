"""Requests and their answers, a JSON line each, for the next draft to learn from: `prepare --answers given` reads it.

Texts are redacted before they are written; what a rotated file holds is never written twice.
"""

import json
import os
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from draftsmith.decode.errors import InputError, first_line
from draftsmith.decode.validation import Said, parse_json, parsed
from draftsmith.scripts.services.coordinate.config import Log
from draftsmith.scripts.services.coordinate.patterns import Pattern

REQUEST_FIELDS = (
    "model",
    "messages",
    "prompt",
    "tools",
    "tool_choice",
    "functions",
    "documents",
    "reasoning_effort",
    "chat_template",
    "chat_template_kwargs",
    "continue_final_message",
    "add_generation_prompt",
    "response_format",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
)
"""Fields of a request that are written: what the text is made of and how it was sampled, not who asked."""
TEXTS = (
    "prompt",
    "stop",
    "tools",
    "functions",
    "documents",
    "chat_template_kwargs",
    "chat_template",
    "response_format",
)
"""Those that hold texts, and are redacted; messages are, too."""

Redactor = Callable[[str], str]


class LoggedToolCall(Said):
    """A piece of a call of a tool."""

    index: int | None = None
    function: dict[str, str | None] | None = None


class LoggedDelta(Said):
    """A piece of a message."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[LoggedToolCall] | None = None


class LoggedPartChoice(Said):
    """A piece of a choice."""

    index: Annotated[int, Field(ge=0, le=1024)] = 0
    delta: LoggedDelta | None = None
    text: str | None = None
    finish_reason: str | None = None


class LoggedPart(Said):
    """A part of a streamed answer."""

    choices: list[LoggedPartChoice] | None = None


class LoggedChoice(Said):
    """A choice."""

    message: dict[str, Any] | None = None
    text: str | None = None
    finish_reason: str | None = None


class LoggedAnswer(Said):
    """An answer in one piece, or an error, which has no choices."""

    choices: list[LoggedChoice] | None = None


def redactor(log: Log) -> Redactor:
    """Return the function that takes out of a text what the config says.

    Raises:
        InputError: a function of the user's that cannot be imported.
    """
    patterns = [(Pattern(each.pattern, "log.redact.pattern", case=True), each.replacement) for each in log.redact]
    own: Redactor | None = None
    if log.redact_with is not None:
        module, _, name = log.redact_with.partition(":")
        try:
            own = getattr(import_module(module), name)
            if not callable(own):
                raise TypeError(f"{type(own).__name__} {name}")
        except Exception as error:  # the module is the user's, and may raise anything
            found = first_line(error)
            raise InputError(f"log.redact_with: expected a function that can be imported, found: {found}") from error

    def redact(text: str) -> str:
        for pattern, replacement in patterns:
            text = pattern.replaced(text, replacement)
        return text if own is None else own(text)

    return redact


def assembled(content: bytes, streamed: bool) -> dict[str, Any] | None:
    """Return an answer as it would have come in one piece; None where it did not come to its end, or is an error.

    Args:
        content: the bytes that went to the client.
        streamed: whether they are events.

    Raises:
        InputError: it is no answer in OpenAI's shape; says which field, and nothing of what stands there.
    """
    text = content.decode("utf-8", "replace")
    if not streamed:
        answer: dict[str, Any] = _checked(LoggedAnswer, text)
        return answer if answer.get("choices") is not None else None
    # Not splitlines, which would also cut at U+2028: JSON allows it inside a string.
    lines = [line[5:].strip() for line in text.split("\n") if line.startswith("data:")]
    if not lines or lines[-1] != "[DONE]":
        return None
    choices: dict[int, dict[str, Any]] = {}
    usage: Any = None
    for line in lines[:-1]:
        part = _checked(LoggedPart, line)
        if "error" in part:
            return None
        usage = part.get("usage") or usage
        for choice in part.get("choices") or []:
            _add(choices.setdefault(choice.get("index", 0), {}), choice)
    return {"choices": [{"index": i, **choice} for i, choice in sorted(choices.items())], "usage": usage}


def record(
    request: Mapping[str, Any], answer: Mapping[str, Any], about: Mapping[str, Any], redact: Redactor
) -> dict[str, Any]:
    """Return what is written of a request and its answer.

    Args:
        request: its body.
        answer: as it came, or `assembled`.
        about: what else is known: time, pair, category, seconds.
        redact: changes each text.
    """
    asked = {name: request[name] for name in REQUEST_FIELDS if request.get(name) is not None}
    if "messages" in asked:
        asked["messages"] = [_message(message, redact) for message in asked["messages"]]
    asked |= {name: _redacted(asked[name], redact) for name in TEXTS if name in asked}
    choices = []
    for choice in answer["choices"]:
        kept: dict[str, Any] = {"finish_reason": choice.get("finish_reason")}
        if choice.get("message") is not None:
            kept["message"] = _message(choice["message"], redact)
        else:
            kept["text"] = _redacted(choice.get("text"), redact)
        choices.append(kept)
    return {**about, "request": asked, "response": {"choices": choices, "usage": answer.get("usage")}}


class LogWriter:
    """A file of lines that is put aside when it is full.

    Args:
        log: says where, and how large.

    Raises:
        InputError: it cannot be written.
    """

    def __init__(self, log: Log):
        self.path, self.max_bytes, self.files = Path(log.path), log.max_bytes, log.files
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            os.close(self._open())
        except OSError as error:
            raise InputError(f"log.path: expected a file to write, found {log.path}: {error.strerror}") from error

    def write(self, entry: Mapping[str, Any]) -> None:
        """Append one line, as a whole; the file is its owner's alone to read."""
        line = (json.dumps(entry, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")
        if self._cut_off():  # by a disk that was full
            line = b"\n" + line
        if self.path.exists() and self.path.stat().st_size + len(line) > self.max_bytes:
            self._put_aside()
        with open(self._open(), "ab", buffering=0) as file:
            file.write(line)

    def _open(self) -> int:
        return os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def _cut_off(self) -> bool:
        """Return whether the last line has no end."""
        if not self.path.exists() or not self.path.stat().st_size:
            return False
        with self.path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"

    def _put_aside(self) -> None:
        def numbered(number: int) -> Path:
            return self.path.with_suffix(f".{number}.jsonl")

        numbered(self.files).unlink(missing_ok=True)
        for number in range(self.files - 1, 0, -1):
            if numbered(number).exists():
                numbered(number).rename(numbered(number + 1))
        self.path.rename(numbered(1))


def _checked(kind: type[Said], text: str) -> dict[str, Any]:
    """Return the JSON of an answer, or of a part of one, that is of a kind."""
    try:
        parsed(kind, text, "answer")
        return dict(parse_json(text))
    except (InputError, ValueError) as error:
        raise InputError(str(error).partition(", found")[0]) from None  # what was found may be a user's text


def _add(whole: dict[str, Any], part: Mapping[str, Any]) -> None:
    """Add a part of a streamed choice to what came of it before."""
    if "delta" in part:
        message = whole.setdefault("message", {"role": "assistant", "content": ""})
        delta = part["delta"] or {}
        for name, piece in delta.items():
            if piece and name not in ("role", "tool_calls"):
                joined = isinstance(piece, str | list) and type(message.get(name)) is type(piece)
                message[name] = message[name] + piece if joined else piece
        for call in delta.get("tool_calls") or []:
            _add_call(message.setdefault("tool_calls", []), call)
    else:
        whole["text"] = whole.get("text", "") + (part.get("text") or "")
    if part.get("finish_reason") is not None:
        whole["finish_reason"] = part["finish_reason"]


def _add_call(calls: list[dict[str, Any]], part: Mapping[str, Any]) -> None:
    """Add a part of a call of a tool. Its texts are joined: in pieces, what is to be redacted would not be found."""
    known = next((call for call in calls if call.get("index") == part.get("index")), None)
    if known is None:
        known = {"index": part.get("index"), "function": {}}
        calls.append(known)
    known |= {name: value for name, value in part.items() if name not in ("index", "function")}
    for name, text in (part.get("function") or {}).items():
        known["function"][name] = known["function"].get(name, "") + (text or "")


def _message(message: Any, redact: Redactor) -> Any:
    if not isinstance(message, dict):
        return _redacted(message, redact)
    return {k: v if k == "role" else _redacted(v, redact) for k, v in message.items()}


def _redacted(value: Any, redact: Redactor) -> Any:
    """Redact every text in a value, however deep."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, list):
        return [_redacted(each, redact) for each in value]
    if isinstance(value, dict):
        return {key: _redacted(each, redact) for key, each in value.items()}
    return value
