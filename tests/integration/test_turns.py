"""Prompts of several turns: each is asked behind the target's own answers to those before it."""

import json
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from process_jobs import completed
from processes import forked

from draftsmith.decode.errors import InputError
from draftsmith.scripts import cli
from draftsmith.train.data.generate import PrepareConfig, load_completions, prepare
from draftsmith.train.data.prompt_files import read_prompts
from draftsmith.train.models import load_model, load_tokenizer
from draftsmith.train.runs import save_model

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token if m.role == 'assistant' else '' }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
RECORDS = [
    # As SPEED-Bench has them: a category, and fields that nobody here reads.
    {"question_id": "a7", "category": "coding", "sub_category": "x", "turns": ["def f(x):", "return x", "import os"]},
    {"question_id": 8, "category": "qa", "turns": ["class A:"]},
    {"question_id": 9, "turns": ["for i in", "while True"]},
]


@pytest.fixture(params=[False, True], ids=["plain", "templated"])
def config(request, pair_dirs, tmp_path) -> PrepareConfig:
    target = str(pair_dirs[0])
    if request.param:
        tokenizer = load_tokenizer(target)
        tokenizer.chat_template = TEMPLATE
        target = str(tmp_path / "chat")
        Path(target).mkdir()
        save_model(load_model(str(pair_dirs[0]), device="cpu"), tokenizer, Path(target))
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    return PrepareConfig(
        target=target, prompts=str(tmp_path / "p.jsonl"), output=str(tmp_path / "out"), turns="all", temperature=0,
        max_new_tokens=6,
    )  # fmt: skip


def test_each_turn_stands_behind_the_answers_before_it(config, tmp_path, monkeypatch):
    tokenizer = load_tokenizer(config.target)
    summary = prepare(config)
    assert summary.written == 6 and summary.prompts == 6 and summary.output == tmp_path / "out"
    whole = dict[str, str]()
    for number, ids in enumerate([["a7.1", "8.1", "9.1"], ["a7.2", "9.2"], ["a7.3"]], 1):
        samples = {sample["id"]: sample for sample in load_completions(str(tmp_path / f"out/turn-{number}"))}
        assert sorted(samples) == sorted(ids)
        for name, sample in samples.items():
            assert sample["category"] == {"a7": "coding", "8": "qa"}.get(name[:-2])
            prompt = tokenizer.decode(sample["input_ids"][: sample["prompt_length"]])
            own = tokenizer.decode(sample["input_ids"][sample["prompt_length"] :], skip_special_tokens=True)
            turn = next(r["turns"] for r in RECORDS if str(r["question_id"]) == name[:-2])[number - 1]
            if tokenizer.chat_template is None:
                before = whole.get(name[:-2], "")
                assert prompt == f"{before}{turn}"
                whole[name[:-2]] = f"{before}{turn}\n\n{own}\n\n"
            else:
                before = whole.get(name[:-2], "")
                assert prompt == f"{before}user: {turn}\nassistant: "
                whole[name[:-2]] = f"{before}user: {turn}\nassistant: {own}{tokenizer.eos_token}\n"
    assert not (tmp_path / "out/turn-4").exists()
    prompts = read_prompts(str(tmp_path / "out/prompts.jsonl"))
    assert [prompt.id for prompt in prompts] == ["a7.1", "8.1", "9.1", "a7.2", "9.2", "a7.3"]
    again = prepare(config)
    assert (again.written, again.kept) == (0, 6)


@pytest.mark.parametrize("config", [False], indirect=True)
def test_what_turns_wrote_is_what_other_commands_read(config, tmp_path):
    flags = ["--target", config.target, "--prompts", config.prompts, "--max_new_tokens", "6", "--temperature", "0"]
    assert cli.main(["prepare", *flags, "--turns", "all", "--output", str(tmp_path / "turns")]) == 0
    read = ["--target", config.target, "--prompts", str(tmp_path / "turns/prompts.jsonl"), "--max_new_tokens", "6"]
    assert cli.main(["prepare", *read, "--temperature", "0", "--output", str(tmp_path / "again")]) == 0
    answers = {sample["id"]: sample["input_ids"] for sample in load_completions(str(tmp_path / "again"))}
    for number in (1, 2, 3):
        for sample in load_completions(str(tmp_path / f"turns/turn-{number}")):
            assert answers[sample["id"]] == sample["input_ids"]


@pytest.mark.parametrize("fields", [{"samples": 2, "temperature": 1.0}, {"temperatures": [0, 1]}])
def test_several_answers_to_a_turn_have_no_next_one(fields):
    with pytest.raises(InputError, match="turns: expected first where a prompt has several completions: a later turn"):
        PrepareConfig(target="t", prompts="p", output="o", turns="all", **fields)


def test_a_later_turn_that_is_no_text_is_refused_where_it_is_asked(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"turns": ["a", 3]}))
    assert read_prompts(str(path))[0].later == ()
    with pytest.raises(InputError, match=r"turns\[1\]: expected a string, found the number 3"):
        read_prompts(str(path), later=True)


