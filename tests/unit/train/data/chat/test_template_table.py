"""Six styles of chat templates, twelve conversations: masks equal to renderings by prefix, or a named reason."""

import json

import pytest
from bpe import END_OF_TEXT
from support.templates import CONVERSATIONS, ENDS, TEMPLATES, tokenizer_of

from draftsmith.decode.errors import InputError
from draftsmith.train.data.chat.masks import ClosingTokens
from draftsmith.train.data.prompt_files import read_prompts
from draftsmith.train.data.prompts import mask_answers

UNREAD = "expected a chat template that writes it, found that the target's leaves it out"
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
CALLS = rf"\.tool_calls\[\d\]\.function\.name: {UNREAD}"
REASONING = rf"\.reasoning_content: {UNREAD}"
REFUSED = {
    ("qwen 3", "developer"): rf"messages\[0\]\.content: {UNREAD}",
    ("qwen 3", "two answers"): r"the ids depart at token \d+",
    ("qwen 3.5", "developer"): r"Unexpected message role\.",
    ("harmony", "agent"): CALLS,  # the second of two calls
    ("deepseek", "developer"): rf"messages\[0\]\.content: {UNREAD}",
    ("deepseek", "reasoning"): REASONING,
    ("deepseek", "thinking in text"): r"leaves out some of what the assistant wrote \(message 3\)",
    ("deepseek", "agent"): rf"messages\[2\]\.thinking: {UNREAD}",
    ("mistral", "three turns"): rf"messages\[0\]\.content: {UNREAD}",
    ("mistral", "developer"): r"Only user, assistant and tool roles are supported\.",
    ("mistral", "reasoning"): REASONING,
    ("mistral", "agent"): rf"messages\[0\]\.content: {UNREAD}",
    ("mistral", "ends in a call"): rf"messages\[3\]\.content: {UNREAD}",
}
THOUGHTLESS = {"qwen 3": "<think>\n\n</think>\n\n", "qwen 3.5": "\n</think>\n\n", "glm": "\n<think></think>\n"}
"""The thinking that a template writes, after its generation prompt, for an answer that has none."""


def sent(message):
    """Return a message as a server hands it to a template: text in one string, arguments as objects."""
    fields = dict(message)
    reasoning = next((fields.pop(name) for name in REASONING_FIELDS if name in fields), None)
    content = fields["content"] or ""
    fields["content"] = content if isinstance(content, str) else "".join(part["text"] for part in content)
    for call in fields.get("tool_calls", ()):
        arguments = call["function"]["arguments"]
        call["function"]["arguments"] = json.loads(arguments) if isinstance(arguments, str) else arguments
    return fields | (dict.fromkeys(REASONING_FIELDS, reasoning) if reasoning else {})


def written_turns(template, tokenizer, record):
    """Render each turn in its own context by the library; return the ids of its context and its own, by number."""
    messages = [sent(message) for message in json.loads(json.dumps(record["messages"]))]
    tools = json.loads(record["tools"]) if isinstance(record.get("tools"), str) else record.get("tools")
    turns = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, after = (
            tokenizer.apply_chat_template(part, tokenize=False, tools=tools, add_generation_prompt=prompt)
            for part, prompt in ((messages[:i], True), (messages[: i + 1], False))
        )
        if "reasoning" not in message and "</think>" not in message["content"]:
            before += THOUGHTLESS.get(template, "")
        assert after.startswith(before)
        context, own = (
            tokenizer(part, add_special_tokens=False).input_ids for part in (before, after.removeprefix(before))
        )
        if template == "glm":
            own.append(tokenizer.convert_tokens_to_ids("<|observation|>" if "tool_calls" in message else "<|user|>"))
        tokens, ends = tokenizer.convert_ids_to_tokens(own), ENDS.get(template, END_OF_TEXT).split()
        turns.append((context, own[: 1 + max(k for k, token in enumerate(tokens) if token in ends)]))
    return turns


def expected_mask(ids, turns):
    """Return the mask of the turns whose context and text are in the ids, and those turns' indices."""
    mask, learned = [0] * len(ids), []
    for turn, (context, own) in enumerate(turns):
        start = len(context)
        text = own[:-1]  # how a turn ends may depend on what follows
        if ids[: start + len(text)] == context + text:
            stop = start + len(text) + (ids[start + len(text) :][:1] == own[-1:])
            mask[start:stop] = [1] * (stop - start)
            learned.append(turn)
    return mask, learned


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_masks_are_those_of_each_turn_rendered_in_its_own_context_or_the_row_is_refused(
    template, conversation, tmp_path
):
    tokenizer, record = tokenizer_of(template), CONVERSATIONS[conversation]
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps(record) + "\n")
    ends = [tokenizer.convert_tokens_to_ids(end) for end in ENDS.get(template, END_OF_TEXT).split()]
    (prompt,) = read_prompts(str(path), answers="required")

    def masked(whole):
        return mask_answers(prompt, tokenizer, len(tokenizer), ClosingTokens.of(tokenizer), ends, whole=whole)

    if (template, conversation) in REFUSED:
        with pytest.raises(InputError, match=REFUSED[template, conversation]) as error:
            masked(whole=True)
        assert str(error.value).startswith(f"{path}:1: ") and "\n" not in str(error.value)
        return
    turns = written_turns(template, tokenizer, record)
    (sample,) = masked(whole=True)
    context, own = turns[-1]
    assert sample.ids[: len(context + own)] == context + own
    mask, learned = expected_mask(sample.ids, turns)
    assert sample.mask == mask and len(learned) + len(sample.left_out) == len(turns)
    # With a sample for each context, each turn is learned once, in what the server saw.
    samples, pending = masked(whole=False), list(range(len(turns)))
    assert samples[-1].ids == sample.ids
    for each in reversed(samples):
        mask, learned = expected_mask(each.ids, [turns[turn] for turn in pending])
        assert each.mask == mask and learned
        assert each.turn == pending[-1] + 1
        context, own = turns[pending[-1]]
        assert each.ids[: len(context + own)] == context + own
        pending = [turn for k, turn in enumerate(pending) if k not in learned]
    assert not pending and samples[-1].left_out == {}
