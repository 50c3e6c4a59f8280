"""Parts of texts: their marks are those that a template writes, and each token of a text is in one part."""

import pytest
from unit.train.data.chat.test_masks import CHATML, byte_level
from unit.train.data.chat.test_templates import WHOLE

from draftsmith.train.data.chat.parts import PARTS, TextParts

TOKENIZER = byte_level(False)
TURN = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
END = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
CALLS = "{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>\n{% endfor %}"
WITH_TAGS = (
    f"{TURN}{{% if m.reasoning_content %}}<think>\n{{{{ m.reasoning_content }}}}\n</think>\n\n{{% endif %}}{CALLS}{END}"
)
# Opens the thinking in the generation prompt; the second loses it from conversations, as R1's does.
OPENED = WITH_TAGS + "<think>\n{% endif %}"
LOST = f"{TURN}{{{{ m.content.split('</think>')[-1] }}}}{END}<think>\n{{% endif %}}"
# Roles and channels in place of tags around parts.
CHANNELS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if m.reasoning_content %}<|start|>assistant<|channel|>thoughts<|message|>{{ m.reasoning_content }}<|end|>"
    "{% endif %}"
    "{% if m.content %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}"
    "{% for c in m.tool_calls or [] %}<|start|>assistant to={{ c.function.name }}<|channel|>json<|message|>"
    "{{ c.function.arguments | tojson }}<|call|>{% endfor %}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
# Calls are bare JSON, alone in their turn.
BARE = (
    "{% for m in messages %}<|{{ m.role }}|>{% for c in m.tool_calls or [] %}"
    '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}{% endfor %}{{ m.content }}'
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# The marks of each template: opening, closing, and whether the opening counts only at the beginning.
CASES = {
    "tags": (WITH_TAGS + "{% endif %}", [("<think>", "</think>", False), ("<call>", "</call>", False)]),
    "opened": (OPENED, [("<think>", "</think>", True), ("<call>", "</call>", False)]),
    "lost": (LOST, [("<think>", "</think>", True)]),
    "empty thinking": (WHOLE, [("<think>", "</think>", False), ("[INST]", "[/INST]", False)]),
    "channels": (
        CHANNELS,
        [
            ("<|channel|>thoughts<|message|>", "<|end|><|start|>assistant", False),
            ("to=", "<|call|>", True),
        ],
    ),
    "bare": (BARE, [('{"name":"', None, True)]),
    "neither": (CHATML, []),
    "none": (None, []),
}


def parts(case: str, **variables) -> TextParts:
    TOKENIZER.chat_template = CASES[case][0]
    return TextParts(TOKENIZER, variables)


@pytest.mark.parametrize("case", CASES)
def test_marks_are_what_the_template_writes_around_parts(case):
    found = [(mark.opening, mark.closing, mark.first_only) for mark in parts(case).marks]
    assert found == CASES[case][1]


ASKED = "<|im_start|>user\nwhat is <think>?<|im_end|>\n<|im_start|>assistant\n"
USER = "<|start|>user<|message|>x to=<|end|><|start|>assistant"
THOUGHT = ("t", "<|channel|>thoughts<|message|>so<|end|><|start|>assistant")
# By name the case, the prompt, and a text: a for its answer, t for thinking, c for calls.
TEXTS = {
    "the model opens": (
        "tags",
        ASKED,
        [
            ("t", "<think>\nhm <call>\n</think>"),
            ("a", "\n\nHi\n"),
            ("c", "<call>{1}</call>\n<call>{2}</call><|im_end|>"),
        ],
    ),
    "the prompt opens": ("opened", f"{ASKED}<think>\n", [("t", "hm</think>"), ("a", "\nI say\n\n it <|im_end|>")]),
    "the prompt closes": ("opened", f"{ASKED}<think>\n\n</think>\n\n", [("a", "I say it.")]),
    "cut while thinking": ("lost", f"{ASKED}<think>\n", [("t", "hm <call> hm")]),
    "thinking, then a call": ("tags", ASKED, [("t", "\n<think>a</think>\n\n"), ("c", "<call>{1}</call><|im_end|>")]),
    "channels": ("channels", USER, [THOUGHT, ("c", " to=act<|channel|>json<|message|>{}<|call|>")]),
    "an answer in a channel": ("channels", USER, [("a", "<|channel|>final<|message|>Go to=there<|end|>")]),
    "a bare call": ("bare", "<|assistant|>", [("c", '{"name": "act"}<|im_end|>')]),
    "other JSON": ("bare", "<|assistant|>", [("a", 'Here: {"name": "act"}<|im_end|>')]),
    "no parts": ("neither", ASKED, [("a", "<think>hm</think> I say it.<|im_end|>")]),
}


@pytest.mark.parametrize("text", TEXTS)
def test_each_token_of_a_text_is_in_its_part(text):
    case, prompt, pieces = TEXTS[text]
    of = parts(case)
    encoded = [TOKENIZER(piece, add_special_tokens=False).input_ids for _, piece in pieces]
    wanted = [letter for (letter, _), ids in zip(pieces, encoded, strict=True) for _ in ids]
    ids = TOKENIZER(prompt, add_special_tokens=False).input_ids
    labels = of.label(ids, [token for piece in encoded for token in piece])
    assert ["atc"[label] for label in labels] == wanted and PARTS == ("answer", "thinking", "tool call")


def test_templates_that_need_a_variable_to_think_get_it():
    """Without the variable the generation prompt has an empty thinking."""
    template = LOST.replace("<think>\n{% endif", "{% if think %}<think>\n{% endif %}{% endif")
    for variables, marks in (({}, []), ({"think": True}, ["<think>"])):
        of = parts("lost", **variables)
        TOKENIZER.chat_template = template
        assert [mark.opening for mark in of.marks] == marks
