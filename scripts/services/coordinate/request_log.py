"""The log: requests with their answers, a JSON line each, training text for the next draft (`prepare --answers given`).

Texts are redacted before they are written.
"""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from draftsmith.decode.errors import InputError
from draftsmith.decode.validation import ServerMessage, TokenId, parse_answer, parse_json
from draftsmith.scripts.services.coordinate.config import Log
from draftsmith.scripts.services.coordinate.patterns import Pattern
from draftsmith.train.endpoint.request_logs import STOPPED_BY

REQUEST_FIELDS = (
    "model", "messages", "prompt", "tools", "tool_choice", "functions", "documents", "reasoning_effort",
    "chat_template", "chat_template_kwargs", "continue_final_message", "add_generation_prompt", "response_format",
    "echo", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop",
    "stop_token_ids",
)  # fmt: skip
"""Request fields to write: the sources of the text and its sampling, not the sender."""
TEXTS = (
    "prompt", "stop", "tools", "functions", "documents", "chat_template_kwargs", "chat_template", "response_format"
)  # fmt: skip
"""Fields with texts to redact, in addition to messages."""

Redactor = Callable[[str], str]


# The parts of OpenAI's answers that the log reads: of whole answers, and of streamed ones.
class _ToolCall(ServerMessage):
    index: int | None = None
    function: dict[str, str | None] | None = None


class _Delta(ServerMessage):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _PartChoice(ServerMessage):
    index: Annotated[int, Field(ge=0, le=1024)] = 0
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None
    token_ids: list[TokenId] | None = None
    prompt_token_ids: list[TokenId] | None = None


class _Part(ServerMessage):
    choices: list[_PartChoice] | None = None
    prompt_token_ids: list[TokenId] | None = None


class _Choice(ServerMessage):
    message: dict[str, Any] | None = None
    text: str | None = None
    finish_reason: str | None = None
    token_ids: list[TokenId] | None = None
    prompt_token_ids: list[TokenId] | None = None


class _Answer(ServerMessage):  # or an error, which has no choices
    choices: list[_Choice] | None = None
    prompt_token_ids: list[TokenId] | None = None


def redactor(log: Log) -> Redactor | None:
    """Return a function that redacts a text as configured, or None if nothing is."""
    patterns = [(Pattern(rule.pattern, "log.redact.pattern", case=True), rule.replacement) for rule in log.redact]
    if not patterns:
        return None

    def redact(text: str) -> str:
        for pattern, replacement in patterns:
            text = pattern.replaced(text, replacement)
        return text

    return redact


def unstreamed_answer(content: bytes, streamed: bool) -> dict[str, Any] | None:
    """Return an answer in unstreamed form; None if it is incomplete or an error.

    `content` has the bytes that went to the client, which are events if `streamed`.

    Raises:
        InputError: not an answer in OpenAI's shape; the message names the field but quotes nothing of its text.
    """
    text = content.decode("utf-8", "replace")
    if not streamed:
        answer: dict[str, Any] = _checked(_Answer, text)
        return answer if answer.get("choices") is not None else None
    # Not splitlines, which would also split at U+2028, which JSON allows inside strings.
    lines = [line[5:].strip() for line in text.split("\n") if line.startswith("data:")]
    if not lines or lines[-1] != "[DONE]":
        return None
    choices: dict[int, dict[str, Any]] = {}
    usage: Any = None
    prompt_ids: Any = None
    for line in lines[:-1]:
        part = _checked(_Part, line)
        if part.get("error") is not None:
            return None
        usage = part.get("usage") or usage
        prompt_ids = prompt_ids or part.get("prompt_token_ids")
        for choice in part.get("choices") or []:
            _add(choices.setdefault(choice.get("index", 0), {}), choice)
    whole = {"choices": [{"index": i, **choice} for i, choice in sorted(choices.items())], "usage": usage}
    whole |= {} if prompt_ids is None else {"prompt_token_ids": prompt_ids}
    # Written and read again, the halves of a character that was cut between two parts are one character.
    return dict(parse_json(json.dumps(whole)))


