"""Logs of requests to a server in OpenAI's API, as records of conversations with their answers.

Four shapes are known, by their fields:

* `request` and `response`: what was asked and answered, as the coordinator and many proxies write it;
* `body` and `response`: a line of the batch API, whose answer lies in `response.body`, and whose id is `custom_id`;
* `messages` or `prompt`, and `choices`: both in one object;
* `request` or `body` alone: nothing but a prompt.

The first choice is the answer. The messages are passed on as they are, with the tools and the arguments of the chat
template that the request had: `prompts.py` reads them as it reads those of any record.
"""

from collections.abc import Mapping
from typing import Any

from draftsmith.decode.errors import InputError

CUT = "length"
"""How an answer ended that was cut."""
SHAPING = ("tools", "chat_template_kwargs", "system", "functions", "chat_template", "continue_final_message")
"""Fields of a request that shape what a server makes of its messages."""
VARIABLES = ("documents", "reasoning_effort")
"""Fields that it hands to the chat template."""


def is_logged(record: Any) -> bool:
    """Say whether a record is a line of such a log."""
    if not isinstance(record, dict):
        return False
    asked = any(isinstance(record.get(name), dict) for name in ("request", "body"))
    choices = record.get("choices")  # which questions have, too, whose answers are to be chosen from: strings
    return asked or (isinstance(choices, list) and not any(isinstance(choice, str) for choice in choices))


def has_answer(record: Mapping[str, Any]) -> bool:
    """Say whether a line of such a log is more than a prompt."""
    return "choices" in record or record.get("response") is not None


def conversation(record: Mapping[str, Any], where: str, answered: bool) -> dict[str, Any]:
    """Return a line of a log as a record with `messages` or `prompt`, and `finish_reason` beside an answer.

    Args:
        record: the line, of which `is_logged` holds.
        where: where it stands, for messages.
        answered: it is to have an answer.

    Raises:
        InputError: it was not asked as a text, or has no answer; names the place and the field.
    """
    name = next((name for name in ("request", "body") if isinstance(record.get(name), dict)), None)
    request: Mapping[str, Any] = record if name is None else record[name]
    at = f"{where}: {name}." if name else f"{where}: "
    found: dict[str, Any] = {}
    for field in ("id", "custom_id"):
        if isinstance(record.get(field), str | int):
            found["id"] = record[field]
    metadata = request.get("metadata")
    category = record.get("category") or (metadata.get("category") if isinstance(metadata, dict) else None)
    found |= {} if category is None else {"category": category}
    if request.get("add_generation_prompt") is False:
        raise InputError(f"{at}add_generation_prompt: expected an answer after the generation prompt, found false")
    found |= {field: request[field] for field in SHAPING if request.get(field)}
    if request.get("messages") and (told := {field: request[field] for field in VARIABLES if request.get(field)}):
        given = found.get("chat_template_kwargs", {})
        found["chat_template_kwargs"] = told | given if isinstance(given, dict) else given
    if request.get("messages") is not None:
        found["messages"] = request["messages"]
    elif isinstance(request.get("prompt"), str):
        found["prompt"] = request["prompt"]
    else:
        raise InputError(f"{at}messages: expected what was asked, as messages or a prompt in text, found none")
    if answered:
        _add_answer(found, record, where)
    return found


def _add_answer(found: dict[str, Any], record: Mapping[str, Any], where: str) -> None:
    response: Any = record if "choices" in record else record.get("response")
    at = f"{where}: " if "choices" in record else f"{where}: response."
    if isinstance(response, dict) and isinstance(response.get("body"), dict):
        response, at = response["body"], f"{at}body."
    choices = response.get("choices") if isinstance(response, dict) else None
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise InputError(f"{at}choices: expected an answer, found none")
    choice = choices[0]
    found["finish_reason"] = choice.get("finish_reason")
    if "messages" not in found:
        if not isinstance(choice.get("text"), str):
            raise InputError(f"{at}choices[0].text: expected a string, found another or none")
        found["completion"] = choice["text"]
        return
    message = choice.get("message")
    if not isinstance(message, dict):
        raise InputError(f"{at}choices[0].message: expected a message, found none")
    if isinstance(found["messages"], list):  # if not, it is refused where messages are read
        found["messages"] = [*found["messages"], {"role": "assistant"} | message]
