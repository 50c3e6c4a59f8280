"""Messages of a record in one shape, from any format: roles, texts, reasoning, tool calls.

A message is `{"role": …, "content": …}` with a string as its content. Several parts of text are joined by line breaks,
as vLLM joins them for templates that read no parts, and stay in `TEXTS`. Other fields of a record's message stay,
unless they are empty; whether a chat template writes them is checked when it is rendered.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from draftsmith.decode.errors import InputError
from draftsmith.decode.validation import parse_json

MOST_CHARACTERS = 2**24
"""The size limit of a text: four million tokens, more than any model's context, and a minute of tokenization."""
ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "tool": "tool",
}
ASKING = ("user", "tool")  # the roles that the assistant answers
REASONING = ("reasoning_content", "reasoning", "thinking")
"""The names that servers give to the reasoning before an answer."""
MEANT = ("content", "tool_calls", "function_call", "tools", "refusal", *REASONING, "train", "loss", "mask")
"""The fields of a message that concern a model or the loss; others are metadata."""
MEDIA = ("audio", "image", "images", "video", "videos")
PARTS = ("text", "input_text", "output_text")
TEXTS = "content_parts"  # the field of a message with the texts of its parts, if it has several
EMPTY: tuple[Any, ...] = (None, "", [], {})

Message = dict[str, Any]


def read_messages(value: Sequence[Any], where: str, field: str) -> list[Message]:
    """Return the messages in a record's field; in `conversations` roles and texts are called `from` and `value`."""
    role_key, content_key = ("from", "value") if field == "conversations" else ("role", "content")
    messages = []
    for i, message in enumerate(value):
        at = f"{where}: {field}[{i}]"
        if not isinstance(message, dict):
            raise InputError(f"{at}: expected an object, found {kind(message)}")
        role, content = message.get(role_key), message.get(content_key)
        if not isinstance(role, str) or role not in ROLES:
            roles, problem = ", ".join(ROLES), repr(role) if isinstance(role, str) else kind(role)
            raise InputError(f"{at}.{role_key}: expected one of {roles}, found {problem}")
        fields = {name: item for name, item in message.items() if item not in EMPTY}
        fields = {name: item for name, item in fields.items() if name not in (role_key, content_key, TEXTS)}
        weight = fields.pop("weight", 1)  # an assistant turn's weight in the loss; other turns are never learned
        if ROLES[role] == "assistant" and weight not in (0, 1):
            raise InputError(f"{at}.weight: expected 1, or 0 for a turn that is not learned from, found {kind(weight)}")
        extra: dict[str, Any] = {"weight": 0} if ROLES[role] == "assistant" and weight == 0 else {}
        fields = {name: item for name, item in fields.items() if is_model_field(name) or _is_json(item)}
        for name in fields:
            fields[name] = _field(name, fields[name], ROLES[role], f"{at}.{name}")
        if content is None and ("tool_calls" in fields or any(name in fields for name in REASONING)):
            content = ""
        if isinstance(content, list):
            texts = _texts(content, f"{at}.{content_key}")
            content, extra = "\n".join(texts), extra | ({TEXTS: texts} if texts[1:] else {})
        # An empty system or assistant turn is unusual but has a meaning; an empty question has none.
        content = text(content, f"{at}.{content_key}", may_be_empty=ROLES[role] != "user")
        messages.append({"role": ROLES[role], "content": content} | fields | extra)
    return messages


def read_tools(value: Any, where: str) -> list[dict[str, Any]] | None:
    """Return a record's tools, which may be a list of objects, one object or their JSON; None if there are none."""
    at = f"{where}: tools"
    value = _objects(value, at)
    if value in EMPTY:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        problem = kind(value) if not isinstance(value, list) else "a list of something else"
        raise InputError(f"{at}: expected a list of objects, found {problem}")
    for i, tool in enumerate(value):
        if not isinstance(tool.get("function", {}), dict):
            raise InputError(f"{at}[{i}].function: expected an object, found {kind(tool['function'])}")
    _require_json(value, at)
    return value


