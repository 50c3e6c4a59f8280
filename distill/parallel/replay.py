"""A parallel draft's proposals from every start of a text, in one pass that computes the text's keys once.

The text's tokens are x_0 … x_{N−1}. A round that starts at s knows x_{<s}. It drafts x_s from the logits at x_{s−1},
and x_{s+j} from those at the j-th mask, so a draft has two indices, start and offset.

Shape suffixes: N tokens of the text, T tokens with the prompt, E drafts, K offsets, V vocabulary.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.cache import CachedModel
from draftsmith.decode.replay.ranks import NONE, TextRanks, drafted_mask, ranks_of
from draftsmith.decode.replay.rounds import acceptance_probabilities, overlap
from draftsmith.decode.replay.texts import AtTokens, WrittenText, clamp_tokens, held_states, tokens_at_a_time
from draftsmith.decode.sampling import Sampler, align_vocabulary
from draftsmith.distill.parallel.layout import mask_token_of, visible_entries

DRAFTS_AT_A_TIME = 512  # the greatest number of drafts in one forward


def text_ranks(
    model: PreTrainedModel,
    text: WrittenText,
    sampler: Sampler,
    vocab_size: int,
    most: Sequence[int],
    by_argmax: bool = False,
) -> tuple[TextRanks, Tensor]:
    """Return the ranks of a text's tokens among a parallel draft's logits, and the agreement of first drafts.

    The agreement is 1 where the first draft from a start is the token, (N,) float32. `most` and `by_argmax` are as in
    `draftsmith.decode.replay.starts.ranks_by_start`.
    """
    home = text.sequence.device
    ranks_NK = torch.full((len(text), len(most)), NONE, dtype=torch.int16, device=home)
    for starts_E, offsets_E, scores_EV in _drafts(model, text, sampler, vocab_size, len(most)):
        device = scores_EV.device
        for offset in offsets_E.unique().tolist():
            entries = (offsets_E == offset).nonzero()[:, 0]
            starts = starts_E[entries]
            tokens = text.tokens.to(device)[(starts + offset).to(device)]
            ranks = ranks_of(scores_EV[entries.to(device)], tokens, most[offset], by_argmax)
            ranks_NK[starts.to(home), offset] = ranks.to(ranks_NK)
    table = ranks_NK.cpu().numpy()
    agreement = torch.from_numpy(table[:, 0] == 0).float()
    table[~drafted_mask(len(text), len(most), text.limit, first=0)] = NONE
    return TextRanks(table, tuple(most), text.limit, first=0), agreement


def text_acceptance(
    model: PreTrainedModel,
    text: WrittenText,
    sampler: Sampler,
    vocab_size: int,
    distributions: AtTokens,
    depth: int,
    greedy: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return a_{s,j} = min(1, q_j(x) / p(x)) of a chain on a sampled text, (N, K), and Σ_v min(p, q_0), (N,).

    a is 0 where nothing is drafted. `distributions` are the target's at the text's tokens. If `greedy`, the draft is
    each distribution's argmax.
    """
    home = text.sequence.device
    a_NK, common_N = torch.zeros(len(text), depth, device=home), torch.zeros(len(text), device=home)
    for starts_E, offsets_E, scores_EV in _drafts(model, text, sampler, vocab_size, depth):
        first, end = int((starts_E + offsets_E).min()), int((starts_E + offsets_E).max()) + 1
        p_CV, scores = distributions(first, end), scores_EV.to(home)
        starts, offsets = starts_E.to(home), offsets_E.to(home)
        p_EV, x_E = p_CV[starts + offsets - first], text.tokens[starts + offsets]
        if greedy:
            guess_E = scores.argmax(-1)
            a_E, common_E = (guess_E == x_E).to(p_EV), p_EV.gather(1, guess_E[:, None])[:, 0]
        else:
            q_EV = scores.softmax(-1).to(p_EV)
            a_E, common_E = acceptance_probabilities(p_EV, q_EV, x_E), overlap(p_EV, q_EV)
        a_NK[starts, offsets] = a_E.to(a_NK)
        at_first = (offsets_E == 0).nonzero()[:, 0].to(home)  # on the host: `nonzero` would wait for the device
        common_N[starts[at_first]] = common_E[at_first].to(common_N)
    inside = torch.from_numpy(drafted_mask(len(text), depth, text.limit, first=0)).to(home)
    return a_NK.where(inside, 0.0), common_N


@torch.inference_mode()
def _drafts(
    model: PreTrainedModel, text: WrittenText, sampler: Sampler, vocab_size: int, depth: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield starts and offsets on the host, (E,) int64, and processed logits, (E, V), of the text's tokens.

    Offset 0 comes first, from all starts, and then the masks' offsets, from some starts at a time.
    """
    at_a_time = min(DRAFTS_AT_A_TIME, tokens_at_a_time(vocab_size))
    (sequence,), device = clamp_tokens(model, [text.sequence.to(model.device)]), model.device
    n, context = len(text), len(sequence) - 1
    if not n:
        return
    # The block spans the whole text, so that layers with a window keep all of it: masks go back to its beginning.
    cached = CachedModel(model, 1, context + 1, block=context + max(at_a_time, depth))
    with held_states(model) as logits_at:
        cached.prefill(sequence[None, :-1], keep=context)  # whose head sees one all the same

    def score(starts_E: Tensor, offsets_E: Tensor, logits_EV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ends = [] if sampler.context_free else (text.prompt_length + starts_E + offsets_E).tolist()
        contexts = [text.sequence[:end] for end in ends]
        logits_EV = align_vocabulary(logits_EV, vocab_size).to(text.sequence.device)
        return starts_E, offsets_E, sampler.scores(logits_EV, contexts).to(device)

    all_starts = torch.arange(n)
    for starts in all_starts.split(at_a_time):
        first, end = int(starts[0]) + text.prompt_length - 1, int(starts[-1]) + text.prompt_length
        yield score(starts, torch.zeros_like(starts), logits_at(0, first, end))
    if depth == 1:
        return
    mask, positions = mask_token_of(model), torch.arange(context)
    for starts in all_starts.split(max(1, at_a_time // (depth - 1))):
        starts_E = starts.repeat_interleave(depth - 1)
        offsets_E = torch.arange(1, depth).repeat(len(starts))
        inside = starts_E + offsets_E < n  # drafts past the text's end have no token to compare with
        starts_E, offsets_E = starts_E[inside], offsets_E[inside]
        if not len(starts_E):
            return
        anchors_E = text.prompt_length - 1 + starts_E
        positions_E = anchors_E + offsets_E
        # The masks of all these starts are one block in the cache; visibility keeps the drafts apart.
        anchors_L, positions_L = torch.cat([positions, anchors_E]), torch.cat([positions, positions_E])
        entries = positions_L[None].to(device), anchors_L[None].to(device)
        visible = visible_entries(*entries, last=len(starts_E))[0]
        masks = torch.full((1, len(starts_E)), mask, device=device)
        logits = cached.feed(masks, [context], visible=visible, depths=(positions_E - context).to(device))
        yield score(starts_E, offsets_E, logits[0])
