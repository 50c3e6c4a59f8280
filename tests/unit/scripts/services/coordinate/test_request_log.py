"""Logs of requests: what the coordinator writes, and what `prepare` reads of them and of others."""

import json

import pytest

from draftsmith.decode.errors import InputError
from draftsmith.scripts.services.coordinate.config import Log, Redaction
from draftsmith.scripts.services.coordinate.request_log import LogWriter, record, redactor, unstreamed_answer
from draftsmith.train.data.prompt_files import read_prompts

ASKED = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
ANSWER = {"role": "assistant", "content": "Hello."}
READ = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}, ANSWER]
CHOICES = [{"index": 0, "message": ANSWER, "finish_reason": "stop"}]


def read(tmp_path, *records, answers="required"):
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    return read_prompts(str(path), answers=answers)


@pytest.mark.parametrize(
    "line",
    [
        {"request": {"model": "m", "messages": ASKED}, "response": {"choices": CHOICES}},
        {"messages": ASKED, "choices": CHOICES, "usage": {}},
        {"custom_id": "7", "body": {"messages": ASKED}, "response": {"status_code": 200, "body": {"choices": CHOICES}}},
        {"request": {"messages": ASKED}, "response": {"body": {"choices": CHOICES}}},
    ],
)
def test_the_usual_shapes_are_conversations_with_their_answers(line, tmp_path):
    (prompt,) = read(tmp_path, line | {"category": "chat"})
    assert prompt.messages == READ
    assert prompt.category == "chat"
    assert prompt.id == line.get("custom_id", "0")
    assert not prompt.cut
    (asked,) = read(tmp_path, line, answers="dropped")
    assert asked.messages == READ[:2]


def test_a_completed_text_is_a_prompt_and_its_answer(tmp_path):
    line = {"id": 3, "request": {"prompt": "def"}, "response": {"choices": [{"text": " f():"}]}}
    (prompt,) = read(tmp_path, line)
    assert prompt.id == "3"
    assert (prompt.text, prompt.answer, prompt.messages) == ("def", " f():", None)
    (asked,) = read(tmp_path, {"request": {"prompt": "def", "metadata": {"category": "code"}}}, answers="dropped")
    assert (asked.text, asked.category) == ("def", "code")


def test_where_answers_are_kept_a_line_without_one_is_a_prompt(tmp_path):
    lines = [{"request": {"messages": ASKED}}, {"body": {"messages": ASKED}, "response": None, "error": {}}]
    prompts = read(tmp_path, *lines, {"messages": ASKED, "choices": CHOICES}, answers="kept")
    assert [prompt.messages for prompt in prompts] == [READ[:2], READ[:2], READ]


def test_an_answer_that_was_cut_is_marked(tmp_path):
    reasons = ["length", "abort", "content_filter", "model_length", "insufficient_system_resource", "new", None]
    reasons += ["stop", "tool_calls", "eos"]
    lines = [{"messages": ASKED, "choices": [{"message": ANSWER, "finish_reason": reason}]} for reason in reasons]
    assert [prompt.cut for prompt in read(tmp_path, *lines)] == [True] * 7 + [False] * 3


@pytest.mark.parametrize(("value", "cut"), [("\n\n", True), (7, False)])
@pytest.mark.parametrize("field", ["stop_reason", "matched_stop"])
def test_an_answer_that_a_stop_text_ended_is_cut_and_a_token_is_passed_on(field, value, cut, tmp_path):
    choice = {"message": ANSWER, "finish_reason": "stop", field: value}
    streamed = unstreamed_answer(events(part("2"), {"choices": [{"delta": {}, **choice} | {"index": 0}]}), True)
    for answer in ({"choices": [choice]}, streamed):
        line = record({"messages": ASKED}, answer, {}, None)
        logged = read(tmp_path, {"messages": ASKED, "choices": [choice]}, line)
        assert [(p.cut, p.stop) for p in logged + read(tmp_path, logged[0].record())] == [(cut, None if cut else 7)] * 3


