import errno
import json
import os
import re
import shutil
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from fake_server import OTHER_END, rows
from prepare_inputs import contents, flags, save_target, write_prompts
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from draftsmith.decode.draft_models.vocabulary import token_count
from draftsmith.decode.errors import InputError
from draftsmith.decode.progress import reporting
from draftsmith.scripts.prepare import main
from draftsmith.train import files
from draftsmith.train.data import decoding, shards
from draftsmith.train.data import generate as completions
from draftsmith.train.data.examples import training_examples
from draftsmith.train.data.generate import PrepareConfig, load_completions, prepare

COUNT = 11  # in batches of 2: five full ones and a last one of a single row


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    # The padding is louder than the rest: it wins unless it is barred.
    return save_target(tmp_path_factory.mktemp("target"), ends=2, padding=3)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    return write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", COUNT)


@pytest.fixture
def config(target, prompts, tmp_path):
    def make(output: str = "out", **settings) -> PrepareConfig:
        settings = {
            "max_new_tokens": 12,
            "batch_size": 2,
            "shard_size": 2,
            "target": str(target),
            "prompts": str(prompts),
        } | settings
        return PrepareConfig(output=str(tmp_path / output), **settings)

    return make


@pytest.fixture(scope="module")
def whole(target, prompts, tmp_path_factory):
    """The directory of an uninterrupted run: a name and its bytes a file."""
    output = tmp_path_factory.mktemp("whole")
    prepare(PrepareConfig(str(target), str(prompts), str(output), max_new_tokens=12, batch_size=2, shard_size=2))
    return contents(output)


def fail_at_call(monkeypatch, module, name: str, calls: int, error: BaseException) -> None:
    real, made = getattr(module, name), []

    def failing(*args, **kwargs):
        made.append(1)
        if len(made) > calls:
            raise error
        return real(*args, **kwargs)

    monkeypatch.setattr(module, name, failing)


def test_samples_are_prompt_and_completion_with_an_exact_mask(config):
    cfg = config(max_new_tokens=40, seed=2)
    summary = prepare(cfg)
    tokenizer = completions.load_tokenizer(cfg.target)
    ends, reasons = {tokenizer.eos_token_id, OTHER_END}, set()
    texts = {p.id: p for p in completions.read_prompts(cfg.prompts)}
    for row in rows(cfg):
        ids, length = row["input_ids"], row["prompt_length"]
        completion = ids[length:]
        assert tokenizer.decode(ids[:length]) == texts[row["id"]].text
        assert row["category"] == texts[row["id"]].category
        assert row["loss_mask"] == [0] * length + [1] * len(completion)
        assert 1 <= len(completion) <= 40
        assert not ends & set(completion[:-1])
        assert row["finish_reason"] == ("stop" if completion[-1] in ends else "length")
        assert row["finish_reason"] == "stop" or len(completion) == 40
        reasons.add(row["finish_reason"])
        assert max(completion) < len(tokenizer)  # the rows that pad the vocabulary are never sampled
    assert reasons == {"stop", "length"}
    assert sorted(row["id"] for row in rows(cfg)) == sorted(texts)
    assert (summary.prompts, summary.written, summary.kept) == (COUNT, COUNT, 0)
    assert summary.tokens == summary.tokens_written == sum(sum(row["loss_mask"]) for row in rows(cfg))
    assert summary.cut == sum(row["finish_reason"] == "length" for row in rows(cfg))


def test_ids_that_meet_their_samples_numbers_are_refused(config, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "x", "id": "a"}\n{"prompt": "y", "id": "a#2"}\n')
    with pytest.raises(InputError, match=r"^prompts: expected ids .* after them, found 'a#2' of 'a#2' and of 'a'$"):
        prepare(config(prompts=str(path), samples=2, temperature=1.0))
    assert prepare(config(prompts=str(path))).written == 2


