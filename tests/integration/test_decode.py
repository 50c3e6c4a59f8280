"""Speculative decoding against plain decoding and the library's own `generate`."""

from dataclasses import dataclass

import pytest
import torch
from conftest import perturbed, tiny_llama
from transformers import (
    MistralConfig,
    MistralForCausalLM,
    StoppingCriteria,
    StoppingCriteriaList,
    T5Config,
    T5ForConditionalGeneration,
)

from draftsmith.decode import (
    Counts,
    DraftModelProposer,
    InputError,
    Proposal,
    autoregressive_generate,
    speculative_decode,
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


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.3])
@pytest.mark.parametrize("draft_length", [1, 3, 8])
def test_greedy_output_is_plain_decoding(target, noise, draft_length):
    proposer = DraftModelProposer(perturbed(target, noise))
    for seed in range(2):
        ids = prompt(seed)
        plain = autoregressive_generate(target, ids, max_new_tokens=30, do_sample=False)
        out = speculative_generate(target, proposer, ids, draft_length=draft_length, max_new_tokens=30, do_sample=False)
        library = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, do_sample=False)
        assert torch.equal(out.sequences, plain.sequences)
        assert torch.equal(out.sequences, library)
        assert out.counts.num_emitted_tokens == 30
        assert plain.counts.mean_acceptance_length() == 1.0


def test_the_target_as_its_own_draft_is_always_accepted(target):
    """Traps 6 and 7: a draft cache that misses the last token, or rolls back too far, loses acceptance."""
    for do_sample in (False, True):
        out = speculative_generate(
            target, DraftModelProposer(target), prompt(0), draft_length=4, max_new_tokens=40, do_sample=do_sample
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


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.5},
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": [[5], [6], [7]]},
        {"min_new_tokens": 9},
    ],
)
def test_processors_see_the_tokens_drafted_before_them(target, draft, options):
    """Trap 15."""
    for seed in range(3):
        kwargs = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": 11, **options}
        plain = autoregressive_generate(target, prompt(seed), **kwargs)
        out = speculative_generate(target, DraftModelProposer(draft), prompt(seed), **kwargs)
        library = target.generate(prompt(seed), attention_mask=torch.ones(1, 7), **kwargs)
        assert torch.equal(out.sequences, plain.sequences)
        assert torch.equal(out.sequences, library)


def test_rows_of_a_padded_batch_are_decoded_as_alone(target, draft):
    lengths = (3, 7, 5)
    ids, mask = torch.zeros(3, 7, dtype=torch.long), torch.zeros(3, 7, dtype=torch.long)
    for row, n in enumerate(lengths):
        ids[row, 7 - n :], mask[row, 7 - n :] = prompt(row, n), 1
    proposer = DraftModelProposer(draft)
    for do_sample in (False, True):
        out = speculative_generate(
            target, proposer, ids, attention_mask=mask, max_new_tokens=12, do_sample=do_sample, seed=5
        )
        counts = Counts()
        for row, n in enumerate(lengths):
            alone = speculative_generate(
                target, proposer, prompt(row, n), max_new_tokens=12, do_sample=do_sample, seed=5 + row
            )
            assert torch.equal(out.sequences[row, 7 - n :], alone.sequences[0])
            counts += alone.counts
        assert out.counts == counts


def test_the_librarys_own_door(target, draft):
    ids = prompt(6)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 16, "do_sample": False}
    own = {"custom_generate": speculative_decode, "proposer": DraftModelProposer(draft), "draft_length": 3}
    out, plain = target.generate(ids, **options, **own), target.generate(ids, **options)
    assert torch.equal(out, plain)


@pytest.mark.parametrize(("target_size", "draft_size"), [(104, 97), (97, 104)])
def test_padded_vocabularies_are_aligned(target_size, draft_size):
    """Trap 10: heads padded to different widths, with the same tokens in them."""
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


def test_sliding_window_caches_roll_back_past_the_window():
    """Trap 12."""
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=64, sliding_window=8, pad_token_id=None, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    mistral = MistralForCausalLM(config).eval()
    with torch.no_grad():
        mistral.lm_head.weight.mul_(6)
    mistral.generation_config.pad_token_id = 0
    draft = MistralForCausalLM(config).eval()
    draft.load_state_dict(mistral.state_dict())
    with torch.no_grad():
        draft.lm_head.weight.add_(torch.randn_like(draft.lm_head.weight) * 0.02)
    for seed in range(3):
        library = mistral.generate(prompt(seed), attention_mask=torch.ones(1, 7), max_new_tokens=30, do_sample=False)
        out = speculative_generate(mistral, DraftModelProposer(draft), prompt(seed), max_new_tokens=30, do_sample=False)
        assert torch.equal(out.sequences, library)
        assert 0 < out.counts.draft_acceptance_rate() < 1


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
