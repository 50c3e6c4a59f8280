"""Replay of a batch of texts by one drafter, in five ways, by what the drafter's draft depends on.

Models run and are compared on the device, where no value is looked at; the results for a text's tokens are copied to
the host once, and summed there.

Shape suffixes: N tokens of a text, K positions of a draft, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.decode.counts import Counts, Ratios
from draftsmith.decode.replay.ranks import NONE, TextRanks, drafted_from
from draftsmith.decode.replay.rounds import expected_counts, on_host
from draftsmith.decode.replay.texts import WrittenText
from draftsmith.decode.tree import ROOT, Tree


@dataclass(frozen=True)
class BatchReplay:
    """The acceptance of a batch's texts by one drafter, from which every draft length is summed."""

    acceptance: list[Tensor]
    """For each text, the probability that a round that starts at each token accepts it, (N,); 0 where none drafts."""
    overlaps: list[Tensor]
    """For each text, Σ_v min(p, q) = 1 − TV(p, q) of the contexts in which such a round drafts, (≤ N,)."""
    counts: Callable[[int], Sequence[Ratios]]
    """For a draft length, a decoder's expected counts on each text."""
    chains: Callable[[int], list[Tensor]] | None = None
    """For a draft length, the probability that a round of a chain that starts at each token of a text accepts its j-th
    one, given that it accepted those before, (N, γ); None where the draft is not a chain."""


def replay_by_position(texts: Sequence[WrittenText], acceptance: list[Tensor], overlaps: list[Tensor]) -> BatchReplay:
    """Replay a chain whose q depends on the text before a token alone, as a draft model's does.

    Args:
        texts: what the target wrote.
        acceptance: a_i of each text's tokens, (N,).
        overlaps: Σ_v min(p, q) of each text's contexts, (N,).
    """
    acceptance, overlaps = _on_host(acceptance, overlaps)

    def counts(draft_length: int) -> Sequence[Ratios]:
        a_BN = torch.nn.utils.rnn.pad_sequence(acceptance, batch_first=True)
        a_BN = torch.nn.functional.pad(a_BN, (0, draft_length - 1))
        return expected_counts(a_BN.unfold(1, draft_length, 1), *_sizes(texts))

    def chains(draft_length: int) -> list[Tensor]:
        return [torch.nn.functional.pad(a_N, (0, draft_length - 1)).unfold(0, draft_length, 1) for a_N in acceptance]

    return BatchReplay(acceptance, overlaps, counts, chains)


def replay_by_start(
    texts: Sequence[WrittenText], acceptance: list[Tensor], overlaps: list[Tensor], first: int = 0
) -> BatchReplay:
    """Replay a chain whose q depends on where the round began too, as that of heads on the target's states does.

    Args:
        texts: what the target wrote.
        acceptance: a_{s,j} of each text's starts and offsets, (N, K), 0 where nothing is drafted.
        overlaps: Σ_v min(p, q) of the contexts at offset 0, (≤ N,).
        first: rounds that start before this token draft nothing.
    """
    acceptance, overlaps = _on_host(acceptance, overlaps)

    def counts(draft_length: int) -> Sequence[Ratios]:
        a_BNK = torch.nn.utils.rnn.pad_sequence(acceptance, batch_first=True)
        return expected_counts(a_BNK, *_sizes(texts), draft_length=draft_length, first=first)

    return BatchReplay([a[:, 0] for a in acceptance], overlaps, counts, lambda k: [a_NK[:, :k] for a_NK in acceptance])


def replay_by_start_ranks(texts: Sequence[TextRanks], tree: Tree, overlaps: list[Tensor]) -> BatchReplay:
    """Replay a tree of one shape at T=0 whose candidates depend on where the round began too.

    Args:
        texts: the ranks of their tokens among the drafter's logits, of at least the tree's depth and widths.
        tree: the shape.
        overlaps: for each context, whether the drafter's first choice is the token, (≤ N,).
    """
    firsts = [torch.from_numpy(text.ranks[:, 0]) for text in texts]
    return BatchReplay(
        [(ranks_N < len(tree.children[0])).float() for ranks_N in firsts],
        overlaps,
        lambda k: [text.counts(tree.pruned(k)[0]) for text in texts],
        # whatever the tree: of the most likely token at each depth
        lambda k: [torch.from_numpy(text.ranks[:, :k] == 0).float() for text in texts],
    )


