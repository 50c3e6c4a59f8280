"""Drafts with a cut vocabulary: what their head says, and what a loss compares."""

import pytest
import torch
from conftest import tiny_llama
from families import VOCAB, tiny_model

from draftsmith.decode import DraftModelProposer, cut_head, replay_acceptance, speculative_generate
from draftsmith.decode.draft_models.cut_vocabulary import KEPT_TOKENS, CutHead, kept_tokens
from draftsmith.decode.errors import InputError
from draftsmith.decode.sampling import Sampler
from draftsmith.distill.vocabulary import keep_tokens
from draftsmith.train.job.flops import Work
from draftsmith.train.losses.chunk_sizes import ChunkSizes
from draftsmith.train.losses.cut_vocabulary import CutVocabulary
from draftsmith.train.losses.objective import Objective
from draftsmith.train.losses.output_head import OutputHead, require_split
from draftsmith.train.teacher.distributions import CachedDistributions

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


def test_a_whole_vocabulary_stays_as_it_is():
    model = tiny_llama(0)
    head = model.get_output_embeddings()
    assert cut_head(model) is model and model.get_output_embeddings() is head


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


def test_decoding_with_it_is_plain_decoding_and_replay_counts_the_same():
    target, draft = tiny_llama(0), tiny_llama(0)
    keep_tokens(draft, list(range(0, 97, 2)))
    proposer, prompt = DraftModelProposer(cut_head(draft)), torch.tensor([[5, 6, 7]])
    out = speculative_generate(target, proposer, prompt, draft_length=3, max_new_tokens=40)
    plain = target.generate(prompt, max_new_tokens=40, do_sample=False)
    assert torch.equal(out.sequences, plain)
    tokens = plain[0, 3:]
    assert 0 < (tokens % 2 == 0).sum() < 40  # the draft is the target's own, but for the tokens that it lacks
    replayed = replay_acceptance(target, proposer, [plain[0]], [3], draft_lengths=[3], temperature=0)
    assert replayed.alpha.value == pytest.approx(float((tokens % 2 == 0).float().mean()))
    assert replayed.mean_acceptance_length[3].value == pytest.approx(out.counts.mean_acceptance_length(), rel=0.1)


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


@pytest.mark.parametrize("extra", [{}, {"expected_length": 1.0}, {"cross_entropy": 0.4}], ids=str)
def test_an_objective_is_that_of_the_distributions_over_its_tokens(extra):
    """With p and q over all tokens, but −∞ for those outside; and the same from a cache of the whole of p."""
    p, q, labels = logits(0), logits(1, 5), torch.tensor([1, 2, 5, 3, 10, 7, 7])
    objective = Objective(TERMS | extra, draft_length=3, partial=True)
    follows = torch.ones(7, dtype=torch.bool)
    q = q.requires_grad_(True)
    places = CUT.labels(labels)
    features = objective.features(CUT.of_distributions(p), q, places)
    value = objective.shortfall(features, follows)
    (gradient,) = torch.autograd.grad(value, q, retain_graph=True)
    assert value.isfinite() and gradient.isfinite().all()

    cached = CachedDistributions.of(p, labels, Sampler.of(1.0, 0, 1.0), k=12)
    from_cache = objective.shortfall(objective.features(CUT.of_distributions(cached), q, places), follows)
    assert from_cache.item() == pytest.approx(value.item(), rel=1e-5)
    torch.testing.assert_close(torch.autograd.grad(from_cache, q)[0], gradient, rtol=1e-4, atol=1e-5)


def test_a_text_s_token_outside_ends_the_accepted_block():
    p, q, follows = logits(0), logits(0, 12)[:, CUT.tokens_D], torch.ones(7, dtype=torch.bool)
    objective = Objective({"expected_length": 1.0}, draft_length=2, partial=True)
    labels = CUT.labels(torch.tensor([1, 2, 5, 3, 10, 7, 7]))
    features = objective.features(CUT.of_distributions(p), q, labels)
    assert features[:, 2] == pytest.approx(torch.ones(7))  # q is p, renormalised
    assert features[:, 1].exp().tolist() == pytest.approx([1, 1, 1, 0, 1, 1, 1])
    # Of a block of two at position 3, the second is never reached.
    assert float(objective.shortfall(features, follows)) == pytest.approx(1.0)


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
