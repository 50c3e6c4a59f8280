"""Loss masks: which tokens of a conversation the assistant wrote, and so a draft has to write in its place.

Two steps. First, which stretch of the rendered text is an assistant's turn:

* where the chat template has `{% generation %}` markers, the text between them;
* where it has none, or they do not enclose the turns, renderings are compared: the conversation up to a turn, with the
  generation prompt, must begin the conversation with that turn; the turn is what follows, as far as the whole
  conversation agrees.

A turn is learned from only if all that the assistant wrote stands there, whitespace aside. Many templates rewrite what
lies behind (Qwen3's takes the thinking out of earlier turns): such text is what the target reads but not what it
writes, so those turns get the mask 0 and a reason. Where that is the last turn, the sample is refused.

Then, which tokens. A token is the assistant's if all of its text is: one that a tokenizer joins across the border is
not learned from. The turn ends with the first special token (`<|im_end|>`, `</s>`, …; else another added one) behind
what the assistant wrote. It counts, because at inference it ends the answer; a marker that closes just before it makes
no difference, and what the template writes behind it (a newline, mostly) never counts. Of a template that ends turns
without such a token, all of the turn counts but the whitespace behind it, which is there to separate the turns.

`apply_chat_template(return_assistant_tokens_mask=True)` is not used, because it asks each character for its token, and
those of whitespace have none where a tokenizer trims its offsets, as GPT-2's and Llama 3's do: an answer that begins
with a space then empties the mask of the whole sample, and one that ends with a newline extends it over all that
follows. Around markers inside a macro its spans lie elsewhere. Both were seen in transformers 5.23.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from draftsmith.decode.errors import InputError
from draftsmith.train.checkpoint import reading
from draftsmith.train.data.chat.templates import for_template, require_no_template

MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
REWRITTEN = "the chat template leaves out some of what the assistant wrote"
LATER = "the chat template writes them otherwise once the conversation goes on"
ELSEWHERE = "the chat template does not go on from its generation prompt"
UNASKED = "nothing stands before them that they could answer"
UNTEMPLATED = "without a chat template the user's turns and the last answer are plain text"

Message = Mapping[str, str]
_Renderer = Callable[..., tuple[str, list[tuple[int, int]]]]


@dataclass(frozen=True)
class MaskedConversation:
    """A conversation's tokens, and which of them count in the loss."""

    ids: list[int]
    """Its T token ids."""
    mask: list[int]
    """T times 1, where the assistant wrote the token itself, or 0. Predictions are shifted where the loss is taken."""
    left_out: dict[int, str]
    """The assistant's messages that are not learned from, by their index, and why."""


@dataclass(frozen=True)
class ClosingTokens:
    """The tokens of a tokenizer that may end a turn.

    To be made once for many conversations: a tokenizer makes its thousands of added tokens anew each time that it is
    asked for them.
    """

    special: frozenset[int]
    """The likelier ones."""
    added: frozenset[int]
    """All that were added to the tokenizer but those of whitespace."""

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> "ClosingTokens":
        """Return those of a tokenizer."""
        added = {token: entry for token, entry in tokenizer.added_tokens_decoder.items() if entry.content.strip()}
        special = {token for token, entry in added.items() if entry.special}
        return cls(frozenset(special.union(tokenizer.all_special_ids)), frozenset(added))


