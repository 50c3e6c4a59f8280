# ruff: noqa: E501 - the tables read best with a case a line
"""One rendering of conversations: what a record holds is in the text, or refused by file, row and field."""

import json
from dataclasses import replace
from datetime import datetime

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from unit.train.data.chat.test_masks import CHATML, assistant, byte_level, learned, user

from draftsmith.decode.errors import InputError
from draftsmith.train.data.chat import masks, templates
from draftsmith.train.data.chat.masks import ClosingTokens, mask_conversation
from draftsmith.train.data.chat.messages import read_messages
from draftsmith.train.data.prompt_files import read_prompts
from draftsmith.train.data.prompts import answer_texts, encode_prompt, mask_answers

TOKENIZER = byte_level(gpt2=False)
OPEN, CLOSE = "<|im_start|>", "<|im_end|>"
# Writes tools, calls, names, and the reasoning of the last answer alone; results of tools are a user's turn.
WHOLE = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n"
    "{% if m.role == 'tool' %}<result>{{ m.content }}</result>{% else %}"
    "{% if m.role == 'assistant' and loop.last %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}"
    "{% if m.name %}{{ m.name }}: {% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    '[INST]{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}[/INST]{% endfor %}'
    "{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if thinking is defined and not thinking %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Says how it is outside.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c1", "name": "weather", "content": "sunny"}
THOUGHT = assistant("4") | {"reasoning_content": "two and two"}


def using(template, tokenizer=TOKENIZER):
    tokenizer.chat_template = template
    return tokenizer


def read(tmp_path, record, answers="required"):
    first = {"prompt": "a", "completion": "b"}
    (tmp_path / "p.jsonl").write_text(json.dumps(first) + "\n" + json.dumps(record))
    return read_prompts(str(tmp_path / "p.jsonl"), answers=answers)[1]


def as_library(template, messages, **told):
    """The library's tokens, which takes arguments of calls as objects."""
    messages = json.loads(json.dumps(messages))
    for message in messages:
        message["content"] = message["content"] or ""
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return using(template).apply_chat_template(messages, return_dict=False, **told)


def given(tmp_path, record, template, ends=()):
    """Return the ids of a conversation with its answer, and what is learned of it."""
    (masked,) = mask_answers(read(tmp_path, record), using(template), 10**6, ClosingTokens.of(TOKENIZER), ends)
    return masked.ids, learned(masked.ids, masked.mask, TOKENIZER)


TALKS = {
    "tools": [user("Rain?"), assistant("No.")],
    "call": [user("Rain?"), CALLED],
    "result": [user("Rain?"), CALLED, RESULT, assistant("No.")],
    "text beside a call": [user("Rain?"), CALLED | {"content": "Let me look."}],
    "reasoning": [user("2 + 2?"), THOUGHT],
    "reasoning before a call": [user("Rain?"), CALLED | {"reasoning_content": "hm"}],
    "developer": [{"role": "developer", "content": "Be brief."}, user("a"), assistant("b")],
    "name": [user("a") | {"name": "Ann"}, assistant("b")],
}


@pytest.mark.parametrize("name", TALKS)
def test_all_that_a_log_holds_is_in_the_text_as_the_library_writes_it(name, tmp_path):
    talk = TALKS[name]
    told = {"tools": [WEATHER]} if name == "tools" else {}
    record = {"request": {"messages": talk[:-1]} | told, "response": {"choices": [{"message": talk[-1]}]}}
    ids, own = given(tmp_path, record, WHOLE)
    assert ids == as_library(WHOLE, talk, **told)
    asked = encode_prompt(read(tmp_path, record, "dropped"), using(WHOLE))
    last = max(i for i, message in enumerate(talk) if message["role"] in ("user", "tool"))
    assert asked == as_library(WHOLE, talk[: last + 1], add_generation_prompt=True, **told)
    assert TOKENIZER.decode(ids).endswith(f"{own[-1]}\n") and own[-1].endswith(CLOSE)
    if name == "call":
        call = '[INST]{"name": "weather", "arguments": {"city": "Rome"}}[/INST]'
        assert own == [f"{call}{CLOSE}"]  # the empty thinking before it is the prompt's
    if name == "reasoning":
        assert own == [f"<think>\ntwo and two\n</think>\n\n4{CLOSE}"]


