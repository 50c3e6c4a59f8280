"""The rounds in which speculative decoding writes a text, expected from the acceptance of its tokens.

Speculative sampling emits x with distribution p whatever q is, so GIVEN the emitted text the drafted token at position
i was accepted with probability a_i = min(1, q_i(x_i) / p_i(x_i)), independently along the block. The block structure is
then a Markov chain on positions that can be summed exactly, for every draft length from the same a_i.

Shape suffixes: B texts, N positions of a text, K positions of a draft, V vocabulary.
"""

import numpy as np
import torch
from torch import Tensor

from draftsmith.decode.counts import Ratios


def acceptance_probabilities(p: Tensor, q: Tensor, tokens: Tensor) -> Tensor:
    """Return a_i = min(1, q_i(x_i) / p_i(x_i)), the probability that x_i was the accepted draft, given that it stands.

    Args:
        p: the target's distributions on the true prefixes, (…, V).
        q: the drafter's, warped alike, (…, V). One-hot p and q (T=0) give 1 where the drafter's argmax is x and else 0.
        tokens: x, (…) int64, tokens that the target wrote: p(x) > 0.

    Returns:
        (…), in [0, 1].
    """
    p_x = p.gather(-1, tokens[..., None])[..., 0]
    q_x = q.gather(-1, tokens[..., None])[..., 0]
    return (q_x / p_x.clamp(min=torch.finfo(p.dtype).tiny)).clamp(max=1.0)


def overlap(p: Tensor, q: Tensor) -> Tensor:
    """Return Σ_v min(p, q) = 1 − TV(p, q) of distributions (…, V): the acceptance rate α of each context, (…)."""
    return torch.minimum(p, q).sum(-1)


def on_host(*tensors: Tensor) -> list[Tensor]:
    """Return tensors of one device and dtype on the host, by one copy: the host waits for the device once."""
    if not tensors or tensors[0].device.type == "cpu":
        return list(tensors)
    parts = torch.cat([tensor.flatten() for tensor in tensors]).cpu().split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def expected_rounds(a_BN: Tensor, lengths_B: Tensor, draft_length: int) -> Tensor:
    """Return the expected number of rounds in which speculative decoding writes each text, (B,).

    With s_t the probability that a round starts at t (s_0 = 1), a round from t accepts j tokens with probability
    a_t…a_{t+j−1}(1 − a_{t+j}) for j < γ, or all γ, and the next one starts at t + j + 1; the rounds are Σ_t s_t, and
    τ = N ÷ Σ_t s_t exactly.

    Args:
        a_BN: acceptance probabilities of the text's tokens, (B, N); entries past a text's length are ignored.
        lengths_B: the texts' lengths, (B,).
        draft_length: γ.
    """
    padded = torch.nn.functional.pad(a_BN, (0, draft_length - 1))
    return expected_rounds_of_starts(padded.unfold(1, draft_length, 1), lengths_B)


def expected_rounds_of_starts(a_BNK: Tensor, lengths_B: Tensor, draft_length: int | None = None) -> Tensor:
    """Return the expected rounds of each text, (B,), where what is drafted depends on where the round began.

    The Markov chain of `expected_rounds`, with a_{t, j} in place of a_{t + j}.

    Args:
        a_BNK: the probability that a round from t accepts the token at t + j, given that it accepted those before,
            (B, N, K); entries at or past a text's length are ignored.
        lengths_B: the texts' lengths, (B,).
        draft_length: γ ≤ K; K if None.
    """
    return start_probabilities(a_BNK, lengths_B, draft_length).sum(1)


