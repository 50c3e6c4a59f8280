"""Rules: which tokens stand, and the law of what is emitted, exactly.

The laws are computed, not sampled: where a rule would draw a random number, every outcome is followed in turn, and the
probabilities add up in double precision. V is 3 or 4, and every prefix has laws p and q of its own.
"""

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from draftsmith.decode import Cascade, Exact, InputError, Proposal, Threshold, Tree, Typical
from draftsmith.decode.proposers.draft_model import stop_below_confidence
from draftsmith.decode.rules import RULES, acceptance, as_rule
from draftsmith.decode.rules import rule as rules
from draftsmith.decode.rules.acceptance import accept_exact, accept_greedy, accept_siblings
from draftsmith.decode.sampling import Sampler
from draftsmith.decode.tree import ROOT

Text = tuple[int, ...]
Tables = dict[Text, Tensor]
Drafts = list[tuple[float, Proposal]]
Emitted = dict[tuple[Text, tuple[float, ...]], float]  # the tokens of a round and their departures: its probability

SAMPLING, GREEDY = Sampler.of(1.0), Sampler.of(0.0)
ROUNDING = 1e-12

TREES = {
    "nothing": Tree.chain(0),
    "chain of 1": Tree.chain(1),
    "chain of 2": Tree.chain(2),
    "two siblings": Tree.from_choices([(0,), (1,)]),
    "three siblings": Tree.from_choices([(0,), (1,), (2,)]),
    "two under the first": Tree.from_choices([(0,), (0, 0), (0, 1)]),
    "two under the second": Tree.from_choices([(0,), (1,), (1, 0), (1, 1)]),
    "two and three": Tree.from_choices([(0,), (1,), (0, 0), (0, 1), (1, 0)]),
}


class Uniform:
    """A number r, uniform on [0, 1), that is never drawn: its one comparison goes as the script says."""

    def __init__(self, decide: Callable[[float], bool], scale: float = 1.0, compared: list[bool] | None = None):
        self.decide, self.scale = decide, scale
        self.compared = [] if compared is None else compared

    def __mul__(self, factor: float) -> "Uniform":
        return Uniform(self.decide, self.scale * factor, self.compared)

    def __lt__(self, bound: float) -> bool:
        assert not self.compared, "the same random number decides twice"
        self.compared.append(True)
        return self.decide(min(1.0, bound / self.scale) if self.scale > 0 else float(bound > 0))


class Uniforms:
    """What `torch.rand` gives `accept_exact`."""

    def __init__(self, decide: Callable[[float], bool], size: int):
        self.decide, self.size = decide, size

    def tolist(self) -> list[Uniform]:
        return [Uniform(self.decide) for _ in range(self.size)]


def followed(monkeypatch, verify: Callable[[], rules.Verdict]) -> Iterator[tuple[float, rules.Verdict, Tensor]]:
    """Every way that a verification can go: its probability, the verdict, and the law that its token is drawn from."""
    scripts: list[list[bool]] = [[]]
    while scripts:
        script, mass = scripts.pop(), 1.0
        going, taken, distributions = iter(script), [], []

        def decide(share, going=going, taken=taken, script=script):
            nonlocal mass
            outcome = next(going, share > 0)
            if len(taken) >= len(script) and 0 < share < 1:
                scripts.append([*taken, False])
            taken.append(outcome)
            mass *= share if outcome else 1 - share
            return outcome

        def draw(sampler, generator, distributions=distributions):
            distributions.append(sampler / sampler.sum())
            return torch.tensor([0])

        monkeypatch.setattr(torch, "rand", lambda size, decide=decide, **_: Uniforms(decide, size))
        monkeypatch.setattr(acceptance, "draw", draw)
        monkeypatch.setattr(rules, "draw", draw)
        verdict = verify()
        (sampler,) = distributions
        yield mass, verdict, sampler


@pytest.fixture
def law_of(monkeypatch) -> Callable[[rules.Rule, Tables, Drafts], Emitted]:
    """The law of what one round emits under a rule, from these drafts and their probabilities."""

    def law_of(rule, p, drafts):
        sampler: Emitted = defaultdict(float)
        for chance, proposal in drafts:
            drafted = proposal.tokens.tolist()
            logits = torch.stack([p[text] for text in texts_of(drafted, proposal.tree)]).log()
            verify = functools.partial(rule.verify, SAMPLING, logits, [], proposal, None)
            for mass, verdict, last in followed(monkeypatch, verify):
                path, departures = verdict.path, verdict.departures or []
                assert path == proposal.tree.path(path[-1] if path else ROOT)
                assert len(departures) == (len(path) + 1 if rule.lossy else 0)
                assert not any(wrong for _, wrong in departures)  # of T=0 alone
                for token, share in enumerate(last.tolist()):
                    if share > 0:
                        tokens = (*(drafted[node] for node in path), token)
                        sampler[tokens, tuple(distance for distance, _ in departures)] += chance * mass * share
        assert sum(sampler.values()) == pytest.approx(1, abs=ROUNDING)
        return dict(sampler)

    return law_of


