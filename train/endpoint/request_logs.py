"""Logs of requests to a server in OpenAI's API, as records of conversations with their answers.

Four shapes are known by their fields:

* `request` and `response`, as the coordinator and many proxies write them;
* `body` and `response`, a line of the batch API, whose answer is in `response.body`, and whose id is `custom_id`;
* `messages` or `prompt`, and `choices`: both in one object;
* `request` or `body` alone: only a prompt.

The first choice is the answer. If its `token_ids` are there with the `prompt_token_ids`, as vLLM and SGLang give them
for `"return_token_ids": true`, they are what the server read and wrote, and are passed on with the texts. Messages,
tools and chat template arguments are passed on unchanged, and `prompt_files.py` reads them like those of any record.
"""

from collections.abc import Mapping
from typing import Any

from draftsmith.decode.errors import InputError

CUT = "length"  # the finish reason of an answer that was cut, at a length or at a stop text of the request
ENDED = ("stop", "tool_calls", "function_call", "eos", "eos_token", "end_turn")
"""The finish reasons of answers that the target ended. Any other, or none, proves no end."""
STOPPED_BY = ("stop_reason", "matched_stop")  # the stop text or token of an answer, in vLLM and in SGLang
SHAPING = ("tools", "chat_template_kwargs", "system", "functions", "chat_template", "continue_final_message")
"""Fields of a request that change how a server renders its messages."""
VARIABLES = ("documents", "reasoning_effort")  # fields that a server passes to the chat template


def is_logged(record: Any) -> bool:
    """Return whether a record is a line of a request log."""
    if not isinstance(record, dict):
        return False
    has_request = any(isinstance(record.get(name), dict) for name in ("request", "body"))
    choices = record.get("choices")  # multiple-choice questions have them too, as strings
    return has_request or (isinstance(choices, list) and not any(isinstance(choice, str) for choice in choices))


def has_answer(record: Mapping[str, Any]) -> bool:
    """Return whether a line of a request log has an answer."""
    return "choices" in record or record.get("response") is not None


def conversation(record: Mapping[str, Any], where: str, answered: bool) -> dict[str, Any]:
    """Return a log's line as a record with `messages` or `prompt`, and if `answered` with its answer."""
    name = next((name for name in ("request", "body") if isinstance(record.get(name), dict)), None)
    request: Mapping[str, Any] = record if name is None else record[name]
    at = f"{where}: {name}." if name else f"{where}: "
    result: dict[str, Any] = {}
    for field in ("id", "custom_id"):
        if isinstance(record.get(field), str | int):
            result["id"] = record[field]
    metadata = request.get("metadata")
    category = record.get("category") or (metadata.get("category") if isinstance(metadata, dict) else None)
    result |= {} if category is None else {"category": category}
    if request.get("add_generation_prompt") is False:
        raise InputError(f"{at}add_generation_prompt: expected an answer after the generation prompt, found false")
    if answered and request.get("echo"):
        raise InputError(f"{at}echo: expected an answer without its prompt, found true")
    result |= {field: request[field] for field in SHAPING if request.get(field)}
    if request.get("messages") and (passed := {field: request[field] for field in VARIABLES if request.get(field)}):
        own = result.get("chat_template_kwargs", {})
        result["chat_template_kwargs"] = passed | own if isinstance(own, dict) else own
    if request.get("messages") is not None:
        result["messages"] = request["messages"]
    elif isinstance(request.get("prompt"), str):
        result["prompt"] = request["prompt"]
    else:
        raise InputError(f"{at}messages: expected the request as messages or a prompt in text, found none")
    if answered:
        _add_answer(result, record, where, stops=bool(request.get("stop") or request.get("stop_token_ids")))
    return result


def _add_answer(result: dict[str, Any], record: Mapping[str, Any], where: str, stops: bool) -> None:
    """Add the answer; where the request `stops` texts by its own means, the server must say that it did not."""
    response: Any = record if "choices" in record else record.get("response")
    at = f"{where}: " if "choices" in record else f"{where}: response."
    if isinstance(response, dict) and isinstance(response.get("body"), dict):
        response, at = response["body"], f"{at}body."
    choices = response.get("choices") if isinstance(response, dict) else None
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise InputError(f"{at}choices: expected an answer, found none")
    choice = choices[0]
    found = [choice[name] for name in STOPPED_BY if name in choice]
    stopped = any(isinstance(stop, str) for stop in found) or (stops and not found)
    result["finish_reason"] = CUT if stopped else choice.get("finish_reason") or CUT
    result["stop_reason"] = next((stop for stop in found if stop is not None), None)
    result |= _token_ids(response, choice)
    if "messages" not in result:
        if not isinstance(choice.get("text"), str):
            raise InputError(f"{at}choices[0].text: expected a string, found another or none")
        result["continuation"] = choice["text"]
        return
    message = choice.get("message")
    if not isinstance(message, dict):
        raise InputError(f"{at}choices[0].message: expected a message, found none")
    if isinstance(result["messages"], list):  # if not, `read_messages` refuses it
        result["messages"] = [*result["messages"], {"role": "assistant"} | message]


def _token_ids(response: Mapping[str, Any], choice: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ids of prompt and answer; nothing if some are missing."""
    prompt_ids, ids = choice.get("prompt_token_ids") or response.get("prompt_token_ids"), choice.get("token_ids")
    usage = response.get("usage")
    count = usage.get("completion_tokens") if isinstance(usage, dict) else None
    if not prompt_ids or not isinstance(ids, list) or count not in (None, len(ids)):
        return {}
    return {"prompt_token_ids": prompt_ids, "token_ids": ids}
