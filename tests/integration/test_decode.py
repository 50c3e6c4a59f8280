"""Speculative decoding against plain decoding and the library's own `generate`."""

from dataclasses import dataclass

import pytest
import torch
from conftest import tiny_llama
from transformers import StoppingCriteria, StoppingCriteriaList, T5Config, T5ForConditionalGeneration

from draftsmith.decode import (
    Counts,
    DraftModelProposer,
    InputError,
    Proposal,
    autoregressive_generate,
    speculative_generate,
)
from draftsmith.decode.proposers.base import DraftTask, StatelessProposer
from draftsmith.decode.tree import Tree


def prompt(seed: int, length: int = 7) -> torch.Tensor:
    return torch.randint(1, 97, (1, length), generator=torch.Generator().manual_seed(seed))


@dataclass
class Oracle(StatelessProposer):
    """Drafts a known text, wrong from position `wrong` of each block on."""

    text: torch.Tensor
    wrong: int
    seen: list[int]

    def start(self, task: DraftTask) -> int:
        self.seen = []
        return super().start(task)

    def propose(self, contexts: list[torch.Tensor], draft_lengths: list[int]) -> list[Proposal]:
        (context,), (draft_length,) = contexts, draft_lengths
        tokens = self.text[0, len(context) : len(context) + draft_length].clone()
        tokens[self.wrong :] = (tokens[self.wrong :] + 1) % 97
        self.seen.append(draft_length)
        return [Proposal(tokens, None, Tree.chain(len(tokens)))]


WARPED = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8}


@pytest.mark.parametrize("options", [{"do_sample": False}, WARPED], ids=["greedy", "warped"])
def test_the_target_as_its_own_draft_is_always_accepted(target, options):
    """A cache that misses the last token or rolls back too far, or a q warped otherwise than p, loses acceptance."""
    out = speculative_generate(
        target, DraftModelProposer(target), prompt(0), draft_length=4, max_new_tokens=40, **options
    )
    assert out.counts == Counts(8, 32, 32, (8,) * 4, (8,) * 4, (8,) * 4, 40)


@pytest.mark.parametrize("wrong", [0, 1, 2, 3])
def test_counts_are_those_of_an_oracle(target, wrong):
    plain = autoregressive_generate(target, prompt(1), max_new_tokens=24, do_sample=False)
    oracle = Oracle(plain.sequences, wrong, [])
    out = speculative_generate(target, oracle, prompt(1), draft_length=3, max_new_tokens=24, do_sample=False)
    assert torch.equal(out.sequences, plain.sequences)
    assert out.counts.mean_acceptance_length() == wrong + 1
    assert out.counts.num_accepted_tokens_per_pos[:wrong] == (24 // (wrong + 1),) * wrong
    assert sum(oracle.seen) == out.counts.num_draft_tokens


@pytest.mark.parametrize("new", [1, 2, 3, 5, 6])
def test_length_limit_is_exact_and_nothing_is_drafted_past_it(target, new):
    plain = autoregressive_generate(target, prompt(2), max_new_tokens=new, do_sample=False)
    oracle = Oracle(plain.sequences, 99, [])
    out = speculative_generate(target, oracle, prompt(2), draft_length=4, max_new_tokens=new, do_sample=False)
    assert torch.equal(out.sequences, plain.sequences)
    assert out.counts.num_draft_tokens == out.counts.num_accepted_tokens == sum(oracle.seen)
    assert out.counts.num_emitted_tokens == new


def test_end_of_sequence_inside_a_block_ends_the_text_there(target):
    full = autoregressive_generate(target, prompt(3), max_new_tokens=20, do_sample=False).sequences
    # An end token at each place of a block in turn: accepted, drafted after, or as the bonus.
    for end in range(1, 9):
        eos = int(full[0, 7 + end])
        first = full[0, 7:].tolist().index(eos)
        for wrong in (0, 2, 99):
            oracle = Oracle(full, wrong, [])
            out = speculative_generate(
                target, oracle, prompt(3), draft_length=4, max_new_tokens=20, do_sample=False, eos_token_id=eos
            )
            assert torch.equal(out.sequences, full[:, : 7 + first + 1])
            assert out.counts.num_emitted_tokens == first + 1
            if wrong == 99:  # all that was drafted up to the end was right: nothing after it may count as a failure
                assert out.counts.draft_acceptance_rate() in (1.0, None)


def test_other_stopping_criteria_hold_inside_a_block(target):
    class StopAt(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.full((len(input_ids),), input_ids.shape[1] >= 7 + 5)

    plain = autoregressive_generate(target, prompt(4), max_new_tokens=20, do_sample=False)
    options = {"max_new_tokens": 20, "do_sample": False, "stopping_criteria": StoppingCriteriaList([StopAt()])}
    out = speculative_generate(target, Oracle(plain.sequences, 99, []), prompt(4), draft_length=8, **options)
    assert torch.equal(out.sequences, plain.sequences[:, : 7 + 5])


@pytest.mark.parametrize(("target_size", "draft_size"), [(104, 97), (97, 104)])
def test_padded_vocabularies_are_aligned(target_size, draft_size):
    """Heads padded to different widths, with the same tokens in them."""
    shared = tiny_llama(0, 97).state_dict()
    target, draft = tiny_llama(0, target_size), tiny_llama(0, draft_size)
    for model in (target, draft):  # padding entries are zero rows: possible, but never near the top
        rows = model.config.vocab_size - 97
        pad = {k: torch.nn.functional.pad(v, (0, 0, 0, rows)) for k, v in shared.items() if v.shape[0] == 97}
        model.load_state_dict(shared | pad)
    for do_sample in (False, True):
        options = {"max_new_tokens": 24, "do_sample": do_sample} | ({"top_k": 5} if do_sample else {})
        out = speculative_generate(target, DraftModelProposer(draft), prompt(0), **options)
        plain = autoregressive_generate(target, prompt(0), max_new_tokens=24, do_sample=False)
        assert do_sample or torch.equal(out.sequences, plain.sequences)
        assert out.counts.draft_acceptance_rate() > 0.9


def test_draws_depend_on_the_seed_alone(target, draft):
    def sample(seed: int) -> torch.Tensor:
        return speculative_generate(
            target, DraftModelProposer(draft), prompt(0), max_new_tokens=16, do_sample=True, seed=seed
        ).sequences

    torch.manual_seed(1)
    first = sample(3)
    torch.manual_seed(2)
    assert torch.equal(first, sample(3))
    assert not torch.equal(first, sample(4))


def test_bad_arguments_are_refused_in_one_line(target, draft):
    with pytest.raises(InputError, match="draft_length: expected at least 1, found 0"):
        speculative_generate(target, DraftModelProposer(draft), prompt(0), draft_length=0)
    with pytest.raises(InputError, match="rule: expected one of exact, typical, threshold, cascade, found 'sloppy'"):
        speculative_generate(target, DraftModelProposer(draft), prompt(0), rule="sloppy")
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=20, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2))
    with pytest.raises(InputError, match="encoder-decoder T5ForConditionalGeneration"):
        DraftModelProposer(t5)
