"""`draftsmith tree`: from completions to a tree in the heads' config and a picture of it."""

import json
import math
import shutil
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from conftest import tiny_llama
from listening import LOADING, listened
from trained_heads import train_heads
from trained_parallel import train_parallel

from draftsmith.decode import autoregressive_generate, speculative_generate
from draftsmith.decode.measurement import turns
from draftsmith.decode.tree import Tree
from draftsmith.medusa import EagleHeads, MedusaHeads, MedusaProposer
from draftsmith.scripts import tree as command
from draftsmith.scripts.cli import main
from draftsmith.scripts.pair import load_pair
from draftsmith.train.data.generate import PrepareConfig, load_completions, prepare
from draftsmith.train.kinds.drafter import DrafterSpec
from draftsmith.train.models import load_model, load_tokenizer
from draftsmith.train.runs import save_model

WORDS = ["def", "return", "self", "import os", "for i in range(10):", "print(x)", "class A:", "x = [1, 2]"]


@pytest.fixture(scope="module")
def made(pipeline, tmp_path_factory):
    """Heads of the pipeline's target, saved, and 24 completions that it wrote at temperature 0."""
    root = tmp_path_factory.mktemp("medusa")
    prompts = [f"{WORDS[i % 8]} {WORDS[i // 8]}" for i in range(24)]
    (root / "prompts.txt").write_text("\n".join(prompts))
    paths = (pipeline / "target", root / "prompts.txt", root / "greedy")
    prepare(PrepareConfig(*map(str, paths), max_new_tokens=20, temperature=0.0, dtype="float32"))
    target = load_model(pipeline / "target")
    texts = [torch.tensor(ids) for ids in load_completions(str(root / "greedy"))["input_ids"]]
    heads = train_heads(target, MedusaHeads.of_target(target, 3), texts[:8], steps=12)
    heads.save_pretrained(root / "heads")
    return root


@pytest.fixture
def heads(made, tmp_path):
    """The saved heads, a copy of this test's own."""
    return shutil.copytree(made / "heads", tmp_path / "heads")


def tree_of(pipeline, made, heads, *flags: str, completions=None) -> list[str]:
    argv = ["tree", "--target", str(pipeline / "target"), "--heads", str(heads), "--dtype", "float32"]
    argv += ["--compiled", "false"]
    return [*argv, "--completions", json.dumps([str(completions or made / "greedy")]), *flags]


def test_the_tree_goes_into_the_heads_and_is_drafted(pipeline, made, heads, capsys):
    before = json.loads((heads / "config.json").read_text())
    with listened() as heard:
        assert main(tree_of(pipeline, made, heads, "--nodes", "9")) == 0
    heard.require("ranks in", "search", *LOADING)
    report = json.loads((heads / "tree.json").read_text())
    after = json.loads((heads / "config.json").read_text())
    assert after == before | {"medusa_choices": report["choices"]}
    assert not list(heads.glob(".*.partial"))
    loaded = MedusaHeads.from_pretrained(heads)
    assert loaded.tree == Tree.from_choices(report["choices"])
    assert len(loaded.tree) == report["trees"]["searched"]["nodes"] <= 9

    texts = report["calibration"]["texts"]
    assert texts["search"] >= texts["check"] >= texts["selection"] >= 1 and sum(texts.values()) <= 24
    assert report["costs"] is None
    assert len(report["rank_accuracies"]) == 3 and all(0 < sum(shares) <= 1 for shares in report["rank_accuracies"])
    lengths = {name: own["mean_acceptance_length"]["value"] for name, own in report["trees"].items()}
    assert lengths["searched"] > lengths["chain"] > 1
    for name, own in report["trees"].items():
        if name == "searched":
            assert own["gain_of_searched"] is None
        elif own["gain_of_searched"] is not None:
            gain = lengths["searched"] - lengths[name]
            assert own["gain_of_searched"]["value"] == pytest.approx(gain)
    out = capsys.readouterr().out
    fewer = f"{len(loaded.tree)} nodes, not 9: in these texts no more would be accepted"
    assert (fewer in out) == (len(loaded.tree) < 9)
    assert "depth 3" in out and f"{lengths['searched']:.2f}" in out and f"tree: {heads / 'tree.json'}" in out
    assert max(map(len, out.replace(str(heads), "").splitlines())) <= 80

    target = load_model(pipeline / "target")
    ids = torch.tensor([load_completions(str(made / "greedy"))[0]["input_ids"][:3]])
    options = {"max_new_tokens": 20, "do_sample": False}
    out = speculative_generate(target, MedusaProposer(loaded), ids, draft_length=loaded.tree.depth, **options)
    assert torch.equal(out.sequences, autoregressive_generate(target, ids, **options).sequences)