def test_greedy_is_the_argmax_and_sampling_inherits_nothing(config):
    greedy = config("greedy", temperature=0.0, batch_size=1)
    prepare(greedy)
    model = completions.load_model(greedy.target)
    tokenizer = completions.load_tokenizer(greedy.target)
    for row in rows(greedy):  # a repetition penalty, or a padded vocabulary's rows, would change the argmax
        logits = model(torch.tensor([row["input_ids"]])).logits[0, :, : len(tokenizer)]
        start = row["prompt_length"]
        assert logits[start - 1 : -1].argmax(-1).tolist() == row["input_ids"][start:]

    generation = completions.set_generation_config(config("sampled"), 12, model, tokenizer, len(tokenizer))
    processors = model._get_logits_processor(model._prepare_generation_config(generation)[0], 1)
    assert [type(p).__name__ for p in processors] == ["SuppressTokensLogitsProcessor"]
    assert generation.eos_token_id == [tokenizer.eos_token_id, OTHER_END]
    # the model's top_k=1 and temperature 0.01 would leave a single answer
    many = config("sampled", prompts=str(Path(greedy.output).parent / "many.txt"), batch_size=32, max_new_tokens=1)
    Path(many.prompts).write_text("def\n" * 64)
    prepare(many)
    last = [row["input_ids"][-1] for row in rows(many)]
    assert len(set(last)) > 10
    assert last[:32] != last[32:]  # each batch has its own seed


def test_a_token_behind_a_gap_in_the_ids_is_not_barred(config):
    cfg = config()
    model, tokenizer = completions.load_model(cfg.target), completions.load_tokenizer(cfg.target)
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    vocab = backend["model"]["vocab"]
    vocab[max(vocab, key=vocab.get)] = 300
    gapped = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(backend)), pad_token=tokenizer.pad_token
    )
    assert len(gapped) == len(tokenizer) < 300
    generation = completions.set_generation_config(cfg, 12, model, gapped, token_count(gapped, model.config))
    assert generation.suppress_tokens == list(range(301, 320))


def test_completions_do_not_depend_on_what_was_sampled_before(config, whole):
    torch.manual_seed(123)
    state = torch.random.get_rng_state()
    prepare(config("again"))
    assert contents(Path(config("again").output)) == whole
    assert torch.equal(torch.random.get_rng_state(), state)
    prepare(config("other", seed=1))
    assert [row["input_ids"] for row in rows(config("other"))] != [row["input_ids"] for row in rows(config("again"))]


def test_a_finished_directory_is_left_alone_without_loading_the_weights(config, whole, monkeypatch):
    once = prepare(config())
    monkeypatch.setattr(completions, "load_model", None)
    again = prepare(config())
    assert contents(Path(config().output)) == whole
    assert (again.kept, again.written, again.seconds, again.tokens_per_second) == (COUNT, 0, 0.0, None)
    assert (again.tokens, again.ngrams) == (once.tokens, once.ngrams)
    assert again.repeated_ngram_share == once.repeated_ngram_share


def test_resume_after_a_crash_with_a_partial_file_and_damaged_shards(config, whole, monkeypatch):
    output = Path(config().output)
    with monkeypatch.context() as patch:
        fail_at_call(patch, completions, "complete", 4, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            prepare(config())
    assert sorted(contents(output)) == ["manifest.json", *(f"shard-0000{i}.parquet" for i in range(4))]
    (output / ".shard-00004.parquet.partial").write_bytes(whole["shard-00004.parquet"][:50])
    truncated, blotted = output / "shard-00001.parquet", output / "shard-00002.parquet"
    truncated.write_bytes(truncated.read_bytes()[:-20])
    data = blotted.read_bytes()
    blotted.write_bytes(data[:40] + bytes(200) + data[240:])
    summary = prepare(config())
    assert contents(output) == whole
    assert (summary.kept, summary.written) == (4, COUNT - 4)


def test_progress_is_told_in_tokens_with_the_texts_that_have_ended(config, capsys):
    with reporting(every=0, bars=False):
        summary = prepare(config(limit=5, max_new_tokens=12, shard_size=5))
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("prepare: ")]
    form = r"prepare: (\d+) of (\d+) tokens, (\d) of 5 texts, [\d.]+ tokens/s, 0:"
    far = [re.match(form, line) for line in lines[1:]]
    tokens, most, texts = zip(*(map(int, each.groups()) for each in far), strict=True)
    assert tokens == (*range(1, summary.tokens + 1),)  # each is told
    assert most[0] == 60 and list(most) == sorted(most, reverse=True)  # less where texts end early
    assert (tokens[-1], most[-1], texts[-1]) == (summary.tokens, summary.tokens, 5)


