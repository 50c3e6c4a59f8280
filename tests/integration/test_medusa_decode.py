"""Medusa and Hydra heads as drafters: what they draft from, and that what comes out is the target's."""

import copy
from functools import lru_cache
from typing import Any

import pytest
import torch
from conftest import tiny_llama
from families import FAMILIES, VOCAB, tiny_model
from integration.test_families import build, left_padded, prompts
from torch import Tensor
from trained_heads import own_texts, train_heads
from transformers import PreTrainedModel

from draftsmith.decode import Cascade, DecodeOutput, InputError, Threshold, Tree, Typical, speculative_generate
from draftsmith.decode.proposers.base import DraftTask
from draftsmith.decode.sampling import Sampler
from draftsmith.medusa import MedusaHeads, MedusaProposer
from draftsmith.train.losses.output_head import last_hidden

NEW = 14
LENGTHS = (3, 11, 6)
SHAPES = {
    "chain": None,
    "tree": Tree.from_choices([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0)]),
    # As large as those that Medusa searches.
    "64 nodes": Tree.from_accuracies([[0.5, 0.2, 0.1, 0.08, 0.04], [0.4, 0.2, 0.1, 0.08], [0.3, 0.2, 0.1]], 64),
}
GREEDY = {"max_new_tokens": NEW, "do_sample": False, "draft_length": 3}
SAMPLED = {"max_new_tokens": NEW, "do_sample": True, "top_k": 0, "draft_length": 3}
PENALISED = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2}
KEPT = torch.arange(1, VOCAB, 2)
KINDS = {
    "medusa": {},
    "shared": {"original_lm_head": True, "num_hidden_layers": 2, "medusa_fc_bias": True},
    "hydra": {"hydra": True},
    "truncated": {"token_map": KEPT},
}
NAMES = ("llama", "qwen3", "gemma2", "gpt2", "phi")
every_family = pytest.mark.parametrize("name", NAMES)
every_shape = pytest.mark.parametrize("shape", SHAPES)


@lru_cache
def target_of(name: str) -> PreTrainedModel:
    """A family's random model; Phi's head has a bias that says something, Gemma 2 caps logits, GPT-2's head is tied."""
    model = build(name)
    if name == "phi":
        bias = model.get_output_embeddings().bias
        bias.copy_(torch.randn(len(bias), generator=torch.Generator().manual_seed(1)))
    return model


@lru_cache
def plain(name: str, penalised: bool = False) -> list[Tensor]:
    """What the library writes behind the prompts, each alone."""
    options = {"max_new_tokens": NEW, "do_sample": False} | (PENALISED if penalised else {})
    return own_texts(target_of(name), prompts(*LENGTHS), **options)


@lru_cache
def trained(name: str, kind: str = "medusa") -> MedusaHeads:
    """Heads that know some of what the target says behind the prompts, at T=0 and drawn."""
    target = target_of(name)
    drawn = own_texts(
        target, prompts(*LENGTHS), do_sample=True, top_k=0, max_new_tokens=2 * NEW, num_return_sequences=6
    )
    heads = MedusaHeads.of_target(target, 3, **KINDS[kind])
    return train_heads(target, heads, [*plain(name), *plain(name, True), *drawn])


def speculate(
    name: str, proposer: MedusaProposer, rows: list[int], **options: Any
) -> tuple[list[Tensor], DecodeOutput]:
    """Decode some rows of the batch, each with the seed that it has there; their texts without the padding."""
    batch = left_padded([prompts(*LENGTHS)[row] for row in rows])
    out = speculative_generate(target_of(name), proposer, **batch, seed=5 + rows[0], **options)
    padding = (batch["attention_mask"] == 0).sum(1).tolist()
    return [
        text[pad:][: LENGTHS[row] + counts.num_emitted_tokens]
        for text, pad, row, counts in zip(out.sequences, padding, rows, out.row_counts, strict=True)
    ], out


