"""What a server read and wrote: its ids are the sample, and what its parsers leave in a text is none of the answer."""

import re

import pytest
from support.templates import ENDS, result, tokenizer_of, turn
from unit.train.data.chat.test_masks import learned

from draftsmith.train.data.chat import masks
from draftsmith.train.data.chat.masks import ClosingTokens, mask_contexts
from draftsmith.train.data.prompts import Prompt, mask_answers

CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
WRITTEN = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'


def test_the_line_breaks_before_a_call_are_the_templates_own():
    """Servers' parsers leave them in the content; in a client's earlier turn they are what the next server read."""
    tokenizer = tokenizer_of("qwen 3")
    told = turn("assistant", "\n\n", reasoning_content="\nhm\n", tool_calls=[CALL])
    talk = [turn("user", "say"), told, result(CALL, "3"), turn("assistant", "a")]
    first, last = mask_contexts(talk, tokenizer, "x")
    assert learned(first.ids, first.mask, tokenizer) == [f"<think>\nhm\n</think>\n\n{WRITTEN}"]
    assert f"</think>\n\n\n{WRITTEN}" in tokenizer.decode(last.ids)
    assert learned(last.ids, last.mask, tokenizer) == ["a<|im_end|>"]
    tokenizer = tokenizer_of("deepseek")  # whose template has none
    (both,) = mask_contexts([*talk[:1], turn("assistant", "a\n", tool_calls=[CALL]), *talk[2:]], tokenizer, "x")
    assert learned(both.ids, both.mask, tokenizer)[0].startswith("a\n<|calls|>")


@pytest.mark.parametrize("whole", [True, False])
def test_an_answer_that_makes_a_template_drop_earlier_thinking_follows_what_the_server_saw(whole):
    """gpt-oss keeps the thinking before calls until there is an answer."""
    tokenizer = tokenizer_of("harmony")
    ends = tokenizer.convert_tokens_to_ids(ENDS["harmony"].split())
    told = turn("assistant", "", thinking="hello", tool_calls=[CALL])
    talk = [turn("user", "say"), told, result(CALL, "3"), turn("assistant", "a", thinking="world"), turn("user", "b")]
    (first, last) = mask_contexts([*talk, turn("assistant", "a")], tokenizer, "x", ends=ends)
    seen = tokenizer.apply_chat_template(talk[:3], add_generation_prompt=True, tokenize=False)
    assert tokenizer.decode(first.ids).startswith(f"{seen}<|channel|>analysis<|message|>world<|end|>")
    written = learned(first.ids, first.mask, tokenizer)
    assert written[0].startswith("<|channel|>analysis<|message|>hello<|end|>") and written[0].endswith("<|call|>")
    assert written[1].endswith("<|channel|>final<|message|>a<|return|>") and not first.left_out
    assert learned(last.ids, last.mask, tokenizer) == ["<|channel|>final<|message|>a<|return|>"]
    (alone,) = mask_contexts(talk[:4], tokenizer, "x", ends=ends, whole=whole)
    assert (alone.ids, alone.mask) == (first.ids, first.mask)


@pytest.mark.parametrize("whole", [True, False])
def test_ids_of_a_server_are_the_sample_and_its_answer_counts(whole):
    tokenizer = tokenizer_of("qwen 3")
    talk = [
        turn("user", "say"),
        turn("assistant", "hello"),
        turn("user", "add"),
        turn("assistant", "hello world", reasoning_content="hm"),
    ]
    prompt = tokenizer.apply_chat_template(talk[:3], add_generation_prompt=True, return_dict=False)
    text = "<think>\nhm\n</think>\n\nhello world<|im_end|>"
    letters = [token for piece in re.split(r"(<[^>]*>|.)", text, flags=re.S) for token in tokenizer.encode(piece)]

    def masked(ids, messages=talk):
        read = Prompt("x", None, messages, None, served=(prompt, ids))
        return mask_answers(read, tokenizer, len(tokenizer), ClosingTokens.of(tokenizer), [], whole=whole)

    (sample,) = masked(letters)
    assert sample.ids == prompt + letters and sample.mask == [0] * len(prompt) + [1] * len(letters)
    assert (sample.turn, sample.left_out) == (2, {})
    usual = tokenizer.encode(text)
    by_text = masked(tokenizer.encode(text.replace("world", "all")))
    assert by_text[-1].ids[: len(prompt + usual)] == prompt + usual != prompt + letters
    assert masked([*letters, len(tokenizer)]) == by_text  # an id of another model
    assert masked(letters, [turn("user", "sing"), *talk[1:]])[-1].ids != sample.ids  # a text that was redacted
    (unlearned,) = masked(letters, [*talk[:-1], talk[-1] | {"weight": 0}])
    assert unlearned.ids == sample.ids and not any(unlearned.mask)
    assert unlearned.left_out == {3: masks.UNWEIGHTED}


def test_ids_of_a_text_completion_are_learned_too():
    tokenizer = tokenizer_of("qwen 3")
    letters = [token for letter in " world" for token in tokenizer.encode(letter)]
    prompt = Prompt("x", "hello", None, None, " world", served=(tokenizer.encode("hello"), letters))
    (masked,) = mask_answers(prompt, tokenizer, len(tokenizer), ClosingTokens.of(tokenizer), [])
    assert masked.ids == tokenizer.encode("hello") + letters and sum(masked.mask) == len(letters)