@pytest.mark.parametrize(("said", "cut"), [({}, True), ({"stop_reason": None}, False), ({"matched_stop": 7}, False)])
@pytest.mark.parametrize("stops", [{"stop": ["\n"]}, {"stop_token_ids": [9]}])
def test_where_a_request_has_stops_the_server_must_say_that_none_ended_the_answer(stops, said, cut, tmp_path):
    choice, request = {"index": 0, "message": ANSWER, "finish_reason": "stop"} | said, {"messages": ASKED} | stops
    streamed = unstreamed_answer(events(part("2"), {"choices": [{"delta": {}, **choice}]}, part(reason=None)), True)
    for answer in ({"choices": [choice]}, streamed):
        assert [p.cut for p in read(tmp_path, record(request, answer, {}, None))] == [cut]


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ({"request": {"prompt": [5, 6]}}, "request.messages: expected the request as messages or a prompt in text"),
        ({"request": {"messages": ASKED}}, "response.choices: expected an answer, found none"),
        ({"messages": ASKED, "choices": []}, "choices: expected an answer, found none"),
        ({"prompt": "a", "echo": True, "choices": [{"text": "ab"}]}, "echo: expected an answer without its prompt"),
        (
            {"custom_id": "1", "response": {"body": {}}, "body": {"messages": ASKED}},
            "response.body.choices: expected an answer",
        ),
        ({"messages": ASKED, "choices": [{"text": "x"}]}, "choices[0].message: expected a message, found none"),
        (
            {"messages": ASKED, "choices": [{"message": {"content": None, "tool_calls": [{"id": "1"}]}}]},
            "messages[2].tool_calls[0].function.name: expected a string, found nothing",
        ),
        ({"messages": 5, "choices": CHOICES}, "messages: expected messages with an assistant turn at their end, found"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}], "choices": CHOICES},
            "messages[0].content: expected parts of text, found 'image_url'",
        ),
    ],
)
def test_a_line_that_is_no_text_is_refused_by_file_and_line(line, named, tmp_path):
    good = {"messages": ASKED, "choices": CHOICES}
    with pytest.raises(InputError) as error:
        read(tmp_path, good, line)
    where, _, what = str(error.value).partition("log.jsonl:2: ")
    assert what.startswith(named), where + what
    assert "\n" not in str(error.value)


def events(*parts: dict, end: str = "data: [DONE]\n\n") -> bytes:
    return "".join(f"data: {json.dumps(part, ensure_ascii=False)}\n\n" for part in parts).encode() + end.encode()


def part(text: str | None = None, reason: str | None = None, index: int = 0) -> dict:
    return {"choices": [{"index": index, "delta": {} if text is None else {"content": text}, "finish_reason": reason}]}


def test_a_question_with_answers_to_choose_from_is_no_log(tmp_path):
    (prompt,) = read(tmp_path, {"turns": ["Which?"], "choices": ["A", "B"]}, answers="dropped")
    assert prompt.messages == [{"role": "user", "content": "Which?"}]


def test_a_call_that_came_in_pieces_is_redacted_as_a_whole():
    calls = [{"index": 0, "id": "c", "function": {"name": "mail", "arguments": '{"to": "bob'}}]
    calls += [{"index": 1, "function": {"name": "other", "arguments": None}}]
    calls += [{"index": 0, "function": {"arguments": '@x.com"}'}}]
    content = events(*({"choices": [{"index": 0, "delta": {"tool_calls": [call]}}]} for call in calls))
    redact = redactor(Log("log.jsonl", [Redaction(r"\w+@\w+\.\w+", "[mail]")]))
    written = record({"model": "m", "stop": ["a@b.de"]}, unstreamed_answer(content, streamed=True), {}, redact)
    assert written["request"]["stop"] == ["[mail]"]
    message = written["response"]["choices"][0]["message"]
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == ['{"to": "[mail]"}', ""]
    assert message["tool_calls"][0]["id"] == "c"


@pytest.mark.parametrize("index", [{}, {"index": 0}])
def test_calls_that_share_an_index_are_not_joined(index):
    functions = [("add", ""), (None, '{"a":'), (None, "1}"), ("show", "{}")]
    parts = [index | {"function": {"name": name, "arguments": text}} for name, text in functions]
    content = events(*({"choices": [{"delta": {"tool_calls": [one]}}]} for one in parts))
    calls = unstreamed_answer(content, streamed=True)["choices"][0]["message"]["tool_calls"]
    assert [tuple(call["function"].values()) for call in calls] == [("add", '{"a":1}'), ("show", "{}")]