def sibling_draws(q: Tensor, count: int) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Every ordered draw of `count` tokens without replacement, with its probability."""
    for tokens in itertools.permutations(range(len(q)), count):
        chance, left = 1.0, 1.0
        for place, token in enumerate(tokens):
            if left < 1e-12:  # nothing is left to draw: one order stands for all
                chance *= list(tokens[place:]) == sorted(set(range(len(q))) - set(tokens[:place]))[: count - place]
                break
            chance, left = chance * float(q[token]) / left, left - float(q[token])
        yield chance, tokens


def law_of_siblings(p: Tensor, support: list[int], q: Tensor | None, count: int) -> Tensor:
    """The law of the token that follows a node with drawn siblings, or with the first `count` of the support."""
    law = torch.zeros(len(p), dtype=torch.float64)
    draws = [(1.0, tuple(range(count)))] if q is None else sibling_draws(q, count)
    for chance, places in draws:
        scripts: list[list[bool]] = [[]]
        while scripts and chance > 0:
            script, mass, taken = scripts.pop(), chance, []

            def decide(share, script=script, taken=taken, scripts=scripts):
                nonlocal mass
                outcome = script[len(taken)] if len(taken) < len(script) else share > 0
                if len(taken) >= len(script) and 0 < share < 1:
                    scripts.append([*taken, False])
                taken.append(outcome)
                mass *= share if outcome else 1 - share
                return outcome

            r = [Uniform(decide) for _ in places]
            seen = p[support].numpy()
            accepted, rest = accept_siblings(seen, None if q is None else q.numpy(), places, r)
            if accepted is not None:
                law[support[places[accepted]]] += mass
            else:
                left = p.clone()
                left[support] = torch.from_numpy(rest)
                law += mass * left / left.sum()
    return law


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("certain", [False, True])
def test_siblings_of_a_support_leave_the_law_exactly(count, certain):
    """V = 7, a support of 4: q that is p, another, certain of a token, or with fewer tokens than are drawn."""
    support = [5, 0, 2, 6]
    for seed in range(6):
        p = tables(seed, vocab=7, depth=0, support=None if seed % 2 else 4)[()]
        q = tables(100 + seed, vocab=4, depth=0)[()]
        variants = [q, (p[support] + 1e-9) / (p[support] + 1e-9).sum(), one_hot(1, 4), q * torch.tensor([0, 1, 0, 1])]
        for variant in [None] if certain else variants:
            variant = None if variant is None else variant / variant.sum()
            law = law_of_siblings(p, support, variant, count)
            torch.testing.assert_close(law, p, atol=1e-7, rtol=0)  # q of 1e-9 cost as many digits


def test_siblings_tried_against_p_or_by_another_q_do_not(monkeypatch):
    p, q = tables(1, vocab=7, depth=0)[()], tables(2, vocab=4, depth=0)[()]
    support = [5, 0, 2, 6]
    real = acceptance.accept_siblings
    plants = (
        lambda p_M, q_M, places, r: (real(p_M, q_M, places, r)[0], p_M.astype(float)),
        lambda p_M, q_M, places, r: real(p_M, q_M[::-1].copy(), places, r),
    )
    for plant in plants:
        monkeypatch.setitem(globals(), "accept_siblings", plant)
        assert (law_of_siblings(p, support, q, 2) - p).abs().max() > 1e-3


def tables(seed: int, vocab: int = 3, depth: int = 3, support: int | None = None, spread: float = 1.5) -> Tables:
    """A law for every text of at most `depth` tokens; with `support`, on so many of the tokens alone."""
    generator = torch.Generator().manual_seed(seed)
    distributions = {}
    for length in range(depth + 1):
        for text in itertools.product(range(vocab), repeat=length):
            scores = torch.randn(vocab, generator=generator, dtype=torch.float64) * spread
            if support is not None:
                scores[torch.randperm(vocab, generator=generator)[support:]] = -math.inf
            distributions[text] = scores.softmax(-1)
    return distributions


def one_hot(token: int, vocab: int = 3) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor(token), vocab).double()


def texts_of(tokens: Sequence[int], tree: Tree) -> list[Text]:
    """The text at the root and at each node."""
    return [tuple(tokens[n] for n in tree.path(node)) for node in range(ROOT, len(tree))]


def drawn(q: Tables, tree: Tree, replace: bool = False, scored_without: bool = True) -> Drafts:
    """Every draft of that shape: each sibling drawn from what the earlier ones left of q, zeros where nothing is left.

    With `replace` siblings are drawn from all of q each; `scored_without` says of them that they were not.
    """
    found: list[tuple[float, list[int], list[Tensor]]] = [(1.0, [], [])]
    for node, parent in enumerate(tree.parents):
        longer = []
        for mass, tokens, distributions in found:
            whole = q[tuple(tokens[n] for n in tree.path(parent))]
            earlier = [tokens[n] for n in tree.children[parent + 1] if n < node]
            rest = whole.scatter(0, torch.tensor(earlier, dtype=torch.long), 0.0)
            rest = rest / rest.sum().clamp(min=torch.finfo(rest.dtype).tiny)
            source = whole if replace else rest
            chances = source.tolist() if source.any() else [1.0]  # nothing to draw: a token that does not count
            told = rest if scored_without else whole
            longer += [
                (mass * chance, [*tokens, x], [*distributions, told]) for x, chance in enumerate(chances) if chance > 0
            ]
        found = longer
    proposals = []
    for mass, x, distributions in found:
        laws = torch.stack(distributions) if distributions else None
        proposals.append((mass, Proposal(torch.tensor(x, dtype=torch.long), laws, tree, confidence(q, x, tree))))
    return proposals


def most_likely(q: Tables, tree: Tree) -> Drafts:
    """The one draft of that shape of the drafter's most likely tokens."""
    tokens: list[int] = []
    for node, parent in enumerate(tree.parents):
        ranked = q[tuple(tokens[n] for n in tree.path(parent))].argsort(descending=True)
        tokens.append(int(ranked[tree.children[parent + 1].index(node)]))
    return [(1.0, Proposal(torch.tensor(tokens, dtype=torch.long), None, tree, confidence(q, tokens, tree)))]


