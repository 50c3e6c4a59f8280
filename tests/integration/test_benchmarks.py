"""The benchmarks: every config and every command line of the documentation parses, and the cheap ones run."""

import json
import re
import shlex
import sys
import time
from importlib import import_module
from itertools import product
from pathlib import Path

import pytest
from pages import GUIDES
from programs import Untraced
from rich.console import Console
from round_counts import count, random_drafts

from benchmarks import common, floor, study, timing
from benchmarks.gpu import __main__ as gpu
from draftsmith.decode import Tree
from draftsmith.decode.errors import InputError
from draftsmith.medusa import MedusaHeads, MedusaProposer
from draftsmith.train.cli import parse_config

ROOT = Path(__file__).parents[2]
NAMES = {path.stem for path in (ROOT / "benchmarks").glob("*.py")} - {"__init__", "common", "timing"} | {
    path.parent.name for path in (ROOT / "benchmarks").glob("*/__main__.py")
}
COMMAND = re.compile(r"python -m benchmarks\.(\w+)([^`\n]*)")


def commands() -> list[tuple[str, list[str]]]:
    """Return the benchmarks and arguments of all command lines in the documentation; what is optional is given."""
    found = [match for page in GUIDES for match in COMMAND.findall(page.read_text("utf-8").replace("\\\n", ""))]
    return [(name, shlex.split(re.sub(r"\[(--[^]]*)\]", r"\1", flags), comments=True)) for name, flags in found]


def config_of(name: str, arguments: list[str]) -> common.BenchmarkConfig:
    config_class = f"Bench{name.title().replace('_', '')}Config"
    return parse_config(getattr(import_module(f"benchmarks.{name}"), config_class), arguments)


def test_every_command_line_of_the_documentation_parses():
    lines = commands()
    assert {name for name, _ in lines} == NAMES
    for name, arguments in lines:
        assert config_of(name, arguments).threads in (None, 1)


@pytest.fixture
def pair(pair_dirs, tmp_path) -> list[str]:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "def add(a, b):"}\n{"prompt": "import os"}\n')
    return ["--target", str(pair_dirs[0]), "--draft", str(pair_dirs[1]), "--prompts", str(prompts)]


def figures_of(bench, config_class, arguments, tmp_path, *shown):
    path = tmp_path / "figures.json"
    common.run_benchmark(config_class, bench, *shown, argv=[*arguments, "--output", str(path)])
    return json.loads(path.read_text())


@pytest.mark.usefixtures("short_timing")
def test_a_study_trains_replays_compares_and_prices_kinds_and_goes_on(pair_dirs, tmp_path, capsys):
    """At equal steps and time, on a few short texts, next to a drafter that is there; and not again."""
    target, draft = map(str, pair_dirs)
    variants = {"draft": {"draft": draft}, "block": {"command": "block", "draft_vocabulary": 200}}
    arguments = ["--target", target, "--variants", json.dumps(variants), "--drafters", json.dumps({"stock": draft})]
    arguments += ["--common", json.dumps({"training.max_steps": 2, "training.use_cpu": True}), "--seeds", "[0]"]
    arguments += ["--train_prompts", "6", "--replayed_prompts", "3", "--max_new_tokens", "6"]
    arguments += ["--draft_lengths", "[1,2]", "--equal_time", "true", "--output", str(tmp_path / "study")]
    for more in ([], ["--priced", "true"]):
        common.run_benchmark(study.BenchStudyConfig, study.bench, study.shown, argv=[*arguments, *more])
    said = capsys.readouterr().out
    assert said.count("block, seed 0") == said.count("block, equal time, seed 0") == 1
    results = json.loads((tmp_path / "study" / "results.json").read_text())
    longer = results["block, equal time"]["0"]
    pace = results["block"]["0"]["seconds"] / 2
    assert longer["steps"] == max(1, round(results["draft"]["0"]["seconds"] / pace))
    config = study.BenchStudyConfig(variants=variants, drafters={"stock": draft})
    (table,) = study.shown(config, results).values()
    assert set(table) == {"draft", "block", "block, equal time", "stock"}
    assert set(results) == {*table, "costs", "environment", "config"}
    for name, length in product(table, (1, 2)):
        row, figure = table[name], f"T=0 γ={length}"
        price, tau = results["costs"][figure][name.removesuffix(study.EQUAL_TIME)], row[f"{figure} τ"].value
        assert 1 <= tau <= 1 + length and row[f"{figure} draft ms"] == price["draft_ms"] > 0
        assert row[f"{figure} speed-up"] == pytest.approx(price["per_token"] * tau) and price["per_token"] > 0


def test_variants_are_compared_with_the_baseline():
    config = study.BenchStudyConfig(variants={"kl": {}, "jsd": {}})
    runs = {}
    for variant, of in (("kl", [4.0, 2.0, 3.0]), ("jsd", [2.0, 1.0, 2.0])):
        sums = {"tokens": [8.0, 4.0, 6.0], "rounds": of, "overlap": [4.0, 2.0, 3.0]}
        runs[variant] = {str(seed): {"replayed": {"T=0 γ=4": sums}} for seed in (0, 1)}
    (table,) = study.shown(config, runs).values()
    assert set(table) == set(runs)
    row = table["jsd"]
    assert row["seeds"] == 2 and row["T=0 γ=4 τ"].value == pytest.approx(18 / 5)
    assert row["T=0 γ=4 τ against kl"].value == pytest.approx(18 / 5 - 2)
    assert row["T=0 γ=4 α"].value == pytest.approx(0.5) and "T=0 γ=4 τ against kl" not in table["kl"]


