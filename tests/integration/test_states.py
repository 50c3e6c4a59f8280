"""Targets and drafts with recurrent or convolution states: chains against `generate` and fresh forwards.

A fresh forward takes a text in chunks, whose float32 sums differ from the library's own steps, by up to 0.008 here.
"""

import pytest
import torch
from conftest import tiny_llama
from families import STATEFUL, VOCAB, ScriptedProposer, check, left_padded, noisy, tiny_model

from draftsmith.decode import (
    DraftModelProposer,
    InputError,
    RunAheadProposer,
    Tree,
    autoregressive_generate,
    speculative_generate,
)
from draftsmith.decode.cache import CachedModel, positions_of
from draftsmith.decode.cache.states import StateLayer
from draftsmith.decode.replay.texts import model_distributions
from draftsmith.decode.sampling import Sampler

GREEDY = {"max_new_tokens": 12, "do_sample": False}
APART = {"nemotron-h": 2e-2}
"""Logits of single steps and of whole texts differ by 2e-4 at most in float32, by 1e-13 in float64 throughout. But in
the library a step of Nemotron-H has no `time_step_min`, which a whole text has: that is 1e-2 in float64 too."""
every_state = pytest.mark.parametrize("name", STATEFUL)


def prompts(*lengths: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, VOCAB, (length,), generator=generator) for length in lengths]


@every_state
def test_texts_counts_and_replay_are_the_librarys(name):
    """None, one and all drafts accepted, and a noisy copy as the draft model; alone and in a batch."""
    assert check(tiny_model(name)) is None


@every_state
def test_blocks_return_to_any_accepted_token(name):
    """Rows keep different numbers of tokens, some rows end, and feeding goes on from tokens kept rounds ago."""
    model, texts = tiny_model(name), prompts(7, 3, 1, 5)
    cached = CachedModel(model, len(texts), max_length=64, block=5)
    cached.prefill_texts(texts)
    generator = torch.Generator().manual_seed(1)
    for round in range(6):
        blocks = torch.randint(3, VOCAB, (len(texts), 5), generator=generator)
        blocks[:, 0] = torch.stack([text[-1] for text in texts])
        logits = cached.feed(blocks, [len(text) - 1 for text in texts])
        for row, text in enumerate(texts):
            expected = model(torch.cat([text, blocks[row, 1:]])[None], use_cache=False).logits[0, -5:]
            torch.testing.assert_close(logits[row], expected, atol=APART.get(name, 1e-3), rtol=0)
        # All, none or some stand, and a correction follows.
        kept = torch.randint(0, 5, (len(texts),), generator=generator).tolist()
        texts = [
            torch.cat([text, block[1 : 1 + n], block[:1]]) for text, block, n in zip(texts, blocks, kept, strict=True)
        ]
        if round == 3:
            cached.select([0, 2, 3])
            texts = [texts[0], *texts[2:]]


@pytest.mark.parametrize("name", ["qwen3-5", "lfm2"])
def test_a_block_that_is_fed_again_keeps_no_more_states(name):
    """As where forwards are timed after a long prompt, whose own states are too late for the longest rollback."""
    model, (text,) = tiny_model(name), prompts(20)
    cached = CachedModel(model, 1, max_length=64, block=5)
    cached.prefill_texts([text])
    for _ in range(4):
        cached.feed(torch.cat([text[-1:], *prompts(4)])[None], [19])
        for layer in cached._states:
            assert len(layer._ends) == 1 + 5 == len(next(iter(layer._kept.values())))


@every_state
def test_distributions_in_blocks_are_those_of_whole_texts(name):
    """Certificates read texts in blocks; some families continue a cache by a single token alone, or have another."""
    distributions, (first, second) = model_distributions(tiny_model(name), Sampler.of(1.0)), prompts(20, 20)
    texts = torch.stack([first, second])
    wanted = torch.ones_like(texts, dtype=torch.bool)
    (whole,) = distributions(texts, wanted, 100)
    torch.testing.assert_close(torch.cat(list(distributions(texts, wanted, 3))), whole, atol=1e-5, rtol=0)


@every_state
def test_saved_rows_go_on_elsewhere(name):
    model, (first, second) = tiny_model(name), prompts(7, 4)
    cached = CachedModel(model, 2, max_length=32)
    cached.prefill_texts([first, second])
    other = CachedModel(model, 3, max_length=32)
    other.restore([cached.saved(1, 3), [], cached.saved(0, 6)])
    logits = other.feed(torch.stack([second[-1:], first[:1], first[-1:]]), [3, 0, 6])
    for row, text in enumerate([second, first[:1], first]):
        expected = model(text[None], use_cache=False).logits[0, -1]
        torch.testing.assert_close(logits[row, 0], expected, atol=APART.get(name, 1e-3), rtol=0)


@pytest.mark.parametrize("name", ["qwen3-5", "mamba2", "lfm2"])
def test_rows_are_refilled(name):
    model, texts = tiny_model(name), prompts(6, 3, 9, 3, 1)
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": list(range(20, 40))}
    out = autoregressive_generate(model, **left_padded(texts), rows=2, **options)
    for text, row, counts in zip(texts, out.sequences, out.row_counts, strict=True):
        written = row[9 - len(text) :][: len(text) + counts.num_emitted_tokens]
        assert torch.equal(written, model.generate(text[None], **options)[0])


