"""Loss masks of whole conversations, over short templates in the style of the families'."""

import json
import random
from itertools import groupby

import pytest
from bpe import END_OF_TEXT, train_bpe
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AddedToken, PreTrainedTokenizerFast

from draftsmith.decode.errors import InputError
from draftsmith.train.data.chat import masks
from draftsmith.train.data.chat.masks import ClosingTokens, mask_contexts, mask_conversation
from draftsmith.train.data.chat.templates import GrowingText, encode_rendered
from draftsmith.train.data.prompt_files import read_prompts
from draftsmith.train.data.prompts import Prompt, encode_prompt

ADDED = ["<|im_start|>", "<|im_end|>", "<|begin|>", "<|header|>", "<|/header|>", "<|eot|>", "[INST]", "[/INST]"]
THINK = ["<think>", "</think>"]  # added, but not special, as in Qwen3
TEXTS = ["def add(a, b):\n    return a + b\n", "hello world, say hello to the world", "user assistant system"]
TEXTS.append("a\n\n\nb" * 9)  # so that two newlines before another are one token
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" + PROMPT


TEMPLATES = {
    "chatml": CHATML,
    "marked": "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    + PROMPT,
    "llama 3": "{{ bos_token }}{% for m in messages %}<|header|>{{ m.role }}<|/header|>\n\n{{ m.content | trim }}"
    "<|eot|>{% endfor %}{% if add_generation_prompt %}<|header|>assistant<|/header|>\n\n{% endif %}",
    "zephyr": "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
    "mistral": "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}"
    "{% else %}{{ '[INST] ' + m.content + ' [/INST]' }}{% endif %}{% endfor %}",
    "default system": "{% if messages[0].role != 'system' %}<|im_start|>system\nBe good.<|im_end|>\n{% endif %}"
    + CHATML,
    "trimming": CHATML.replace("m.content", "m.content | trim"),
    "end of text behind all": CHATML.replace(PROMPT, "")
    + "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}{{ eos_token }}{% endif %}",
    "no end": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}",
}
ENDS = {"llama 3": "<|eot|>", "zephyr": END_OF_TEXT, "mistral": END_OF_TEXT, "no end": ""}
# Takes the thinking out of all answers but those behind the last question, where it writes an empty one if need be.
QWEN3 = (
    "{% set last = namespace(at=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set last.at = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{% set c = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{% set r = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') if '</think>' in m.content else '' %}"
    "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.index0 > last.at %}<think>\n{{ r }}\n</think>\n\n"
    "{% endif %}{{ c }}<|im_end|>\n{% endfor %}" + PROMPT
)


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def byte_level(gpt2: bool) -> PreTrainedTokenizerFast:
    """Llama 3's and Qwen's way, or GPT-2's, which splits newlines before a letter, but not at a prompt's end."""
    tokenizer = train_bpe(TEXTS, 330)
    tokenizer.add_tokens([AddedToken(token, special=True) for token in ADDED] + [AddedToken(t) for t in THINK])
    if not gpt2:
        lines = pre_tokenizers.Split(Regex(r"\s*[\r\n]+|\s+(?!\S)|\s?\w+|\s?[^\s\w]+|\s+"), "isolated")
        whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([lines, whole])
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    return tokenizer


