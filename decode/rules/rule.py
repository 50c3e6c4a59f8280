"""Rules of acceptance: the lossless one, and lossy ones that report how far they depart from p."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.decode.cache.forward import NO_TOKEN
from draftsmith.decode.cache.layers import READ_AT_ONCE
from draftsmith.decode.errors import InputError
from draftsmith.decode.proposers.base import Proposal
from draftsmith.decode.rules.acceptance import accept_exact, accept_greedy
from draftsmith.decode.rules.verification import (
    Generator,
    Processed,
    Verdict,
    chain_verdicts,
    greedy_verdicts,
    next_tokens,
    tree_verdicts,
)
from draftsmith.decode.sampling import Sampler, draw
from draftsmith.decode.tree import ROOT, Tree


class Rule(ABC):
    """A rule that verifies drafts."""

    lossy: bool  # true if the output's distribution may differ from the target's; no drawn siblings are verified then

    @abstractmethod
    def verify(
        self, sampler: Sampler, logits: Tensor, contexts: Sequence[Tensor], proposal: Proposal, generator: Generator
    ) -> Verdict:
        """Return the accepted drafted tokens of one row, and the token after them.

        `logits` are the target's, (K + 1, V), the root's first; `contexts` are the tokens before each of them.
        """

    def verify_batch(
        self,
        samplers: Sequence[Sampler],
        logits: Tensor,
        contexts: Sequence[Sequence[Tensor]],
        proposals: Sequence[Proposal],
        generators: Sequence[Generator],
        likeliest: Tensor | None = None,
    ) -> list[Verdict]:
        """Return each row's verdict, from logits (B, K + 1, V) for the largest draft's K tokens.

        `likeliest` are their argmax tokens, (B, K + 1), `NO_TOKEN` for NaN, where the target ran compiled.
        """
        rows = zip(samplers, logits, contexts, proposals, generators, strict=True)
        return [
            self.verify(sampler, logits_KV[: 1 + len(proposal.tokens)], texts, proposal, generator)
            for sampler, logits_KV, texts, proposal, generator in rows
        ]


@dataclass(frozen=True)
class Exact(Rule):
    """The lossless rule: the output has the target's distribution for any draft (see `accept_exact`)."""

    lossy = False

    def verify(
        self, sampler: Sampler, logits: Tensor, contexts: Sequence[Tensor], proposal: Proposal, generator: Generator
    ) -> Verdict:
        """Accept by rejection sampling, or at T=0 while the draft names the argmax."""
        p = Processed(sampler, logits, contexts)
        if not sampler.do_sample:
            path, token = accept_greedy(p, proposal.tokens.tolist(), proposal.tree)
        else:
            q = proposal.dense(logits.shape[-1]).probabilities
            path, last = accept_exact(p, q, proposal.tokens, proposal.tree, generator)
            token = int(last)
        return Verdict(path, NO_TOKEN if p.broken else token)

    def verify_batch(
        self,
        samplers: Sequence[Sampler],
        logits: Tensor,
        contexts: Sequence[Sequence[Tensor]],
        proposals: Sequence[Proposal],
        generators: Sequence[Generator],
        likeliest: Tensor | None = None,
    ) -> list[Verdict]:
        """Verify all rows at once, with one transfer, where processors read nothing but the scores."""
        if logits.shape[1] == 1:  # nothing was drafted; draws are eager, for a program of their own would be compiled
            texts, known = [texts[0] for texts in contexts], None if samplers[0].do_sample else likeliest
            tokens = next_tokens(samplers, logits[:, 0], texts, generators, known)
            return [Verdict([], token, []) for token in tokens.tolist()]
        sampler = samplers[0]
        if not sampler.context_free:
            return super().verify_batch(samplers, logits, contexts, proposals, generators)
        if not sampler.do_sample:
            return greedy_verdicts(sampler, logits, proposals, likeliest)
        if all(proposal.tree.is_chain for proposal in proposals):
            compiled = likeliest is not None
            # Where the host reads values for free, `verify` takes a single chain token by token.
            if len(proposals) == 1 and not compiled and logits.device.type in READ_AT_ONCE:
                return super().verify_batch(samplers, logits, contexts, proposals, generators)
            return chain_verdicts(sampler, logits, proposals, generators, compiled)
        # Trees are judged together if all are deterministic, or all have siblings' supports.
        drafted = [proposal for proposal in proposals if len(proposal.tokens)]
        drawn = [proposal.siblings is not None for proposal in drafted]
        if any(proposal.probabilities is not None for proposal in drafted) or any(drawn) != all(drawn):
            return super().verify_batch(samplers, logits, contexts, proposals, generators)
        return tree_verdicts(sampler, logits, proposals, generators)