# Accuracies of trained heads on the embedded target by depth and rank, roughly: they shape the tree.
ACCURACIES = [[0.54 * 0.45**rank for rank in range(10)], [0.44 * 0.5**rank for rank in range(8)]]
ACCURACIES += [[0.37 * 0.5**rank for rank in range(6)], [0.35 * 0.5**rank for rank in range(4)]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rows", [1, 8])
def test_rounds_take_few_kernels_and_fewer_synchronisations(rows, temperature):
    """Whatever B and γ are; they were 67 and 1,334 for B = 8 at T = 1 when each row was verified by itself."""
    target, drafts = random_drafts()
    chain = count(target, drafts["chain"], rows, temperature, draft_length=8)
    assert chain.synchronisations <= (4 if temperature else 3)
    heads = MedusaHeads.of_target(target, len(ACCURACIES)).requires_grad_(False)
    proposer = MedusaProposer(heads, Tree.from_accuracies(ACCURACIES, 63))
    tree = count(target, (proposer, len(ACCURACIES), []), rows, temperature)
    assert tree.synchronisations <= (6 + len(ACCURACIES) if temperature else 3)
    assert tree.kernels <= 250


@pytest.mark.usefixtures("untraced")
def test_rounds_are_timed_beside_their_products(pair, tmp_path, monkeypatch):
    monkeypatch.setattr(timing, "Program", Untraced)
    arguments = [*pair[:2], "--drafter", json.dumps([f"mine={pair[3]}"]), "--repeats", "1", "--max_new_tokens", "40"]
    figures = figures_of(floor.bench, floor.BenchFloorConfig, arguments, tmp_path)
    assert set(figures["rounds"]) == {f"{name}, T = {t}" for name in ("plain", "mine") for t in (0, 1)}
    for of_method in figures["rounds"].values():
        assert 0 < of_method["outside_share"] < 1 and of_method["products_ms"] > 0
        assert of_method["over_products"] > 0


WORKER = """
import json, os, sys, time
file = sys.argv[1]
results = json.load(open(file))
def write():
    with open(file + ".new", "w") as aside:
        json.dump(results, aside)
    os.replace(file + ".new", file)
name = next(name for name, of_case in results["cases"].items() if of_case["state"] == "waiting")
results["cases"][name] = {"state": "running", "began": time.time()}
write()
if name == "law float32 lookahead":
    os._exit(7)
if name == "law float32 hybrid":
    time.sleep(60)
results["cases"][name] = {"state": "passed", "seconds": 0.1}
write()
"""


def test_a_gpu_run_outlives_cases_that_crash_and_hang(tmp_path, monkeypatch, capsys):
    (tmp_path / "worker.py").write_text(WORKER)
    names = ["law float32 suffix", "law float32 lookahead", "law float32 hybrid", "completions"]
    file = tmp_path / "run.json"
    file.write_text(json.dumps({"cases": {name: {"state": "waiting"} for name in names}}))
    run = gpu.Run(file, time.time() + 60, Console(), [sys.executable, str(tmp_path / "worker.py")])
    monkeypatch.setattr(gpu, "POLL", 0.01)
    run._limits["law float32 hybrid"] = 0.5
    run.work()
    states = {name: entry["state"] for name, entry in run.results()["cases"].items()}
    assert states == dict(zip(names, ("passed", "failed", "failed", "passed"), strict=True))
    said = capsys.readouterr().out
    assert "exit code 7" in said and "it took longer than 0 s" in said


def test_a_gpu_run_enters_its_cases_on_a_cpu_and_keeps_no_figures(tmp_path, capsys):
    file = tmp_path / "kept/first-run.json"
    only = ["rounds 1.7B eager", "step medusa qwen3-8b, sdpa", "law float32 prompt_lookup"]
    assert gpu.main(["--output", str(file), "--only", json.dumps(only), "--minutes", "30"]) == 0
    kept = json.loads(file.read_text())
    assert set(kept["cases"]) == set(only) and kept["environment"]["torch"]
    assert {entry["state"] for entry in kept["cases"].values()} == {"passed"}
    law = kept["cases"]["law float32 prompt_lookup"]
    assert law["identical"] == 4 and law["p_value"] > 1e-3
    assert kept["environment"]["gpu"] is None
    assert set(kept["cases"]["rounds 1.7B eager"]["figures"]["draft"].values()) == {None}
    assert kept["cases"]["step medusa qwen3-8b, sdpa"]["figures"]["tokens_per_second"] is None
    with pytest.raises(InputError, match=r"only: expected beginnings of completions, .*, found lauw"):
        gpu.main(["--only", "[lauw]"])
