"""A parallel draft of the embedded pair: replay counts what the decoder counts, at every draft length."""

import pytest
import torch
from conftest import tiny_llama
from trained_parallel import as_parallel, train_parallel
from transformers import GenerationConfig

from draftsmith.decode import ParallelDraftProposer, Tree, replay_acceptance, speculative_generate
from draftsmith.decode.measurement.distribution_test import plain_texts
from draftsmith.scripts.configs import ASSETS
from draftsmith.scripts.quickstart import STOCK
from draftsmith.train.data.corpus import encoded_prompts
from draftsmith.train.models import load_model, load_tokenizer

TARGET, NEW, LONGEST = ASSETS / "tiny-target", 32, 8
TREE = Tree.from_choices([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 0, 0)])


@pytest.fixture(scope="module")
def embedded():
    """The target, a draft that learnt its text a little, prompts, and their plain texts."""
    target = load_model(str(TARGET), dtype="float32", device="cpu")
    target.generation_config = GenerationConfig(pad_token_id=0)
    prompts = [torch.tensor(ids) for ids in encoded_prompts(None, load_tokenizer(str(TARGET)), 4, 48)]
    texts = plain_texts(target, prompts, 4, max_new_tokens=NEW)
    draft = load_model(str(STOCK), dtype="float32", device="cpu")
    return target, train_parallel(draft, 1, LONGEST, texts[:3], steps=30), prompts, texts


def left_padded(prompts):
    width = max(map(len, prompts))
    ids = torch.stack([torch.nn.functional.pad(p, (width - len(p), 0)) for p in prompts])
    mask = torch.stack([torch.nn.functional.pad(torch.ones_like(p), (width - len(p), 0)) for p in prompts])
    return ids, mask


@pytest.fixture(scope="module")
def replayed(embedded):
    """What replay counts on each text, by draft length."""
    target, draft, prompts, texts = embedded
    lengths = list(range(1, LONGEST + 1))
    return replay_acceptance(target, ParallelDraftProposer(draft), texts, [len(p) for p in prompts], lengths, 0.0).texts


@pytest.mark.parametrize("draft_length", range(1, LONGEST + 1))
def test_replay_is_the_decoder_at_every_length(embedded, replayed, draft_length):
    """In a batch, and one prompt in turn alone."""
    target, draft, prompts, texts = embedded
    options = {"draft_length": draft_length, "max_new_tokens": NEW, "do_sample": False}
    out = speculative_generate(target, ParallelDraftProposer(draft), *left_padded(prompts), **options)
    for row, text in enumerate(texts):
        assert torch.equal(out.sequences[row, -NEW:], text[-NEW:])
        assert_same(replayed[row].counts[draft_length], out.row_counts[row])
    i = draft_length % len(prompts)
    alone = speculative_generate(target, ParallelDraftProposer(draft), prompts[i][None], **options)
    assert torch.equal(alone.sequences[0], texts[i])
    assert_same(replayed[i].counts[draft_length], alone.counts)
    deepest = sum(count > 0 for count in out.counts.num_accepted_tokens_per_pos)
    assert deepest >= min(draft_length, 3), "masks that guess nothing prove nothing"


def test_trees_replay_too(embedded):
    target, draft, prompts, texts = embedded
    proposer = ParallelDraftProposer(draft, TREE)
    replay = replay_acceptance(target, proposer, texts, [len(p) for p in prompts], [4], 0.0)
    options = {"draft_length": 4, "max_new_tokens": NEW, "do_sample": False}
    out = speculative_generate(target, proposer, *left_padded(prompts), **options)
    for row, (text, replayed) in enumerate(zip(texts, replay.texts, strict=True)):
        assert torch.equal(out.sequences[row, -NEW:], text[-NEW:])
        assert_same(replayed.counts[4], out.row_counts[row])


@pytest.mark.parametrize("tree", [None, TREE], ids=["chain", "tree"])
def test_compiled_forwards_change_nothing_and_are_few(untraced, tree):
    """Rows that lack one token and rows that lack several share a forward."""
    target = tiny_llama(0, 6, layers=1, scale=2.0)
    draft = as_parallel(tiny_llama(1, 6, layers=1), 5, 6)
    ids = torch.randint(0, 6, (3, 9), generator=torch.Generator().manual_seed(1))
    options = {"draft_length": 4, "max_new_tokens": 30, "do_sample": tree is None, "top_k": 0, "seed": 1}
    eager = speculative_generate(target, ParallelDraftProposer(draft, tree), ids, **options)
    out = speculative_generate(target, ParallelDraftProposer(draft, tree), ids, compiled=True, **options)
    assert torch.equal(out.sequences, eager.sequences) and out.row_counts == eager.row_counts
    assert eager.counts.num_accepted_tokens_per_pos[2] > 0
    assert [key[0] for _, key in untraced].count("BlockForward") == 2


def assert_same(replayed, counted):
    assert replayed.num_drafts == counted.num_drafts
    assert tuple(replayed.num_accepted_tokens_per_pos) == tuple(counted.num_accepted_tokens_per_pos)
    assert tuple(replayed.num_draft_tokens_per_pos) == tuple(counted.num_draft_tokens_per_pos)
    assert replayed.num_draft_tokens == counted.num_draft_tokens