def test_measured_costs_choose_and_the_heads_stay_where_there_is_an_output(
    pipeline, made, heads, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(command, "LADDER", (1, 2, 4, 8, 16))
    monkeypatch.setattr(command, "REPEATS", 2)
    monkeypatch.setattr(turns, "WRITTEN", 8)
    before = (heads / "config.json").read_bytes()
    assert main(tree_of(pipeline, made, heads, "--output", str(tmp_path / "out"))) == 0
    assert (heads / "config.json").read_bytes() == before and not (heads / "tree.json").exists()
    report = json.loads((tmp_path / "out" / "tree.json").read_text())
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"tree.json"}
    budgets = report["costs"]["budgets"]
    best = max(budgets, key=lambda budget: budget["predicted_speedup"])
    assert best["nodes"] == report["trees"]["searched"]["nodes"] == len(report["choices"])
    for smaller, larger in pairwise(budgets):
        assert smaller["nodes"] < larger["nodes"]
        assert smaller["verification_seconds"] <= larger["verification_seconds"]
    assert all(budget["predicted_speedup"] > 0 and math.isfinite(budget["rest_seconds"]) for budget in budgets)
    assert "speed-up" in capsys.readouterr().out


def parallel(target, made):
    """A draft of three tokens in one forward."""
    texts = [torch.tensor(ids) for ids in load_completions(str(made / "greedy"))["input_ids"]]
    return train_parallel(target, 0, 3, texts[:8], steps=16)


@pytest.mark.parametrize(
    ("kind", "field", "depth"), [("parallel_draft", "parallel_tree", 3), ("eagle", "eagle_tree", 8)]
)
def test_other_drafters_trees_go_into_their_configs_and_are_drafted(pipeline, made, tmp_path, kind, field, depth):
    directory, target = tmp_path / "drafter", load_model(pipeline / "target")
    tokenizer = load_tokenizer(pipeline / "target")
    if kind == "eagle":
        EagleHeads.of_target(target).save_pretrained(directory)
    else:
        save_model(parallel(target, made), tokenizer, directory)
    before = json.loads((directory / "config.json").read_text())
    argv = ["tree", "--target", str(pipeline / "target"), f"--{kind}", str(directory), "--nodes", "6"]
    argv += ["--completions", json.dumps([str(made / "greedy")]), "--dtype", "float32", "--compiled", "false"]
    assert main(argv) == 0
    report = json.loads((directory / "tree.json").read_text())
    assert json.loads((directory / "config.json").read_text()) == before | {
        f"{kind.removesuffix('_draft')}_tree": report["choices"]
    }
    assert not list(directory.glob(".*.partial"))
    assert report["drafter"] == {"kind": kind, "path": str(directory), "depth": depth}
    assert 0 < len(report["choices"]) <= 6 and len(report["rank_accuracies"]) == depth
    spec = DrafterSpec(kind, str(directory))
    drafter = load_pair(str(pipeline / "target"), tokenizer, [spec], "float32").drafter
    assert drafter.tree == Tree.from_choices(report["choices"]) and drafter.draft_lengths == [drafter.tree.depth]
    assert drafter.to_dict()["tree_nodes"] == drafter.nodes == len(report["choices"])
    spec = replace(spec, tree=Tree.chain(2), draft_lengths=[2])
    chain = load_pair(str(pipeline / "target"), tokenizer, [spec], "float32").drafter
    assert chain.proposer.tree.is_chain and chain.draft_lengths == [2]


