"""Drafters beside the draft model: lossless in every setting, and worth their while where they should be."""

import pytest
import torch
from conftest import tiny_llama
from transformers import GPT2Config, GPT2LMHeadModel

from draftsmith.decode import (
    DraftModelProposer,
    ParallelDraftProposer,
    Tree,
    autoregressive_generate,
    speculative_generate,
)
from draftsmith.decode.counts import Counts
from draftsmith.decode.proposers.early_exit import early_exit
from draftsmith.decode.proposers.lookahead import LookaheadProposer
from draftsmith.decode.proposers.prompt_lookup import PromptLookupProposer
from draftsmith.decode.proposers.unigram import BlindProposer

PROPOSERS = {
    "lookup": lambda target: PromptLookupProposer(),
    "blind": lambda target: BlindProposer(),
    "lookahead": lambda target: LookaheadProposer(),
    "lookahead-long": lambda target: LookaheadProposer(ngram=5, guesses=2),
    "early-exit": lambda target: DraftModelProposer(early_exit(target, 2)),
    "parallel-draft": lambda target: parallel_draft(target),
    "parallel-tree": lambda target: parallel_draft(target, Tree.from_choices([(0,), (1,), (0, 0), (0, 1), (0, 0, 0)])),
    "layer-skip": lambda target: DraftModelProposer(early_exit(target, [0, 2, 3])),
}


def parallel_draft(target, tree=None):
    """An early exit that takes a token for its mask, and so drafts at random behind the first token."""
    draft = early_exit(target, 2)
    draft.config.pard_token = 96
    return ParallelDraftProposer(draft, tree)


every_proposer = pytest.mark.parametrize("name", PROPOSERS)


