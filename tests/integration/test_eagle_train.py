"""Training of EAGLE-3 heads: the loss is its formula, what is measured is replay, runs go on, and heads learn."""

import pytest
import torch
from conftest import tiny_llama
from pipelines import eagle_configured
from torch import Tensor
from training_steps import assert_same, batch_of, some_samples

from draftsmith.decode.cache.features import collect_features
from draftsmith.decode.errors import InputError
from draftsmith.medusa.eagle import __main__ as command
from draftsmith.medusa.eagle.__main__ import EagleTrainer
from draftsmith.medusa.eagle.config import EagleTrainingConfig
from draftsmith.medusa.eagle.heads import EagleHeads
from draftsmith.train import launch
from draftsmith.train.losses.positions import IGNORED

T = 0.8
"""The temperature of the runs whose numbers are computed by hand."""


@pytest.fixture
def untrained(monkeypatch):
    """Builds a trainer by the command and trains nothing."""
    monkeypatch.setattr(launch, "run_training", lambda *_: None)
    return command.train_heads


def rounds_of(trainer: EagleTrainer, sample: dict) -> tuple[Tensor, list[Tensor]]:
    """The target's logits of one text, (T, V), and the heads' by steps, (T − 1 − k, D) each: alone, all at once."""
    ids, heads, target = torch.tensor([sample["input_ids"]]), trainer.heads, trainer.target
    with torch.no_grad(), collect_features(target, heads.layer_ids) as features:
        p_logits = target(ids).logits[0].double()
        embeddings = target.get_input_embeddings()(ids[:, 1:])
    count = ids.shape[1] - 1
    positions = torch.arange(count)[None]
    steps = heads.unroll(embeddings, features[0][:, :-1], positions, min(trainer.count, count))
    return p_logits, [heads.head(step[0]).double() for step in steps]


def learned_columns(trainer: EagleTrainer, sample: dict) -> list[int]:
    labels = sample["input_ids"] if trainer.config.prompt_loss else sample["labels"]
    return [t for t, label in enumerate(labels) if label != IGNORED and t > 0]


def eager(trainer: EagleTrainer, samples: list[dict]) -> Tensor:
    """Σ_k decay^k Σ_s objective(p(· | x_{≤ s+k+1}), step k of the round from s), whole vocabulary, float64."""
    config, heads = trainer.config, trainer.heads
    kept = torch.arange(len(trainer.processing_class)) if heads.token_map is None else heads.token_map
    total = torch.zeros((), dtype=torch.float64)
    for sample in samples:
        ids = torch.tensor(sample["input_ids"])
        columns = set(learned_columns(trainer, sample))
        p_logits, steps = rounds_of(trainer, sample)
        for k, q_logits in enumerate(steps):
            starts = [s for s in range(len(q_logits)) if columns >= set(range(s + 1, s + k + 3))]
            q = q_logits[starts][:, : len(kept)]
            log_p = (p_logits[[s + k + 1 for s in starts]][:, kept] / T).log_softmax(-1)
            if config.divergence == "cross_entropy":
                hit = kept == ids[[s + k + 2 for s in starts]][:, None]
                value = -(q.log_softmax(-1) * hit).sum(-1)
            elif config.divergence == "lk_hybrid":
                log_q = (q / T).log_softmax(-1)
                alpha = torch.minimum(log_p, log_q).exp().sum(-1)
                lam = (-config.eta * alpha.detach()).exp()
                value = lam * (log_p.exp() * (log_p - log_q)).sum(-1) + (1 - lam) * (1 - alpha)
            else:
                value = (log_p.exp() * (log_p - (q / T).log_softmax(-1))).sum(-1)
            total = total + config.decay**k * value.sum()
    return total


CASES = {
    "soft": {},
    "hard": {"divergence": "cross_entropy", "init": "random"},
    "following acceptance": {"divergence": "lk_hybrid", "eta": 2.0, "norm_output": True},
    "cut vocabulary": {"draft_vocabulary": 20, "decay": 0.5},
    "prompts too": {"prompt_loss": True, "fc_norm": True},
    "too long for short texts": {"num_steps": 9},
    "steps computed twice": {"training": {"activation_checkpointing": True}},
}


def learned(trainer):
    """Return what is learned: all but the language-model head."""
    return [p for name, p in trainer.heads.named_parameters() if not name.startswith("lm_head.")]


@pytest.mark.parametrize("case", CASES)
def test_the_loss_is_its_formula(pipeline, tmp_path, untrained, case):
    trainer = untrained(eagle_configured(pipeline, tmp_path, temperature=T, **CASES[case]))
    samples = some_samples(pipeline)
    if trainer.args.activation_checkpointing:  # as `train` does
        trainer.heads.activation_checkpointing_enable()
        trainer.heads.train()
    loss = trainer.compute_loss(trainer.heads, batch_of(trainer, samples), num_items_in_batch=torch.tensor(100))
    assert_same(loss, eager(trainer, samples) / 100, learned(trainer))


def test_a_cut_head_is_not_trained_and_goes_on_with_its_tokens(pipeline, tmp_path):
    config = eagle_configured(pipeline, tmp_path, training={"max_steps": 2}, draft_vocabulary=40)
    trainer = command.train_heads(config)
    assert not trainer.target.get_input_embeddings()._forward_hooks
    updated = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    assert updated == {id(p) for p in learned(trainer)}
    named = trainer.target.get_output_embeddings().weight[trainer.heads.token_map]
    assert torch.equal(trainer.heads.lm_head.weight, named.float())
    again = command.train_heads(
        eagle_configured(pipeline, tmp_path / "on", heads=str(tmp_path), training={"max_steps": 1})
    )
    assert torch.equal(again.heads.token_map, trainer.heads.token_map) and len(again.heads.token_map) == 40


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_steps": 0}, "num_steps: expected at least 1, found 0"),
        ({"init": "zeros"}, "init: expected one of auto, last_layer, random, found 'zeros'"),
        ({"heads": "DIR", "layer_ids": [1]}, "layer_ids: expected none with heads"),
        ({"heads": "DIR", "norm_output": True}, "norm_output: expected none with heads"),
        ({"layer_ids": [0]}, "layer_ids: expected at least 1, found 0"),
        ({"decay": 0.0}, "decay: expected more than 0"),
    ],
)
def test_options_that_cannot_be_are_refused(tmp_path, options, said):
    with pytest.raises(InputError) as error:
        EagleTrainingConfig("target", ["texts"], **options)
    assert str(error.value).startswith(said) and "\n" not in str(error.value)


def test_what_does_not_fit_is_refused(pipeline, tmp_path, tokenizer):
    EagleHeads.of_target(tiny_llama(0, len(tokenizer), hidden=16)).save_pretrained(tmp_path / "narrow")
    for options, said in (
        ({"heads": str(tmp_path / "narrow")}, "eagle: expected heads with the target's hidden_size 32, found 16"),
        ({"layer_ids": [1, 7]}, "layer_ids: expected ascending depths between 1 and the target's 2 layers"),
        ({"draft_vocabulary": 10**6}, "draft_vocabulary: expected at most"),
        ({"completions": []}, "completions: expected"),
    ):
        with pytest.raises(InputError) as error:
            command.train_heads(eagle_configured(pipeline, tmp_path / "out", **options))
        assert str(error.value).startswith(said) and "\n" not in str(error.value)