def test_a_draft_with_states_runs_ahead():
    target = tiny_model("qwen3-5")
    (text,) = prompts(6)
    proposer = RunAheadProposer(noisy(target))
    out = speculative_generate(target, proposer, text[None], draft_length=3, max_new_tokens=40, do_sample=False)
    assert torch.equal(out.sequences, target.generate(text[None], max_new_tokens=40, do_sample=False))
    assert 0 < proposer.num_used < proposer.num_ahead


def test_weights_are_read_once_a_block(monkeypatch):
    """A gated delta net steps through its recurrence alone."""
    model, texts, read = tiny_model("qwen3-5"), prompts(5), []
    cached = CachedModel(model, 1, max_length=32, block=4)
    cached.prefill_texts(texts)
    block = torch.cat([texts[0][-1:], *prompts(3)])[None]
    cached.feed(block, [4])  # the first block shows which products depend on no state
    linear = torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *args: read.append(args[1].data_ptr()) or linear(*args))
    again = cached.feed(block, [4])
    mixer = model.model.layers[0].linear_attn
    for part in (mixer.in_proj_qkv, mixer.in_proj_z, mixer.in_proj_b, mixer.in_proj_a, mixer.out_proj):
        assert read.count(part.weight.data_ptr()) == 1
    monkeypatch.undo()
    expected = model(torch.cat([texts[0], block[0, 1:]])[None], use_cache=False).logits[:, -4:]
    torch.testing.assert_close(again, expected, atol=1e-4, rtol=0)


def test_trees_are_refused_in_one_line():
    model = tiny_model("qwen3-5")
    with pytest.raises(InputError, match="tree: expected a chain, found a tree, which Qwen3_5"):
        DraftModelProposer(model, Tree.from_choices([(0,), (1,)]))
    proposer = DraftModelProposer(tiny_llama(0, vocab_size=VOCAB), Tree.from_choices([(0,), (1,)]))
    with pytest.raises(InputError, match="drafts: expected chains, found a tree, which Qwen3_5"):
        speculative_generate(model, proposer, prompts(4)[0][None], **GREEDY)


@pytest.mark.parametrize("name", ["bloom", "mpt"])
def test_biases_by_slots_are_the_librarys_in_chains(name):
    """ALiBi counts slots; in a chain, and in no tree, a slot is a position."""
    model = tiny_model(name)
    assert check(model) is None
    with pytest.raises(InputError, match=f"tree: expected a chain, found a tree, which {type(model).__name__}"):
        DraftModelProposer(model, Tree.from_choices([(0,), (1,)]))
    # One row ends with MPT's positions while the other's block is longer.
    del model.config.max_position_embeddings
    assert positions_of(model.config) == (128 if name == "mpt" else None)
    texts, options = prompts(118, 100), {"max_new_tokens": 10, "do_sample": False}
    out = speculative_generate(model, DraftModelProposer(model), **left_padded(texts), draft_length=3, **options)
    for text, row in zip(texts, out.sequences, strict=True):
        assert torch.equal(row[118 - len(text) :], model.generate(text[None], **options)[0])


def test_a_state_that_was_not_kept_ends_the_run(monkeypatch):
    """As where a mixer is not recognised: no text is written from a wrong state."""
    monkeypatch.setattr("draftsmith.decode.cache.stepwise.recurrent_mixers", lambda model: [])
    model, (text,) = tiny_model("qwen3-5"), prompts(5)
    plain = model.generate(text[None], **GREEDY)
    message = r"layer 0 of qwen3_5_text: expected a recurrent state after each of 6 tokens, found 5 missing, .*training"
    with pytest.raises(InputError, match=message):
        speculative_generate(model, ScriptedProposer(plain, 1), text[None], draft_length=4, **GREEDY)


def test_a_state_of_an_unknown_shape_ends_the_run(monkeypatch):
    model, (text,), keep = tiny_model("qwen3-5"), prompts(5), StateLayer._keep
    monkeypatch.setattr(StateLayer, "_keep", lambda self, state, states: keep(self, state, states.repeat(2, 1, 1, 1)))
    with pytest.raises(InputError, match=r"layer 0 of qwen3_5_text: expected a .* state of shape \(1, .*found one of"):
        autoregressive_generate(model, text[None], **GREEDY)


@pytest.mark.parametrize("number", [None, 1, 9])
def test_a_mixer_without_a_layer_of_states_ends_the_run(number):
    """Layer 1 has attention alone."""
    model = tiny_model("qwen3-5")
    mixer = model.model.layers[0].linear_attn
    mixer.layer_idx = number
    if number is None:
        del mixer.layer_idx
    with pytest.raises(
        InputError, match=f"GatedDeltaNet: expected the number of a layer with a state in layer_idx, found {number}"
    ):
        autoregressive_generate(model, prompts(5)[0][None], **GREEDY)


@pytest.mark.parametrize("name", ["qwen3-5", "granite-hybrid"])
def test_a_family_without_its_states_decodes_as_any_other(name):
    """As a draft that was carved from attention alone."""
    model = tiny_model(name, layer_types=["full_attention" if name == "qwen3-5" else "attention"] * 2)
    assert check(model) is None
