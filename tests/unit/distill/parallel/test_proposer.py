"""A parallel draft proposes what plain forwards of text and masks say, whatever its cache went through."""

import pytest
import torch
from conftest import tiny_llama
from specimens import wavering
from transformers import GPT2Config, GPT2LMHeadModel, MistralConfig, MistralForCausalLM

from draftsmith.decode import InputError, ParallelDraftProposer, Tree, replay_acceptance, speculative_generate
from draftsmith.decode.replay.texts import WrittenText
from draftsmith.decode.sampling import Sampler
from draftsmith.distill.parallel.layout import tree_of
from draftsmith.distill.parallel.replay import text_acceptance

VOCAB, MASK, LONGEST = 6, 5, 6
TREE = Tree.from_choices([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (0, 0, 0, 0)])


def as_parallel(model, longest=LONGEST):
    model.config.pard_token, model.config.parallel_length = MASK, longest
    return model


def llama_draft(seed=1):
    return as_parallel(tiny_llama(seed, VOCAB, layers=1))


def windowed_draft():
    torch.manual_seed(1)
    config = MistralConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=64, sliding_window=5, pad_token_id=None,
    )  # fmt: skip
    return as_parallel(MistralForCausalLM(config).eval())


def gpt2_draft():
    """Learned positions, which end with the length limit."""
    torch.manual_seed(1)
    config = GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=1, n_head=4, n_positions=30, bos_token_id=None, eos_token_id=None
    )
    return as_parallel(GPT2LMHeadModel(config).eval())


DRAFTS = {"llama": llama_draft, "window": windowed_draft, "learned positions": gpt2_draft}


@pytest.fixture(scope="module")
def small():
    """A target of so few tokens that drafts made at random are often right."""
    return tiny_llama(0, VOCAB, scale=2.0)


@torch.no_grad()
def eager(draft, text, count, mask=MASK):
    """The logits of `count` drafts behind a text, by a plain forward: (K, V)."""
    ids = torch.cat([text, torch.full((count - 1,), mask)])[None]
    return draft(input_ids=ids, use_cache=False).logits[0, -count:]


class Watched(ParallelDraftProposer):
    """Holds every draft against a plain forward of its text."""

    seen, sampler = 0, Sampler.of(1.0)

    def propose(self, contexts, draft_lengths):
        drafts = super().propose(contexts, draft_lengths)
        for context, draft, k in zip(contexts, drafts, draft_lengths, strict=True):
            depth = min(k, self.longest) if self.tree is None else self.tree.pruned(k)[0].depth
            assert draft.tree.depth == depth
            if not depth:
                continue
            logits = eager(self.draft_model, context, depth)
            if draft.tree.is_chain and draft.probabilities is not None:
                q = [self.sampler.probabilities(logits[[at]], [torch.cat([context, draft.tokens[:at]])])
                     for at in range(depth)]  # fmt: skip
                torch.testing.assert_close(draft.probabilities, torch.cat(q), atol=1e-5, rtol=1e-4)
            else:
                for parent, at in enumerate((0, *draft.tree.depths)):
                    children = list(draft.tree.children[parent])
                    if children and draft.siblings is None:
                        assert torch.equal(draft.tokens[children], logits[at].topk(len(children)).indices)
                    elif children:
                        index = draft.siblings.distribution[parent]
                        q = torch.zeros(VOCAB).scatter(0, draft.siblings.support[index], draft.siblings.q[index])
                        torch.testing.assert_close(q, logits[at].softmax(-1), atol=1e-5, rtol=1e-4)
            self.seen += 1
        return drafts


