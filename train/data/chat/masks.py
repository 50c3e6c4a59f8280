"""Loss masks: which tokens of a conversation the assistant wrote, so that a draft learns to write them.

First, the text of each assistant turn is located:

* with `{% generation %}` markers in the chat template, it is the text between them, without the generation prompt;
* without markers, or if they do not enclose the turns, renderings are compared: the conversation up to a turn, with the
  generation prompt, must begin the conversation with that turn. The turn is what follows, as far as the whole
  conversation agrees.

A turn is learned only if all that the assistant wrote (reasoning, text, calls) is in it, whitespace aside. Many
templates rewrite earlier turns (Qwen3's drops their reasoning). The target reads such text but does not write it, so
those turns get the mask 0 and a reason. If it is the last turn, the sample is refused.

Then, its tokens are chosen. A token counts if all of its text is in the turn, so that one joined across the border does
not. The turn ends with the first special token (`<|im_end|>`, `</s>`, …; or else another added one) after the
assistant's text. That token counts, because it ends an answer at inference, even if a marker closes just before it; the
template's text after it (mostly a newline) never counts. If a template ends turns without such a token, the whole turn
counts except the whitespace after it.

`apply_chat_template(return_assistant_tokens_mask=True)` is not used. It asks each character for its token, and
whitespace has none where a tokenizer trims its offsets, as GPT-2's and Llama 3's do. Then an answer that begins with a
space empties the mask of the whole sample, and one that ends with a newline extends it over all that follows. Markers
inside a macro give wrong spans. Both were seen in transformers 5.23.
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
LATER = "the chat template writes them differently later in the conversation"
ELSEWHERE = "the chat template does not continue its generation prompt"
UNASKED = "no message comes before them"
UNWEIGHTED = "their weight in the record is 0"
UNTEMPLATED = "without a chat template the user's turns and the last answer are plain text"


@dataclass(frozen=True)
class MaskedConversation:
    """A conversation's T tokens, and which of them count in the loss.

    `mask` is 1 for tokens that the assistant wrote, not shifted to the predictions. `left_out` has the reasons why
    assistant messages are not learned, by their index.
    """

    ids: list[int]
    mask: list[int]
    left_out: dict[int, str]


@dataclass(frozen=True)
class ClosingTokens:
    """The tokens of a tokenizer that may end a turn: special ones first, then all added ones except whitespace.

    Make it once for many conversations: a tokenizer builds its thousands of added tokens again at each call.
    """

    special: frozenset[int]
    added: frozenset[int]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> "ClosingTokens":
        """Return a tokenizer's closing tokens."""
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
    """Encode a whole conversation, which ends with the assistant's message, and mask the assistant's tokens.

    Without a chat template a conversation is plain text, as in `encode_prompt`: the user's turns, the last answer
    directly after them, and a token that ends the target's texts.

    `name` and `place` begin error messages. `closing` is looked up if None. `ends` are the tokens that end the target's
    texts, the tokenizer's own if there are none. The mask may be 0 everywhere, for an empty answer in a template that
    ends turns without a token.

    Raises:
        InputError: the chat template refuses the conversation, omits one of its fields, or rewrites the last turn.
    """
    name = f"sample {name!r}"
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns or turns[-1] != len(messages) - 1:
        ending = f"a {messages[-1]['role']} turn" if messages else "no messages"
        raise InputError(f"{place}{name}: expected an assistant turn at the end, found {ending}")
    variables = variables or {}
    if tokenizer.chat_template is None:
        require_no_template("none in the target's tokenizer", place, system_prompt, variables, tools, messages)
        return _plain(messages, turns, tokenizer, ends)
    record_length = len(messages)
    template, messages = for_template(messages, tokenizer, name, place, system_prompt, variables, tools, answer=False)
    added_turns = len(messages) - record_length
    turns = [turn + added_turns for turn in turns]
    text, located, left_out = _locate(messages, turns, template)
    encoded = _Encoded(text, lambda part: encode_rendered(tokenizer, part))
    closing = ClosingTokens.of(tokenizer) if closing is None else closing
    mask, closed_by = [0] * len(encoded.ids), {tokenizer.eos_token_id, *ends}
    # From the last turn to the first: its closing token is found anywhere after its text, and then also closes earlier
    # turns whose markers exclude it.
    for i in sorted(located, reverse=True):
        begin, end, text_end = located[i]
        first, stop = encoded.first_from(begin), encoded.count_until(end)
        tail = range(encoded.count_until(text_end), len(mask) if i == turns[-1] else stop)
        last = next((k for tokens in (closing.special, closing.added) for k in tail if encoded.ids[k] in tokens), None)
        if last is None and stop < len(mask) and encoded.ids[stop] in closed_by:
            last = stop
        if last is not None:
            closed_by.add(encoded.ids[last])
            stop = last + 1
        else:
            stop = encoded.count_until(max(text_end, begin + len(text[begin:end].rstrip())))
        if messages[i].get("weight") == 0:
            left_out[i] = UNWEIGHTED
        else:
            mask[first:stop] = [1] * max(stop - first, 0)
    return MaskedConversation(encoded.ids, mask, {turn - added_turns: reason for turn, reason in left_out.items()})


