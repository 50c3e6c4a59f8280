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
from draftsmith.decode.replay.texts import AtTokens, WrittenText, chunks, contexts_of
from draftsmith.decode.sampling import Sampler

LogitsOfRounds = Callable[[int, int], Iterator[Tensor]]
"""(first start s ≥ 1, end) → for each offset j the drafter's logits for x_{s+j} from each of these starts, (C, V), as
far as x_{s+j} is in the text; further offsets may follow."""


def ranks_by_start(
    text: WrittenText,
    sampler: Sampler,
    most: Sequence[int],
    vocab_size: int,
    logits_of: LogitsOfRounds,
    by_argmax: bool = False,
) -> TextRanks:
    """Return the ranks of a text's tokens among a drafter's logits, which give every tree's counts at T=0.

    `most` are the numbers of ranks to inspect at each of K offsets. Pass a tree's widths if logits may tie, because the
    order of ties depends on these numbers. `by_argmax` inspects only rank 0, as `argmax` finds it: some chains are
    drafted by it.
    """
    home = text.sequence.device
    ranks_NK = torch.full((len(text), len(most)), NONE, dtype=torch.int16, device=home)
    for first, end in chunks(len(text), vocab_size, first=1):
        for j, scores_CV in _scores(text, sampler, len(most), logits_of, first, end):
            last = first + len(scores_CV)
            tokens = text.tokens[first + j : last + j].to(scores_CV.device)
            ranks_NK[first:last, j] = ranks_of(scores_CV, tokens, most[j], by_argmax).to(home)
    ranks = ranks_NK.cpu().numpy()
    ranks[~drafted_mask(len(text), len(most), text.limit)] = NONE
    return TextRanks(ranks, tuple(most), text.limit)


def acceptance_by_start(
    text: WrittenText,
    sampler: Sampler,
    depth: int,
    logits_of: LogitsOfRounds,
    distributions: AtTokens,
    vocab_size: int,
    greedy: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a_{s,j} = min(1, q_j(x) / p(x)) of a chain on a sampled text, Σ_v min(p, q_j), and the mask of drafts.

    All are (N, K) on the host; the first two are 0 where nothing is drafted. If `greedy`, the draft is each
    distribution's argmax.
    """
    a_NK, common_NK = torch.zeros(2, len(text), depth, device=text.sequence.device)
    for first, end in chunks(len(text), vocab_size, first=1):
        # p of all tokens that these rounds draft is computed once, for all offsets.
        p_CV = distributions(first, min(end + depth - 1, len(text)))
        for j, scores_CV in _scores(text, sampler, depth, logits_of, first, end):
            rounds = len(scores_CV)
            x = text.tokens[first + j : first + j + rounds].to(p_CV.device)
            q_CV, p = scores_CV.softmax(-1).to(p_CV), p_CV[j : j + rounds]
            if greedy:
                guess_C = scores_CV.argmax(-1).to(x.device)
                a_C, common_C = (guess_C == x).to(p), p.gather(1, guess_C[:, None])[:, 0]
            else:
                a_C, common_C = acceptance_probabilities(p, q_CV, x), overlap(p, q_CV)
            a_NK[first : first + rounds, j] = a_C.to(a_NK)
            common_NK[first : first + rounds, j] = common_C.to(a_NK)
    a_NK, common_NK = on_host(a_NK, common_NK)
    drafted_NK = torch.from_numpy(drafted_mask(len(text), depth, text.limit))
    return a_NK.where(drafted_NK, 0.0), common_NK.where(drafted_NK, 0.0), drafted_NK


def _scores(
    text: WrittenText, sampler: Sampler, depth: int, logits_of: LogitsOfRounds, first: int, end: int
) -> Iterator[tuple[int, Tensor]]:
    """Yield each offset, and the scores of the rounds from `first` … `end` − 1 that reach a token there."""
    for j, logits_CV in zip(range(min(depth, len(text) - first)), logits_of(first, end), strict=False):
        last = min(end, len(text) - j)
        yield j, sampler.scores(logits_CV[: last - first], contexts_of(text, sampler, first + j, last + j))
