"""Conversations in a chat template: one rendering of messages, tools and variables, and nothing left out in silence.

A template is a program, and passes over what it does not know without a word. So a copy of the conversation is rendered
first in which each field ends with a mark of its own: a field whose mark is not in the text is refused by its name.
Only what numbers calls of tools may be missing, reasoning that a template writes into the last answer alone, and
metadata, which a warning names: the server's template did not write it either.

Fields have several forms, and a template reads one of them: arguments of a call as an object or as its JSON, a content
as a string or as parts, reasoning by one of three names. The first form that leaves all marks is taken; it begins with
what servers hand to templates.
"""

import json
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any

from jinja2 import TemplateError, meta
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging
from transformers.utils.chat_template_utils import render_jinja_template

from draftsmith.decode.errors import InputError
from draftsmith.train.checkpoint import reading
from draftsmith.train.data.chat.messages import REASONING, Message, function_of, is_meant, with_arguments

TAGS = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")
NUMBERING = ("role", "content", "id", "type", "tool_call_id")
"""Fields of a message that are looked at by themselves, or only say which result is of which call."""

Tools = list[dict[str, Any]]
logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class ChatTemplate:
    """A tokenizer's chat template, and what it is told in addition to messages."""

    tokenizer: PreTrainedTokenizerBase
    name: str
    """The conversation's name in error messages."""
    tools: Tools | None
    variables: Mapping[str, Any]
    arguments_parsed: bool = True
    """Arguments of calls are objects; if not, JSON in a string."""
    in_parts: bool = False
    """Contents are lists of one part of text."""
    content_null: bool = False
    """Empty contents beside calls are null, as servers log them."""
    reasoning_renamed: bool = False
    """Reasoning is there as `reasoning` too; the library adds the other two names."""

    @property
    def source(self) -> str:
        """The template: a tokenizer may have one of its own for tools."""
        return self.tokenizer.get_chat_template(tools=self.tools)

    def render(
        self, messages: Sequence[Message], *, answer: bool = False, marked: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return a text, up to the answer to come where that is asked for, and what `{% generation %}` encloses.

        Raises:
            InputError: the template refuses the messages.
        """
        return self._render([self._formed(message) for message in messages], answer, marked)

    def ids(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of a conversation up to the answer to come."""
        return encode_rendered(self.tokenizer, self.render(messages, answer=True)[0])

    def fitted(self, messages: Sequence[Message], *, answer: bool, begun: int = 0) -> "ChatTemplate":
        """Return the template with the form that it reads all of a conversation in.

        Args:
            messages: the conversation.
            answer: it ends where an answer is to come.
            begun: messages at its beginning that are no part of the record.

        Raises:
            InputError: the template refuses the messages, or leaves out a field, which is named.
        """
        reasons = any(name in message for message in messages for name in REASONING)
        calls = any("tool_calls" in message for message in messages)
        errors = list[tuple[int, InputError]]()
        silent = any("tool_calls" in message and not message["content"] for message in messages)
        for renamed, null, parts, parsed in product(
            (False, True)[: 1 + reasons], (False, True)[: 1 + silent], (False, True), (True, False)[: 1 + calls]
        ):
            form = replace(self, reasoning_renamed=renamed, content_null=null, in_parts=parts, arguments_parsed=parsed)
            try:
                metadata, left_out = list[str](), list[str]()
                for field in form._left_out(messages, answer, begun):
                    (metadata if _is_metadata(field) else left_out).append(field)
                if not left_out:
                    for field in metadata:
                        warn_unread(f"messages[].{_of_message(field)}")
                    return form
                expected = f"{left_out[0]}: expected a chat template that writes it"
                error = InputError(f"{self.name}: {expected}, found that the target's leaves it out")
                errors.append((len(left_out), error))
            except InputError as error:  # the template says what it does not take, or stumbles over another form
                errors.append((0 if type(error.__cause__) is TemplateError else sys.maxsize, error))
        raise min(errors, key=lambda error: error[0])[1]

    def _render(
        self, formed: list[Message], answer: bool = False, marked: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        rendered: Any
        tools: Any = self.tools
        with reading(self.name, "messages that the chat template renders"):
            rendered = render_jinja_template(
                conversations=[formed],
                tools=tools,
                chat_template=self.source,
                add_generation_prompt=answer,
                return_assistant_tokens_mask=marked,
                **{**self.tokenizer.special_tokens_map, **self.variables},
            )
        (text,), spans = rendered
        return text, list(spans[0]) if marked else []

    def _formed(self, message: Message) -> Message:
        formed = {name: value for name, value in message.items() if name != "weight"}
        if self.content_null and "tool_calls" in message and not message["content"]:
            formed["content"] = None
        elif self.in_parts:
            formed["content"] = [{"type": "text", "text": message["content"]}]
        if "tool_calls" in message:
            formed["tool_calls"] = [
                with_arguments(call, parsed=self.arguments_parsed) for call in message["tool_calls"]
            ]
        if self.reasoning_renamed and (reasoning := _reasoning(message)):
            formed.setdefault("reasoning", reasoning)
        return formed

    def _left_out(self, messages: Sequence[Message], answer: bool, begun: int) -> list[str]:
        """Return the fields that leave no mark."""
        text = self.render(messages, answer=answer)[0]
        if not text:
            return []
        marks = _Marks(text)
        called = {function_of(call)["name"] for message in messages for call in message.get("tool_calls", ())}
        formed = [
            marks.message(self._formed(message), i, "system_prompt" if i < begun else f"messages[{i - begun}]", called)
            for i, message in enumerate(messages)
        ]
        tools = None if self.tools is None else [marks.tool(tool, f"tools[{i}]") for i, tool in enumerate(self.tools)]
        told = replace(self, tools=tools)
        written = told._render(formed, answer)[0].lower()

        def is_written(mark: str) -> bool:
            if mark in written:
                return not any(misread in written for misread in marks.misread.get(mark, ()))
            turn = marks.reasoning.get(mark, len(messages))  # would it be there in the last answer?
            return turn < len(messages) - 1 and mark in told._render(formed[: turn + 1])[0].lower()

        left_out = [field for mark, field in marks.fields.items() if not is_written(mark)]
        unnamed = [f for f, name in marks.unmarked.items() if re.search(rf"\b{re.escape(name)}\b", self.source) is None]
        return left_out + unnamed


class _Marks:
    """Marks for the fields of a conversation, none of which occurs in its text."""

    def __init__(self, text: str):
        self._prefix = "zq"
        while self._prefix in text.lower():
            self._prefix += "q"
        self.fields = dict[str, str]()
        """The field that each mark stands in."""
        self.reasoning = dict[str, int]()
        """The message of each mark of reasoning."""
        self.misread = dict[str, tuple[str, ...]]()
        """What a template writes of a mark whose field it reads in another form: Python's words for an object."""
        self.unmarked = dict[str, str]()
        """Fields that are no texts, and their names."""

    def message(self, message: Message, place: int, at: str, called: Collection[str]) -> Message:
        """Return a message with its marks.

        Args:
            message: as the template gets it.
            place: in the conversation.
            at: what it is called in errors.
            called: tools that are called somewhere, whose names need not stand at their results again.
        """
        marked, reasons = dict(message), dict[str, str]()
        content = message["content"]
        if isinstance(content, list):
            text = self._ending(content[0]["text"], f"{at}.content")
            marked["content"] = [content[0] | {"text": text}]
            if text.strip():
                mark = next(reversed(self.fields))
                self.misread[mark] = (f"{mark}'}}", f'{mark}"}}')
        elif content is not None:
            marked["content"] = self._ending(content, f"{at}.content")
        for name, value in message.items():
            if name in NUMBERING or (name == "name" and message["role"] == "tool" and value in called):
                continue
            if name == "tool_calls":
                marked[name] = [self._call(call, f"{at}.tool_calls[{i}]") for i, call in enumerate(value)]
            elif name in REASONING:
                if value not in reasons:  # else it is one, by two names
                    reasons[value] = self._ending(value, f"{at}.{name}", place)
                marked[name] = reasons[value]
            elif isinstance(value, str):
                marked[name] = self._ending(value, f"{at}.{name}")
            else:
                self.unmarked[f"{at}.{name}"] = name
        return marked

    def tool(self, tool: Mapping[str, Any], at: str) -> dict[str, Any]:
        """Return a tool with its marks."""
        if "function" in tool:
            return {**tool, "function": self.tool(tool["function"], f"{at}.function")}
        names = [name for name in ("name", "description") if isinstance(tool.get(name), str)] or ["type"]
        marked = {**tool, **{name: self._ending(str(tool.get(name, "")), f"{at}.{name}") for name in names}}
        parameters = tool.get("parameters")
        if isinstance(parameters, dict) and isinstance(parameters.get("properties"), dict) and parameters["properties"]:
            more = {self._mark(f"{at}.parameters"): {"type": "string"}}
            marked["parameters"] = parameters | {"properties": parameters["properties"] | more}
        return marked

    def _call(self, call: Mapping[str, Any], at: str) -> dict[str, Any]:
        if "function" in call:
            return {**call, "function": self._call(call["function"], f"{at}.function")}
        marked, arguments = {**call, "name": self._ending(call["name"], f"{at}.name")}, call.get("arguments")
        if isinstance(arguments, dict) and arguments:
            mark = self._mark(f"{at}.arguments")
            marked["arguments"] = arguments | {mark: mark}
            self.misread[mark] = (f"'{mark}':",)
        elif isinstance(arguments, str):
            marked["arguments"] = self._ending(arguments, f"{at}.arguments")
            escaped = json.dumps(marked["arguments"], ensure_ascii=False).lower()[1:-1]
            if '"' in arguments:
                self.misread[next(reversed(self.fields))] = (escaped,)
        return marked

    def _ending(self, text: str, field: str, reasoning: int | None = None) -> str:
        """Return a text that ends with a mark; an empty one as it is."""
        if not text.strip():
            return text
        mark = self._mark(field)
        if reasoning is not None:
            self.reasoning[mark] = reasoning
        return text + mark

    def _mark(self, field: str) -> str:
        mark = f"{self._prefix}{len(self.fields)}x"
        self.fields[mark] = field
        return mark


def for_template(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    place: str,
    system_prompt: str | None,
    variables: Mapping[str, Any],
    tools: Tools | None,
    *,
    answer: bool,
) -> tuple[ChatTemplate, list[Message]]:
    """Return the template that writes all of a conversation, and the conversation with the system prompt.

    Args:
        messages: the conversation.
        tokenizer: with a chat template.
        name: what the conversation is called in error messages.
        place: where its record stands, to begin messages of errors with.
        system_prompt: begins a conversation without a system turn, if it is not None.
        variables: of the template.
        tools: that the model may call.
        answer: the conversation ends where an answer is to come.

    Raises:
        InputError: a variable that the template does not read, or a field that it leaves out.
    """
    variables = dict(variables)
    own = variables.pop("tools", None)
    template = ChatTemplate(tokenizer, f"{place}{name}", tools or own, variables)
    if variables:
        with reading(template.name, "messages that the chat template renders"):
            known = _variables(template.source)
        if unknown := [variable for variable in variables if variable not in known]:
            raise InputError(
                f"{place}chat_template_kwargs: expected variables of the target's chat template, found {unknown[0]!r}"
            )
    begun = with_system_prompt(messages, system_prompt)
    return template.fitted(begun, answer=answer, begun=len(begun) - len(messages)), begun


def with_system_prompt(messages: Sequence[Message], system_prompt: str | None) -> list[Message]:
    """Return a conversation that begins with the system prompt, if there is one and it has no system turn."""
    begun = system_prompt is None or any(message["role"] in ("system", "developer") for message in messages)
    first = [] if begun else [{"role": "system", "content": str(system_prompt)}]
    return [*first, *(dict(message) for message in messages)]


def chat_request(
    messages: Sequence[Message], system_prompt: str | None, variables: Mapping[str, Any], tools: Tools | None
) -> dict[str, Any]:
    """Return the fields of a request that has a server render a conversation, in OpenAI's shape."""
    sent = with_system_prompt(messages, system_prompt)
    for message in sent:
        message.pop("weight", None)
        if "tool_calls" in message:
            message["tool_calls"] = [with_arguments(call, parsed=False) for call in message["tool_calls"]]
    request: dict[str, Any] = {"messages": sent}
    request |= {} if tools is None else {"tools": tools}
    return request | ({"chat_template_kwargs": dict(variables)} if variables else {})


def encode_rendered(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Encode as `apply_chat_template` does: the template writes the special tokens."""
    ids: Any = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    return list(ids)


def require_no_template(
    found: str,
    place: str,
    system_prompt: str | None,
    variables: Mapping[str, Any],
    tools: Tools | None,
    messages: Sequence[Message] = (),
) -> None:
    """Require that nothing is meant for a chat template where there is none to read it.

    Raises:
        InputError: a system prompt, variables, tools, or more of a message than its text.
    """
    given: list[tuple[str, Any]] = [("system_prompt", system_prompt), ("chat_template_kwargs", variables)]
    given.append(("tools", tools))
    for i, message in enumerate(messages):
        given += [
            (f"messages[{i}].{name}", value) for name, value in message.items() if name != "content" and is_meant(name)
        ]
        given.append((f"messages[{i}].role", message["role"] in ("developer", "tool")))
    for field, value in given:
        if value:
            raise InputError(
                f"{place}{field}: expected conversations and a chat template that they go into, found {found}"
            )


def trimmed(messages: list[Message], template: ChatTemplate, most: int) -> list[int]:
    """Return the tokens of a conversation, of which the users' text is left out, the oldest first, until they are few.

    What is cut of a text is found by its own tokens, then mended: next to other text they may be joined otherwise.
    """
    while len(ids := template.ids(messages)) > most:
        users = [i for i, message in enumerate(messages) if message["role"] == "user"]
        first, content = users[0], messages[users[0]]["content"]
        starts, cut = _token_starts(content, template.tokenizer), 0
        while (over := len(ids) - most) > 0 and cut + over < len(starts):
            cut += over
            shorter = messages[first] | {"content": content[starts[cut] :]}
            ids = template.ids([*messages[:first], shorter, *messages[first + 1 :]])
        if over <= 0:
            return ids
        if len(users) == 1:
            needed = len(ids) - len(starts) + cut + 1
            raise InputError(
                f"max_prompt_tokens: expected at least {needed} for the template of {template.name}, found {most}"
            )
        del messages[first : users[1]]
    return ids


def _token_starts(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return where in a text its tokens begin; every character where a tokenizer does not say."""
    if not tokenizer.is_fast:
        return list(range(len(text)))
    encoded: Any = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return [start for start, _ in encoded["offset_mapping"]]


def read_variables(tokenizer: PreTrainedTokenizerBase, tools: Tools | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables of a record that the chat template reads; the others changed nothing of a server's text."""
    with reading("the chat template", "a template"):
        known = _variables(tokenizer.get_chat_template(tools=tools)) | {"tools"} if given else frozenset[str]()
    for name in given.keys() - known:
        warn_unread(f"chat_template_kwargs.{name}")
    return {name: value for name, value in given.items() if name in known}


@lru_cache
def warn_unread(field: str) -> None:
    """Say once that the target's chat template does not read a field of the records."""
    logger.warning("%s: left out wherever a record has it, for the target's chat template does not read it", field)


def _is_metadata(field: str) -> bool:
    return field.startswith("messages[") and not is_meant(_of_message(field))


def _of_message(field: str) -> str:
    """Return the name of a message's field from `messages[i].name`, and from what stands in it."""
    return re.split(r"[.\[]", field.partition("].")[2])[0]


@lru_cache
def _variables(source: str) -> frozenset[str]:
    """Return the names that a template looks up among what it is told."""
    environment = ImmutableSandboxedEnvironment(extensions=[loopcontrols])
    looked_up = meta.find_undeclared_variables(environment.parse(TAGS.sub("", source)))
    return frozenset(looked_up - {"messages", "add_generation_prompt"})


def _reasoning(message: Message) -> str | None:
    return next((message[name] for name in REASONING if name in message), None)
