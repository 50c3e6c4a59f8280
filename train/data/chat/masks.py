"""Loss masks: which tokens of a conversation the assistant wrote, and so a draft has to write in its place.

Two steps. First, which stretch of the rendered text is an assistant's turn:

* where the chat template has `{% generation %}` markers, the text between them without what the generation prompt
  writes;
* where it has none, or they do not enclose the turns, renderings are compared: the conversation up to a turn, with the
  generation prompt, must begin the conversation with that turn; the turn is what follows, as far as the whole
  conversation agrees.

A turn is learned from only if all that the assistant wrote (reasoning, text, calls) stands there, whitespace aside.
Many templates rewrite earlier turns (Qwen3's takes the thinking out of them): such text is what the target reads but
not what it writes, so those turns get the mask 0 and a reason. Where that is the last turn, the sample is refused.

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
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from draftsmith.decode.errors import InputError
from draftsmith.train.data.chat.messages import REASONING, Message, function_of
from draftsmith.train.data.chat.templates import (
    ChatTemplate,
    Tools,
    encode_rendered,
    for_template,
    require_no_template,
)

MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
REWRITTEN = "the chat template leaves out some of what the assistant wrote"
LATER = "the chat template writes them otherwise once the conversation goes on"
ELSEWHERE = "the chat template does not go on from its generation prompt"
UNASKED = "nothing stands before them that they could answer"
UNWEIGHTED = "their weight in the record is 0"
UNTEMPLATED = "without a chat template the user's turns and the last answer are plain text"


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
    tools: Tools | None = None,
    place: str = "",
) -> MaskedConversation:
    """Encode a whole conversation, and mask what the assistant wrote.

    Without a chat template a conversation is plain text, as in `encode_prompt`: the user's turns, the last answer right
    behind them, and a token that ends the target's texts.

    Args:
        messages: the conversation, as `read_messages` returns it, the last of them the assistant's.
        tokenizer: the target's tokenizer.
        name: the sample's name in error messages.
        closing: the tokenizer's; looked up if None.
        system_prompt: begins a conversation without a system turn.
        variables: of the chat template.
        ends: the tokens that end the target's texts; the tokenizer's own if there are none.
        tools: that the assistant may call.
        place: where the sample stands, to begin messages of errors with.

    Returns:
        Its ids and their mask, which may be 0 everywhere: of an empty answer by a template that ends turns without a
        token.

    Raises:
        InputError: names the sample whose last message is not the assistant's, that the chat template refuses or
            writes without one of its fields, or whose last turn the template rewrites, and where the ids depart.
    """
    name = f"sample {name!r}"
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns or turns[-1] != len(messages) - 1:
        found = f"a {messages[-1]['role']} turn" if messages else "no messages"
        raise InputError(f"{place}{name}: expected an assistant turn at the end, found {found}")
    variables = variables or {}
    if tokenizer.chat_template is None:
        require_no_template("none in the target's tokenizer", place, system_prompt, variables, tools, messages)
        return _plain(messages, turns, tokenizer, ends)
    given = len(messages)
    template, messages = for_template(messages, tokenizer, name, place, system_prompt, variables, tools, answer=False)
    added_turns = len(messages) - given
    turns = [turn + added_turns for turn in turns]
    text, located, left_out = _locate(messages, turns, template)
    encoded = _Encoded(text, lambda part: encode_rendered(tokenizer, part))
    closing = ClosingTokens.of(tokenizer) if closing is None else closing
    mask, closed_by = [0] * len(encoded.ids), {tokenizer.eos_token_id, *ends}
    for i in sorted(located, reverse=True):  # the last first: what ends it may stand behind the others' markers too
        begin, end, behind = located[i]
        first, stop = encoded.first_from(begin), encoded.count_until(end)
        tail = range(encoded.count_until(behind), len(mask) if i == turns[-1] else stop)
        last = next((k for among in (closing.special, closing.added) for k in tail if encoded.ids[k] in among), None)
        if last is None and stop < len(mask) and encoded.ids[stop] in closed_by:
            last = stop
        if last is not None:
            closed_by.add(encoded.ids[last])
            stop = last + 1
        else:
            stop = encoded.count_until(max(behind, begin + len(text[begin:end].rstrip())))
        if messages[i].get("weight") == 0:
            left_out[i] = UNWEIGHTED
        else:
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
    messages: Sequence[Message], turns: list[int], template: ChatTemplate
) -> tuple[str, dict[int, _Turn], dict[int, str]]:
    """Return the text, where the assistant's turns lie in it, and why some are left out."""
    marked = MARKER.search(template.source) is not None
    text, spans = template.render(messages, marked=marked)
    if marked and len(spans) == len(turns):
        located, left_out = dict[int, _Turn](), dict[int, str]()
        for i, (begin, end) in zip(turns, spans, strict=True):
            prompt_end = _prompt_end(messages, i, template, text, begin)
            if prompt_end is None:
                left_out[i] = LATER
            elif turn := _turn(text, max(begin, prompt_end), end, messages[i], _closing(messages, i, template), begin):
                located[i] = turn
            else:
                left_out[i] = REWRITTEN
        if turns[-1] in located:
            return text, located, left_out
    located, left_out = {}, {}
    for i in turns:
        if not i:
            left_out[i] = UNASKED
            continue
        before = template.render(messages[:i], answer=True)[0]
        after = template.render(messages[: i + 1])[0]
        if not after.startswith(before):
            left_out[i] = _departure(before, after, template.tokenizer) if i == turns[-1] else ELSEWHERE
            continue
        # Not all of `after`: some templates end a conversation with a token that is not there when it goes on.
        common = len(after) if text.startswith(after) else _common(text, after)
        asked, closing = _common(before, template.render(messages[:i])[0]), _closing(messages, i, template)
        if _turn(after, len(before), len(after), messages[i], closing, asked) is None:
            left_out[i] = REWRITTEN
        elif (turn := _turn(text, len(before), common, messages[i], closing, asked)) is None:
            left_out[i] = LATER
        else:
            located[i] = turn
    if turns[-1] not in located:
        raise InputError(
            f"{template.name}: expected a chat template that writes the last answer as the assistant did, found: "
            f"{left_out[turns[-1]]} (message {turns[-1]}); take another template, or answers without what it drops"
        )
    return text, located, left_out


