"""Draft models whose vocabulary is not the target's: padded, permuted and cut."""

import json
import math

import pytest
import torch
from conftest import tiny_llama
from families import VOCAB, tiny_model
from gemma import IMAGE, TURN_ENDS, gemma_tokenizer, save_gemma, tiny_gemma

from draftsmith.decode import DraftModelProposer, cut_head
from draftsmith.decode.draft_models.cut_vocabulary import KEPT_TOKENS, CutHead, kept_tokens
from draftsmith.decode.draft_models.vocabulary import token_count
from draftsmith.decode.errors import InputError
from draftsmith.decode.sampling import Sampler
from draftsmith.distill.parallel.layout import unused_token
from draftsmith.distill.vocabulary import keep_tokens
from draftsmith.train.data.prompt_files import read_prompts
from draftsmith.train.data.prompts import Prompt, encode_prompt
from draftsmith.train.job.flops import Work
from draftsmith.train.losses.chunked import ChunkSizes
from draftsmith.train.losses.cut_vocabulary import CutVocabulary, LossVocabulary
from draftsmith.train.losses.distributions import CachedDistributions, LiveDistributions, WholeLogits
from draftsmith.train.losses.divergences import lk_blend
from draftsmith.train.losses.objective import Objective
from draftsmith.train.losses.output_head import OutputHead, require_split
from draftsmith.train.models import check_head, check_same_tokenizer, load_tokenizer
from draftsmith.train.replay_metrics import replay_features


def test_tokens_behind_all_logits_and_logits_behind_all_tokens_do_not_count() -> None:
    tokenizer, model = gemma_tokenizer(), tiny_gemma()
    rows = model.config.vocab_size
    assert tokenizer.convert_tokens_to_ids(IMAGE) == rows
    assert token_count(tokenizer, model.config) == rows
    assert token_count(tokenizer, tiny_llama(0, rows + 20).config) == rows + 1


def test_only_pieces_of_text_and_what_the_target_writes_need_logits() -> None:
    tokenizer, model = gemma_tokenizer(), tiny_gemma().config
    rows = model.vocab_size
    wide = tiny_llama(0, rows + 1).config
    check_head(model, tokenizer, "target")
    check_head(model, tokenizer, "draft", model)
    check_head(wide, tokenizer, "draft", model)
    with pytest.raises(InputError, match=f"draft: expected a vocabulary of at least {rows + 1} for .* {rows}$"):
        check_head(model, tokenizer, "draft", wide)  # which can write the token that the draft cannot read
    with pytest.raises(InputError, match=r"target: expected a vocabulary of at least \d+ for its tokenizer, found 200"):
        check_head(tiny_llama(0, 200).config, tokenizer, "target")


def test_tokenizers_are_compared_where_texts_have_tokens() -> None:
    with_image, without = gemma_tokenizer(), gemma_tokenizer(image=False)
    rows = len(without)
    for one, other in ((with_image, without), (without, with_image)):
        check_same_tokenizer(one, other, "t", "d", vocab_size=rows)
        with pytest.raises(InputError, match=f"found 1 tokens that differ, the first {rows}"):
            check_same_tokenizer(one, other, "t", "d", vocab_size=rows + 1)


@pytest.mark.parametrize("chat", [False, True])
def test_a_prompt_with_a_token_that_has_no_logit_is_refused(chat, tmp_path) -> None:
    tokenizer, rows, file = gemma_tokenizer(chat=chat), tiny_gemma().config.vocab_size, tmp_path / "prompts.jsonl"
    wrong = (
        f"expected tokens below the model's vocabulary of {rows}, found '{IMAGE}', which its tokenizer numbers {rows}"
    )
    messages = [[{"role": "user", "content": content}] for content in ("print(x)", f"print({IMAGE})")]
    file.write_text("".join(json.dumps({"messages": each}) + "\n" for each in messages))
    harmless, prompt = read_prompts(str(file))
    assert max(encode_prompt(harmless, tokenizer, vocab_size=rows)) < rows
    with pytest.raises(InputError, match=rf"^{file}:2: prompt '1': {wrong}$"):
        encode_prompt(prompt, tokenizer, vocab_size=rows)
    assert rows in encode_prompt(prompt, tokenizer)
    with pytest.raises(InputError, match=rf"^prompt 'x': {wrong}$"):
        encode_prompt(Prompt("x", None, messages[1], None), tokenizer, vocab_size=rows)


def test_padding_has_an_embedding(tmp_path) -> None:
    """A pad token that was added without resizing the model is not one to feed."""
    tokenizer = gemma_tokenizer()
    tokenizer.pad_token = IMAGE
    loaded = load_tokenizer(save_gemma(tmp_path, tokenizer))
    assert loaded.pad_token == loaded.eos_token == "<eos>"
    tokenizer.pad_token = TURN_ENDS
    assert load_tokenizer(save_gemma(tmp_path, tokenizer)).pad_token == TURN_ENDS