def confidence(q: Tables, tokens: Sequence[int], tree: Tree) -> Tensor:
    texts = texts_of(tokens, tree)
    return torch.tensor([float(q[texts[parent + 1]].max()) for parent in tree.parents])


def distance_to_the_target(sampler: Emitted, p: Tables, depth: int) -> float:
    """TV between p's law of the next `depth` + 1 tokens and that of what one round emits and p goes on from."""
    written: dict[Text, float] = defaultdict(float)
    for (tokens, _), mass in sampler.items():
        for text, more in _continuations(p, tokens, depth + 1):
            written[text] += mass * more
    expected = dict(_continuations(p, (), depth + 1))
    return sum(abs(written[text] - expected.get(text, 0.0)) for text in {*written, *expected}) / 2


def _continuations(p: Tables, text: Text, length: int) -> Iterator[tuple[Text, float]]:
    """Every text of that length that begins with `text`, with its probability given that."""
    if len(text) == length:
        yield text, 1.0
        return
    for token, mass in enumerate(p[text].tolist()):
        for longer, more in _continuations(p, (*text, token), length):
            yield longer, mass * more


# The exact rule


LAWS = {
    "p and q differ": (tables(0), tables(1)),
    "peaked": (tables(2, spread=5.0), tables(3, spread=5.0)),
    "p rules tokens out": (tables(4, support=2), tables(5)),
    "q runs out of tokens": (tables(6), tables(7, support=2)),
    "q is one-hot": (tables(8), tables(9, support=1)),
    "both rule tokens out": (tables(10, support=2), tables(11, support=2)),
    "p is one-hot": (tables(12, support=1), tables(13)),
    "p = q": (tables(14), tables(14)),
    "flat and peaked": (tables(20, vocab=4, spread=0.5), tables(21, vocab=4, spread=2.0)),
}
# Of four tokens two or three have p > q: where a residual lies on one token alone, many a mistake makes no difference.
FLAT, PEAKED = LAWS["flat and peaked"]


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
@pytest.mark.parametrize(("p", "q"), LAWS.values(), ids=LAWS)
def test_texts_of_drawn_drafts_have_the_targets_law(law_of, p, q, tree):
    sampler = law_of(Exact(), p, drawn(q, tree))
    assert distance_to_the_target(sampler, p, tree.depth) < ROUNDING


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
@pytest.mark.parametrize(("p", "q"), LAWS.values(), ids=LAWS)
def test_texts_of_deterministic_drafts_have_the_targets_law(law_of, p, q, tree):
    sampler = law_of(Exact(), p, most_likely(q, tree))
    assert distance_to_the_target(sampler, p, tree.depth) < ROUNDING


def test_more_siblings_than_tokens(law_of):
    tree = Tree((-1,) * 5)
    for p, q in LAWS.values():
        sampler = law_of(Exact(), p, drawn(q, tree))
        assert distance_to_the_target(sampler, p, 1) < ROUNDING


def test_siblings_with_replacement_are_lossless_too_where_q_says_so(law_of):
    """SpecInfer's siblings: each drawn from all of q, and tried with all of q."""
    for name in ("chain of 2", "two siblings", "three siblings", "two under the second"):
        sampler = law_of(Exact(), FLAT, drawn(PEAKED, TREES[name], replace=True, scored_without=False))
        assert distance_to_the_target(sampler, FLAT, TREES[name].depth) < ROUNDING


def test_the_first_children_are_accepted_where_p_is_q(monkeypatch):
    p, q = LAWS["p = q"]
    tree = TREES["two and three"]
    accepted = 0.0
    for chance, proposal in drawn(q, tree):
        distributions = torch.stack([p[text] for text in texts_of(proposal.tokens.tolist(), tree)])
        verify = functools.partial(Exact().verify, SAMPLING, distributions.log(), [], proposal, None)
        accepted += sum(chance * mass for mass, verdict, _ in followed(monkeypatch, verify) if verdict.path == [0, 2])
    assert accepted == pytest.approx(1, abs=ROUNDING)


