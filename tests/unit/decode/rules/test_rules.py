"""Rules: which tokens stand, and the law of what is emitted, exactly.

The laws are computed, not sampled: where a rule would draw a random number, every outcome is followed in turn, and the
probabilities add up in double precision. V is 3 or 4, and every prefix has laws p and q of its own.
"""

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

from draftsmith.decode import Cascade, Exact, InputError, Proposal, Threshold, Tree, Typical
from draftsmith.decode.rules import RULES, acceptance, as_rule
from draftsmith.decode.rules import rule as rules
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


def drawn(q: Tables, tree: Tree) -> Drafts:
    """Every draft of that shape: each sibling drawn from what the earlier ones left of q, zeros if that is nothing."""
    found: list[tuple[float, list[int], list[Tensor]]] = [(1.0, [], [])]
    for node, parent in enumerate(tree.parents):
        longer = []
        for mass, tokens, distributions in found:
            whole = q[tuple(tokens[n] for n in tree.path(parent))]
            earlier = [tokens[n] for n in tree.children[parent + 1] if n < node]
            rest = whole.scatter(0, torch.tensor(earlier, dtype=torch.long), 0.0)
            rest = rest / rest.sum().clamp(min=torch.finfo(rest.dtype).tiny)
            chances = rest.tolist() if rest.any() else [1.0]  # nothing to draw: a token that does not count
            longer += [
                (mass * chance, [*tokens, x], [*distributions, rest]) for x, chance in enumerate(chances) if chance > 0
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


# The lossy rules: which tokens stand


def distributions_of(*rows: Sequence[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64).log()


def verdict_of(rule, logits, tokens, tree, confidence=None, sampler=GREEDY):
    confidence = None if confidence is None else torch.tensor(confidence)
    return rule.verify(sampler, logits, [], Proposal(torch.tensor(tokens), None, tree, confidence), None)


P_CHAIN = distributions_of([0.2, 0.5, 0.3], [0.3, 0.6, 0.1], [0.1, 0.1, 0.8], [0.0, 0.4, 0.6])


def p_of(position: int, token: int) -> float:
    return float(P_CHAIN.softmax(-1)[position, token])


@pytest.mark.parametrize(
    ("level", "tokens", "accepted"),
    [
        # p of 2, 0, 0 is 0.3, 0.3 and 0.1; the level itself is not above the level.
        *((level, [2, 0, 0], count) for level, count in ((0.0, 3), (0.05, 3), (0.19, 2), (0.2, 2))),
        (p_of(2, 0), [2, 0, 0], 2),
        (p_of(0, 2), [2, 0, 0], 0),
        # Nothing stands after a token that fell.
        (0.25, [0, 1, 2], 0),
        (0.25, [1, 2, 2], 1),
        # At 0 all that the target does not rule out.
        (0.0, [0, 2, 1], 3),
        (0.0, [0, 2, 0], 3),
    ],
)
@pytest.mark.parametrize("sampler", [GREEDY, SAMPLING])
def test_a_chain_stands_up_to_the_first_token_at_or_below_the_level(level, tokens, accepted, sampler):
    verdict = verdict_of(Threshold(level), P_CHAIN, tokens, Tree.chain(3), sampler=sampler)
    argmax = P_CHAIN.argmax(-1).tolist()
    assert verdict.path == list(range(accepted)) and len(verdict.departures) == accepted + 1
    if sampler is GREEDY:
        assert verdict.token == argmax[accepted]
        wrong = [token != best for token, best in zip(tokens[:accepted], argmax, strict=False)]
        assert verdict.departures == [(float(other), other) for other in (*wrong, False)]


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
def test_departures_are_those_of_what_is_emitted(law_of, rule, name):
    p, q = LAWS[name]
    for tree in TREES.values():
        check_departures(law_of(rule, p, most_likely(q, tree)), p)
    greatest = [check_departures(law_of(rule, p, drawn(q, Tree.chain(length))), p) for length in range(4)]
    assert greatest[0] < ROUNDING
    if name == "p = q" and not isinstance(rule, Threshold):
        assert max(greatest) < ROUNDING
    if name == "p and q differ" and rule in (Threshold(0.15), Typical(), Cascade(0.0)):
        assert greatest[2] > 0.05


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
    with pytest.raises(InputError, match=r"^rule: expected a chain or a deterministic tree"):
        law_of(rule, p, drawn(q, TREES[name]))


def test_rules_have_names():
    names = {"exact": Exact(), "typical": Typical(0.09, 0.3), "threshold": Threshold(0.3), "cascade": Cascade(0.8)}
    assert {name: as_rule(name) for name in RULES} == names
    assert [rule.lossy for rule in names.values()] == [False, True, True, True]
    own = Threshold(0.5)
    assert as_rule(own) is own


REFUSED = [
    *(("rule", as_rule, {"rule": name}) for name in ("", "Exact", "sloppy")),
    *(("level", rule, {"level": x}) for rule in (Threshold, Typical) for x in (-0.01, 1.0, math.nan, math.inf)),
    *(("level", Cascade, {"level": x}) for x in (-0.01, 1.01, math.nan, math.inf)),
    *(("delta", Typical, {"delta": x}) for x in (-0.1, math.nan)),
    ("rule", lambda: verdict_of(Cascade(), P_CHAIN, [0, 0, 0], Tree.chain(3)), {}),  # without a confidence
]


@pytest.mark.parametrize(("field", "make", "options"), REFUSED)
def test_what_no_rule_is_is_refused_by_its_field(field, make, options):
    with pytest.raises(InputError, match=f"^{field}: "):
        make(**options)
