"""Training on states from servers: what is learned, and what fails on the way."""

import re
from pathlib import Path

import pytest
import torch
from pipelines import LAST_BITS, block_configured, configured, eagle_configured, furthest, heads_configured, history
from process_jobs import eagled
from processes import forked
from safetensors.torch import load_file
from state_server import StateServer, serving
from torch import nn

from draftsmith.decode.errors import InputError
from draftsmith.distill.__main__ import distill
from draftsmith.medusa.block import __main__ as block
from draftsmith.medusa.eagle import __main__ as eagle
from draftsmith.medusa.heads import __main__ as medusa
from draftsmith.train.models import load_model

TRAINING = {"max_steps": 6, "eval_strategy": "steps", "eval_steps": 3, "per_device_eval_batch_size": 2}
TRAINING |= {"logging_steps": 1, "dataloader_num_workers": 1}
KINDS = {
    "EAGLE-3": (eagle.train_heads, eagle_configured, {"layer_ids": [1, 2]}),
    "blocks, packed and cut": (
        block.train_block,
        block_configured,
        {"layer_ids": [0, 1], "packing": True, "max_length": 40},
    ),
    "Hydra, as many workers as there are by default": (
        medusa.train_heads,
        heads_configured,
        {"hydra": True, "training": {"dataloader_num_workers": 0, "gradient_accumulation_steps": 2}},
    ),
    "a draft model": (distill, configured, {}),
}


@pytest.fixture(scope="module")
def model(pipeline):
    return load_model(pipeline / "target", device="cpu")


def server(pipeline, model, **faults: object) -> StateServer:
    return StateServer(model, [1, 2], str(pipeline / "target"), **faults)


def trained(pipeline, output: Path, *servers: StateServer, kind: str = "EAGLE-3", **options: object):
    """A run on servers, or on the target itself without any."""
    train, config, own = KINDS[kind]
    options = {"heldout": [str(pipeline / "heldout")], "target_dtype": "float32"} | own | options
    options["training"] = TRAINING | own.get("training", {}) | options.get("training", {})
    if servers:
        options |= {"teacher": ["vllm:" + ",".join(each.url for each in servers)]}
    return train(config(pipeline, output, **options))


def weights(trainer) -> dict[str, torch.Tensor]:
    return {name: weight.detach() for name, weight in trainer.model.named_parameters() if weight.requires_grad}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_learns_what_it_learns_from_the_target(pipeline, model, tmp_path, kind):
    """Over more than one epoch, with evaluations on the servers' states of held-out text."""
    live = trained(pipeline, tmp_path / "live", kind=kind)
    with serving(server(pipeline, model)) as (states,):
        found = trained(pipeline, tmp_path / "found", states, kind=kind)
    assert found.state.epoch > 1 or kind == "blocks, packed and cut"
    assert history(found, "loss") == pytest.approx(history(live, "loss"), rel=1e-4)
    metric = "eval_mean_acceptance_length"
    assert history(found, metric) == pytest.approx(history(live, metric), rel=1e-4) and history(live, metric)
    assert furthest(weights(found), weights(live)) < LAST_BITS


def test_a_server_that_dies_changes_nothing(pipeline, model, tmp_path, capfd):
    with serving(server(pipeline, model), server(pipeline, model)) as states:
        whole = trained(pipeline, tmp_path / "whole", *states)
    assert "until it answers" not in capfd.readouterr().err
    with serving(server(pipeline, model), server(pipeline, model, dies_after=12)) as (first, second):
        rest = trained(pipeline, tmp_path / "rest", first, second)
    assert not second.alive and len(second.texts) == 12
    assert re.search(f"{second.url}/.*; it is asked again until it answers\n", capfd.readouterr().err)
    assert furthest(weights(rest), weights(whole)) == 0


def test_texts_are_cut_before_the_first_step_too(pipeline, model, tmp_path):
    options = {"max_length": 12, "heldout": [], "training": {"max_steps": 1, "eval_strategy": "no"}}
    with serving(server(pipeline, model)) as (states,):
        trained(pipeline, tmp_path / "out", states, **options)
    assert max(map(len, states.texts)) == 12


def test_embeddings_are_where_the_heads_learn(pipeline, model, tmp_path, monkeypatch):
    moved, to = list[nn.Module](), nn.Embedding.to
    monkeypatch.setattr(nn.Embedding, "to", lambda module, *place: moved.append(module) or to(module, *place))
    options = {"heldout": [], "training": {"max_steps": 1, "eval_strategy": "no"}}
    with serving(server(pipeline, model)) as (states,):
        for number, kind in enumerate(["EAGLE-3", "Hydra, as many workers as there are by default"]):
            assert trained(pipeline, tmp_path / f"{number}", states, kind=kind, **options).embed in moved


FAULTS = {
    "another revision": (
        {"fault": lambda states, ids: (states + states.std() * torch.randn(states.shape), ids)},
        "as the library computes them, found others",
    ),
    "layers that it does not give": ({"layer_ids": [2]}, "states after the layers 1, 2 .* found those after 2"),
    "too short a context": ({"says": {"max_model_len": 8}}, "samples of at most 8 tokens"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_server_is_named_before_the_first_step(pipeline, model, tmp_path, fault):
    options, line = FAULTS[fault]
    wrong = StateServer(**{"model": model, "layer_ids": [1, 2], "path": str(pipeline / "target")} | options)
    with serving(wrong), pytest.raises(InputError, match=line) as error:
        trained(pipeline, tmp_path / "out", wrong)
    assert "\n" not in str(error.value)


def test_a_server_that_goes_wrong_later_ends_the_run(pipeline, model, tmp_path):
    wrong = server(pipeline, model)
    wrong.fault = lambda states, ids: (states * (torch.nan if wrong.answered > 20 else 1.0), ids)
    with serving(wrong), pytest.raises(InputError, match="finite, found NaN or infinity") as error:
        trained(pipeline, tmp_path / "out", wrong)
    assert str(error.value).startswith("teacher: ") and "\n" not in str(error.value)


@pytest.mark.slow
def test_processes_ask_for_their_own_batches(pipeline, model, tmp_path):
    training = TRAINING | {"max_steps": 5}
    options = {"heldout": [str(pipeline / "heldout")], "target_dtype": "float32", "layer_ids": [1, 2]}
    (one,) = forked(eagled, pipeline, tmp_path / "one", {"run": options | {"training": training}}, strategy="one")
    with serving(server(pipeline, model)) as (states,):
        options |= {"teacher": [f"vllm:{states.url}"]}
        run = {"run": options | {"training": training}}
        ranks = forked(eagled, pipeline, tmp_path / "two", run, strategy="ddp")
    for rank in ranks:
        losses = [[entry["loss"] for entry in each["run"]["log"] if "loss" in entry] for each in (rank, one)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5) and losses[0]
    saved, expected = (load_file(tmp_path / name / "run" / "model.safetensors") for name in ("two", "one"))
    assert furthest(saved, expected) < LAST_BITS