# Neither processors nor the size of a tree are a family's matter.
@pytest.mark.parametrize(
    ("name", "kind", "shape", "penalised"),
    [
        *((name, kind, shape, False) for name in NAMES for kind, shape in (("medusa", "chain"), ("hydra", "tree"))),
        *(("llama", kind, "64 nodes", False) for kind in ("medusa", "hydra")),
        *(("llama", kind, "tree", True) for kind in ("medusa", "hydra")),
    ],
)
def test_texts_at_t0_are_the_librarys(name, kind, penalised, shape):
    proposer = MedusaProposer(trained(name, kind), SHAPES[shape])
    options = GREEDY | (PENALISED if penalised else {})
    texts, out = speculate(name, proposer, [0, 1, 2], **options)
    for text, expected in zip(texts, plain(name, penalised), strict=True):
        assert torch.equal(text, expected)
    (alone,), own = speculate(name, proposer, [1], **options)
    assert torch.equal(alone, texts[1]) and own.counts == out.row_counts[1]
    assert out.departure is None
    assert 0 < out.counts.num_accepted_tokens < out.counts.num_draft_tokens
    assert len(out.counts.num_accepted_tokens_per_pos) == 3
    if shape != "chain":
        assert out.counts.num_draft_tokens > sum(out.counts.num_draft_tokens_per_pos)


@pytest.mark.parametrize(("kind", "shape"), [("medusa", "chain"), *((kind, "tree") for kind in KINDS)])
def test_draws_of_a_row_are_those_it_has_alone(kind, shape):
    proposer = MedusaProposer(trained("llama", kind), SHAPES[shape])
    for options in (SAMPLED | PENALISED, SAMPLED | {"temperature": 0.7, "top_p": 0.9}):
        texts, out = speculate("llama", proposer, [0, 1, 2], **options)
        for row in (0, 2):
            (alone,), own = speculate("llama", proposer, [row], **options)
            assert torch.equal(texts[row], alone) and out.row_counts[row] == own.counts
        assert 0 < out.counts.num_accepted_tokens < out.counts.num_draft_tokens
        assert out.counts.num_emitted_tokens == 3 * NEW


class Watched(MedusaProposer):
    """Compares what it drafts from with one fresh forward of each text, and its laws with the formula.

    `moved` counts accepted paths that did not lie in the block's first slots, `partial` those that were not whole.
    """

    rounds = moved = partial = 0

    def start(self, task: DraftTask) -> int:
        self.target = task.target
        return super().start(task)

    @torch.inference_mode()
    def propose(self, contexts, draft_lengths):
        for row, context in enumerate(contexts):
            if self._hidden is None:
                continue
            own = self._hidden[row]
            # The text's last token was not fed yet: heads draft from the state of the one before.
            fresh = last_hidden(self.target, input_ids=context[None, :-1])[0, -1]
            torch.testing.assert_close(own, fresh, atol=1e-4 * float(fresh.abs().max()), rtol=0)
            self.rounds += 1
        drafts = super().propose(contexts, draft_lengths)
        for row, (context, draft) in enumerate(zip(contexts, drafts, strict=True)):
            if self._hidden is not None:
                self._check_laws(context, self._hidden[row], draft.dense(VOCAB))
        self._drafts = drafts
        return drafts

    def _check_laws(self, context, hidden, draft):
        tree, sampler = draft.tree, self._task.sampler
        for node, parent in enumerate(tree.parents):
            index = tree.depths[node] - 1
            text = torch.cat([context, draft.tokens[tree.path(parent)]])
            embeddings = self.target.get_input_embeddings()(text[-(index + 1) :])
            q = sampler.scores(self.heads.logits(index, hidden, embeddings)[None], [text]).softmax(-1)[0]
            siblings = tree.children[parent + 1]
            if draft.probabilities is None:
                # Up to what sums in another order differ by: the most likely tokens, in their order.
                least = q.topk(len(siblings)).values[siblings.index(node)]
                torch.testing.assert_close(q[draft.tokens[node]], least, atol=1e-5, rtol=1e-4)
                continue
            q = q.index_fill(0, draft.tokens[[s for s in siblings if s < node]], 0.0)
            q = q / q.sum()
            torch.testing.assert_close(draft.probabilities[node], q, atol=1e-5, rtol=1e-3)
            assert q[draft.tokens[node]] > 0

    def commit(self, outcomes):
        super().commit(outcomes)
        for outcome, draft in zip(outcomes, self._drafts, strict=True):
            self.moved += outcome.path != list(range(len(outcome.path)))
            self.partial += 0 < len(outcome.path) < draft.tree.depth