def test_a_mask_token_has_an_embedding() -> None:
    tokenizer, rows = gemma_tokenizer(), tiny_gemma().config.vocab_size
    assert unused_token(tokenizer, rows) == rows - 1
    assert unused_token(tokenizer, rows + 9) == rows + 1


KEPT = [0, 3, 4, 9, 17, 40]


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "gpt-neox", "phi"])
@torch.no_grad()
def test_a_cut_head_gives_its_tokens_the_same_logits_and_the_others_none(name):
    """Gemma 2's are bounded, GPT-2's tied, Phi's biased."""
    whole, cut = tiny_model(name), tiny_model(name)
    keep_tokens(cut, KEPT)
    ids = torch.arange(12).view(2, 6)
    expected, found = whole(ids).logits, cut_head(cut)(ids).logits
    assert found.shape == expected.shape
    torch.testing.assert_close(found[..., KEPT], expected[..., KEPT])
    others = [token for token in range(VOCAB) if token not in KEPT]
    assert (found[..., others] == -torch.inf).all()
    assert (found.softmax(-1)[..., others] == 0).all()
    head = cut.get_output_embeddings()
    assert isinstance(head, CutHead) and cut_head(cut).get_output_embeddings() is head
    assert len(head.weight) == len(KEPT)
    embeddings = cut.get_input_embeddings().weight
    assert len(embeddings) == VOCAB and torch.equal(embeddings, whole.get_input_embeddings().weight)


@pytest.mark.parametrize("ids", [[], [3], [4, 3], [3, 3], [-1, 3], [3, VOCAB], [0.0, 1.0], "all"])
def test_a_list_that_is_no_vocabulary_is_refused(ids):
    model = tiny_model("llama")
    setattr(model.config, KEPT_TOKENS, ids)
    with pytest.raises(
        InputError, match=f"drafts: expected draft_vocabulary of at least two ascending ids below {VOCAB}"
    ):
        kept_tokens(model.config, "drafts")


def test_a_whole_head_does_not_draft_and_a_cut_one_does_not_learn():
    model = tiny_llama(0)
    keep_tokens(model, KEPT)
    with pytest.raises(InputError, match=r"draft model: expected its head cut .* found a whole one"):
        DraftModelProposer(model)
    require_split(model, "draft")
    whole = Work.of(model)
    with pytest.raises(InputError, match="draft: expected a model with its whole head"):
        require_split(cut_head(model), "draft")
    assert whole == Work.of(model) and whole.head == len(KEPT) * 32


def logits(seed: int, size: int = 12) -> torch.Tensor:
    return 2 * torch.randn(7, size, generator=torch.Generator().manual_seed(seed))


CUT = CutVocabulary(torch.tensor([1, 2, 5, 7, 10]), 12)
TERMS = {"forward_kl": 1.0, "reverse_kl": 0.3, "tvd": 0.5, "jsd": 0.2, "nla": 0.1, "lk_hybrid": 0.7}


def test_the_rows_of_a_head_have_the_gradients_of_the_whole():
    weight = torch.randn(12, 4, requires_grad=True)
    CUT.of_head(OutputHead(weight))(torch.ones(3, 4)).sum().backward()
    expected = torch.zeros(12, 4)
    expected[CUT.tokens_D] = 3.0
    assert torch.equal(weight.grad, expected)


def test_labels_outside_are_none_and_logits_are_widened_with_nothing():
    assert CUT.labels(torch.tensor([2, 3, 10, 0])).tolist() == [1, -100, 4, -100]
    wide = CUT.widened(torch.ones(2, 5))
    expected = [0.2 * (v in CUT.tokens_D) for v in range(12)]
    assert wide.shape == (2, 12) and wide.softmax(-1)[0].tolist() == pytest.approx(expected)
    assert CUT.sizes(ChunkSizes(1200, 120)) == ChunkSizes(500, 50)


