# ruff: noqa: E501 - the table of errors reads best with a case a line
import json
import re
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from bpe import END_OF_TEXT, train_bpe
from tokenizers.processors import TemplateProcessing
from unit.train.data.chat.test_masks import assistant, user

from draftsmith.decode.errors import InputError
from draftsmith.decode.repetition import count_repeated_ngrams, repeated_ngram_share
from draftsmith.train.data.chat import messages as reading
from draftsmith.train.data.chat.masks import mask_plain
from draftsmith.train.data.prompt_files import read_prompts
from draftsmith.train.data.prompts import Prompt, encode_prompt

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'system' and m['content'] == 'no' %}{{ raise_exception('no system role') }}{% endif %}"
    "[{{ m['role'] }}]{{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def write(directory: Path, name: str, text: str | bytes) -> str:
    path = directory / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return str(path)


def jsonl(directory: Path, *records: object) -> str:
    return write(directory, "prompts.jsonl", "".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture(scope="module")
def tokenizer():
    """Adds a beginning-of-text token by itself, as Llama's does: what a chat template must not double."""
    tokenizer = train_bpe(["hello world, say hello to the world"], 300)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{END_OF_TEXT} $A", special_tokens=[(END_OF_TEXT, tokenizer.bos_token_id)]
    )
    return tokenizer


SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"prompt": "hello"}, Prompt("0", "hello", None, None)),
        ({"prompt": [user("a"), assistant("b")]}, Prompt("0", None, [user("a")], None)),
        ({"prompt": "first", "messages": [user("second")]}, Prompt("0", "first", None, None)),
        ({"prompt": None, "messages": [user("second")]}, Prompt("0", None, [user("second")], None)),
        ({"messages": [SYSTEM, user("a")], "id": "x"}, Prompt("x", None, [SYSTEM, user("a")], None)),
        (
            {"messages": [user("a"), assistant("b"), user("c"), assistant("d"), assistant("e")], "id": 7},
            Prompt("7", None, [user("a"), assistant("b"), user("c")], None),
        ),
        (
            {"messages": [SYSTEM | {"content": ""}, user("a")]},
            Prompt("0", None, [SYSTEM | {"content": ""}, user("a")], None),
        ),
        (
            {
                "conversations": [
                    {"from": "system", "value": "Be brief."},
                    {"from": "human", "value": "a"},
                    {"from": "gpt", "value": "b"},
                    {"from": "user", "value": "c"},
                    {"from": "assistant", "value": "d"},
                ]
            },
            Prompt("0", None, [SYSTEM, user("a"), assistant("b"), user("c")], None),
        ),
        (
            {"question_id": 81, "category": "writing", "turns": ["a", "needs an answer to a"]},
            Prompt("81", None, [user("a")], "writing"),
        ),
    ],
)
def test_a_record_is_recognised_by_its_field(record, expected, tmp_path):
    assert read_prompts(jsonl(tmp_path, record)) == [expected]
    assert read_prompts(write(tmp_path, "prompts.json", json.dumps([record], indent=2))) == [expected]


def test_a_prompt_written_as_a_record_is_read_as_it_was(tmp_path):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    whole = [
        Prompt("0", "text", None, None),
        Prompt("1", "text", None, "code"),
        Prompt("2", None, turns, None, cut=True),
        Prompt("3", None, turns, "code"),
    ]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(prompt.record()) + "\n" for prompt in whole))
    assert read_prompts(str(tmp_path / "p.jsonl"), answers="kept") == whole


def test_text_files_are_one_prompt_a_line(tmp_path):
    source = write(tmp_path, "prompts.txt", b"\xef\xbb\xbfone\r\n\r\n  two\r\nthree")
    assert [(p.id, p.text) for p in read_prompts(source)] == [("0", "one"), ("1", "  two"), ("2", "three")]


def test_byte_order_mark_and_crlf_and_line_separators_are_fine(tmp_path):
    text = b'\xef\xbb\xbf{"prompt": "one"}\r\n\r\n{"prompt": "two\xe2\x80\xa8lines"}\r\n'
    assert [p.text for p in read_prompts(write(tmp_path, "p.jsonl", text))] == ["one", "two\u2028lines"]
    text = b'\xef\xbb\xbf[\r\n{"prompt": "one"},\r\n{"prompt": "two"}]\r\n'
    assert [p.text for p in read_prompts(write(tmp_path, "p.json", text))] == ["one", "two"]


