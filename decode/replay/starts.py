"""Acceptance from every start of a text, by a drafter that gives logits for a round's start and an offset behind it.

Of the text's tokens x_0 … x_{N−1}, a round from s has written x_{<s}, and drafts x_{s+j} at offset j. A text's first
round, s = 0, drafts nothing: these drafters need what the target computed of the text.

Shape suffixes: N tokens of the text, C of a chunk, K offsets, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from draftsmith.decode.replay.ranks import NONE, TextRanks, drafted_from, ranks_of
from draftsmith.decode.replay.rounds import acceptance_probabilities, on_host, overlap
from draftsmith.decode.replay.texts import WrittenText
from draftsmith.decode.sampling import Sampler, argmax

CHUNK = 512
"""Positions whose logits are held at a time, of the target and one offset."""
LogitsAt = Callable[[int, int, int], Tensor]
"""(offset j, first start s ≥ 1, end) → the drafter's logits of x_{s+j} for each of these starts, (C, V)."""
DistributionsAt = Callable[[int, int], Tensor]
"""(first, end) → the target's distributions of these tokens of the text, (C, V)."""


def ranks_by_start(
    text: WrittenText, sampler: Sampler, most: Sequence[int], logits_at: LogitsAt, by_argmax: bool = False
) -> TextRanks:
    """Return the ranks of a text's tokens among a drafter's logits, which give every tree's counts at T=0.

    Args:
        text: what the target wrote, at T=0.
        sampler: the processors of T=0.
        most: ranks to look at, for each of K offsets. Where logits tie, give the tree's widths, for the drafter breaks
            ties among as many.
        logits_at: the drafter.
        by_argmax: ranks of 0 are those of `argmax`, which some chains are drafted by, and there are no others.
    """
    home = text.sequence.device
    ranks_NK = torch.full((len(text), len(most)), NONE, dtype=torch.int16, device=home)
    for first, end in _chunks(len(text)):
        for j, begin, scores_CV in _scores(text, sampler, len(most), logits_at, first, end):
            tokens = text.tokens[begin:end].to(scores_CV.device)
            if by_argmax:
                found = torch.full_like(tokens, NONE).masked_fill(argmax(scores_CV) == tokens, 0)
            else:
                found = ranks_of(scores_CV, tokens, most[j])
            ranks_NK[begin - j : end - j, j] = found.to(home)
    ranks = ranks_NK.cpu().numpy()
    ranks[~drafted_from(len(text), len(most), text.limit)] = NONE
    return TextRanks(ranks, tuple(most), text.limit)


def acceptance_by_start(
    text: WrittenText,
    sampler: Sampler,
    depth: int,
    logits_at: LogitsAt,
    distributions_at: DistributionsAt,
    greedy: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the acceptance probabilities of a chain on a text, a_{s,j} = min(1, q_j(x) / p(x)).

    Args:
        text: what the target wrote, at a temperature above 0.
        sampler: its warping.
        depth: K.
        logits_at: the drafter.
        distributions_at: the target.
        greedy: the draft is each distribution's argmax, for certain.

    Returns:
        a_{s,j}, (N, K), Σ_v min(p, q_j) of the same contexts, (N, K), both 0 where nothing is drafted; and where
        something is, (N, K) bool. All on the host.
    """
    a_NK, common_NK = torch.zeros(2, len(text), depth, device=text.sequence.device)
    for first, end in _chunks(len(text)):
        p_CV = distributions_at(first, end)
        x_C = text.tokens[first:end].to(p_CV.device)
        for j, begin, scores_CV in _scores(text, sampler, depth, logits_at, first, end):
            q_CV, p, x = scores_CV.softmax(-1).to(p_CV), p_CV[begin - first :], x_C[begin - first :]
            if greedy:
                guess_C = scores_CV.argmax(-1).to(x.device)
                a_C, common_C = (guess_C == x).to(p), p.gather(1, guess_C[:, None])[:, 0]
            else:
                a_C, common_C = acceptance_probabilities(p, q_CV, x), overlap(p, q_CV)
            a_NK[begin - j : end - j, j] = a_C.to(a_NK)
            common_NK[begin - j : end - j, j] = common_C.to(a_NK)
    a_NK, common_NK = on_host(a_NK, common_NK)
    drafted_NK = torch.from_numpy(drafted_from(len(text), depth, text.limit))
    return a_NK.where(drafted_NK, 0.0), common_NK.where(drafted_NK, 0.0), drafted_NK


def contexts_of(text: WrittenText, sampler: Sampler, first: int, end: int) -> list[Tensor]:
    """Return what stands before each of these tokens of a text; nothing where the sampler does not look at it."""
    return [] if sampler.context_free else [text.sequence[: text.prompt_length + t] for t in range(first, end)]


def _chunks(tokens: int) -> Iterator[tuple[int, int]]:
    """Yield the tokens that can be drafted, from the second on, a chunk at a time."""
    for first in range(1, tokens, CHUNK):
        yield first, min(first + CHUNK, tokens)


def _scores(
    text: WrittenText, sampler: Sampler, depth: int, logits_at: LogitsAt, first: int, end: int
) -> Iterator[tuple[int, int, Tensor]]:
    """Yield, offset by offset, the first of the tokens `first` … `end` − 1 that is drafted there, and the scores."""
    for j in range(depth):
        begin = max(first, j + 1)  # rounds start at 1
        if begin >= end:
            return
        yield j, begin, sampler.scores(logits_at(j, begin - j, end - j), contexts_of(text, sampler, begin, end))