@pytest.mark.parametrize("config", [False], indirect=True)
def test_a_turn_that_no_longer_fits_is_left_out_and_counted(config, tmp_path):
    positions = load_model(config.target).config.max_position_embeddings
    long = "for x in y " * positions
    records = [{"question_id": 1, "turns": ["def f", long, "more"]}, {"question_id": 2, "turns": ["class A:", "pass"]}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    summary = prepare(config)
    assert summary.left_out == ["1.2"] and summary.written == 3
    prompts = read_prompts(str(tmp_path / "out/prompts.jsonl"))
    assert [prompt.id for prompt in prompts] == ["1.1", "2.1", "2.2"]
    cut = prepare(replace(config, max_prompt_tokens=40, output=str(tmp_path / "cut")))
    assert cut.left_out == [] and cut.written == 5


def speed_bench(tmp_path, name: str, rows: list[dict]) -> str:
    """Write rows as SPEED-Bench's scripts do: as JSON lines of messages, or as Parquet with `turns`."""
    unread = {"sub_category": None, "source": "x", "src_id": "7", "difficulty": None, "multiturn": True}
    path = tmp_path / name
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist([row | unread for row in rows]), path)
        return str(path)
    spoken = [row | {"messages": [{"role": "user", "content": turn} for turn in row["turns"]]} for row in rows]
    lines = [json.dumps({k: v for k, v in (row | unread).items() if k != "turns"}) for row in spoken]
    path.write_text("".join(line + "\n" for line in lines))
    return str(path)


ROWS = [
    {"question_id": "a" * 32, "category": "coding", "turns": ["def f(x):", "return x", "import os"]},
    {"question_id": "b" * 32, "category": "roleplay", "turns": ["class A:"]},
]


@pytest.mark.parametrize("name", ["qualitative.jsonl", "test.parquet"])
@pytest.mark.parametrize("config", [True], indirect=True)
def test_speed_bench_is_read_as_its_scripts_write_it(config, name, tmp_path):
    path = speed_bench(tmp_path, name, ROWS)
    first, other = read_prompts(path)
    assert (first.id, first.category) == ("a" * 32, "coding")
    assert first.messages == [{"role": "user", "content": "def f(x):"}]
    assert other.messages == [{"role": "user", "content": "class A:"}]
    summary = prepare(replace(config, prompts=path))
    assert summary.written == 4
    prompts = read_prompts(str(tmp_path / "out/prompts.jsonl"))
    assert [prompt.id for prompt in prompts] == ["a" * 32 + ".1", "b" * 32 + ".1", "a" * 32 + ".2", "a" * 32 + ".3"]
    assert [prompt.category for prompt in prompts] == ["coding", "roleplay", "coding", "coding"]
    spoken = [[message["role"] for message in prompt.messages] for prompt in prompts]
    assert spoken[0] == ["user"] and spoken[3] == ["user", "assistant", "user", "assistant", "user"]


@pytest.mark.parametrize("name", ["qualitative.jsonl", "test.parquet"])
@pytest.mark.parametrize("turn", [0, 1])
def test_questions_that_were_not_fetched_are_refused_by_file_row_and_turn(name, turn, tmp_path):
    unfetched = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH\n\nTranslate {question}"
    turns = ["Who?"] * turn + [unfetched]
    path = speed_bench(tmp_path, name, [*ROWS, {"question_id": "c" * 32, "category": "qa", "turns": turns}])
    place = ":3" if name.endswith("jsonl") else ": row 3"
    with pytest.raises(InputError, match=rf"^{path}{place}: turns\[{turn}\]: expected a question, found SPEED-Bench's"):
        read_prompts(path)


def test_questions_in_a_row_of_a_conversation_stay_one_prompt(tmp_path):
    """Only SPEED-Bench's records, which have a `question_id`, have turns there; a server saw these together."""
    asked = [{"role": "user", "content": "A text."}, {"role": "user", "content": "Who wrote it?"}]
    (tmp_path / "p.jsonl").write_text(json.dumps({"id": 1, "messages": asked}) + "\n")
    (prompt,) = read_prompts(str(tmp_path / "p.jsonl"), later=True)
    assert prompt.messages == asked and prompt.later == ()


@pytest.mark.slow
@pytest.mark.parametrize("config", [False], indirect=True)
def test_several_processes_write_the_same_turns(config, tmp_path):
    one, two = (replace(config, batch_size=1, shard_size=1, output=str(tmp_path / count)) for count in ("1", "2"))
    prepare(one)
    forked(completed, two, strategy="ddp")
    assert (tmp_path / "1/prompts.jsonl").read_text() == (tmp_path / "2/prompts.jsonl").read_text()
    for number in (1, 2, 3):
        one, two = (load_completions(str(tmp_path / count / f"turn-{number}")).to_list() for count in ("1", "2"))
        assert one == two