LOST = {
    "tools": ({"messages": TALKS["tools"], "tools": [WEATHER]}, "tools[0].function.name"),
    "call": ({"messages": TALKS["call"]}, "messages[1].tool_calls[0].function.name"),
    "reasoning": ({"messages": TALKS["reasoning"]}, "messages[1].reasoning_content"),
    "earlier reasoning": (
        {"messages": [*TALKS["reasoning"], user("a"), assistant("b")]},
        "messages[1].reasoning_content",
    ),
    "unknown object": ({"messages": [user("a"), assistant("b") | {"audio": {"id": "x"}}]}, "messages[1].audio"),
}


@pytest.mark.parametrize("name", LOST)
def test_what_a_template_leaves_out_is_refused_by_file_row_and_field(name, tmp_path):
    record, field = LOST[name]
    with pytest.raises(InputError) as error:
        given(tmp_path, record, CHATML)
    message = str(error.value)
    assert message.startswith(f"{tmp_path}/p.jsonl:2: ") and f"{field}: expected " in message and "\n" not in message
    if not name.startswith(("call", "reasoning", "unknown object")):  # these are of the answer
        with pytest.raises(InputError) as error:
            encode_prompt(read(tmp_path, record, "dropped"), using(CHATML))
        assert message.partition("1': ")[2] == str(error.value).partition("1': ")[2]


@pytest.mark.parametrize(
    ("talk", "template", "field"),
    [
        (TALKS["developer"], "{% for m in messages if m.role != 'developer' %}" + CHATML[26:], "messages[0].content"),
        (TALKS["result"], WHOLE.replace("<result>{{ m.content }}</result>", ""), "messages[2].content"),
        (TALKS["text beside a call"], WHOLE.replace("{{ m.content }}{% for", "{{ m.content if not m.tool_calls }}{% for"),
         "messages[1].content"),
        (TALKS["call"], WHOLE.replace("{{ c.function.arguments | tojson }}", "{}"),
         "messages[1].tool_calls[0].function.arguments"),
    ],
)  # fmt: skip
def test_a_turn_or_a_part_of_it_that_a_template_drops_is_refused(talk, template, field, tmp_path):
    with pytest.raises(InputError, match="leaves it out") as error:
        given(tmp_path, {"messages": talk}, template)
    assert f"p.jsonl:2: sample '1': {field}: " in str(error.value)


@pytest.mark.parametrize("part", ["description", "parameters"])
def test_tools_are_written_whole_or_refused(part, tmp_path):
    kept = {"description": "parameters", "parameters": "description"}[part]
    template = WHOLE.replace("{{ t | tojson }}", "{{ t.function.name }}{{ t.function." + kept + " | tojson }}")
    with pytest.raises(InputError, match=rf"tools\[0\]\.function\.{part}: "):
        given(tmp_path, {"messages": TALKS["tools"], "tools": [WEATHER]}, template)


def test_tools_as_json_in_a_string_are_the_same_tools_and_an_empty_list_is_none(tmp_path):
    record = {"messages": TALKS["tools"], "tools": json.dumps([WEATHER])}
    assert given(tmp_path, record, WHOLE) == given(tmp_path, record | {"tools": [WEATHER]}, WHOLE)
    for empty in ([], None, ""):
        assert read(tmp_path, record | {"tools": empty}).tools is None
    for wrong, found in (("[", "a string that is no JSON"), ([1], "a list of something else"), (5, "the number 5")):
        with pytest.raises(InputError, match=rf"p\.jsonl:2: tools: expected a list of objects, found {found}$"):
            read(tmp_path, record | {"tools": wrong})
    with pytest.raises(InputError, match=r": tools\[0\]\.function: expected an object, found a string$"):
        read(tmp_path, record | {"tools": [{"function": "a"}]})


