"""Training of EAGLE-3 heads: the loss is its formula, what is measured is replay, runs go on, and heads learn."""

import functools
from pathlib import Path

import pytest
import torch
from conftest import tiny_llama
from pipelines import eagle_configured, furthest, history, measured_on_what_it_learns, weights
from safetensors.torch import load_file
from torch import Tensor
from training_steps import assert_autocast_rounds, assert_logits_in_chunks, assert_same, batch_of, some_samples

from draftsmith.decode.cache.features import collect_features
from draftsmith.decode.errors import InputError
from draftsmith.medusa.eagle import __main__ as command
from draftsmith.medusa.eagle.config import EagleTrainingConfig
from draftsmith.medusa.eagle.heads import EagleHeads
from draftsmith.medusa.eagle.trainer import EagleTrainer
from draftsmith.medusa.eagle.unrolled import unroll
from draftsmith.train import launch
from draftsmith.train.data.examples import training_examples
from draftsmith.train.data.packing import pack
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
    steps = unroll(heads, embeddings, features[0][:, :-1], positions, min(trainer.count, count))
    return p_logits, [heads.head(step.hidden[0]).double() for step in steps]


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


def test_packed_rows_are_the_same_samples(pipeline, tmp_path, untrained):
    trainer = untrained(eagle_configured(pipeline, tmp_path, temperature=T, prompt_loss=True))
    dataset = training_examples([str(pipeline / "short"), str(pipeline / "long")])
    rows = list(pack(dataset, 64))
    assert 2 < len(rows) < len(dataset) / 2
    packed = trainer.compute_loss(trainer.heads, batch_of(trainer, rows), num_items_in_batch=torch.tensor(100))
    assert_same(packed, eager(trainer, list(dataset)) / 100, learned(trainer))


@pytest.mark.parametrize("divergence", ["forward_kl", "cross_entropy"])
def test_a_text_too_short_for_any_step_is_no_loss(pipeline, tmp_path, untrained, divergence):
    trainer = untrained(eagle_configured(pipeline, tmp_path, divergence=divergence))
    sample = some_samples(pipeline)[0]
    start = sum(label == IGNORED for label in sample["labels"])
    for length in (start + 1, 3, 2):  # a completion of one token; rows without a round as long
        ids = sample["input_ids"][:length]
        short = {"input_ids": ids, "labels": [IGNORED] * (length - 1) + ids[-1:], "index": 0}
        loss = trainer.compute_loss(trainer.heads, batch_of(trainer, [short]))
        loss.backward()
        assert loss.item() == 0
        assert all(p.grad is None or not p.grad.any() for p in trainer.heads.parameters())
        _, sums, _ = trainer.prediction_step(trainer.heads, batch_of(trainer, [short]), False)
        assert sums.tolist() == [[1.0, 1.0, *[0.0] * 10]]  # a token, a round, nothing drafted


def test_autocast_rounds_and_no_more(pipeline, tmp_path, untrained):
    trainer = untrained(eagle_configured(pipeline, tmp_path, temperature=T))
    assert_autocast_rounds(trainer, some_samples(pipeline))


def test_steps_times_tokens_times_vocabulary_is_never_held(pipeline, tmp_path, untrained):
    trainer = untrained(eagle_configured(pipeline, tmp_path))
    assert_logits_in_chunks(trainer, some_samples(pipeline))


def test_the_split_of_a_batch_changes_nothing(pipeline, tmp_path):
    """4, and 4 × 1: the mean is over the tokens of the whole batch."""
    runs = []
    for size in (4, 1):
        training = {"max_steps": 3, "per_device_train_batch_size": size, "gradient_accumulation_steps": 4 // size}
        runs.append(command.train_heads(eagle_configured(pipeline, tmp_path / str(size), training=training)))
    one, parts = runs
    assert history(parts, "loss") == pytest.approx(history(one, "loss"), rel=1e-5)
    assert history(parts, "grad_norm") == pytest.approx(history(one, "grad_norm"), rel=1e-4)


def test_the_target_is_untouched_and_the_heads_are_not(pipeline, tmp_path):
    config = eagle_configured(pipeline, tmp_path, training={"max_steps": 3}, draft_vocabulary=40)
    trainer = command.train_heads(config)
    assert furthest(trainer.target.state_dict(), weights(pipeline / "target")) == 0
    assert not trainer.target.get_input_embeddings()._forward_hooks
    updated = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    assert updated == {id(p) for p in learned(trainer)}
    named = trainer.target.get_output_embeddings().weight[trainer.heads.token_map]
    assert torch.equal(trainer.heads.lm_head.weight, named.float())
    found = EagleHeads.from_pretrained(tmp_path)
    torch.testing.assert_close(found.state_dict(), trainer.heads.state_dict(), rtol=0, atol=0)
    assert len(found.token_map) == 40
    assert "EAGLE-3 heads" in (tmp_path / "README.md").read_text()
    again = command.train_heads(
        eagle_configured(pipeline, tmp_path / "on", heads=str(tmp_path), training={"max_steps": 1})
    )
    assert torch.equal(again.heads.token_map, found.token_map)


def test_a_run_goes_on_to_the_bit(pipeline, tmp_path):
    def run(name: str, steps: int, **more) -> EagleTrainer:
        training = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "linear"} | more
        return command.train_heads(eagle_configured(pipeline, tmp_path / name, optimizer="muon", training=training))

    whole = run("whole", 4)
    for name in ("model.safetensors", "checkpoint-4", "draftsmith.json"):  # as if it had ended behind step 2
        path = tmp_path / "whole" / name
        path.rename(tmp_path / name)
    rest = run("whole", 4)
    assert furthest(load_file(tmp_path / "model.safetensors"), rest.heads.state_dict()) == 0
    assert history(rest, "loss") == history(whole, "loss")


