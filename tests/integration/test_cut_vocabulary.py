"""Drafts that learn with a cut vocabulary: what is measured in training is what the saved directory accepts."""

import json
from pathlib import Path

import pytest
import torch
from pipelines import configured, furthest, history, measured_on_what_it_learns, weights

from draftsmith.decode import InputError
from draftsmith.distill import __main__ as command
from draftsmith.distill.config import DraftInit
from draftsmith.scripts.configs import ExportConfig
from draftsmith.scripts.engines.export import export
from draftsmith.train.cli import run
from draftsmith.train.models import load_draft, load_model
from draftsmith.train.teacher.cache_writer import CacheConfig, make_cache

D, T = 60, 0.8


def distilled(pipeline: Path, output: Path, **options):
    """Ten steps, on what it is measured on."""
    training = {"max_steps": 10, "eval_on_start": True} | options.pop("training", {})
    data = [str(pipeline / "short"), str(pipeline / "long")]
    options = {"temperature": T, "draft_length": 3, "init": DraftInit(draft_vocabulary=D), "heldout": data} | options
    with measured_on_what_it_learns():
        return command.distill(configured(pipeline, output, training=training, **options))


def test_rows_that_it_lacks_are_not_learned(pipeline, tmp_path):
    trainer = distilled(pipeline, tmp_path / "out", training={"weight_decay": 0.0})
    ends = trainer.tokenizer.eos_token_id
    kept = json.loads((tmp_path / "out" / "config.json").read_text())["draft_vocabulary"]
    assert len(kept) == D and ends in kept
    others = [token for token in range(len(trainer.tokenizer)) if token not in kept]
    before, after = (weights(path)["lm_head.weight"] for path in (pipeline / "draft", tmp_path / "out"))
    assert torch.equal(before[others], after[others]) and not torch.equal(before[kept], after[kept])


def test_a_cache_teaches_the_same(pipeline, tmp_path):
    completions = [str(pipeline / name) for name in ("short", "long")]
    make_cache(CacheConfig(str(pipeline / "target"), completions, str(tmp_path / "cache"), k=300, temperature=T))
    live = distilled(pipeline, tmp_path / "live")
    cached = distilled(pipeline, tmp_path / "cached", teacher_cache=[str(tmp_path / "cache")])
    assert history(cached, "loss") == pytest.approx(history(live, "loss"), rel=1e-2)
    for name in ("alpha", "mean_acceptance_length", "loss"):
        assert history(cached, f"eval_{name}") == pytest.approx(history(live, f"eval_{name}"), rel=1e-2)


def test_training_goes_on_with_the_same_tokens_and_on_its_own_texts(pipeline, tmp_path):
    distilled(pipeline, tmp_path / "first", training={"max_steps": 1})
    options = {"draft": str(tmp_path / "first"), "training": {"max_steps": 2}}
    again = distilled(pipeline, tmp_path / "again", init=DraftInit(), on_policy=1.0, on_policy_tokens=4, **options)
    first, second = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("first", "again"))
    assert first["draft_vocabulary"] == second["draft_vocabulary"]
    assert set(again.forbidden_tokens) == set(range(300)) - set(first["draft_vocabulary"])
    assert furthest(weights(tmp_path / "first"), weights(tmp_path / "again")) > 0
    with pytest.raises(InputError, match=f"init.draft_vocabulary: expected none for a draft that has one, found {D}"):
        distilled(pipeline, tmp_path / "other", **options)


def test_it_is_exported_with_a_whole_head_that_drafts_the_same(pipeline, tmp_path):
    distilled(pipeline, tmp_path / "draft")
    flags = {"drafter": [str(tmp_path / "draft")], "target": str(pipeline / "target"), "format": "vllm"}
    card = (tmp_path / "draft" / "README.md").read_text()
    for server in ("vllm", "sglang"):  # what serves it needs the whole head that the line before writes
        assert f"draftsmith export --draft DIR --format {server} --output WHOLE\n" in card
    assert '"model":"WHOLE"' in card and "--speculative-draft-model-path WHOLE" in card and '"model":"DIR"' not in card
    expected = r"output: expected a new directory for a whole head, .*: .*draft drafts \d+ of 300 tokens; .* --output$"
    with pytest.raises(InputError, match=expected):
        export(ExportConfig(**flags), tmp_path / "files")
    lines = export(ExportConfig(**flags, output=str(tmp_path / "served")), tmp_path / "files")
    assert any("what it saves is lost" in line for line in lines) and str(tmp_path / "served") in lines[-1]
    served = load_model(tmp_path / "served")
    assert not hasattr(served.config, "draft_vocabulary") and not served.config.tie_word_embeddings
    ids = torch.arange(200).view(4, 50)
    found, expected = served(ids).logits, load_draft(tmp_path / "draft")(ids).logits
    assert torch.equal(found.argmax(-1), expected.argmax(-1))
    inside = expected.isfinite()
    torch.testing.assert_close(found[inside], expected[inside])
    whole = {**flags, "drafter": [str(pipeline / "draft")], "output": str(tmp_path / "whole")}
    with pytest.raises(InputError, match="output: expected none with a draft model, which stays as it is, found one"):
        export(ExportConfig(**whole), tmp_path / "files")


def test_bad_sizes_are_refused_in_one_line(pipeline, tmp_path, capsys):
    flags = ["--target", str(pipeline / "target"), "--draft", str(pipeline / "draft")]
    flags += ["--completions", f"[{pipeline / 'short'}]", "--training.output_dir", str(tmp_path / "out")]
    flags += ["--training.use_cpu", "true", "--training.max_steps", "1"]
    for count, expected in ((1, "at least 2, found 1"), (301, "at most 3")):
        assert run(lambda count=count: command.main([*flags, "--init.draft_vocabulary", str(count)])) == 2
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert error.startswith("error: init.draft_vocabulary: expected ") and expected in error