def mask_conversation(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    *,
    closing: ClosingTokens | None = None,
    system_prompt: str | None = None,
    variables: Mapping[str, Any] | None = None,
    ends: Sequence[int] = (),
) -> MaskedConversation:
    """Encode a whole conversation, and mask what the assistant wrote.

    Without a chat template a conversation is plain text, as in `encode_prompt`: the user's turns, the last answer right
    behind them, and a token that ends the target's texts.

    Args:
        messages: the conversation, `{"role": …, "content": …}` each, the last of them the assistant's.
        tokenizer: the target's tokenizer.
        name: the sample's name in error messages.
        closing: the tokenizer's; looked up if None.
        system_prompt: begins a conversation without a system turn.
        variables: of the chat template.
        ends: the tokens that end the target's texts; the tokenizer's own if there are none.

    Returns:
        Its ids and their mask, which may be 0 everywhere: of an empty answer by a template that ends turns without a
        token.

    Raises:
        InputError: names the sample whose last message is not the assistant's, that the chat template refuses, or
            whose last turn the template rewrites, and where the ids depart.
    """
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns or turns[-1] != len(messages) - 1:
        found = f"a {messages[-1]['role']} turn" if messages else "no messages"
        raise InputError(f"sample {name!r}: expected an assistant turn at the end, found {found}")
    variables = variables or {}
    if tokenizer.chat_template is None:
        require_no_template("none in the target's tokenizer", system_prompt, variables)
        return _plain(messages, turns, tokenizer, ends)
    given, messages = len(messages), for_template(messages, tokenizer, f"sample {name!r}", system_prompt, variables)
    added_turns = len(messages) - given
    turns = [turn + added_turns for turn in turns]
    text, located, left_out = _locate(messages, turns, tokenizer, partial(_render, tokenizer, name, variables), name)
    encoded = _Encoded(text, lambda part: _encode(tokenizer, part))
    closing = ClosingTokens.of(tokenizer) if closing is None else closing
    mask, ends = [0] * len(encoded.ids), {tokenizer.eos_token_id}
    for i in sorted(located, reverse=True):  # the last first: what ends it may stand behind the others' markers too
        begin, end, behind = located[i]
        first, stop = encoded.first_from(begin), encoded.count_until(end)
        tail = range(encoded.count_until(behind), len(mask) if i == turns[-1] else stop)
        last = next((k for among in (closing.special, closing.added) for k in tail if encoded.ids[k] in among), None)
        if last is None and stop < len(mask) and encoded.ids[stop] in ends:
            last = stop
        if last is not None:
            ends.add(encoded.ids[last])
            stop = last + 1
        else:
            stop = encoded.count_until(max(behind, begin + len(text[begin:end].rstrip())))
        mask[first:stop] = [1] * max(stop - first, 0)
    return MaskedConversation(encoded.ids, mask, {turn - added_turns: why for turn, why in left_out.items()})


