"""Parallel drafts: what the loss and the figures of training are, and what a run leaves."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import tiny_llama
from pipelines import configured, history
from torch import Tensor

from draftsmith.decode import DraftModelProposer, InputError, ParallelDraftProposer, replay_acceptance
from draftsmith.distill import __main__ as command
from draftsmith.distill.config import DraftInit
from draftsmith.distill.parallel.trainer import ParallelTrainer
from draftsmith.train import launch
from draftsmith.train.losses.objective import Objective
from draftsmith.train.models import load_model
from draftsmith.train.options import LoraOptions
from draftsmith.train.runs import save_model
from draftsmith.train.teacher.cache_writer import CacheConfig, make_cache

K = 4


def parallel(pipeline: Path, output: Path, training: dict | None = None, **options):
    training = {"max_steps": 2, "per_device_eval_batch_size": 2} | (training or {})
    options = {"parallel": K, "parallel_retention": 0.8, "heldout": [str(pipeline / "heldout")]} | options
    return configured(pipeline, output, training=training, **options)


def built(config, monkeypatch) -> ParallelTrainer:
    """The trainer of a config, before its first step."""
    monkeypatch.setattr(launch, "run_training", lambda trainer, finish: None)
    return command.distill(config)


def a_step(trainer: ParallelTrainer) -> dict:
    batches, _ = trainer.get_batch_samples(iter(trainer.get_train_dataloader()), 1, trainer.args.device)
    return batches[0]


def texts_of(batch: dict) -> list[tuple[list[int], list[bool]]]:
    """The tokens of each text of a batch, and which of them carry a loss."""
    found = []
    for row, (ids, labels) in enumerate(zip(batch["input_ids"], batch["labels"], strict=True)):
        starts = [0]
        if "position_ids" in batch:
            starts = (batch["position_ids"][row] == 0).nonzero()[:, 0].tolist()
        for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
            learned = (labels[start:end] != -100).tolist()
            learned[0] = False
            if any(learned):
                found.append((ids[start:end].tolist(), learned))
    return found


def eager(trainer: ParallelTrainer, batch: dict) -> Tensor:
    """The loss by plain causal forwards of [prefix, masks], one for each anchor."""
    lengths = _lengths(batch)
    draft, target, objective = trainer.draft, trainer.target, trainer.objective
    total, anchor = torch.zeros(()), 0
    for ids, learned in texts_of(batch):
        p = target(input_ids=torch.tensor([ids])).logits[0].detach()
        for t in range(len(ids) - 1):
            if not learned[t + 1]:
                continue
            masks = lengths[anchor]
            anchor += 1
            fed = ids[: t + 1] + [trainer.mask_token] * masks
            q = draft(input_ids=torch.tensor([fed])).logits[0, t:]
            labels = torch.tensor(ids[t + 1 : t + 2 + masks])
            features = objective.features(p[t : t + 1 + masks], q, labels)
            total = total + features[:, 0].sum()
    assert anchor == len(lengths)
    return total


def _lengths(batch: dict) -> list[int]:
    offsets = batch["chains"].offsets_E
    return torch.bincount((offsets == 0).cumsum(0) - 1).sub(1).tolist()


CASES = {
    "plain": {},
    "packed": {"packing": True, "max_length": 64},
    "prompts": {"prompt_loss": True, "divergence": "tvd"},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_the_loss_and_its_gradients_are_those_of_a_forward_for_each_anchor(pipeline, tmp_path, monkeypatch, options):
    trainer = built(parallel(pipeline, tmp_path, **options), monkeypatch)
    batch, draft = a_step(trainer), trainer.draft
    assert isinstance(trainer.objective, Objective) and max(_lengths(batch)) == K - 1
    expected = eager(trainer, batch)
    expected.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in draft.named_parameters()}
    draft.zero_grad()
    found = trainer.compute_loss(draft, trainer._prepare_inputs(batch), num_items_in_batch=1)
    found.backward()
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    for name, parameter in draft.named_parameters():
        scale = gradients[name].abs().max()
        assert (parameter.grad - gradients[name]).abs().max() <= 2e-5 * scale, name


@pytest.fixture(scope="module")
def trained(pipeline, tmp_path_factory):
    output = tmp_path_factory.mktemp("trained")
    steps = {"eval_strategy": "steps", "eval_steps": 1}
    return command.distill(parallel(pipeline, output, steps, draft_length=3)), output


FIGURES = ("mean_acceptance_length", "plain_mean_acceptance_length", "alpha", "alpha_1", "alpha_3", "loss")


def test_a_run_leaves_a_parallel_draft_with_its_figures(trained):
    trainer, output = trained
    config = json.loads((output / "config.json").read_text())
    assert config["parallel_length"] == K and config["pard_token"] == trainer.mask_token
    for name in FIGURES:
        assert len(history(trainer, f"eval_{name}")) == 2
    card = (output / "README.md").read_text()
    assert f"{K} tokens in one forward" in card and '"parallel_drafting":true' in card


def test_what_is_measured_in_training_is_what_replay_says(trained, pipeline):
    """Of the saved draft, by the proposers that decode with it, on the same texts."""
    trainer, output = trained
    target, draft = (load_model(path) for path in (pipeline / "target", output))
    rows = list(trainer.eval_dataset)
    sequences = [torch.tensor(row["input_ids"]) for row in rows]
    prompts = [next(t for t, label in enumerate(row["labels"]) if label != -100) for row in rows]
    for proposer, name in ((ParallelDraftProposer, ""), (DraftModelProposer, "plain_")):
        replay = replay_acceptance(target, proposer(draft), sequences, prompts, draft_lengths=[3])
        found = history(trainer, f"eval_{name}mean_acceptance_length")[-1]
        assert found == pytest.approx(replay.mean_acceptance_length[3].value, rel=1e-4)


def test_a_parallel_draft_goes_on_with_its_mask_token_and_without_its_tree(trained, pipeline, tmp_path, monkeypatch):
    output = shutil.copytree(trained[1], tmp_path / "branched")
    config = json.loads((output / "config.json").read_text())
    (output / "config.json").write_text(json.dumps(config | {"parallel_tree": [[0], [1]]}))
    before = load_model(output).get_input_embeddings().weight
    trainer = built(parallel(pipeline, tmp_path, draft=str(output), parallel=6), monkeypatch)
    assert trainer.draft.config.parallel_length == 6 and "parallel_tree" not in trainer.draft.config.to_dict()
    assert torch.equal(trainer.draft.get_input_embeddings().weight, before)


def test_a_mask_token_may_be_named_and_begins_as_the_mean(pipeline, tmp_path, monkeypatch, tokenizer):
    name = tokenizer.convert_ids_to_tokens(7)
    before = load_model(pipeline / "draft").get_input_embeddings().weight
    for token in (7, name):
        trainer = built(parallel(pipeline, tmp_path, parallel_mask_token=token), monkeypatch)
        rows = trainer.draft.get_input_embeddings().weight
        assert trainer.mask_token == 7 and torch.allclose(rows[7], before.mean(0), atol=1e-6)
        assert torch.equal(rows[8:], before[8:]) and 7 in trainer.forbidden_tokens
    for token in (len(before), "no such token"):
        with pytest.raises(InputError, match=r"^parallel.*: expected .* found "):
            built(parallel(pipeline, tmp_path, parallel_mask_token=token), monkeypatch)


@pytest.mark.parametrize("tied", [True, False])
def test_the_mask_of_a_padded_vocabulary_is_kept_and_not_drafted(pipeline, tmp_path, tokenizer, tied):
    """Its row of the head is silenced with the padding; tied to the embedding, it has learned that no text has it."""
    size = len(tokenizer)
    for name, seed in (("target", 0), ("draft", 1)):
        model = tiny_llama(seed, size + 5, layers=1, tie_word_embeddings=tied and name == "draft")
        model.generation_config.eos_token_id = tokenizer.eos_token_id
        save_model(model, tokenizer, tmp_path / name)
    paths = {"target": str(tmp_path / "target"), "draft": str(tmp_path / "draft")}
    trainer = command.distill(parallel(pipeline, tmp_path / "out", **paths))
    assert trainer.mask_token == size and trainer.vocab_size == size + tied
    saved = load_model(tmp_path / "out")
    embedding = saved.get_input_embeddings().weight[size]
    assert torch.equal(embedding, trainer.draft.get_input_embeddings().weight[size].detach())
    assert torch.equal(saved.get_output_embeddings().weight[size], embedding) == tied
    before = load_model(tmp_path / "draft").get_input_embeddings().weight[:size].mean(0)
    assert (embedding - before).abs().max() > 1e-3  # it was trained, though the row may be that of padding


@pytest.mark.parametrize(
    "options",
    [{"init": DraftInit(layers=1, share="embeddings"), "draft": None}, {"init": DraftInit(lora=LoraOptions(r=4))}],
    ids=["shared", "lora"],
)
def test_frozen_embeddings_keep_the_mean_as_mask(pipeline, tmp_path, options):
    trainer = command.distill(parallel(pipeline, tmp_path, **options))
    assert all(torch.isfinite(torch.tensor(history(trainer, "loss"))))
    rows = load_model(tmp_path).get_input_embeddings().weight
    others = torch.arange(len(rows)) != trainer.mask_token
    source = load_model(pipeline / ("target" if options.get("draft", "") is None else "draft"))
    source_rows = source.get_input_embeddings().weight
    assert torch.equal(rows[others], source_rows[others])
    assert torch.allclose(rows[trainer.mask_token], source_rows.mean(0), atol=1e-6)


def test_a_teacher_cache_of_all_tokens_is_the_target(trained, pipeline, tmp_path):
    completions = [str(pipeline / name) for name in ("short", "long", "heldout")]
    cache = CacheConfig(str(pipeline / "target"), completions, str(tmp_path / "cache"), k=300)
    make_cache(cache)
    steps = {"eval_strategy": "steps", "eval_steps": 1}
    options = {"teacher_cache": [str(tmp_path / "cache")], "draft_length": 3}
    found = command.distill(parallel(pipeline, tmp_path / "out", steps, **options))
    assert history(found, "loss") == pytest.approx(history(trained[0], "loss"), rel=2e-3)  # half-precision numbers
    for name in FIGURES:
        assert history(found, f"eval_{name}") == pytest.approx(history(trained[0], f"eval_{name}"), rel=2e-3)


def test_on_policy_text_has_masks_too_and_never_the_mask(pipeline, tmp_path, monkeypatch):
    options = {"on_policy": 1.0, "on_policy_tokens": 6}
    trainer = built(parallel(pipeline, tmp_path, **options), monkeypatch)
    trainer.draft.get_output_embeddings().weight.data[trainer.mask_token] *= 50  # would be written often
    trainer.state.max_steps = 1
    batch = a_step(trainer)
    written = batch["input_ids"][batch["labels"] != -100]
    assert len(written) and trainer.mask_token not in written.tolist()
    assert (batch["chains"].offsets_E > 0).any()


def test_the_arithmetic_of_masks_is_the_drafts_alone(pipeline, tmp_path, monkeypatch):
    trainer = built(parallel(pipeline, tmp_path), monkeypatch)
    chains = a_step(trainer)["chains"]
    target, draft = trainer.works
    masks, seen, learning = chains.work
    assert learning <= masks < seen
    expected = target.forward(100, 1000, 50) + draft.step(100 + masks, 1000 + seen, 50 + learning)
    assert trainer.work(100, 1000, 50) == pytest.approx(expected)
    assert trainer.work(100, 1000, 50) < expected  # counted once


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parallel": 1}, "parallel: expected 0, or between 2 and 256 tokens, found 1"),
        ({"parallel_retention": 0.0}, "parallel_retention: expected more than 0"),
        ({"parallel_minimum": 1.5}, "parallel_minimum: expected a share"),
    ],
)
def test_fields_out_of_range_are_refused(pipeline, tmp_path, options, message):
    with pytest.raises(InputError, match=f"^{message}"):
        parallel(pipeline, tmp_path, **options)
