"""Drafters that learn from real vLLM servers: what they learn from the library, also when a server is killed."""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from engine import TARGET, Served, end, extracting, vllm_server
from pipelines import block_configured, configured, eagle_configured, furthest, heads_configured, history

from draftsmith.distill.__main__ import distill
from draftsmith.medusa.block import __main__ as block
from draftsmith.medusa.eagle import __main__ as eagle
from draftsmith.medusa.heads import __main__ as medusa
from draftsmith.train.data.corpus import stdlib_prompts, write_prompts
from draftsmith.train.data.generate import PrepareConfig, prepare

pytestmark = [pytest.mark.engine, pytest.mark.slow]

LAYERS = (2, 6, 9, 12)
TRAINING = {"max_steps": 6, "eval_strategy": "steps", "eval_steps": 6, "learning_rate": 1e-3}
KINDS = {
    "EAGLE-3": (eagle.train_heads, eagle_configured, {"layer_ids": [2, 6, 9]}),
    "DSpark": (block.train_block, block_configured, {"layer_ids": [1, 5, 8], "confidence": 1.0}),
    "Hydra": (medusa.train_heads, heads_configured, {"hydra": True}),
    "a draft model": (distill, configured, {"draft": str(TARGET.parent / "tiny-draft")}),
}
"""Blocks count layers from 0: their layer 1 is vLLM's state 2."""


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """Completions of the embedded target, under the names that a pipeline has."""
    folder = tmp_path_factory.mktemp("written")
    for name, count, heldout in (("short", 12, False), ("long", 12, False), ("heldout", 6, True)):
        write_prompts(folder / f"{name}.jsonl", stdlib_prompts(count, heldout=heldout, seed=len(name)))
        texts = str(folder / f"{name}.jsonl"), str(folder / name)
        prepare(PrepareConfig(str(TARGET), *texts, max_prompt_tokens=40, max_new_tokens=24, dtype="float32"))
    return folder


@pytest.fixture(scope="module")
def servers(tmp_path_factory) -> Iterator[list[Served]]:
    """Two servers, which compute one text at a time, so that rounding does not depend on its company."""
    with ExitStack() as stack:
        started = []
        for name in ("first", "second"):
            folder = tmp_path_factory.mktemp(name)
            method, flags, environment = extracting(LAYERS, folder / "states")
            flags += "--max-num-seqs", "1"
            server = vllm_server(TARGET, folder / "log", method, *flags, environment=environment)
            started.append(stack.enter_context(server))
        yield started


def trained(written: Path, output: Path, kind: str, servers: list[Served] | None = None):
    train, config, options = KINDS[kind]
    options = options | {"target": str(TARGET), "target_dtype": "float32", "heldout": [str(written / "heldout")]}
    options |= {"save_dtype": "float32", "any_target": False, "training": TRAINING}
    if servers is not None:
        options |= {"teacher": [f"vllm:{server.url}" for server in servers]}
    return train(config(written, output, **options))


def weights(trainer) -> dict[str, torch.Tensor]:
    return {name: weight.detach() for name, weight in trainer.model.named_parameters() if weight.requires_grad}


@pytest.mark.parametrize("kind", KINDS)
def test_a_drafter_learns_what_it_learns_from_the_library(written, servers, tmp_path, kind):
    library, served = trained(written, tmp_path / "library", kind), trained(written, tmp_path / "served", kind, servers)
    assert history(served, "loss") == pytest.approx(history(library, "loss"), rel=1e-4) and history(library, "loss")
    metric = "eval_mean_acceptance_length"
    assert history(served, metric) == pytest.approx(history(library, metric), rel=1e-4) and history(library, metric)


def test_a_server_that_is_killed_changes_nothing(written, servers, tmp_path):
    whole = trained(written, tmp_path / "whole", "EAGLE-3", servers)
    folder = tmp_path / "dying"
    folder.mkdir()
    method, flags, environment = extracting(LAYERS, folder / "states")
    flags += "--max-num-seqs", "1"
    with vllm_server(TARGET, folder / "log", method, *flags, environment=environment) as dying:

        def kill() -> None:
            asked = lambda: (folder / "log").read_text().count("POST /v1/completions")  # noqa: E731
            while asked() < 12:  # some for the comparison, and the others for training
                time.sleep(0.01)
            end(dying.process)

        killing = threading.Thread(target=kill, daemon=True)
        killing.start()
        rest = trained(written, tmp_path / "rest", "EAGLE-3", [dying, servers[0]])
        killing.join(1)
        assert dying.process.poll() is not None
    assert furthest(weights(rest), weights(whole)) == 0