@dataclass(frozen=True)
class Threshold(Rule):
    """Lossy: accept a drafted token while the target's probability of it is above a level.

    In a tree the longest accepted path wins. At T=0 the processed logits give the probability at temperature 1.
    """

    level: float = 0.3
    lossy = True

    def __post_init__(self) -> None:
        if not 0 <= self.level < 1:
            raise InputError(f"level: expected at least 0 and less than 1, found {self.level}")

    def levels(self, p: Tensor) -> Tensor:
        """Return the level for each distribution p, (K + 1, V) → (K + 1,)."""
        return p.new_full(p.shape[:1], self.level)

    def verify(
        self, sampler: Sampler, logits: Tensor, contexts: Sequence[Tensor], proposal: Proposal, generator: Generator
    ) -> Verdict:
        """Accept the longest path of tokens above their levels."""
        scores = _scores(sampler, logits, contexts, proposal)
        p = scores.softmax(-1)
        levels, tree = self.levels(p), proposal.tree
        parents = torch.tensor(tree.parents, dtype=torch.long, device=p.device) + 1
        p_x = p[parents, proposal.tokens]
        above = (p_x > levels[parents]).tolist()
        # A node counts if it and all its ancestors are above their levels; of equally deep ones the first wins.
        passed = [False] * len(tree)
        for node, parent in enumerate(tree.parents):
            passed[node] = above[node] and (parent == ROOT or passed[parent])
        nodes = (node for node in range(len(tree)) if passed[node])
        path = tree.path(max(nodes, key=lambda node: (tree.depths[node], -node), default=ROOT))

        def emitted_distribution(node: int) -> Tensor | None:
            """Return the distribution of the token after `node` where a drawn candidate was tried."""
            children = tree.children[node + 1]
            if proposal.probabilities is None or not children:
                return None
            _refuse_drawn_siblings(tree, node)
            q, p_here = proposal.probabilities[children[0]], p[node + 1]
            # A candidate from q passes where p is above the level; otherwise the token comes from p.
            passing = q * (p_here > levels[node + 1])
            return passing + (1 - passing.sum()) * p_here

        return _verdict(sampler, scores, p, proposal, path, emitted_distribution, generator)


@dataclass(frozen=True)
class Typical(Threshold):
    """Lossy: typical acceptance (Cai et al. 2024, section 2.3.1), with level min(ε, δ·exp(−H(p))).

    `level` is ε, and H the entropy of p: less likely tokens pass where the target is unsure.
    """

    level: float = 0.09
    delta: float = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.delta >= 0:
            raise InputError(f"delta: expected at least 0, found {self.delta}")

    def levels(self, p: Tensor) -> Tensor:
        """Return min(ε, δ·exp(−H(p)))."""
        entropy = torch.special.entr(p).sum(-1)
        return (self.delta * (-entropy).exp()).clamp(max=self.level)


