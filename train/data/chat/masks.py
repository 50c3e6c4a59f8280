r"""Loss masks: which tokens of a conversation the assistant wrote, so that a draft learns to write them.

Each turn of the assistant is found on its own: the conversation up to the turn is rendered with the generation prompt,
as the server that wrote the turn saw it, and then with the turn. The ids of the first must begin those of the second.
Where the turn makes the template drop earlier thinking (gpt-oss, Kimi K2), the turn is rendered after a context without
thinking. What follows the generation prompt is the turn, up to the first end-of-text token of the target after the
assistant's text; if there is none, up to the first special token (`<|im_end|>`, `</s>`, …), or another added one. That
token counts, because it ends an answer at inference; the template's text after it (mostly a newline) never counts.
Where a template ends turns without a token, as GLM's do, the next turn's first token ends them if it is an end of text.

Three things are not learned:

* what a template writes for an answer without thinking, such as `<think>\n\n</think>`: a server writes it into the
  prompt;
* turns that a template writes differently from what the assistant wrote (some drop what they do not know);
* turns that were written after another context than the whole conversation has: many templates drop earlier thinking,
  or move tools. They get the mask 0 and a reason, or with `mask_contexts` a sample of their own with that context.

`{% generation %}` markers are not read: templates enclose headers by them, or leave the end of a turn out.
`apply_chat_template(return_assistant_tokens_mask=True)` also asks each character for its token, and whitespace has none
where a tokenizer trims its offsets, as GPT-2's and Llama 3's do. Both were seen in transformers 5.23.
"""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from draftsmith.decode.errors import InputError
from draftsmith.train.data.chat.messages import REASONING, Message, function_of
from draftsmith.train.data.chat.templates import (
    ChatTemplate,
    GrowingText,
    Tools,
    common_length,
    encode_plain,
    encode_rendered,
    for_template,
    require_no_template,
)

REWRITTEN = "the chat template leaves out some of what the assistant wrote"
LATER = "the chat template writes them or their context differently later in the conversation"
ELSEWHERE = "the chat template does not continue its generation prompt"
UNASKED = "no message comes before them"
UNWEIGHTED = "their weight in the record is 0"
UNTEMPLATED = "without a chat template the user's turns and the last answer are plain text"
THOUGHT, SPOKEN = "zqthoughtqz", "zqspokenqz"  # texts that no conversation holds


@dataclass(frozen=True)
class MaskedConversation:
    """A conversation's T tokens, and which of them count in the loss.

    `mask` is 1 for tokens that the assistant wrote, not shifted to the predictions. `left_out` has the reasons why
    assistant messages are not learned, by their index. `turn` is the number of the assistant's last turn, from 1.
    """

    ids: list[int]
    mask: list[int]
    left_out: dict[int, str]
    turn: int = 1


@dataclass(frozen=True)
class ClosingTokens:
    """The tokens of a tokenizer that may end a turn: special ones first, then all added ones except whitespace.

    Make it once for many conversations: a tokenizer builds its thousands of added tokens again at each call.
    """

    special: frozenset[int]
    added: frozenset[int]
    splitting: Mapping[int, str]  # the text of the special ones that do not absorb whitespace before them

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> "ClosingTokens":
        """Return a tokenizer's closing tokens."""
        added = {token: entry for token, entry in tokenizer.added_tokens_decoder.items() if entry.content.strip()}
        special = {token: entry for token, entry in added.items() if entry.special}
        splitting = {token: entry.content for token, entry in special.items() if not entry.lstrip}
        return cls(frozenset([*special, *tokenizer.all_special_ids]), frozenset(added), splitting)


def mask_conversation(messages: Sequence[Message], *args: Any, **kwargs: Any) -> MaskedConversation:
    """Encode a whole conversation, and mask the assistant's tokens; the arguments are those of `mask_contexts`."""
    return mask_contexts(messages, *args, **kwargs, whole=True)[-1]