def has_generation_markers(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the chat template marks the assistant's text by `{% generation %}`."""
    return tokenizer.chat_template is not None and MARKER.search(tokenizer.get_chat_template()) is not None


class _Turn(NamedTuple):
    """The characters of an assistant's turn in a text; its own text ends at `text_end`, the template's may continue."""

    begin: int
    end: int
    text_end: int


class _Encoded:
    """A text and its ids, and which ids are wholly inside a part of it.

    Borders are found by encoding the text on one side, since many tokenizers trim offsets or give none.
    """

    def __init__(self, text: str, encode: Callable[[str], list[int]]):
        self.text, self._encode, self.ids = text, encode, encode(text)

    def count_until(self, end: int) -> int:
        """Return the number of ids wholly before a character."""
        return common_length(self.ids, self._encode(self.text[:end]))

    def first_from(self, start: int) -> int:
        """Return the index of the first id wholly at or after a character."""
        before = self._encode(self.text[:start])
        if self.ids[: len(before)] == before:
            return len(before)
        return len(self.ids) - common_length(self.ids[::-1], self._encode(self.text[start:])[::-1])


def _locate(
    messages: Sequence[Message], turns: list[int], template: ChatTemplate
) -> tuple[str, dict[int, _Turn], dict[int, str]]:
    """Return the text, where the assistant's turns are in it, and the reasons why some are left out."""
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
        # Not all of `after`: some templates end a conversation with a token that a longer one does not have there.
        common = len(after) if text.startswith(after) else common_length(text, after)
        prompt_start, closing = common_length(before, template.render(messages[:i])[0]), _closing(messages, i, template)
        if _turn(after, len(before), len(after), messages[i], closing, prompt_start) is None:
            left_out[i] = REWRITTEN
        elif (turn := _turn(text, len(before), common, messages[i], closing, prompt_start)) is None:
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
    """Return where turn i begins after the generation prompt; None if the text does not continue that prompt.

    `begin` is where the marked turn begins in the conversation's text.
    """
    before = template.render(messages[: max(i, 1)], answer=True)[0]
    if i:
        return len(before) if text.startswith(before) else None
    prompt = before[len(template.render(messages[:1])[0]) :]
    return begin + len(prompt) if text.startswith(prompt, begin) else begin


def _closing(messages: Sequence[Message], i: int, template: ChatTemplate) -> int:
    """Return where the template closes turn i if it calls a tool, the same way as it closes a text; otherwise 0.

    The tokens around a call are the assistant's, and may end with special ones of their own.
    """
    if "tool_calls" not in messages[i]:
        return 0
    with_call = template.render(messages[: i + 1])[0]
    with_text = template.render([*messages[:i], {"role": "assistant", "content": "x"}])[0]
    return len(with_call) - common_length(with_call[::-1], with_text[::-1])  # the common ending is the template's


def _turn(text: str, begin: int, end: int, message: Message, closing: int, prompt_start: int) -> _Turn | None:
    """Return the turn if all that the assistant wrote is in it, else None.

    Its beginning may be in the generation prompt, from `prompt_start` on: some templates open the reasoning there.
    """
    for start in (begin, prompt_start):
        length = _end_of_message(text[start:end], message)
        if length is not None and begin <= start + length and begin <= end:
            return _Turn(begin, end, min(max(start + length, closing), end))
    return None


def _end_of_message(turn: str, message: Message) -> int | None:
    """Return the index after the assistant's text, compared without whitespace; None if the text is not in the turn."""
    positions = [i for i, character in enumerate(turn) if not character.isspace()]
    visible, at, end = "".join(turn[i] for i in positions), 0, 0
    calls = [function_of(call)["name"] for call in message.get("tool_calls", ())]
    for text in [*(message[name] for name in REASONING if name in message), message["content"], *calls]:
        sought, trailing = "".join(text.split()), text[len(text.rstrip()) :]
        place = visible.find(sought, at)
        if place < 0:  # a template may write the parts in another order
            place = visible.find(sought)
        if place < 0:
            return None
        at = max(at, place + len(sought))
        end = max(end, positions[at - 1] + 1 if sought else 0)
        end += len(trailing) if turn.startswith(trailing, end) else 0
    return end


def _departure(before: str, after: str, tokenizer: PreTrainedTokenizerBase) -> str:
    prompt_ids, ids = encode_rendered(tokenizer, before), encode_rendered(tokenizer, after)
    at = common_length(prompt_ids, ids)
    prompt, conversation = (tokenizer.decode(part[at : at + 8]) for part in (prompt_ids, ids))
    return f"the ids depart at token {at}, {prompt!r} in the generation prompt and {conversation!r} in the conversation"


def common_length(a: Sequence[object], b: Sequence[object]) -> int:
    """Return the length of the longest common prefix of two sequences of ids or characters."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