def sentencepiece(prefix: str = "first") -> PreTrainedTokenizerFast:
    """Mistral's way: spaces are part of the next piece, and the text's first piece gets one."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prefix)
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
    pieces = ["<unk>", END_OF_TEXT, *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer.train_from_iterator(
        [*TEXTS, "QA:.|<>"], trainers.BpeTrainer(vocab_size=400, special_tokens=pieces, show_progress=False)
    )
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT)
    wrapped.add_tokens([AddedToken(token, special=True) for token in ADDED])
    return wrapped


TOKENIZERS = {"byte level": byte_level(gpt2=False), "gpt-2": byte_level(gpt2=True), "sentencepiece": sentencepiece()}


def using(template: str | None, kind: str = "byte level") -> PreTrainedTokenizerFast:
    tokenizer = TOKENIZERS[kind]
    tokenizer.chat_template = template
    return tokenizer


def encode_conversation(talk, tokenizer, name: str) -> tuple[list[int], list[int]]:
    masked = mask_conversation(talk, tokenizer, name)
    return masked.ids, masked.mask


def learned(ids: list[int], mask: list[int], tokenizer) -> list[str]:
    """Return the text of each stretch of tokens that count."""
    assert len(ids) == len(mask) and set(mask) <= {0, 1}
    stretches = groupby(zip(ids, mask, strict=True), key=lambda pair: pair[1])
    texts = [(bit, tokenizer.decode([token for token, _ in pairs])) for bit, pairs in stretches]
    return [text for bit, text in texts if bit]


SYSTEM = {"role": "system", "content": "Be brief."}
TALK = [SYSTEM, user("say hello"), assistant("hello world"), user("and add?"), assistant("def add(a, b):\n    return")]


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_the_assistant_wrote_and_its_end_of_turn_count_and_nothing_else(name):
    tokenizer = using(TEMPLATES[name])
    ids, mask = encode_conversation(TALK, tokenizer, "x")
    assert ids == tokenizer.apply_chat_template(TALK, return_dict=False)
    end, space = ENDS.get(name, "<|im_end|>"), " " if name in ("mistral", "no end") else ""
    assert learned(ids, mask, tokenizer) == [space + m["content"] + end for m in TALK if m["role"] == "assistant"]
    assert mask_conversation(TALK, tokenizer, "x").left_out == {}


def test_templates_with_and_without_markers_agree_and_the_library_agrees_where_it_can():
    mask = encode_conversation(TALK, using(TEMPLATES["marked"]), "x")[1]
    library = using(TEMPLATES["marked"]).apply_chat_template(TALK, return_dict=True, return_assistant_tokens_mask=True)
    assert mask == library["assistant_masks"] and sum(mask) > 0
    for name in ("chatml", "trimming"):
        assert encode_conversation(TALK, using(TEMPLATES[name]), "x")[1] == mask, name


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_random_conversations_never_train_on_a_prompt_and_always_on_the_answer(name, kind):
    """Users write Q alone, assistants A, with odd whitespace and characters of several bytes around them.

    A turn whose first newline the tokenizer joins with the prompt's last has a sample of its own.
    """
    tokenizer, draw = using(TEMPLATES[name], kind), random.Random(name + kind)
    end = ENDS.get(name, "<|im_end|>")
    for _ in range(12):
        odd = ["", " ", "\n", "  \n", "\n\n", "é", "語", ".", "\t"]
        turns = [[draw.choice(odd) + letter * draw.randint(1, 3) + draw.choice(odd) for letter in "QA"]
                 for _ in range(draw.randint(1, 4))]  # fmt: skip
        talk = [message for asked, told in turns for message in (user(asked), assistant(told))]
        samples = mask_contexts(talk, tokenizer, "x")
        text = tokenizer.decode(tokenizer.apply_chat_template(talk, return_dict=False))
        assert tokenizer.decode(samples[-1].ids) == text
        assert sum(map(len, (learned(each.ids, each.mask, tokenizer) for each in samples))) == len(turns)
        for sample in samples:
            context = encode_prompt(Prompt("x", None, talk[: 2 * sample.turn - 1], None), tokenizer)
            assert sample.ids[: len(context)] == context and sample.mask[len(context) :].index(1) < 2
            told = turns[sample.turn - 1][1]
            *_, own = learned(sample.ids, sample.mask, tokenizer)
            assert "".join(own.split()) == "".join((told + end).split()) and "Q" not in own
            assert not end or own.endswith(end)


def test_whitespace_that_the_assistant_wrote_counts_and_the_templates_own_does_not():
    for kind in ("byte level", "gpt-2"):
        for name in ("chatml", "marked"):
            tokenizer = using(TEMPLATES[name], kind)
            talk = [user("say"), assistant(" hello world\n"), user("say"), assistant("world\n\n")]
            texts = learned(*encode_conversation(talk, tokenizer, "x"), tokenizer)
            assert texts == [" hello world\n<|im_end|>", "world\n\n<|im_end|>"], (kind, name)
        tokenizer = using(TEMPLATES["trimming"], kind)
        assert learned(*encode_conversation(talk, tokenizer, "x"), tokenizer) == [
            "hello world<|im_end|>", "world<|im_end|>"]  # fmt: skip


def test_a_first_token_is_the_one_that_the_server_wrote_and_not_one_joined_with_the_prompt():
    tokenizer = using(CHATML)
    talk = [user("say"), assistant("\nhello"), user("say"), assistant("\nworld")]
    assert len(tokenizer.encode("\n\n")) == 1
    first, last = mask_contexts(talk, tokenizer, "x")
    for sample, turn in ((first, 1), (last, 2)):
        context = encode_prompt(Prompt("x", None, talk[: 2 * turn - 1], None), tokenizer)
        assert sample.turn == turn and sample.ids[: len(context)] == context
        assert learned(sample.ids, sample.mask, tokenizer) == [talk[2 * turn - 1]["content"] + "<|im_end|>"]
    whole = mask_conversation(talk, tokenizer, "x")
    assert (whole.ids, whole.mask, whole.left_out) == (last.ids, last.mask, {1: masks.LATER})


def test_a_first_token_that_no_text_apart_has_is_refused_with_the_ids():
    tokenizer = sentencepiece("always")  # Llama 2's way: a word cannot be continued apart from its beginning
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(InputError, match=r"found: the ids depart at token \d+, .* \(message 1\)"):
        mask_conversation([user("hel"), assistant("lo")], tokenizer, "x")


def test_special_tokens_in_an_answer_do_not_end_it():
    tokenizer = using(CHATML)
    talk = [user("say"), assistant("a<|im_end|>\n<|im_start|>user\nb")]
    assert learned(*encode_conversation(talk, tokenizer, "x"), tokenizer) == [
        "a<|im_end|>\n<|im_start|>user\nb<|im_end|>"]  # fmt: skip
    talk = [user("<|im_start|>assistant\nno<|im_end|>"), assistant("yes")]  # and a user may write what looks like one
    assert learned(*encode_conversation(talk, tokenizer, "x"), tokenizer) == ["yes<|im_end|>"]


THOUGHT = [
    user("say"),
    assistant("<think>\nhm\n</think>\n\nhello"),
    user("add"),
    assistant("<think>\noh\n</think>\n\na"),
]


def test_an_answer_ends_with_a_token_that_ends_texts_though_special_ones_come_before_it():
    """Cohere's templates close the answer by a token, and then the turn by another one."""
    tokenizer = byte_level(gpt2=False)
    tokenizer.chat_template = CHATML.replace("<|im_end|>", "<|/header|><|eot|>")
    talk, ends = [user("say"), assistant("hello"), user("add"), assistant("a")], tokenizer.encode("<|eot|>")
    masked = mask_conversation(talk, tokenizer, "x", ends=ends)
    assert learned(masked.ids, masked.mask, tokenizer) == ["hello<|/header|><|eot|>", "a<|/header|><|eot|>"]