@dataclass(frozen=True)
class Cascade(Rule):
    """Lossy: accept drafted tokens unverified while the drafter is confident, then let the target decide.

    Confidence is max q, the probability of the drafter's most likely token. The departure costs nothing to measure,
    since the cache needs the target's forward over the accepted tokens anyway.
    """

    level: float = 0.8
    lossy = True

    def __post_init__(self) -> None:
        if not 0 <= self.level <= 1:
            raise InputError(f"level: expected a value between 0 and 1, found {self.level}")

    def verify(
        self, sampler: Sampler, logits: Tensor, contexts: Sequence[Tensor], proposal: Proposal, generator: Generator
    ) -> Verdict:
        """Accept the tokens before the first one that the drafter was unsure about."""
        if proposal.confidence is None and len(proposal.tree):
            raise InputError("rule: cascade needs a proposer that knows its confidence, such as a draft model")
        tree = proposal.tree
        confident = [] if proposal.confidence is None else (proposal.confidence >= self.level).tolist()
        path: list[int] = []
        node = ROOT
        while tree.children[node + 1] and confident[tree.children[node + 1][0]]:
            node = tree.children[node + 1][0]
            path.append(node)
        scores = _scores(sampler, logits, contexts, proposal)
        p = scores.softmax(-1)

        def emitted_distribution(node: int) -> Tensor | None:
            children = tree.children[node + 1]
            if proposal.probabilities is None or not children or not confident[children[0]]:
                return None
            _refuse_drawn_siblings(tree, node)
            return proposal.probabilities[children[0]]

        return _verdict(sampler, scores, p, proposal, path, emitted_distribution, generator)


RULES: dict[str, type[Rule]] = {"exact": Exact, "typical": Typical, "threshold": Threshold, "cascade": Cascade}


def as_rule(rule: "str | Rule") -> Rule:
    """Return the rule of a name, with its default level, or the rule itself; an `InputError` for an unknown name."""
    if not isinstance(rule, str):
        return rule
    if rule not in RULES:
        raise InputError(f"rule: expected one of {', '.join(RULES)}, found {rule!r}")
    return RULES[rule]()


def _scores(sampler: Sampler, logits: Tensor, contexts: Sequence[Tensor], proposal: Proposal) -> Tensor:
    """Return the target's processed logits after a text and after each node, (K + 1, V)."""
    if sampler.context_free:
        return sampler.scores(logits, [])
    texts = [contexts[0]]
    scores = [sampler.scores(logits[:1], texts)]
    for node, parent in enumerate(proposal.tree.parents):
        token = proposal.tokens[node : node + 1]
        texts.append(sampler.after(texts[parent + 1], token, scores[parent + 1][0, token]))
        scores.append(sampler.scores(logits[node + 1 : node + 2], texts[-1:]))
    return torch.cat(scores)


def _verdict(
    sampler: Sampler,
    scores: Tensor,
    p: Tensor,
    proposal: Proposal,
    path: list[int],
    emitted_distribution: Callable[[int], Tensor | None],
    generator: Generator,
) -> Verdict:
    """Add the token after the path, and the departure from p of each emitted token's distribution."""
    last = path[-1] if path else ROOT
    # At T=0 by the scores, since softmax rounds near-ties to ties.
    token = int(draw(p[last + 1], generator) if sampler.do_sample else scores[last + 1].argmax())
    if bool(p[[node + 1 for node in (ROOT, *path)], 0].isnan().any()):
        return Verdict(path, NO_TOKEN)
    departures = []
    for node, child in zip([ROOT, *path], [*path, None], strict=True):
        p_here = p[node + 1]
        if not sampler.do_sample:
            wrong = child is not None and int(proposal.tokens[child]) != int(scores[node + 1].argmax())
            departures.append((float(wrong), wrong))
            continue
        emitted = emitted_distribution(node)
        if emitted is not None:
            departures.append((float((emitted - p_here).abs().sum()) / 2, False))
        else:  # a certain token has a one-hot distribution, and a token drawn by the target has p
            departures.append((0.0 if child is None else 1 - float(p_here[proposal.tokens[child]]), False))
    return Verdict(path, token, departures=departures)


def _refuse_drawn_siblings(tree: Tree, node: int) -> None:
    if len(tree.children[node + 1]) > 1:
        raise InputError(
            "rule: expected a chain or a deterministic tree under a lossy rule, found siblings that were drawn"
        )
