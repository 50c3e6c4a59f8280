"""Acceptance from every start of a text, for drafters whose logits depend on the round's start and an offset.

The text's tokens are x_0 … x_{N−1}. A round from s knows x_{<s} and drafts x_{s+j} at offset j. A text's first round,
s = 0, drafts nothing, because these drafters need the target's states.

Shape suffixes: N tokens of the text, C of a chunk, K offsets, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from draftsmith.decode.replay.ranks import NONE, TextRanks, drafted_mask, ranks_of
from draftsmith.decode.replay.rounds import acceptance_probabilities, on_host, overlap
from draftsmith.decode.replay.texts import WrittenText
from draftsmith.decode.sampling import Sampler

CHUNK = 512  # the number of positions whose logits are in memory at a time, for the target and one offset
LogitsAt = Callable[[int, int, int], Tensor]
"""(offset j, first start s ≥ 1, end) → the drafter's logits for x_{s+j} from each of these starts, (C, V)."""
DistributionsAt = Callable[[int, int], Tensor]
"""(first, end) → the target's distributions at these tokens of the text, (C, V)."""


def ranks_by_start(
    text: WrittenText, sampler: Sampler, most: Sequence[int], logits_at: LogitsAt, by_argmax: bool = False
) -> TextRanks:
    """Return the ranks of a text's tokens among a drafter's logits, which give every tree's counts at T=0.

    `most` are the numbers of ranks to inspect at each of K offsets. Pass a tree's widths if logits may tie, because the
    order of ties depends on these numbers. `by_argmax` inspects only rank 0, as `argmax` finds it: some chains are
    drafted by it.
    """
    home = text.sequence.device
    ranks_NK = torch.full((len(text), len(most)), NONE, dtype=torch.int16, device=home)
    for first, end in _chunks(len(text)):
        for j, begin, scores_CV in _scores(text, sampler, len(most), logits_at, first, end):
            tokens = text.tokens[begin:end].to(scores_CV.device)
            ranks_NK[begin - j : end - j, j] = ranks_of(scores_CV, tokens, most[j], by_argmax).to(home)
    ranks = ranks_NK.cpu().numpy()
    ranks[~drafted_mask(len(text), len(most), text.limit)] = NONE
    return TextRanks(ranks, tuple(most), text.limit)


def acceptance_by_start(
    text: WrittenText,
    sampler: Sampler,
    depth: int,
    logits_at: LogitsAt,
    distributions_at: DistributionsAt,
    greedy: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a_{s,j} = min(1, q_j(x) / p(x)) of a chain on a sampled text, Σ_v min(p, q_j), and the mask of drafts.

    All are (N, K) on the host; the first two are 0 where nothing is drafted. If `greedy`, the draft is each
    distribution's argmax.
    """
    a_NK, common_NK = torch.zeros(2, len(text), depth, device=text.sequence.device)
    for first, end in _chunks(len(text)):
        # p of a chunk of tokens is computed once, for all offsets at which they are drafted.
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
    drafted_NK = torch.from_numpy(drafted_mask(len(text), depth, text.limit))
    return a_NK.where(drafted_NK, 0.0), common_NK.where(drafted_NK, 0.0), drafted_NK


def contexts_of(text: WrittenText, sampler: Sampler, first: int, end: int) -> list[Tensor]:
    """Return the contexts of tokens `first` … `end` − 1 of a text; an empty list if the sampler ignores them."""
    return [] if sampler.context_free else [text.sequence[: text.prompt_length + t] for t in range(first, end)]


def _chunks(tokens: int) -> Iterator[tuple[int, int]]:
    """Yield the bounds of chunks of the tokens that can be drafted, from the second on."""
    for first in range(1, tokens, CHUNK):
        yield first, min(first + CHUNK, tokens)


def _scores(
    text: WrittenText, sampler: Sampler, depth: int, logits_at: LogitsAt, first: int, end: int
) -> Iterator[tuple[int, int, Tensor]]:
    """Yield each offset, the first of the tokens `first` … `end` − 1 that is drafted there, and the scores."""
    for j in range(depth):
        begin = max(first, j + 1)  # rounds start at 1
        if begin >= end:
            return
        yield j, begin, sampler.scores(logits_at(j, begin - j, end - j), contexts_of(text, sampler, begin, end))