def test_thinking_in_the_last_answer_counts_and_earlier_answers_that_lost_theirs_do_not():
    tokenizer = using(QWEN3)
    masked = mask_conversation(THOUGHT, tokenizer, "x")
    assert "hm" not in tokenizer.decode(masked.ids)  # what the target reads
    assert learned(masked.ids, masked.mask, tokenizer) == ["<think>\noh\n</think>\n\na<|im_end|>"]
    assert masked.left_out == {1: masks.LATER}
    # Two answers to one question: both keep their thinking, in another form than they were written in.
    talk = [user("say"), assistant("<think>hm</think>hello"), assistant("world")]
    masked = mask_conversation(talk, tokenizer, "x")
    assert masked.left_out == {}
    assert learned(masked.ids, masked.mask, tokenizer) == [
        "<think>\nhm\n</think>\n\nhello<|im_end|>", "world<|im_end|>"]  # fmt: skip


OPENED = CHATML.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}")
LOSSY = CHATML.replace("m.content", "m.content.split('</think>')[-1]")


@pytest.mark.parametrize(
    ("template", "talk", "message"),
    [
        (OPENED, [user("say"), assistant("hello")], r"sample 'x': expected a chat template that writes the last answer "
         r"as the assistant did, found: the ids depart at token \d+, '<think>\\n' in the generation prompt and "
         r"'hello<\|im_end\|>\\n' in the conversation \(message 1\); take another template or .*"),
        (LOSSY, THOUGHT[:2], rf"sample 'x': expected a chat template .*, found: {masks.REWRITTEN} \(message 1\); .*"),
        (LOSSY, THOUGHT, rf"sample 'x': expected a chat template .*, found: {masks.REWRITTEN} \(message 3\); .*"),
        (CHATML, [assistant("hello")], rf"sample 'x': expected a chat .*, found: {masks.UNASKED} \(message 0\); .*"),
        (CHATML, [user("say")], "sample 'x': expected an assistant turn at the end, found a user turn"),
        (CHATML, [], "sample 'x': expected an assistant turn at the end, found no messages"),
        ("{{ raise_exception('roles must alternate') }}", TALK, "sample 'x': expected messages that the chat template "
         "renders, found: roles must alternate"),
    ],
)  # fmt: skip
def test_a_sample_that_cannot_be_learned_from_is_refused_by_name(template, talk, message):
    with pytest.raises(InputError, match=f"^{message}$") as error:
        encode_conversation(talk, using(template), "x")
    assert "\n" not in str(error.value)


