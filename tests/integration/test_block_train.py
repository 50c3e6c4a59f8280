"""Training of block drafters: the loss is its formula, anchors are drawn alike everywhere, and drafters learn."""

import pytest
import torch
from pipelines import LAST_BITS, block_configured, furthest, history
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from training_steps import assert_same, batch_of, some_samples

from draftsmith.decode.cache.features import collect_features
from draftsmith.decode.errors import InputError
from draftsmith.medusa.block import __main__ as command
from draftsmith.medusa.block.blocks import Anchors, block_states
from draftsmith.medusa.block.trainer import BlockPositions, BlockTrainer
from draftsmith.train import launch
from draftsmith.train.losses.positions import IGNORED
from draftsmith.train.teacher.cache_writer import CacheConfig, make_cache

T = 0.8
"""The temperature of the runs whose numbers are computed by hand."""
ALL = 256
"""More anchors than a row has tokens."""


@pytest.fixture
def untrained(monkeypatch):
    """Builds a trainer by the command and trains nothing."""
    monkeypatch.setattr(launch, "run_training", lambda *_: None)
    return command.train_block


def guesses_of(trainer: BlockTrainer, sample: dict) -> tuple[Tensor, list[Tensor], Tensor, tuple, list[Tensor]]:
    """The target's logits of one text, (T, V), the drafter's by guess, (T − 1 − k, D) each, its slots, and others.

    These are the same without a head, with their weight in the loss, and those of a head that chooses among
    candidates, of all tokens.
    """
    ids, drafter, target = torch.tensor([sample["input_ids"]]), trainer.heads, trainer.target
    with torch.no_grad(), collect_features(target, drafter.layer_ids) as features:
        p_logits = target(ids).logits[0].double()
    positions = torch.arange(ids.shape[1])[None]
    context = drafter.context(drafter.fuse(features[0]), positions)
    hidden = block_states(drafter, target.get_input_embeddings(), context, Anchors.at(positions, ids, positions))[0]
    head, length = drafter.head_for(target), ids.shape[1]
    count = min(trainer.count, length - 1)
    silent = drafter.config.silent
    slots = positions[0, :, None] + torch.arange(drafter.config.block_size) - silent
    before, guessing = ids[0, slots.clamp(0, length - 1)], drafter.guessing(hidden)

    def by_guess(q: Tensor) -> list[Tensor]:
        return [q[: length - 1 - k, k].double() for k in range(count)]

    plain = drafter.logits(guessing, None, head)
    sides = drafter.sides(hidden, before, trainer.embed)
    every = by_guess(head.finish(head.project(guessing) + drafter.side_head.out(sides))) if trainer.chooses else []
    return p_logits, by_guess(drafter.logits(guessing, sides, head)), hidden, by_guess(plain), every


def choice(plain: Tensor, scores: Tensor, p_logits: Tensor, count: int) -> Tensor:
    """The cross entropy of a choice with the target's most likely token, in the last one's place if it is lacking."""
    tokens, best = plain.topk(count).indices.tolist(), int(p_logits.argmax())
    tokens = tokens if best in tokens else [*tokens[:-1], best]
    return -scores[tokens].log_softmax(-1)[tokens.index(best)]


