"""Drafts with another tokenizer: at T=0 the text is plain decoding's, and where tokens match so is the law."""

from pathlib import Path

import pytest
import torch
from conftest import TEXTS, perturbed, tiny_llama
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel
from unit.decode.proposers.test_retokenized import CJK, permuted, sentencepiece, unigram, with_merges, wordpiece

from draftsmith.decode import (
    Counts,
    DraftModelProposer,
    DynamicTree,
    InputError,
    Tree,
    autoregressive_generate,
    speculative_generate,
)
from draftsmith.decode.proposers.retokenized import RetokenizedProposer
from draftsmith.train.data.corpus import stdlib_prompts, train_bpe
from draftsmith.train.models import load_model, load_tokenizer

ASSETS = Path(__file__).parents[2] / "assets"
PROMPTS = ["def add(a, b):\n", "class", "x = '😀' # 你"]


def with_ids(model: PreTrainedModel, new: list[int]) -> PreTrainedModel:
    """Return a copy of a model whose token i has become new[i]."""
    copy = type(model)(model.config).eval().requires_grad_(False)
    order = torch.tensor(new).argsort()
    for weight in ("model.embed_tokens.weight", "lm_head.weight"):
        assert model.state_dict()[weight].shape[0] == len(new)
    rows = {k: w[order] if w.shape[0] == len(new) else w for k, w in model.state_dict().items()}
    copy.load_state_dict(rows)
    return copy


def batch(tokenizer, prompts: list[str]) -> dict[str, torch.Tensor]:
    encoded = tokenizer(prompts, return_tensors="pt", padding=True)
    return {"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"]}


@pytest.fixture(scope="module")
def target(tokenizer):
    return tiny_llama(0, len(tokenizer))


@pytest.fixture(scope="module")
def writer(tokenizer):
    """A target that writes what is text in any tokenizer, for an untrained one writes bytes that are none."""
    model = tiny_llama(0, len(tokenizer))
    letters = {i for i in range(len(tokenizer)) if tokenizer.decode([i]).isascii()} - set(tokenizer.all_special_ids)
    model.lm_head.weight[[i for i in range(len(tokenizer)) if i not in letters]] = 0
    return model


DRAFTS = {
    "fewer-merges": lambda: train_bpe(TEXTS, 270),
    "cjk": lambda: train_bpe(CJK, 400),
    "unigram": lambda: unigram(TEXTS + CJK),
    "sentencepiece": sentencepiece,
    "wordpiece": lambda: wordpiece(TEXTS),
}


@pytest.mark.parametrize("name", DRAFTS)
def test_greedy_text_is_plain_decodings_alone_and_in_a_ragged_batch(tokenizer, target, writer, name):
    other = DRAFTS[name]()
    proposer = RetokenizedProposer(tiny_llama(3, len(other), layers=1), other, tokenizer)
    assert not proposer.renumbers
    drafted = 0
    for model, draft_length in ((target, 1), (writer, 4)):
        # Rows end at different lengths, too: the end token is one that a row writes early.
        first = batch(tokenizer, PROMPTS[:1])
        eos = int(autoregressive_generate(model, **first, max_new_tokens=9, do_sample=False).sequences[0, -1])
        options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": eos}
        together = batch(tokenizer, PROMPTS)
        out = speculative_generate(model, proposer, **together, draft_length=draft_length, **options)
        for row, prompt in enumerate(PROMPTS):
            ids = batch(tokenizer, [prompt])
            plain = autoregressive_generate(model, **ids, **options).sequences[0]
            alone = speculative_generate(model, proposer, **ids, draft_length=draft_length, **options)
            assert torch.equal(alone.sequences[0], plain)
            begin = together["input_ids"].shape[1] - ids["input_ids"].shape[1]
            assert torch.equal(out.sequences[row, begin : begin + len(plain)], plain)
            assert out.row_counts[row] == alone.counts
        drafted += out.counts.num_draft_tokens
    assert drafted > 0


def test_any_options_of_decoding_go_with_it(tokenizer, writer):
    other = train_bpe(TEXTS, 270)
    proposer = RetokenizedProposer(tiny_llama(3, len(other), layers=1), other, tokenizer)
    ids = batch(tokenizer, PROMPTS[:1])
    for options in ({"repetition_penalty": 1.4}, {"no_repeat_ngram_size": 2}, {}):
        plain = autoregressive_generate(writer, **ids, max_new_tokens=20, do_sample=False, **options)
        for length in (3, None):
            out = speculative_generate(
                writer, proposer, **ids, draft_length=length, max_new_tokens=20, do_sample=False, **options
            )
            assert torch.equal(out.sequences, plain.sequences)
    for new in (1, 2, 3):
        out = speculative_generate(writer, proposer, **ids, draft_length=6, max_new_tokens=new, do_sample=False)
        assert torch.equal(out.sequences, plain.sequences[:, : ids["input_ids"].shape[1] + new])
        assert len(out.counts.num_draft_tokens_per_pos) <= new - 1