def test_calls_and_tools_may_be_one_object_or_json_in_a_string(tmp_path):
    whole = {"messages": TALKS["call"], "tools": [WEATHER]}
    for written in (CALL, json.dumps(CALL), json.dumps([CALL])):
        messages = [message | ({"tool_calls": written} if "tool_calls" in message else {}) for message in TALKS["call"]]
        record = {"messages": messages, "tools": WEATHER}
        assert given(tmp_path, record, WHOLE) == given(tmp_path, whole, WHOLE)


def test_names_of_speakers_that_a_template_does_not_write_are_left_out_as_a_server_does(tmp_path):
    named, plain = ({"messages": talk} for talk in (TALKS["name"], [user("a"), assistant("b")]))
    assert given(tmp_path, named, CHATML) == given(tmp_path, plain, CHATML)


def test_a_template_of_its_own_for_tools_is_taken(tmp_path):
    record = {"messages": TALKS["tools"], "tools": [WEATHER]}
    assert given(tmp_path, record, {"default": CHATML, "tool_use": WHOLE}) == given(tmp_path, record, WHOLE)


@pytest.mark.parametrize(
    "arguments",
    ["{{ c.function.arguments }}", "{{ c.function.arguments | tojson }}", "{{ '' + c.function.arguments }}"],
)
@pytest.mark.parametrize("written", ['{"city": "Rome"}', {"city": "Rome"}])
def test_arguments_are_handed_over_as_the_template_reads_them(arguments, written, tmp_path):
    call = {"function": {"name": "weather", "arguments": written}}
    template = WHOLE.replace("{{ c.function.arguments | tojson }}", arguments)
    record = {"messages": [user("Rain?"), {"role": "assistant", "tool_calls": [call]}]}
    assert given(tmp_path, record, template)[1] == [
        '[INST]{"name": "weather", "arguments": {"city": "Rome"}}[/INST]' + CLOSE
    ]


def test_a_template_that_reads_parts_gets_parts_and_one_that_reads_text_gets_their_text(tmp_path):
    """vLLM joins parts by line breaks where the template reads none."""
    reading = "{% for p in m.content %}{{ p.text }}{% endfor %}"
    parts = CHATML.replace("{{ m.content }}", reading)
    both = CHATML.replace(
        "{{ m.content }}", "{% if m.content is string %}{{ m.content }}{% else %}" + reading + "{% endif %}"
    )
    content = [{"type": "text", "text": "Hello "}, {"type": "text", "text": "world"}]
    several = [user("") | {"content": content}, assistant("b")]
    for template, talk, asked in (
        *((template, [user("Hello world"), assistant("b")], "Hello world") for template in (CHATML, parts, both)),
        *((template, several, "Hello world") for template in (parts, both)),
        (CHATML, several, "Hello \nworld"),
    ):
        ids, own = given(tmp_path, {"messages": talk}, template)
        assert TOKENIZER.decode(ids) == f"{OPEN}user\n{asked}{CLOSE}\n{OPEN}assistant\nb{CLOSE}\n"
        assert own == [f"b{CLOSE}"]
    prompt = read(tmp_path, {"messages": several}, "dropped")
    assert prompt.record()["messages"] == prompt.request(None, {})["messages"] == several[:1]
    assert prompt.messages[0]["content"] == "Hello \nworld"
    shorter = encode_prompt(prompt, using(parts), max_tokens=len(encode_prompt(prompt, using(parts))) - 1)
    assert TOKENIZER.decode(shorter).endswith(f"world{CLOSE}\n{OPEN}assistant\n")