def eager(trainer: BlockTrainer, samples: list[dict]) -> Tensor:
    """Σ over anchors a and guesses k of weight · objective(p(· | x_{≤ a+k}), guess k), whole vocabulary, float64."""
    config, drafter = trainer.config, trainer.heads
    silent = drafter.config.silent
    kept = torch.arange(len(trainer.processing_class)) if drafter.token_map is None else drafter.token_map
    total = torch.zeros((), dtype=torch.float64)
    for sample in samples:
        ids = torch.tensor(sample["input_ids"])
        labels = sample["input_ids"] if config.prompt_loss else sample["labels"]
        columns = {t for t, label in enumerate(labels) if label != IGNORED and t > 0}
        p_logits, guesses, hidden, plainly, every = guesses_of(trainer, sample)
        for a in range(len(ids) - 1):
            count = next((k for k in range(len(guesses)) if not {a, a + k + 1} <= columns), len(guesses))
            alpha, reached, known = config.dpace, 1.0, []
            for k in range(count):
                q, hit = guesses[k][a][: len(kept)], kept == ids[a + k + 1]
                p = (p_logits[a + k][: len(trainer.processing_class)] / T).softmax(-1)
                log_p = (p_logits[a + k][kept] / T).log_softmax(-1)

                def valued(q: Tensor, p: Tensor = p, log_p: Tensor = log_p, hit: Tensor = hit) -> dict[str, Tensor]:
                    return {
                        "cross_entropy": -(q.log_softmax(-1) * hit).sum(),
                        "forward_kl": (log_p.exp() * (log_p - (q / T).log_softmax(-1))).sum(),
                        "tvd": 1.0 - torch.minimum(p[kept], (q / T).softmax(-1)).sum(),
                    }

                value = valued(q)
                if alpha is not None:
                    reached *= (1 - alpha) * (q.softmax(-1) * hit).sum().item() + alpha
                learned = valued(plainly[k][a][: len(kept)]) if trainer.chooses else value
                weighed = sum(weight * learned[name] for name, weight in config.terms.items())
                if trainer.chooses:
                    plain, scores = (logits[k][a][: len(kept)] for logits in (plainly, every))
                    weighed = weighed + choice(plain, scores, p_logits[a + k][kept], drafter.side_head.candidates)
                known.append((weighed, reached, value["tvd"]))
            for k, (value, _, tvd) in enumerate(known):
                dpace = float(sum(reached for _, reached, _ in known[k:]))
                total = total + (config.decay**k if alpha is None else dpace) * value
                if config.confidence:
                    logit = drafter.confidence(hidden[a], ids[max(0, a - silent) : a + k + 1], trainer.embed)[
                        k
                    ].double()
                    error = binary_cross_entropy_with_logits(logit, (1.0 - tvd).detach())
                    total = total + config.confidence * config.decay**k * error
    return total


DFLASH2 = {"selector_rank": 4, "markov_rank": 0, "anchor_guesses": False, "block_size": 4}
DOMINO = {"domino_rank": 4, "markov_rank": 0}
CASES = {
    "DSpark": {},
    "DFlash": {"anchor_guesses": False, "markov_rank": 0, "layers": 2},
    "hard": {"divergence": "cross_entropy", "decay": 0.5},
    "cut vocabulary": {"draft_vocabulary": 20},
    "prompts too": {"prompt_loss": True},
    "D-PACE": {"divergence": "cross_entropy", "dpace": 0.5, "confidence": 0.5},
    "D-PACE, cut vocabulary": {"divergence": "cross_entropy", "dpace": 0.0, "draft_vocabulary": 20},
    "DSpark's mixture": {"divergence": {"cross_entropy": 0.1, "tvd": 1.8}, "confidence": 1.0},
    "its confidence, cut vocabulary": {"divergence": {"tvd": 1.0}, "confidence": 0.5, "draft_vocabulary": 20},
    "confidence without a Markov head": {"confidence": 1.0, "markov_rank": 0},
    "DFlash 2": DFLASH2 | {"layers": 2},
    "DFlash 2, D-PACE, cut vocabulary": DFLASH2 | {"anchor_guesses": True, "draft_vocabulary": 20, "dpace": 0.5},
    "DFlash 2's choices, confidence": DFLASH2 | {"confidence": 1.0, "divergence": "tvd"},
    "DFlash 2, looks outside": DFLASH2 | {"draft_vocabulary": 20, "divergence": {"tvd": 1.0}},
    "Domino": DOMINO,
    "Domino, hard labels": DOMINO | {"divergence": "cross_entropy", "anchor_guesses": False},
    "Domino with confidence, cut vocabulary": DOMINO | {"confidence": 1.0, "draft_vocabulary": 20},
    "JetSpec": {"anchor_guesses": False, "markov_rank": 0, "layers": 2, "causal": True},
    "blocks longer than texts": {"block_size": 9},
    "layers computed twice": {"training": {"activation_checkpointing": True}},
}


