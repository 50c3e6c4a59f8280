"""Positions at which proposers draft, and the tree that drafts are put in."""

import pytest
import torch
from conftest import tiny_llama
from transformers import GPT2Config, GPT2LMHeadModel

from draftsmith.decode import (
    DraftModelProposer,
    HybridProposer,
    RunAheadProposer,
    SuffixProposer,
    Switch,
    Tree,
    autoregressive_generate,
    replay_acceptance,
    speculative_generate,
)
from draftsmith.decode.proposers.base import stack_tokens
from draftsmith.decode.proposers.draft_tree import draft_static_tree
from draftsmith.decode.proposers.renumbered import renumber_draft
from draftsmith.decode.sampling import Sampler
from draftsmith.distill.parallel.layout import MASK_TOKEN
from draftsmith.distill.parallel.proposer import ParallelDraftProposer
from draftsmith.medusa import BlockDrafter, BlockProposer, EagleHeads, EagleProposer
from draftsmith.medusa.mtp.heads import MtpHeads
from draftsmith.medusa.mtp.proposer import MtpProposer


def test_what_is_fed_of_a_cut_tree_is_its_draft_whatever_the_order_of_its_nodes():
    """Node 1 lies below node 0, node 2 beside it: what is left of a cut tree are not its first nodes."""
    texts, samplers = [torch.zeros(4, dtype=torch.long)] * 2, [Sampler.of(1.0)] * 2
    scores = torch.tensor([[3.0, 2.0, 1.0], [1.0, 2.0, 3.0]])[:, None]
    for tree in (Tree((-1, 0, -1)), Tree((-1, -1, 0))):
        drafts = draft_static_tree(tree, samplers, texts, [2, 1], [None] * 2, False, False, lambda level, _: scores)
        assert drafts[1].tokens.tolist() == [2, 1]
        assert torch.equal(stack_tokens(drafts, 3)[1, :2], drafts[1].tokens)


VOCAB, POSITIONS, NEW = 97, 24, 22
PROMPTS = (5, 12, 22, 23, 24, 25, 31)


def learned(vocab: int = VOCAB, positions: int = POSITIONS) -> GPT2LMHeadModel:
    """A model with a table of positions: to read further is an error."""
    sizes = {"vocab_size": vocab, "n_positions": positions, "n_embd": 32, "n_layer": 1, "n_head": 2}
    torch.manual_seed(1)
    return GPT2LMHeadModel(GPT2Config(**sizes, initializer_range=0.3)).eval()


def rotary(vocab: int = VOCAB, positions: int = POSITIONS):
    model = tiny_llama(1, vocab)
    model.config.max_position_embeddings = positions
    return model


def masked(model: GPT2LMHeadModel) -> GPT2LMHeadModel:
    """The same as a draft of several tokens in one forward."""
    setattr(model.config, MASK_TOKEN, 3)
    return model


def heads(cls, target, **shape):
    torch.manual_seed(2)
    made = cls.of_target(target, **shape)
    made.config.max_position_embeddings = POSITIONS
    return made


PROPOSERS = {
    "learned": lambda target: DraftModelProposer(learned()),
    "rotary": lambda target: DraftModelProposer(rotary()),
    "tree": lambda target: DraftModelProposer(learned(), Tree.from_choices([[0], [1], [0, 0], [0, 1]])),
    "run ahead": lambda target: RunAheadProposer(learned()),
    "parallel": lambda target: ParallelDraftProposer(masked(learned())),
    "eagle": lambda target: EagleProposer(heads(EagleHeads, target)),
    "block": lambda target: BlockProposer(heads(BlockDrafter, target, mask_token=2, block_size=3, markov_rank=2)),
}


def prompt(length: int) -> torch.Tensor:
    return torch.randint(VOCAB, (1, length), generator=torch.Generator().manual_seed(length))


@pytest.fixture(scope="module")
def target():
    return tiny_llama(0, VOCAB, layers=3)


@pytest.mark.parametrize("name", PROPOSERS)
def test_nothing_is_drafted_past_the_drafters_positions(target, name):
    """The text stays the target's, and no draft reaches further than what was fed has positions."""
    for length in (5, 23, 31):
        proposer, drafted = PROPOSERS[name](target), []
        propose = proposer.propose

        def watched(contexts, lengths, propose=propose, drafted=drafted):
            found = propose(contexts, lengths)
            drafted.extend((len(text), draft.tree.depth) for text, draft in zip(contexts, found, strict=True))
            return found

        proposer.propose = watched
        out = speculative_generate(target, proposer, prompt(length), max_new_tokens=NEW, draft_length=3)
        assert torch.equal(out.sequences, autoregressive_generate(target, prompt(length), max_new_tokens=NEW).sequences)
        most = POSITIONS + 1 if name in ("eagle", "block") else POSITIONS  # their places are those of the next tokens
        assert proposer.positions == most
        assert all(not depth or text + depth <= most + 1 for text, depth in drafted)
        assert any(depth for _, depth in drafted) == (length < POSITIONS)
        assert out.num_undrafted_tokens == length + NEW - max(length, most + 1)