def mask_contexts(
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
    whole: bool = False,
) -> list[MaskedConversation]:
    """Encode a conversation that ends with the assistant's message, once for each context that turns were written in.

    The last sample is the whole conversation, and its mask has the turns whose context is in it; if `whole`, it is the
    only one. Each other turn is in exactly one of the earlier samples, which end with a turn.

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
        return [_plain(messages, turns, tokenizer, ends)]
    template, rendered = for_template(messages, tokenizer, name, place, system_prompt, variables, tools, answer=False)
    shift = len(rendered) - len(messages)
    closing = ClosingTokens.of(tokenizer) if closing is None else closing
    reader = _TurnReader(template, rendered, closing, ends)
    written, left_out = dict[int, _WrittenTurn](), dict[int, str]()
    for turn in turns:
        found = reader.read(turn + shift)
        if not isinstance(found, str):
            written[turn] = found
        elif turn != turns[-1]:
            left_out[turn] = found
        else:
            raise InputError(
                f"{template.name}: expected a chat template that writes the last answer as the assistant did, found: "
                f"{found} (message {turn}); take another template or chat_template_kwargs, or answers without "
                "what it drops"
            )
    samples = list[MaskedConversation]()
    # A sample for the last turn takes all turns whose context is the beginning of its own; then the same for the rest.
    while written and not (whole and samples):
        last = max(written)
        ids, mask = reader.with_end(written[last], last + shift)
        for turn in list(written):
            end = written[turn].end_in(ids, reader.ends)
            if end is None:
                continue
            begin = written.pop(turn).begin
            if messages[turn].get("weight") == 0:
                left_out[turn] = UNWEIGHTED
            else:
                mask[begin:end] = [1] * (end - begin)
        samples.append(MaskedConversation(ids, mask, {}, turns.index(last) + 1))
    left_out |= dict.fromkeys(written, LATER)
    samples[0].left_out.update(sorted(left_out.items()))
    return samples[::-1]


def served_conversation(
    messages: Sequence[Message], prompt_ids: list[int], answer_ids: list[int], tokenizer: PreTrainedTokenizerBase
) -> MaskedConversation | None:
    """Return a conversation by the ids that a server read and wrote; None if they do not spell its texts.

    The answer alone counts in the loss: earlier turns may come from elsewhere, and each has a request of its own.
    """
    prompt, answer = (
        str(tokenizer.decode(ids, clean_up_tokenization_spaces=False)) for ids in (prompt_ids, answer_ids)
    )
    questions, visible = [message["content"] for message in messages if message["role"] == "user"], dense(prompt)
    if any(dense(text) not in visible for text in questions) or _end_of_message(answer, messages[-1]) is None:
        return None
    weight = messages[-1].get("weight", 1)
    return MaskedConversation(
        prompt_ids + answer_ids,
        [0] * len(prompt_ids) + [weight] * len(answer_ids),
        {} if weight else {len(messages) - 1: UNWEIGHTED},
        sum(message["role"] == "assistant" for message in messages),
    )


@dataclass(frozen=True)
class _WrittenTurn:
    """A turn in the context in which the assistant wrote it: ids from `begin` to `end` of the conversation so far.

    `closed` says whether `end` is after a closing token, which is the last one of the turn.
    """

    ids: list[int]
    begin: int
    end: int
    closed: bool

    def end_in(self, ids: Sequence[int], ends: Collection[int]) -> int | None:
        """Return where the turn ends in a longer conversation; None if its context or its text is not in there."""
        common = common_length(self.ids[: self.end], ids)
        if common < self.end - self.closed:
            return None
        # Where the template closes no turn, the next one's first token does, if it ends texts.
        return common + (not self.closed and common < len(ids) and ids[common] in ends)


class _TurnReader:
    """Reads the assistant's turns of a conversation, each in its own context."""

    def __init__(
        self, template: ChatTemplate, messages: Sequence[Message], closing: ClosingTokens, ends: Collection[int]
    ):
        self.ends = ends or [template.tokenizer.eos_token_id]
        self._template, self._messages = template, messages
        self._closing = frozenset(ends), closing.special, closing.added
        self._encode = GrowingText(template.tokenizer, closing.splitting)

    def read(self, i: int) -> _WrittenTurn | str:
        """Return the turn that is message i, or why it cannot be learned."""
        if not i:
            return UNASKED
        context, message = self._messages[:i], self._messages[i]
        try:
            before, after = self._template.render(context, answer=True), self._template.render([*context, message])
            if "tool_calls" in message and message["content"] != message["content"].rstrip():
                # Servers leave the line breaks before a call in the content; templates with their own write them twice.
                once = self._template.render([*context, message | {"content": message["content"].rstrip()}])
                common = common_length(once, after)
                after = once if any(map(str.isspace, once[common - 1 : common + 1])) else after
        except InputError:
            if i == len(self._messages) - 1:
                raise
            return ELSEWHERE
        after = after if after.startswith(before) else self._after_thinking(i, before, after)
        if not after.startswith(before):
            return ELSEWHERE if i < len(self._messages) - 1 else self._departure(before, after)
        before += self._empty_thinking(i, before, after[len(before) :])
        text_end = self._text_end(i, before, after)
        if text_end is None:
            return REWRITTEN
        context_ids = self._encode(before)
        ids = self._after(before, context_ids, after)
        if ids is None:
            return self._departure(before, after) if i == len(self._messages) - 1 else ELSEWHERE
        begin, said = len(context_ids), encode_rendered(self._template.tokenizer, after[len(before) : text_end])
        for tokens in self._closing:
            in_text = sum(token in tokens for token in said)
            places = [k for k in range(begin, len(ids)) if ids[k] in tokens]
            if len(places) > in_text:
                return _WrittenTurn(ids, begin, places[in_text] + 1, closed=True)
        end = max(text_end, len(after.rstrip()))
        cut = self._after(before, context_ids, after[:end]) or ids
        return _WrittenTurn(ids, begin, max(begin, common_length(ids, cut)), closed=False)

    def _after(self, before: str, context_ids: list[int], text: str) -> list[int] | None:
        """Return ids of `text` that begin with `context_ids`, those of `before`; None if such ids make another text."""
        ids = self._encode(text)
        if ids[: len(context_ids)] == context_ids:
            return ids
        # For example the tokenizer makes one token of newlines on both sides of the border; the server wrote two.
        return _continued(self._template.tokenizer, context_ids, text[len(before) :], ids)

    def with_end(self, turn: _WrittenTurn, i: int) -> tuple[list[int], list[int]]:
        """Return the ids of the conversation up to a turn, message i, with a mask of zeros.

        Where the template writes no end of the turn, the token that begins the next turn is added if it ends texts.
        """
        ids, message = list(turn.ids), self._messages[i]
        if not turn.closed and turn.end == len(ids):
            calls = message.get("tool_calls")
            short = {"role": "assistant", "content": "x"} | ({"tool_calls": calls} if calls else {})
            reply: Message = {"role": "user", "content": "x"}
            if calls:
                reply = {"role": "tool", "content": "x", "name": function_of(calls[0])["name"]}
                reply |= {"tool_call_id": calls[0]["id"]} if "id" in calls[0] else {}
            with suppress(InputError):
                talk = [{"role": "user", "content": "x"}, short]  # a reply may change all turns before it
                before, after = (self._encode(self._template.render(part)) for part in (talk, [*talk, reply]))
                if after[: len(before)] == before:
                    ids += [token for token in after[len(before) : len(before) + 1] if token in self.ends]
        return ids, [0] * len(ids)

    def _after_thinking(self, i: int, before: str, after: str) -> str:
        """Return `after` with the context as the server saw it, if the turn makes a template drop earlier thinking.

        The turn is what the template writes after a context without thinking; `after` must end with it, too.
        """
        bare = [{k: v for k, v in message.items() if k not in REASONING} for message in self._messages[:i]]
        with suppress(InputError):
            prompt, whole = self._template.render(bare, answer=True), self._template.render([*bare, self._messages[i]])
            if whole.startswith(prompt) and after.endswith(whole[len(prompt) :]):
                return before + whole[len(prompt) :]
        return after

    def _empty_thinking(self, i: int, before: str, turn: str) -> str:
        """Return the beginning of a turn that a template writes where there is no thinking; mostly nothing.

        A probe with thinking shows what surrounds it; this is empty thinking if the turn begins with both sides of it.
        """
        source, message = self._template.source, self._messages[i]
        if any(name in message for name in REASONING) or not any(word in source for word in ("reasoning", "think")):
            return ""
        probe: Message = {"role": "assistant", "content": SPOKEN, "reasoning_content": THOUGHT}
        in_text = {"role": "assistant", "content": f"<think>\n{THOUGHT}\n</think>\n\n{SPOKEN}"}
        calls = {"tool_calls": [{"id": "call12345", "type": "function", "function": {"name": "x", "arguments": {}}}]}
        for probed in (probe, in_text, probe | calls):  # Kimi K2 keeps the thinking before calls alone
            with suppress(InputError):
                text = self._template.render([*self._messages[:i], probed])
                text = text[len(before) :] if text.startswith(before) else ""
                opened, _, rest = text.partition(THOUGHT)
                closed, _, _ = rest.partition(SPOKEN)
                if rest and (length := _empty_block(turn, opened, closed)):
                    wrote_it = dense(message["content"]).startswith(dense(turn[:length]))
                    return "" if wrote_it else turn[:length]
        return ""

    def _text_end(self, i: int, before: str, after: str) -> int | None:
        """Return where the assistant's own text ends in `after`; None if some of it is not there."""
        start, length = len(before), _end_of_message(after[len(before) :], self._messages[i])
        if length is None:  # it may begin in the generation prompt: some templates open the reasoning there
            start = common_length(before, self._template.render(self._messages[:i]))
            length = _end_of_message(after[start:], self._messages[i])
        if length is None or start + length < len(before):
            return None
        return max(start + length, self._calls_end(i, after))

    def _calls_end(self, i: int, after: str) -> int:
        """Return where the template closes turn i, by its way to close a text, if the turn calls a tool; otherwise 0.

        The tokens around a call are the assistant's, and may end with special ones of their own.
        """
        if "tool_calls" not in self._messages[i]:
            return 0
        with_text = self._template.render([*self._messages[:i], {"role": "assistant", "content": "x"}])
        return len(after) - common_length(after[::-1], with_text[::-1])  # the common ending is the template's

    def _departure(self, before: str, after: str) -> str:
        prompt_ids, ids = self._encode(before), self._encode(after)
        at = common_length(prompt_ids, ids)
        prompt, talk = (self._template.tokenizer.decode(part[at : at + 8]) for part in (prompt_ids, ids))
        return f"the ids depart at token {at}, {prompt!r} in the generation prompt and {talk!r} in the conversation"