def test_rows_that_are_refilled_write_what_each_row_writes_alone(config):
    """A shard's prompts are one queue: the more rows, the less is decoded one after the other, and nothing else."""
    for settings in ({"temperature": 0.0}, {"temperature": 1.0, "repetition_penalty": 1.2}):
        texts = []
        for count in (1, 3, COUNT):
            cfg = config(f"{settings['temperature']}-{count}", batch_size=count, shard_size=COUNT, **settings)
            prepare(cfg)
            texts.append(rows(cfg))
        assert texts[0] == texts[1] == texts[2]


def test_a_model_that_our_decoder_does_not_know_is_left_to_the_library(config, monkeypatch):
    asked = []
    real = decoding.by_library
    monkeypatch.setattr(decoding, "can_decode", lambda *args: False)
    monkeypatch.setattr(decoding, "by_library", lambda *args: asked.append(len(args[2])) or real(*args))
    ours, theirs = (config(name, temperature=0.0, batch_size=4, shard_size=COUNT) for name in ("ours", "theirs"))
    prepare(theirs)
    assert asked == [4, 4, 3]
    monkeypatch.undo()
    prepare(ours)
    assert rows(ours) == rows(theirs)


def test_most_completions_cut_by_their_length_are_warned_of(config, caplog):
    summary = prepare(config(max_new_tokens=2))
    assert summary.cut > COUNT / 2
    assert f"{summary.cut} of {COUNT} completions were cut at max_new_tokens: raise it" in caplog.text
    caplog.clear()
    assert prepare(config("long", max_new_tokens=60)).cut < COUNT / 2
    assert "were cut" not in caplog.text


def test_what_is_not_said_is_settled_in_the_manifest(config):
    cfg = config(limit=1, max_new_tokens=None, shard_size=None)
    prepare(cfg)
    settings = json.loads((Path(cfg.output) / "manifest.json").read_text())["settings"]
    assert (settings["max_new_tokens"], settings["shard_size"]) == (64, 16)  # half of its 128 positions; 8 × 2 rows


def test_a_flipped_bit_never_changes_what_is_read(tmp_path, whole):
    shard, data = tmp_path / "shard-00000.parquet", whole["shard-00000.parquet"]
    shard.write_bytes(data)
    table = shards.read_shard(shard)
    assert table is not None
    for i in range(0, len(data), 7):
        shard.write_bytes(data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :])
        found = shards.read_shard(shard)
        assert found is None or found.equals(table), f"byte {i}"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_keeps_what_was_written(code, config, whole, monkeypatch):
    output = Path(config().output)
    with monkeypatch.context() as patch:
        fail_at_call(patch, files.os, "fsync", 4, OSError(code, os.strerror(code)))  # the manifest and three shards
        with pytest.raises(InputError) as error:
            prepare(config())
    assert str(error.value) == (
        f"output: no space left for {output}: 6 of {COUNT} completions are kept; "
        "free some space and run the same command again"
    )
    assert sorted(contents(output)) == ["manifest.json", *(f"shard-0000{i}.parquet" for i in range(3))]
    assert prepare(config()).kept == 6
    assert contents(output) == whole


