"""Caches of features from servers: the numbers are the target's, whatever was stopped, and wrong servers are named."""

import json
import signal
import threading
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from process_jobs import cached
from processes import forked
from state_server import StateServer, serving

from draftsmith.decode.errors import InputError
from draftsmith.train.models import load_model
from draftsmith.train.teacher import cache_writer, served
from draftsmith.train.teacher.cache_writer import CacheConfig, make_cache
from draftsmith.train.teacher.feature_shards import FeatureShards

TEXTS = ("short", "long", "heldout")


@pytest.fixture(scope="module")
def model(pipeline):
    return load_model(pipeline / "target", device="cpu")


@pytest.fixture(scope="module")
def whole(pipeline, tmp_path_factory) -> Path:
    """What the target itself gives."""
    output = tmp_path_factory.mktemp("whole") / "cache"
    make_cache(configured(pipeline, output, dtype="float32", feature_dtype="float32"))
    return output


def server(pipeline, model, layer_ids=(1, 2), **faults: object) -> StateServer:
    return StateServer(model, list(layer_ids), str(pipeline / "target"), **faults)


def configured(pipeline, output: Path, *servers: StateServer, **options: object) -> CacheConfig:
    options |= {"teacher": ["vllm:" + ",".join(each.url for each in servers)]} if servers else {}
    completions = [str(pipeline / name) for name in TEXTS]
    options = {"target": str(pipeline / "target"), "completions": completions, "layer_ids": [1, 2]} | options
    return CacheConfig(output=str(output), features=True, **options)


def states_in(cache: Path) -> dict[tuple[str, str], dict[str, torch.Tensor]]:
    """The states of each sample of each shard, in float32."""
    found = {}
    for file in sorted(cache.glob("*.parquet")):
        for row in pq.read_table(file).to_pylist():
            states = {
                name: torch.frombuffer(bytearray(b"".join(row[name])), dtype=torch.float32)
                for name in ("features", "hidden")
                if row[name]
            }
            found[file.name, row["id"]] = states
    return found


def require_equal(one: Path, other: Path) -> None:
    states, expected = states_in(one), states_in(other)
    assert states.keys() == expected.keys() and len(states) == 25
    for name in states:
        assert states[name].keys() == expected[name].keys()
        for column, values in states[name].items():
            assert torch.allclose(values, expected[name][column], atol=1e-5)


def test_the_numbers_are_the_target_s(pipeline, model, whole, tmp_path, capsys, monkeypatch):
    """Of two servers, with no whole target in memory, and few texts asked for in advance."""
    monkeypatch.setattr(cache_writer, "load_model", None)
    monkeypatch.setattr(served, "AHEAD", 2000)
    with serving(server(pipeline, model), server(pipeline, model)) as servers:
        summary = make_cache(configured(pipeline, tmp_path / "cache", *servers))
        asked = sum(len(each.texts) for each in servers)
        again = make_cache(configured(pipeline, tmp_path / "cache", *servers))
        assert sum(len(each.texts) for each in servers) == asked  # nothing is missing: no states are asked for
    assert (summary.written, summary.kept, again.written, again.kept) == (25, 0, 0, 25)
    require_equal(tmp_path / "cache", whole)
    settings = json.loads((tmp_path / "cache" / "manifest.json").read_text())["settings"]
    assert (settings["dtype"], settings["feature_dtype"], settings["target_quantization"]) == (*["float32"] * 2, None)
    said = capsys.readouterr()
    assert "its states the library's within" in said.err and "positions × 384 bytes" in said.out


def test_a_stopped_run_asks_for_what_is_missing(pipeline, model, whole, tmp_path, monkeypatch):
    write = FeatureShards.write

    def stopped(self, path: Path, *arguments: object) -> None:
        if path.name.startswith("long"):
            raise KeyboardInterrupt
        write(self, path, *arguments)

    with serving(server(pipeline, model)) as (states,):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt) as interrupt:
            patch.setattr(FeatureShards, "write", stopped)
            make_cache(configured(pipeline, tmp_path / "cache", states))
        assert "of 25 samples are kept in" in interrupt.value.__notes__[0]
        kept = len(states_in(tmp_path / "cache"))
        before = len(states.texts)
        summary = make_cache(configured(pipeline, tmp_path / "cache", states))
    assert (summary.kept, summary.written) == (kept, 25 - kept)
    assert len(states.texts) - before == 25 - kept + 4  # and those that are compared
    require_equal(tmp_path / "cache", whole)


def test_an_interruption_does_not_wait_for_a_server_that_hangs(pipeline, model, tmp_path):
    states, over, interrupted = server(pipeline, model), threading.Event(), threading.Lock()
    complete = states.complete

    def hanging(body: dict) -> dict | None:
        if states.answered < 12:
            return complete(body)
        if interrupted.acquire(blocking=False):  # once
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        over.wait()
        return None

    states.complete = hanging
    try:
        with serving(states), pytest.raises(KeyboardInterrupt):
            make_cache(configured(pipeline, tmp_path / "cache", states))
    finally:
        over.set()


WRONG = {
    "another revision": (
        {"fault": lambda states, ids: (states + states.std() * torch.randn(states.shape), ids)},
        {},
        "as the library computes them, found others",
    ),
    "another model": ({"says": {"files": {"config.json": "0"}}}, {}, "whose config.json is another"),
    "too short a context": ({"says": {"max_model_len": 8}}, {}, "samples of at most 8 tokens, .* found one of"),
    "another dtype": ({}, {"dtype": "bfloat16"}, "dtype: expected auto or float32, as the servers compute, found bf"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_server_is_named_before_the_first_shard(pipeline, model, tmp_path, name):
    faults, options, line = WRONG[name]
    with serving(server(pipeline, model, **faults)) as (states,), pytest.raises(InputError, match=line) as error:
        make_cache(configured(pipeline, tmp_path / "cache", states, **options))
    assert "\n" not in str(error.value)
    assert not list(tmp_path.rglob("*.parquet"))


def test_a_cache_of_another_server_s_target_is_not_continued(pipeline, model, tmp_path):
    with serving(server(pipeline, model)) as (states,):
        make_cache(configured(pipeline, tmp_path / "cache", states))
        states.says = {"quantization": "fp8"}
        with pytest.raises(InputError, match=r"target_quantization: expected None, found 'fp8'; .* other settings"):
            make_cache(configured(pipeline, tmp_path / "cache", states))


@pytest.mark.slow
def test_processes_share_the_shards(pipeline, model, whole, tmp_path):
    with serving(server(pipeline, model)) as (states,):
        summaries = forked(cached, configured(pipeline, tmp_path / "cache", states), strategy="ddp")
    assert [summary.written for summary in summaries] == [25, 25]
    assert len(states.texts) == 25 + 4  # those that were compared
    require_equal(tmp_path / "cache", whole)
