"""Training on a target whose rotary angles change with the length: the split of batches changes nothing."""

import shutil

import pytest
from conftest import tiny_llama
from pipelines import block_configured, configured, eagle_configured, heads_configured

from draftsmith.distill.__main__ import DistillRun
from draftsmith.medusa.__main__ import MedusaRun
from draftsmith.medusa.block.__main__ import BlockRun
from draftsmith.medusa.eagle.__main__ import EagleRun
from draftsmith.train.data.examples import training_examples
from draftsmith.train.runs import save_model

ROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 14}
ROPE |= {"short_factor": [1.0] * 4, "long_factor": [1.0, 3.0, 9.0, 27.0]}


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (DistillRun, configured),
        (MedusaRun, heads_configured),
        (EagleRun, eagle_configured),
        (BlockRun, block_configured),
    ],
)
def test_the_loss_does_not_depend_on_the_longest_text_of_a_batch(kind, config, pipeline, tokenizer, tmp_path):
    model = tiny_llama(0, len(tokenizer), scale=1.0, rope_parameters=ROPE, initializer_range=0.3)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    save_model(model, tokenizer, tmp_path / "target")
    for name in ("short", "long"):
        shutil.copytree(pipeline / name, tmp_path / name)
    data = training_examples([str(tmp_path / "short"), str(tmp_path / "long")])
    lengths = [len(row["input_ids"]) for row in data]
    assert min(lengths) < 14 < max(lengths)
    losses = []
    for rows in (1, 8):
        options = {"target": str(tmp_path / "target"), "training": {"per_device_eval_batch_size": rows}}
        options |= {"draft": str(pipeline / "draft")} if kind is DistillRun else {}
        run = kind(config(pipeline, tmp_path / "out", **options))
        run.read_small_files()
        run.data, run.heldout = data, None
        run.target = run.load_target()
        trainer = run.make_trainer(run.make_model())
        losses.append(trainer.evaluate(data)["eval_loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
