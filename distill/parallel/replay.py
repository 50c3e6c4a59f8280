"""Proposals of a parallel draft from every start of a text, in one pass: the text's keys are computed once.

Of the text's tokens x_0 … x_{N−1}, a round that starts at s knows x_{<s}. The logits of x_{s−1}, or of the prompt's
last token, are of the draft for x_s, and those of the j-th mask behind it of the draft for x_{s+j}: what is drafted
depends on where the round began, so there are two indices, start and offset.

Shape suffixes: N tokens of the text, T tokens with the prompt, E drafts, K offsets, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.cache import CachedModel
from draftsmith.decode.replay.ranks import NONE, TextRanks, drafted_from, ranks_of
from draftsmith.decode.replay.rounds import acceptance_probabilities, overlap
from draftsmith.decode.replay.texts import WrittenText, readable
from draftsmith.decode.sampling import Sampler, align_vocabulary, argmax
from draftsmith.distill.parallel.layout import mask_token_of, visible_entries

DRAFTS_AT_A_TIME = 512
"""Drafts that are computed in one forward at most."""
LOGITS_AT_A_TIME = 2**26
"""Their logits that are held at a time."""


@dataclass(frozen=True)
class _ScoredDrafts:
    """Some of a text's drafts: of the token at `starts` + `offsets`, given the text before `starts`."""

    starts: Tensor
    """(E,) int64, on the host."""
    offsets: Tensor
    """(E,) int64, on the host."""
    scores: Tensor
    """Processed logits, (E, V)."""

    @property
    def drafted(self) -> Tensor:
        """The places of the tokens in the text, (E,)."""
        return self.starts + self.offsets


def text_ranks(
    model: PreTrainedModel,
    text: WrittenText,
    sampler: Sampler,
    vocab_size: int,
    most: Sequence[int],
    by_argmax: bool = False,
) -> tuple[TextRanks, Tensor]:
    """Return the ranks of a text's tokens among a parallel draft's logits: acceptance of every tree at T=0.

    Args:
        model: the draft.
        text: what the target wrote.
        sampler: the processors of T=0.
        vocab_size: V of the target.
        most: ranks to look at, for each of K offsets. Where logits tie, give the tree's widths, for the drafter breaks
            ties among as many.
        by_argmax: ranks of 0 are those of `argmax`, which a chain is drafted by, and there are no others.

    Returns:
        The ranks, and where the first draft from each start is the token, (N,) float32.
    """
    home = text.sequence.device
    ranks_NK = torch.full((len(text), len(most)), NONE, dtype=torch.int16, device=home)
    for drafts in _drafts(model, text, sampler, vocab_size, len(most)):
        device = drafts.scores.device
        for offset in drafts.offsets.unique().tolist():
            places = (drafts.offsets == offset).nonzero()[:, 0]
            scores = drafts.scores[places.to(device)]
            tokens = text.tokens.to(device)[drafts.drafted[places].to(device)]
            if by_argmax:
                found = torch.full_like(tokens, NONE).masked_fill(argmax(scores) == tokens, 0)
            else:
                found = ranks_of(scores, tokens, most[offset])
            ranks_NK[drafts.starts[places].to(home), offset] = found.to(ranks_NK)
    ranks = ranks_NK.cpu().numpy()
    first = torch.from_numpy(ranks[:, 0] == 0).float()
    ranks[~drafted_from(len(text), len(most), text.limit, first=0)] = NONE
    return TextRanks(ranks, tuple(most), text.limit, first=0), first


