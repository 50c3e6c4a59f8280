"""`draftsmith doctor --teacher`: what servers of a target's states are told apart by, before a run."""

import json
from pathlib import Path

import pytest
import torch
from conftest import tiny_llama
from state_server import StateServer, serving

from draftsmith.scripts import cli
from draftsmith.train.models import load_model
from draftsmith.train.runs import save_model

LAYERS = [1, 2, 3, 4]


@pytest.fixture(scope="module")
def target(tokenizer, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("served") / "target"
    model = tiny_llama(0, len(tokenizer), layers=4, hidden=32)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    save_model(model, tokenizer, path)
    return path


@pytest.fixture(scope="module")
def model(target):
    return load_model(target, device="cpu")


def findings(target: Path, tmp_path: Path, *servers: StateServer, **options: str) -> tuple[int, list[dict]]:
    """The exit code, and what is said of the servers."""
    with serving(*servers):
        flags = {
            "target": target,
            "teacher": json.dumps(["vllm:" + ",".join(server.url for server in servers)]),
        } | options
        argv = [f"--{name}={value}" for name, value in (flags | {"json": tmp_path / "found.json"}).items()]
        code = cli.main(["doctor", *argv])
    found = json.loads((tmp_path / "found.json").read_text())["findings"]
    return code, [finding for finding in found if finding["name"] in ("teacher", "its files", "its states")]


def test_servers_of_the_target_are_named_and_compared(target, model, tmp_path):
    run = tmp_path / "eagle.yaml"
    run.write_text(f"target: {target}\ncompletions: [c]\n")
    servers = [StateServer(model, LAYERS, str(target)) for _ in range(2)]
    code, found = findings(target, tmp_path, *servers, run=f"eagle:{run}")
    assert code == 0 and [finding["state"] for finding in found] == ["ok"] * 4
    assert "in float32, not quantised, by vLLM 0.32.0; states after layers 1, 2, 3, 4" in found[0]["text"]
    assert [finding["text"].split(": ")[0] for finding in found[2:4]] == [server.url for server in servers]
    assert all("within 0.0%" in finding["text"] for finding in found[2:4])


@pytest.mark.parametrize(
    ("server", "name", "said"),
    [
        ({"layer_ids": [2, 4]}, "teacher", "expected states after the layers 1, 2, 3, 4 from"),
        ({"says": {"hidden_size": 64}}, "teacher", "expected a target with hidden_size 32 at"),
        ({"says": {"files": {"config.json": "0"}}}, "its files", "whose config.json is another"),
        ({"fault": lambda states, ids: (states.roll(1, 0), ids)}, "its states", "found others"),
        ({"fault": lambda states, ids: (states * torch.nan, ids)}, "its states", "all finite, found NaN"),
    ],
    ids=["layers", "shape", "files", "rows", "NaN"],
)
def test_other_servers_are_errors(target, model, tmp_path, server, name, said):
    run = tmp_path / "eagle.yaml"
    run.write_text(f"target: {target}\ncompletions: [c]\n")
    states = StateServer(**{"model": model, "layer_ids": LAYERS, "path": str(target)} | server)
    code, found = findings(target, tmp_path, states, run=f"eagle:{run}")
    assert code == 2 and (found[-1]["state"], found[-1]["name"]) == ("error", name) and said in found[-1]["text"]


def test_no_server_is_an_error_that_says_how_to_start_one(target, model, tmp_path):
    code, (found,) = findings(target, tmp_path, StateServer(model, LAYERS, str(target), alive=False))
    assert code == 2 and found["state"] == "error" and "docs/teachers.md" in found["remedy"]