def test_parquet_and_directories_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [{"prompt": "one", "messages": None}, {"prompt": None, "messages": [user("two"), assistant("three")]}]
    expected = [Prompt("0", "one", None, None), Prompt("1", None, [user("two")], None)]
    directory = tmp_path / "data"
    directory.mkdir()
    pq.write_table(pa.Table.from_pylist(rows), directory / "train.parquet")
    assert read_prompts(str(directory / "train.parquet")) == expected
    assert read_prompts(str(directory)) == expected
    with pytest.raises(InputError, match=r"data: expected .* with split 'test', found: "):
        read_prompts(str(directory), split="test")


def test_ids_are_unique_and_limit_reads_no_further(tmp_path):
    source = jsonl(tmp_path, {"prompt": "a"}, {"prompt": "b", "id": 0}, {"prompt": "c"}, {"broken": "d"})
    assert [p.id for p in read_prompts(source, limit=3)] == ["0_", "0", "2"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("p.jsonl", "", "{path}: expected prompts, found none"),
        ("p.json", " [ ] ", "{path}: expected prompts, found none"),
        ("p.txt", "\n", "{path}: expected prompts, found none"),
        ("p.jsonl", '{"prompt": "a"}\n\n{"prompt"\n', "{path}:3: expected a JSON object, found: Expecting ':' delimiter (column 10)"),
        ("p.jsonl", '["a"]\n', "{path}:1: expected an object, found a list"),
        ("p.jsonl", '{"prompt": ' + "[" * 10_000, "{path}:1: expected a JSON object, found: nested too deeply (column 1)"),
        ("p.jsonl", '{"prompt": "a", "id": ' + "9" * 5000 + "}", "{path}:1: expected a JSON object, found: a number of too many digits (column 1)"),
        ("p.jsonl", '{"prompt": "a"}\n{"question": "b", "n": 1}', "{path}:2: expected one of the fields prompt, messages, conversations, turns, found 'question', 'n'"),
        ("p.jsonl", '{"prompt": " "}', "{path}:1: prompt: expected some text, found an empty string"),
        ("p.jsonl", '{"prompt": 3}', "{path}:1: prompt: expected a string or a list of messages, found the number 3"),
        ("p.jsonl", r'{"prompt": "\ud800"}', "{path}:1: prompt: expected Unicode text, found a lone surrogate"),
        ("p.jsonl", '{"messages": "a"}', "{path}:1: messages: expected a list, found a string"),
        ("p.jsonl", '{"messages": ["a"]}', "{path}:1: messages[0]: expected an object, found a string"),
        ("p.jsonl", '{"messages": [{"role": "bot", "content": "a"}]}', "{path}:1: messages[0].role: expected one of system, developer, user, human, assistant, gpt, tool, found 'bot'"),
        ("p.jsonl", '{"messages": [{"role": "tool", "content": "a"}]}', "{path}:1: messages: expected a user turn, found none"),
        ("p.jsonl", '{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', "{path}:1: messages[0].content: expected parts of text, found 'image'"),
        ("p.jsonl", '{"messages": [{"role": "user", "content": "What?"}], "images": ["a.png"]}', "{path}:1: images: expected text alone, found a list"),
        ("p.jsonl", '{"turns": []}', "{path}:1: turns: expected at least one turn, found none"),
        ("p.jsonl", '{"prompt": "a", "category": 1}', "{path}:1: category: expected a string, found the number 1"),
        ("p.jsonl", '{"prompt": "a", "id": true}', "{path}:1: id: expected a string or a whole number, found a boolean"),
        ("p.jsonl", '{"prompt": "a", "id": "x"}\n\n{"prompt": "b", "id": "x"}', "{path}:3: expected a unique id, found 'x' again (first at {path}:1)"),
        ("p.jsonl", b'{"prompt": "a"}\n{"prompt": "\xff"}', "{path}:2: expected UTF-8, found byte 0xff"),
        ("p.json", '\n{"prompt": "a"}', "{path}: expected an array of records, found '{{' (a file of one record a line is named .jsonl)"),
        ("p.json", '[\n{"prompt": "a"},\n\n{"prompt":\n""}\n]', "{path}: row 2: prompt: expected some text, found an empty string"),
        ("p.json", '[\n{"prompt": "a"},\n{"prompt" "b"}]', "{path}:3: expected JSON, found: Expecting ':' delimiter (column 11)"),
        ("p.csv", "a", "{path}: expected a file named .jsonl, .json, .txt, .parquet, found '.csv'"),
    ],
)  # fmt: skip
def test_errors_name_file_and_line(name, text, message, tmp_path):
    source = write(tmp_path, name, text)
    with pytest.raises(InputError) as error:
        read_prompts(source)
    assert str(error.value) == message.format(path=source)