def record(
    request: Mapping[str, Any], answer: Mapping[str, Any], about: Mapping[str, Any], redactor: Redactor | None
) -> dict[str, Any]:
    """Return the log entry of a request and its answer, with the facts `about` them; `redactor` changes each text.

    Token ids are written only without a redactor, because nothing can be redacted in them.
    """
    redact = redactor or str
    fields = {name: request[name] for name in REQUEST_FIELDS if request.get(name) is not None}
    if "messages" in fields:
        fields["messages"] = [_message(message, redact) for message in fields["messages"]]
    fields |= {name: _redacted(fields[name], redact) for name in TEXTS if name in fields}
    choices = []
    for choice in answer["choices"]:
        entry: dict[str, Any] = {"finish_reason": choice.get("finish_reason")}
        if choice.get("message") is not None:
            entry["message"] = _message(choice["message"], redact)
        else:
            entry["text"] = _redacted(choice.get("text"), redact)
        if redactor is None and choice.get("token_ids") is not None:
            entry["token_ids"] = choice["token_ids"]
        for name in STOPPED_BY:
            if name in choice:  # null says that no stop of the request ended it
                entry[name] = _redacted(choice[name], redact)
        choices.append(entry)
    response = {"choices": choices, "usage": answer.get("usage")}
    # Chats have these ids next to the choices, completions in each choice.
    prompt_ids = next(filter(None, (part.get("prompt_token_ids") for part in (answer, *answer["choices"]))), None)
    if redactor is None and prompt_ids is not None:
        response["prompt_token_ids"] = prompt_ids
    return {**about, "request": fields, "response": response}


class LogWriter:
    """A file of lines, in which texts are redacted; InputError if it is not writable, or a redaction cannot be loaded.

    The file is opened anew for each line, so that it may be moved away meanwhile.
    """

    def __init__(self, log: Log):
        self.path, self.token_ids, self._redact = Path(log.path), log.token_ids, redactor(log)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            os.close(self._open())
        except OSError as error:
            raise InputError(f"log.path: expected a file to write, found {log.path}: {error.strerror}") from error

    def write(self, request: Mapping[str, Any], answer: Mapping[str, Any], about: Mapping[str, Any]) -> None:
        """Append one whole line: see `record`. Only the file's owner can read it."""
        entry = record(request, answer, about, self._redact)
        line = (json.dumps(entry, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")
        with open(self._open(), "r+b", buffering=0) as file:
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                line = line if file.read(1) == b"\n" else b"\n" + line  # the disk was full
            file.write(line)

    def _open(self) -> int:
        return os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)


def _checked(kind: type[ServerMessage], text: str) -> dict[str, Any]:
    """Return an answer or a part of one as JSON, checked against a model of it."""
    try:
        parse_answer(kind, text, "answer")
        return dict(parse_json(text))
    except (InputError, ValueError) as error:
        raise InputError(str(error).partition(", found")[0]) from None  # the rest may quote a user's text


def _add(whole: dict[str, Any], part: Mapping[str, Any]) -> None:
    """Add a part of a streamed choice to the choice so far."""
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
    for name in ("finish_reason", *STOPPED_BY):
        if name in part and whole.get(name) is None:
            whole[name] = part[name]
    if part.get("token_ids") is not None:
        whole.setdefault("token_ids", []).extend(part["token_ids"])
    if part.get("prompt_token_ids") is not None:
        whole["prompt_token_ids"] = part["prompt_token_ids"]


def _add_call(calls: list[dict[str, Any]], part: Mapping[str, Any]) -> None:
    """Add a part of a tool call. Its texts are joined, because redaction would not find a pattern split over pieces.

    Some servers give all calls one index, or none: a name that comes after arguments begins another call.
    """
    whole = next((call for call in reversed(calls) if call.get("index") == part.get("index")), None)
    if whole is None or ((part.get("function") or {}).get("name") and whole["function"].get("arguments")):
        whole = {"index": part.get("index"), "function": {}}
        calls.append(whole)
    known = {name: value for name, value in part.items() if value is not None}  # SGLang's later parts have a null id
    whole |= {name: value for name, value in known.items() if name not in ("index", "function")}
    for name, text in (part.get("function") or {}).items():
        whole["function"][name] = whole["function"].get(name, "") + (text or "")


def _message(message: Any, redact: Redactor) -> Any:
    if not isinstance(message, dict):
        return _redacted(message, redact)
    return {k: v if k == "role" else _redacted(v, redact) for k, v in message.items()}


def _redacted(value: Any, redact: Redactor) -> Any:
    """Redact every text in a value, however deep."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, list):
        return [_redacted(item, redact) for item in value]
    if isinstance(value, dict):
        return {key: _redacted(item, redact) for key, item in value.items()}
    return value
