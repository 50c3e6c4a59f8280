"""Mistakes that other decoders made. Each has a check that the decoder passes, and fails with the mistake planted.

Mistakes are planted in the decoder's own source, by replacing a piece of a function's text, so that a check that no
longer looks at the code in question is found out.
"""
# ruff: noqa: E501 (a plant is a line)

import inspect
import re
import sys
import textwrap
from collections import Counter

import pytest
import torch
from conftest import perturbed, tiny_llama
from scipy.stats import chisquare
from transformers import (
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from draftsmith.decode import (
    Counts,
    DraftModelProposer,
    DynamicTree,
    InputError,
    Proposal,
    Tree,
    acceptance,
    autoregressive_generate,
    cache,
    generation,
    rules,
    sampling,
    speculative,
    speculative_generate,
    tree,
)
from draftsmith.decode import counts as counts_module
from draftsmith.decode.measurement import exactness as audit
from draftsmith.decode.measurement import repetition as text
from draftsmith.decode.proposers import draft_model
from draftsmith.decode.proposers.base import Task
from draftsmith.decode.sampling import Sampler
from draftsmith.scripts.measure import build as report
from draftsmith.scripts.measure.side_by_side import Group, Row
from draftsmith.train import models
from draftsmith.train.tokenizer import train_bpe

VOCAB, EOS = 97, 5
TREE = Tree.from_choices([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
PROMPT = torch.tensor([[3, 1, 4, 1, 5, 9]])
SAMPLING = Sampler.of(1.0)


def target_of(**options) -> torch.nn.Module:
    return tiny_llama(0, **options)


def decoded(target, proposer, prompt=PROMPT, new=24, draft_length=3, **options):
    options = {"do_sample": False, "top_k": 0} | options
    return speculative_generate(target, proposer, prompt, draft_length=draft_length, max_new_tokens=new, **options)


def same_text(target, proposer, prompt=PROMPT, new=24, **options) -> None:
    """At T=0 the text is the library's own."""
    own = {k: v for k, v in options.items() if k != "draft_length"}
    plain = target.generate(prompt, max_new_tokens=new, do_sample=False, attention_mask=torch.ones_like(prompt), **own)
    assert torch.equal(decoded(target, proposer, prompt, new, **options).sequences, plain)


def drafts_of(proposer, sampler: Sampler, context: torch.Tensor, count: int = 1, depth: int = 3) -> list[Proposal]:
    """Drafts of rows that all have the same text, each with its own seed."""
    generators = [torch.Generator().manual_seed(i) for i in range(count)]
    proposer.start(Task(sampler, VOCAB, generators, 64, depth, True, False))
    with torch.inference_mode():
        return proposer.propose([context] * count, [depth] * count)


def check_q_is_what_was_drawn_from(sampler: Sampler = SAMPLING) -> None:
    draft = perturbed(tiny_llama(0), 0.05)
    context = PROMPT[0]
    drafts = drafts_of(DraftModelProposer(draft), sampler, context, count=600, depth=2)
    with torch.no_grad():
        for d in drafts[:5]:
            logits = draft(torch.cat([context, d.tokens])[None]).logits[0, len(context) - 1 : -1]
            contexts = [torch.cat([context, d.tokens[:i]]) for i in range(len(d.tokens))]
            assert torch.allclose(d.probabilities, sampler.probabilities(logits, contexts), atol=1e-5)
    # The first tokens are draws from it: the false alarm of this chi-square is 1e-4.
    q, seen = drafts[0].probabilities[0], Counter(int(d.tokens[0]) for d in drafts)
    assert all(q[token] > 0 for token in seen)
    common = [v for v in range(VOCAB) if q[v] * len(drafts) >= 5]
    expected = [float(q[v]) * len(drafts) for v in common]
    observed = [seen[v] for v in common]
    expected.append(len(drafts) - sum(expected))
    observed.append(len(drafts) - sum(observed))
    if expected[-1] < 1:
        expected, observed = expected[:-1], observed[:-1]
    scale = sum(observed) / sum(expected)
    assert chisquare(observed, [e * scale for e in expected]).pvalue > 1e-4


def check_p_and_q_are_warped_alike() -> None:
    """With the target as its own draft p = q, so that everything is accepted, whatever the warping."""
    target = target_of(scale=2.0)
    out = decoded(target, DraftModelProposer(target), do_sample=True, temperature=0.7, top_k=20, top_p=0.8)
    assert out.counts.num_accepted_tokens == out.counts.num_draft_tokens > 0
    check_q_is_what_was_drawn_from(Sampler.of(0.7, 20, 0.8))


def check_the_residual() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2, 0.0]), torch.tensor([0.1, 0.6, 0.1, 0.2])
    before = p.clone()
    rest = acceptance.residual(p, q, torch.tensor(1))
    assert torch.allclose(rest / rest.sum(), torch.tensor([0.8, 0.0, 0.2, 0.0]))
    assert torch.equal(p, before)
    equal = acceptance.residual(p, p.clone(), torch.tensor(1))
    assert equal.isfinite().all() and equal.sum() > 0


def check_zero_probability_is_never_accepted() -> None:
    """The target rules the drafted token out, and the random number is exactly 0."""
    p = torch.tensor([[0.0, 1.0], [0.5, 0.5]])
    q, drafted = torch.tensor([[1.0, 0.0]]), torch.tensor([0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "rand", lambda *size, dtype=None, **_: torch.zeros(*size, dtype=dtype))
        path, token = acceptance.accept_exact(p, q, drafted, Tree.chain(1))
    assert path == [] and int(token) == 1


def check_t_0_is_the_argmax() -> None:
    """Two logits that differ in the last bits: sampling from their softmax would take either half of the time."""
    logits = torch.zeros(1, VOCAB)
    logits[0, 7], logits[0, 8] = 50.0, 50.0 - 1e-5
    sampler = Sampler.of(0.0)
    assert all(int(sampler.choose(logits, [])) == 7 for _ in range(40))
    assert torch.equal(sampler.probabilities(logits, []).argmax(-1), torch.tensor([7]))
    assert float(sampler.probabilities(logits, []).max()) == 1.0
    same_text(target_of(scale=0.3), DraftModelProposer(target_of(scale=0.3)))


def check_the_draft_remembers_all_it_drafted() -> None:
    """The target as its own draft at T=0: after full acceptance the next draft must be as good."""
    target = target_of()
    out = decoded(target, DraftModelProposer(target), new=25, draft_length=4)
    assert out.counts.num_accepted_tokens == out.counts.num_draft_tokens == 20
    drawn = decoded(target, DraftModelProposer(target), new=25, draft_length=4, do_sample=True)
    assert drawn.counts.num_accepted_tokens == drawn.counts.num_draft_tokens == 20


def check_every_round(target, draft, shape: Tree | DynamicTree | None = None, **options) -> set[int]:
    """Each round's logits and laws are those of fresh forwards of the text and of each node's path, alone.

    Returns how many drafted tokens were accepted in a round, over the rounds.
    """
    accepted = set()

    class Watched(DraftModelProposer):
        def propose(self, contexts, draft_lengths):
            self.drafts = super().propose(contexts, draft_lengths)
            self.contexts = [c.clone() for c in contexts]
            return self.drafts

        def commit(self, outcomes):
            super().commit(outcomes)
            (context,), (d,), (outcome,) = self.contexts, self.drafts, outcomes
            for node in range(-1, len(d.tree)):
                alone = torch.cat([context, d.tokens[d.tree.path(node)]])[None]
                assert torch.allclose(outcome.logits[node + 1], target(alone).logits[0, -1], atol=1e-4)
                if node < 0:
                    continue
                q = draft(alone[:, :-1]).logits[0, -1].softmax(-1)
                if d.confidence is not None:
                    assert torch.allclose(d.confidence[node], q.max(), atol=1e-5)
                if d.probabilities is not None:  # drawn without replacement: without the earlier siblings
                    siblings = d.tree.children[d.tree.parents[node] + 1]
                    q = q.index_fill(0, d.tokens[[n for n in siblings if n < node]], 0.0)
                    assert torch.allclose(d.probabilities[node], q / q.sum(), atol=1e-4)
            accepted.add(len(outcome.path))

    decoded(target, Watched(draft, tree=shape), **options)
    return accepted


def check_both_caches_after_every_round() -> None:
    target = target_of()
    # Rounds that dropped all of the draft, and rounds that kept all of it.
    assert {0, 3} <= check_every_round(target, perturbed(target, 0.2), new=40, do_sample=True)
    assert {0, 3} <= check_every_round(target, perturbed(target, 0.2), TREE, new=40, do_sample=True)


def check_blocks_end_where_the_text_ends() -> None:
    target = target_of()
    for proposer in (DraftModelProposer(perturbed(target, 0.5)), DraftModelProposer(target)):
        for new in range(1, 8):
            same_text(target, proposer, new=new, draft_length=4)
    plain = target.generate(PROMPT, max_new_tokens=24, do_sample=False, attention_mask=torch.ones_like(PROMPT))
    for place in range(8, 14):  # each token in turn ends the text: at every place of a block
        same_text(target, DraftModelProposer(target), eos_token_id=int(plain[0, place]), draft_length=4)


def check_the_first_draft_is_verified() -> None:
    """Under sampling: the target is certain of another token."""
    one_hot = torch.eye(4)
    path, token = acceptance.accept_exact(one_hot[[2, 3]], one_hot[[1]], torch.tensor([1]), Tree.chain(1))
    assert path == [] and int(token) == 2


def check_the_counts() -> None:
    """By hand: the target as its own draft, γ = 4, 12 tokens; then the 8th of them ends the text."""
    target = target_of()
    plain = autoregressive_generate(target, PROMPT, max_new_tokens=12, do_sample=False).sequences[0, 6:].tolist()
    whole = decoded(target, DraftModelProposer(target), new=12, draft_length=4).counts
    # Rounds of 4 + 1 tokens, 4 + 1, and what the limit leaves: 1 drafted + 1.
    assert (whole.num_drafts, whole.num_draft_tokens, whole.num_accepted_tokens) == (3, 9, 9)
    assert whole.num_emitted_tokens == 12 and whole.draft_acceptance_rate() == 1.0
    assert whole.num_accepted_tokens_per_pos == (3, 2, 2, 2)
    end = next(i for i in range(7, 12) if plain[i] not in plain[:i])
    ended = decoded(target, DraftModelProposer(target), new=12, draft_length=4, eos_token_id=plain[end]).counts
    in_last = (end + 1) % 5  # tokens of the round that the end cuts
    assert in_last
    assert ended.num_emitted_tokens == end + 1
    assert ended.num_drafts == (end + 1) // 5 + 1
    assert ended.num_accepted_tokens == ended.num_draft_tokens == 4 * ((end + 1) // 5) + in_last


def check_padded_vocabularies() -> None:
    """A head that is padded where its padding is most likely, one that is narrower, and a tokenizer of equal size."""
    target = target_of()
    wide = perturbed(target, 0.02)
    wide.resize_token_embeddings(VOCAB + 31, mean_resizing=False)
    with torch.no_grad():
        wide.lm_head.weight[VOCAB:] = 10 * wide.lm_head.weight[:31]
    narrow = tiny_llama(0, VOCAB - 10)
    for draft in (wide, narrow):
        for d in drafts_of(DraftModelProposer(draft), Sampler.of(1.0), PROMPT[0], count=20):
            assert d.probabilities.shape[1] == VOCAB
            assert torch.allclose(d.probabilities.sum(-1), torch.ones(3))
            assert not d.probabilities[:, VOCAB - 10 :].any() or draft is wide
        # Where the draft is narrower, the target's further entries are padding and never come up.
        same_text(target, DraftModelProposer(draft), suppress_tokens=list(range(VOCAB - 10, VOCAB)))
    one, other = (train_bpe([f"{word} {word}s are {word}"], 262) for word in ("def", "xyz"))
    assert len(one) == len(other)
    with pytest.raises(InputError, match="expected the tokenizer of target"):
        models.check_same_tokenizer(one, other, "a", "b")


def check_rows_of_a_batch() -> None:
    """Rows of unequal prompts and acceptance, one of which ends early, are each what they are alone."""
    target = target_of()
    proposer = DraftModelProposer(perturbed(target, 0.05))
    prompts = [PROMPT[0], torch.tensor([7, 7, 2]), torch.tensor([11, 30, 2, 8])]
    ids = torch.stack([torch.nn.functional.pad(p, (6 - len(p), 0)) for p in prompts])
    mask = torch.stack([torch.arange(6) >= 6 - len(p) for p in prompts]).long()
    first = autoregressive_generate(target, prompts[1][None], max_new_tokens=4, do_sample=False).sequences[0, -1]
    options = {"eos_token_id": int(first), "new": 30}
    rows = []
    hook = target.register_forward_pre_hook(
        lambda _, args, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    try:
        out = decoded(target, proposer, ids, attention_mask=mask, **options)
    finally:
        hook.remove()
    assert rows[-1] < 3 and rows == sorted(rows, reverse=True)  # a row that has ended is fed no longer
    for i, prompt in enumerate(prompts):
        alone = decoded(target, proposer, prompt[None], **options)
        assert out.row_counts[i] == alone.counts
        length = alone.sequences.shape[1]
        assert torch.equal(out.sequences[i, 6 - len(prompt) :][:length], alone.sequences[0])
    # Under sampling each row keeps its own random numbers when the first has ended.
    end = int(decoded(target, proposer, prompts[0][None], new=6, do_sample=True).sequences[0, -1])
    options = {"eos_token_id": end, "new": 30, "do_sample": True}
    drawn = decoded(target, proposer, ids, attention_mask=mask, **options)
    assert drawn.row_counts[0].num_drafts < drawn.row_counts[1].num_drafts
    for i, prompt in enumerate(prompts):
        alone = decoded(target, proposer, prompt[None], seed=i, **options).sequences[0]
        assert torch.equal(drawn.sequences[i, 6 - len(prompt) :][: len(alone)], alone)


def sliding_target(window: int) -> MistralForCausalLM:
    torch.manual_seed(3)
    config = MistralConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=64, sliding_window=window, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    target = MistralForCausalLM(config).eval()
    with torch.no_grad():
        target.lm_head.weight.mul_(6)
    target.generation_config.pad_token_id = 0
    return target


def check_sliding_windows() -> None:
    target = sliding_target(6)
    for shape in (None, TREE):
        same_text(target, DraftModelProposer(target, tree=shape), new=30)
        check_every_round(target, target, shape, new=15)
    # A window narrower than the tree is deep, on a branch whose slots are not its positions.
    target = sliding_target(2)
    check_every_round(target, target, Tree.from_choices([(0,), (1,), (1, 0), (1, 0, 0)]), new=15)
    state_space = MambaForCausalLM(MambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1))
    with pytest.raises(InputError, match="MambaForCausalLM, whose recurrent state cannot drop"):
        DraftModelProposer(state_space)


def check_float_ties() -> None:
    """bfloat16 texts may part at near-ties; a decoder that is wrong parts elsewhere, and the margin says so.

    Each token has a twin whose row of the head differs in one bit, so that near-ties are everywhere.
    """
    target = tiny_llama(1, hidden=128).to(torch.bfloat16)
    weight = target.lm_head.weight
    with torch.no_grad():
        for v in range(48):
            weight[v + 48] = weight[v]
            weight[v + 48, v] *= 1 + torch.finfo(torch.bfloat16).eps
        weight[96] = 0.0  # has no twin, and is never the argmax
    for seed in range(3):
        prompt = torch.randint(96, (1, 6), generator=torch.Generator().manual_seed(seed))
        plain = autoregressive_generate(target, prompt, max_new_tokens=32, do_sample=False).sequences[0]
        found = decoded(target, DraftModelProposer(target), prompt, new=32, draft_length=4).sequences[0]
        divergence = audit.first_mismatch(target, plain, found, 6)
        assert divergence is None or divergence.is_tie, divergence
        # One that is wrong: the twin is a tie, the least likely token is not.
        twin, wrong = plain.clone(), plain.clone()
        twin[9], wrong[9] = (plain[9] + 48) % 96, target(plain[None, :9]).logits[0, -1].argmin()
        assert audit.first_mismatch(target, plain, twin, 6).is_tie
        assert not audit.first_mismatch(target, plain, wrong, 6).is_tie
    for dtype in (torch.float32, torch.float64):
        exact = target_of().to(dtype)
        same_text(exact, DraftModelProposer(exact, tree=TREE), draft_length=4)


def check_trees() -> None:
    """Position = depth, and attention to ancestors alone: each node's logits are those of its path by itself."""
    target = target_of()
    draft = perturbed(target, 0.1)
    check_every_round(target, draft, TREE, new=12)
    check_every_round(target, draft, TREE, new=12, do_sample=True)
    check_every_round(target, draft, DynamicTree(2, 6), new=12)
    same_text(target, DraftModelProposer(draft, tree=TREE))


def check_siblings_are_tried_against_the_residual() -> None:
    """The law of the emitted token over 4 tokens and 2 siblings, by 3,000 draws: false alarm 1e-6."""
    p, q = torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0.4, 0.3, 0.2, 0.1])
    generator, seen = torch.Generator().manual_seed(0), Counter()
    shape = Tree.from_choices([(0,), (1,)])
    distributions = p.expand(3, 4).contiguous()
    for _ in range(3000):
        first = sampling.draw(q, generator)
        rest = q.scatter(0, first, 0.0)
        rest = rest / rest.sum()
        drafted = torch.cat([first, sampling.draw(rest, generator)])
        path, token = acceptance.accept_exact(distributions, torch.stack([q, rest]), drafted, shape, generator)
        seen[int(drafted[path[0]]) if path else int(token)] += 1
    assert chisquare([seen[v] for v in range(4)], (p.double() / p.double().sum() * 3000).numpy()).pvalue > 1e-6


def check_processors_see_the_drafted_tokens() -> None:
    target = target_of(scale=2.0)
    for shape in (None, TREE):
        proposer = DraftModelProposer(perturbed(target, 0.02), tree=shape)
        same_text(target, proposer, new=40, repetition_penalty=1.5)
        same_text(target, proposer, new=40, no_repeat_ngram_size=2)


def check_loops_are_reported() -> None:
    loop, fresh = [1, 2, 3] * 20, list(range(60))
    assert text.repeated_ngram_share(loop) == pytest.approx(54 / 57)
    assert text.repeated_ngram_share(fresh) == 0
    seen = [Group([Row(i, ids, Counts())], seconds=1.0) for i, ids in enumerate((loop, fresh))]
    assert report._repeated(seen) == pytest.approx(54 / 114)


CHECKS = {
    1: check_q_is_what_was_drawn_from,
    2: check_p_and_q_are_warped_alike,
    3: check_the_residual,
    4: check_zero_probability_is_never_accepted,
    5: check_t_0_is_the_argmax,
    6: check_the_draft_remembers_all_it_drafted,
    7: check_both_caches_after_every_round,
    8: lambda: (check_blocks_end_where_the_text_ends(), check_the_first_draft_is_verified()),
    9: check_the_counts,
    10: check_padded_vocabularies,
    11: check_rows_of_a_batch,
    12: check_sliding_windows,
    13: check_float_ties,
    14: lambda: (check_trees(), check_siblings_are_tried_against_the_residual()),
    15: check_processors_see_the_drafted_tokens,
    16: check_loops_are_reported,
}

# trap, function whose source is changed, what is replaced, by what
PLANTS = [
    (1, draft_model.DraftModelProposer._chains, "distributions[row].append(q[row])", "distributions[row].append(logits[row].div(1.5).softmax(-1))"),
    (1, draft_model.DraftModelProposer._chains, "token = draw(q[row], self._generators[row])", "token = q[row].argmax(-1, keepdim=True)"),
    (1, draft_model.DraftModelProposer._chains, "scores.softmax(-1)", "scores.bfloat16().softmax(-1).float()"),
    (2, draft_model.DraftModelProposer._chains, "scores = sampler.scores(logits, texts)", "scores = logits"),
    (2, rules.Exact.verify, "p = sampler.probabilities(logits, contexts)", "p = logits.softmax(-1)"),
    (3, acceptance.residual, "(p - q).clamp(min=0.0)", "(p - q).softmax(-1)"),
    (3, acceptance.residual, "(p - q).clamp(min=0.0)", "p.sub_(q).clamp_(min=0.0)"),
    (3, acceptance.residual, "rest if bool(rest.any()) else p", "rest / rest.sum()"),
    (4, acceptance.accept_exact, "q_x[child] < weight", "q_x[child] <= weight"),
    (5, sampling.Sampler.choose, "self.scores(logits_KV, contexts).argmax(-1)", "self.scores(logits_KV, contexts).softmax(-1).multinomial(1)[:, 0]"),
    (5, sampling.Sampler.probabilities, "if self.do_sample:", "if True:"),
    (6, draft_model.DraftModelProposer.commit, "slots = slots[: slots.index(-1)] if -1 in slots else slots", "pass"),
    (6, draft_model.DraftModelProposer._feed_texts, "context[-lacking:]", "context[-1:]"),
    (7, draft_model.DraftModelProposer.commit, "+ len(slots)", "+ len(slots) + 1"),
    (7, draft_model.DraftModelProposer.commit, "+ len(slots)", "+ len(self._fed[row]) - 1"),
    (7, speculative._verify, "starts = [row.length - 1 for row in rows]", "starts = [row.length for row in rows]"),
    (8, acceptance.accept_greedy, "path: list[int] = []\n    node = ROOT", "path: list[int] = [0] if drafted else []\n    node = path[-1] if path else ROOT"),
    (8, generation.decode_rows, "config.max_length - pad", "config.max_length - pad + 1"),
    (8, generation.Row.emit, "end >= self.limits.max_length or token in self.limits.eos", "end >= self.limits.max_length or tokens[-1] in self.limits.eos"),
    (9, counts_module.Counts.of_round, "num_accepted_tokens=accepted,", "num_accepted_tokens=emitted,"),
    (9, speculative._decode, "accepted = min(len(verdict.path), emitted)", "accepted = len(verdict.path)"),
    (9, speculative._decode, "depth = draft.tree.depth if emitted > accepted else emitted", "depth = draft.tree.depth"),
    (9, speculative._decode, "min(gamma, row.room - 1)", "gamma"),
    (10, sampling.align_vocabulary, "return logits[..., :vocab_size]", "return logits"),
    (10, sampling.align_vocabulary, 'value=float("-inf")', "value=0.0"),
    (10, models.check_same_tokenizer, "if p == q:", "if len(p) == len(q):"),
    (11, speculative._verify, "starts = [row.length - 1 for row in rows]", "starts = [rows[0].length - 1 for row in rows]"),
    (11, speculative._decode, "target.select(left)", "pass"),
    (11, draft_model.DraftModelProposer.select, "self._cached = [self._cached[row] for row in rows]", "pass"),
    (12, cache.CachedModel._mask, "allowed & near", "allowed"),
    (12, cache.check_model, "if model._is_stateful:", "if False:"),
    (13, speculative._decode, "p_logits = logits[i, : len(draft.tokens) + 1]", "p_logits = logits[i, : len(draft.tokens) + 1].roll(1, 0)"),
    (14, tree.Tree.visible.func, "visible[node + 1] |= visible[parent + 1]", "visible[node + 1, : node + 2] = True"),
    (14, speculative._verify, "depths[i, 1:size] = torch.tensor(draft.tree.depths)", "depths[i, 1:size] = torch.arange(1, size)"),
    (14, acceptance.accept_exact, "rest = residual(rest,", "rest = residual(p[node + 1],"),
    (14, acceptance.accept_exact, "p_x[child] if i == 0 else float(rest[token])", "p_x[child]"),
    (15, speculative._contexts, "torch.cat([row.context, draft.tokens[path]]) if path else row.context", "row.context"),
    (15, speculative._decode, "[] if sampler.context_free else _contexts(row, draft)", "[row.context] * len(p_logits)"),
    (16, text.count_repeated_ngrams, "len(ngrams) - len(set(ngrams))", "0"),
    (2, draft_model.DraftModelProposer._chains, "sampler.scores(logits, texts)", "type(sampler)(type(sampler.processors)(list(sampler.processors)[::-1]), sampler.do_sample).scores(logits, texts)"),
    (8, acceptance.accept_exact, "path: list[int] = []\n    node = ROOT", "path: list[int] = [0] if len(drafted) else []\n    node = path[-1] if path else ROOT"),
    (11, draft_model.DraftModelProposer._feed_texts, "length - lacking for length in lengths], keep", "max(lengths) - lacking for length in lengths], keep"),
    (11, draft_model.DraftModelProposer.select, "self._generators = [self._generators[row] for row in rows]", "pass"),
    (12, cache.CachedModel._mask, "- self._positions[:, None, :width]", "- slots"),
    (13, audit.first_mismatch, "TIE_ULPS * torch", "1e9 * torch"),
    (14, sampling.draw_without_replacement, "q_V = q_V.scatter(0, token, 0.0)", "q_V = q_V + 0"),
    (14, sampling.draw_without_replacement, "distributions[sibling] = token[0], q_V", "distributions[sibling] = token[0], distributions[0] if sibling else q_V"),
    (14, draft_model.DraftModelProposer._feed_nodes, "depth - 1 - behind", "0"),
    (14, draft_model.DraftModelProposer._static_trees, "tree.visible[node + 1] for node", "torch.ones(size + 1, dtype=torch.bool) for node"),
    (14, draft_model.DraftModelProposer._dynamic_trees, "visible[row, f, [slots[row][n] for n in _path(parents[row], node)]] = True", "visible[row, f] = True"),
    (14, cache.CachedModel.keep_path, "if list(path) == list(range(1, len(path) + 1)):", "if True:"),
    (15, speculative._contexts, "draft.tree.path(node)", "list(range(node + 1))"),
]  # fmt: skip


@pytest.mark.parametrize("trap", CHECKS)
def test_the_decoder_does_not_fall_in(trap):
    CHECKS[trap]()


def planted(function, old: str, new: str):
    """Compile a function again with a piece of its text replaced, in the module that it belongs to."""
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) >= 1, f"{function.__qualname__} no longer says {old!r}"
    source = re.sub(r"^@.*\n", "", source.replace(old, new), flags=re.MULTILINE)
    module = sys.modules[function.__module__]
    scope: dict = {}
    exec(compile(source, f"<planted {function.__qualname__}>", "exec"), vars(module), scope)
    (changed,) = scope.values()
    return changed


@pytest.mark.parametrize(
    ("trap", "function", "old", "new"), PLANTS, ids=[f"{p[0]}: {p[3].strip()[:60]}" for p in PLANTS]
)
def test_a_planted_mistake_is_found(monkeypatch, trap, function, old, new):
    changed = planted(function, old, new)
    module = sys.modules[function.__module__]
    owner, _, name = function.__qualname__.rpartition(".")
    if owner:
        cls = getattr(module, owner)
        original = inspect.getattr_static(cls, name)
        wrapped = changed
        if isinstance(original, classmethod):
            wrapped = classmethod(changed)
        elif name in ("visible",):
            wrapped = property(changed)
        monkeypatch.setattr(cls, name, wrapped)
    else:
        for other in list(sys.modules.values()):  # wherever it was imported to
            if getattr(other, "__name__", "").startswith("draftsmith") and vars(other).get(name) is function:
                monkeypatch.setattr(other, name, changed)
    with pytest.raises((AssertionError, pytest.fail.Exception, RuntimeError, IndexError, ValueError)):
        CHECKS[trap]()


def test_every_trap_has_a_check_and_a_plant():
    assert set(CHECKS) == {p[0] for p in PLANTS} == set(range(1, 17))
