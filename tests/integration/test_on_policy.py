"""The draft's own text in training: who writes it, how, and what is learned from it."""

import pytest
import torch
from conftest import tiny_llama
from pipelines import configured, history, measured_on_what_it_learns
from scipy.stats import chisquare, kstest
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig

from draftsmith.decode.errors import InputError
from draftsmith.distill import __main__ as command
from draftsmith.distill.config import DraftInit
from draftsmith.distill.trainer import DistillTrainer, continue_prompts, prompts_of
from draftsmith.train.data import decoding
from draftsmith.train.data.examples import CompletionCollator, training_examples
from draftsmith.train.data.packing import pack
from draftsmith.train.data.samples import mixed_seed
from draftsmith.train.losses.positions import IGNORED
from draftsmith.train.options import LoraOptions


def sampling(**options) -> GenerationConfig:
    options = {"max_new_tokens": 5, "do_sample": True, "top_k": 0, "pad_token_id": 1, "eos_token_id": None} | options
    return GenerationConfig(**options)


def write(draft, prompts: list[list[int]], seed: int = 0, max_length: int | None = None, **options):
    tensors = [torch.tensor(prompt) for prompt in prompts]
    samples = continue_prompts(draft, tensors, sampling(**options), max_length, seed, synced=False)

    def padded(name: str, value: int) -> torch.Tensor:
        return pad_sequence([torch.tensor(sample[name]) for sample in samples], True, value)

    return {"input_ids": padded("input_ids", 1), "labels": padded("labels", IGNORED)}


def coin(*parts: int) -> float:
    return mixed_seed(*parts) / 2**63


def test_coins_are_uniform_and_depend_on_their_seeds_alone():
    """Kolmogorov-Smirnov, false-alarm probability 1e-3 over the choice of seed."""
    thrown = [coin(0, step, 0) for step in range(2000)]
    assert kstest(thrown, "uniform").pvalue > 1e-3
    assert thrown == [coin(0, step, 0) for step in range(2000)] and coin(1, 0, 0) != coin(0, 0, 0) != coin(0, 0, 1)


def test_prompts_end_where_the_loss_begins_packed_or_not(pipeline, tokenizer):
    examples = training_examples([str(pipeline / "short"), str(pipeline / "long")])
    expected = {
        tuple(ids[: next(i for i, label in enumerate(labels) if label != IGNORED)])
        for ids, labels in ((row["input_ids"], row["labels"]) for row in examples)
    }
    collate = CompletionCollator(tokenizer)
    for rows in (examples, pack(examples, 64)):
        found = prompts_of(collate([rows[i] for i in range(len(rows))]))
        assert len(found) == len(examples)
        assert {tuple(prompt.tolist()) for prompt in found} == expected


def test_a_continuation_is_the_drafts_own_text_and_carries_its_labels():
    draft = tiny_llama(1)
    prompts = [[5, 6, 7, 8], [9], [10, 11]]
    batch = write(draft, prompts)
    assert batch["input_ids"].shape == (3, 9)
    for prompt, ids, labels in zip(prompts, batch["input_ids"], batch["labels"], strict=True):
        n = len(prompt)
        assert ids[:n].tolist() == prompt and labels[:n].tolist() == [IGNORED] * n
        assert labels[n : n + 5].tolist() == ids[n : n + 5].tolist()
        assert set(labels[n + 5 :].tolist()) <= {IGNORED}
    greedy = write(draft, prompts, temperature=1e-4)
    for prompt, ids in zip(prompts, greedy["input_ids"], strict=True):
        text = ids[: len(prompt) + 5][None]
        with torch.no_grad():
            guesses = draft(input_ids=text).logits[0, len(prompt) - 1 : -1].argmax(-1)
        assert guesses.tolist() == text[0, len(prompt) :].tolist()


def test_a_continuation_ends_with_the_first_end_of_sequence_or_at_the_length():
    draft = tiny_llama(1)
    free = write(draft, [[5, 6, 7]], max_new_tokens=12)["labels"][0, 3:].tolist()
    end = next(token for i, token in enumerate(free) if i >= 2 and token not in free[:i])
    stop = free.index(end)
    batch = write(draft, [[5, 6, 7], [5, 6, 7, 8, 9, 10]], max_new_tokens=12, eos_token_id=[end])
    kept = [label for label in batch["labels"][0].tolist() if label != IGNORED]
    assert end in kept and kept.index(end) == len(kept) - 1 and len(kept) <= 12
    assert stop >= 2
    cut = write(draft, [[5, 6, 7]], max_new_tokens=12, max_length=7)
    assert cut["input_ids"].shape == (1, 7) and (cut["labels"] != IGNORED).sum() == 4


def test_draws_depend_on_their_seeds_alone_and_the_draft_is_handed_back_as_it_was():
    draft = tiny_llama(1)
    draft.generation_config.repetition_penalty = 9.0  # of its owner's, no part of the law
    own = draft.generation_config
    draft.train()
    torch.manual_seed(1)
    first, state = write(draft, [[5, 6, 7]] * 4), torch.random.get_rng_state()
    torch.manual_seed(2)
    second, other = write(draft, [[5, 6, 7]] * 4), write(draft, [[5, 6, 7]] * 4, seed=1)
    torch.manual_seed(1)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(first["input_ids"], second["input_ids"])
    assert not torch.equal(first["input_ids"], other["input_ids"])
    assert draft.training and draft.generation_config is own