@pytest.mark.parametrize("read_as", masks.REASONING)
@pytest.mark.parametrize("said_as", masks.REASONING)
def test_reasoning_is_found_by_any_of_its_names(said_as, read_as, tmp_path):
    template = WHOLE.replace("m.reasoning_content", f"m.{read_as}")
    record = {"messages": [user("2 + 2?"), assistant("4") | {said_as: "two and two"}]}
    assert given(tmp_path, record, template)[1] == [f"<think>\ntwo and two\n</think>\n\n4{CLOSE}"]
    record["messages"][1] |= dict.fromkeys(masks.REASONING, "two and two")  # servers write it twice
    assert given(tmp_path, record, template)[1] == [f"<think>\ntwo and two\n</think>\n\n4{CLOSE}"]


def test_reasoning_that_a_template_writes_in_the_last_answer_alone_is_its_way_and_such_turns_are_not_learned(tmp_path):
    talk = [user("2 + 2?"), THOUGHT, user("3 + 3?"), assistant("6") | {"reasoning_content": "three and three"}]
    masked = mask_conversation(talk, using(WHOLE), "x")
    assert masked.ids == as_library(WHOLE, talk) and masked.left_out == {1: masks.LATER}
    assert learned(masked.ids, masked.mask, TOKENIZER) == [f"<think>\nthree and three\n</think>\n\n6{CLOSE}"]
    asked = encode_prompt(read(tmp_path, {"messages": talk}, "dropped"), using(WHOLE))
    assert asked == as_library(WHOLE, talk[:3], add_generation_prompt=True)


