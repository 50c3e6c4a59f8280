"""Medusa and Hydra heads on targets of several families, with the states and trees that only they have."""

import pytest
import torch
from conftest import tiny_llama
from families import FAMILIES, VOCAB, tiny_model
from integration.test_families import build, left_padded, prompts
from specimens import medusa

from draftsmith.decode import InputError, Tree, replay_acceptance, speculative_generate
from draftsmith.decode.proposers.base import DraftTask
from draftsmith.decode.sampling import Sampler
from draftsmith.medusa import MedusaHeads, MedusaProposer
from draftsmith.train.losses.output_head import last_hidden

NEW = 14
LENGTHS = (3, 11, 6)
TREE = Tree.from_choices([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0)])
# As large as those that Medusa searches.
LARGE = Tree.from_accuracies([[0.5, 0.2, 0.1, 0.08, 0.04], [0.4, 0.2, 0.1, 0.08], [0.3, 0.2, 0.1]], 64)
GREEDY = {"max_new_tokens": NEW, "do_sample": False}


@pytest.fixture(scope="module")
def llama():
    return build("llama")


class Watched(MedusaProposer):
    """Compares the states that it drafts from with fresh forwards: those of the token before the text's last."""

    @torch.inference_mode()
    def propose(self, contexts, draft_lengths):
        for context, hidden in zip(contexts, contexts if self._hidden is None else self._hidden, strict=True):
            if hidden is not context:
                fresh = last_hidden(self._task.target, input_ids=context[None, :-1])[0, -1]
                torch.testing.assert_close(hidden, fresh, atol=1e-4 * float(fresh.abs().max()), rtol=0)
        return super().propose(contexts, draft_lengths)


@pytest.mark.parametrize("tree", [None, TREE, LARGE], ids=["chain", "tree", "64 nodes"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gpt2", "phi"])
def test_texts_are_the_librarys_and_replay_counts_what_the_decoder_counts(name, tree):
    """Replay takes the heads' states from fresh forwards. Gemma 2 caps logits, and GPT-2's head is tied."""
    target = build(name)
    if name == "phi":  # a bias that says something
        bias = target.get_output_embeddings().bias
        bias.copy_(torch.randn(len(bias), generator=torch.Generator().manual_seed(1)))
    heads = medusa(target, hydra=tree is TREE)
    proposer, texts = Watched(heads, tree), prompts(*LENGTHS)
    plain = [target.generate(text[None], **GREEDY)[0] for text in texts]
    options = GREEDY | {"eos_token_id": int(plain[0][LENGTHS[0] + 2])}  # the first row leaves its place to others
    out = speculative_generate(target, proposer, **left_padded(texts), draft_length=3, **options)
    written = [
        row[max(LENGTHS) - n :][: n + counts.num_emitted_tokens]
        for row, n, counts in zip(out.sequences, LENGTHS, out.row_counts, strict=True)
    ]
    assert len(written[0]) - LENGTHS[0] <= 3 < max(counts.num_emitted_tokens for counts in out.row_counts[1:])
    for own, row in zip(plain, written, strict=True):
        assert torch.equal(row, own[: len(row)])
    replay = replay_acceptance(target, proposer, written, LENGTHS, [3], 0, max_new_tokens=NEW)
    accepted = [(text.counts[3].num_drafts, text.counts[3].num_accepted_tokens) for text in replay.texts]
    assert accepted == [(counts.num_drafts, counts.num_accepted_tokens) for counts in out.row_counts]
    assert name not in ("llama", "qwen3") or 0 < out.counts.num_accepted_tokens < out.counts.num_draft_tokens


@pytest.mark.parametrize("name", FAMILIES)
def test_the_heads_input_is_the_last_hidden_state(name):
    """Decoding takes it from the head itself, training from the decoder."""
    model, ids = tiny_model(name), prompts(11)[0][None]
    seen = []
    hook = model.get_output_embeddings().register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(ids)
    hook.remove()
    torch.testing.assert_close(last_hidden(model, input_ids=ids), seen[0])


@pytest.mark.parametrize("tree", [None, TREE, LARGE], ids=["chain", "tree", "64 nodes"])
@pytest.mark.parametrize("draft_length", [1, 2, 8, None])
def test_trees_are_cut_to_the_draft_length(llama, draft_length, tree):
    proposer = MedusaProposer(medusa(llama), tree)
    out = speculative_generate(llama, proposer, **left_padded(prompts(*LENGTHS)), draft_length=draft_length, **GREEDY)
    deepest = 3 if draft_length is None else min(3, draft_length)
    assert len(out.counts.num_draft_tokens_per_pos) <= deepest
    if draft_length is not None:
        cut, _ = proposer.tree.pruned(deepest)
        assert len(out.counts.num_draft_tokens_per_pos) == deepest
        assert 0 < out.counts.num_draft_tokens <= len(cut) * out.counts.num_drafts


def test_reloaded_heads_draft_the_tree_of_their_config(llama, tmp_path):
    heads, choices = medusa(llama), [[0], [1], [0, 0], [0, 0, 0]]
    heads.config.medusa_choices = choices
    heads.save_pretrained(tmp_path)
    proposer = MedusaProposer(MedusaHeads.from_pretrained(tmp_path))
    assert proposer.tree == Tree.from_choices(choices)
    options = left_padded(prompts(*LENGTHS)) | GREEDY | {"draft_length": 3}
    own = speculative_generate(llama, MedusaProposer(heads, Tree.from_choices(choices)), **options)
    assert speculative_generate(llama, proposer, **options).row_counts == own.row_counts


def test_what_does_not_fit_is_refused_in_one_line(llama):
    heads, text = medusa(llama), prompts(5)[0][None]
    few = MedusaHeads.of_target(llama, 1, token_map=torch.tensor([4, 9]))
    siblings, narrow = Tree.from_choices([(0,), (1,), (2,)]), tiny_llama(0, VOCAB, hidden=64)
    alone = DraftTask(Sampler.of(1.0), VOCAB, [None], 32, 3, True, False)
    for work, said in (
        (lambda: MedusaProposer(heads, Tree.chain(4)), "tree: expected a depth between 1 and the 3 heads, found 4"),
        (lambda: MedusaProposer(heads, Tree.chain(0)), "tree: expected a depth between 1 and the 3 heads, found 0"),
        (
            lambda: speculative_generate(narrow, MedusaProposer(heads), text, max_new_tokens=4),
            "medusa: expected heads with the target's hidden_size 64, found 32",
        ),
        (
            lambda: speculative_generate(tiny_llama(0, 97), MedusaProposer(heads), text, max_new_tokens=4),
            "medusa: expected heads with the target's vocab_size 97, found 64",
        ),
        (
            lambda: speculative_generate(llama, MedusaProposer(few, siblings), text, max_new_tokens=4),
            "tree: expected at most 2 siblings, as many as the heads have tokens, found 3",
        ),
        (
            lambda: MedusaProposer(heads).start(alone),
            "medusa: expected the target that the heads were trained on, found none",
        ),
    ):
        with pytest.raises(InputError) as error:
            work()
        assert str(error.value) == said