def test_what_shapes_a_conversation_is_written_and_read_again_redacted(tmp_path):
    tools = [{"type": "function", "function": {"name": "mail", "description": "To bob@x.com, say."}}]
    call = {"id": "c", "type": "function", "function": {"name": "mail", "arguments": '{"to": "bob@x.com"}'}}
    asked = [
        *ASKED,
        {"role": "assistant", "content": None, "reasoning_content": "bob@x.com?", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "sent"},
    ]
    request = {"model": "m", "messages": asked, "tools": tools, "user": "somebody"}
    request |= {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low", "tool_choice": "auto"}
    deltas = [{"role": "assistant", "reasoning": "Do"}, {"reasoning": "ne."}, {"content": "Sent "}, {"content": "it."}]
    answer = unstreamed_answer(events(*({"choices": [{"delta": delta}]} for delta in deltas)), streamed=True)
    line = record(request, answer, {"id": "1"}, redactor(Log("l.jsonl", [Redaction(r"\w+@\w+\.\w+", "[mail]")])))
    assert "bob" not in json.dumps(line) and "somebody" not in json.dumps(line)
    (prompt,) = read(tmp_path, line)
    function = {"name": "mail", "arguments": '{"to": "[mail]"}'}
    assert prompt.messages == [
        *READ[:2],
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "[mail]?",
            "tool_calls": [call | {"function": function}],
        },
        {"role": "tool", "content": "sent", "tool_call_id": "c"},
        {"role": "assistant", "content": "Sent it.", "reasoning": "Done."},
    ]
    assert prompt.tools == [{"type": "function", "function": {"name": "mail", "description": "To [mail], say."}}]
    assert prompt.variables == {"enable_thinking": False, "reasoning_effort": "low"}


def test_a_streamed_answer_is_put_together():
    content = events(part("Hel"), part("x", index=1), part("lo\u2028."), part(None, "stop"), {"usage": 5})
    whole = unstreamed_answer(content, streamed=True)
    assert whole["usage"] == 5
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": "Hello\u2028."}
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert whole["choices"][1]["message"]["content"] == "x"
    texts = [{"choices": [{"index": 0, "text": t, "finish_reason": r}]} for t, r in (("a", None), ("b", "length"))]
    assert unstreamed_answer(events(*texts), True)["choices"] == [{"index": 0, "text": "ab", "finish_reason": "length"}]


@pytest.mark.parametrize("content", [b"", events(part("a"), end=""), events(part("a"), {"error": {"message": "x"}})])
def test_a_stream_without_its_end_is_no_answer(content):
    assert unstreamed_answer(content, streamed=True) is None


@pytest.mark.parametrize(
    ("content", "streamed", "named"),
    [
        (b'{"choices": [5]}', False, "answer: choices[0]: expected"),
        (b'{"choices": [{"message": "secret"}]}', False, "answer: choices[0].message: expected"),
        (b"[" * 5000, False, "answer: expected JSON"),
        (events({"choices": [{"index": "secret", "delta": {}}]}), True, "answer: choices[0].index: expected a whole"),
        (events({"choices": [{"delta": {"content": ["secret"]}}]}), True, "answer: choices[0].delta.content: expected"),
        (events({"choices": [{"delta": {"tool_calls": [{"function": 5}]}}]}), True, "answer: choices[0].delta.tool"),
        (b"data: secret\n\ndata: [DONE]\n\n", True, "answer: expected JSON"),
    ],
)
def test_an_answer_of_another_shape_is_named_and_not_shown(content, streamed, named):
    with pytest.raises(InputError) as error:
        unstreamed_answer(content, streamed)
    assert str(error.value).startswith(named) and "secret" not in str(error.value)


def test_token_ids_are_written_unless_something_is_redacted(tmp_path):
    choice = {"message": ANSWER, "finish_reason": "stop", "token_ids": [7, 8]}
    answer, asked = {"choices": [choice], "prompt_token_ids": [5, 6]}, {"messages": ASKED}
    redact = redactor(Log("l.jsonl", [Redaction("secret", "…")]))
    (plain,) = read(tmp_path, json.loads(json.dumps(record(asked, answer, {}, redactor(Log("l.jsonl"))))))
    (redacted,) = read(tmp_path, json.loads(json.dumps(record(asked, answer, {}, redact))))
    assert plain.served == ([5, 6], [7, 8]) and redacted.served is None and plain.messages == redacted.messages
    (written,) = read(tmp_path, plain.record())  # as `adapt` writes what it learns
    assert written.served == plain.served
    (asked_again,) = read(tmp_path, plain.record(), answers="dropped")
    assert asked_again.served is None


