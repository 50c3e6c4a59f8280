"""Prompts in, token ids out: every format that prompts are kept in, and the target's chat template.

A record is recognised by its field; where it has several, the first of these counts:

* `prompt`: a string, encoded as it is; or a list of messages (TRL's conversational format);
* `messages`: a list of `{"role": …, "content": …}`, with `tool_calls`, reasoning and other fields;
* `conversations`: ShareGPT, a list of `{"from": …, "value": …}`;
* `turns`: Spec-Bench, MT-Bench, SPEED-Bench and DeepSpec, the user's turns. The first is the prompt; the later ones
  need an answer to the one before, which nobody has given yet (`turns.py`).

A line of a log of requests, in the shapes of `train/endpoint/request_logs.py`, is a conversation and its answer.

A conversation is kept up to its last user turn or result of a tool, because the answer is the target's to write; or it
is kept whole, where its answers are to be learned from. `id` (or `question_id`), `category`, and for conversations
`tools` and `chat_template_kwargs` are optional.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import pyarrow.parquet as pq
from transformers import PreTrainedTokenizerBase

from draftsmith.decode.draft_models.vocabulary import require_logits
from draftsmith.decode.errors import InputError, at_least, first_line
from draftsmith.decode.validation import parse_json
from draftsmith.train.data.chat.masks import ClosingTokens, MaskedConversation, mask_conversation
from draftsmith.train.data.chat.messages import ASKING, Message, kind, read_messages, read_tools, text
from draftsmith.train.data.chat.templates import (
    chat_request,
    for_template,
    read_variables,
    require_no_template,
    trimmed,
)
from draftsmith.train.endpoint.request_logs import CUT, conversation, has_answer, is_logged

FIELDS = ("prompt", "messages", "conversations", "turns")
ANSWERS = ("completion", "response")  # what stands beside a `prompt` and answers it
WITH_ANSWER = "messages with an assistant turn at their end"
UNREAD = {
    "system": "a system turn among the messages",
    "functions": "tools",
    "chat_template": "the target's own template",
    "continue_final_message": "an answer of its own",
}
"""Fields that shape what a server writes of a conversation, and what is expected in their place."""

AnswersMode = Literal["dropped", "kept", "required"]
Located = tuple[str, Any]  # where a record stands ("prompts.jsonl:7"), and the record


@dataclass(frozen=True)
class Prompt:
    """What the target is asked: exactly one of a plain text and a conversation that ends with what it is to answer.

    Where answers are kept, a conversation may be whole, and end with the assistant's answer.
    """

    id: str
    text: str | None
    messages: list[Message] | None
    category: str | None
    cut: bool = False
    """Its answer was cut at a length, so that it ends in the middle."""
    later: tuple[str, ...] = ()
    """What the user says after the answer to this, turn by turn; where it was asked for."""
    where: str | None = field(default=None, compare=False)
    """Where it stands, as `prompts.jsonl:7`; None where it was not read."""
    tools: list[dict[str, Any]] | None = None
    """Tools that the assistant may call."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Of the chat template, for this conversation; they count before those of a command."""

    @property
    def place(self) -> str:
        """Where it stands, to begin messages of errors with."""
        return "" if self.where is None else f"{self.where}: "

    def read_variables(self, tokenizer: PreTrainedTokenizerBase) -> Mapping[str, Any]:
        """Return its variables that the tokenizer's chat template reads; all of them where there is no template."""
        if tokenizer.chat_template is None or self.messages is None:
            return self.variables
        return read_variables(tokenizer, self.tools, self.variables)

    def record(self) -> dict[str, Any]:
        """Return it as a record of a file that `read_prompts` reads, without its id."""
        content: dict[str, Any] = {"prompt": self.text} if self.messages is None else {"messages": self.messages}
        content |= {} if self.tools is None else {"tools": self.tools}
        content |= {"chat_template_kwargs": dict(self.variables)} if self.variables else {}
        content |= {} if self.category is None else {"category": self.category}
        return content | ({"finish_reason": CUT} if self.cut else {})

    def request(self, system_prompt: str | None, variables: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of a request to a server that renders a conversation by itself.

        Raises:
            InputError: plain text, and something that is meant for a chat template.
        """
        variables = {**variables, **self.variables}
        if self.messages is not None:
            return chat_request(self.messages, system_prompt, variables, self.tools)
        require_no_template(f"prompt {self.id!r} in plain text", self.place, system_prompt, variables, self.tools)
        return {"prompt": self.text}

    def require_logits(self, ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
        """Raise an InputError that says where it stands if one of its tokens lies behind all of a model's logits."""
        require_logits(ids, tokenizer, vocab_size, f"{self.place}prompt {self.id!r}")


def read_prompts(
    source: str,
    *,
    split: str = "train",
    limit: int | None = None,
    answers: AnswersMode = "dropped",
    later: bool = False,
) -> list[Prompt]:
    """Read prompts, or whole conversations, from a file, a directory or a data set on the hub.

    Args:
        source: a `.jsonl` file (a record a line), `.json` (an array of records), `.parquet`, `.txt` or `.md` (a prompt
            a line, empty lines skipped); or a directory or a hub id, `NAME` or `NAME:CONFIG`, that
            `datasets.load_dataset` reads.
        split: the split of a directory or hub id.
        limit: read only the first `limit` prompts.
        answers: "dropped": conversations end with their last user turn. "required": they hold a user turn and end with
            an assistant turn, in `messages`; a `prompt` has its `completion` or `response` beside it, and both are two
            strings, or two lists of messages. "kept": as "required" where there is an answer, as "dropped" elsewhere.
        later: of `turns`, keep those after the first one, too.

    Returns:
        The prompts in their order, with unique ids: those given, and the position (from 0) for those without one.

    Raises:
        InputError: names the file and the line (or row) of the first record that cannot be used.
    """
    if limit is not None:
        at_least(1).check("limit", limit)
    located = [(where, _unlogged(record, where, answers)) for where, record in islice(_records(source, split), limit)]
    if not located:
        raise InputError(f"{source}: expected prompts, found none")
    given = [_given_id(record, where) for where, record in located]
    taken: dict[str, str] = {}
    for (where, _), name in zip(located, given, strict=True):
        if name is not None and name in taken:
            raise InputError(f"{where}: expected a unique id, found {name!r} again (first at {taken[name]})")
        if name is not None:
            taken[name] = where
    prompts = []
    for position, ((where, record), name) in enumerate(zip(located, given, strict=True)):
        if name is None:
            name = str(position)
            while name in taken:  # some records were given an id, and one of them is this number
                name += "_"
            taken[name] = where
        prompt = _parse(record, where, name, answers)
        if later and record.get("turns") is not None and prompt.messages is not None:
            turns = [text(turn, f"{where}: turns[{n}]") for n, turn in enumerate(record["turns"][1:], 1)]
            prompt = replace(prompt, later=tuple(turns))
        prompts.append(replace(prompt, cut=record.get("finish_reason") == CUT, where=where))
    return prompts


def encode_prompt(
    prompt: Prompt,
    tokenizer: PreTrainedTokenizerBase,
    *,
    vocab_size: int | None = None,
    max_tokens: int | None = None,
    system_prompt: str | None = None,
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    """Encode a prompt as the target will see it, ready for its answer.

    A conversation goes through the tokenizer's chat template with the generation prompt; where there is no template,
    the user turns joined by blank lines are plain text. Plain text is encoded as it is, with the special tokens that
    the tokenizer adds by itself; a template writes them itself, and none are added to those.

    Args:
        prompt: the prompt.
        tokenizer: the target's tokenizer.
        vocab_size: how many logits the target has, which its tokens must be among; not looked at if None.
        max_tokens: of the prompt at most. Of a templated conversation the oldest user's text is cut from the left, and
            left out with its answer where that is not enough; what the template writes stays whole, and so do the
            system's turns. Of plain text the last tokens are kept.
        system_prompt: begins a conversation without a system turn.
        variables: of the chat template.

    Returns:
        At least one token id.

    Raises:
        InputError: names the prompt that has no tokens, or one that the target cannot read, that the chat template
            refuses or writes without one of its fields, or whose template alone is longer than `max_tokens`; a system
            prompt, variables or tools without a template to go into.
    """
    name, variables = f"prompt {prompt.id!r}", {**(variables or {}), **prompt.read_variables(tokenizer)}
    if prompt.messages is not None and tokenizer.chat_template is not None:
        template, messages = for_template(
            prompt.messages, tokenizer, name, prompt.place, system_prompt, variables, prompt.tools, answer=True
        )
        ids = template.ids(messages) if max_tokens is None else trimmed(messages, template, max_tokens)
    else:
        found = f"{name} in plain text" if prompt.messages is None else "none in the target's tokenizer"
        asked = prompt.messages or []
        require_no_template(found, prompt.place, system_prompt, variables, prompt.tools, asked)
        turns = [message["content"] for message in asked if message["role"] == "user"]
        plain = prompt.text if prompt.text is not None else "\n\n".join(turns)
        ids = list(tokenizer(plain, verbose=False)["input_ids"])  # type: ignore[arg-type]
        ids = ids if max_tokens is None else ids[-max_tokens:]
    if not ids:
        raise InputError(f"{prompt.place}{name}: expected at least one token, found none")
    if vocab_size is not None:
        prompt.require_logits(ids, tokenizer, vocab_size)
    return ids


def mask_answers(
    conversation: Prompt,
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
    closing: ClosingTokens,
    ends: Sequence[int],
    system_prompt: str | None = None,
    variables: Mapping[str, Any] | None = None,
) -> MaskedConversation:
    """Encode a conversation that ends with its answer, and mask what the assistant wrote.

    Args:
        conversation: read with its answers.
        tokenizer: the target's.
        vocab_size: how many logits the target has, which its tokens must be among.
        closing: the tokenizer's.
        ends: the tokens that end the target's texts.
        system_prompt: begins a conversation without a system turn.
        variables: of the chat template.

    Raises:
        InputError: what `mask_conversation` refuses, or a token that the target has no logit for.
    """
    masked = mask_conversation(
        conversation.messages or [],
        tokenizer,
        conversation.id,
        closing=closing,
        ends=ends,
        system_prompt=system_prompt,
        variables={**(variables or {}), **conversation.read_variables(tokenizer)},
        tools=conversation.tools,
        place=conversation.place,
    )
    conversation.require_logits(masked.ids, tokenizer, vocab_size)
    return masked


def _records(source: str, split: str) -> Iterator[Located]:
    path = Path(source)
    readers: dict[str, Callable[[Path], Iterator[Located]]] = {
        ".jsonl": _jsonl,
        ".json": _json,
        ".txt": _lines_as_prompts,
        ".md": _lines_as_prompts,
        ".parquet": _parquet,
    }
    reader = readers.get(path.suffix.lower())
    if path.is_file():
        if reader is None:
            raise InputError(
                f"{source}: expected a file named {', '.join(readers)}, found {path.suffix or path.name!r}"
            )
        return reader(path)
    # A path that looks local but is missing would otherwise be looked up on the hub: a slow and confusing failure.
    looks_local = path.is_absolute() or source.startswith(".") or source.count("/") > 1
    if not source or (not path.is_dir() and (reader is not None or looks_local)):
        raise InputError(f"{source}: expected a file of prompts, found nothing there")
    return _dataset(source, split)


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: expected a readable file, found: {error.strerror}") from error
    # Bytes are split, not text: str.splitlines would also cut at U+2028, which JSON allows inside a string.
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        where = f"{path}:{number}"
        try:
            yield where, line.removesuffix(b"\r").decode("utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"{where}: expected UTF-8, found byte 0x{line[error.start]:02x}") from error


def _lines_as_prompts(path: Path) -> Iterator[Located]:
    return ((where, {"prompt": line}) for where, line in _lines(path) if line.strip())


def _jsonl(path: Path) -> Iterator[Located]:
    for where, line in _lines(path):
        if line.strip():
            try:
                yield where, parse_json(line)
            except json.JSONDecodeError as error:
                raise InputError(
                    f"{where}: expected a JSON object, found: {error.msg} (column {error.colno})"
                ) from error


def _json(path: Path) -> Iterator[Located]:
    text = "\n".join(line for _, line in _lines(path)).strip()
    if text[:1] not in {"", "["}:
        raise InputError(
            f"{path}: expected an array of records, found {text[0]!r} (a file of one record a line is named .jsonl)"
        )
    try:
        return _rows(parse_json(text or "[]"), str(path))
    except json.JSONDecodeError as error:
        raise InputError(f"{path}:{error.lineno}: expected JSON, found: {error.msg} (column {error.colno})") from error


def _parquet(path: Path) -> Iterator[Located]:
    try:
        with pq.ParquetFile(path) as file:
            rows = (row for batch in file.iter_batches() for row in map(_without_nulls, batch.to_pylist()))
            yield from _rows(rows, str(path))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: expected a Parquet file, found: {first_line(error)}") from error


def _dataset(source: str, split: str) -> Iterator[Located]:
    # A directory may have a colon in its name; a hub id may not.
    name, _, config = (source, "", "") if Path(source).is_dir() else source.partition(":")
    import datasets  # most of a second, which a prompt of the command line should not wait for

    try:
        dataset = datasets.load_dataset(name, config or None, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise InputError(
            f"{source}: expected a file, a directory or a data set with split {split!r}, found: {first_line(error)}"
        ) from error
    return _rows(map(_without_nulls, dataset), f"{source}[{split}]")


def _without_nulls(value: Any, called: bool = False) -> Any:
    """Return a row without null keys in its tools and calls: Arrow gives each object the keys of all rows."""
    if isinstance(value, dict):
        return {
            name: _without_nulls(each, called or name in ("tools", "tool_calls", "functions"))
            for name, each in value.items()
            if not called or each is not None
        }
    return [_without_nulls(each, called) for each in value] if isinstance(value, list) else value


def _rows(rows: Iterable[Any], source: str) -> Iterator[Located]:
    return ((f"{source}: row {number}", row) for number, row in enumerate(rows, start=1))


def _unlogged(record: Any, where: str, answers: AnswersMode) -> Any:
    if not is_logged(record):
        return record
    return conversation(record, where, answers == "required" or (answers == "kept" and has_answer(record)))


def _given_id(record: Any, where: str) -> str | None:
    if not isinstance(record, dict):
        raise InputError(f"{where}: expected an object, found {kind(record)}")
    for key in ("id", "question_id"):
        value = record.get(key)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, str | int):
                raise InputError(f"{where}: {key}: expected a string or a whole number, found {kind(value)}")
            return text(str(value), f"{where}: {key}")
    return None


def _parse(record: dict[str, Any], where: str, name: str, answers: AnswersMode) -> Prompt:
    """Read a record by the first of `FIELDS` that it has."""
    category = record.get("category")
    if category is not None:
        category = text(category, f"{where}: category", may_be_empty=True)
    field = next((field for field in FIELDS if record.get(field) is not None), None)
    if field is None:
        found = ", ".join(map(repr, record)) or "an empty object"
        raise InputError(f"{where}: expected one of the fields {', '.join(FIELDS)}, found {found}")
    conversed = isinstance(record[field], list) and field in ("messages", "conversations")
    for unread, expected in UNREAD.items():
        if record.get(unread) and not (conversed and unread == "system"):
            raise InputError(f"{where}: {unread}: expected {expected}, found {kind(record[unread])}")
    tools, variables = read_tools(record.get("tools"), where), record.get("chat_template_kwargs") or {}
    if not isinstance(variables, dict):
        raise InputError(f"{where}: chat_template_kwargs: expected an object, found {kind(variables)}")
    if field == "prompt" and isinstance(record[field], str):
        plain, messages = _plain_prompt(record, where, answers)
        return Prompt(name, plain, messages, category, tools=tools, variables=variables)
    if not isinstance(record[field], list):
        expected = "a string or a list of messages" if field == "prompt" else "a list"
        expected = WITH_ANSWER if answers == "required" else expected
        raise InputError(f"{where}: {field}: expected {expected}, found {kind(record[field])}")
    if field == "turns":
        messages = _first_turn(record[field], where, answers)
        return Prompt(name, None, messages, category, tools=tools, variables=variables)
    messages = read_messages(record[field], where, field)
    if conversed and record.get("system"):
        if any(message["role"] in ("system", "developer") for message in messages):
            raise InputError(f"{where}: system: expected none beside a system turn in {field}, found both")
        messages.insert(0, {"role": "system", "content": text(record["system"], f"{where}: system")})
    answer = _answer_field(record, answers) if field == "prompt" else None
    if answer is not None:
        if not isinstance(record[answer], list):
            raise InputError(f"{where}: {answer}: expected a list of messages, found {kind(record[answer])}")
        messages += read_messages(record[answer], where, answer)
    ended = _ended(messages, where, field, answers)
    return Prompt(name, None, ended, category, tools=tools, variables=variables)


def _answer_field(record: dict[str, Any], answers: AnswersMode) -> str | None:
    """Return the field that answers a `prompt`, where answers are read and it has one."""
    return None if answers == "dropped" else next((field for field in ANSWERS if record.get(field) is not None), None)


def _plain_prompt(
    record: dict[str, Any], where: str, answers: AnswersMode
) -> tuple[str, None] | tuple[None, list[Message]]:
    """Read a `prompt` of plain text; with an answer beside it a conversation of two turns."""
    asked, answer = text(record["prompt"], f"{where}: prompt"), _answer_field(record, answers)
    if answer is not None:
        reply = text(record[answer], f"{where}: {answer}")
        return None, [{"role": "user", "content": asked}, {"role": "assistant", "content": reply}]
    if answers == "required":
        raise InputError(f"{where}: expected an answer to the prompt in {' or '.join(ANSWERS)}, found none")
    return asked, None


def _first_turn(turns: list[Any], where: str, answers: AnswersMode) -> list[Message]:
    """Read the first of the user's `turns`."""
    if answers == "required":
        raise InputError(f"{where}: turns: expected {WITH_ANSWER}, found the user's turns alone")
    if not turns:
        raise InputError(f"{where}: turns: expected at least one turn, found none")
    return [{"role": "user", "content": text(turns[0], f"{where}: turns[0]")}]


def _ended(messages: list[Message], where: str, field: str, answers: AnswersMode) -> list[Message]:
    """Return a conversation up to what is to be answered, or with its answer where that is read."""
    last = messages[-1]["role"] if messages else None
    if answers == "required" and last != "assistant":
        found = f"a {last} turn" if last else "none"
        raise InputError(f"{where}: {field}: expected an assistant turn at the end, found {found}")
    if answers == "dropped" or last != "assistant":
        while messages and messages[-1]["role"] not in ASKING:
            messages.pop()
    if all(message["role"] != "user" for message in messages):
        raise InputError(f"{where}: {field}: expected a user turn, found none")
    return messages