def batch(*lengths):
    """Left-padded prompts and their mask."""
    mask = (torch.arange(max(lengths)) >= max(lengths) - torch.tensor(lengths)[:, None]).long()
    return torch.randint(0, VOCAB, mask.shape, generator=torch.Generator().manual_seed(3)) * mask, mask


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("tree", [None, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("name", DRAFTS)
def test_drafts_are_those_of_a_plain_forward(small, name, tree, do_sample):
    """Rows of one token and of many accept from none to all, and end at different lengths."""
    for lengths, eos in (([5], None), ([1, 9, 4], None), ([1, 9, 4], 2)):
        proposer = Watched(DRAFTS[name](), tree)
        options = {"max_new_tokens": 20, "do_sample": do_sample, "top_k": 0, "eos_token_id": eos}
        speculative_generate(small, proposer, *batch(*lengths), draft_length=4, **options)
        assert proposer.seen > 3 or eos


def test_rounds_without_a_draft_leave_the_cache_right(small):
    proposer = wavering(Watched(llama_draft()), [0, 0, 5, 0, 1, 6, 3])
    speculative_generate(small, proposer, *batch(1, 6), draft_length=6, max_new_tokens=40, do_sample=False)
    assert proposer.seen > 8


def test_a_draft_drafts_its_own_length_if_none_is_given(small):
    proposer = Watched(llama_draft())
    out = speculative_generate(small, proposer, *batch(3), draft_length=None, max_new_tokens=30)
    assert len(out.counts.num_draft_tokens_per_pos) == LONGEST


def test_processors_see_the_tokens_drafted_before(small):
    """q of the second token is warped as if the first stood."""
    proposer = Watched(llama_draft())
    proposer.sampler = Sampler.of(1.0, repetition_penalty=1.7)
    options = {"max_new_tokens": 10, "do_sample": True, "top_k": 0, "repetition_penalty": 1.7}
    speculative_generate(small, proposer, *batch(5), draft_length=3, **options)
    assert proposer.seen > 1


@pytest.mark.parametrize("name", DRAFTS)
def test_replay_of_chains_has_every_start_and_offset(small, monkeypatch, name):
    """a of offset j from start s is min(1, q_j/p), by a plain forward of each start, and in chunks too."""
    monkeypatch.setattr("draftsmith.distill.parallel.replay.DRAFTS_AT_A_TIME", 13)
    draft, (ids, _) = DRAFTS[name](), batch(4)
    text = speculative_generate(
        small, ParallelDraftProposer(draft), ids, draft_length=2, max_new_tokens=12, do_sample=True, top_k=0
    ).sequences[0]
    with torch.no_grad():
        p_NV = small(text[None]).logits[0, 3:-1].softmax(-1)
    a_NK, _ = text_acceptance(
        draft, WrittenText(text, 4, 12), Sampler.of(1.0), p_NV.shape[1], lambda first, end: p_NV[first:end], 5
    )
    for start in range(12):
        q_KV = eager(draft, text[: 4 + start], 5).softmax(-1)
        for j, at in enumerate(range(start, start + 5)):  # the last token is always the target's
            wanted = 0.0 if at >= 11 else min(1.0, float(q_KV[j, text[4 + at]] / p_NV[at, text[4 + at]]))
            assert float(a_NK[start, j]) == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("greedy", [False, True])
def test_a_tree_that_is_a_chain_replays_as_that_chain_under_sampling(small, greedy):
    """However long a draft is asked for; wider trees are refused."""
    draft, (ids, _) = llama_draft(), batch(4)
    options = {"draft_length": 4, "max_new_tokens": 12, "do_sample": True, "top_k": 0}
    text = speculative_generate(small, ParallelDraftProposer(draft, Tree.chain(2)), ids, **options).sequences[0]
    chain = replay_acceptance(small, ParallelDraftProposer(draft, greedy=greedy), [text], [4], [2], 1.0)
    proposer = ParallelDraftProposer(draft, Tree.chain(2), greedy=greedy)
    replay = replay_acceptance(small, proposer, [text], [4], [2, 4], 1.0)
    assert replay.alpha == chain.alpha
    assert replay.texts[0].counts[2] == chain.texts[0].counts[2]
    assert replay.mean_acceptance_length[4] == replay.mean_acceptance_length[2]
    with pytest.raises(InputError, match="replay: expected chains under sampling, found a tree"):
        replay_acceptance(small, ParallelDraftProposer(draft, TREE), [text], [4], [2], 1.0)


def test_the_tree_of_a_config_is_checked(small):
    config = llama_draft().config
    assert tree_of(config) is None
    config.parallel_tree = [[0], [1], [0, 0]]
    assert tree_of(config) == Tree.from_choices([(0,), (1,), (0, 0)])
    for choices, words in (
        (3, "parallel_tree: expected lists of ranks, found 3"),
        ([], "parallel_tree: expected at least one node, found none"),
        (
            [[0] * depth for depth in range(1, 8)],
            "tree: expected a depth of at most the draft's parallel_length 6, found 7",
        ),
    ):
        config.parallel_tree = choices
        with pytest.raises(InputError, match=words):
            tree_of(config)


@pytest.mark.parametrize(
    ("length", "tree", "words"),
    [
        (0, None, "parallel_length of at least 1 in the config, found 0"),
        (3, TREE, "tree: expected a depth of at most the draft's parallel_length 3, found 4"),
    ],
)
def test_what_cannot_be_is_refused(length, tree, words):
    with pytest.raises(InputError, match=words):
        ParallelDraftProposer(as_parallel(tiny_llama(1, VOCAB, layers=1), length), tree)


def test_drafts_are_trained_and_no_longer_than_that(small):
    with pytest.raises(InputError, match="parallel draft: expected pard_token in the config"):
        ParallelDraftProposer(tiny_llama(1, VOCAB, layers=1))
    with pytest.raises(InputError, match="draft_length: expected at most the 6 tokens that the draft was trained"):
        speculative_generate(small, ParallelDraftProposer(llama_draft()), batch(3)[0], draft_length=7)