def taught(pipeline: Path, sharp: tuple[str, str], output: Path, steps: int, **options) -> EagleTrainer:
    training = {"max_steps": steps, "eval_on_start": True, "logging_steps": steps, "learning_rate": 1e-2}
    training |= {"per_device_train_batch_size": 20, "per_device_eval_batch_size": 3}
    data = {"target": sharp[0], "completions": [sharp[1]], "heldout": [sharp[1]], "temperature": T}
    with measured_on_what_it_learns():
        return command.train_heads(eagle_configured(pipeline, output, training=training, **data, **options))


@pytest.mark.parametrize("options", [{}, {"init": "random", "optimizer": "muon"}], ids=["last layer", "random, muon"])
def test_sixty_steps_teach_the_heads(pipeline, sharp, tmp_path, options):
    """Measured on what is trained on."""
    trainer = taught(pipeline, sharp, tmp_path, 60, **options)
    accuracies, lengths = history(trainer, "eval_accuracy_1"), history(trainer, "eval_mean_acceptance_length")
    assert accuracies[-1] > accuracies[0] + 0.2 and lengths[-1] > lengths[0] + 0.3
    assert history(trainer, "eval_loss")[-1] < 0.7 * history(trainer, "eval_loss")[0]


def test_evaluation_is_replay_round_by_round(pipeline, sharp, tmp_path):
    """Tokens and rounds by recursion over where each round begins."""
    trainer = taught(pipeline, sharp, tmp_path, 15)
    samples, count = list(training_examples([sharp[1]])), trainer.count
    right, overlap, learned = ([0.0] * count for _ in range(3))
    rounds, tokens = 0.0, 0
    trainer.heads.eval()
    for sample in samples:
        ids, columns = sample["input_ids"], [t for t, label in enumerate(sample["labels"]) if label != IGNORED]
        with torch.no_grad():
            p_logits, steps = rounds_of(trainer, sample)
        p, q = (p_logits / T).softmax(-1), [(step / T).softmax(-1) for step in steps]
        accepted = {}
        for n, column in enumerate(columns[1:], 1):
            for k in range(min(count, len(columns) - n)):
                p_x, q_x = p[column + k - 1], q[k][column - 2]
                x = ids[column + k]
                accepted[column, k] = min(1.0, float(q_x[x] / p_x[x]))
                learned[k] += 1
                overlap[k] += float(torch.minimum(p_x, q_x).sum())
                right[k] += int(q_x.argmax() == x)

        @functools.cache
        def rounds_from(n: int, columns=columns, accepted=accepted) -> float:
            reach, total = 1.0, float(n < len(columns))
            for k in range(count + 1):
                if n + k < len(columns):
                    a = accepted.get((columns[n], k), 0.0)
                    total += reach * (1 - a) * rounds_from(n + k + 1)
                    reach *= a
            return total

        rounds, tokens = rounds + rounds_from(0), tokens + len(columns)
    assert history(trainer, "eval_mean_acceptance_length")[-1] == pytest.approx(tokens / rounds, rel=1e-5)
    for k in range(count):
        assert history(trainer, f"eval_accuracy_{k + 1}")[-1] == pytest.approx(right[k] / learned[k], rel=1e-6)
        assert history(trainer, f"eval_alpha_{k + 1}")[-1] == pytest.approx(overlap[k] / learned[k], rel=1e-5)


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