def test_a_draft_whose_positions_end_before_the_text_does(tokenizer, writer):
    """Learned positions: one past the last is no embedding."""
    other = train_bpe(TEXTS, 258)
    config = GPT2Config(
        vocab_size=len(other), n_embd=16, n_layer=1, n_head=2, n_positions=32, bos_token_id=None, eos_token_id=None
    )
    proposer = RetokenizedProposer(GPT2LMHeadModel(config).eval(), other, tokenizer)
    together = batch(tokenizer, PROMPTS)
    plain = autoregressive_generate(writer, **together, max_new_tokens=40, do_sample=False)
    out = speculative_generate(writer, proposer, **together, max_new_tokens=40, do_sample=False)
    assert torch.equal(out.sequences, plain.sequences)
    assert 0 < out.counts.num_draft_tokens_per_pos[0] < out.counts.num_drafts / 2


def test_the_targets_permuted_copy_is_always_accepted(tokenizer, target):
    other, new = permuted(tokenizer)
    proposer = RetokenizedProposer(with_ids(target, new), other, tokenizer)
    assert proposer.renumbers
    for do_sample in (False, True):
        out = speculative_generate(
            target, proposer, **batch(tokenizer, PROMPTS[:1]), draft_length=4, max_new_tokens=40, do_sample=do_sample
        )
        assert out.counts == Counts(8, 32, 32, (8,) * 4, (8,) * 4, (8,) * 4, 40)


@pytest.mark.parametrize("tree", [None, Tree.from_choices([(0,), (1,), (0, 0), (0, 1)]), DynamicTree(2, 6)])
def test_a_permuted_draft_does_what_the_draft_does(tokenizer, target, tree):
    """Token for token and count for count, at T=0 and under sampling, alone and in a batch."""
    draft = perturbed(target, 0.05)
    other, new = permuted(tokenizer)
    both = (DraftModelProposer(draft, tree), RetokenizedProposer(with_ids(draft, new), other, tokenizer, tree))
    warping = {"do_sample": True, "temperature": 0.9, "top_k": 40, "no_repeat_ngram_size": 3}
    for options in ({"do_sample": False}, {"do_sample": True}, warping):
        plain, mapped = (
            speculative_generate(target, proposer, **batch(tokenizer, PROMPTS), max_new_tokens=16, seed=3, **options)
            for proposer in both
        )
        assert torch.equal(plain.sequences, mapped.sequences)
        assert plain.row_counts == mapped.row_counts
        assert 0 < plain.counts.num_accepted_tokens < plain.counts.num_draft_tokens


def test_sampling_is_refused_where_text_is_encoded_again(tokenizer, target):
    other = train_bpe(CJK, 400)
    proposer = RetokenizedProposer(tiny_llama(3, len(other), layers=1), other, tokenizer)
    with pytest.raises(InputError, match="draft tokenizer: expected the target's tokens and merges under sampling"):
        speculative_generate(target, proposer, **batch(tokenizer, PROMPTS[:1]), max_new_tokens=4, do_sample=True)


# The embedded pair


def test_a_trained_pair_keeps_its_acceptance_across_tokenizers():
    tokenizer = load_tokenizer(ASSETS / "tiny-target")
    target, draft = load_model(ASSETS / "tiny-target"), load_model(ASSETS / "tiny-draft")
    other, new = permuted(tokenizer)
    # The first merges' tokens are all known to the models, and so is text that is split more finely.
    finer = with_merges(tokenizer, 3000)
    proposers = {
        "draft": DraftModelProposer(draft),
        "renumbered": RetokenizedProposer(with_ids(draft, new), other, tokenizer),
        "re-encoded": RetokenizedProposer(draft, finer, tokenizer),
        "target": RetokenizedProposer(target, finer, tokenizer),
    }
    assert [p.renumbers for p in proposers.values() if isinstance(p, RetokenizedProposer)] == [True, False, False]
    counts = dict.fromkeys(proposers, Counts())
    for prompt in stdlib_prompts(2, heldout=True):
        ids = tokenizer(prompt["prompt"], return_tensors="pt")["input_ids"][:, -40:]
        plain = autoregressive_generate(target, ids, max_new_tokens=16, do_sample=False)
        for name, proposer in proposers.items():
            out = speculative_generate(target, proposer, ids, draft_length=4, max_new_tokens=16, do_sample=False)
            assert torch.equal(out.sequences, plain.sequences), (name, prompt["id"])
            counts[name] += out.counts
    tau = {name: own.mean_acceptance_length() for name, own in counts.items()}
    assert counts["renumbered"] == counts["draft"]
    assert tau["re-encoded"] > tau["draft"] - 0.3 > 1, tau
    assert tau["target"] > 3, tau