def test_another_failure_to_write_is_not_called_a_full_disk(config, monkeypatch):
    monkeypatch.setattr(files.os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.EIO, "broken")))
    with pytest.raises(OSError, match="broken"):
        prepare(config())
    (Path(config().output) / "file").write_text("")
    with pytest.raises(InputError, match=r"^output: expected a directory to write in at .*, found: File exists"):
        prepare(config("out/file"))


def test_other_settings_are_refused_by_name(config, whole):
    output = Path(config().output)
    output.mkdir()
    (output / "manifest.json").write_bytes(whole["manifest.json"])
    for name, value, before in (("limit", 10, "None"), ("batch_size", 3, "2"), ("dtype", "bfloat16", "'float32'")):
        with pytest.raises(InputError) as error:
            prepare(config(**{name: value}))
        assert str(error.value) == (
            f"{name}: expected {before}, found {value!r}; {output} was begun with other settings: give another "
            "--output, or remove it"
        )
    assert contents(output) == {"manifest.json": whole["manifest.json"]}


def test_other_prompts_and_another_target_are_refused_but_they_may_move(config, prompts, target, whole, tmp_path):
    prepare(config())
    moved, copied = tmp_path / "moved.jsonl", tmp_path / "copied"
    shutil.copy(prompts, moved)
    shutil.copytree(target, copied)
    assert prepare(config(prompts=str(moved), target=str(copied))).kept == COUNT
    moved.write_text(moved.read_text().replace("print", "paint"))
    with pytest.raises(
        InputError, match=rf"^prompts: expected {prompts} as it was \(sha256: .* give another --output, or remove it$"
    ):
        prepare(config(prompts=str(moved)))
    weights = copied / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1  # the same names and sizes, trained on
    weights.write_bytes(data)
    expected = rf"^target: expected {target} as it was \(model.safetensors: .* --output, or remove it$"
    with pytest.raises(InputError, match=expected):
        prepare(config(target=str(copied)))
    assert contents(Path(config().output)) == whole


def test_other_versions_are_warned_of(config, whole, caplog):
    output = Path(config().output)
    prepare(config())
    (output / "manifest.json").write_bytes(re.sub(rb'"torch": ".*"', b'"torch": "1.0"', whole["manifest.json"]))
    assert prepare(config()).kept == COUNT
    assert "begun with" in caplog.text


def test_the_context_of_the_target_is_respected(config):
    with pytest.raises(InputError) as error:
        prepare(config(max_new_tokens=110))
    assert re.fullmatch(
        r"max_prompt_tokens: expected prompt and completion within the target's 128 positions, found \d\d \+ 110 "
        r"tokens for prompt 'p7'; give max_prompt_tokens: 18, or a smaller max_new_tokens",
        str(error.value),
    )
    cfg = config(max_new_tokens=110, max_prompt_tokens=18)
    prepare(cfg)
    assert max(row["prompt_length"] for row in rows(cfg)) == 18


def test_loading_names_what_is_wrong(config, whole, tmp_path, caplog):
    output = Path(config().output)

    def message() -> str:
        with pytest.raises(InputError) as error:
            load_completions(str(output))
        return str(error.value)

    assert message() == f"{output}: expected a directory of completions, found none"
    output.mkdir()
    assert message() == f"{output}: expected completions written by draftsmith prepare, found no manifest.json"
    manifest = output / "manifest.json"
    manifest.write_text("{")
    assert message().startswith(f"{manifest}: expected JSON, found: ")
    manifest.write_text('{"schema": "draftsmith.completions/2"}')
    assert message() == f"{manifest}: expected schema 'draftsmith.completions/1', found 'draftsmith.completions/2'"
    manifest.write_bytes(whole["manifest.json"])
    assert message() == f"{output}: expected completions written by draftsmith prepare, found no shards"
    shard = output / "shard-00000.parquet"
    shard.write_bytes(whole["shard-00000.parquet"])
    assert len(load_completions(str(output))) == 2
    assert "unfinished, 1 of 6 shards are there" in caplog.text
    said = f"{shard}: expected a shard of completions, found a damaged file; run draftsmith prepare again"
    for damaged in (whole["shard-00000.parquet"][:-9], b""):
        shard.write_bytes(damaged)
        assert message() == said
    shards.write_shard(shard, pa.table({"id": ["a"]}))
    assert message() == said
    manifest.unlink()
    with pytest.raises(InputError, match=r"^output: expected manifest.json with the shards in .*, found none$"):
        prepare(config())


