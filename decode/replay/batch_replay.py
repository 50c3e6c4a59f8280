"""Replay of a batch of texts by one drafter, in several ways, by what the drafter's draft depends on.

Models run and are compared on the device, where no value is looked at; the results for a text's tokens are copied to
the host once, and summed there.

Shape suffixes: N tokens of a text, K positions of a draft, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from draftsmith.decode.counts import Ratios
from draftsmith.decode.replay.ranks import NONE, TextRanks, drafted_from
from draftsmith.decode.replay.rounds import expected_counts, on_host, start_probabilities
from draftsmith.decode.replay.texts import WrittenText
from draftsmith.decode.tree import ROOT, Tree


@dataclass(frozen=True)
class StartRounds:
    """The rounds that would start at each token of a text, with one draft length γ."""

    acceptance: Tensor
    """The probability that a round accepts a token at each depth, given that it accepted those before, (N, γ)."""
    widths: Tensor
    """How many tokens it drafts at each depth, (N, γ); 0 where the text has no room for more."""


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
    rounds: Callable[[int], list[StartRounds]] | None = None
    """For a draft length, each text's; None where drafts of other kinds cannot take turns with these."""
    sources: Sequence[Tensor] = ()
    """Where drafters take turns, whose draft is taken in a round that starts at each token of a text, (N,)."""

    def sizes(self, texts: Sequence[WrittenText], draft_length: int) -> list[np.ndarray] | None:
        """Return for each text how many rounds are expected of each drafter and number of drafted tokens, (S, K + 1).

        None where rounds from each start are not known.
        """
        if self.rounds is None:
            return None
        rounds = self.rounds(draft_length)
        a_BNK = pad_sequence([each.acceptance for each in rounds], batch_first=True)
        starts_BN = start_probabilities(a_BNK.double(), _sizes(texts)[0]).numpy()
        found = []
        for row, each in enumerate(rounds):
            drafted_N = each.widths.sum(1).numpy()
            source_N = self.sources[row].numpy() if self.sources else np.zeros_like(drafted_N)
            counts = np.zeros((int(source_N.max(initial=0)) + 1, int(drafted_N.max(initial=0)) + 1))
            np.add.at(counts, (source_N, drafted_N), starts_BN[row, : len(drafted_N)])
            found.append(counts)
        return found


def replay_by_position(texts: Sequence[WrittenText], acceptance: list[Tensor], overlaps: list[Tensor]) -> BatchReplay:
    """Replay a chain whose q depends on the text before a token alone, as a draft model's does.

    Args:
        texts: what the target wrote.
        acceptance: a_i of each text's tokens, (N,).
        overlaps: Σ_v min(p, q) of each text's contexts, (N,).
    """
    acceptance, overlaps = _on_host(acceptance, overlaps)

    def counts(draft_length: int) -> Sequence[Ratios]:
        a_BN = pad_sequence(acceptance, batch_first=True)
        a_BN = torch.nn.functional.pad(a_BN, (0, draft_length - 1))
        return expected_counts(a_BN.unfold(1, draft_length, 1), *_sizes(texts))

    def chains(draft_length: int) -> list[Tensor]:
        return [torch.nn.functional.pad(a_N, (0, draft_length - 1)).unfold(0, draft_length, 1) for a_N in acceptance]

    def rounds(draft_length: int) -> list[StartRounds]:
        every = zip(texts, chains(draft_length), strict=True)
        return [StartRounds(a_NK, _chain_widths(text, draft_length)) for text, a_NK in every]

    return BatchReplay(acceptance, overlaps, counts, chains, rounds)


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
        a_BNK = pad_sequence(acceptance, batch_first=True)
        return expected_counts(a_BNK, *_sizes(texts), draft_length=draft_length, first=first)

    def rounds(draft_length: int) -> list[StartRounds]:
        found = []
        for text, a_NK in zip(texts, acceptance, strict=True):
            a_NK = a_NK[:, :draft_length]
            found.append(StartRounds(a_NK, _chain_widths(text, a_NK.shape[1], first)))
        return found

    firsts = [a[:, 0] for a in acceptance]
    return BatchReplay(firsts, overlaps, counts, lambda k: [a_NK[:, :k] for a_NK in acceptance], rounds)


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
        lambda k: [_tree_rounds(text, tree.pruned(k)[0]) for text in texts],
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
    return BatchReplay(
        acceptance,
        overlaps,
        lambda k: [text.counts(tree.pruned(k)[0]) for text in text_ranks],
        rounds=lambda k: [_tree_rounds(text, tree.pruned(k)[0]) for text in text_ranks],
    )


