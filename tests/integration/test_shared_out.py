"""Completions and teacher caches by two processes: each byte is what one process writes, and one speaks for both."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from prepare_inputs import contents, flags, save_target, write_prompts
from process_jobs import cached, commanded, completed
from processes import ended, forked

from draftsmith.scripts import cli
from draftsmith.train.data.generate import PrepareConfig, prepare
from draftsmith.train.teacher.cache_writer import CacheConfig, make_cache

pytestmark = pytest.mark.slow
COUNT = 11


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    root = tmp_path_factory.mktemp("inputs")
    return save_target(root / "target", ends=2, padding=3), write_prompts(root / "prompts.jsonl", COUNT)


@pytest.fixture
def config(inputs, tmp_path):
    target, prompts = map(str, inputs)
    return PrepareConfig(target, prompts, str(tmp_path / "one"), max_new_tokens=12, batch_size=2, shard_size=3)


def test_completions_are_those_of_one_process_byte_for_byte(config, tmp_path):
    one = prepare(config)
    shared = replace(config, output=str(tmp_path / "two"))
    summaries = forked(completed, shared, strategy="ddp")
    assert contents(shared.output) == contents(config.output)
    assert len(contents(shared.output)) == 1 + 4
    for summary in summaries:
        assert (summary.prompts, summary.written, summary.kept) == (COUNT, COUNT, 0)
        assert (summary.tokens, summary.cut, summary.ngrams) == (one.tokens, one.cut, one.ngrams)
    # The first and the last shard are written again: by one process what two have left, and by two what one has.
    for part, again in ((0, lambda: [prepare(shared)]), (3, lambda: forked(completed, shared, strategy="ddp"))):
        (Path(shared.output) / f"shard-0000{part}.parquet").unlink()
        (Path(shared.output) / f".shard-0000{part}.parquet.partial").write_bytes(b"half")
        assert {summary.kept for summary in again()} == {COUNT - (3, 3, 3, 2)[part]}
        assert contents(shared.output) == contents(config.output)


@pytest.mark.parametrize("content", [{"k": 8}, {"features": True}], ids=["distributions", "features"])
def test_a_teacher_cache_is_that_of_one_process_byte_for_byte(config, tmp_path, content):
    prepare(config)
    of_one = CacheConfig(config.target, [config.output], str(tmp_path / "cache"), batch_size=2, **content)
    of_two = replace(of_one, output=str(tmp_path / "shared"))
    one = make_cache(of_one)
    summaries = forked(cached, of_two, strategy="ddp")
    assert contents(of_two.output) == contents(of_one.output)
    for summary in summaries:
        assert (summary.samples, summary.written, summary.kept) == (COUNT, COUNT, 0)
        assert (summary.positions, summary.size) == (one.positions, one.size)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("memory", "rank 1: error: memory: expected enough for this run, found too little"),
        ("input", "rank 1: error: target: expected finite logits, found NaN"),
    ],
)
def test_a_rank_that_fails_ends_both_with_its_line(fault, said, config):
    found = ended(commanded, flags(config), fault)
    assert [code for code, _ in found] == [2, 2]
    errors = [line for _, text in found for line in text.splitlines() if "error" in line or "Traceback" in line]
    assert len(errors) == 1 and errors[0].startswith(said)
    prepare(config)  # and the other's shards are kept


def test_settings_that_are_refused_are_refused_once(config, tmp_path):
    prepare(config)
    found = ended(commanded, [*flags(config), "--seed", "5"])
    assert [code for code, _ in found] == [2, 2]
    errors = [line for _, text in found for line in text.splitlines() if "error" in line or "Traceback" in line]
    assert len(errors) == 1 and "seed: expected 0, found 5" in errors[0]


def test_machines_with_disks_of_their_own_are_told_so(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = ended(commanded, flags(replace(config, output="apart")), "apart")
    assert [code for code, _ in found] == [2, 2]
    errors = [line for _, text in found for line in text.splitlines() if "error" in line or "Traceback" in line]
    assert len(errors) == 1
    assert "output: expected a directory that all machines share, found no manifest.json in apart on " in errors[0]


def test_two_processes_print_one_summary(config, tmp_path):
    prepare(config)
    shared = replace(config, output=str(tmp_path / "two"))
    found = ended(commanded, flags(shared))
    said = "".join(text for _, text in found)
    assert [code for code, _ in found] == [0, 0], said[-3000:]
    assert said.count(f"{COUNT} ({COUNT} written now, 0 kept)") == 1
    assert contents(shared.output) == contents(config.output)


def test_one_process_is_enough_for_a_server_and_for_given_answers(config):
    assert not config.alone
    assert replace(config, answers="given").alone
    assert replace(config, endpoint="http://localhost:8000/v1").alone
    command, _ = cli.launch_command("prepare", [*flags(config), "--processes", "2"])
    assert command[-len(flags(config)) - 2 :] == ["-m", "draftsmith.scripts.prepare", *flags(config)]
    assert json.dumps(command).count("--num_processes") == 1
    alone, _ = cli.launch_command("cache", [], alone=True)
    assert alone == [sys.executable, "-m", "draftsmith.scripts.cache"]