@pytest.mark.parametrize(
    ("field", "value", "others"),
    [
        *((name, 0, {}) for name in ("limit", "batch_size", "shard_size", "max_prompt_tokens", "max_new_tokens")),
        *((name, -1, {}) for name in ("top_k", "seed", "temperature")),
        ("top_p", 0.0, {}),
        ("target_quantization", "2bit", {}),
        ("dtype", "int8", {}),
        *(("temperatures", value, {}) for value in ("0,-1", "1,1", "warm")),
        ("temperatures", [1.0], {"answers": "given"}),
        ("samples", 2, {"temperatures": [0.0]}),
        ("samples", 2, {"temperature": 0.0}),
    ],
)
def test_settings_are_checked(field, value, others):
    with pytest.raises(InputError, match=f"^{field}: expected "):
        PrepareConfig("t", "p", "o", **{field: value}, **others)


def test_command_prints_where_the_completions_are(config, capsys):
    cfg = config()
    assert main(flags(cfg)) == 0
    out = capsys.readouterr().out
    assert f"completions: {cfg.output}\n" in out
    assert f"{COUNT} ({COUNT} written now, 0 kept)" in out
    assert "repeated 4-grams" in out
    with pytest.raises(InputError, match="batch_size"):
        main([*flags(cfg), "--batch_size", "0"])


def test_prompts_may_be_completed_at_several_temperatures(pair_dirs, tmp_path, capsys):
    target, _ = pair_dirs
    (tmp_path / "prompts.txt").write_text("def f(x):\nimport os\n")
    flags = ["--target", str(target), "--prompts", str(tmp_path / "prompts.txt"), "--max_new_tokens", "8"]
    flags += ["--seed", "1"]
    main([*flags, "--output", str(tmp_path / "mixed"), "--temperatures", "0,0.7,1.5", "--samples", "2"])
    found = {row["id"]: row for row in load_completions(str(tmp_path / "mixed"))}
    heats = {"": 0.0, "#2": 0.7, "#3": 0.7, "#4": 1.5, "#5": 1.5}
    assert {name: row["temperature"] for name, row in found.items()} == pytest.approx(
        {f"{prompt}{end}": heat for prompt in "01" for end, heat in heats.items()}
    )
    main([*flags, "--output", str(tmp_path / "greedy"), "--temperature", "0"])
    for row in load_completions(str(tmp_path / "greedy")):  # what was written at 0 is what is written at 0 alone
        assert found[row["id"]]["input_ids"] == row["input_ids"] and "temperature" not in row
    assert len({tuple(row["input_ids"]) for row in found.values()}) == 10
    # Learned from as others are, and resumed under the same temperatures alone.
    assert len(training_examples([str(tmp_path / "mixed")])) == 10
    (tmp_path / "mixed" / "shard-00001.parquet").unlink()
    main([*flags, "--output", str(tmp_path / "mixed"), "--temperatures", "0,0.7,1.5", "--samples", "2"])
    assert {row["id"]: row for row in load_completions(str(tmp_path / "mixed"))} == found
    with pytest.raises(InputError, match=r"temperatures: expected \[0.0, 0.7, 1.5\], found \[0.0, 0.7\]"):
        main([*flags, "--output", str(tmp_path / "mixed"), "--temperatures", "0,0.7"])