def test_thinking_that_the_prompt_opens_is_fine_where_the_answer_goes_on_with_it():
    tokenizer = using(OPENED)
    talk = [user("say"), assistant("<think>\nhm</think>a"), user("say"), assistant("<think>\nhm</think>hello")]
    masked = mask_conversation(talk, tokenizer, "x")
    assert masked.left_out == {}
    assert learned(masked.ids, masked.mask, tokenizer) == ["hm</think>a<|im_end|>", "hm</think>hello<|im_end|>"]


def test_an_answer_to_nothing_is_left_out_with_and_without_markers():
    talk = [assistant("hello"), user("say"), assistant("world")]
    for template in (CHATML, TEMPLATES["marked"]):
        masked = mask_conversation(talk, using(template), "x")
        assert masked.left_out == {0: masks.UNASKED}
        assert learned(masked.ids, masked.mask, using(template)) == ["world<|im_end|>"]


def test_an_empty_answer_is_its_end_of_turn_and_without_one_an_empty_mask():
    talk = [user("say"), assistant("")]
    for name in ("chatml", "marked"):
        tokenizer = using(TEMPLATES[name])
        assert learned(*encode_conversation(talk, tokenizer, "x"), tokenizer) == ["<|im_end|>"]
    tokenizer = using(QWEN3)  # whose empty thinking is the prompt's
    assert learned(*encode_conversation(talk, tokenizer, "x"), tokenizer) == ["<|im_end|>"]
    ids, mask = encode_conversation(talk, using(TEMPLATES["no end"]), "x")
    assert len(ids) == len(mask) > 0 and not any(mask)


def test_without_a_template_the_answer_follows_the_prompt_and_ends_the_text():
    tokenizer = using(None)
    ids, mask = encode_conversation([user("def add(a, b):\n"), assistant("    return a + b")], tokenizer, "x")
    assert ids == [*tokenizer.encode("def add(a, b):\n"), *tokenizer.encode("    return a + b"), tokenizer.eos_token_id]
    assert learned(ids, mask, tokenizer)[0].strip() == f"return a + b{END_OF_TEXT}"
    masked = mask_conversation(TALK, tokenizer, "x")
    assert masked.left_out == {2: masks.UNTEMPLATED}
    assert tokenizer.decode(masked.ids) == f"say hello\n\nand add?def add(a, b):\n    return{END_OF_TEXT}"