def test_acceptance_of_a_chain_is_the_overlap(law_of):
    """P(accepted) = Σ_v min(p, q) = 1 − TV(p, q), drawn; p(x) where the draft is deterministic."""
    for p, q in LAWS.values():
        for drafts, expected in [
            (drawn(q, Tree.chain(1)), torch.minimum(p[()], q[()]).sum()),
            (most_likely(q, Tree.chain(1)), p[()][q[()].argmax()]),
        ]:
            sampler = law_of(Exact(), p, drafts)
            accepted = sum(mass for (tokens, _), mass in sampler.items() if len(tokens) == 2)
            assert accepted == pytest.approx(float(expected), abs=ROUNDING)


MISTAKES = [
    "siblings tried against p",
    "siblings weighed by p",
    "a residual that is not normalised",
    "no residual",
    "every sibling's residual by the first one's q",
    "the bonus from the root's row",
    "q one-hot where it was drawn",
]


def accept(p, q, drafted, tree, generator=None, mistake=None):
    """`accept_exact` once more, step by step, with a mistake in one of them."""
    r = torch.rand(len(tree), generator=generator).tolist()
    path, node = [], ROOT
    while True:
        siblings, here = tree.children[node + 1], p[0 if mistake == "the bonus from the root's row" else node + 1]
        rest = here
        for child in siblings:
            token = drafted[child]
            number = r[0 if mistake == "one random number" else child]
            q_x = 1.0 if mistake == "q one-hot where it was drawn" else float(q[child, token])
            weight = float((here if mistake == "siblings weighed by p" else rest)[token])
            if (q_x > 0 or mistake == "a token that was never drawn") and number * q_x < weight:
                path.append(child)
                node = child
                break
            if mistake != "no residual":
                first = mistake == "every sibling's residual by the first one's q"
                before = here if mistake == "siblings tried against p" else rest
                rest = acceptance.residual(before, q[siblings[0] if first else child], token)
            if mistake != "a residual that is not normalised":
                rest = rest / rest.sum()
        else:
            return path, acceptance.draw(rest, generator)


def law_with(law_of, monkeypatch, q: Tables, tree: str, mistake: str | None) -> Emitted:
    monkeypatch.setattr(rules, "accept_exact", functools.partial(accept, mistake=mistake))
    return law_of(Exact(), FLAT, drawn(q, TREES[tree]))


def test_the_law_shows_a_mistake_in_the_rule(law_of, monkeypatch):
    for mistake in MISTAKES:
        tree = "chain of 2" if mistake == "the bonus from the root's row" else "three siblings"
        sampler = law_with(law_of, monkeypatch, PEAKED, tree, mistake)
        assert distance_to_the_target(sampler, FLAT, TREES[tree].depth) > 1e-3, mistake
    sampler = law_with(law_of, monkeypatch, PEAKED, "three siblings", None)
    assert distance_to_the_target(sampler, FLAT, 1) < ROUNDING


def test_the_law_shows_a_token_that_was_never_drawn(law_of, monkeypatch):
    q = {(): one_hot(2, 4)}  # nothing is left for the second sibling
    sampler = law_with(law_of, monkeypatch, q, "two siblings", "a token that was never drawn")
    assert distance_to_the_target(sampler, FLAT, 1) > 1e-3


def test_one_random_number_for_all_siblings_is_noticed(law_of, monkeypatch):
    with pytest.raises(AssertionError, match="decides twice"):
        law_with(law_of, monkeypatch, PEAKED, "two siblings", "one random number")


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("name", ["two siblings", "three siblings"])
def test_the_law_shows_siblings_that_were_drawn_otherwise_than_they_are_scored(law_of, name, replace):
    """With replacement and scored as if without, and the other way round."""
    sampler = law_of(Exact(), FLAT, drawn(PEAKED, TREES[name], replace=replace, scored_without=replace))
    assert distance_to_the_target(sampler, FLAT, 1) > 1e-3


def test_random_numbers_give_the_law_that_was_computed(monkeypatch):
    """Tensors of numbers r in place of `Uniform`: every threshold here is a multiple of 1/4, so a grid integrates."""
    p = torch.tensor([4, 4, 5, 3], dtype=torch.float64) / 16
    q = torch.tensor([8, 2, 4, 2], dtype=torch.float64) / 16  # p/q is 1/2, 2, 5/4 and 3/2, the residual (0, 2, 1, 1)/4
    tree, grid = TREES["two siblings"], [1 / 8, 3 / 8, 5 / 8, 7 / 8]
    monkeypatch.setattr(acceptance, "draw", lambda rest, generator: rest / rest.sum())
    sampler = torch.zeros(4, dtype=torch.float64)
    outcomes = set()
    for chance, proposal in drawn({(): q}, tree):
        for r in itertools.product(grid, repeat=2):
            monkeypatch.setattr(torch, "rand", lambda size, r=r, **options: torch.tensor(r, dtype=options["dtype"]))
            path, following = accept_exact(p.expand(3, -1), proposal.probabilities, proposal.tokens, tree)
            first = one_hot(int(proposal.tokens[path[0]]), 4) if path else following
            sampler += chance / len(grid) ** 2 * first
            outcomes.add(tuple(path))
    assert torch.allclose(sampler, p, rtol=0, atol=ROUNDING)
    assert outcomes == {(), (0,), (1,)}