@pytest.mark.parametrize("case", CASES)
def test_the_loss_is_its_formula(pipeline, tmp_path, untrained, case):
    trainer = untrained(block_configured(pipeline, tmp_path, temperature=T, anchors=ALL, **CASES[case]))
    if trainer.heads.side_head is not None:  # which begins with nothing
        torch.nn.init.normal_(trainer.heads.side_head.out.weight)
    for head in (trainer.heads.candidate_selector, trainer.heads.domino_head):
        for parameter in () if head is None else head.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    if trainer.args.activation_checkpointing:  # as `train` does
        trainer.heads.activation_checkpointing_enable()
        trainer.heads.train()
    samples = some_samples(pipeline)
    loss = trainer.compute_loss(trainer.heads, batch_of(trainer, samples), num_items_in_batch=torch.tensor(100))
    assert_same(loss, eager(trainer, samples) / 100, list(trainer.heads.parameters()))


def test_anchors_are_drawn_alike_in_any_batch_and_anew_each_step(pipeline, tmp_path, untrained):
    trainer = untrained(block_configured(pipeline, tmp_path))
    samples = some_samples(pipeline)[4:]
    together = BlockPositions(batch_of(trainer, samples), 3, 2, step=5)
    for row, sample in enumerate(samples):
        alone = BlockPositions(batch_of(trainer, [sample]), 3, 2, step=5)
        assert alone.indices[0].tolist() == together.indices[row].tolist()
        assert alone.weights_BNK[0].tolist() == together.weights_BNK[row].tolist()
    drawn = {tuple(BlockPositions(batch_of(trainer, samples), 3, 2, step).indices[0].tolist()) for step in range(20)}
    assert len(drawn) > 10


def test_a_few_anchors_stand_for_all(pipeline, tmp_path, untrained):
    """Over steps the mean of what few anchors count is what all do; 400 steps leave some 2 % of a guess's sum."""
    trainer = untrained(block_configured(pipeline, tmp_path))
    batch = batch_of(trainer, some_samples(pipeline)[4:])
    every = BlockPositions(batch, 3, ALL, step=0).weights_BNK.sum((0, 1))
    assert every[0] > every[1] > every[2] > 0
    few = torch.stack([BlockPositions(batch, 3, 3, step).weights_BNK.sum((0, 1)) for step in range(400)]).mean(0)
    torch.testing.assert_close(few, every, rtol=0.06, atol=0)


