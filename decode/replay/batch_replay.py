"""Replay of a batch of texts by one drafter: a function for each way in which drafts depend on the text.

Models run on the device without synchronisation. The results of all texts are copied to the host once and summed there.

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
from draftsmith.decode.replay.ranks import NONE, TextRanks, drafted_mask
from draftsmith.decode.replay.rounds import expected_counts, on_host, start_probabilities
from draftsmith.decode.replay.texts import AtTokens, WrittenText, chunks
from draftsmith.decode.tree import ROOT, Tree


@dataclass(frozen=True)
class StartRounds:
    """The rounds that would start at each token of a text, for one draft length γ."""

    acceptance: Tensor  # the probability that a round accepts a token at each depth, given the tokens before it, (N, γ)
    widths: Tensor  # the number of tokens drafted at each depth, (N, γ); 0 where the text has no room


@dataclass(frozen=True)
class Stretches:
    """Sums over L stretches of a text: tokens with one label, such as a part of it or a range of context lengths."""

    labels: np.ndarray  # the label of each stretch, (L,) int, ascending
    tokens: np.ndarray  # (L,)
    contexts: np.ndarray  # the contexts that the overlap was summed over, (L,)
    overlap: np.ndarray  # Σ over contexts of Σ_v min(p, q), (L,)
    rounds: dict[int, np.ndarray]
    """For each γ, the expected rounds that start in it, by S drafters and 0 … K drafted tokens, (S, K + 1, L)."""
    accepted: dict[int, np.ndarray]  # for each γ, the expected accepted tokens in it, by S drafters, (S, L)

    def within(self, labels: Sequence[int]) -> "Stretches":
        """Return the stretches with these labels."""
        kept = np.isin(self.labels, labels)
        return Stretches(
            self.labels[kept],
            self.tokens[kept],
            self.contexts[kept],
            self.overlap[kept],
            {k: rounds[..., kept] for k, rounds in self.rounds.items()},
            {k: accepted[:, kept] for k, accepted in self.accepted.items()},
        )


@dataclass(frozen=True)
class BatchReplay:
    """The acceptance of a batch's texts by one drafter, from which the counts for every draft length follow."""

    acceptance: list[Tensor]
    """For each text, the probability that a round that starts at a token accepts it, (N,); 0 if it drafts none."""
    overlaps: list[Tensor]
    """For each text, Σ_v min(p, q) = 1 − TV(p, q) of the contexts in which such a round drafts, (≤ N,)."""
    counts: Callable[[int], Sequence[Ratios]]  # (draft length) → a decoder's expected counts on each text
    chains: Callable[[int], list[Tensor]] | None = None
    """(draft length) → for each text, the probability that a chain from each token has its j-th token accepted, given
    the tokens before it, (N, γ); None if drafts are not chains."""
    rounds: Callable[[int], list[StartRounds]] | None = None
    """(draft length) → each text's rounds; None if these drafts cannot take turns with other drafters'."""
    sources: Sequence[Tensor] = ()
    """For each text, if drafters take turns, the index of the drafter of a round from each token, (N,)."""

    def stretches(
        self, texts: Sequence[WrittenText], labels: Sequence[np.ndarray], draft_lengths: Sequence[int]
    ) -> list[Stretches] | None:
        """Return sums over each text's stretches: `labels` are those of its tokens, (N,); None if not known."""
        if self.rounds is None:
            return None
        rounds = {k: self.rounds(k) for k in draft_lengths}
        starts = {k: _starts(texts, rounds_k) for k, rounds_k in rounds.items()}
        firsts, stretches = self.rounds(1), []
        for row, overlap in enumerate(self.overlaps):
            distinct, label_N = np.unique(labels[row], return_inverse=True)
            source_N = self.sources[row].numpy() if self.sources else np.zeros_like(label_N)
            overlap_N, in_context_N = (x.numpy() for x in overlap_by_start(overlap, firsts[row]))
            summed = {k: _summed(rounds_k[row], starts[k][row], source_N, label_N) for k, rounds_k in rounds.items()}
            stretches.append(
                Stretches(
                    distinct,
                    np.bincount(label_N),
                    np.bincount(label_N, in_context_N),
                    np.bincount(label_N, overlap_N),
                    {k: by_size for k, (by_size, _) in summed.items()},
                    {k: accepted for k, (_, accepted) in summed.items()},
                )
            )
        return stretches


