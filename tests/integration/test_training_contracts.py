"""What training does whatever the kind: losses are sums over samples, and what is measured is what replay says."""

import pytest
import torch
from pipelines import furthest, history, measured_on_what_it_learns, weights
from recipes import RECIPES
from safetensors.torch import load_file
from training_steps import assert_autocast_rounds, assert_logits_in_chunks, batch_of, some_samples

from draftsmith.decode import replay_acceptance
from draftsmith.distill.config import DraftInit
from draftsmith.scripts.pair import load_pair
from draftsmith.train import launch
from draftsmith.train.data.examples import training_examples
from draftsmith.train.data.packing import pack
from draftsmith.train.kinds.drafter import DrafterSpec
from draftsmith.train.losses.positions import IGNORED

T = 0.8
ALL = {"anchors": 256}  # more than a row has tokens
CASES = {
    "draft": ("draft", {}),
    "parallel": ("draft", {"parallel": 3, "parallel_retention": 1.0, "draft_length": 3}),
    "draft, cut": ("draft", {"init": DraftInit(draft_vocabulary=60)}),
    "Medusa": ("medusa", {}),
    "Medusa, cut": ("medusa", {"draft_vocabulary": 60}),
    "Hydra": ("medusa", {"hydra": True, "prompt_loss": True}),
    "EAGLE-3": ("eagle", {"prompt_loss": True}),
    "DSpark": ("block", ALL),
    "DSpark, all of its losses": ("block", ALL | {"confidence": 1.0, "dpace": 0.5, "divergence": "cross_entropy"}),
    "DFlash 2": ("block", ALL | {"markov_rank": 0, "selector_rank": 4, "anchor_guesses": False, "block_size": 4}),
    "Domino": ("block", ALL | {"markov_rank": 0, "domino_rank": 4}),
    "MTP": ("mtp", {}),
    "MTP, a step for each layer": ("mtp", {"num_layers": 2}),
}
OF_HEADS = [name for name, (recipe, _) in CASES.items() if recipe != "draft"]


@pytest.fixture
def untrained(pipeline, tmp_path, monkeypatch):
    """Builds a trainer by the command, and trains nothing."""
    monkeypatch.setattr(launch, "run_training", lambda *_: None)

    def build(case: str):
        recipe, options = CASES[case]
        train, configure = RECIPES[recipe]
        return train(configure(pipeline, tmp_path, temperature=T, **options))

    return build


@pytest.mark.parametrize("case", CASES)
def test_the_loss_of_a_batch_is_the_sum_of_its_samples_packed_or_not(pipeline, untrained, case):
    trainer = untrained(case)
    samples = training_examples([str(pipeline / "short"), str(pipeline / "long")])
    rows = list(pack(samples, 64))
    assert 2 < len(rows) < len(samples) / 2
    learned, tokens = [p for p in trainer.model.parameters() if p.requires_grad], torch.tensor(100)
    found = []
    for batches in ([list(samples)], [[sample] for sample in samples], [rows]):
        losses = [trainer.compute_loss(trainer.model, batch_of(trainer, batch), num_items_in_batch=tokens)
                  for batch in batches]  # fmt: skip
        loss = torch.stack(losses).sum()
        found.append((loss.item(), torch.autograd.grad(loss, learned, allow_unused=True)))
    (whole, gradients), *others = found
    most = max(float(gradient.abs().max()) for gradient in gradients if gradient is not None)
    for loss, own in others:
        assert loss == pytest.approx(whole, rel=1e-5)
        for one, other in zip(gradients, own, strict=True):
            assert one is other is None or (one - other).abs().max() < 1e-5 * most