KIMI = (
    "{% set last = namespace(at=-1) %}{% for m in messages %}{% if m.role == 'assistant' and not m.tool_calls %}"
    "{% set last.at = loop.index0 %}{% endif %}{% endfor %}{{ tools }}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}<think>{{ m.reasoning_content if loop.index0 > last.at }}</think>{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}[INST]{{ c.id }} {{ c.function.arguments }}[/INST]{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_the_name_of_a_call_may_stand_in_its_id_and_thinking_before_calls_alone(tmp_path):
    """Kimi K2's way."""
    call = CALLED | {"tool_calls": [CALL | {"id": "functions.weather:0"}]}
    for thought in ("", "hm"):
        record = {"messages": [user("Rain?"), call | {"reasoning_content": thought}], "tools": [WEATHER]}
        own = f'</think>[INST]functions.weather:0 {{"city": "Rome"}}[/INST]{CLOSE}'
        assert given(tmp_path, record, KIMI)[1] == [f"<think>{thought}{own}" if thought else own.partition("k>")[2]]
    assert given(tmp_path, {"messages": [user("a"), assistant("b")]}, KIMI)[1] == [f"b{CLOSE}"]
    with pytest.raises(InputError, match=r"tool_calls\[0\]\.function\.name: expected a chat template that writes it"):
        given(tmp_path, {"messages": [user("Rain?"), CALLED], "tools": [WEATHER]}, KIMI)


@pytest.mark.parametrize("end", [CLOSE, "<|eot|>"])
def test_special_tokens_that_enclose_a_call_do_not_end_its_turn(end, tmp_path):
    """Calls may end with another token than answers."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}<|begin|>"
        "{{ c.function.name }} {{ c.function.arguments | tojson }}<|header|>{% endfor %}"
        "{{ '" + end + "' if m.tool_calls else '<|im_end|>' }}{{ '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    call = f'<|begin|>weather {{"city": "Rome"}}<|header|>{end}'
    assert given(tmp_path, {"messages": TALKS["call"]}, template)[1] == [call]
    talk = [user("Rain?"), CALLED, RESULT, assistant("No.")]
    assert given(tmp_path, {"messages": talk}, template)[1] == [call, f"No.{CLOSE}"]


HEADED = (
    "{% set empty = '<think>\n\n</think>\n' if thinking is defined and not thinking else '' %}{% for m in messages %}"
    "{% if m.role == 'assistant' %}{% generation %}<|im_start|>assistant\n{{ empty }}{{ m.content }}<|im_end|>\n"
    "{% endgeneration %}{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ empty }}{% endif %}"
)


@pytest.mark.parametrize("told", [{}, {"thinking": False}])
def test_what_the_generation_prompt_writes_is_not_learned_where_markers_enclose_it(told):
    talk = [user("a"), assistant("b"), user("c"), assistant("d")]
    masked = mask_conversation(talk, using(HEADED), "x", variables=told)
    assert masked.ids == as_library(HEADED, talk, **told) and masked.left_out == {}
    assert learned(masked.ids, masked.mask, TOKENIZER) == [f"b{CLOSE}", f"d{CLOSE}"]
    before = as_library(HEADED, talk[:3], add_generation_prompt=True, **told)
    assert not any(masked.mask[len(as_library(HEADED, talk[:3], **told)) : len(before)])


def test_a_variable_must_be_one_that_the_template_reads_not_a_part_of_its_text(tmp_path):
    template = "{# thinking, tools #}" + CHATML + "{% set thinking_budget = 5 %}think"
    for name in ("thinking", "thinking_budget", "budget", "think", "messages"):
        with pytest.raises(InputError, match=f"^chat_template_kwargs: expected variables .*, found '{name}'$"):
            mask_conversation(TALKS["tools"], using(template), "x", variables={name: 5})


def test_arguments_of_a_record_count_before_those_of_a_command(tmp_path):
    record = {"messages": TALKS["tools"], "chat_template_kwargs": {"thinking": False}}
    prompt = read(tmp_path, record, "dropped")
    ids = encode_prompt(prompt, using(WHOLE), variables={"thinking": True})
    assert ids == as_library(WHOLE, [user("Rain?")], add_generation_prompt=True, thinking=False)
    request = prompt.request("Be brief.", {"thinking": True, "other": 1})
    assert request["chat_template_kwargs"] == {"thinking": False, "other": 1}
    logged = {"request": {"messages": [user("Rain?")], "reasoning_effort": "low", "documents": [{"text": "d"}]}}
    assert read(tmp_path, logged, "dropped").variables == {"reasoning_effort": "low", "documents": [{"text": "d"}]}
    with pytest.raises(InputError, match=r"p\.jsonl:2: chat_template_kwargs: expected an object, found a list$"):
        read(tmp_path, record | {"chat_template_kwargs": [1]})


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"messages": TALKS["call"]}, r"messages\[1\]\.tool_calls"),
        ({"messages": TALKS["reasoning"]}, r"messages\[1\]\.reasoning_content"),
        ({"messages": TALKS["developer"]}, r"messages\[0\]\.role"),
        ({"messages": TALKS["tools"], "tools": [WEATHER]}, "tools"),
        ({"prompt": "a", "completion": "b", "tools": [WEATHER]}, "tools"),
        ({"prompt": "a", "completion": "b", "chat_template_kwargs": {"x": 1}}, "chat_template_kwargs"),
    ],
)
def test_without_a_template_nothing_but_text_is_taken(told, message, tmp_path):
    expected = rf"^{tmp_path}/p\.jsonl:2: {message}: expected conversations and a chat template that they go into"
    with pytest.raises(InputError, match=expected):
        given(tmp_path, told, None)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": [user("a"), assistant("b") | {"weight": 2}]}, r"messages\[1\]\.weight: expected 1"),
        ({"messages": [user("a"), assistant("b") | {"tool_calls": "x"}]}, r"messages\[1\]\.tool_calls: expected a list"),
        ({"messages": [user("a") | {"tool_calls": [CALL]}, assistant("b")]}, r"messages\[0\]\.tool_calls: expected a list"),
        ({"messages": [user("a"), assistant("b") | {"tool_calls": [5]}]}, r"messages\[1\]\.tool_calls\[0\]: expected a call"),
        ({"messages": [user("a"), {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]}]},
         r"messages\[1\]\.tool_calls\[0\]\.function\.arguments: expected an object or its JSON, found a list"),
        ({"messages": [user("a"), assistant("b") | {"reasoning": 5}]}, r"messages\[1\]\.reasoning: expected a string"),
        ({"messages": [user("a"), {"role": "assistant", "content": None}]}, r"messages\[1\]\.content: expected a string"),
        ({"messages": [user("a"), assistant("b") | {"thinking": "\ud800"}]}, r"messages\[1\]\.thinking: expected JSON in"),
        ({"messages": TALKS["developer"], "system": "Be brief."}, "system: expected no system field with a system turn"),
        ({"prompt": "a", "completion": "b", "system": "Be brief."}, "system: expected a system turn"),
        ({"messages": TALKS["tools"], "functions": [WEATHER]}, "functions: expected tools, found a list"),
        ({"request": {"messages": [user("a")], "continue_final_message": True},
          "response": {"choices": [{"message": assistant("b")}]}}, "continue_final_message: expected an answer of its own"),
        ({"request": {"messages": [user("a")], "add_generation_prompt": False},
          "response": {"choices": [{"message": assistant("b")}]}}, r"request\.add_generation_prompt: expected an answer"),
    ],
)  # fmt: skip
def test_what_is_no_message_is_refused_where_it_stands(record, message, tmp_path):
    with pytest.raises(InputError, match=rf"^{tmp_path}/p\.jsonl:2: {message}"):
        read(tmp_path, record)


def test_weights_of_one_and_fields_without_a_value_say_nothing(tmp_path):
    nothing = {"tool_calls": [], "name": None, "reasoning": "", "function_call": None, "weight": 1}
    prompt = read(tmp_path, {"messages": [user("a") | nothing | {"weight": 0}, assistant("b") | nothing]})
    assert prompt.messages == [user("a"), assistant("b")]


def test_a_record_written_again_and_a_request_hold_all_of_it(tmp_path):
    record = {"messages": TALKS["result"], "tools": [WEATHER], "chat_template_kwargs": {"thinking": False}}
    prompt = read(tmp_path, record)
    assert read(tmp_path, prompt.record() | {"id": prompt.id}) == prompt
    parsed = json.loads(json.dumps(TALKS["result"]))
    parsed[1]["tool_calls"][0]["function"]["arguments"] = {"city": "Rome"}
    for talk in (TALKS["result"], parsed):
        request = read(tmp_path, record | {"messages": talk}).request("Be brief.", {})
        assert request["tools"] == [WEATHER] and request["chat_template_kwargs"] == {"thinking": False}
        assert request["messages"][0] == {"role": "system", "content": "Be brief."}
        assert request["messages"][2] == CALLED | {"content": ""}  # servers take arguments as JSON
        assert request["messages"][3] == RESULT


def test_the_next_turn_comes_after_an_answer_with_its_special_tokens():
    ids = TOKENIZER.encode("a<|begin|>b<|header|><|im_end|>", add_special_tokens=False)
    sample = {"id": "x.1", "input_ids": [5, *ids], "prompt_length": 1, "finish_reason": "stop"}
    assert answer_texts([sample], 1, TOKENIZER) == {"x": "a<|begin|>b<|header|>"}
    cut = sample | {"input_ids": [5, *ids[:-1]], "finish_reason": "length"}
    assert answer_texts([cut], 1, TOKENIZER) == {"x": "a<|begin|>b<|header|>"}


def test_metadata_of_messages_is_left_out_and_named_once(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(templates.logger, "warning", lambda line, field: said.append(field))
    noted = {"language": "English", "redacted": False, "turn_identifier": 3, "provider_specific_fields": {"a": 1}}
    talk = [user("a") | noted, assistant("b") | noted]
    templates.warn_unread.cache_clear()
    plain = given(tmp_path, {"messages": [user("a"), assistant("b")]}, CHATML)
    assert given(tmp_path, {"messages": talk}, CHATML) == plain
    assert sorted(said) == [f"messages[].{name}" for name in sorted(noted)]
    assert read_messages([user("a") | {"timestamp": datetime.now()}], "p", "messages") == [user("a")]
    with pytest.raises(InputError, match=r"messages\[0\]\.images"):
        given(tmp_path, {"messages": [user("a") | {"images": [{"url": "b"}]}, assistant("b")]}, CHATML)


def test_variables_of_a_log_that_the_template_does_not_read_are_left_out(tmp_path):
    talk = [user("a"), assistant("b")]
    request = {"messages": talk[:1], "reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}}
    record = {"request": request, "response": {"choices": [{"message": talk[1]}]}}
    assert given(tmp_path, record, CHATML) == given(tmp_path, {"messages": talk}, CHATML)
    asked = read(tmp_path, record, "dropped")
    plain = read(tmp_path, {"messages": talk}, "dropped")
    assert encode_prompt(asked, using(CHATML)) == encode_prompt(plain, using(CHATML))
    with pytest.raises(InputError, match=r"chat_template_kwargs: .*'enable_thinking'"):
        encode_prompt(asked, using(CHATML), variables={"enable_thinking": False})


def test_a_template_that_writes_calls_of_turns_without_content_gets_null(tmp_path):
    template = WHOLE.replace("m.tool_calls", "(m.tool_calls if m.content is none else [])")
    assert template != WHOLE
    assert given(tmp_path, {"messages": TALKS["call"]}, template) is not None


def test_turns_of_weight_0_are_read_but_not_learned_from(tmp_path):
    talk = [user("a"), assistant("b") | {"weight": 0}, user("c"), assistant("d")]
    (masked,) = mask_answers(read(tmp_path, {"messages": talk}), using(CHATML), 10**6, ClosingTokens.of(TOKENIZER), ())
    assert masked.left_out == {1: masks.UNWEIGHTED} and learned(masked.ids, masked.mask, TOKENIZER) == [f"d{CLOSE}"]
    (last,) = mask_answers(read(tmp_path, {"messages": talk[:2]}), using(None), 10**6, ClosingTokens.of(TOKENIZER), ())
    assert not any(last.mask)


@pytest.mark.parametrize("field", ["messages", "conversations"])
def test_a_system_prompt_beside_a_conversation_comes_first(field, tmp_path):
    talk = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    talk = [user("a"), assistant("b")] if field == "messages" else talk
    messages = read(tmp_path, {field: talk, "system": "Be brief."}).messages
    assert messages == [{"role": "system", "content": "Be brief."}, user("a"), assistant("b")]


def test_arrow_adds_no_keys_to_calls_and_tools(tmp_path):
    calls = [{"function": {"name": "f", "arguments": arguments}} for arguments in ({"city": "Rome"}, {"hour": 3})]
    rows = [{"messages": [user("a"), {"role": "assistant", "content": "b", "tool_calls": [call]}]} for call in calls]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "p.parquet")
    read_calls = [p.messages[1]["tool_calls"][0] for p in read_prompts(str(tmp_path / "p.parquet"), answers="required")]
    assert read_calls == calls


def test_a_logged_text_completion_continues_plain_text_without_the_template(tmp_path):
    request = {"prompt": "def f("}
    record = {"request": request, "response": {"choices": [{"text": "x): pass", "finish_reason": "stop"}]}}
    ids, own = given(tmp_path, record, CHATML)
    plain = [*TOKENIZER.encode("def f("), *TOKENIZER.encode("x): pass"), TOKENIZER.eos_token_id]
    assert (ids, own) == (plain, [f"x): pass{TOKENIZER.eos_token}"])
    prompt = read(tmp_path, record)
    assert prompt.has_answer and encode_prompt(prompt, using(CHATML)) == TOKENIZER.encode("def f(")
    assert replace(read(tmp_path, prompt.record()), id=prompt.id) == prompt
    assert not read(tmp_path, record, "dropped").has_answer