def refusal(argv: list[str], capsys) -> str:
    assert main(argv) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    return error


def test_text_that_the_target_did_not_write_so_is_refused(pipeline, made, heads, capsys):
    error = refusal(tree_of(pipeline, made, heads, "--nodes", "4", completions=pipeline / "long"), capsys)
    assert f"completions: expected in {pipeline / 'long'} what" in error
    assert "at temperature 0, found" in error and "tokens that are not its most likely, the first in sample" in error
    assert not (heads / "tree.json").exists()


def test_bad_input_is_one_line(pipeline, made, heads, tmp_path, capsys, monkeypatch):
    assert "nodes: expected at least 1 and at most 1024, found 0" in refusal(
        tree_of(pipeline, made, heads, "--nodes", "0"), capsys
    )
    error = refusal(tree_of(pipeline, made, tmp_path / "none"), capsys)
    assert "drafter: expected a model directory or a hub id" in error
    MedusaHeads.of_target(load_model(pipeline / "target"), 2, token_map=torch.arange(9)).save_pretrained(
        tmp_path / "wrong"
    )
    config = json.loads((tmp_path / "wrong" / "config.json").read_text())
    (tmp_path / "wrong" / "config.json").write_text(json.dumps(config | {"vocab_size": 77}))
    assert "vocab_size" in refusal(tree_of(pipeline, made, tmp_path / "wrong"), capsys)
    monkeypatch.setattr(command, "load_completions", lambda *args: load_completions(*args).select(range(3)))
    error = refusal(tree_of(pipeline, made, heads, "--nodes", "4"), capsys)
    assert "completions: expected at least 4 different texts, found 3" in error


def test_what_a_round_takes_beside_its_forward_is_a_plane():
    """The tree of one lucky moment is not cheaper than a smaller one."""
    trees = [Tree.chain(1), Tree.from_choices([(0,), (1,)]), Tree.chain(2), Tree.chain(3), Tree.chain(4)]
    exact = [0.001 + 0.0005 * tree.depth + 0.0001 * len(tree) for tree in trees]
    assert command.fit_rest_seconds(trees[:4], exact[:4], trees) == pytest.approx(exact)
    lucky = command.fit_rest_seconds(trees, [*exact[:3], exact[3] - 0.001, exact[4]], trees)
    assert lucky[0] <= lucky[2] <= lucky[3] <= lucky[4]


@pytest.mark.parametrize("compiled", [False, True])
def test_each_trees_block_and_round_are_timed_as_they_will_run(monkeypatch, compiled):
    """Compiled, the deepest tree alone is: each would be a program of its own."""
    target = tiny_llama(0, layers=1)
    heads = MedusaHeads.of_target(target, 2)
    asked = []

    def seconds(model, rows, context, tokens, repeats, compiled=False):
        asked.append((compiled, tuple(tokens)))
        return {k: 0.5 + 0.1 * k for k in tokens}

    def rounds(*args):
        asked.append(args[-1])
        large = {"3 nodes": [(1.4, [3])]}
        return {0.0: turns.Turns([0.7], large if compiled else {"1 nodes": [(1.0, [1])], **large})}

    monkeypatch.setattr(command, "verification_costs", seconds)
    monkeypatch.setattr(command, "loop_turns", rounds)
    trees = [Tree.chain(1), Tree.from_choices([(0,), (1,), (0, 0)])]
    text, doubts = torch.arange(40) % 7, list[str]()
    small, large = command.round_costs(target, MedusaProposer(heads), text, 30, compiled, trees, doubts)
    assert asked == [compiled, (compiled, (1, 2, 4)), compiled] and not doubts
    assert small.verification(2) == pytest.approx(0.7) and large.verification(4) == pytest.approx(0.9)
    assert small.overhead == pytest.approx(0.25 if compiled else 0.3) and large.overhead == pytest.approx(0.5)
    assert small.plain_overhead == pytest.approx(0.1)
