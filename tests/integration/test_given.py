"""Completions that are in the records already: no model writes them."""

import json
import shutil
from pathlib import Path

import pytest

from draftsmith.decode.errors import InputError
from draftsmith.scripts.prepare import main
from draftsmith.train.cli import flags_of
from draftsmith.train.data import generate as completions
from draftsmith.train.data.chat.masks import LATER, mask_conversation
from draftsmith.train.data.examples import training_examples
from draftsmith.train.data.generate import PrepareConfig, load_completions, prepare
from draftsmith.train.data.prompt_files import read_prompts
from draftsmith.train.data.prompts import encode_prompts
from draftsmith.train.models import load_tokenizer

# Turns that an end-of-sequence token ends, and turns that nothing ends. An added token stands before them, because a
# token that is joined across the border would not be learned from.
ENDED = (
    "{% for m in messages %}{{ m.role }}<|pad|>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant<|pad|>{% endif %}"
)
OPEN = (
    "{% for m in messages %}{{ m.role }}<|pad|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant<|pad|>{% endif %}"
)


@pytest.fixture
def described(pair_dirs, tmp_path):
    """A target without weights; `template` sets its chat template."""

    def make(template: str = ENDED) -> Path:
        path = tmp_path / "described"
        shutil.copytree(pair_dirs[0], path, ignore=shutil.ignore_patterns("*.safetensors"))
        tokenizer = load_tokenizer(path)
        tokenizer.chat_template = template
        tokenizer.save_pretrained(path)
        return path

    return make


def flags(cfg: PrepareConfig) -> list[str]:
    names = ("target", "prompts", "output", "shard_size", "answers")
    return flags_of({name: getattr(cfg, name) for name in names})


def conversation(*turns: str) -> list[dict]:
    return [{"role": ["user", "assistant"][i % 2], "content": turn} for i, turn in enumerate(turns)]


RECORDS = [
    {"id": "one", "messages": conversation("print", "import os")},
    {"id": "two", "messages": conversation("a", "b = 1", "again", "c = 2\n"), "category": "code"},
    {"id": "pair", "prompt": "def add(a, b):", "completion": "return a + b"},
    {"id": "long", "messages": conversation("for i in range(10):", "x, y, " * 400)},
    {"id": "silent", "messages": conversation("nothing?", "")},
]


@pytest.fixture
def config(described, tmp_path):
    path = tmp_path / "conversations.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))

    def make(output: str = "out", **settings) -> PrepareConfig:
        given = {"prompts": str(path), "answers": "given", "shard_size": 2} | settings
        given.setdefault("target", str(tmp_path / "described"))
        if not Path(given["target"]).exists():
            described(given.pop("template", ENDED))
        given.pop("template", None)
        return PrepareConfig(output=str(tmp_path / output), **given)

    return make


def test_given_answers_become_samples_with_the_mask_of_their_turns(config, monkeypatch):
    monkeypatch.setattr(completions, "load_model", None)
    cfg = config()
    summary = prepare(cfg)
    rows = {row["id"]: row for row in load_completions(cfg.output)}
    tokenizer = load_tokenizer(cfg.target)
    assert sorted(rows) == ["one", "pair", "silent", "two"]
    for row in rows.values():
        first = row["prompt_length"]
        assert row["finish_reason"] == "given"
        assert row["loss_mask"][:first] == [0] * first
        assert row["loss_mask"][first] == 1
    learnt = {
        name: tokenizer.decode([i for i, m in zip(row["input_ids"], row["loss_mask"], strict=True) if m])
        for name, row in rows.items()
    }
    end = tokenizer.eos_token
    assert learnt == {
        "one": f"import os{end}",
        "two": f"b = 1{end}c = 2\n{end}",
        "pair": f"return a + b{end}",
        "silent": end,
    }
    masked = mask_conversation(RECORDS[1]["messages"], tokenizer, "two")
    assert (rows["two"]["input_ids"], rows["two"]["loss_mask"]) == (masked.ids, masked.mask)
    assert rows["two"]["category"] == "code"
    assert (
        tokenizer.decode(rows["one"]["input_ids"][: rows["one"]["prompt_length"]])
        == f"user<|pad|>print{end}assistant<|pad|>"
    )
    assert (summary.prompts, summary.written, summary.cut, summary.untrainable) == (4, 4, 0, [])
    assert summary.tokens == summary.tokens_written == sum(sum(row["loss_mask"]) for row in rows.values())