@pytest.mark.parametrize("case", [case for case in CASES if case != "parallel"])  # which counts plain rounds, too
def test_turns_apart_are_not_drafted_across(pipeline, untrained, case):
    """Labels in two stretches, as given conversations have: losses and counts are the sums of each stretch's."""
    trainer = untrained(case)
    trainer.recipe.prompt_loss = False
    (sample,) = list(training_examples([str(pipeline / "long")]))[:1]
    labels, tokens = sample["labels"], torch.tensor(100)
    start = sum(label == IGNORED for label in labels)
    stretches = [{*range(start, start + 5)}, {*range(start + 7, len(labels))}]
    found = []
    for stretch in (stretches[0] | stretches[1], *stretches):
        part = sample | {"labels": [label if at in stretch else IGNORED for at, label in enumerate(labels)]}
        loss = trainer.compute_loss(trainer.model, batch_of(trainer, [part]), num_items_in_batch=tokens).item()
        _, sums, _ = trainer.prediction_step(trainer.model, batch_of(trainer, [part]), False)
        found.append(torch.tensor([loss, *sums[0].tolist()], dtype=torch.float64))
    parts = found[1] + found[2]
    # The last round of the first stretch may bring the first token of the second.
    assert -1.0001 < found[0][2] - parts[2] < 1e-5
    found[0][2] = parts[2]
    torch.testing.assert_close(found[0], parts, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", OF_HEADS)
def test_a_text_too_short_for_any_guess_is_no_loss(pipeline, untrained, case):
    trainer = untrained(case)
    for length in (3, 2):
        ids = some_samples(pipeline)[0]["input_ids"][:length]
        short = {"input_ids": ids, "labels": [IGNORED] * (length - 1) + ids[-1:], "index": 0}
        if trainer.recipe.prompt_loss and length == 3:  # of which two are learned
            continue
        loss = trainer.compute_loss(trainer.model, batch_of(trainer, [short]))
        loss.backward()
        assert loss.item() == 0
        assert all(p.grad is None or not p.grad.any() for p in trainer.model.parameters())
        _, sums, _ = trainer.prediction_step(trainer.model, batch_of(trainer, [short]), False)
        assert sums[0, :2].tolist() == [1.0, 1.0] and not sums[0, 2:].any()  # a token, a round, nothing drafted


@pytest.mark.parametrize("case", ["Medusa", "Medusa, cut", "EAGLE-3", "DSpark", "MTP"])
def test_autocast_rounds_and_no_more_and_logits_are_held_in_chunks(pipeline, untrained, case):
    trainer = untrained(case)
    assert_autocast_rounds(trainer, some_samples(pipeline))
    assert_logits_in_chunks(trainer, some_samples(pipeline))


@pytest.mark.parametrize(
    ("case", "steps"),
    [*((case, 40) for case in ("draft", "parallel", "Medusa", "EAGLE-3", "DSpark", "MTP")),
     *((case, 3) for case in ("draft, cut", "Medusa, cut", "Hydra", "DFlash 2", "Domino"))],
)  # fmt: skip
def test_a_drafter_learns_and_what_is_measured_is_replay(sharp, pipeline, tokenizer, tmp_path, case, steps):
    """On the texts that it learns from; the target stays as it is, and all that is trained is saved."""
    recipe, options = CASES[case]
    train, configure = RECIPES[recipe]
    training = {"max_steps": steps, "eval_on_start": True, "eval_strategy": "steps", "eval_steps": steps}
    training |= {"learning_rate": 1e-2, "per_device_train_batch_size": 20, "per_device_eval_batch_size": 3}
    data = {"target": sharp[0], "completions": [sharp[1]], "heldout": [sharp[1]]}
    with measured_on_what_it_learns():
        trainer = train(configure(pipeline, tmp_path, training=training, **data, **options | {"prompt_loss": False}))
    before, after = history(trainer, "eval_mean_acceptance_length")
    assert steps < 40 or 1 <= before < after - 0.05
    assert furthest(trainer.target.state_dict(), weights(sharp[0])) == 0
    assert not any(part.requires_grad for part in trainer.target.parameters())
    assert not any(module.training for module in trainer.target.modules())
    updated = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    assert updated == {id(p) for p in trainer.model.parameters() if p.requires_grad}
    saved, own = load_file(tmp_path / "model.safetensors"), trainer.model.state_dict()
    assert all(torch.equal(part.float(), own[name].float()) for name, part in saved.items())
    assert (tmp_path / "README.md").is_file() and (tmp_path / "draftsmith.json").is_file()
    rows = list(training_examples([sharp[1]]))
    texts = [torch.tensor(row["input_ids"]) for row in rows]
    prompts = [sum(label == IGNORED for label in row["labels"]) for row in rows]
    length = trainer.recipe.draft_length if recipe == "draft" else trainer.count
    spec = DrafterSpec("parallel_draft" if case == "parallel" else recipe, str(tmp_path), draft_lengths=[length])
    pair = load_pair(sharp[0], tokenizer, [spec], "float32")
    replay = replay_acceptance(pair.target, pair.drafter.proposer, texts, prompts, [length])
    assert after == pytest.approx(replay.mean_acceptance_length[length].value, rel=1e-4)
    # Heads are not asked where a text begins.
    assert history(trainer, "eval_alpha")[-1] == pytest.approx(
        replay.alpha.value, rel=1e-4 if recipe == "draft" else 0.02
    )
