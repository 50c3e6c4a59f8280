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


@pytest.mark.parametrize("draft_length", range(1, LONGEST + 1))
def test_replay_is_the_decoder_at_every_length(embedded, draft_length):
    target, draft, prompts, texts = embedded
    proposer = ParallelDraftProposer(draft)
    replay = replay_acceptance(target, proposer, texts, [len(p) for p in prompts], [draft_length], 0.0)
    deepest = 0
    for prompt, text, replayed in zip(prompts, texts, replay.texts, strict=True):
        out = speculative_generate(
            target, proposer, prompt[None], draft_length=draft_length, max_new_tokens=NEW, do_sample=False
        )
        assert torch.equal(out.sequences[0], text)
        assert_same(replayed.counts[draft_length], out.counts)
        deepest = max(deepest, sum(count > 0 for count in out.counts.num_accepted_tokens_per_pos))
    assert deepest >= min(draft_length, 3), "masks that guess nothing prove nothing"


def test_trees_replay_too_alone_and_in_a_batch(embedded):
    target, draft, prompts, texts = embedded
    proposer = ParallelDraftProposer(draft, TREE)
    replay = replay_acceptance(target, proposer, texts, [len(p) for p in prompts], [4], 0.0)
    width = max(map(len, prompts))
    ids = torch.stack([torch.nn.functional.pad(p, (width - len(p), 0)) for p in prompts])
    mask = torch.stack([torch.nn.functional.pad(torch.ones_like(p), (width - len(p), 0)) for p in prompts])
    out = speculative_generate(target, proposer, ids, mask, draft_length=4, max_new_tokens=NEW, do_sample=False)
    for row, (text, replayed) in enumerate(zip(texts, replay.texts, strict=True)):
        assert torch.equal(out.sequences[row, -NEW:], text[-NEW:])
        assert_same(replayed.counts[4], out.row_counts[row])


@pytest.mark.parametrize("tree", [None, TREE], ids=["chain", "tree"])
def test_compiled_forwards_change_nothing_and_are_few(traced, tree):
    """Rows that lack one token and rows that lack several share a forward."""
    target = tiny_llama(0, 6, scale=2.0)
    draft = as_parallel(tiny_llama(1, 6, layers=1), 5, 6)
    ids = torch.randint(0, 6, (3, 9), generator=torch.Generator().manual_seed(1))
    options = {"draft_length": 4, "max_new_tokens": 30, "do_sample": tree is None, "top_k": 0, "seed": 1}
    eager = speculative_generate(target, ParallelDraftProposer(draft, tree), ids, **options)
    out = speculative_generate(target, ParallelDraftProposer(draft, tree), ids, compiled=True, **options)
    assert torch.equal(out.sequences, eager.sequences) and out.row_counts == eager.row_counts
    assert eager.counts.num_accepted_tokens_per_pos[2] > 0
    assert len(traced) == 2


def assert_same(replayed, counted):
    assert replayed.num_drafts == counted.num_drafts
    assert tuple(replayed.num_accepted_tokens_per_pos) == tuple(counted.num_accepted_tokens_per_pos)
    assert tuple(replayed.num_draft_tokens_per_pos) == tuple(counted.num_draft_tokens_per_pos)
    assert replayed.num_draft_tokens == counted.num_draft_tokens