def test_evaluation_counts_what_the_guesses_are(pipeline, tmp_path, untrained):
    trainer = untrained(block_configured(pipeline, tmp_path, **CASES["DFlash 2"]))
    for parameter in trainer.heads.candidate_selector.parameters():
        torch.nn.init.normal_(parameter)
    samples = some_samples(pipeline)
    batch = batch_of(trainer, samples)
    with torch.no_grad():
        sums = trainer.replay_sums(trainer.heads, batch, batch["labels"][:, 1:] != IGNORED)
    for row, sample in enumerate(samples):
        ids, labels = sample["input_ids"], sample["labels"]
        columns = {t for t, label in enumerate(labels) if label != IGNORED and t > 0}
        p_logits, guesses, *_ = guesses_of(trainer, sample)
        assert sums[row, 0] == len(columns)
        for k, q_logits in enumerate(guesses):
            anchors = [a for a in range(len(q_logits)) if columns >= set(range(a, a + k + 2))]
            p, q = p_logits[[a + k for a in anchors]].softmax(-1), q_logits[anchors].softmax(-1)
            right = sum(int(q[i].argmax()) == ids[a + k + 1] for i, a in enumerate(anchors))
            expected = [len(anchors), float(torch.minimum(p, q).sum().detach()), right]
            assert sums[row, 3 + 3 * k : 6 + 3 * k].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_features_of_a_cache_train_what_the_target_does(pipeline, tmp_path):
    """Of two depths that it has one, from float32; the target's layers are not loaded."""
    texts = [str(pipeline / name) for name in ("short", "long", "heldout")]
    shape = {"features": True, "layer_ids": [1, 2], "feature_dtype": "float32", "dtype": "float32"}
    make_cache(CacheConfig(str(pipeline / "target"), texts, str(tmp_path / "cache"), **shape))

    def run(name: str, **more) -> BlockTrainer:
        training = {"max_steps": 3, "eval_strategy": "steps", "eval_steps": 3}
        data = {"layer_ids": [1], "heldout": texts[2:], "training": training, "init": "last_layers"}
        return command.train_block(block_configured(pipeline, tmp_path / name, **data, **more))

    live, cached = run("live"), run("cached", teacher_cache=[str(tmp_path / "cache")])
    for metric in ("loss", "eval_mean_acceptance_length", "eval_loss"):
        assert history(cached, metric) == pytest.approx(history(live, metric), rel=1e-5)
    assert furthest(live.heads.state_dict(), cached.heads.state_dict()) < LAST_BITS


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": 0}, "layers: expected at least 1"),
        ({"block_size": 1, "anchor_guesses": False}, "block_size: expected at least 2 without anchor_guesses, found 1"),
        ({"mask_token": 10_000}, "mask_token_id: expected a token below"),
        ({"layer_ids": [7]}, "target_layer_ids: expected ascending depths"),
        ({"selector_rank": 2}, "markov_rank: expected 0 with selector_rank, found 4"),
        (
            {"selector_rank": 2, "domino_rank": 3, "markov_rank": None},
            "selector_rank: expected 0 with domino_rank, found 2",
        ),
        ({"heads": "somewhere", "mask_token": 4}, "mask_token: expected none with heads, which have their own"),
    ],
)
def test_what_cannot_be_trained_is_refused(pipeline, tmp_path, untrained, options, message):
    with pytest.raises(InputError, match=message):
        untrained(block_configured(pipeline, tmp_path, **options))


def test_a_dflash_drafter_gets_dsparks_heads_without_a_loss(pipeline, tmp_path, untrained, capsys):
    dflash = {"markov_rank": 0, "anchor_guesses": False, "block_size": 4}
    first = untrained(block_configured(pipeline, tmp_path / "dflash", **dflash))
    with torch.no_grad():
        first.heads.fc.weight.normal_(std=0.1)  # unlike a new one's
    first.heads.save_pretrained(tmp_path / "dflash")
    earlier = {"heads": str(tmp_path / "dflash"), "block_size": 4}
    same, larger = (
        untrained(block_configured(pipeline, tmp_path / "on", **earlier, **options))
        for options in ({"markov_rank": None}, {"markov_rank": 4, "confidence": 1.0})
    )
    assert f" tensors of {tmp_path / 'dflash'}, and a new Markov head and confidence head" in capsys.readouterr().err
    assert same.heads.side_head is None and larger.heads.config.markov_rank == 4
    samples = some_samples(pipeline)
    larger.config.confidence = 0.0  # whose loss is another
    losses = [trainer.compute_loss(trainer.heads, batch_of(trainer, samples)) for trainer in (first, same, larger)]
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-6)
    assert losses[2].item() == pytest.approx(losses[0].item(), rel=1e-6)
    recurrent = untrained(block_configured(pipeline, tmp_path / "on", **earlier, markov_rank=None, domino_rank=4))
    loss = recurrent.compute_loss(recurrent.heads, batch_of(recurrent, samples)).item()
    assert loss == pytest.approx(losses[0].item(), rel=1e-6)
    assert " and a new recurrent head" in capsys.readouterr().err
    chosen = untrained(block_configured(pipeline, tmp_path / "on", **earlier, markov_rank=None, selector_rank=4))
    assert " and a new candidate selector" in capsys.readouterr().err
    assert (chosen.heads.config.selector_rank, chosen.heads.config.conv_kernel_size) == (4, 0)
    larger.heads.save_pretrained(tmp_path / "dspark")
    with pytest.raises(InputError, match=r"^markov_rank: expected 4, as the heads have, or none, found 3$"):
        untrained(block_configured(pipeline, tmp_path / "no", heads=str(tmp_path / "dspark"), markov_rank=3))
