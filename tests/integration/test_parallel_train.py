"""Parallel drafts: what the loss and the figures of training are, and what a run leaves."""

import json
from pathlib import Path

import pytest
import torch
from pipelines import configured, history
from torch import Tensor
from transformers import AutoModelForCausalLM

from draftsmith.distill import __main__ as command
from draftsmith.distill.parallel_trainer import ParallelTrainer
from draftsmith.train.losses.objective import Objective

K = 4


def parallel(pipeline: Path, output: Path, training: dict | None = None, **options):
    training = {"max_steps": 2, "per_device_eval_batch_size": 2} | (training or {})
    options = {"parallel": K, "parallel_retention": 0.8, "heldout": [str(pipeline / "heldout")]} | options
    return configured(pipeline, output, training=training, **options)


def built(config, monkeypatch) -> ParallelTrainer:
    """The trainer of a config, before its first step."""
    monkeypatch.setattr(command, "run_training", lambda trainer, finish: None)
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


def eager(trainer: ParallelTrainer, batch: dict, weights: list[float]) -> Tensor:
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
            starts = torch.arange(masks + 1) == 0
            total = total + objective.shortfall(features, ~starts, torch.tensor(weights[: masks + 1]), starts)
    assert anchor == len(lengths)
    return total


def _lengths(batch: dict) -> list[int]:
    offsets = batch["chains"].offsets_E
    return torch.bincount((offsets == 0).cumsum(0) - 1).sub(1).tolist()


CASES = {
    "plain": {},
    "packed": {"packing": True, "max_length": 64},
    "weights": {"parallel_decay": 0.7, "parallel_importance": True},
    "blocks": {"divergence": {"jsd": 1.0, "expected_length": 0.5}, "draft_length": 3},
    "prompts": {"prompt_loss": True, "divergence": "tvd"},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_the_loss_and_its_gradients_are_those_of_a_forward_for_each_anchor(pipeline, tmp_path, monkeypatch, options):
    trainer = built(parallel(pipeline, tmp_path, **options), monkeypatch)
    batch, draft = a_step(trainer), trainer.draft
    assert isinstance(trainer.objective, Objective) and max(_lengths(batch)) == K - 1
    shares = [1.0, 0.8, 0.64, 0.512]
    weights = [0.7**j / shares[j] for j in range(K)] if "parallel_decay" in options else [1.0] * K
    expected = eager(trainer, batch, weights)
    expected.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in draft.named_parameters()}
    draft.zero_grad()
    found = trainer.compute_loss(draft, trainer._prepare_inputs(batch), num_items_in_batch=1)
    found.backward()
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    for name, parameter in draft.named_parameters():
        scale = gradients[name].abs().max()
        assert (parameter.grad - gradients[name]).abs().max() <= 2e-5 * scale, name


def test_a_run_leaves_a_parallel_draft_with_its_figures(pipeline, tmp_path):
    trainer = command.distill(parallel(pipeline, tmp_path, {"eval_strategy": "steps", "eval_steps": 1}))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["parallel_length"] == K and config["pard_token"] == trainer.mask_token
    for name in ("mean_acceptance_length", "plain_mean_acceptance_length", "alpha", "alpha_1", "alpha_3", "loss"):
        assert len(history(trainer, f"eval_{name}")) == 3
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config.pard_token == trainer.mask_token