@pytest.mark.parametrize("extra", [{}, {"cross_entropy": 0.4}], ids=str)
def test_an_objective_is_that_of_the_distributions_over_its_tokens(extra):
    """With p and q over all tokens, but −∞ for those outside; and the same from a cache of the whole of p."""
    p, q, labels = logits(0), logits(1, 5), torch.tensor([1, 2, 5, 3, 10, 7, 7])
    objective = Objective(TERMS | extra, partial=True)
    q = q.requires_grad_(True)
    places = CUT.labels(labels)
    value = objective.features(CUT.of_distributions(p), q, places).sum()
    (gradient,) = torch.autograd.grad(value, q, retain_graph=True)
    assert value.isfinite() and gradient.isfinite().all()

    cached = CachedDistributions.of(p, labels, Sampler.of(1.0, 0, 1.0), k=12)
    from_cache = objective.features(CUT.of_distributions(cached), q, places).sum()
    assert from_cache.item() == pytest.approx(value.item(), rel=1e-5)
    torch.testing.assert_close(torch.autograd.grad(from_cache, q)[0], gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sampling", [(1.0, 0, 1.0), (0.7, 4, 1.0), (1.0, 6, 0.8)], ids=str)
@pytest.mark.parametrize("from_cache", [False, True])
def test_acceptance_in_the_loss_is_acceptance_in_decoding(from_cache, sampling):
    """α = Σ_v min(p, q) with all of p, of which a third at most can be drafted: in TVD, NLA and LK's λ."""
    p, q, tokens = logits(0), logits(1, 5), CUT.tokens_D[torch.tensor([0, 1, 2, 3, 4, 0, 1])]
    within = torch.zeros(12, dtype=torch.bool)
    within[CUT.tokens_D] = True
    odds = p[:, within].logsumexp(-1) - p[:, ~within].logsumexp(-1)
    p[:, within] += math.log(0.33 / 0.67) - odds[:, None]
    torch.testing.assert_close(p.softmax(-1)[:, within].sum(-1), torch.full((7,), 0.33))
    temperature, top_k, top_p = sampling
    sampler = Sampler.of(*sampling)
    decoded = replay_features(p, CUT.widened(q), tokens, sampler)
    alpha = decoded[:, 1]
    law = p if not from_cache else CachedDistributions.of(p, tokens, sampler, k=12)
    given = CUT.of_distributions(law)
    labels = CUT.labels(tokens)

    def of(**terms):
        objective = Objective(terms, temperature, top_k, top_p, partial=True)
        assert objective.looks_outside
        return objective.features(given, q, labels)

    torch.testing.assert_close(of(tvd=1.0)[:, 0], 1 - alpha)
    if sampling == (1.0, 0, 1.0):  # elsewhere q is not warped as p is
        assert alpha.max() < 0.34
        torch.testing.assert_close(of(nla=1.0)[:, 0], -alpha.log())
        kl = of(forward_kl=1.0, tvd=1e-9)[:, 0]
        torch.testing.assert_close(of(lk_hybrid=1.0)[:, 0], lk_blend(kl, 1 - alpha, 3.0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["forward_kl", "tvd", "nla", "lk_hybrid"])
def test_where_nothing_can_be_drafted_nothing_is_learned(name):
    """Top-k leaves p on tokens that the draft lacks: the loss is finite, and has no gradient."""
    p, q = logits(0), logits(1, 5).requires_grad_(True)
    p[:, [0, 3]] += 30.0
    for law in (p, CachedDistributions.of(p, torch.tensor([0] * 7), Sampler.of(1.0, 2, 1.0), k=2)):
        objective = Objective({name: 1.0}, top_k=2, partial=True)
        value = objective.features(CUT.of_distributions(law), q, torch.full((7,), -100)).sum()
        assert value.isfinite()
        assert torch.autograd.grad(value, q)[0].abs().max() < 1e-6


def test_the_whole_head_is_used_only_where_it_must_be():
    head, hidden = OutputHead(torch.randn(12, 4)), torch.randn(3, 4)
    for terms, options, whole in [
        ({"forward_kl": 1.0}, {}, False),
        ({"forward_kl": 1.0}, {"top_k": 5}, True),
        ({"lk_hybrid": 1.0}, {}, True),
    ]:
        vocabulary = LossVocabulary.of(Objective(terms, **options), CUT.tokens_D, 12)
        taught = vocabulary.distributions(LiveDistributions(hidden, vocabulary.teacher_head(head)))
        p = taught.chunk(slice(0, 3))(slice(1, 3))
        assert isinstance(p, WholeLogits) == whole
        assert (p.logits if whole else p).shape == (2, 12 if whole else 5)
        assert vocabulary.sizes(ChunkSizes(120, 120)).chunk == (50 if whole else 120)


def test_a_cached_tail_is_at_most_what_its_tokens_may_have():
    """Of p = (…) with k = 2: what is outside the vocabulary goes, and the tail is bounded by the k-th probability."""

    def cached(ids, p, tail):
        log = torch.tensor([p]).log()
        return CachedDistributions(torch.tensor([ids]), log, torch.tensor([tail]).log(), log[:, 0])

    def of(ids, p, tail):
        found = CUT.of_cached(cached(ids, p, tail))
        return found.ids.tolist()[0], found.bucketed().exp()[0].tolist()

    ids, p = of([1, 3], [0.5, 0.3], 0.2)  # four more of D may be in the tail
    assert ids == [0, 5] and p == pytest.approx([0.5 / 0.7, 0.0, 0.2 / 0.7])
    _, p = of([1, 3], [0.9, 0.01], 0.09)
    assert p == pytest.approx([0.9 / 0.94, 0.0, 0.04 / 0.94])
    _, p = of([0, 3], [0.7, 0.3], 0.0)  # nothing of p is left
    assert p == pytest.approx([0.0, 0.0, 1.0])
    q = torch.zeros(1, 5).log_softmax(-1).requires_grad_(True)
    nothing = CUT.of_cached(cached([0, 3], [0.7, 0.3], 0.0))
    value = Objective({"forward_kl": 1.0}).features(nothing, q, torch.tensor([2])).sum()
    assert float(value) == pytest.approx(0.0, abs=1e-6) and torch.autograd.grad(value, q)[0].isfinite().all()
