"""What each recipe says of its first loss, and how it is trained where the user does not say."""

import pytest
import torch
from conftest import tiny_llama
from pipelines import configured, eagle_configured, heads_configured

from draftsmith.distill import __main__ as distillation
from draftsmith.distill.config import DistillConfig, DraftInit
from draftsmith.medusa.eagle import __main__ as eagle
from draftsmith.medusa.heads import __main__ as medusa
from draftsmith.train.job.defaults import Defaults
from draftsmith.train.job.optimizer import MuonAdamW
from draftsmith.train.models import load_tokenizer
from draftsmith.train.runs import save_model

KINDS = {
    "draft": (distillation.distill, configured, {}),
    "lora": (medusa.train_heads, heads_configured, {"backbone": "lora"}),
    # A copied layer whose last norm is not scaled.
    "eagle": (eagle.train_heads, eagle_configured, {"init": "last_layer", "norm_output": True}),
}


@pytest.fixture(scope="module")
def loud(pipeline, tmp_path_factory):
    """A target that is sure of each token, and a draft that is as sure of others."""
    tokenizer = load_tokenizer(str(pipeline / "target"), field="target")
    root = tmp_path_factory.mktemp("loud")
    for seed, name in enumerate(("target", "draft")):
        model = tiny_llama(seed, len(tokenizer))
        with torch.no_grad():
            model.get_output_embeddings().weight.mul_(200)
        save_model(model, tokenizer, root / name)
    return root


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_above_the_uniform_one_is_told_once(pipeline, loud, tmp_path, capsys, kind):
    train, configure, options = KINDS[kind]
    training = {"max_steps": 2, "gradient_accumulation_steps": 2}
    options = {"target": str(loud / "target")} | options
    options |= {"draft": str(loud / "draft")} if configure is configured else {}
    trainer = train(configure(pipeline, tmp_path / "loud", training=training, **options))
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: the first loss")]
    if kind != "lora":  # whose loss is the backbone's, too
        first = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
        assert f"loss is {first:.2f}, where" in line


def test_a_draft_that_agrees_is_not_warned_of(pipeline, loud, tmp_path, capsys):
    same = str(loud / "target")
    distillation.distill(configured(pipeline, tmp_path, target=same, draft=same, training={"max_steps": 2}))
    assert "first loss" not in capsys.readouterr().err


def test_a_new_draft_is_trained_by_muon_at_the_rate_of_its_width(pipeline, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(DistillConfig, "defaults", Defaults(rate=1e-3, muon_rate=1e-2))
    training = {"max_steps": 1, "learning_rate": None}
    options = {"draft": None, "init": DraftInit(1), "training": training}
    trainer = distillation.distill(configured(pipeline, tmp_path, **options))
    rate = trainer.config.defaults.learning_rate(trainer.draft.config.hidden_size, muon=True)
    assert isinstance(trainer.optimizer.optimizer, MuonAdamW) and trainer.args.learning_rate == rate
    assert f"optimizer: Muon, learning rate {rate:g}" in capsys.readouterr().err