def test_first_tokens_have_the_drafts_law():
    """Chi-square over 4,000 continuations, false-alarm probability 1e-3 over the choice of seed."""
    draft = tiny_llama(1)
    batch = write(draft, [[5, 6, 7]] * 4000, max_new_tokens=1, temperature=0.8)
    counts = torch.bincount(batch["labels"][:, 3], minlength=97).double()
    with torch.no_grad():
        q = torch.softmax(draft(input_ids=torch.tensor([[5, 6, 7]])).logits[0, -1].double() / 0.8, -1)
    often = q * 4000 >= 5
    observed = torch.cat([counts[often], counts[~often].sum()[None]])
    expected = torch.cat([q[often], q[~often].sum()[None]]) * 4000
    assert chisquare(observed.numpy(), (expected * observed.sum() / expected.sum()).numpy()).pvalue > 1e-3


def test_the_loss_is_that_of_the_drafts_text_over_its_own_tokens(pipeline, tmp_path, monkeypatch):
    """With λ = 1 each micro-batch is written by the draft, and the step's loss is the mean over what it wrote."""
    seen, real = [], DistillTrainer.compute_loss

    def spy(self, model, inputs, *args, **kwargs):
        loss = real(self, model, inputs, *args, **kwargs)
        seen.append(({name: inputs[name].clone() for name in ("input_ids", "labels")}, float(loss)))
        return loss

    monkeypatch.setattr(DistillTrainer, "compute_loss", spy)
    training = {"max_steps": 1, "gradient_accumulation_steps": 2, "learning_rate": 0.0}
    trainer = command.distill(
        configured(pipeline, tmp_path / "out", on_policy=1.0, on_policy_tokens=7, training=training)
    )
    (one, a), (two, b) = seen
    tokens = [int((batch["labels"] != IGNORED).sum()) for batch in (one, two)]
    p, q = trainer.target, trainer.model
    total = 0.0
    for batch in (one, two):
        with torch.no_grad():
            logits = [m(input_ids=batch["input_ids"]).logits for m in (p, q)]
        log_p, log_q = (x[:, :-1].log_softmax(-1) for x in logits)
        kl = (log_p.exp() * (log_p - log_q)).sum(-1)
        total += float(kl[batch["labels"][:, 1:] != IGNORED].sum())
    assert a + b == pytest.approx(total / sum(tokens), rel=1e-5)
    assert history(trainer, "on_policy_tokens") == [sum(tokens)]
    assert history(trainer, "on_policy_seconds")[0] > 0


@pytest.mark.parametrize(
    "options",
    [{"training": {"bf16": True}}, {"init": DraftInit(lora=LoraOptions(2))}, {"packing": True, "max_length": 64}],
)
def test_a_draft_writes_under_autocast_and_with_adapters_too(options, pipeline, tmp_path, monkeypatch):
    """By our own decoder, which keeps its cache in what the layers give it."""
    monkeypatch.setattr(decoding, "by_library", None)
    training = {"max_steps": 2, "logging_steps": 2} | options.pop("training", {})
    config = configured(pipeline, tmp_path / "out", on_policy=1.0, on_policy_tokens=5, training=training, **options)
    trainer = command.distill(config)
    assert history(trainer, "on_policy_tokens")[0] > 5
    assert history(trainer, "loss")[0] > 0


def test_a_draft_writes_under_the_deployments_sampling_up_to_the_targets_ends(pipeline, tmp_path, monkeypatch):
    asked = []

    def spy(draft, prompts, generation, *args, **options):
        asked.append(generation)
        return continue_prompts(draft, prompts, generation, *args, **options)

    monkeypatch.setattr("draftsmith.distill.trainer.continue_prompts", spy)
    options = {"on_policy": 1.0, "on_policy_tokens": 5, "temperature": 0.5, "top_k": 4, "top_p": 0.75}
    trainer = command.distill(configured(pipeline, tmp_path / "out", training={"max_steps": 1}, **options))
    (generation,) = asked
    assert (generation.temperature, generation.top_k, generation.top_p) == (0.5, 4, 0.75)
    assert generation.eos_token_id == [trainer.tokenizer.eos_token_id]


def test_a_share_of_the_batches_is_the_drafts_own_and_it_learns(pipeline, tmp_path, monkeypatch):
    written, real = [], DistillTrainer._on_policy
    monkeypatch.setattr(DistillTrainer, "_on_policy", lambda self, *args: written.append(1) or real(self, *args))
    data = [str(pipeline / "short"), str(pipeline / "long")]
    training = {"max_steps": 20, "eval_on_start": True, "logging_steps": 20}
    config = configured(
        pipeline, tmp_path / "out", on_policy=0.5, on_policy_tokens=8, packing=True, max_length=64, heldout=data,
        training=training,
    )  # fmt: skip
    with measured_on_what_it_learns():
        alpha = history(command.distill(config), "eval_alpha")
    assert 5 <= len(written) <= 15
    assert alpha[1] > alpha[0] + 0.02


def test_nonsense_is_refused(pipeline, tmp_path):
    with pytest.raises(InputError, match=r"on_policy: expected a share between 0 and 1, found 1.5"):
        configured(pipeline, tmp_path / "out", on_policy=1.5)
    with pytest.raises(InputError, match="on_policy_tokens: expected at least 1, found 0"):
        configured(pipeline, tmp_path / "out", on_policy_tokens=0)
