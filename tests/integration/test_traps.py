"""Mistakes that other decoders made. Each has a check that the decoder passes and that fails with the mistake planted.

A check takes the parts that it decodes with, so that a mistake can be planted as a part with an error.
"""
# ruff: noqa: E501 (a mistake is a line)

from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch
from conftest import perturbed, tiny_llama
from families import tiny_model
from scipy.stats import chisquare
from transformers import LogitsProcessorList, MambaConfig, MambaForCausalLM, MistralConfig, MistralForCausalLM

from draftsmith.decode import (
    Counts,
    DraftModelProposer,
    DynamicTree,
    Exact,
    InputError,
    Proposal,
    Tree,
    autoregressive_generate,
    cache,
    generation,
    repetition,
    sampling,
    speculative_generate,
)
from draftsmith.decode.measurement import exactness
from draftsmith.decode.proposers import draft_model, draft_tree, feeder
from draftsmith.decode.proposers.base import DraftTask
from draftsmith.decode.rules import Rule, acceptance, verification
from draftsmith.decode.rules.verification import Verdict
from draftsmith.decode.sampling import Sampler
from draftsmith.scripts.measure.estimates import Observation
from draftsmith.scripts.measure.state import Group, Row
from draftsmith.train import models
from draftsmith.train.data.corpus import train_bpe

VOCAB = 97
CHOICES = [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]
PROMPT = torch.tensor([[3, 1, 4, 1, 5, 9]])
SAMPLING = Sampler.of(1.0)


@dataclass(frozen=True)
class Parts:
    """What a check decodes with."""

    proposer: type[DraftModelProposer] = DraftModelProposer
    rule: Rule = Exact()  # noqa: RUF009
    tree: type[Tree] = Tree


def target_of(**options) -> torch.nn.Module:
    return tiny_llama(0, **options)


def decoded(parts, target, proposer, prompt=PROMPT, new=24, draft_length=3, **options):
    options = {"do_sample": False, "top_k": 0} | options
    options |= {"draft_length": draft_length, "max_new_tokens": new, "rule": parts.rule}
    return speculative_generate(target, proposer, prompt, **options)


def same_text(parts, target, proposer, prompt=PROMPT, new=24, **options) -> None:
    """At T=0 the text is the library's own."""
    plain = target.generate(
        prompt, max_new_tokens=new, do_sample=False, attention_mask=torch.ones_like(prompt),
        **{k: v for k, v in options.items() if k != "draft_length"},
    )  # fmt: skip
    assert torch.equal(decoded(parts, target, proposer, prompt, new, **options).sequences, plain)


def drafts_of(proposer, sampler: Sampler, context: torch.Tensor, count: int = 1, depth: int = 3) -> list[Proposal]:
    """Drafts of rows that all have the same text, each with its own seed."""
    generators = [torch.Generator().manual_seed(i) for i in range(count)]
    proposer.start(DraftTask(sampler, VOCAB, generators, 64, depth, True, False))
    with torch.inference_mode():
        return proposer.propose([context] * count, [depth] * count)


def check_q_is_what_was_drawn_from(parts, sampler: Sampler = SAMPLING) -> None:
    draft = perturbed(tiny_llama(0), 0.05)
    context = PROMPT[0]
    drafts = drafts_of(parts.proposer(draft), sampler, context, count=600, depth=2)
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


def check_p_and_q_are_warped_alike(parts) -> None:
    """With the target as its own draft p = q, so that everything is accepted, whatever the warping."""
    target = target_of(scale=2.0)
    out = decoded(parts, target, parts.proposer(target), do_sample=True, temperature=0.7, top_k=20, top_p=0.8)
    assert out.counts.num_accepted_tokens == out.counts.num_draft_tokens > 0
    check_q_is_what_was_drawn_from(parts, Sampler.of(0.7, 20, 0.8))


def check_the_residual(parts) -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2, 0.0]), torch.tensor([0.1, 0.6, 0.1, 0.2])
    before = p.clone()
    rest = acceptance.residual(p, q, torch.tensor(1))
    assert torch.allclose(rest / rest.sum(), torch.tensor([0.8, 0.0, 0.2, 0.0]))
    assert torch.equal(p, before)
    equal = acceptance.residual(p, p.clone(), torch.tensor(1))
    assert equal.isfinite().all() and equal.sum() > 0