def test_a_prompt_that_no_machine_reads_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "MOST_CHARACTERS", 3)
    with pytest.raises(InputError, match=r":1: prompt: expected at most 3 characters, found 4$"):
        read_prompts(write(tmp_path, "p.jsonl", '{"prompt": "abcd"}'))


def test_errors_about_files_that_are_not_there_or_not_what_they_say(tmp_path):
    for source in (str(tmp_path / "none.jsonl"), "none.json", "./none", ""):
        with pytest.raises(InputError) as error:
            read_prompts(source)
        assert str(error.value) == f"{source}: expected a file of prompts, found nothing there"
    source = write(tmp_path, "p.parquet", "not parquet")
    with pytest.raises(InputError, match=r"p\.parquet: expected a Parquet file, found: "):
        read_prompts(source)
    pq.write_table(pa.table({"prompt": ["a", ""]}), source)
    with pytest.raises(InputError, match=r"p\.parquet: row 2: prompt: expected some text, found an empty string"):
        read_prompts(source)
    with pytest.raises(InputError, match=r"^limit: expected at least 1, found 0$"):
        read_prompts(source, limit=0)


def test_plain_text_keeps_the_tokenizers_own_special_tokens(tokenizer):
    ids = encode_prompt(Prompt("0", "hello world", None, None), tokenizer)
    assert tokenizer.decode(ids) == f"{END_OF_TEXT}hello world"
    assert encode_prompt(Prompt("0", "hello world", None, None), tokenizer, max_tokens=2) == ids[-2:]


@pytest.mark.parametrize("added", ["<b> $A", "<b> $A <e>", "<b> <x> $A <e>", "$A <e>", "$A"])
def test_plain_text_begins_once_and_does_not_end_whatever_the_tokenizer_adds(added):
    """In prompts, and in prompts with a given answer; what was rendered by hand begins with the added tokens already."""
    tokenizer = train_bpe(["hello world, say hello to the world"], 300)
    tokenizer.add_special_tokens({"bos_token": "<b>", "eos_token": "<e>", "additional_special_tokens": ["<x>"]})
    specials = [(piece, tokenizer.convert_tokens_to_ids(piece)) for piece in ("<b>", "<x>", "<e>")]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=added, special_tokens=specials)
    begin = added.partition("$A")[0].replace(" ", "")
    for text in ("hello", "<x>hello", "hello<e>"):
        expected = tokenizer(begin + text, add_special_tokens=False).input_ids
        for written in (text, begin + text):
            assert encode_prompt(Prompt("0", written, None, None), tokenizer) == expected
            masked = mask_plain(written, " world", tokenizer)
            assert tokenizer.decode(masked.ids) == f"{begin}{text} world<e>"
            assert masked.ids[: masked.mask.index(1)] == expected


