"""The embedded pair: what ships is what the README says, and quickstart runs on it."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import Trainer

from draftsmith.decode import Counts, DraftModelProposer, InputError, autoregressive_generate, speculative_generate
from draftsmith.medusa import MedusaHeads
from draftsmith.scripts import quickstart
from draftsmith.train.data.corpus import stdlib_modules, stdlib_prompts
from draftsmith.train.data.generate import load_completions
from draftsmith.train.models import check_same_tokenizer, load_model, load_tokenizer

ASSETS = Path(__file__).parents[2] / "assets"


@pytest.fixture(scope="module")
def embedded():
    tokenizer = load_tokenizer(ASSETS / "tiny-target")
    check_same_tokenizer(tokenizer, load_tokenizer(ASSETS / "tiny-draft"), "tiny-target", "tiny-draft")
    return tokenizer, load_model(ASSETS / "tiny-target"), load_model(ASSETS / "tiny-draft")


def test_assets_are_small_safetensors_with_their_licence():
    files = [path for path in ASSETS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 34e6
    assert sum(path.stat().st_size for path in (ASSETS / "tiny-draft").glob("*.safetensors")) <= 2e6
    assert not [path for path in files if path.suffix in {".bin", ".pt", ".pkl"}]
    assert "Python Software Foundation" in (ASSETS / "README.md").read_text(encoding="utf-8")


def test_target_reads_heldout_python(embedded):
    """Far above the trained loss (docs/log/embedded-pair.md): it fails where the weights and the tokenizer differ."""
    tokenizer, target, _ = embedded
    heldout = [m.source for m in stdlib_modules() if m.heldout and m.name in {"colorsys", "tempfile", "threading"}]
    ids = [tokenizer(source[:2000], return_tensors="pt")["input_ids"] for source in heldout]
    losses = [float(target(input_ids=i, labels=i).loss) for i in ids]
    assert max(losses) < 5.0, losses


def test_speculative_output_is_plain_decoding_on_heldout_prompts(embedded):
    tokenizer, target, draft = embedded
    prompts = stdlib_prompts(50, heldout=True)
    assert len(prompts) == 50
    ids = [tokenizer(prompt["prompt"])["input_ids"][-24:] for prompt in prompts]
    proposer, counts = DraftModelProposer(draft), Counts()
    for first in range(0, len(ids), 25):
        batch = ids[first : first + 25]
        width = max(map(len, batch))
        padded = torch.tensor([[0] * (width - len(row)) + row for row in batch])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in batch])
        plain = autoregressive_generate(target, padded, mask, max_new_tokens=12, do_sample=False)
        out = speculative_generate(target, proposer, padded, mask, draft_length=4, max_new_tokens=12, do_sample=False)
        assert torch.equal(out.sequences, plain.sequences), first
        counts += out.counts
    assert counts.mean_acceptance_length() > 1.3


@pytest.fixture
def short(monkeypatch):
    """Quickstart with the shipped configs, but texts of 8 tokens and T=0 alone."""
    configured = quickstart._config
    tokens = {
        "prepare": {"max_new_tokens": 8},
        "measure": {"max_new_tokens": 8, "compiled": "false", "temperature": "0"},
        "tree": {"compiled": "false", "dtype": "float32"},
    }
    monkeypatch.setattr(
        quickstart, "_config", lambda kind, folder, fields: configured(kind, folder, fields | tokens.get(folder, {}))
    )


def test_quickstart_runs_every_step_and_goes_on_where_it_stopped(tmp_path, monkeypatch, short):
    config = quickstart.QuickstartConfig(output=str(tmp_path))
    sizes = quickstart.Sizes(train=6, heldout=4, searched=8, measured=2, replayed=3, steps=2)
    console = Console(record=True, width=120)
    report = quickstart.quickstart(config, console, sizes)
    assert json.loads((tmp_path / "report.json").read_text()) == json.loads(json.dumps(asdict(report)))
    assert {run.proposer.kind for run in report.runs} == {"draft", "baseline_draft", "medusa", "hybrid"}
    hybrid = next(run for run in report.runs if run.proposer.kind == "hybrid")
    assert set(hybrid.sources) == {"suffix", "draft"} and hybrid.proposer.switch_match == 3
    assert [(each.temperature, each.batch_size) for each in report.recommendation.settings] == [(0, 1)]
    assert len(load_completions(str(tmp_path / "completions/sampled"))) == 4
    assert len(load_completions(str(tmp_path / "completions/greedy"))) == 2
    assert report.prompts.count == 2 and report.prompts.replayed == 3
    selection, measured = (
        {json.loads(line)["id"] for line in (tmp_path / f"prompts/{name}.jsonl").read_text().splitlines()}
        for name in ("heldout", "measured")
    )
    assert len(selection) == 4 and len(measured) == 3 and not selection & measured
    load_model(tmp_path / "draft")
    assert MedusaHeads.from_pretrained(tmp_path / "medusa").config.medusa_choices
    text = console.export_text()
    assert "stock" in text and "plain" in text and "hybrid" in text
    # Again: nothing is written or trained twice. The tree and the report, which are made anew, are taken as they are.
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "completions").rglob("shard-*")}
    steps = []
    monkeypatch.setattr(Trainer, "training_step", lambda *args: steps.append(args))
    monkeypatch.setattr(quickstart, "search", lambda *args, **kwargs: None)
    monkeypatch.setattr(quickstart, "print_tree", lambda *args: None)
    monkeypatch.setattr(quickstart, "measure", lambda *args: report)
    assert quickstart.quickstart(config, console, sizes) == report
    assert not steps
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "completions").rglob("shard-*")} == files


def test_quickstart_refuses_a_path_that_a_hybrid_would_split(tmp_path):
    with pytest.raises(InputError, match=r"output: expected a path without \+"):
        quickstart.quickstart(quickstart.QuickstartConfig(output=str(tmp_path / "a+b")), Console())
    assert not list(tmp_path.iterdir())


def test_quickstart_outside_a_clone_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(quickstart, "TARGET", tmp_path / "nowhere")
    with pytest.raises(InputError, match="run it from a clone"):
        quickstart.quickstart(quickstart.QuickstartConfig(), Console())