def check_zero_probability_is_never_accepted(parts) -> None:
    """The target rules the drafted token out, and the random number is exactly 0."""
    p = torch.tensor([[0.0, 1.0], [0.5, 0.5]])
    q, drafted = torch.tensor([[1.0, 0.0]]), torch.tensor([0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "rand", lambda *size, dtype=None, **_: torch.zeros(*size, dtype=dtype))
        path, token = acceptance.accept_exact(p, q, drafted, Tree.chain(1))
    assert path == [] and int(token) == 1


def check_t_0_is_the_argmax(parts) -> None:
    """Two logits that differ in the last bits: sampling from their softmax would take either half of the time."""
    logits = torch.zeros(1, VOCAB)
    logits[0, 7], logits[0, 8] = 50.0, 50.0 - 1e-5
    sampler = Sampler(LogitsProcessorList(), do_sample=False)
    assert all(int(verification.argmax(logits)) == 7 for _ in range(40))
    assert torch.equal(sampler.probabilities(logits, []).argmax(-1), torch.tensor([7]))
    assert float(sampler.probabilities(logits, []).max()) == 1.0
    same_text(parts, target_of(scale=0.3), parts.proposer(target_of(scale=0.3)))


def check_the_draft_remembers_all_it_drafted(parts) -> None:
    """The target as its own draft at T=0: after full acceptance the next draft must be as good."""
    target = target_of()
    out = decoded(parts, target, parts.proposer(target), new=25, draft_length=4)
    assert out.counts.num_accepted_tokens == out.counts.num_draft_tokens == 20
    drawn = decoded(parts, target, parts.proposer(target), new=25, draft_length=4, do_sample=True)
    assert drawn.counts.num_accepted_tokens == drawn.counts.num_draft_tokens == 20


def check_every_round(parts, target, draft, shape: Tree | DynamicTree | None = None, **options) -> set[int]:
    """Each round's logits and laws are those of fresh forwards of the text and of each node's path, alone.

    Returns how many drafted tokens were accepted in a round, over the rounds.
    """
    accepted = set()

    class Watched(parts.proposer):
        def propose(self, contexts, draft_lengths):
            self.drafts = super().propose(contexts, draft_lengths)
            self.contexts = [c.clone() for c in contexts]
            return self.drafts

        def commit(self, outcomes):
            super().commit(outcomes)
            (context,), (d,), (outcome,) = self.contexts, [d.dense(VOCAB) for d in self.drafts], outcomes
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
                    assert d.probabilities[node, d.tokens[node]] > 0
            accepted.add(len(outcome.path))

    decoded(parts, target, Watched(draft, tree=shape), **options)
    return accepted


def check_both_caches_after_every_round(parts) -> None:
    target = target_of()
    # Rounds that dropped all of the draft, and rounds that kept all of it.
    assert {0, 3} <= check_every_round(parts, target, perturbed(target, 0.2), new=40, do_sample=True)
    assert {0, 3} <= check_every_round(
        parts, target, perturbed(target, 0.2), parts.tree.from_choices(CHOICES), new=40, do_sample=True
    )


def check_blocks_end_where_the_text_ends(parts) -> None:
    target = target_of()
    for proposer in (parts.proposer(perturbed(target, 0.5)), parts.proposer(target)):
        for new in range(1, 8):
            same_text(parts, target, proposer, new=new, draft_length=4)
    plain = target.generate(PROMPT, max_new_tokens=24, do_sample=False, attention_mask=torch.ones_like(PROMPT))
    for place in range(8, 14):  # each token in turn ends the text: at every place of a block
        same_text(parts, target, parts.proposer(target), eos_token_id=int(plain[0, place]), draft_length=4)
    # Under sampling: the target is certain of another token than the first drafted one.
    one_hot = torch.eye(4).log()
    draft = Proposal(torch.tensor([1]), torch.eye(4)[[1]], Tree.chain(1))
    verdict = parts.rule.verify(SAMPLING, one_hot[[2, 3]], [], draft, None)
    assert (verdict.path, verdict.token) == ([], 2)


def check_the_counts(parts) -> None:
    """By hand: the target as its own draft, γ = 4, 12 tokens; then the 8th of them ends the text."""
    target = target_of()
    plain = autoregressive_generate(target, PROMPT, max_new_tokens=12, do_sample=False).sequences[0, 6:].tolist()
    whole = decoded(parts, target, parts.proposer(target), new=12, draft_length=4).counts
    # Rounds of 4 + 1 tokens, 4 + 1, and what the limit leaves: 1 drafted + 1.
    assert (whole.num_drafts, whole.num_draft_tokens, whole.num_accepted_tokens) == (3, 9, 9)
    assert whole.num_emitted_tokens == 12 and whole.draft_acceptance_rate() == 1.0
    assert whole.num_accepted_tokens_per_pos == (3, 2, 2, 2)
    end = next(i for i in range(7, 12) if plain[i] not in plain[:i])
    ended = decoded(parts, target, parts.proposer(target), new=12, draft_length=4, eos_token_id=plain[end]).counts
    in_last = (end + 1) % 5  # tokens of the round that the end cuts
    assert in_last
    assert ended.num_emitted_tokens == end + 1
    assert ended.num_drafts == (end + 1) // 5 + 1
    assert ended.num_accepted_tokens == ended.num_draft_tokens == 4 * ((end + 1) // 5) + in_last


def check_padded_vocabularies(parts) -> None:
    """A head that is padded where its padding is most likely, one that is narrower, and a tokenizer of equal size."""
    target = target_of()
    wide = perturbed(target, 0.02)
    wide.resize_token_embeddings(VOCAB + 31, mean_resizing=False)
    with torch.no_grad():
        wide.lm_head.weight[VOCAB:] = 10 * wide.lm_head.weight[:31]
    narrow = tiny_llama(0, VOCAB - 10)
    for draft in (wide, narrow):
        for d in drafts_of(parts.proposer(draft), Sampler.of(1.0), PROMPT[0], count=20):
            assert d.probabilities.shape[1] == VOCAB
            assert torch.allclose(d.probabilities.sum(-1), torch.ones(3))
            assert not d.probabilities[:, VOCAB - 10 :].any() or draft is wide
        # Where the draft is narrower, the target's further entries are padding and never come up.
        same_text(parts, target, parts.proposer(draft), suppress_tokens=list(range(VOCAB - 10, VOCAB)))
    one, other = (train_bpe([f"{word} {word}s are {word}"], 262) for word in ("def", "xyz"))
    assert len(one) == len(other)
    with pytest.raises(InputError, match="expected the tokenizer of target"):
        models.check_same_tokenizer(one, other, "a", "b")


def check_rows_of_a_batch(parts) -> None:
    """Rows of unequal prompts and acceptance, one of which ends early, are each what they are alone."""
    target = target_of()
    proposer = parts.proposer(perturbed(target, 0.05))
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
        out = decoded(parts, target, proposer, ids, attention_mask=mask, **options)
    finally:
        hook.remove()
    assert rows[-1] < 3 and rows == sorted(rows, reverse=True)  # a row that has ended is fed no longer
    for i, prompt in enumerate(prompts):
        alone = decoded(parts, target, proposer, prompt[None], **options)
        assert out.row_counts[i] == alone.counts
        length = alone.sequences.shape[1]
        assert torch.equal(out.sequences[i, 6 - len(prompt) :][:length], alone.sequences[0])
    # Under sampling each row keeps its own random numbers when the first has ended.
    end = int(decoded(parts, target, proposer, prompts[0][None], new=6, do_sample=True).sequences[0, -1])
    options = {"eos_token_id": end, "new": 30, "do_sample": True}
    drawn = decoded(parts, target, proposer, ids, attention_mask=mask, **options)
    assert drawn.row_counts[0].num_drafts < drawn.row_counts[1].num_drafts
    for i, prompt in enumerate(prompts):
        alone = decoded(parts, target, proposer, prompt[None], seed=i, **options).sequences[0]
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


def check_sliding_windows(parts) -> None:
    target = sliding_target(6)
    for shape in (None, parts.tree.from_choices(CHOICES)):
        same_text(parts, target, parts.proposer(target, tree=shape), new=30)
        check_every_round(parts, target, target, shape, new=15)
    # A window narrower than the tree is deep, on a branch whose slots are not its positions.
    target = sliding_target(2)
    check_every_round(parts, target, target, Tree.from_choices([(0,), (1,), (1, 0), (1, 0, 0)]), new=15)
    # States return to the last accepted token, or are refused.
    state_space = MambaForCausalLM(MambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1)).eval()
    same_text(parts, state_space, parts.proposer(state_space), new=15)
    with pytest.raises(InputError, match="RecurrentGemmaForCausalLM, whose state is elsewhere"):
        parts.proposer(tiny_model("recurrent-gemma"))


def check_float_ties(parts) -> None:
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
        found = decoded(parts, target, parts.proposer(target), prompt, new=32, draft_length=4).sequences[0]
        divergence = exactness.first_mismatch(target, plain, found, 6)
        assert divergence is None or divergence.is_tie, divergence
        # One that is wrong: the twin is a tie, the least likely token is not.
        twin, wrong = plain.clone(), plain.clone()
        twin[9], wrong[9] = (plain[9] + 48) % 96, target(plain[None, :9]).logits[0, -1].argmin()
        assert exactness.first_mismatch(target, plain, twin, 6).is_tie
        assert not exactness.first_mismatch(target, plain, wrong, 6).is_tie
    for dtype in (torch.float32, torch.float64):
        exact = target_of().to(dtype)
        same_text(parts, exact, parts.proposer(exact, tree=parts.tree.from_choices(CHOICES)), draft_length=4)


def check_trees(parts) -> None:
    """Position = depth, and attention to ancestors alone: each node's logits are those of its path by itself."""
    target = target_of()
    draft = perturbed(target, 0.1)
    check_every_round(parts, target, draft, parts.tree.from_choices(CHOICES), new=12)
    check_every_round(parts, target, draft, parts.tree.from_choices(CHOICES), new=12, do_sample=True)
    check_every_round(parts, target, draft, DynamicTree(2, 6), new=12)
    shape = parts.tree.from_choices(CHOICES)
    for d in drafts_of(parts.proposer(draft, tree=shape), SAMPLING, PROMPT[0], count=100):
        assert all(len(set(d.tokens[list(nodes)].tolist())) == len(nodes) for nodes in shape.children)
    same_text(parts, target, parts.proposer(draft, tree=parts.tree.from_choices(CHOICES)))


def check_siblings_are_tried_against_the_residual(parts) -> None:
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


def check_processors_see_the_drafted_tokens(parts) -> None:
    target = target_of(scale=2.0)
    for shape in (None, parts.tree.from_choices(CHOICES)):
        proposer = parts.proposer(perturbed(target, 0.02), tree=shape)
        same_text(parts, target, proposer, new=40, repetition_penalty=1.5)
        same_text(parts, target, proposer, new=40, no_repeat_ngram_size=2)


def check_loops_are_reported(parts) -> None:
    loop, fresh = [1, 2, 3] * 20, list(range(60))
    assert repetition.repeated_ngram_share([loop]) == pytest.approx(54 / 57)
    assert repetition.repeated_ngram_share([fresh]) == 0
    seen = [Group([Row(i, ids, Counts())], seconds=1.0) for i, ids in enumerate((loop, fresh))]
    assert Observation.of(seen).repeated() == pytest.approx(54 / 114)


CHECKS = {
    1: check_q_is_what_was_drawn_from,
    2: check_p_and_q_are_warped_alike,
    3: check_the_residual,
    4: check_zero_probability_is_never_accepted,
    5: check_t_0_is_the_argmax,
    6: check_the_draft_remembers_all_it_drafted,
    7: check_both_caches_after_every_round,
    8: check_blocks_end_where_the_text_ends,
    9: check_the_counts,
    10: check_padded_vocabularies,
    11: check_rows_of_a_batch,
    12: check_sliding_windows,
    13: check_float_ties,
    14: lambda parts: (check_trees(parts), check_siblings_are_tried_against_the_residual(parts)),
    15: check_processors_see_the_drafted_tokens,
    16: check_loops_are_reported,
}


# Planted mistakes. Each is a proposer, a rule, a sampler or a tree of its own, or a function in place of another.


class SaysAnotherQ(DraftModelProposer):
    """Draws from q, and says that it drew from a flatter distribution (transformers #32867)."""

    def propose(self, contexts, draft_lengths):
        drafts = super().propose(contexts, draft_lengths)
        return [d if d.probabilities is None else replace(d, probabilities=flatter(d.probabilities)) for d in drafts]


class DraftsTheArgmax(DraftModelProposer):
    """Drafts the most likely token, and says that it drew it from q (transformers #47932)."""

    def propose(self, contexts, draft_lengths):
        drafts = super().propose(contexts, draft_lengths)
        return [d if d.probabilities is None else replace(d, tokens=d.probabilities.argmax(-1)) for d in drafts]


class DraftsUnwarped(DraftModelProposer):
    """Is not told how p is warped."""

    def start(self, task):
        return super().start(replace(task, sampler=Sampler(LogitsProcessorList(), task.sampler.do_sample)))


class WarpsBackwards(DraftModelProposer):
    """Warps q in another order than p."""

    def start(self, task):
        processors = LogitsProcessorList(list(task.sampler.processors)[::-1])
        return super().start(replace(task, sampler=Sampler(processors, task.sampler.do_sample)))


class ForgetsTheLastToken(DraftModelProposer):
    """After full acceptance it takes its last drafted token to be in its cache, where it never was fed."""

    def commit(self, outcomes):
        super().commit(outcomes)
        for row, outcome in enumerate(outcomes):
            self.feeder.cached[row] += len(outcome.path) == len(self._fed[row])


class KeepsARejectedToken(DraftModelProposer):
    """Drops one token less from its cache than it should."""

    def commit(self, outcomes):
        super().commit(outcomes)
        for row, outcome in enumerate(outcomes):
            self.feeder.cached[row] += len(outcome.path) < len(self._fed[row]) - 1


class IgnoresSelect(DraftModelProposer):
    """Takes the rows that are left for the first ones."""

    def select(self, rows):
        super().select(list(range(len(rows))))


class SharesGenerators(DraftModelProposer):
    """Draws for the rows that are left with the random numbers of the first ones."""

    def select(self, rows):
        generators = self.generators
        super().select(rows)
        self.generators = generators[: len(rows)]


class SeesAllNodes(Tree):
    """A node of this tree attends to every node before it."""

    @property
    def visible(self):
        return torch.ones(len(self) + 1, len(self) + 1, dtype=torch.bool).tril()


def sampled_at_t0(scores):
    """Draws from the softmax at T=0 too (litgpt)."""
    return scores.softmax(-1).multinomial(1)[:, 0]


class Changed(Rule):
    """The exact rule, of another sampler, other logits or other contexts than it is given."""

    lossy = False

    def __init__(self, change):
        self.change = change

    def verify(self, sampler, logits, contexts, proposal, generator):
        given = {"sampler": sampler, "logits": logits, "contexts": contexts, "proposal": proposal}
        return Exact().verify(**(given | self.change(**given)), generator=generator)


class TakesTheFirst(Rule):
    """Commits the first drafted token unverified."""

    lossy = False

    def verify(self, sampler, logits, contexts, proposal, generator):
        verdict = Exact().verify(sampler, logits, contexts, proposal, generator)
        if verdict.path or not len(proposal.tokens):
            return verdict
        return Verdict([0], int(logits[1].argmax()))


def flatter(q):
    return q.pow(0.7) / q.pow(0.7).sum(-1, keepdim=True)


def not_strict(p, q, drafted, tree, generator=None):
    """Accepts a chain's tokens by r <= p / q."""
    r = torch.rand(len(tree), generator=generator, dtype=p.dtype)
    for i, token in enumerate(drafted.tolist()):
        if not r[i] <= p[i, token] / q[i, token]:
            rest = residual(p[i], q[i], drafted[i])
            return list(range(i)), sampling.draw(rest / rest.sum(), generator)
    return list(range(len(drafted))), sampling.draw(p[-1], generator)


def with_replacement(q_BFM, u_BPM, count):
    """Draws siblings from q each, and says that the earlier ones were left out."""
    places = q_BFM.expand(u_BPM.shape).flatten(0, 1).multinomial(count, replacement=True)
    return places.view(*u_BPM.shape[:2], count)


def only_the_last_ends(row, tokens):
    """Looks for the end of the text in a block's last token alone."""
    eos, row.eos = row.eos, row.eos if tokens[-1] in row.eos else frozenset()
    written = real_advance(row, tokens)
    row.eos = eos
    return written


def counts_the_bonus(draft, accepted, emitted):
    counts = real_round(draft, accepted, emitted)
    return replace(counts, num_accepted_tokens=emitted)


def counts_past_the_end(draft, accepted, emitted):
    return replace(real_round(draft, accepted, max(emitted, accepted + 1)), num_emitted_tokens=emitted)


def on_host(starts) -> list[int]:
    return starts.host if isinstance(starts, cache.Slots) else list(starts)


def feeds_one_slot_late(model, tokens, starts, *args, **kwargs):
    """The target drops one token less than was rejected."""
    return real_feed(model, tokens, [start + (start > 10) for start in on_host(starts)], *args, **kwargs)


def feeds_at_the_first_rows_length(model, tokens, starts, *args, **kwargs):
    return real_feed(model, tokens, on_host(starts)[:1] * len(tokens), *args, **kwargs)


def feeds_nodes_as_a_chain(model, tokens, starts, keep=None, visible=None, depths=None, further=None):
    """A node's position is its number, and not its depth."""
    depths = None if depths is None else torch.arange(tokens.shape[1])
    return real_feed(model, tokens, starts, keep, visible, depths, further)


def without_windows(model, *args, **kwargs):
    real_cache(model, *args, **kwargs)
    model._window = model._masks._window = 10**6


residual, real_advance = acceptance.residual, generation.TextRow.advance
real_round, real_feed, real_cache = Counts.of_round, cache.CachedModel.feed, cache.CachedModel.__init__

MISTAKES = {
    "q is flatter than what was drawn from": (1, {"proposer": SaysAnotherQ}),
    "argmax drafts scored with q": (1, {"proposer": DraftsTheArgmax}),
    "q is not warped": (2, {"proposer": DraftsUnwarped}),
    "q is warped in another order": (2, {"proposer": WarpsBackwards}),
    "p is not warped": (2, {"rule": Changed(lambda sampler, **_: {"sampler": SAMPLING})}),
    "the residual by softmax": (3, {(acceptance, "residual"): lambda p, q, x: (p - q).softmax(-1)}),
    "the residual in place": (3, {(acceptance, "residual"): lambda p, q, x: p.sub_(q).clamp_(min=0.0)}),
    "a residual without mass": (3, {(acceptance, "residual"): lambda p, q, x: (p - q).clamp(min=0.0)}),
    "r <= p / q": (4, {(acceptance, "accept_exact"): not_strict}),
    "sampling at T=0": (5, {(verification, "argmax"): sampled_at_t0}),
    "the last token is not fed after full acceptance": (6, {"proposer": ForgetsTheLastToken}),
    "the draft keeps a rejected token": (7, {"proposer": KeepsARejectedToken}),
    "the target keeps a rejected token": (7, {(cache.CachedModel, "feed"): feeds_one_slot_late}),
    "the first drafted token is not verified": (8, {"rule": TakesTheFirst()}),
    "an end inside a block is not seen": (8, {(generation.TextRow, "advance"): only_the_last_ends}),
    "the bonus counts as accepted": (9, {(Counts, "of_round"): counts_the_bonus}),
    "drafts past the end count": (9, {(Counts, "of_round"): counts_past_the_end}),
    "padding is drafted": (10, {(feeder, "align_vocabulary"): lambda logits, size: logits}),
    "tokenizers of one size are one": (10, {(models, "check_same_tokenizer"): lambda *args: None}),
    "rows advance by one length": (11, {(cache.CachedModel, "feed"): feeds_at_the_first_rows_length}),
    "the draft's cache is not selected": (11, {"proposer": IgnoresSelect}),
    "the random numbers are not selected": (11, {"proposer": SharesGenerators}),
    "windows are not looked at": (12, {(cache.CachedModel, "__init__"): without_windows}),
    "any model is let in": (12, {(draft_model, "check_rollback"): lambda model, role: None}),
    "logits of the token before": (13, {"rule": Changed(lambda logits, **_: {"logits": logits.roll(1, 0)})}),
    "everything is a tie": (13, {(exactness, "TIE_ULPS"): 1e9}),
    "nodes see their cousins": (14, {"tree": SeesAllNodes}),
    "positions count nodes": (14, {(cache.CachedModel, "feed"): feeds_nodes_as_a_chain}),
    "siblings drawn with replacement": (14, {(draft_tree, "draw_siblings"): with_replacement}),
    "siblings tried against p": (14, {(acceptance, "residual"): lambda p, q, x: p}),
    "processors do not see drafted tokens": (15, {"rule": Changed(lambda contexts, **_: {"contexts": [contexts[0]] * len(contexts)})}),
    "no n-gram is repeated": (16, {(repetition, "count_repeated_ngrams"): lambda *args: (0, 57)}),
}  # fmt: skip


@pytest.mark.parametrize("trap", CHECKS)
def test_the_decoder_does_not_fall_in(trap):
    CHECKS[trap](Parts())


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_found(monkeypatch, mistake):
    trap, changes = MISTAKES[mistake]
    parts = Parts(**{name: part for name, part in changes.items() if isinstance(name, str)})
    for place, change in changes.items():
        if not isinstance(place, str):
            owner, name = place
            monkeypatch.setattr(owner, name, change)
    with pytest.raises((AssertionError, pytest.fail.Exception, RuntimeError, IndexError, ValueError)):
        CHECKS[trap](parts)


def test_every_trap_has_a_check_and_a_mistake():
    assert set(CHECKS) == {trap for trap, _ in MISTAKES.values()} == set(range(1, 17))