def check_hidden_states(name: str, kind: str, shape: str, **options: Any) -> None:
    """Ragged rows, one of which ends early: each round of each row is compared."""
    watched = Watched(trained(name, kind), SHAPES[shape])
    # What row 1 says as its eighth token ends the texts.
    end = int(plain(name)[1][LENGTHS[1] + 7])
    rows = set()
    select = watched.select

    def selected(kept):
        rows.add(len(kept))
        select(kept)

    watched.select = selected
    for do_sample in (False, True):
        drawn = {"top_k": 0, "temperature": 0.7} if do_sample else {}
        speculate(
            name, watched, [0, 1, 2], **(GREEDY | {"do_sample": do_sample, "eos_token_id": end} | drawn | options)
        )
    assert min(rows) < 3
    assert watched.rounds >= 5 and watched.partial > 0
    assert shape == "chain" or watched.moved > 0


@pytest.mark.parametrize(("kind", "shape"), [("medusa", "chain"), ("hydra", "tree")])
@every_family
def test_heads_draft_from_a_fresh_forwards_hidden_states(name, kind, shape):
    check_hidden_states(name, kind, shape)


def test_processors_see_the_path_before_each_node():
    check_hidden_states("llama", "medusa", "tree", **PENALISED)
    check_hidden_states("llama", "hydra", "tree", **PENALISED)


@pytest.mark.usefixtures("untraced")
def test_compiled_forwards_change_nothing():
    """With layers of both kinds, of which the other families have one."""
    name = "gemma2"
    proposer = MedusaProposer(trained(name), SHAPES["tree"])
    texts, out = speculate(name, proposer, [0, 1, 2], compiled=True, **GREEDY)
    for text, expected in zip(texts, plain(name), strict=True):
        assert torch.equal(text, expected)
    assert out.row_counts == speculate(name, proposer, [0, 1, 2], **GREEDY)[1].row_counts


@pytest.mark.parametrize("name", FAMILIES)
def test_the_heads_input_is_the_last_hidden_state(name):
    """Decoding takes it from the head itself, training from the decoder."""
    model, ids = tiny_model(name), prompts(11)[0][None]
    seen = []
    hook = model.get_output_embeddings().register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(ids)
    hook.remove()
    torch.testing.assert_close(last_hidden(model, input_ids=ids), seen[0])


def root_alone(self, outcomes):
    """A plant: the state of the block's first token, whatever was accepted."""
    self._hidden = torch.stack([outcome.hidden[0] for outcome in outcomes])


def one_before(self, outcomes):
    """A plant: the state of the node before the last accepted one."""
    self._hidden = torch.stack([o.hidden[o.path[-1] if o.path else 0] for o in outcomes])


def by_length(self, outcomes):
    """A plant: as if an accepted path lay in the block's first slots."""
    self._hidden = torch.stack([outcome.hidden[len(outcome.path)] for outcome in outcomes])


@pytest.mark.parametrize("plant", [root_alone, one_before, by_length])
def test_other_hidden_states_are_found_out(monkeypatch, plant):
    monkeypatch.setattr(MedusaProposer, "commit", plant)
    with pytest.raises(AssertionError, match="not close"):
        check_hidden_states("llama", "medusa", "tree")