def mask_plain(
    question: str, answer: str, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int] = ()
) -> MaskedConversation:
    """Encode plain text and its answer directly after it, then a token that ends the target's texts; mask the answer.

    `ends` are those tokens, the tokenizer's own if there are none.
    """
    prompt, ids = (encode_plain(tokenizer, part) for part in (question, question + answer))
    if ids[: len(prompt)] != prompt:
        ids = _continued(tokenizer, prompt, answer, ids) or ids
    first = common_length(ids, prompt)
    usual = tokenizer.eos_token_id if tokenizer.eos_token_id in ends or not ends else ends[0]
    if usual is not None and not {usual, *ends} & set(ids[-1:]):
        ids = [*ids, usual]
    return MaskedConversation(ids, [0] * first + [1] * (len(ids) - first), {})


def _plain(
    messages: Sequence[Message], turns: list[int], tokenizer: PreTrainedTokenizerBase, ends: Sequence[int]
) -> MaskedConversation:
    question = "\n\n".join(message["content"] for message in messages if message["role"] == "user")
    masked = mask_plain(question, messages[-1]["content"], tokenizer, ends)
    weight, left_out = messages[-1].get("weight", 1), dict.fromkeys(turns[:-1], UNTEMPLATED)
    left_out |= {} if weight else {turns[-1]: UNWEIGHTED}
    return MaskedConversation(masked.ids, [weight * bit for bit in masked.mask], left_out, len(turns))