def test_an_answer_that_a_token_of_the_request_ended_is_left_out(config, tmp_path):
    path, end = tmp_path / "log.jsonl", load_tokenizer(config().target).eos_token_id
    choice = {"message": {"role": "assistant", "content": "b"}, "finish_reason": "stop"}
    asked = {"messages": conversation("a"), "stop_token_ids": [42]}
    said = {"by the target": {"matched_stop": end}, "by a stop": {"stop_reason": 42}, "without a word": {}}
    lines = [{"id": name, "request": asked, "response": {"choices": [choice | stop]}} for name, stop in said.items()]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    cfg = config(prompts=str(path))
    assert prepare(cfg).unfinished == ["by a stop", "without a word"]
    assert [row["id"] for row in load_completions(cfg.output)] == ["by the target"]


def test_conversations_longer_than_the_positions_are_left_out_and_named(config, capsys):
    assert prepare(config()).left_out == ["long"]
    again = prepare(config())
    assert (again.kept, again.written, again.left_out) == (4, 0, ["long"])
    cfg = config()
    assert main(flags(cfg)) == 0
    assert "1 too long for the target's positions: long" in capsys.readouterr().out
    path = Path(cfg.prompts).with_name("long.jsonl")
    path.write_text(json.dumps(RECORDS[3]) + "\n")
    with pytest.raises(InputError) as error:
        prepare(config("other", prompts=str(path)))
    assert str(error.value) == (
        f"prompts: expected conversations within the target's 512 positions, found all 1 of {path} longer"
    )


def test_samples_without_a_token_to_learn_from_are_named(config, capsys):
    cfg = config(template=OPEN)
    assert prepare(cfg).untrainable == ["silent"]
    assert prepare(cfg).untrainable == ["silent"]
    row = next(row for row in load_completions(cfg.output) if row["id"] == "silent")
    assert row["prompt_length"] == len(row["input_ids"])
    assert not any(row["loss_mask"])
    assert "silent" not in [row["id"] for row in training_examples([cfg.output])]
    main(flags(cfg))
    assert "1 samples: silent" in capsys.readouterr().out


def test_turns_left_out_are_warned_of_once_a_reason(config, caplog):
    cfg = config(
        template=ENDED.replace("m.content", "(m.content if loop.last or m.role == 'user' else m.content | upper)")
    )
    prepare(cfg)
    (record,) = [record for record in caplog.records if "assistant turns" in record.message]
    assert record.message.startswith(f"some assistant turns are not learned from: {LATER} (")


def test_each_context_that_the_template_rewrites_later_is_a_sample(config):
    shouting = ENDED.replace("m.content", "(m.content if loop.last or m.role == 'user' else m.content | upper)")
    cfg = config(template=shouting, turns="all")
    summary = prepare(cfg)
    rows = {row["id"]: row for row in load_completions(cfg.output)}
    assert set(rows) == {"one.1", "two.1", "two.2", "pair.1", "silent.1"} and summary.left_out == ["long.1"]
    tokenizer = load_tokenizer(cfg.target)
    texts = [tokenizer.decode(rows[f"two.{turn}"]["input_ids"]) for turn in (1, 2)]
    end = tokenizer.eos_token
    first = f"user<|pad|>a{end}assistant<|pad|>"
    assert texts == [f"{first}b = 1{end}", f"{first}B = 1{end}user<|pad|>again{end}assistant<|pad|>c = 2\n{end}"]
    assert [sum(rows[f"two.{turn}"]["loss_mask"]) for turn in (1, 2)] == [
        len(tokenizer.encode(text)) for text in (f"b = 1{end}", f"c = 2\n{end}")
    ]