def start_probabilities(a_BNK: Tensor, lengths_B: Tensor, draft_length: int | None = None) -> Tensor:
    """Return s_t, the probability that a round starts at each position, (B, N); 0 past a text's length.

    Arguments as in `expected_rounds_of_starts`.
    """
    batch, n, depth = a_BNK.shape
    gamma = depth if draft_length is None else min(draft_length, depth)
    inside_BN = torch.arange(n, device=a_BNK.device)[None, :] < lengths_B[:, None]
    # What lies past the end may be anything, and would spread. Texts last: each step then reads what lies together.
    a_NKB = torch.where(inside_BN[..., None], a_BNK[..., :gamma], 0.0).permute(1, 2, 0).contiguous()
    certain = a_NKB.new_ones(n, 1, batch)
    reach = torch.cat([certain, a_NKB.cumprod(1)], dim=1)  # the first j tokens are accepted
    accepts = (reach * torch.cat([1 - a_NKB, certain], dim=1)).cpu().numpy()  # and no more
    # Many short steps: numpy takes a tenth of torch's time for them.
    starts = np.zeros((n + gamma + 1, batch), accepts.dtype)
    starts[0] = 1.0
    for t in range(n):
        starts[t + 1 : t + gamma + 2] += starts[t] * accepts[t]
    return torch.where(inside_BN, torch.from_numpy(starts[:n]).T.to(a_BNK.device), 0.0)


def expected_counts(
    a_BNK: Tensor,
    lengths_B: Tensor,
    limits_B: Tensor,
    draft_length: int | None = None,
    first: int = 0,
    widths_BNK: Tensor | None = None,
) -> list[Ratios]:
    """Return what a decoder is expected to count on each text; at T=0, where a is 0 or 1, what it counts.

    A round of a chain from t drafts min(γ, limit − t − 1) tokens, for the last one is always the target's. Where an
    accepted token ends the text before its limit, what was drafted behind it does not count.

    Args:
        a_BNK: as in `expected_rounds_of_starts`.
        lengths_B: the texts' lengths, (B,).
        limits_B: the lengths that they might have had, (B,).
        draft_length: γ ≤ K; K if None.
        first: rounds that start before this position draft nothing; their a must be 0.
        widths_BNK: how many tokens a round from t drafts at each depth, (B, N, K), which says all of this; chains of γ
            tokens from `first` on if None.
    """
    batch, n, depth = a_BNK.shape
    gamma = depth if draft_length is None else min(draft_length, depth)
    a_BNK = a_BNK[..., :gamma].double()
    starts_BN = start_probabilities(a_BNK, lengths_B)
    t = torch.arange(n, device=a_BNK.device)[None, :, None]
    offset = torch.arange(gamma, device=a_BNK.device)
    left_BN1 = lengths_B[:, None, None] - t
    if widths_BNK is None:
        widths_BNK = ((offset < limits_B[:, None, None] - t - 1) & (t >= first)).long()
    widths_BNK = widths_BNK[..., :gamma]
    drafts_BNK = widths_BNK > 0
    inside_BNK = offset < left_BN1
    reach_BNK = a_BNK.where(drafts_BNK & inside_BNK, 0.0).cumprod(-1)  # position j is accepted, and all before it
    before_BNK = torch.cat([torch.ones_like(reach_BNK[..., :1]), reach_BNK[..., :-1]], dim=-1)
    # The text's last token, accepted as a draft: then nothing was drafted behind it.
    last_BN1 = (left_BN1 - 1).clamp(0, gamma - 1)
    ended_BN1 = reach_BNK.gather(-1, last_BN1).where(left_BN1 <= gamma, 0.0)
    accepted_BK = torch.einsum("bn,bnk->bk", starts_BN, reach_BNK)
    counted_BNK = torch.where(inside_BNK, 1.0, 1 - ended_BN1).where(drafts_BNK, 0.0)
    drafted_BK = torch.einsum("bn,bnk->bk", starts_BN, counted_BNK)
    nodes_B = torch.einsum("bn,bnk->b", starts_BN, counted_BNK * widths_BNK)
    reached_BK = torch.einsum("bn,bnk->bk", starts_BN, before_BNK.where(drafts_BNK & inside_BNK, 0.0))
    counts = []
    for row in range(batch):
        deep = int((drafted_BK[row] > 0).sum())  # positions that no round drafts are not counted
        accepted, drafted, reached = (x[row, :deep].tolist() for x in (accepted_BK, drafted_BK, reached_BK))
        counts.append(
            Ratios(
                num_drafts=float(starts_BN[row].sum()),
                num_draft_tokens=float(nodes_B[row]),
                num_accepted_tokens=sum(accepted),
                num_accepted_tokens_per_pos=tuple(accepted),
                num_draft_tokens_per_pos=tuple(drafted),
                num_reached_per_pos=tuple(reached),
                num_emitted_tokens=float(lengths_B[row]),
            )
        )
    return counts