def prompt(seed: int, length: int = 7) -> torch.Tensor:
    """A prompt that repeats itself, so that there is something to look up."""
    half = torch.randint(1, 97, (1, -(-length // 2)), generator=torch.Generator().manual_seed(seed))
    return half.repeat(1, 2)[:, :length]


@pytest.fixture(scope="module")
def texts(deep):
    """Prompts and what plain decoding makes of them, which is what the library makes of them."""
    found = []
    for seed in (1, 2):
        ids = prompt(seed)
        plain = autoregressive_generate(deep, ids, max_new_tokens=30, do_sample=False).sequences
        library = deep.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, do_sample=False)
        assert torch.equal(plain, library)
        found.append((ids, plain))
    return found


@every_proposer
@pytest.mark.parametrize("draft_length", [1, 8])
def test_greedy_output_is_plain_decoding(deep, texts, name, draft_length):
    proposer = PROPOSERS[name](deep)
    for ids, plain in texts:
        out = speculative_generate(deep, proposer, ids, draft_length=draft_length, max_new_tokens=30, do_sample=False)
        assert torch.equal(out.sequences, plain)
        counts = out.counts
        assert counts.num_emitted_tokens == 30
        assert counts.num_drafts + counts.num_accepted_tokens in (30, 31)  # the last round may have no bonus
        assert len(counts.num_draft_tokens_per_pos) <= draft_length


@every_proposer
@pytest.mark.parametrize("new", [1, 4])
def test_length_limit_is_exact(deep, texts, name, new):
    ids, plain = texts[0]
    for do_sample in (False, True):
        out = speculative_generate(
            deep, PROPOSERS[name](deep), ids, draft_length=6, max_new_tokens=new, do_sample=do_sample
        )
        assert out.counts.num_emitted_tokens == new
        assert len(out.counts.num_draft_tokens_per_pos) <= new - 1
        assert do_sample or torch.equal(out.sequences, plain[:, : 7 + new])


@every_proposer
def test_end_of_sequence_ends_the_text(deep, texts, name):
    ids, full = texts[1]
    for end in (1, 2, 3, 5, 8, 13):
        eos = int(full[0, 7 + end])
        first = full[0, 7:].tolist().index(eos)
        out = speculative_generate(
            deep, PROPOSERS[name](deep), ids, draft_length=4, max_new_tokens=20, do_sample=False, eos_token_id=eos
        )
        assert torch.equal(out.sequences, full[:, : 7 + first + 1])
        assert out.counts.num_emitted_tokens == first + 1


@every_proposer
def test_rows_of_a_padded_batch_are_decoded_as_alone(deep, name):
    lengths = (1, 7, 4, 6)
    ids, mask = torch.zeros(4, 7, dtype=torch.long), torch.zeros(4, 7, dtype=torch.long)
    for row, n in enumerate(lengths):
        ids[row, 7 - n :], mask[row, 7 - n :] = prompt(row, n), 1
    # Rows end at different lengths: the end token is one that row 1 writes early.
    eos = int(autoregressive_generate(deep, prompt(1), max_new_tokens=6, do_sample=False).sequences[0, -1])
    proposer = PROPOSERS[name](deep)
    for do_sample in (False, True):
        kwargs = {"max_new_tokens": 14, "do_sample": do_sample, "eos_token_id": eos, "draft_length": 3}
        out = speculative_generate(deep, proposer, ids, attention_mask=mask, seed=5, **kwargs)
        for row, n in enumerate(lengths):
            alone = speculative_generate(deep, proposer, prompt(row, n), seed=5 + row, **kwargs)
            text = out.sequences[row, 7 - n :]
            assert torch.equal(text[: alone.sequences.shape[1]], alone.sequences[0])
            assert out.row_counts[row] == alone.counts
        assert sum(out.row_counts, Counts()) == out.counts


@every_proposer
def test_processors_change_nothing(deep, name):
    for options in ({"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2}):
        plain = autoregressive_generate(deep, prompt(3), max_new_tokens=20, do_sample=False, **options)
        out = speculative_generate(
            deep, PROPOSERS[name](deep), prompt(3), max_new_tokens=20, do_sample=False, **options
        )
        assert torch.equal(out.sequences, plain.sequences)


def stepping(step: int, size: int) -> torch.nn.Module:
    """A model that writes (x + step) mod size after x at T=0: its text repeats itself after `size` tokens."""
    model = tiny_llama(0, size)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    tokens = torch.arange(size)
    model.model.embed_tokens.weight.zero_()[tokens, tokens] = 1.0
    model.lm_head.weight.zero_()[(tokens + step) % size, tokens] = 1.0
    return model


@pytest.mark.parametrize("name", ["lookup", "lookahead", "lookahead-long"])
def test_a_looping_text_is_drafted_well(name):
    model, ids = stepping(7, 31), torch.tensor([[3]])
    out = speculative_generate(model, PROPOSERS[name](model), ids, draft_length=4, max_new_tokens=120, do_sample=False)
    assert out.sequences[0].tolist() == [(3 + 7 * i) % 31 for i in range(121)]
    assert out.counts.mean_acceptance_length() > 1.5, out.counts


def test_lookahead_learns_what_never_stood_in_the_text():
    """The window's N-grams are the target's own: they are accepted where those of prompt and output are not."""

    class TextAlone(LookaheadProposer):
        def commit(self, outcomes):
            self._rows[0].levels = [[0] * self._window] * (self._n - 1)

    model = stepping(7, 31)
    ids = torch.randperm(30, generator=torch.Generator().manual_seed(0))[None, :] + 1
    accepted = {}
    for proposer in (LookaheadProposer(), TextAlone()):
        out = speculative_generate(model, proposer, ids, draft_length=12, max_new_tokens=24, do_sample=False)
        assert out.sequences[0, 29:].tolist() == [(int(ids[0, -1]) + 7 * i) % 31 for i in range(25)]
        accepted[type(proposer)] = out.counts.num_accepted_tokens
    assert accepted[LookaheadProposer] >= 8 and accepted[TextAlone] <= 2, accepted


def test_early_exit_of_all_layers_is_always_accepted(deep):
    out = speculative_generate(
        deep, DraftModelProposer(early_exit(deep, 4)), prompt(0), draft_length=4, max_new_tokens=40, do_sample=False
    )
    assert out.counts == Counts(8, 32, 32, (8,) * 4, (8,) * 4, (8,) * 4, 40)


def test_layer_skip_drafts_what_a_model_of_those_layers_drafts(deep):
    """A layer at another's place in the cache would leave the output right and draft something else."""
    small = tiny_llama(0, layers=2)
    layers = deep.model.layers
    small.load_state_dict(deep.state_dict(), strict=False)
    for place, index in enumerate((0, 3)):
        small.model.layers[place].load_state_dict(layers[index].state_dict())
    kwargs = {"draft_length": 4, "max_new_tokens": 40, "do_sample": False}
    for seed in range(3):
        skip = speculative_generate(deep, DraftModelProposer(early_exit(deep, [0, 3])), prompt(seed), **kwargs)
        own = speculative_generate(deep, DraftModelProposer(small), prompt(seed), **kwargs)
        assert skip.counts == own.counts
        assert 0 < skip.counts.num_accepted_tokens < skip.counts.num_draft_tokens


def test_early_exit_works_beyond_llama():
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=97, n_embd=32, n_layer=3, n_head=4, n_positions=64, bos_token_id=None, eos_token_id=None
    )
    gpt2 = GPT2LMHeadModel(config).eval().requires_grad_(False)
    gpt2.transformer.wpe.weight.mul_(20)
    gpt2.generation_config.pad_token_id = 0
    plain = autoregressive_generate(gpt2, prompt(0), max_new_tokens=20, do_sample=False)
    out = speculative_generate(
        gpt2, DraftModelProposer(early_exit(gpt2, [0, 2])), prompt(0), max_new_tokens=20, do_sample=False
    )
    assert torch.equal(out.sequences, plain.sequences)
    assert out.counts.num_accepted_tokens > 0
