"""Prompts in records of files, directories and data sets on the hub; errors name the place of a record.

A record is recognised by its field; if it has several, the first of these counts:

* `prompt`: a string, encoded as it is; or a list of messages (TRL's conversational format);
* `messages`: a list of `{"role": …, "content": …}`, with `tool_calls`, reasoning and other fields;
* `conversations`: ShareGPT, a list of `{"from": …, "value": …}`;
* `turns`: the user's turns in Spec-Bench, MT-Bench, SPEED-Bench and DeepSpec. The first is the prompt. `prepare` can
  ask the later ones, each after the target's answers to those before; the id of such a turn ends in its number, `81.2`.
  SPEED-Bench's own script writes them as `messages`, of the user alone, of a record with a `question_id`.

A line of a request log, as `train/endpoint/request_logs.py` knows them, is a conversation and its answer. The
`prompt_token_ids` and `token_ids` of any record with an answer are what a server read and wrote.

A `prompt` in a string may have an answer: `completion` or `response` makes it a conversation of two turns, while
`continuation` continues the plain text, as in logs of text completions.

A conversation ends with its last user turn or tool result, because the target writes the answer; or it is kept whole,
if its answers are to be learned. `id` (or `question_id`), `category`, and for conversations `tools` and
`chat_template_kwargs` are optional.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import pyarrow.parquet as pq

from draftsmith.decode.errors import InputError, at_least, first_line
from draftsmith.decode.validation import TokenId, parse_json, validate
from draftsmith.train.data.chat.messages import ASKING, MEDIA, Message, kind, read_messages, read_tools, text
from draftsmith.train.data.prompts import SERVED, Prompt, usable
from draftsmith.train.endpoint.request_logs import ENDED, conversation, has_answer, is_logged

FIELDS = ("prompt", "messages", "conversations", "turns")
ANSWERS = ("completion", "response")  # the fields that may answer a `prompt`
CONTINUATION = "continuation"  # the field that continues a `prompt` in plain text
WITH_ANSWER = "messages with an assistant turn at their end"
UNREAD = {
    "system": "a system turn among the messages",
    "functions": "tools",
    "chat_template": "the target's own template",
    "continue_final_message": "an answer of its own",
    **dict.fromkeys(MEDIA, "text alone"),
}
"""Fields that change how a server renders a conversation or show more than text, and what is expected instead."""
UNFETCHED = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
"""The beginning of turns of SPEED-Bench whose texts may not be given away; its script fetches them."""
AnswersMode = Literal["dropped", "kept", "required"]
Located = tuple[str, Any]  # a record's place, such as "prompts.jsonl:7", and the record


def read_prompts(
    source: str,
    *,
    split: str = "train",
    limit: int | None = None,
    answers: AnswersMode = "dropped",
    later: bool = False,
    invalid: str = "refuse",
) -> list[Prompt]:
    """Read prompts or conversations from a file, a directory or a data set on the hub, and make their ids unique.

    Args:
        source: a `.jsonl` file (one record per line), `.json` (an array of records), `.parquet`, `.txt` (one
            prompt per line, empty lines skipped); or a directory or hub id for `datasets.load_dataset`.
        answers: "dropped": conversations end with their last user turn. "required": they end with an assistant turn,
            and a `prompt` comes with a `completion` or `response`, both strings or both lists of messages. "kept": as
            "required" if there is an answer, otherwise as "dropped".
        invalid: "refuse" raises an error at the first record that cannot be used; "skip" leaves all such records out,
            with a warning that counts and names them.

    Raises:
        InputError: the first record that cannot be used, with its file and line (or row); or there is none to use.
    """
    if limit is not None:
        at_least(1).check("limit", limit)
    places = dict[str, str]()

    def named(row: tuple[str, Any]) -> tuple[str | None, Any]:
        where, record = row
        record = _unlogged(record, where, answers)
        name = _record_id(record, where)
        if name is not None and name in places:
            raise InputError(f"{where}: expected a unique id, found {name!r} again (first at {places[name]})")
        if name is not None:
            places[name] = where
        return name, record

    def parsed(row: tuple[int, str, str | None, Any]) -> Prompt:
        position, where, name, record = row
        if name is None:
            name = str(position)
            while name in places:  # another record has this number as its id
                name += "_"
            places[name] = where
        prompt = _parse(record, where, name, answers)
        if later and record.get("turns") is not None and prompt.messages is not None:
            turns = [text(turn, f"{where}: turns[{n}]") for n, turn in enumerate(record["turns"][1:], 1)]
            prompt = replace(prompt, later=tuple(turns))
        served = _served(record, where) if prompt.has_answer else None
        cut, stop = (record.get("finish_reason") or ENDED[0]) not in ENDED, record.get("stop_reason")
        return replace(prompt, cut=cut, stop=stop if type(stop) is int else None, where=where, served=served)

    rows = list(islice(read_records(source, split), limit))
    if not rows:
        raise InputError(f"{source}: expected prompts, found none")
    positions = {where: position for position, (where, _) in enumerate(rows)}
    # The ids of all records come first, since records without one are named around them.
    entries = [(positions[where], where, *entry) for (where, _), entry in usable(rows, named, invalid)]
    return [prompt for _, prompt in usable(entries, parsed, invalid)]


def _served(record: Mapping[str, Any], where: str) -> tuple[list[int], list[int]] | None:
    """Return the ids of prompt and answer in a record, if it has both."""
    if any(record.get(name) in (None, []) for name in SERVED):
        return None
    prompt_ids, ids = (validate(list[TokenId], record[name], f"{where}: {name}") for name in SERVED)
    return prompt_ids, ids


def _unlogged(record: Any, where: str, answers: AnswersMode) -> Any:
    if not is_logged(record):
        return _with_turns(record, where)
    return conversation(record, where, answers == "required" or (answers == "kept" and has_answer(record)))


def _with_turns(record: Any, where: str) -> Any:
    """Return a record of SPEED-Bench with its `turns`, or any other as it is; refuse turns that were not fetched."""
    if not isinstance(record, dict):
        return record
    turns, messages = record.get("turns"), record.get("messages")
    if turns is None and isinstance(messages, list) and record.get("question_id") is not None:
        asked = [m for m in messages if isinstance(m, dict) and m.keys() == {"role", "content"} and m["role"] == "user"]
        turns = [message["content"] for message in asked]
        if 1 < len(asked) == len(messages):
            record = {name: value for name, value in record.items() if name != "messages"} | {"turns": turns}
    for n, turn in enumerate(turns if isinstance(turns, list) else []):
        if isinstance(turn, str) and turn.startswith(UNFETCHED):
            raise InputError(
                f"{where}: turns[{n}]: expected a question, found SPEED-Bench's placeholder for one: run the script of "
                "the data set, which fetches the texts, and read the file that it writes"
            )
    return record


def _record_id(record: Any, where: str) -> str | None:
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
    """Read a record by the first of `FIELDS` in it."""
    category = record.get("category")
    if category is not None:
        category = text(category, f"{where}: category", may_be_empty=True)
    field = next((field for field in FIELDS if record.get(field) is not None), None)
    if field is None:
        keys = ", ".join(map(repr, record)) or "an empty object"
        raise InputError(f"{where}: expected one of the fields {', '.join(FIELDS)}, found {keys}")
    conversed = isinstance(record[field], list) and field in ("messages", "conversations")
    for unread, expected in UNREAD.items():
        if record.get(unread) and not (conversed and unread == "system"):
            raise InputError(f"{where}: {unread}: expected {expected}, found {kind(record[unread])}")
    tools, variables = read_tools(record.get("tools"), where), record.get("chat_template_kwargs") or {}
    if not isinstance(variables, dict):
        raise InputError(f"{where}: chat_template_kwargs: expected an object, found {kind(variables)}")
    if field == "prompt" and isinstance(record[field], str):
        plain, messages, answer = _plain_prompt(record, where, answers)
        return Prompt(name, plain, messages, category, answer, tools=tools, variables=variables)
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
            raise InputError(f"{where}: system: expected no system field with a system turn in {field}, found both")
        messages.insert(0, {"role": "system", "content": text(record["system"], f"{where}: system")})
    answer = _answer_field(record, answers) if field == "prompt" else None
    if answer is not None:
        if not isinstance(record[answer], list):
            raise InputError(f"{where}: {answer}: expected a list of messages, found {kind(record[answer])}")
        messages += read_messages(record[answer], where, answer)
    messages = _ended(messages, where, field, answers)
    return Prompt(name, None, messages, category, tools=tools, variables=variables)


def _answer_field(record: dict[str, Any], answers: AnswersMode) -> str | None:
    """Return the field that answers a `prompt`, if answers are read and there is one."""
    return None if answers == "dropped" else next((field for field in ANSWERS if record.get(field) is not None), None)


def _plain_prompt(
    record: dict[str, Any], where: str, answers: AnswersMode
) -> tuple[str | None, list[Message] | None, str | None]:
    """Return a `prompt` as plain text, or with an answer as a conversation of two turns; and a plain continuation."""
    question, answer = text(record["prompt"], f"{where}: prompt"), _answer_field(record, answers)
    if answer is not None:
        reply = text(record[answer], f"{where}: {answer}")
        return None, [{"role": "user", "content": question}, {"role": "assistant", "content": reply}], None
    if answers != "dropped" and record.get(CONTINUATION) is not None:
        return question, None, text(record[CONTINUATION], f"{where}: {CONTINUATION}", may_be_empty=True)
    if answers == "required":
        raise InputError(f"{where}: expected an answer to the prompt in {' or '.join(ANSWERS)}, found none")
    return question, None, None


def _first_turn(turns: list[Any], where: str, answers: AnswersMode) -> list[Message]:
    """Read the first of the user's `turns`, as a conversation."""
    if answers == "required":
        raise InputError(f"{where}: turns: expected {WITH_ANSWER}, found the user's turns alone")
    if not turns:
        raise InputError(f"{where}: turns: expected at least one turn, found none")
    return [{"role": "user", "content": text(turns[0], f"{where}: turns[0]")}]