def _on_host(*lists: list[Tensor]) -> list[list[Tensor]]:
    """Return lists of as many tensors each on the host, by one copy."""
    found, each = on_host(*(tensor for some in lists for tensor in some)), len(lists[0])
    return [found[at : at + each] for at in range(0, len(found), each)]


def _sizes(texts: Sequence[WrittenText]) -> tuple[Tensor, Tensor]:
    return torch.tensor([len(text) for text in texts]), torch.tensor([text.limit for text in texts])


CertainDrafts = Callable[[WrittenText, int], Sequence[tuple[Sequence[int], Tree]]]
"""Of a text and a draft length: tokens and shape of the draft of a round that starts at each of its tokens."""


def replay_certain(
    texts: Sequence[WrittenText], distributions: Sequence[Tensor] | None, drafts: CertainDrafts
) -> BatchReplay:
    """Replay drafts that nothing is drawn for: a round accepts what they share with the text, at any temperature.

    Args:
        texts: what the target wrote.
        distributions: the target's distributions of each text's tokens, (N, V); None at T=0.
        drafts: what is drafted.
    """
    acceptance, overlaps = [], []
    for index, text in enumerate(texts):
        named = [[tokens[node] for node in tree.children[0]] for tokens, tree in drafts(text, 1)]
        wanted = text.tokens.tolist()
        hits = torch.tensor([float(token in siblings) for token, siblings in zip(wanted, named, strict=True)])
        shares = hits.clone()
        if distributions is not None:
            # One-hot on one token, which is what α is defined for: that of the first child.
            starts = [start for start, siblings in enumerate(named) if siblings]
            first = torch.tensor([named[start][0] for start in starts], dtype=torch.long)
            shares[starts] = distributions[index].cpu()[starts, first].to(shares.dtype)
        acceptance.append(hits)
        overlaps.append(shares)

    @lru_cache
    def rounds(draft_length: int) -> list[StartRounds]:
        return [_certain_rounds(text, draft_length, drafts(text, draft_length)) for text in texts]

    return BatchReplay(acceptance, overlaps, lambda k: counts_of_rounds(texts, rounds(k)), rounds=rounds)


def counts_of_rounds(texts: Sequence[WrittenText], rounds: Sequence[StartRounds]) -> list[Ratios]:
    """Return what a decoder is expected to count on each text."""
    a_BNK, widths_BNK = (
        pad_sequence([getattr(each, name) for each in rounds], batch_first=True) for name in ("acceptance", "widths")
    )
    return expected_counts(a_BNK, *_sizes(texts), widths_BNK=widths_BNK)


def _certain_rounds(text: WrittenText, draft_length: int, drafts: Sequence[tuple[Sequence[int], Tree]]) -> StartRounds:
    wanted = text.tokens.tolist()
    acceptance, widths = np.zeros((len(text), draft_length), np.float32), np.zeros((len(text), draft_length), np.int64)
    for start, (tokens, tree) in enumerate(drafts):
        widths[start, : tree.depth] = _widths(tree)
        node, accepted = ROOT, 0
        while start + accepted < len(text):
            wants = wanted[start + accepted]
            node = next((child for child in tree.children[node + 1] if tokens[child] == wants), ROOT)
            if node == ROOT:
                break
            acceptance[start, accepted] = 1.0
            accepted += 1
    return StartRounds(torch.from_numpy(acceptance), torch.from_numpy(widths))


def _tree_rounds(text: TextRanks, tree: Tree) -> StartRounds:
    widths = np.zeros((len(text), tree.depth), np.int64)
    for start in range(len(text)):
        drafted = tree.pruned(max(0, text.limit - start - 1) if start >= text.first else 0)[0]
        widths[start, : drafted.depth] = _widths(drafted)
    return StartRounds(torch.from_numpy((text.nodes(tree) != ROOT).astype(np.float32)), torch.from_numpy(widths))


def _chain_widths(text: WrittenText, draft_length: int, first: int = 0) -> Tensor:
    start, offset = torch.arange(len(text))[:, None], torch.arange(draft_length)
    return ((start >= first) & (offset < text.limit - start - 1)).long()


@lru_cache(maxsize=1024)
def _widths(tree: Tree) -> np.ndarray:
    """Return how many nodes a tree has at each depth, (depth,)."""
    return np.bincount(np.array(tree.depths, dtype=np.int64), minlength=tree.depth + 1)[1:]