def random_siblings(seed: int, count: int = 200) -> Iterator[tuple[Tree, list[int], Tensor]]:
    """Trees with distinct siblings, tokens, and logits that often agree with them."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        parents: list[int] = []
        for node in range(int(torch.randint(9, (), generator=generator))):
            parent = int(torch.randint(-1, node, (), generator=generator))
            parents.append(parent if parents.count(parent) < 3 else node - 1)
        tree = Tree(tuple(parents))
        tokens = [0] * len(tree)
        for own in tree.children:
            for child, token in zip(own, torch.randperm(3, generator=generator).tolist(), strict=False):
                tokens[child] = token
        yield tree, tokens, torch.randn(len(tree) + 1, 3, generator=generator)


def test_exact_at_temperature_0_follows_the_argmax_down_the_tree():
    depths = set()
    for tree, tokens, logits in random_siblings(0):
        chosen = logits.argmax(-1).tolist()
        proposal = Proposal(torch.tensor(tokens, dtype=torch.long), None, tree)
        verdict = Exact().verify(GREEDY, logits, [], proposal, None)
        assert (verdict.path, verdict.token) == accept_greedy(chosen, tokens, tree) and verdict.departures is None
        naive, node = [], ROOT
        while (wanted := [c for c in tree.children[node + 1] if tokens[c] == chosen[node + 1]]) != []:
            (node,) = wanted
            naive.append(node)
        assert (verdict.path, verdict.token) == (naive, chosen[node + 1])
        depths.add(len(naive))
        # One-hot laws: what the rule for sampling does with them.
        hot = torch.nn.functional.one_hot(logits.argmax(-1), 3).double()
        path, token = accept_exact(hot, None, proposal.tokens, tree)
        assert (path, int(token)) == (verdict.path, verdict.token)
    assert len(depths) >= 4


# The lossy rules: which tokens stand


def distributions_of(*rows: Sequence[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64).log()


def verdict_of(rule, logits, tokens, tree, confidence=None, sampler=GREEDY):
    confidence = None if confidence is None else torch.tensor(confidence)
    return rule.verify(sampler, logits, [], Proposal(torch.tensor(tokens), None, tree, confidence), None)


P_CHAIN = distributions_of([0.2, 0.5, 0.3], [0.3, 0.6, 0.1], [0.1, 0.1, 0.8], [0.0, 0.4, 0.6])


@pytest.mark.parametrize(
    ("level", "accepted", "token"), [(0.0, 3, 2), (0.05, 3, 2), (0.1, 2, 2), (0.19, 2, 2), (0.2, 2, 2), (0.3, 0, 1)]
)
def test_a_chain_stands_up_to_the_first_token_at_or_below_the_level(level, accepted, token):
    """p of the drafted tokens is 0.3, 0.3 and 0.1: the level itself is not above the level."""
    level = (
        float(P_CHAIN.softmax(-1)[0, 2])
        if level == 0.3
        else float(P_CHAIN.softmax(-1)[2, 0])
        if level == 0.1
        else level
    )
    verdict = verdict_of(Threshold(level), P_CHAIN, [2, 0, 0], Tree.chain(3))
    assert (verdict.path, verdict.token) == (list(range(accepted)), token)
    # None of the drafted tokens is the argmax; the last one is.
    assert verdict.departures == [(1.0, True)] * accepted + [(0.0, False)]


def test_nothing_stands_behind_a_token_that_fell():
    assert verdict_of(Threshold(0.25), P_CHAIN, [0, 1, 2], Tree.chain(3)).path == []
    assert verdict_of(Threshold(0.25), P_CHAIN, [1, 2, 2], Tree.chain(3)).path == [0]


def test_threshold_0_accepts_all_that_the_target_does_not_rule_out():
    assert verdict_of(Threshold(0.0), P_CHAIN, [0, 2, 1], Tree.chain(3)).path == [0, 1, 2]
    p = distributions_of([0.0, 0.5, 0.5], [0.5, 0.5, 0.0])
    for sampler in (GREEDY, SAMPLING):
        assert verdict_of(Threshold(0.0), p, [0], Tree.chain(1), sampler=sampler).path == []
        assert verdict_of(Threshold(0.0), p, [1], Tree.chain(1), sampler=sampler).path == [0]


@pytest.mark.parametrize("rule", [Threshold(0.2), Typical(0.2, 9.0)])
def test_the_longest_path_wins_and_of_equals_the_first(rule):
    tree = TREES["two under the second"]  # 0, 1 with the children 2, 3
    flat = [0.34, 0.33, 0.33]
    for rows, path in [
        ((flat, flat, flat, flat, flat), [1, 2]),  # 2 and 3 are as deep as each other
        ((flat, flat, [0.1, 0.5, 0.4], flat, flat), [1, 3]),
        ((flat, flat, [0.1, 0.1, 0.8], flat, flat), [0]),  # neither stands: 0 and 1 are as deep as each other
        (([0.8, 0.1, 0.1], flat, flat, flat, flat), [0]),  # what stands below 1 fell with it
        (([0.1, 0.1, 0.8], flat, flat, flat, flat), []),
    ]:
        verdict = verdict_of(rule, distributions_of(*rows), [0, 1, 0, 1], tree)
        assert verdict.path == path
        assert len(verdict.departures) == len(path) + 1


def test_a_longer_path_beats_a_likelier_one():
    tree = Tree.from_choices([(0,), (1,), (1, 0)])
    verdict = verdict_of(
        Threshold(0.2), distributions_of([0.7, 0.3, 0.0], [1, 0, 0], [0, 0, 1], [0, 1, 0]), [0, 1, 2], tree
    )
    assert (verdict.path, verdict.token) == ([1, 2], 1)
    assert verdict.departures == [(1.0, True), (0.0, False), (0.0, False)]


def test_typical_levels_fall_with_the_entropy():
    p = torch.tensor(
        [[1.0, 0, 0, 0], [0.5, 0.5, 0, 0], [0.25] * 4, [0.7, 0.1, 0.1, 0.1], [0.97, 0.01, 0.01, 0.01]],
        dtype=torch.float64,
    )  # fmt: skip
    entropy = [0.0, math.log(2), math.log(4), *(-sum(x * math.log(x) for x in row) for row in p[3:].tolist())]
    for level, delta in [(0.09, 0.3), (0.2, 0.3), (0.9, 0.3), (0.3, 2.0), (0.5, 0.0)]:
        expected = [min(level, delta * math.exp(-h)) for h in entropy]
        assert Typical(level, delta).levels(p).tolist() == pytest.approx(expected)
    assert Typical(0.2, 0.3).levels(p).tolist() == pytest.approx([0.2, 0.15, 0.075, 0.3 * math.exp(-entropy[3]), 0.2])
    assert Threshold(0.2).levels(p).tolist() == [0.2] * 5


def test_typical_lets_unlikely_tokens_pass_where_the_target_is_unsure():
    unsure, sure = [0.25, 0.25, 0.25, 0.25], [0.8, 0.2, 0.0, 0.0]  # levels 0.1 · 3/4 = 0.075, and 0.2
    rule = Typical(level=0.24, delta=0.3)
    assert verdict_of(rule, distributions_of(unsure, sure), [3], Tree.chain(1)).path == [0]
    assert verdict_of(rule, distributions_of(sure, unsure), [0], Tree.chain(1)).path == [0]
    # H(0.8, 0.2) = 0.5: the level is 0.3 · 0.606 = 0.18, below 0.2; with δ = 0.4 it is 0.24.
    assert verdict_of(rule, distributions_of(sure, unsure), [1], Tree.chain(1)).path == [0]
    assert verdict_of(Typical(0.24, 0.4), distributions_of(sure, unsure), [1], Tree.chain(1)).path == []
    assert verdict_of(Threshold(0.24), distributions_of(sure, unsure), [1], Tree.chain(1)).path == []


def test_cascade_accepts_while_the_drafter_is_confident():
    p = distributions_of(*[[1.0, 0.0, 0.0]] * 4)  # what the target thinks of them is not asked
    for confidence, accepted in [
        ([0.9, 0.9, 0.9], 3),
        ([0.9, 0.8, 0.7], 2),  # 0.8 is confident enough
        ([0.9, 0.7, 0.9], 1),
        ([0.7, 0.9, 0.9], 0),
    ]:
        rule = Cascade(float(torch.tensor(0.8)))
        verdict = verdict_of(rule, p, [1, 2, 1], Tree.chain(3), confidence)
        assert (verdict.path, verdict.token) == (list(range(accepted)), 0)
        assert verdict.departures == [(1.0, True)] * accepted + [(0.0, False)]
    assert verdict_of(Cascade(0.0), p, [1, 2, 1], Tree.chain(3), [0.0] * 3).path == [0, 1, 2]
    assert verdict_of(Cascade(1.0), p, [1, 2, 1], Tree.chain(3), [1.0, 1.0, 0.99]).path == [0, 1]


def test_cascade_follows_the_first_child():
    tree = TREES["two and three"]
    p = distributions_of(*[[1.0, 0.0, 0.0]] * 6)
    assert verdict_of(Cascade(), p, [0, 1, 2, 1, 0], tree, [0.9] * 5).path == [0, 2]
    assert verdict_of(Cascade(), p, [0, 1, 2, 1, 0], tree, [0.9, 0.9, 0.1, 0.1, 0.9]).path == [0]


def test_a_cascade_needs_confidence():
    p = distributions_of([0.5, 0.5], [0.5, 0.5])
    with pytest.raises(InputError, match=r"^rule: cascade needs a proposer that knows its confidence, such as .*$"):
        verdict_of(Cascade(), p, [0], Tree.chain(1))
    empty = Proposal(torch.zeros(0, dtype=torch.long), None, Tree.chain(0))
    assert Cascade().verify(GREEDY, p[:1], [], empty, None).path == []


@pytest.mark.parametrize("rule", [Exact(), Threshold(), Typical(), Cascade()])
@pytest.mark.parametrize("sampler", [GREEDY, SAMPLING])
def test_without_a_draft_the_target_speaks(rule, sampler):
    empty = Proposal(torch.zeros(0, dtype=torch.long), None, Tree.chain(0))
    verdict = rule.verify(sampler, distributions_of([0.0, 0.0, 1.0]), [], empty, torch.Generator().manual_seed(0))
    assert (verdict.path, verdict.token) == ([], 2)
    assert verdict.departures == ([(0.0, False)] if rule.lossy else None)


# The lossy rules: how far the law of what they emit departs


LOSSY = [*map(Threshold, (0.0, 0.15, 0.4)), Typical(), Typical(0.4, 0.6), *map(Cascade, (0.0, 0.55, 0.75, 1.0))]


def check_departures(sampler: Emitted, p: Tables) -> float:
    """Every departure is TV(the token's law given those before it in the round, p). Returns the greatest."""
    counted: dict[Text, Tensor] = defaultdict(lambda: torch.zeros(len(p[()]), dtype=torch.float64))
    for (tokens, _), mass in sampler.items():
        for i, token in enumerate(tokens):
            counted[tokens[:i]][token] += mass
    greatest = 0.0
    for tokens, departures in sampler:
        for i, told in enumerate(departures):
            emitted = counted[tokens[:i]] / counted[tokens[:i]].sum()
            assert told == pytest.approx(float((emitted - p[tokens[:i]]).abs().sum()) / 2, abs=1e-9)
            greatest = max(greatest, told)
    return greatest


@pytest.mark.parametrize("rule", LOSSY, ids=str)
@pytest.mark.parametrize("name", LAWS)
def test_departures_of_drawn_chains(law_of, rule, name):
    p, q = LAWS[name]
    for length in range(4):
        sampler = law_of(rule, p, drawn(q, Tree.chain(length)))
        greatest = check_departures(sampler, p)
        if length == 0 or (name == "p = q" and not isinstance(rule, Threshold)):
            assert greatest < ROUNDING


@pytest.mark.parametrize("rule", LOSSY, ids=str)
@pytest.mark.parametrize("name", LAWS)
def test_departures_of_deterministic_drafts(law_of, rule, name):
    p, q = LAWS[name]
    for tree in TREES.values():
        sampler = law_of(rule, p, most_likely(q, tree))
        check_departures(sampler, p)


def test_the_lossy_rules_do_depart(law_of):
    p, q = LAWS["p and q differ"]
    for rule in (Threshold(0.15), Typical(), Cascade(0.4)):
        assert check_departures(law_of(rule, p, drawn(q, Tree.chain(2))), p) > 0.05
        assert check_departures(law_of(rule, p, most_likely(q, Tree.chain(2))), p) > 0.05


class Misstates(rules.Rule):
    """A lossy rule whose departures are not those of what it emits."""

    lossy = True

    def __init__(self, rule: rules.Rule, departures: Callable):
        self.rule, self.departures = rule, departures

    def verify(self, sampler, logits, contexts, proposal, generator):
        verdict = self.rule.verify(sampler, logits, contexts, proposal, generator)
        return replace(verdict, departures=self.departures(verdict, logits.softmax(-1), proposal))


def of_a_draft_that_always_stands(verdict, p, proposal):
    """Of a chain: TV(q, p) in every context that something was drafted in."""
    drafted = len(proposal.tokens)
    return [
        (float((proposal.probabilities[i] - p[i]).abs().sum()) / 2 if i < drafted else 0.0, False)
        for i in range(len(verdict.departures))
    ]


def of_another_context(verdict, p, proposal):
    return verdict.departures[1:] + verdict.departures[:1]


def none_at_all(verdict, p, proposal):
    return [(0.0, False)] * len(verdict.departures)


@pytest.mark.parametrize("mistake", [of_a_draft_that_always_stands, of_another_context, none_at_all])
@pytest.mark.parametrize("rule", [Typical(0.4, 0.6), Cascade(0.55)], ids=str)
def test_a_wrong_departure_is_found(law_of, rule, mistake):
    with pytest.raises(AssertionError):
        for p, q in LAWS.values():
            check_departures(law_of(Misstates(rule, mistake), p, drawn(q, Tree.chain(2))), p)


@pytest.mark.parametrize("rule", [Threshold(0.2), Typical(0.3, 0.6), Cascade(0.5)], ids=str)
def test_at_temperature_0_a_departure_is_a_token_that_is_not_the_argmax(rule):
    seen = set()
    for tree, tokens, logits in random_siblings(1):
        confidence = logits.softmax(-1).max(-1).values[[parent + 1 for parent in tree.parents]]
        proposal = Proposal(torch.tensor(tokens, dtype=torch.long), None, tree, confidence)
        verdict = rule.verify(GREEDY, logits, [], proposal, None)
        argmax = logits.argmax(-1).tolist()
        rows = [argmax[node + 1] for node in [ROOT, *verdict.path]]
        emitted = [*(tokens[node] for node in verdict.path), verdict.token]
        assert verdict.token == rows[-1]
        expected = [a != b for a, b in zip(emitted, rows, strict=True)]
        assert verdict.departures == [(float(wrong), wrong) for wrong in expected]
        seen |= set(expected)
    assert seen == {False, True}


@pytest.mark.parametrize("rule", [Threshold(), Typical(), Cascade()], ids=str)
def test_at_temperature_0_near_ties_are_the_exact_rules(rule):
    logits = torch.tensor([[1e-9, 2e-9, -1.0]] * 2)
    empty = Proposal(torch.zeros(0, dtype=torch.long), None, Tree.chain(0))
    assert rule.verify(GREEDY, logits[:1], [], empty, None).token == Exact().verify(
        GREEDY, logits[:1], [], empty, None
    ).token == 1  # fmt: skip
    verdict = verdict_of(rule, logits, [0], Tree.chain(1), [0.9])
    assert verdict.path == [0] and verdict.departures[0] == (1.0, True)


def test_at_temperature_0_levels_are_held_against_temperature_1():
    p = distributions_of([0.55, 0.45], [0.5, 0.5])
    assert verdict_of(Threshold(0.4), p, [1], Tree.chain(1)).path == [0]
    assert verdict_of(Threshold(0.5), p, [1], Tree.chain(1)).path == []


def test_levels_are_held_against_the_processed_law():
    p = distributions_of([0.6, 0.3, 0.1], [0.6, 0.3, 0.1])
    cut = Sampler.of(1.0, top_k=2)  # 0.3 becomes 1/3, 0.1 becomes 0
    generator = torch.Generator().manual_seed(0)
    for token, level, path in [(1, 0.32, [0]), (1, 0.34, []), (2, 0.0, [])]:
        proposal = Proposal(torch.tensor([token]), None, Tree.chain(1))
        verdict = Threshold(level).verify(cut, p, [], proposal, generator)
        assert verdict.path == path
        assert [d for d, _ in verdict.departures] == pytest.approx([2 / 3, 0.0] if path else [0.0])


@pytest.mark.parametrize("rule", [Threshold(0.0), Typical(), Cascade(0.0)], ids=str)
@pytest.mark.parametrize("name", ["two siblings", "two under the first"])
def test_siblings_that_were_drawn_are_refused(law_of, rule, name):
    p, q = LAWS["p and q differ"]
    message = r"^rule: expected a chain or a deterministic tree under a lossy rule, found siblings that were drawn$"
    with pytest.raises(InputError, match=message):
        law_of(rule, p, drawn(q, TREES[name]))


# Names and levels


def test_rules_have_names():
    assert {name: type(as_rule(name)) for name in RULES} == {
        "exact": Exact, "typical": Typical, "threshold": Threshold, "cascade": Cascade,
    }  # fmt: skip
    assert [as_rule(name) for name in ("typical", "threshold", "cascade")] == [
        Typical(0.09, 0.3), Threshold(0.3), Cascade(0.8),
    ]  # fmt: skip
    assert [as_rule(name).lossy for name in RULES] == [False, True, True, True]
    own = Threshold(0.5)
    assert as_rule(own) is own


@pytest.mark.parametrize("name", ["", "Exact", "sloppy"])
def test_an_unknown_rule_is_refused(name):
    with pytest.raises(InputError) as error:
        as_rule(name)
    assert str(error.value) == f"rule: expected one of exact, typical, threshold, cascade, found {name!r}"


@pytest.mark.parametrize("level", [-0.01, 1.0, math.nan, math.inf])
@pytest.mark.parametrize("rule", [Threshold, Typical])
def test_levels_of_a_probability_are_bounded(rule, level):
    with pytest.raises(InputError, match=f"^level: expected at least 0 and less than 1, found {level}$"):
        rule(level)


@pytest.mark.parametrize("level", [-0.01, 1.01, math.nan, math.inf])
def test_levels_of_a_confidence_are_bounded(level):
    with pytest.raises(InputError, match=f"^level: expected a value between 0 and 1, found {level}$"):
        Cascade(level)
    assert (Cascade(0.0).level, Cascade(1.0).level) == (0.0, 1.0)


@pytest.mark.parametrize("delta", [-0.1, math.nan])
def test_delta_is_not_negative(delta):
    with pytest.raises(InputError, match=f"^delta: expected at least 0, found {delta}$"):
        Typical(delta=delta)


@pytest.mark.parametrize(("q", "confidence"), [([1.0, 0.0, 0.0], 1.0), ([0.25] * 4, 0.25), ([0.5, 0.5, 0.0], 0.5)])
def test_drafts_end_where_the_drafter_is_unsure(q, confidence):
    sampler = torch.tensor(q, dtype=torch.float64)
    assert not stop_below_confidence(confidence - 1e-6)(sampler) and stop_below_confidence(confidence + 1e-6)(sampler)
    assert stop_below_confidence(confidence)(sampler) is False  # as confident as asked for