def jsonl(directory, *records: object) -> str:
    path = directory / "chats.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.mark.parametrize(
    ("record", "messages"),
    [
        ({"messages": TALK}, TALK),
        ({"prompt": TALK}, TALK),
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": ""}]},
            [user("a"), assistant("")],
        ),
        ({"prompt": "a", "completion": "b"}, [user("a"), assistant("b")]),
        ({"prompt": [SYSTEM, user("a")], "completion": [assistant("b")]}, [SYSTEM, user("a"), assistant("b")]),
    ],
)
def test_conversations_are_read_whole(record, messages, tmp_path):
    source = jsonl(tmp_path, record | {"category": "c"}, {"prompt": "a", "completion": "b", "id": "x"})
    first, second = read_prompts(source, answers="required")
    assert first == Prompt("0", None, messages, "c")
    assert second == Prompt("x", None, [user("a"), assistant("b")], None)
    assert read_prompts(source, answers="kept") == [first, second]
    assert read_prompts(source, limit=1, answers="required") == [first]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "a"}, "expected an answer to the prompt in completion or response, found none"),
        ({"prompt": [user("a")], "completion": "b"}, "completion: expected a list of messages, found a string"),
        ({"messages": [user("a")]}, "messages: expected an assistant turn at the end, found a user turn"),
        ({"messages": []}, "messages: expected an assistant turn at the end, found none"),
        ({"messages": [assistant("a")]}, "messages: expected a user turn, found none"),
        (
            {"turns": ["a"]},
            "turns: expected messages with an assistant turn at their end, found the user's turns alone",
        ),
    ],
)
def test_what_is_no_whole_conversation_is_refused_by_file_and_line(record, message, tmp_path):
    source = jsonl(tmp_path, {"messages": TALK}, record)
    with pytest.raises(InputError) as error:
        read_prompts(source, answers="required")
    assert str(error.value) == f"{source}:2: {message}"


def test_samples_are_conversations_or_prompts(tmp_path):
    asked, unanswered = [user("a")], [user("a"), assistant("b"), user("c")]
    source = jsonl(tmp_path, {"prompt": "a"}, {"messages": unanswered}, {"turns": ["a", "b"]}, {"messages": TALK})
    read = [prompt.text or prompt.messages for prompt in read_prompts(source, answers="kept")]
    assert read == ["a", unanswered, asked, TALK]
    with pytest.raises(InputError, match=r":1: messages: expected a user turn, found none$"):
        read_prompts(jsonl(tmp_path, {"messages": [assistant("a")]}), answers="kept")


def test_masks_are_rendered_with_the_same_system_prompt_and_variables():
    empty = "{% if not thinking | default(true) %}<think>\n\n</think>\n\n{% endif %}"
    opened = PROMPT.replace("{% endif %}", empty + "{% endif %}")
    last = "{% if loop.last and m.role == 'assistant' %}" + empty + "{% endif %}{{ m.content }}"
    silent = CHATML.replace(PROMPT, opened).replace("{{ m.content }}", last)
    tokenizer = using(silent)
    talk = [user("say"), assistant("hello")]
    masked = mask_conversation(talk, tokenizer, "x", system_prompt="Be good.", variables={"thinking": False})
    text = "<|im_start|>system\nBe good.<|im_end|>\n<|im_start|>user\nsay<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(masked.ids) == f"{text}<think>\n\n</think>\n\nhello<|im_end|>\n"
    learned = [token for token, bit in zip(masked.ids, masked.mask, strict=True) if bit]
    assert tokenizer.decode(learned) == "hello<|im_end|>"
    asked = Prompt("x", None, talk[:1], None)
    prompt = encode_prompt(asked, tokenizer, system_prompt="Be good.", variables={"thinking": False})
    assert tokenizer.decode(masked.ids).startswith(tokenizer.decode(prompt))


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_growing_texts_have_the_ids_of_the_whole_text(kind):
    tokenizer, draw = TOKENIZERS[kind], random.Random(kind)
    pieces = [*ADDED, "<|im_", "<", "|>", " ", "\n", "\n\n", "hello", " world", "add(a, b)", "é", "語"]
    growing, text = GrowingText(tokenizer, ClosingTokens.of(tokenizer).splitting), ""
    for _ in range(200):
        kept = draw.choice([len(text), draw.randrange(len(text) + 1)])
        text = text[:kept] + "".join(draw.choices(pieces, k=draw.randint(1, 8)))
        assert growing(text) == encode_rendered(tokenizer, text)


def test_a_call_without_an_end_is_fine_where_the_template_writes_no_results_of_tools():
    template = (
        "{% for m in messages if m.role != 'tool' %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name }}{{ c.function.arguments }}{% endfor %}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    call = {"function": {"name": "add", "arguments": {"a": "b"}}}
    talk = [user("say"), {"role": "assistant", "content": "", "tool_calls": [call]}]
    tokenizer = using(template)
    assert learned(*encode_conversation(talk, tokenizer, "x"), tokenizer) == ['add{"a": "b"}']