def overlap_by_start(overlap: Tensor, rounds: StartRounds) -> tuple[Tensor, Tensor]:
    """Return the overlap at each start, 0 where nothing is drafted, and the mask of contexts, (N,) each.

    `overlap`, (≤ N,), has an entry for each start, or for each at which something is drafted.
    """
    drafts_N = rounds.widths[:, 0] > 0
    if len(overlap) == len(drafts_N):
        return overlap.double(), torch.ones_like(drafts_N)
    return torch.zeros(len(drafts_N), dtype=torch.double).masked_scatter_(drafts_N, overlap.double()), drafts_N


def _starts(texts: Sequence[WrittenText], rounds: Sequence[StartRounds]) -> np.ndarray:
    """Return the probability that a round starts at each token, (B, N)."""
    a_BNK = pad_sequence([start_rounds.acceptance for start_rounds in rounds], batch_first=True)
    return start_probabilities(a_BNK.double(), _sizes(texts)[0]).numpy()


def _summed(
    rounds: StartRounds, start_N: np.ndarray, source_N: np.ndarray, label_N: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return `Stretches.rounds` and `Stretches.accepted` of one draft length."""
    drafted_N, n, reach_N = rounds.widths.sum(1).numpy(), len(label_N), start_N[: len(label_N)]
    by_size = _counted(reach_N, source_N, drafted_N, label_N)
    accepted = np.zeros((len(by_size), by_size.shape[-1]))
    # Where the text has no room the table may hold an acceptance, but nothing is drafted.
    a_NK = rounds.acceptance.where(rounds.widths > 0, 0.0).double().numpy()
    for offset in range(min(n, a_NK.shape[1])):
        # The token at `offset` belongs to its own stretch, which need not be that of the round's start.
        reach_N = reach_N[: n - offset] * a_NK[: n - offset, offset]
        sums = _counted(reach_N, source_N[: n - offset], label_N[offset:])
        accepted[: len(sums), : sums.shape[1]] += sums
    return by_size, accepted


def _counted(weights_N: np.ndarray, *indices_N: np.ndarray) -> np.ndarray:
    """Return the weights summed at each combination of indices, an axis for each."""
    shape = tuple(int(index_N.max()) + 1 for index_N in indices_N)
    return np.bincount(np.ravel_multi_index(indices_N, shape), weights_N, int(np.prod(shape))).reshape(shape)


def replay_by_position(texts: Sequence[WrittenText], acceptance: list[Tensor], overlaps: list[Tensor]) -> BatchReplay:
    """Replay a chain whose q depends only on the text before a token, as a draft model's does.

    `acceptance` are a_i of each text's tokens, (N,), and `overlaps` Σ_v min(p, q) of each text's contexts, (N,).
    """
    acceptance, overlaps = _on_host(acceptance, overlaps)

    def counts(draft_length: int) -> Sequence[Ratios]:
        # The j-th token of a round from t has the acceptance of position t + j: a sliding window.
        a_BN = pad_sequence(acceptance, batch_first=True)
        a_BN = torch.nn.functional.pad(a_BN, (0, draft_length - 1))
        return expected_counts(a_BN.unfold(1, draft_length, 1), *_sizes(texts))

    def chains(draft_length: int) -> list[Tensor]:
        return [torch.nn.functional.pad(a_N, (0, draft_length - 1)).unfold(0, draft_length, 1) for a_N in acceptance]

    def rounds(draft_length: int) -> list[StartRounds]:
        pairs = zip(texts, chains(draft_length), strict=True)
        return [StartRounds(a_NK, _chain_widths(text, draft_length)) for text, a_NK in pairs]

    return BatchReplay(acceptance, overlaps, counts, chains, rounds)


def replay_by_start(
    texts: Sequence[WrittenText], acceptance: list[Tensor], overlaps: list[Tensor], first: int = 0
) -> BatchReplay:
    """Replay a chain whose q also depends on where the round began, as with heads on the target's states.

    `acceptance` are a_{s,j} of each text's starts and offsets, (N, K), 0 where nothing is drafted. `overlaps` are
    Σ_v min(p, q) at offset 0, (≤ N,). Rounds that start before token `first` draft nothing.
    """
    acceptance, overlaps = _on_host(acceptance, overlaps)

    def counts(draft_length: int) -> Sequence[Ratios]:
        a_BNK = pad_sequence(acceptance, batch_first=True)
        return expected_counts(a_BNK, *_sizes(texts), draft_length=draft_length, first=first)

    def rounds(draft_length: int) -> list[StartRounds]:
        pairs = zip(texts, chains(draft_length), strict=True)
        return [StartRounds(a_NK, _chain_widths(text, a_NK.shape[1], first)) for text, a_NK in pairs]

    def chains(draft_length: int) -> list[Tensor]:
        return [a_NK[:, :draft_length] for a_NK in acceptance]

    return BatchReplay([a_NK[:, 0] for a_NK in acceptance], overlaps, counts, chains, rounds)


def replay_by_start_ranks(texts: Sequence[TextRanks], tree: Tree, overlaps: list[Tensor]) -> BatchReplay:
    """Replay a tree of fixed shape at T=0 whose candidates also depend on where the round began.

    `texts` hold the rank of each token among the drafter's logits, to at least the tree's depth and widths.
    `overlaps` are 1 in the contexts where the drafter's argmax is the token and 0 elsewhere, (≤ N,).
    """
    firsts = [torch.from_numpy(text.ranks[:, 0]) for text in texts]
    return BatchReplay(
        [(ranks_N < len(tree.children[0])).float() for ranks_N in firsts],
        overlaps,
        lambda k: [text.counts(tree.pruned(k)[0]) for text in texts],
        # Chains of the most likely token at each depth, for servers that draft no trees.
        lambda k: [torch.from_numpy(text.ranks[:, :k] == 0).float() for text in texts],
        lambda k: [_tree_rounds(text, tree.pruned(k)[0]) for text in texts],
    )


def replay_by_ranks(
    texts: Sequence[WrittenText], ranks: Sequence[Tensor], tree: Tree, overlaps: list[Tensor]
) -> BatchReplay:
    """Replay a tree of fixed shape at T=0 whose candidates depend only on the text before a token.

    `ranks` are those of each text's tokens among the drafter's logits, (N,), as `ranks_of` returns them. `overlaps` are
    1 in the contexts where the drafter's argmax is the token and 0 elsewhere, (N,).
    """
    widths = [max(len(tree.children[node + 1]) for node in range(ROOT, len(tree)))] * tree.depth
    text_ranks, ranks, overlaps = [], on_host(*ranks), on_host(*overlaps)
    for text, ranks_N in zip(texts, ranks, strict=True):
        padded = torch.nn.functional.pad(ranks_N, (0, tree.depth - 1), value=NONE)
        by_start = padded.unfold(0, tree.depth, 1).numpy().copy()
        by_start[~drafted_mask(len(text), tree.depth, text.limit, first=0)] = NONE
        text_ranks.append(TextRanks(by_start, tuple(widths), text.limit, first=0))
    acceptance = [(ranks_N < len(tree.children[0])).float() for ranks_N in ranks]
    return BatchReplay(
        acceptance,
        overlaps,
        lambda k: [text.counts(tree.pruned(k)[0]) for text in text_ranks],
        rounds=lambda k: [_tree_rounds(text, tree.pruned(k)[0]) for text in text_ranks],
    )


def _on_host(*lists: list[Tensor]) -> list[list[Tensor]]:
    """Return lists of equal length with their tensors on the host, in one copy."""
    tensors, length = on_host(*(tensor for tensors in lists for tensor in tensors)), len(lists[0])
    return [tensors[start : start + length] for start in range(0, len(tensors), length)]


def _sizes(texts: Sequence[WrittenText]) -> tuple[Tensor, Tensor]:
    return torch.tensor([len(text) for text in texts]), torch.tensor([text.limit for text in texts])


DeterministicDrafts = Callable[[WrittenText, int], Sequence[tuple[Sequence[int], Tree]]]
"""(text, draft length) → the tokens and shape of the draft of a round that starts at each of its tokens."""


def replay_deterministic(
    texts: Sequence[WrittenText], distributions: Sequence[AtTokens] | None, vocab_size: int, drafts: DeterministicDrafts
) -> BatchReplay:
    """Replay deterministic drafts: given the text, a round accepts the longest path of its draft that the text follows.

    `distributions` are the target's at each text's tokens; None at T=0.
    """
    acceptance, overlaps = [], []
    for index, text in enumerate(texts):
        candidates = [[tokens[node] for node in tree.children[0]] for tokens, tree in drafts(text, 1)]
        pairs = zip(text.tokens.tolist(), candidates, strict=True)
        hits_N = torch.tensor([float(token in siblings) for token, siblings in pairs])
        overlap_N = hits_N.clone()
        if distributions is not None:
            # α is defined for one drafted token x: where q is one-hot on x, the first child, Σ min(p, q) is p(x).
            for first, end in chunks(len(text), vocab_size):
                starts = [start for start in range(first, end) if candidates[start]]
                firsts = torch.tensor([candidates[start][0] for start in starts], dtype=torch.long)
                p_CV = distributions[index](first, end)
                places = torch.tensor(starts, dtype=torch.long) - first
                overlap_N[starts] = p_CV[places, firsts].cpu().to(overlap_N.dtype)
        acceptance.append(hits_N)
        overlaps.append(overlap_N)

    @lru_cache
    def rounds(draft_length: int) -> list[StartRounds]:
        return [_draft_rounds(text, draft_length, drafts(text, draft_length)) for text in texts]

    return BatchReplay(acceptance, overlaps, lambda k: counts_of_rounds(texts, rounds(k)), rounds=rounds)


def counts_of_rounds(texts: Sequence[WrittenText], rounds: Sequence[StartRounds]) -> list[Ratios]:
    """Return a decoder's expected counts on each text."""
    a_BNK = pad_sequence([start_rounds.acceptance for start_rounds in rounds], batch_first=True)
    widths_BNK = pad_sequence([start_rounds.widths for start_rounds in rounds], batch_first=True)
    return expected_counts(a_BNK, *_sizes(texts), widths_BNK=widths_BNK)


def _draft_rounds(text: WrittenText, draft_length: int, drafts: Sequence[tuple[Sequence[int], Tree]]) -> StartRounds:
    written = text.tokens.tolist()
    acceptance, widths = np.zeros((len(text), draft_length), np.float32), np.zeros((len(text), draft_length), np.int64)
    for start, (tokens, tree) in enumerate(drafts):
        widths[start, : tree.depth] = _widths(tree)
        # Follow the text down the tree for as long as a child is the next token.
        node, accepted = ROOT, 0
        while start + accepted < len(text):
            token = written[start + accepted]
            node = next((child for child in tree.children[node + 1] if tokens[child] == token), ROOT)
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
    """Return a tree's number of nodes at each depth, (depth,)."""
    return np.bincount(np.array(tree.depths, dtype=np.int64), minlength=tree.depth + 1)[1:]
