"""Prompts, their token ids by the target's chat template, and the masks of their answers."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from draftsmith.decode.draft_models.vocabulary import require_logits
from draftsmith.decode.errors import InputError
from draftsmith.decode.progress import track
from draftsmith.train.data.chat.masks import (
    ClosingTokens,
    MaskedConversation,
    mask_contexts,
    mask_plain,
    served_conversation,
)
from draftsmith.train.data.chat.messages import Message, with_parts
from draftsmith.train.data.chat.templates import (
    chat_request,
    encode_plain,
    for_template,
    read_variables,
    require_no_template,
    trim_to,
)
from draftsmith.train.endpoint.request_logs import CUT
from draftsmith.train.job.processes import is_first

SERVED = ("prompt_token_ids", "token_ids")
ALL_TURNS = "prompts.jsonl"  # the file of all turns, each after the answers before it, as prompts for other commands

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
    cut: bool = False  # whether nothing says that the target ended its answer
    stop: int | None = None  # the token that ended its answer, if the server named it
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
        content: dict[str, Any] = {"prompt": self.text}
        if self.messages is not None:
            content = {"messages": [with_parts(message) for message in self.messages]}
        content |= {} if self.answer is None else {"continuation": self.answer}
        content |= {} if self.tools is None else {"tools": self.tools}
        content |= {"chat_template_kwargs": dict(self.variables)} if self.variables else {}
        content |= {} if self.category is None else {"category": self.category}
        content |= {} if self.served is None else dict(zip(SERVED, self.served, strict=True))
        content |= {} if self.stop is None else {"stop_reason": self.stop}
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
    that the tokenizer adds before it, unless it begins with them.

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
        ids = encode_plain(tokenizer, plain)
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