def has_generation_markers(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Say whether the chat template marks what the assistant wrote by `{% generation %}`."""
    return tokenizer.chat_template is not None and MARKER.search(tokenizer.get_chat_template()) is not None


class _Turn(NamedTuple):
    """Where the assistant's turn lies in a text."""

    begin: int
    end: int
    behind: int
    """Where what the assistant wrote ends; the template may go on."""


class _Encoded:
    """A text and its ids, and which ids lie wholly within a stretch of it.

    The borders come from encoding what lies on one side, since offsets are trimmed or missing in many tokenizers.
    """

    def __init__(self, text: str, encode: Callable[[str], list[int]]):
        self.text, self._encode, self.ids = text, encode, encode(text)

    def count_until(self, end: int) -> int:
        """Return how many ids lie wholly before a character."""
        return _common(self.ids, self._encode(self.text[:end]))

    def first_from(self, start: int) -> int:
        """Return the index of the first id that lies wholly behind a character."""
        before = self._encode(self.text[:start])
        if self.ids[: len(before)] == before:
            return len(before)
        return len(self.ids) - _common(self.ids[::-1], self._encode(self.text[start:])[::-1])


def _locate(
    messages: Sequence[Message], turns: list[int], tokenizer: PreTrainedTokenizerBase, render: _Renderer, name: str
) -> tuple[str, dict[int, _Turn], dict[int, str]]:
    """Return the text, where the assistant's turns lie in it, and why some are left out."""
    marked = has_generation_markers(tokenizer)
    text, spans = render(messages, marked=marked)
    if marked and len(spans) == len(turns):
        enclosed = ((i, _turn(text, *span, messages[i])) for i, span in zip(turns, spans, strict=True))
        located = {i: turn for i, turn in enclosed if turn is not None}
        if turns[-1] in located:
            return text, located, dict.fromkeys([i for i in turns if i not in located], REWRITTEN)
    located, left_out = {}, dict[int, str]()
    for i in turns:
        if not i:
            left_out[i] = UNASKED
            continue
        before = render(messages[:i], answer=True)[0]
        after = render(messages[: i + 1])[0]
        if not after.startswith(before):
            left_out[i] = _departure(before, after, tokenizer) if i == turns[-1] else ELSEWHERE
            continue
        # Not all of `after`: some templates end a conversation with a token that is not there when it goes on.
        common = len(after) if text.startswith(after) else _common(text, after)
        asked = _common(before, render(messages[:i])[0])
        if _turn(after, len(before), len(after), messages[i], asked) is None:
            left_out[i] = REWRITTEN
        elif (turn := _turn(text, len(before), common, messages[i], asked)) is None:
            left_out[i] = LATER
        else:
            located[i] = turn
    if turns[-1] not in located:
        raise InputError(
            f"sample {name!r}: expected a chat template that writes the last answer as the assistant did, found: "
            f"{left_out[turns[-1]]} (message {turns[-1]}); take another template, or answers without what it drops"
        )
    return text, located, left_out


def _render(
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    variables: Mapping[str, Any],
    messages: Sequence[Message],
    *,
    answer: bool = False,
    marked: bool = False,
) -> tuple[str, list[tuple[int, int]]]:
    """Return the text of the chat template, up to the answer to come where that is asked for, and the marked spans."""
    rendered: Any
    with reading(f"sample {name!r}", "messages that the chat template renders"):
        rendered = render_jinja_template(
            conversations=[[dict(message) for message in messages]],
            chat_template=tokenizer.get_chat_template(),
            add_generation_prompt=answer,
            return_assistant_tokens_mask=marked,
            **{**tokenizer.special_tokens_map, **variables},
        )
    (text,), spans = rendered
    return text, list(spans[0]) if marked else []


def _plain(
    messages: Sequence[Message], turns: list[int], tokenizer: PreTrainedTokenizerBase, ends: Sequence[int]
) -> MaskedConversation:
    question = "\n\n".join(message["content"] for message in messages if message["role"] == "user")
    encoded = _Encoded(question + messages[-1]["content"], lambda part: list(tokenizer(part, verbose=False).input_ids))
    ids, first = encoded.ids, encoded.first_from(len(question))
    usual = tokenizer.eos_token_id if tokenizer.eos_token_id in ends or not ends else ends[0]
    if usual is not None and not {usual, *ends} & set(ids[-1:]):
        ids = [*ids, usual]
    return MaskedConversation(ids, [0] * first + [1] * (len(ids) - first), dict.fromkeys(turns[:-1], UNTEMPLATED))


def _turn(text: str, begin: int, end: int, message: Message, asked: int | None = None) -> _Turn | None:
    """Return the turn if all that the assistant wrote stands there, else None.

    Its beginning may be in the generation prompt, from `asked` on: some open the thinking for the assistant.
    """
    for start in (begin, begin if asked is None else asked):
        behind = _end_of_content(text[start:end], message["content"])
        if behind is not None and begin <= start + behind and begin <= end:
            return _Turn(begin, end, start + behind)
    return None


def _end_of_content(turn: str, content: str) -> int | None:
    """Return the index behind what the assistant wrote, in which whitespace may differ; None where it is not there."""
    positions = [i for i, character in enumerate(turn) if not character.isspace()]
    wanted = "".join(content.split())
    at = "".join(turn[i] for i in positions).find(wanted)
    if at < 0:
        return None
    end, trailing = positions[at + len(wanted) - 1] + 1 if wanted else 0, content[len(content.rstrip()) :]
    return end + len(trailing) if turn.startswith(trailing, end) else end


def _departure(before: str, after: str, tokenizer: PreTrainedTokenizerBase) -> str:
    asked, told = _encode(tokenizer, before), _encode(tokenizer, after)
    at = _common(asked, told)
    prompt, conversation = (tokenizer.decode(ids[at : at + 8]) for ids in (asked, told))
    return f"the ids depart at token {at}, {prompt!r} in the generation prompt and {conversation!r} in the conversation"


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Encode as `apply_chat_template` does: the template writes the special tokens."""
    ids: Any = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    return list(ids)


def _common(a: Sequence[object], b: Sequence[object]) -> int:
    """Return how many ids, or characters, two sequences begin with in common."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