def replay_by_ranks(
    texts: Sequence[WrittenText], ranks: Sequence[Tensor], tree: Tree, overlaps: list[Tensor]
) -> BatchReplay:
    """Replay a tree of one shape at T=0 whose candidates depend on the text before a token alone.

    Args:
        texts: what the target wrote.
        ranks: of each text's tokens among the drafter's logits, (N,), as `ranks_of` has them.
        tree: the shape.
        overlaps: for each context, whether the drafter's first choice is the token, (N,).
    """
    widths = [max(len(tree.children[node + 1]) for node in range(ROOT, len(tree)))] * tree.depth
    text_ranks, ranks, overlaps = [], on_host(*ranks), on_host(*overlaps)
    for text, ranks_N in zip(texts, ranks, strict=True):
        padded = torch.nn.functional.pad(ranks_N, (0, tree.depth - 1), value=NONE)
        by_start = padded.unfold(0, tree.depth, 1).numpy().copy()
        by_start[~drafted_from(len(text), tree.depth, text.limit, first=0)] = NONE
        text_ranks.append(TextRanks(by_start, tuple(widths), text.limit, first=0))
    acceptance = [(ranks_N < len(tree.children[0])).float() for ranks_N in ranks]
    return BatchReplay(acceptance, overlaps, lambda k: [text.counts(tree.pruned(k)[0]) for text in text_ranks])


def _on_host(*lists: list[Tensor]) -> list[list[Tensor]]:
    """Return lists of as many tensors each on the host, by one copy."""
    found, each = on_host(*(tensor for some in lists for tensor in some)), len(lists[0])
    return [found[at : at + each] for at in range(0, len(found), each)]


def _sizes(texts: Sequence[WrittenText]) -> tuple[Tensor, Tensor]:
    return torch.tensor([len(text) for text in texts]), torch.tensor([text.limit for text in texts])


Draft = Callable[[Tensor, int], tuple[Tensor, Tree]]
"""Of a context (T,) and a draft length: tokens and shape."""


def replay_by_walk(texts: Sequence[WrittenText], distributions: Sequence[Tensor] | None, draft: Draft) -> BatchReplay:
    """Replay deterministic drafts: a round accepts what they share with the text, at any temperature.

    Args:
        texts: what the target wrote.
        distributions: the target's distributions of each text's tokens, (N, V); None at T=0.
        draft: what is drafted behind a context.
    """
    acceptance, overlaps = [], []
    for index, text in enumerate(texts):
        hits, shares = torch.zeros(len(text)), torch.zeros(len(text))
        for start in range(min(len(text), text.limit - 1)):
            tokens, tree = draft(text.sequence[: text.prompt_length + start], 1)
            named = tokens[list(tree.children[0])]
            hits[start] = float((named == text.tokens[start]).any())
            # One-hot on one token, which is what α is defined for: that of the first child.
            shares[start] = (
                float(distributions[index][start, named[0]])
                if distributions is not None and len(named)
                else hits[start]
            )
        acceptance.append(hits)
        overlaps.append(shares)

    def counts(draft_length: int) -> Sequence[Ratios]:
        return [_walked_counts(text, draft_length, draft) for text in texts]

    return BatchReplay(acceptance, overlaps, counts)


def _walked_counts(text: WrittenText, draft_length: int, draft: Draft) -> Counts:
    wanted, counts, start = text.tokens.tolist(), Counts(), 0
    while start < len(text):
        depth = min(draft_length, text.limit - start - 1)
        tokens, tree = draft(text.sequence[: text.prompt_length + start], depth)
        named, node, accepted = tokens.tolist(), ROOT, 0
        while start + accepted < len(text):
            node = next((n for n in tree.children[node + 1] if named[n] == wanted[start + accepted]), ROOT)
            if node == ROOT:
                break
            accepted += 1
        emitted = min(accepted + 1, len(text) - start)
        counts += Counts.of_round(tree, accepted, emitted)
        start += emitted
    return counts