@pytest.mark.parametrize("answers", ["given", "target"])
def test_records_that_cannot_be_used_are_skipped_counted_and_named_or_refused(answers, config, tmp_path, caplog):
    path = tmp_path / "mixed.jsonl"
    wrong = [
        {"id": "role", "messages": [{"role": "robot", "content": "a"}]},
        {"id": "one", "messages": conversation("print", "again the id")},
        {"id": "calls", "messages": [*conversation("a"), {"role": "assistant", "tool_calls": [{"name": "f"}]}]},
    ]
    if answers == "target":  # the call is an earlier turn of a prompt
        wrong[2]["messages"] += [{"role": "tool", "content": "b"}]
    path.write_text("".join(json.dumps(record) + "\n" for record in [RECORDS[0], *wrong, RECORDS[1]]))
    with pytest.raises(InputError, match=r"mixed\.jsonl:3: expected a unique id, found 'one' again"):
        read_prompts(str(path), answers="required" if answers == "given" else "dropped")
    cfg = config(prompts=str(path), answers=answers, invalid_prompts="skip")
    if answers == "given":
        samples = load_completions(prepare(cfg).output)
        assert sorted(samples["id"]) == ["one", "two"]
    else:
        tokenizer = load_tokenizer(cfg.target)
        read = read_prompts(cfg.prompts, invalid="skip")
        assert [prompt.id for prompt in encode_prompts(read, tokenizer, None, "skip")[0]] == ["one", "two"]
    counted = [record.message for record in caplog.records if "are skipped" in record.message]
    assert len(counted) == 3
    for line, expected in zip(
        counted,
        (
            f"1 of 5 records are skipped: {path}:3: expected a unique id, found 'one' again",
            f"1 of 4 records are skipped: {path}:2: messages[0].role",
            f"1 of 3 {'conversations' if answers == 'given' else 'prompts'} are skipped: {path}:4:",
        ),
        strict=True,
    ):
        assert line.startswith(expected), line
    only = tmp_path / "wrong.jsonl"
    only.write_text(json.dumps(wrong[0]))
    with pytest.raises(InputError, match=r"wrong\.jsonl:1: .*; with it all 1 records are skipped$"):
        read_prompts(str(only), invalid="skip")


def test_a_resume_compares_what_was_said_and_not_how_it_would_have_been_sampled(config):
    cfg = config()
    prepare(cfg)
    output = Path(cfg.output)
    before = {path.name: path.read_bytes() for path in output.iterdir()}
    manifest = json.loads(before["manifest.json"])
    assert manifest["source"] == {"answers": "given"}
    template = {"system_prompt": None, "chat_template_kwargs": {}, "turns": "first"}
    assert manifest["settings"] == {"split": "train", "limit": None, "shard_size": 2} | template
    (output / "shard-00001.parquet").unlink()
    assert (summary := prepare(config(temperature=0.5, seed=3))).kept == 2, summary
    assert {path.name: path.read_bytes() for path in output.iterdir()} == before
    begun = f"; {output} was begun with other settings: give another --output, or remove it"
    for settings, message in (
        ({"answers": "target"}, "answers: expected 'given', found 'target'"),
        ({"shard_size": 3}, "shard_size: expected 2, found 3"),
        ({"turns": "all"}, "turns: expected 'first', found 'all'"),
    ):
        short = {"max_new_tokens": 4, "limit": 3} if "answers" in settings else {}
        with pytest.raises(InputError) as error:
            prepare(config(**settings, **short))
        assert str(error.value) == message + begun
    path = Path(cfg.prompts)
    path.write_text(path.read_text().replace("b = 1", "b = 2"))
    with pytest.raises(InputError, match=r"^prompts: expected .* as it was \(sha256: "):
        prepare(config())