def test_chat_template_writes_the_generation_prompt_and_its_own_special_tokens(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    ids = encode_prompt(Prompt("0", None, [SYSTEM, user("a"), assistant("b"), user("c")], None), tokenizer)
    assert all(type(token) is int for token in ids)
    assert ids.count(tokenizer.bos_token_id) == 1
    assert tokenizer.decode(ids) == f"{END_OF_TEXT}[system]Be brief.\n[user]a\n[assistant]b\n[user]c\n[assistant]"
    with pytest.raises(
        InputError, match=r"^prompt 'x': expected messages that the chat template renders, found: no system"
    ):
        encode_prompt(Prompt("x", None, [{"role": "system", "content": "no"}, user("a")], None), tokenizer)


def test_without_a_chat_template_the_user_turns_are_plain_text(tokenizer):
    ids = encode_prompt(Prompt("0", None, [SYSTEM, user("a"), assistant("b"), user("c")], None), tokenizer)
    assert tokenizer.decode(ids) == f"{END_OF_TEXT}a\n\nc"


THINKING = TEMPLATE + "{% if add_generation_prompt and not thinking | default(true) %}[no thought]{% endif %}"
LONG = [SYSTEM, user("one two three four five six seven eight nine ten"), assistant("b"), user("the end of it")]


def test_a_system_prompt_begins_conversations_without_a_system_turn(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    for messages, said in (([user("a")], "Think."), ([SYSTEM, user("a")], "Be brief.")):
        ids = encode_prompt(Prompt("0", None, messages, None), tokenizer, system_prompt="Think.")
        assert tokenizer.decode(ids) == f"{END_OF_TEXT}[system]{said}\n[user]a\n[assistant]"


def test_variables_reach_the_template_and_must_occur_there(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", THINKING)
    prompt = Prompt("0", None, [user("a")], None)
    assert not tokenizer.decode(encode_prompt(prompt, tokenizer)).endswith("[no thought]")
    ids = encode_prompt(prompt, tokenizer, variables={"thinking": False})
    assert tokenizer.decode(ids).endswith("[assistant][no thought]")
    expected = "chat_template_kwargs: expected variables of the target's chat template, found 'enable_thinking'"
    with pytest.raises(InputError, match=f"^{expected}$"):
        encode_prompt(prompt, tokenizer, variables={"enable_thinking": False})


@pytest.mark.parametrize("given", [{"system_prompt": "Think."}, {"variables": {"thinking": False}}])
def test_what_is_meant_for_a_template_is_refused_where_none_reads_it(given, tokenizer, monkeypatch):
    field = "system_prompt" if "system_prompt" in given else "chat_template_kwargs"
    expected = f"^{field}: expected conversations and a chat template that they go into, found "
    with pytest.raises(InputError, match=expected + "none in the target's tokenizer$"):
        encode_prompt(Prompt("x", None, [user("a")], None), tokenizer, **given)
    monkeypatch.setattr(tokenizer, "chat_template", THINKING)
    with pytest.raises(InputError, match=expected + "prompt 'x' in plain text$"):
        encode_prompt(Prompt("x", "a", None, None), tokenizer, **given)


@pytest.mark.parametrize("fast", [True, False])
def test_of_a_long_conversation_the_oldest_content_is_cut(fast, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    monkeypatch.setattr(type(tokenizer), "is_fast", fast)
    prompt = Prompt("x", None, LONG, None)
    whole = encode_prompt(prompt, tokenizer)
    assert encode_prompt(prompt, tokenizer, max_tokens=len(whole)) == whole
    begin, end = f"{END_OF_TEXT}[system]Be brief.\n[user]", "[assistant]b\n[user]the end of it\n[assistant]"
    for most in range(len(whole) - 20, len(whole)):
        ids = encode_prompt(prompt, tokenizer, max_tokens=most)
        text = tokenizer.decode(ids)
        assert most - 3 <= len(ids) <= most
        assert text.startswith(begin) and text.endswith(end)
        assert LONG[1]["content"].endswith(text.removeprefix(begin).removesuffix(f"\n{end}"))


def test_where_the_oldest_content_is_too_little_its_turn_goes_with_its_answer(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    prompt = Prompt("x", None, LONG, None)
    alone = encode_prompt(Prompt("x", None, [SYSTEM, LONG[-1]], None), tokenizer)
    assert encode_prompt(prompt, tokenizer, max_tokens=len(alone) + 1) == alone
    shorter = tokenizer.decode(encode_prompt(prompt, tokenizer, max_tokens=len(alone) - 3))
    assert shorter.startswith(f"{END_OF_TEXT}[system]Be brief.\n[user]") and shorter.endswith("of it\n[assistant]")
    with pytest.raises(InputError) as error:
        encode_prompt(prompt, tokenizer, max_tokens=5)
    needed = re.fullmatch(
        r"max_prompt_tokens: expected at least (\d+) for the template of prompt 'x', found 5", str(error.value)
    )
    assert needed and len(encode_prompt(prompt, tokenizer, max_tokens=int(needed[1]))) <= int(needed[1])
    assert prompt.messages == LONG  # as it was


def test_a_prompt_without_tokens_is_refused_by_name(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", "{# nothing #}")
    with pytest.raises(InputError, match=r"^prompt 'x': expected at least one token, found none$"):
        encode_prompt(Prompt("x", None, [user("a")], None), tokenizer)


@pytest.mark.parametrize(
    ("ids", "counts"),
    [([], (0, 0)), ([1, 2, 3], (0, 0)), ([1, 2, 3, 4, 5], (0, 2)), ([7] * 8, (4, 5)), ([1, 2] * 4, (3, 5))],
)
def test_repeated_ngrams(ids, counts):
    assert count_repeated_ngrams(ids) == counts
    assert repeated_ngram_share([ids]) == (counts[0] / counts[1] if counts[1] else None)
