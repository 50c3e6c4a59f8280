"""Texts end alike in every command: by the target's generation config, or by its tokenizer where that says nothing."""

import json
import shutil

import pytest
from pipelines import block_configured, configured, eagle_configured, heads_configured

from draftsmith.distill.__main__ import DistillRun
from draftsmith.distill.config import DraftInit
from draftsmith.medusa.block.__main__ import BlockRun
from draftsmith.medusa.eagle.__main__ import EagleRun
from draftsmith.medusa.heads.__main__ import MedusaRun
from draftsmith.scripts.doctor.command import main as doctor
from draftsmith.scripts.pair import load_pair
from draftsmith.train.data.examples import training_examples
from draftsmith.train.data.generate import PrepareConfig, load_completions, prepare
from draftsmith.train.data.shards import read_manifest
from draftsmith.train.models import empty_model, load_tokenizer

END = 299  # no completion of `pipeline` holds it


@pytest.fixture
def two_ends(pipeline, tmp_path, tokenizer):
    """A target that ends texts with two tokens, in a directory next to its completions."""
    shutil.copytree(pipeline / "target", tmp_path / "target")
    ends = [tokenizer.eos_token_id, END]
    (tmp_path / "target" / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return tmp_path / "target", ends


@pytest.mark.parametrize(
    ("kind", "config"), [(MedusaRun, heads_configured), (EagleRun, eagle_configured), (BlockRun, block_configured)]
)
def test_a_cut_vocabulary_of_heads_has_all_ends_of_the_target(kind, config, two_ends, pipeline, tmp_path):
    target, ends = two_ends
    run = kind(config(pipeline, tmp_path / "out", target=str(target), draft_vocabulary=20))
    run.data = training_examples([str(pipeline / "short")])
    assert END not in {label for row in run.data for label in row["labels"]}
    assert set(ends) <= set(run.token_map.tolist()) and len(run.token_map) == 20


@pytest.mark.parametrize("given", ["draft", "layers", "config"])
def test_a_draft_ends_as_its_target_does(given, two_ends, pipeline, tmp_path):
    target, ends = two_ends
    made = {"draft": {}, "layers": {"layers": 1}, "config": {"config": {"num_hidden_layers": 1}}}[given]
    draft = str(pipeline / "draft") if given == "draft" else None
    options = {"draft": draft, "init": DraftInit(draft_vocabulary=20, **made)}
    run = DistillRun(configured(pipeline, tmp_path / "out", target=str(target), **options))
    run.data, run.target = training_examples([str(pipeline / "short")]), None  # as with a teacher cache
    model = run.make_model()
    assert set(ends) <= set(model.config.draft_vocabulary)
    assert model.generation_config.eos_token_id == ends


def test_the_tokenizer_ends_texts_where_the_generation_config_does_not(two_ends, tokenizer):
    target, ends = two_ends
    assert empty_model(target).generation_config.eos_token_id == ends
    assert load_pair(str(target), load_tokenizer(target)).target.generation_config.eos_token_id == ends
    (target / "generation_config.json").write_text("{}")
    pair = load_pair(str(target), load_tokenizer(target))
    assert pair.target.generation_config.eos_token_id == [tokenizer.eos_token_id]


@pytest.mark.parametrize("stored", [[END], [END, 0], None])
def test_a_given_answer_ends_as_the_target_ends_it(stored, two_ends, tmp_path, tokenizer):
    target, _ = two_ends
    assert tokenizer.eos_token_id == 0
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": stored}))
    (tmp_path / "given.jsonl").write_text('{"prompt": "x =", "completion": "1"}')
    prepare(PrepareConfig(str(target), str(tmp_path / "given.jsonl"), str(tmp_path / "texts"), answers="given"))
    (sample,) = load_completions(str(tmp_path / "texts"))
    assert sample["input_ids"][-1] == (END if stored == [END] else 0) and sample["loss_mask"][-1]


def test_what_the_target_says_of_its_texts_and_is_not_applied_is_said_once(
    two_ends, pipeline, tmp_path, caplog, capsys
):
    target, ends = two_ends
    own = {"eos_token_id": ends, "do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 1.0, "max_new_tokens": 99}
    own |= {"repetition_penalty": 1.05, "stop_strings": ["x ="], "bad_words_ids": [[1, 2]]}
    (target / "generation_config.json").write_text(json.dumps(own))
    settings = [
        "temperature 0.7",
        "top_k 20",
        "repetition_penalty 1.05",
        "bad_words_ids [[1, 2]]",
        "stop_strings ['x =']",
    ]
    line = f"target: {target} has {', '.join(settings)} in its generation config, which is not applied: vLLM does by "
    line += "default, and fields do here: top_k: 20, repetition_penalty: 1.05, temperature: 0.7"
    assert load_pair(str(target), load_tokenizer(target)).left_out == settings
    assert caplog.messages == [line]
    caplog.clear()
    assert doctor(["--target", str(target)]) == 0
    assert f"own settings: the generation config has {', '.join(settings)}" in " ".join(capsys.readouterr().out.split())
    config = PrepareConfig(str(target), str(pipeline / "short.txt"), str(tmp_path / "texts"), max_new_tokens=2)
    prepare(config)
    assert caplog.messages.count(line) == 1
    assert read_manifest(tmp_path / "texts")["left_out"] == settings
