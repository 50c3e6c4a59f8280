"""Prompts as records, and their token ids by the target's chat template.

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

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import islice
from typing import Any, Literal, TypeVar

from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from draftsmith.decode.draft_models.vocabulary import require_logits
from draftsmith.decode.errors import InputError, at_least
from draftsmith.decode.progress import track
from draftsmith.decode.validation import TokenId, validate
from draftsmith.train.data.chat.masks import (
    ClosingTokens,
    MaskedConversation,
    mask_contexts,
    mask_plain,
    served_conversation,
)
from draftsmith.train.data.chat.messages import ASKING, MEDIA, Message, kind, read_messages, read_tools, text
from draftsmith.train.data.chat.templates import (
    chat_request,
    for_template,
    read_variables,
    require_no_template,
    trim_to,
)
from draftsmith.train.data.prompt_files import read_records
from draftsmith.train.endpoint.request_logs import CUT, conversation, has_answer, is_logged
from draftsmith.train.job.processes import is_first

FIELDS = ("prompt", "messages", "conversations", "turns")
ANSWERS = ("completion", "response")  # the fields that may answer a `prompt`
CONTINUATION = "continuation"  # the field that continues a `prompt` in plain text
SERVED = ("prompt_token_ids", "token_ids")
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
ALL_TURNS = "prompts.jsonl"  # the file of all turns, each after the answers before it, as prompts for other commands

AnswersMode = Literal["dropped", "kept", "required"]
Item = TypeVar("Item")
Value = TypeVar("Value")
logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class Prompt:
    """A prompt: either plain text or a conversation, which ends where the target answers or with a kept answer."""

    id: str
    text: str | None
    messages: list[Message] | None
    category: str | None
    answer: str | None = None  # how plain text continues, if that was read
    cut: bool = False  # whether its answer was cut at a length
    later: tuple[str, ...] = ()  # the user's later turns, if they were asked for
    where: str | None = field(default=None, compare=False)  # its place, such as `prompts.jsonl:7`, if it was read
    tools: list[dict[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Chat template variables of this conversation, which override those of a command."""
    served: tuple[list[int], list[int]] | None = None
    """The ids of prompt and answer as a server read and wrote them, if they are known."""

    @property
    def place(self) -> str:
        """The beginning of error messages: the place, if known."""
        return "" if self.where is None else f"{self.where}: "

    @property
    def has_answer(self) -> bool:
        """Whether it ends with an answer."""
        return self.answer is not None or (self.messages or [{}])[-1].get("role") == "assistant"

    def read_variables(self, tokenizer: PreTrainedTokenizerBase) -> Mapping[str, Any]:
        """Return the variables that the tokenizer's chat template reads, or all of them without a template."""
        if tokenizer.chat_template is None or self.messages is None:
            return self.variables
        return read_variables(tokenizer, self.tools, self.variables)

    def record(self) -> dict[str, Any]:
        """Return a record that `read_prompts` reads, without an id."""
        content: dict[str, Any] = {"prompt": self.text} if self.messages is None else {"messages": self.messages}
        content |= {} if self.answer is None else {"continuation": self.answer}
        content |= {} if self.tools is None else {"tools": self.tools}
        content |= {"chat_template_kwargs": dict(self.variables)} if self.variables else {}
        content |= {} if self.category is None else {"category": self.category}
        content |= {} if self.served is None else dict(zip(SERVED, self.served, strict=True))
        return content | ({"finish_reason": CUT} if self.cut else {})

    def request(self, system_prompt: str | None, variables: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of a request to a server that renders conversations itself."""
        variables = {**variables, **self.variables}
        if self.messages is not None:
            return chat_request(self.messages, system_prompt, variables, self.tools)
        require_no_template(f"prompt {self.id!r} in plain text", self.place, system_prompt, variables, self.tools)
        return {"prompt": self.text}

    def require_logits(self, ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
        """Raise an InputError if a token is above all of a model's logits."""
        require_logits(ids, tokenizer, vocab_size, f"{self.place}prompt {self.id!r}")

    def turn_record(self, number: int) -> dict[str, Any]:
        """Return the prompt as a record of turn `number`."""
        return {"id": f"{self.id}.{number}"} | self.record()

    def next_turn(self, answer: str, templated: bool) -> "Prompt":
        """Return the prompt of the next turn, after the target's answer.

        Without a chat template, the turns and answers become plain text with blank lines between them.
        """
        turn, *later = self.later
        if templated:
            exchange = [{"role": "assistant", "content": answer}, {"role": "user", "content": turn}]
            return replace(self, messages=[*(self.messages or []), *exchange], later=tuple(later))
        before = self.text if self.text is not None else (self.messages or [])[-1]["content"]
        return replace(self, text=f"{before}\n\n{answer}\n\n{turn}", messages=None, later=tuple(later))


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
        source: a `.jsonl` file (one record per line), `.json` (an array of records), `.parquet`, `.txt` or `.md` (one
            prompt per line, empty lines skipped); or a directory or hub id for `datasets.load_dataset`.
        split: the split of a directory or hub id.
        limit: read only the first `limit` prompts.
        answers: "dropped": conversations end with their last user turn. "required": they end with an assistant turn,
            and a `prompt` comes with a `completion` or `response`, both strings or both lists of messages. "kept": as
            "required" if there is an answer, otherwise as "dropped".
        later: keep the later ones of `turns` too.
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
        return replace(prompt, cut=record.get("finish_reason") == CUT, where=where, served=served)

    rows = list(islice(read_records(source, split), limit))
    if not rows:
        raise InputError(f"{source}: expected prompts, found none")
    positions = {where: position for position, (where, _) in enumerate(rows)}
    # The ids of all records come first, since records without one are named around them.
    entries = [(positions[where], where, *entry) for (where, _), entry in usable(rows, named, invalid)]
    return [prompt for _, prompt in usable(entries, parsed, invalid)]


def usable(
    items: Collection[Item], read: Callable[[Item], Value], invalid: str, title: str = "records"
) -> list[tuple[Item, Value]]:
    """Return items with what `read` makes of them; with `invalid` "skip", without those for which it raises InputError.

    A warning counts and names those, and it is an error if none are left.
    """
    results, errors = list[tuple[Item, Value]](), list[InputError]()
    for item in track(items, title, "texts"):
        try:
            results.append((item, read(item)))
        except InputError as error:
            if invalid == "refuse":
                raise
            errors.append(error)
    if errors and not results:
        raise InputError(f"{errors[0]}; with it all {len(errors)} {title} are skipped")
    if errors and is_first():
        rest = f"; then {', '.join(str(error).split(': ')[0] for error in errors[1:6])}" if errors[1:] else ""
        more = ", …" if errors[6:] else ""
        logger.warning("%d of %d %s are skipped: %s%s%s", len(errors), len(items), title, errors[0], rest, more)
    return results


def encode_prompts(
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int | None,
    invalid: str = "refuse",
    **encoding: Any,
) -> tuple[list[Prompt], list[list[int]]]:
    """Return the prompts that can be encoded, and their token ids, as `encode_prompt` returns them."""
    counted = partial(encode_prompt, tokenizer=tokenizer, vocab_size=vocab_size, **encoding)
    encoded = usable(prompts, counted, invalid, "prompts")
    return [prompt for prompt, _ in encoded], [ids for _, ids in encoded]


def encode_prompt(
    prompt: Prompt,
    tokenizer: PreTrainedTokenizerBase,
    *,
    vocab_size: int | None = None,
    max_tokens: int | None = None,
    system_prompt: str | None = None,
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    """Encode a prompt as the target reads it, up to where its answer begins; at least one token.

    A conversation goes through the tokenizer's chat template, with the generation prompt and no other special tokens.
    Without a template, its user turns are joined by blank lines into plain text. Plain text gets the special tokens
    that the tokenizer adds.

    If a prompt is longer than `max_tokens`, plain text keeps its last tokens. A templated conversation loses the oldest
    user's text from the left, then that turn and its answer, and so on; system turns and the template's own text stay.
    `system_prompt` begins a conversation that has no system turn. With `vocab_size`, the target's number of logits, the
    ids are checked against it.

    Raises:
        InputError: the prompt has no tokens or an id without a logit; its template refuses it, omits one of its fields,
            or is longer than `max_tokens` alone; or there is no template for a system prompt, variables or tools.
    """
    name, variables = f"prompt {prompt.id!r}", {**(variables or {}), **prompt.read_variables(tokenizer)}
    if prompt.messages is not None and tokenizer.chat_template is not None:
        template, messages = for_template(
            prompt.messages, tokenizer, name, prompt.place, system_prompt, variables, prompt.tools, answer=True
        )
        ids = template.ids(messages) if max_tokens is None else trim_to(messages, template, max_tokens)
    else:
        problem = f"{name} in plain text" if prompt.messages is None else "none in the target's tokenizer"
        messages = prompt.messages or []
        require_no_template(problem, prompt.place, system_prompt, variables, prompt.tools, messages)
        turns = [message["content"] for message in messages if message["role"] == "user"]
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
    whole: bool = True,
) -> list[MaskedConversation]:
    """Encode a conversation that ends with its answer, and mask the assistant's tokens, as `mask_contexts` does.

    If a server's ids are known and spell the texts, they are the one sample, and the answer counts. Plain text and its
    answer are encoded without the chat template.
    """
    plain, answer = str(conversation.text), str(conversation.answer)
    if conversation.served is not None:
        prompt_ids, ids = conversation.served
        known = max([*prompt_ids, *ids]) < vocab_size
        talk = conversation.messages or [{"role": "user", "content": plain}, {"role": "assistant", "content": answer}]
        served = served_conversation(talk, prompt_ids, ids, tokenizer) if known else None
        if served is not None:
            return [served]
        _warn_respelled()
    if conversation.messages is None:
        masked = mask_plain(plain, answer, tokenizer, ends)
        conversation.require_logits(masked.ids, tokenizer, vocab_size)
        return [masked]
    contexts = mask_contexts(
        conversation.messages,
        tokenizer,
        conversation.id,
        closing=closing,
        ends=ends,
        system_prompt=system_prompt,
        variables={**(variables or {}), **conversation.read_variables(tokenizer)},
        tools=conversation.tools,
        place=conversation.place,
        whole=whole,
    )
    conversation.require_logits(contexts[-1].ids, tokenizer, vocab_size)
    return contexts


def answer_texts(
    samples: Sequence[Mapping[str, Any]], number: int, tokenizer: PreTrainedTokenizerBase
) -> dict[str, str]:
    """Return the answers to turn `number` by record id, as text without the tokens that begin, end and pad it.

    Other special tokens stay, because chat templates look for those around reasoning and tool calls.
    """
    end, answers = len(f".{number}"), dict[str, str]()
    outer = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
    for sample in samples:
        ids = sample["input_ids"][sample["prompt_length"] :]
        ended = ids[:-1] if sample["finish_reason"] == "stop" else ids
        written = [token for token in ended if token not in outer]
        answers[sample["id"][:-end]] = str(tokenizer.decode(written, clean_up_tokenization_spaces=False))
    return answers


@lru_cache
def _warn_respelled() -> None:
    """Warn once that ids are left out."""
    logger.warning("token_ids: left out of some records, since they do not spell the texts, which are encoded instead")


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