def test_states_of_other_rows_are_found_out(monkeypatch):
    def select(self, rows):
        self._hidden = self._hidden[: len(rows)]
        self._generators = [self._generators[row] for row in rows]

    monkeypatch.setattr(MedusaProposer, "select", select)
    with pytest.raises(AssertionError, match="not close"):
        check_hidden_states("llama", "medusa", "tree")


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("kind", ["medusa", "hydra", "truncated"])
def test_texts_end_where_they_end(kind, shape):
    target, proposer = target_of("llama"), MedusaProposer(trained("llama", kind), SHAPES[shape])
    text = prompts(*LENGTHS)[0][None]
    for new in (1, 2, 3, 4):
        for do_sample in (False, True):
            options = {"max_new_tokens": new, "do_sample": do_sample, "draft_length": 3}
            out = speculative_generate(target, proposer, text, **options)
            assert out.counts.num_emitted_tokens == new
            # Nothing in the first round, and nothing that the limit leaves no room for.
            assert len(out.counts.num_draft_tokens_per_pos) <= max(0, new - 2)
            if not do_sample:
                assert torch.equal(out.sequences[0], plain("llama")[0][: LENGTHS[0] + new])
    inside = 0
    full, n = plain("llama")[0], LENGTHS[0]
    for end in range(1, NEW):  # each token in turn ends the text: at every place of a block
        eos = int(full[n + end])
        first = full[n:].tolist().index(eos)
        out = speculative_generate(target, proposer, text, **GREEDY, eos_token_id=eos)
        assert torch.equal(out.sequences[0], full[: n + first + 1])
        assert out.counts.num_emitted_tokens == first + 1
        # Where an accepted token ends the text, the round has no token after it.
        inside += out.counts.num_emitted_tokens < out.counts.num_drafts + out.counts.num_accepted_tokens
    assert inside > 0


@every_shape
@pytest.mark.parametrize("draft_length", [1, 2, 8, None])
def test_trees_are_cut_to_the_draft_length(draft_length, shape):
    proposer = MedusaProposer(trained("llama"), SHAPES[shape])
    texts, out = speculate("llama", proposer, [0, 1, 2], **(GREEDY | {"draft_length": draft_length}))
    for text, expected in zip(texts, plain("llama"), strict=True):
        assert torch.equal(text, expected)
    deepest = 3 if draft_length is None else min(3, draft_length)
    assert len(out.counts.num_draft_tokens_per_pos) <= deepest
    if draft_length is not None:
        tree, _ = proposer.tree.pruned(deepest)
        assert len(out.counts.num_draft_tokens_per_pos) == deepest
        assert 0 < out.counts.num_draft_tokens <= len(tree) * out.counts.num_drafts


RULES = {"threshold": Threshold(0.05), "typical": Typical(), "cascade": Cascade(0.2)}


@pytest.mark.parametrize(("kind", "shape"), [("medusa", "chain"), ("hydra", "tree")])
@pytest.mark.parametrize("rule", RULES)
def test_lossy_rules_say_how_far_they_depart(kind, shape, rule):
    proposer = MedusaProposer(trained("llama", kind), SHAPES[shape])
    texts, out = speculate("llama", proposer, [0, 1, 2], rule=RULES[rule], **GREEDY)
    wrong = 0  # tokens that one fresh forward of the whole text would not have said
    for text, n in zip(texts, LENGTHS, strict=True):
        wrong += int((target_of("llama")(text[None, :-1]).logits[0, n - 1 :].argmax(-1) != text[n:]).sum())
    assert out.departure.num_tokens == out.counts.num_emitted_tokens == 3 * NEW
    assert out.departure.disagreements == out.departure.total_variation == wrong > 0
    texts, out = speculate("llama", proposer, [0, 1, 2], rule=RULES[rule], **SAMPLED)
    assert out.counts.num_accepted_tokens > 0 and out.departure.num_tokens == 3 * NEW
    # Candidates are there for certain, none is drawn: each departs by 1 − p(x), what the target draws by nothing.
    expected = 0.0
    for row, (text, n) in enumerate(zip(texts, LENGTHS, strict=True)):
        (alone,), own = speculate("llama", proposer, [row], rule=RULES[rule], **SAMPLED)
        assert torch.equal(text, alone) and len(text) == n + NEW
        expected += own.departure.total_variation
    assert 0 < out.departure.total_variation == pytest.approx(expected, rel=1e-5)
    assert out.departure.disagreements == 0