@pytest.mark.parametrize("name", ["learned", "rotary", "tree", "parallel"])
def test_rows_that_reach_the_end_leave_the_others_as_they_are(target, name):
    """Ragged rows: each counts what it counts alone."""
    width = max(PROMPTS)
    ids = torch.cat([torch.nn.functional.pad(prompt(n), (width - n, 0)) for n in PROMPTS])
    mask = torch.arange(width) >= width - torch.tensor(PROMPTS)[:, None]
    options = {"max_new_tokens": NEW, "draft_length": 3}
    out = speculative_generate(target, PROPOSERS[name](target), ids, mask.long(), **options)
    alone = [speculative_generate(target, PROPOSERS[name](target), prompt(n), **options) for n in PROMPTS]
    assert out.row_counts == tuple(each.counts for each in alone)
    assert out.num_undrafted_tokens == sum(each.num_undrafted_tokens for each in alone)


def in_turns(last) -> HybridProposer:
    """Copies have no positions of their own: they are drafted past the model's, too."""
    return HybridProposer([SuffixProposer(min_match=1), last], Switch(match=1))


OTHERS = {
    "renumbered": lambda target: DraftModelProposer(
        renumber_draft(learned(), {i: (i + 3) % VOCAB for i in range(VOCAB) if i != 5}, 5)
    ),
    "MTP": lambda target: MtpProposer(heads(MtpHeads, target)),
    "MTP, three layers": lambda target: MtpProposer(heads(MtpHeads, target, layers=3)),
    "copies, learned": lambda target: in_turns(PROPOSERS["learned"](target)),
    "copies, eagle": lambda target: in_turns(PROPOSERS["eagle"](target)),
}
REPLAYED = {name: make for name, make in (PROPOSERS | OTHERS).items() if name != "run ahead"}


@pytest.mark.parametrize("name", REPLAYED)
def test_replay_counts_what_the_decoder_counts(target, name):
    for length in PROMPTS:
        proposer = REPLAYED[name](target)
        options = {"max_new_tokens": max(POSITIONS + 6 - length, 4)}
        out = speculative_generate(target, proposer, prompt(length), draft_length=3, **options)
        replay = replay_acceptance(target, proposer, [out.sequences[0]], [length], [3], 0, **options)
        for count in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
            assert getattr(replay.texts[0].counts[3], count) == getattr(out.counts, count)


@pytest.mark.parametrize("make", [learned, rotary])
def test_a_token_that_the_draft_has_no_row_for_is_read_as_another(target, make):
    """A target with padded logits writes it, and a draft without the padding goes on."""
    draft = make(VOCAB - 7, 200)
    ids = torch.tensor([[1, VOCAB - 1, 5, VOCAB - 3]])
    proposer = DraftModelProposer(draft)
    out = speculative_generate(target, proposer, ids, max_new_tokens=NEW, draft_length=3)
    assert torch.equal(out.sequences, autoregressive_generate(target, ids, max_new_tokens=NEW).sequences)
    assert out.counts.num_draft_tokens
    replay = replay_acceptance(
        target, proposer, [out.sequences[0]], [4], draft_lengths=[3], temperature=0, max_new_tokens=NEW
    )
    assert replay.texts[0].counts[3].num_accepted_tokens == out.counts.num_accepted_tokens


@pytest.mark.parametrize("columns", [7, 100])
def test_what_is_drafted_after_any_context_is_known_up_to_the_last_position(target, columns):
    """The test of losslessness asks beyond it, too, where a wrong q costs power alone."""
    ids, sampler = prompt(40), Sampler.of(1.0)
    wanted = torch.ones_like(ids, dtype=torch.bool)
    given = DraftModelProposer(learned(VOCAB - 7)).distributions_after(target, sampler)(ids, wanted, columns)
    q_NV = torch.cat(list(given))
    whole = learned(VOCAB - 7, 40)
    whole.transformer.wpe.weight.data[:POSITIONS] = learned(VOCAB - 7).transformer.wpe.weight
    whole.load_state_dict(learned(VOCAB - 7).state_dict() | {"transformer.wpe.weight": whole.transformer.wpe.weight})
    expected = whole(ids.clamp(max=VOCAB - 8)).logits[0, :POSITIONS].softmax(-1)
    torch.testing.assert_close(q_NV[:POSITIONS, : VOCAB - 7], expected)
    torch.testing.assert_close(q_NV.sum(-1), torch.ones(39))