def text_acceptance(
    model: PreTrainedModel, text: WrittenText, sampler: Sampler, p_NV: Tensor, depth: int, greedy: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the acceptance probabilities of a chain on a text that was written by sampling.

    Args:
        model: the draft.
        text: what the target wrote.
        sampler: its warping.
        p_NV: the target's distributions.
        depth: K.
        greedy: the draft is each distribution's argmax, for certain.

    Returns:
        a_{s,j} = min(1, q_j(x) / p(x)), (N, K), 0 where nothing is drafted; and Σ_v min(p, q) of offset 0, (N,).
    """
    a_NK, common_N = p_NV.new_zeros(len(text), depth), p_NV.new_zeros(len(text))
    for drafts in _drafts(model, text, sampler, p_NV.shape[1], depth):
        scores = drafts.scores.to(p_NV.device)
        starts, offsets, drafted = (t.to(p_NV.device) for t in (drafts.starts, drafts.offsets, drafts.drafted))
        p_EV, x_E = p_NV[drafted], text.tokens.to(p_NV.device)[drafted]
        if greedy:
            guess_E = scores.argmax(-1)
            a_E, common_E = (guess_E == x_E).to(p_NV), p_EV.gather(1, guess_E[:, None])[:, 0]
        else:
            q_EV = scores.softmax(-1).to(p_NV)
            a_E, common_E = acceptance_probabilities(p_EV, q_EV, x_E), overlap(p_EV, q_EV)
        a_NK[starts, offsets] = a_E
        first = (drafts.offsets == 0).nonzero()[:, 0].to(p_NV.device)
        common_N[starts[first]] = common_E[first]
    inside = torch.from_numpy(drafted_from(len(text), depth, text.limit, first=0)).to(p_NV.device)
    return a_NK.where(inside, 0.0), common_N


@torch.inference_mode()
def _drafts(
    model: PreTrainedModel, text: WrittenText, sampler: Sampler, vocab_size: int, depth: int
) -> Iterator[_ScoredDrafts]:
    """Yield the drafts for the text's own tokens: offset 0 of all starts, then the masks' of some starts at a time."""
    at_a_time = max(1, min(DRAFTS_AT_A_TIME, LOGITS_AT_A_TIME // vocab_size))
    (sequence,), device = readable(model, [text.sequence.to(model.device)]), model.device
    n, known = len(text), len(sequence) - 1
    if not n:
        return
    # All of the text stays at hand in layers with a window, too: a block may go back to its beginning.
    cached = CachedModel(model, 1, known + 1, block=known + max(at_a_time, depth))
    logits_NV = cached.prefill(sequence[None, :-1], keep=n)[0]

    def scored(starts_E: Tensor, offsets_E: Tensor, logits_EV: Tensor) -> _ScoredDrafts:
        ends = [] if sampler.context_free else (text.prompt_length + starts_E + offsets_E).tolist()
        contexts = [text.sequence[:end] for end in ends]
        logits_EV = align_vocabulary(logits_EV, vocab_size).to(text.sequence.device)
        return _ScoredDrafts(starts_E, offsets_E, sampler.scores(logits_EV, contexts).to(device))

    every = torch.arange(n)
    for starts in every.split(at_a_time):
        yield scored(starts, torch.zeros_like(starts), logits_NV[int(starts[0]) : int(starts[-1]) + 1])
    del logits_NV
    if depth == 1:
        return
    mask, places = mask_token_of(model), torch.arange(known)
    for starts in every.split(max(1, at_a_time // (depth - 1))):
        starts_E = starts.repeat_interleave(depth - 1)
        offsets_E = torch.arange(1, depth).repeat(len(starts))
        inside = starts_E + offsets_E < n  # what would be drafted behind the text is compared with nothing
        starts_E, offsets_E = starts_E[inside], offsets_E[inside]
        if not len(starts_E):
            return
        anchors_E = text.prompt_length - 1 + starts_E
        positions_E = anchors_E + offsets_E
        anchors_L, positions_L = torch.cat([places, anchors_E]), torch.cat([places, positions_E])
        entries = positions_L[None].to(device), anchors_L[None].to(device)
        visible = visible_entries(*entries, last=len(starts_E))[0]
        masks = torch.full((1, len(starts_E)), mask, device=device)
        logits = cached.feed(masks, [known], visible=visible, depths=(positions_E - known).to(device))
        yield scored(starts_E, offsets_E, logits[0])