@every_shape
def test_a_truncated_vocabulary_is_all_that_is_drafted(shape):
    class Seen(MedusaProposer):
        tokens: set[int]

        def propose(self, contexts, draft_lengths):
            drafts = super().propose(contexts, draft_lengths)
            for draft in drafts:
                self.tokens |= set(draft.tokens.tolist())
                q = draft.dense(VOCAB).probabilities
                if q is not None:
                    assert q.shape[1:] == (VOCAB,) and not q[:, ::2].any()
            return drafts

    proposer = Seen(trained("llama", "truncated"), SHAPES[shape])
    proposer.tokens = set()
    texts, out = speculate("llama", proposer, [0, 1, 2], **GREEDY)
    for text, expected in zip(texts, plain("llama"), strict=True):
        assert torch.equal(text, expected)
    assert 0 < out.counts.num_accepted_tokens < out.counts.num_draft_tokens
    sampled, _ = speculate("llama", proposer, [0, 1, 2], **SAMPLED)
    assert len(proposer.tokens) > 1 and proposer.tokens <= set(KEPT.tolist())
    # The target says the others still.
    assert set(torch.cat(texts + sampled).tolist()) - set(KEPT.tolist())


def test_heads_in_half_precision_draft_for_a_target_in_float32():
    heads = copy.deepcopy(trained("llama", "hydra")).to(torch.bfloat16)
    texts, out = speculate("llama", MedusaProposer(heads, SHAPES["tree"]), [0, 1, 2], **GREEDY)
    for text, expected in zip(texts, plain("llama"), strict=True):
        assert torch.equal(text, expected)
    assert 0 < out.counts.num_accepted_tokens < out.counts.num_draft_tokens


def test_reloaded_heads_draft_the_tree_of_their_config(tmp_path):
    heads = copy.deepcopy(trained("llama"))
    choices = [[0], [1], [0, 0], [0, 0, 0]]
    heads.config.medusa_choices = choices
    heads.save_pretrained(tmp_path)
    proposer = MedusaProposer(MedusaHeads.from_pretrained(tmp_path))
    assert proposer.tree == Tree.from_choices(choices)
    _, out = speculate("llama", proposer, [0, 1, 2], **GREEDY)
    _, own = speculate("llama", MedusaProposer(trained("llama"), Tree.from_choices(choices)), [0, 1, 2], **GREEDY)
    assert out.row_counts == own.row_counts


def test_what_does_not_fit_is_refused_in_one_line():
    heads = trained("llama")
    text = prompts(5)[0][None]
    for tree, depth in ((Tree.chain(4), 4), (Tree.chain(0), 0)):
        with pytest.raises(InputError) as error:
            MedusaProposer(heads, tree)
        assert str(error.value) == f"tree: expected a depth between 1 and the 3 heads, found {depth}"
    for target, message in (
        (tiny_llama(0, VOCAB, hidden=64), "medusa: expected heads with the target's hidden_size 64, found 32"),
        (tiny_llama(0, 97), "medusa: expected heads with the target's vocab_size 97, found 64"),
    ):
        with pytest.raises(InputError) as error:
            speculative_generate(target, MedusaProposer(heads), text, max_new_tokens=4)
        assert str(error.value) == message
    few = MedusaHeads.of_target(target_of("llama"), 1, token_map=torch.tensor([4, 9]))
    with pytest.raises(InputError) as error:
        proposer = MedusaProposer(few, Tree.from_choices([(0,), (1,), (2,)]))
        speculative_generate(target_of("llama"), proposer, text, max_new_tokens=4)
    assert str(error.value) == "tree: expected at most 2 siblings, as many as the heads have tokens, found 3"
    with pytest.raises(InputError) as error:
        MedusaProposer(heads).start(DraftTask(Sampler.of(1.0), VOCAB, [None], 32, 3, True, False))
    assert str(error.value) == "medusa: expected the target that the heads were trained on, found none"