def _continued(
    tokenizer: PreTrainedTokenizerBase, prompt: list[int], answer: str, whole: list[int]
) -> list[int] | None:
    """Return a prompt's ids and then an answer's own, as a server writes them; None if they make another text.

    `whole` are the ids of both together. Some tokenizers begin a text with a space, but not after a special token.
    """
    start: Any = tokenizer.eos_token or ""
    skipped = len(encode_rendered(tokenizer, start))
    for apart in (encode_rendered(tokenizer, answer), encode_rendered(tokenizer, start + answer)[skipped:]):
        if tokenizer.decode(prompt + apart) == tokenizer.decode(whole):
            return prompt + apart
    return None


def _end_of_message(turn: str, message: Message) -> int | None:
    """Return the index after the assistant's text, compared without whitespace; None if the text is not in the turn."""
    positions = [i for i, character in enumerate(turn) if not character.isspace()]
    visible, at, end = "".join(turn[i] for i in positions), 0, 0
    calls = [function_of(call)["name"] for call in message.get("tool_calls", ())]
    for text in [*(message[name] for name in REASONING if name in message), message["content"], *calls]:
        sought, trailing = dense(text), text[len(text.rstrip()) :]
        place = visible.find(sought, at)
        if place < 0:  # a template may write the parts in another order
            place = visible.find(sought)
        if place < 0:
            return None
        at = max(at, place + len(sought))
        end = max(end, positions[at - 1] + 1 if sought else 0)
        end += len(trailing) if turn.startswith(trailing, end) else 0
    return end


def _empty_block(turn: str, opened: str, closed: str) -> int:
    """Return the length of empty thinking at a turn's beginning, compared without whitespace; 0 if there is none."""
    sought, trailing, length = dense(opened + closed), closed[len(closed.rstrip()) :], 0
    if not sought or not dense(turn).startswith(sought):
        return 0
    while len(dense(turn[:length])) < len(sought):
        length += 1
    return length + len(trailing) * turn.startswith(trailing, length)


def dense(text: str) -> str:
    """Return a text without whitespace."""
    return "".join(text.split())
