"""Chat templates: one rendering of messages, tools and variables, which omits nothing silently.

A template is a program, and ignores fields that it does not know. So first a copy of the conversation is rendered in
which each field ends with a mark of its own, and a field whose mark is missing from the text is refused by name. Only
three kinds may be missing: ids that number tool calls, reasoning that a template writes only into the last answer, and
metadata, with a warning, since the server's template did not write it either.

Fields have several forms, and a template reads one of them: arguments of a call as an object or its JSON, a content as
a string or in parts. The first form that keeps all marks is taken; the one that
servers give to templates is tried first.
"""

import json
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product
from typing import Any

from jinja2 import TemplateError, meta
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging
from transformers.utils.chat_template_utils import render_jinja_template

from draftsmith.decode.errors import InputError
from draftsmith.train.checkpoint import reading_errors
from draftsmith.train.data.chat.messages import (
    REASONING,
    TEXTS,
    Message,
    function_of,
    is_model_field,
    with_arguments,
    with_parts,
)

TAGS = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")
NUMBERING = ("role", "content", "id", "type", "tool_call_id")
"""The fields of a message that are handled apart, or only say which result belongs to which call."""

Tools = list[dict[str, Any]]
logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class ChatTemplate:
    """A tokenizer's chat template with the tools and variables of a conversation, whose `name` is in error messages."""

    tokenizer: PreTrainedTokenizerBase
    name: str
    tools: Tools | None
    variables: Mapping[str, Any]
    arguments_parsed: bool = True  # whether arguments of calls are objects, or JSON in a string
    in_parts: bool = False  # whether contents are lists of one part of text
    content_null: bool = False  # whether empty contents next to calls are null, as servers log them

    @property
    def source(self) -> str:
        """The template's source; a tokenizer may have another one for tools."""
        return self.tokenizer.get_chat_template(tools=self.tools)

    def render(self, messages: Sequence[Message], *, answer: bool = False) -> str:
        """Return the text, up to the answer to come if `answer`."""
        return self._render([self._format(message) for message in messages], answer)

    def ids(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids of a conversation up to the answer to come."""
        return encode_rendered(self.tokenizer, self.render(messages, answer=True))

    def fitted(self, messages: Sequence[Message], *, answer: bool, added: int = 0) -> "ChatTemplate":
        """Return the template with the forms of fields in which it reads the whole conversation.

        The conversation ends before an `answer` or with one; its first `added` messages are not of the record. An
        InputError names a field that the template omits.
        """
        calls = any("tool_calls" in message for message in messages)
        errors = list[tuple[int, InputError]]()
        silent = any("tool_calls" in message and not message["content"] for message in messages)
        for null, parts, parsed in product((False, True)[: 1 + silent], (False, True), (True, False)[: 1 + calls]):
            form = replace(self, content_null=null, in_parts=parts, arguments_parsed=parsed)
            try:
                metadata, left_out = list[str](), list[str]()
                for field in form._left_out(messages, answer, added):
                    is_metadata = field.startswith("messages[") and not is_model_field(_of_message(field))
                    (metadata if is_metadata else left_out).append(field)
                if not left_out:
                    for field in metadata:
                        warn_unread(f"messages[].{_of_message(field)}")
                    return form
                expected = f"{left_out[0]}: expected a chat template that writes it"
                error = InputError(f"{self.name}: {expected}, found that the target's leaves it out")
                errors.append((len(left_out), error))
            except InputError as error:  # the template refuses the messages itself, or fails on a form it cannot read
                errors.append((0 if type(error.__cause__) is TemplateError else sys.maxsize, error))
        raise min(errors, key=lambda error: error[0])[1]

    def _render(self, conversation: list[Message], answer: bool = False) -> str:
        rendered: Any
        tools: Any = self.tools
        with reading_errors(self.name, "messages that the chat template renders"):
            rendered = render_jinja_template(
                conversations=[conversation],
                tools=tools,
                chat_template=self.source,
                add_generation_prompt=answer,
                **{**self.tokenizer.special_tokens_map, **self.variables},
            )
        return str(rendered[0][0])

    def _format(self, message: Message) -> Message:
        result = {name: value for name, value in message.items() if name not in ("weight", TEXTS)}
        if TEXTS in message and (self.in_parts or self._reads_both):
            result["content"] = with_parts(message)["content"]
        elif self.content_null and "tool_calls" in message and not message["content"]:
            result["content"] = None
        elif self.in_parts:
            result["content"] = [{"type": "text", "text": message["content"]}]
        if "tool_calls" in message:
            result["tool_calls"] = [
                with_arguments(call, parsed=self.arguments_parsed) for call in message["tool_calls"]
            ]
        reasoning = next((message[name] for name in REASONING if name in message), None)
        if reasoning:  # the library adds the other two names
            result.setdefault("reasoning", reasoning)
        return result

    @cached_property
    def _reads_both(self) -> bool:
        """Whether the template writes a content in parts as well as one in a string; vLLM joins parts for others."""
        parts = [{"type": "text", "text": text} for text in ("zqonezq", "zqtwozq")]
        try:
            in_parts, whole = (self._render([{"role": "user", "content": content}]) for content in (parts, "zqonezq"))
        except InputError:
            return False
        both = "zqonezq" in whole and "zqonezq" in in_parts and "zqtwozq" in in_parts
        return both and re.search("[\"']zqone", in_parts) is None

    def _left_out(self, messages: Sequence[Message], answer: bool, added: int) -> list[str]:
        """Return the fields that leave no mark."""
        text = self.render(messages, answer=answer)
        if not text:
            return []
        marks = _Marks(text)
        called = {function_of(call)["name"] for message in messages for call in message.get("tool_calls", ())}
        conversation = [
            marks.message(self._format(message), i, "system_prompt" if i < added else f"messages[{i - added}]", called)
            for i, message in enumerate(messages)
        ]
        tools = None if self.tools is None else [marks.tool(tool, f"tools[{i}]") for i, tool in enumerate(self.tools)]
        marked = replace(self, tools=tools)
        written = marked._render(conversation, answer).lower()

        def is_written(mark: str) -> bool:
            if mark in written:
                return not any(misread in written for misread in marks.misread.get(mark, ()))
            if mark in marks.told and marks.told[mark] in written:
                return True
            turn = marks.reasoning.get(mark, len(messages))  # would the template write it in the last answer?
            return turn < len(messages) - 1 and mark in marked._render(conversation[: turn + 1]).lower()

        left_out = [field for mark, field in marks.fields.items() if not is_written(mark)]
        unnamed = [f for f, name in marks.unmarked.items() if re.search(rf"\b{re.escape(name)}\b", self.source) is None]
        return left_out + unnamed


class _Marks:
    """Marks for the fields of a conversation, which do not occur in its text."""

    def __init__(self, text: str):
        self._prefix = "zq"
        while self._prefix in text.lower():
            self._prefix += "q"
        self.fields = dict[str, str]()  # each mark's field
        self.reasoning = dict[str, int]()  # the message index of each mark of reasoning
        self.misread = dict[str, tuple[str, ...]]()
        """The texts that show that a template read a mark's field in another form: Python's notation of an object."""
        self.told = dict[str, str]()  # the ids of calls by the marks of their names, where an id holds the name
        self.unmarked = dict[str, str]()  # fields that hold no text, and their names

    def message(self, message: Message, index: int, at: str, called: Collection[str]) -> Message:
        """Return a message with its marks; `at` names it in errors.

        The names of `called` tools need not be repeated at their results.
        """
        marked, reasons = dict(message), dict[str, str]()
        content = message["content"]
        if isinstance(content, list):
            text = self._ending(content[-1]["text"], f"{at}.content")
            marked["content"] = [*content[:-1], content[-1] | {"text": text}]
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
                if value not in reasons:  # otherwise it is the same text under a second name
                    reasons[value] = self._ending(value, f"{at}.{name}", index)
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
            mark = {self._mark(f"{at}.parameters"): {"type": "string"}}
            marked["parameters"] = parameters | {"properties": parameters["properties"] | mark}
        return marked

    def _call(self, call: Mapping[str, Any], at: str, told: Any = None) -> dict[str, Any]:
        if "function" in call:
            return {**call, "function": self._call(call["function"], f"{at}.function", call.get("id"))}
        marked, arguments = {**call, "name": self._ending(call["name"], f"{at}.name")}, call.get("arguments")
        if isinstance(told, str) and call["name"] in told:  # Kimi K2's templates write `functions.NAME:0` alone
            self.told[next(reversed(self.fields))] = told.lower()
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
        """Return a text that ends with a mark; an empty text stays empty."""
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

    `place` and `name` begin error messages. The conversation ends before an `answer`, or with one.
    """
    variables = dict(variables)
    own = variables.pop("tools", None)
    template = ChatTemplate(tokenizer, f"{place}{name}", tools or own, variables)
    if variables:
        with reading_errors(template.name, "messages that the chat template renders"):
            known = _variables(template.source)
        if unknown := [variable for variable in variables if variable not in known]:
            raise InputError(
                f"{place}chat_template_kwargs: expected variables of the target's chat template, found {unknown[0]!r}"
            )
    conversation = with_system_prompt(messages, system_prompt)
    return template.fitted(conversation, answer=answer, added=len(conversation) - len(messages)), conversation


def with_system_prompt(messages: Sequence[Message], system_prompt: str | None) -> list[Message]:
    """Return a conversation with the system prompt at its beginning, if there is one and no system turn."""
    has_start = system_prompt is None or any(message["role"] in ("system", "developer") for message in messages)
    first = [] if has_start else [{"role": "system", "content": str(system_prompt)}]
    return [*first, *(dict(message) for message in messages)]


def chat_request(
    messages: Sequence[Message], system_prompt: str | None, variables: Mapping[str, Any], tools: Tools | None
) -> dict[str, Any]:
    """Return the fields of an OpenAI request in which the server renders the conversation."""
    sent = [with_parts(message) for message in with_system_prompt(messages, system_prompt)]
    for message in sent:
        message.pop("weight", None)
        if "tool_calls" in message:
            message["tool_calls"] = [with_arguments(call, parsed=False) for call in message["tool_calls"]]
    request: dict[str, Any] = {"messages": sent}
    request |= {} if tools is None else {"tools": tools}
    return request | ({"chat_template_kwargs": dict(variables)} if variables else {})


class GrowingText:
    """Encodes texts that mostly continue one another, such as a conversation's after each turn.

    A special token splits a text for every tokenizer, so that ids before the last one that two texts share are kept.
    `special` are such tokens with their contents, apart from those that take whitespace before them.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, special: Mapping[int, str]):
        self._tokenizer, self._special, self._text, self._ids = tokenizer, special, "", list[int]()
        self._pattern: re.Pattern[str] | None = None
        self._splits = dict[int, int]()  # where special tokens begin in the text, and in the ids

    def __call__(self, text: str) -> list[int]:
        """Return the ids of a text, as `encode_rendered` does."""
        if self._pattern is None:  # of the first text's tokens: a tokenizer may have thousands
            self._ids = encode_rendered(self._tokenizer, text)
            self._special = {token: self._special[token] for token in self._ids if token in self._special}
            contents = sorted(self._special.values(), key=len, reverse=True)
            self._pattern = re.compile("|".join(map(re.escape, contents)) or "(?!)")
        shared = common_length(text, self._text)
        starts = [match.start() for match in self._pattern.finditer(text)]
        both = [(at, self._splits[at]) for at in starts if at <= shared and at in self._splits]
        at, kept = both[-1] if both else (0, 0)
        self._text, self._ids = text, self._ids[:kept] + encode_rendered(self._tokenizer, text[at:])
        places = [k for k, token in enumerate(self._ids) if token in self._special]
        # Bytes of characters may be special tokens, too, so that a text has fewer of them than its ids.
        self._splits = dict(zip(starts, places, strict=True)) if len(starts) == len(places) else {}
        return self._ids


def common_length(a: Sequence[object], b: Sequence[object]) -> int:
    """Return the length of the longest common prefix of two sequences of ids or characters."""
    # Slices are compared at the speed of C, which matters for long conversations of many turns.
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low


def encode_rendered(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Encode like `apply_chat_template`: the template itself writes the special tokens."""
    ids: Any = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    return list(ids)


def encode_plain(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Encode plain text with the special tokens that the tokenizer adds before it, once.

    Text that was rendered by hand begins with them already. Those that it adds at the end are left out: text follows.
    """
    ids, sample = (list(tokenizer(part, verbose=False).input_ids) for part in (text, "a"))
    inner = encode_rendered(tokenizer, "a")
    first = next((n for n in range(len(sample)) if inner and sample[n : n + len(inner)] == inner), None)
    if first is None:
        return ids
    before, after = sample[:first], sample[first + len(inner) :]
    ids = ids[: len(ids) - len(after)]
    return ids[first:] if before and ids[: 2 * first] == before * 2 else ids


def require_no_template(
    problem: str,
    place: str,
    system_prompt: str | None,
    variables: Mapping[str, Any],
    tools: Tools | None,
    messages: Sequence[Message] = (),
) -> None:
    """Require, in the absence of a chat template, that there is nothing only a template can use."""
    fields: list[tuple[str, Any]] = [("system_prompt", system_prompt), ("chat_template_kwargs", variables)]
    fields.append(("tools", tools))
    for i, message in enumerate(messages):
        fields += [
            (f"messages[{i}].{name}", value)
            for name, value in message.items()
            if name != "content" and is_model_field(name)
        ]
        fields.append((f"messages[{i}].role", message["role"] in ("developer", "tool")))
    for field, value in fields:
        if value:
            raise InputError(
                f"{place}{field}: expected conversations and a chat template that they go into, found {problem}"
            )


def trim_to(messages: list[Message], template: ChatTemplate, most: int) -> list[int]:
    """Return at most `most` token ids of a conversation, cutting the users' text, the oldest first.

    A cut is estimated from the text's own tokens and then corrected, since they may join differently in the whole.
    """
    while len(ids := template.ids(messages)) > most:
        users = [i for i, message in enumerate(messages) if message["role"] == "user"]
        first, content = users[0], messages[users[0]]["content"]
        starts, cut = _token_starts(content, template.tokenizer), 0
        while (over := len(ids) - most) > 0 and cut + over < len(starts):
            cut += over
            shorter = {name: value for name, value in messages[first].items() if name != TEXTS}
            shorter["content"] = content[starts[cut] :]
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
    """Return the start of each token in a text; every character if the tokenizer gives no offsets."""
    if not tokenizer.is_fast:
        return list(range(len(text)))
    encoded: Any = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return [start for start, _ in encoded["offset_mapping"]]


def read_variables(
    tokenizer: PreTrainedTokenizerBase, tools: Tools | None, variables: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a record's variables that the chat template reads; others did not change the server's text either."""
    with reading_errors("the chat template", "a template"):
        known = _variables(tokenizer.get_chat_template(tools=tools)) | {"tools"} if variables else frozenset[str]()
    for name in variables.keys() - known:
        warn_unread(f"chat_template_kwargs.{name}")
    return {name: value for name, value in variables.items() if name in known}


@lru_cache
def warn_unread(field: str) -> None:
    """Warn once that the target's chat template does not read a field of the records."""
    logger.warning("%s: left out of all records, since the target's chat template does not read it", field)


def _of_message(field: str) -> str:
    """Return the name of a message's field from `messages[i].name`, or from a path inside the field."""
    return re.split(r"[.\[]", field.partition("].")[2])[0]


@lru_cache
def _variables(source: str) -> frozenset[str]:
    """Return the names of the variables that a template reads."""
    environment = ImmutableSandboxedEnvironment(extensions=[loopcontrols])
    looked_up = meta.find_undeclared_variables(environment.parse(TAGS.sub("", source)))
    return frozenset(looked_up - {"messages", "add_generation_prompt"})