@pytest.mark.parametrize("kept", [{"usage": {"completion_tokens": 2}}, {}, {"usage": None}])
@pytest.mark.parametrize("left_out", [{"usage": {"completion_tokens": 3}}, {"prompt_token_ids": None}])
def test_token_ids_are_read_if_they_are_whole(kept, left_out, tmp_path):
    choice = {"message": ANSWER, "finish_reason": "stop", "token_ids": [7, 8]}
    line = {"messages": ASKED, "choices": [choice], "prompt_token_ids": [5, 6]}
    assert [prompt.served for prompt in read(tmp_path, line | kept, line | left_out)] == [([5, 6], [7, 8]), None]


def test_token_ids_that_are_none_are_refused(tmp_path):
    line = {"messages": [*ASKED, ANSWER], "token_ids": [7, -1], "prompt_token_ids": [5]}
    with pytest.raises(InputError, match=r"log.jsonl:1: token_ids: \[1\]: expected at least 0, found -1"):
        read(tmp_path, line)


def test_a_request_of_another_shape_is_written_as_it_is():
    redact = redactor(Log("l.jsonl", [Redaction("secret", "…")]))
    line = record({"messages": ["a secret", None, [{"x": "secret"}]], "stop": 5}, {"choices": []}, {}, redact)
    assert line["request"] == {"messages": ["a …", None, [{"x": "…"}]], "stop": 5}


def test_a_redaction_that_would_backtrack_without_end_is_done_at_once():
    redact = redactor(Log("l.jsonl", [Redaction(r"(?P<first>a+)+$", r"<\g<first>é>")]))
    assert redact("a" * 40 + "!") == "a" * 40 + "!"
    assert redact("é aa") == "é <aaé>"


def test_texts_are_redacted_wherever_they_stand_and_who_asked_is_not_written():
    redact = redactor(Log("l.jsonl", [Redaction(r"\w+@\w+", "<mail>"), Redaction(r"(\d)\d+", r"\1…")]))
    request = {
        "model": "m",
        "user": "somebody",
        "metadata": {"name": "a@b"},
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a@b is 1234"}]}],
    }
    line = record(request, {"choices": [{"message": {"content": "c@d"}, "finish_reason": "stop"}]}, {"id": "1"}, redact)
    assert line["request"] == {
        "model": "m",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "<mail> is 1…"}]}],
    }
    assert line["response"]["choices"] == [{"finish_reason": "stop", "message": {"content": "<mail>"}}]
    assert line["id"] == "1"
    text = record({"prompt": "a@b"}, {"choices": [{"text": "c@d"}]}, {}, redact)
    assert (text["request"]["prompt"], text["response"]["choices"][0]["text"]) == ("<mail>", "<mail>")


def test_a_redaction_that_cannot_be_is_refused():
    with pytest.raises(InputError, match=r"^log\.token_ids: expected false with a redaction, found true$"):
        Log("l.jsonl", [Redaction("secret", "…")], token_ids=True)
    with pytest.raises(InputError, match=r"^log\.redact\.replacement: expected a template"):
        Redaction("a", r"\2")


def test_a_file_that_cannot_be_written_is_a_line(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "log.jsonl", tmp_path / "folder.jsonl"):
        (tmp_path / "folder.jsonl").mkdir(exist_ok=True)
        with pytest.raises(InputError, match=r"^log\.path: expected a file to write, found "):
            LogWriter(Log(str(path)))


def test_lines_are_whole_and_only_the_owner_reads_them(tmp_path):
    path = tmp_path / "in" / "log.jsonl"
    writer, answer = LogWriter(Log(str(path), [Redaction("secret", "…")])), {"choices": [{"text": "secret"}]}
    writer.write({"prompt": "a"}, answer, {"id": "1"})
    with path.open("a") as file:
        file.write('{"cut off')  # a full disk
    writer.write({"prompt": "b"}, answer, {"id": "2"})
    first, _, last = path.read_text().splitlines()
    assert [json.loads(line)["response"]["choices"][0]["text"] for line in (first, last)] == ["…", "…"]
    assert path.stat().st_mode & 0o077 == 0
    path.rename(tmp_path / "moved.jsonl")
    writer.write({"prompt": "c"}, answer, {"id": "3"})
    assert json.loads(path.read_text())["id"] == "3"