def _plain(
    messages: Sequence[Message], turns: list[int], tokenizer: PreTrainedTokenizerBase, ends: Sequence[int]
) -> MaskedConversation:
    question = "\n\n".join(message["content"] for message in messages if message["role"] == "user")
    encoded = _Encoded(question + messages[-1]["content"], lambda part: list(tokenizer(part, verbose=False).input_ids))
    ids, first = encoded.ids, encoded.first_from(len(question))
    usual = tokenizer.eos_token_id if tokenizer.eos_token_id in ends or not ends else ends[0]
    if usual is not None and not {usual, *ends} & set(ids[-1:]):
        ids = [*ids, usual]
    weight, left_out = messages[-1].get("weight", 1), dict.fromkeys(turns[:-1], UNTEMPLATED)
    left_out |= {} if weight else {turns[-1]: UNWEIGHTED}
    return MaskedConversation(ids, [0] * first + [weight] * (len(ids) - first), left_out)


def _prompt_end(messages: Sequence[Message], i: int, template: ChatTemplate, text: str, begin: int) -> int | None:
    """Return where a turn begins after what the generation prompt writes; None where the text goes on otherwise.

    Args:
        messages: the conversation.
        i: the turn.
        template: writes it.
        text: the conversation's.
        begin: where the marked turn begins.
    """
    before = template.render(messages[: max(i, 1)], answer=True)[0]
    if i:
        return len(before) if text.startswith(before) else None
    prompt = before[len(template.render(messages[:1])[0]) :]
    return begin + len(prompt) if text.startswith(prompt, begin) else begin


def _closing(messages: Sequence[Message], i: int, template: ChatTemplate) -> int:
    """Return where the template closes a turn that calls a tool, as it closes one of text; 0 of other turns.

    What encloses a call is the assistant's, and may end with special tokens of its own.
    """
    if "tool_calls" not in messages[i]:
        return 0
    called = template.render(messages[: i + 1])[0]
    told = template.render([*messages[:i], {"role": "assistant", "content": "x"}])[0]
    return len(called) - _common(called[::-1], told[::-1])


def _turn(text: str, begin: int, end: int, message: Message, closing: int, asked: int) -> _Turn | None:
    """Return the turn if all that the assistant wrote stands there, else None.

    Its beginning may be in the generation prompt, from `asked` on: some open the thinking for the assistant.
    """
    for start in (begin, asked):
        behind = _end_of_message(text[start:end], message)
        if behind is not None and begin <= start + behind and begin <= end:
            return _Turn(begin, end, min(max(start + behind, closing), end))
    return None


def _end_of_message(turn: str, message: Message) -> int | None:
    """Return the index behind what the assistant wrote, in which whitespace may differ; None where it is not there."""
    positions = [i for i, character in enumerate(turn) if not character.isspace()]
    visible, at, end = "".join(turn[i] for i in positions), 0, 0
    calls = [function_of(call)["name"] for call in message.get("tool_calls", ())]
    for text in [*(message[name] for name in REASONING if name in message), message["content"], *calls]:
        wanted, trailing = "".join(text.split()), text[len(text.rstrip()) :]
        place = visible.find(wanted, at)
        if place < 0:  # a template may write them in another order
            place = visible.find(wanted)
        if place < 0:
            return None
        at = max(at, place + len(wanted))
        end = max(end, positions[at - 1] + 1 if wanted else 0)
        end += len(trailing) if turn.startswith(trailing, end) else 0
    return end


def _departure(before: str, after: str, tokenizer: PreTrainedTokenizerBase) -> str:
    asked, told = encode_rendered(tokenizer, before), encode_rendered(tokenizer, after)
    at = _common(asked, told)
    prompt, conversation = (tokenizer.decode(ids[at : at + 8]) for ids in (asked, told))
    return f"the ids depart at token {at}, {prompt!r} in the generation prompt and {conversation!r} in the conversation"


def _common(a: Sequence[object], b: Sequence[object]) -> int:
    """Return how many ids, or characters, two sequences begin with in common."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