def with_arguments(call: Mapping[str, Any], *, parsed: bool) -> dict[str, Any]:
    """Return a tool call with its arguments as an object, for chat templates, or as a string, for servers.

    A string that is no JSON object stays a string.
    """
    if "function" in call:
        return {**call, "function": with_arguments(call["function"], parsed=parsed)}
    arguments = call.get("arguments")
    if parsed and isinstance(arguments, str):
        try:
            value = parse_json(arguments)
        except json.JSONDecodeError:
            value = arguments
        arguments = value if isinstance(value, dict) else arguments
    elif not parsed and isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return dict(call) if arguments is None else {**call, "arguments": arguments}


def with_parts(message: Message) -> Message:
    """Return a message with its content in parts again, if it came in several."""
    if TEXTS not in message:
        return message
    parts = [{"type": "text", "text": part} for part in message[TEXTS]]
    return {name: value for name, value in message.items() if name != TEXTS} | {"content": parts}


def function_of(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the name and arguments of a call, or the description of a tool, which may be nested in `function`."""
    function: Mapping[str, Any] = call.get("function", call)
    return function


def is_model_field(name: str) -> bool:
    """Return whether a message's field must reach the model, and is no metadata of a log or a data set."""
    return name in MEANT or name in MEDIA


def _field(name: str, value: Any, role: str, at: str) -> Any:
    """Return a field of a message other than its role and content."""
    _require_json(value, at)
    if name in REASONING or name == "name":
        return text(value, at)
    return _calls(value, role, at) if name == "tool_calls" else value


def _objects(value: Any, at: str) -> Any:
    """Return a list of objects from its JSON or from one object; anything else as it is."""
    if isinstance(value, str) and value.strip():
        try:
            value = parse_json(value)
        except json.JSONDecodeError as error:
            raise InputError(f"{at}: expected a list of objects, found a string that is no JSON") from error
    return [value] if isinstance(value, dict) and value else value


def _calls(value: Any, role: str, at: str) -> list[dict[str, Any]]:
    value = _objects(value, at)
    if role != "assistant" or not isinstance(value, list):
        problem = f"{kind(value)} of a {role} turn"
        raise InputError(f"{at}: expected a list of an assistant's calls, found {problem}")
    calls = []
    for i, call in enumerate(value):
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise InputError(f"{at}[{i}]: expected a call of a function, found {kind(call)}")
        text(function.get("name"), f"{at}[{i}].function.name")
        if not isinstance(function.get("arguments"), dict | str | None):
            problem = kind(function["arguments"])
            raise InputError(f"{at}[{i}].function.arguments: expected an object or its JSON, found {problem}")
        # A call's index in a stream repeats its place in the list.
        calls.append({name: item for name, item in call.items() if item is not None and name != "index"})
    return calls


def _texts(parts: list[Any], at: str) -> list[str]:
    texts = []
    for part in parts:
        if not isinstance(part, dict) or part.get("type") not in PARTS or not isinstance(part.get("text"), str):
            named = part.get("type") if isinstance(part, dict) else None
            found = repr(named) if isinstance(named, str) and named not in PARTS else "another"
            raise InputError(f"{at}: expected parts of text, found {found}")
        texts.append(part["text"])
    return texts


def _require_json(value: Any, at: str) -> None:
    if not _is_json(value):
        raise InputError(f"{at}: expected JSON in Unicode text, found something else in it")


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (TypeError, ValueError):
        return False
    return True


def text(value: Any, at: str, *, may_be_empty: bool = False) -> str:
    """Return a text that a tokenizer takes; otherwise raise an InputError that begins with its place, `at`."""
    if not isinstance(value, str):
        raise InputError(f"{at}: expected a string, found {kind(value)}")
    if not may_be_empty and not value.strip():
        raise InputError(f"{at}: expected some text, found an empty string")
    if len(value) > MOST_CHARACTERS:
        raise InputError(f"{at}: expected at most {MOST_CHARACTERS} characters, found {len(value)}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:  # JSON may contain half a surrogate pair, which no tokenizer takes
        raise InputError(f"{at}: expected Unicode text, found a lone surrogate") from error
    return value


def kind(value: Any) -> str:
    """Return a value's kind, for error messages."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "nothing"}
    return names.get(type(value), f"the number {value}" if isinstance(value, int | float) else type(value).__name__)