def _ended(messages: list[Message], where: str, field: str, answers: AnswersMode) -> list[Message]:
    """Return a conversation up to the turn to answer, or with its answer if that is read."""
    last = messages[-1]["role"] if messages else None
    if answers == "required" and last != "assistant":
        problem = f"a {last} turn" if last else "none"
        raise InputError(f"{where}: {field}: expected an assistant turn at the end, found {problem}")
    if answers == "dropped" or last != "assistant":
        while messages and messages[-1]["role"] not in ASKING:
            messages.pop()
    if all(message["role"] != "user" for message in messages):
        raise InputError(f"{where}: {field}: expected a user turn, found none")
    return messages


def read_records(source: str, split: str) -> Iterator[Located]:
    """Return the records of a file, a directory or a hub id, `NAME` or `NAME:CONFIG`."""
    path = Path(source)
    readers: dict[str, Callable[[Path], Iterator[Located]]] = {
        ".jsonl": _jsonl,
        ".json": _json,
        ".txt": lambda path: ((where, {"prompt": line}) for where, line in _lines(path) if line.strip()),
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
    # Split bytes, not text: str.splitlines also cuts at U+2028, which JSON allows inside a string.
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        where = f"{path}:{number}"
        try:
            yield where, line.removesuffix(b"\r").decode("utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"{where}: expected UTF-8, found byte 0x{line[error.start]:02x}") from error


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
    import datasets  # takes most of a second, which a prompt from the command line should not wait for

    try:
        dataset = datasets.load_dataset(name, config or None, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise InputError(
            f"{source}: expected a file, a directory or a data set with split {split!r}, found: {first_line(error)}"
        ) from error
    return _rows(map(_without_nulls, dataset), f"{source}[{split}]")


def _without_nulls(value: Any, in_tools: bool = False) -> Any:
    """Return a row without null keys in its tools and calls: Arrow gives each object the keys of all rows."""
    if isinstance(value, dict):
        return {
            name: _without_nulls(item, in_tools or name in ("tools", "tool_calls", "functions"))
            for name, item in value.items()
            if not in_tools or item is not None
        }
    return [_without_nulls(item, in_tools) for item in value] if isinstance(value, list) else value


def _rows(rows: Iterable[Any], source: str) -> Iterator[Located]:
    return ((f"{source}: row {number}", row) for number, row in enumerate(rows, start=1))
