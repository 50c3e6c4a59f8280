"""The expected rounds in which speculative decoding writes a text, from the acceptance of its tokens.

Speculative sampling emits x with distribution p for any q. So given the emitted text, the draft at position i was
accepted with probability a_i = min(1, q_i(x_i) / p_i(x_i)), independently along the block. Starts of rounds then form a
Markov chain on positions, which is summed exactly for every draft length from the same a_i.

Shape suffixes: B texts, N positions of a text, K positions of a draft, V vocabulary.
"""

import numpy as np
import torch
from torch import Tensor

from draftsmith.decode.counts import Ratios


def acceptance_probabilities(p: Tensor, q: Tensor, tokens: Tensor) -> Tensor:
    """Return a_i = min(1, q_i(x_i) / p_i(x_i)), the probability that x_i was an accepted draft, given the text, (…).

    p and q, (…, V), are distributions on the true prefixes, warped alike, and x are tokens of the text, so p(x) > 0.
    One-hot p and q (T=0) give 1 where the drafter's argmax is x, and 0 elsewhere.
    """
    p_x = p.gather(-1, tokens[..., None])[..., 0]
    q_x = q.gather(-1, tokens[..., None])[..., 0]
    return (q_x / p_x.clamp(min=torch.finfo(p.dtype).tiny)).clamp(max=1.0)


def overlap(p: Tensor, q: Tensor) -> Tensor:
    """Return Σ_v min(p, q) = 1 − TV(p, q) of distributions (…, V): the acceptance rate α of each context, (…)."""
    return torch.minimum(p, q).sum(-1)


def on_host(*tensors: Tensor) -> list[Tensor]:
    """Return tensors of one device and dtype on the host; the single copy makes the host wait for the device once."""
    if not tensors or tensors[0].device.type == "cpu":
        return list(tensors)
    parts = torch.cat([tensor.flatten() for tensor in tensors]).cpu().split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def expected_rounds(a_BN: Tensor, lengths_B: Tensor, draft_length: int) -> Tensor:
    """Return the expected number of rounds in which speculative decoding writes each text, (B,).

    Let s_t be the probability that a round starts at t (s_0 = 1). A round from t accepts j tokens with probability
    a_t…a_{t+j−1}(1 − a_{t+j}) for j < γ, or all γ, and the next one starts at t + j + 1. The number of rounds is
    Σ_t s_t, and τ = N ÷ Σ_t s_t exactly. Entries of a past a text's length are ignored.
    """
    padded = torch.nn.functional.pad(a_BN, (0, draft_length - 1))
    return expected_rounds_of_starts(padded.unfold(1, draft_length, 1), lengths_B)


def expected_rounds_of_starts(a_BNK: Tensor, lengths_B: Tensor, draft_length: int | None = None) -> Tensor:
    """Return the expected rounds of each text, (B,), where drafts depend on the start of the round.

    The Markov chain is that of `expected_rounds`, with a_{t, j} in place of a_{t + j}. a_{t, j} is the probability that
    a round from t accepts the token at t + j, given the tokens before it; entries at or past a text's length are
    ignored. γ is at most K, and K if None.
    """
    return start_probabilities(a_BNK, lengths_B, draft_length).sum(1)


def start_probabilities(a_BNK: Tensor, lengths_B: Tensor, draft_length: int | None = None) -> Tensor:
    """Return s_t, the probability that a round starts at each position, (B, N); 0 past a text's length."""
    batch, n, depth = a_BNK.shape
    gamma = depth if draft_length is None else min(draft_length, depth)
    inside_BN = torch.arange(n, device=a_BNK.device)[None, :] < lengths_B[:, None]
    # Entries past the end are zeroed, or they would spread (NaN). Texts are the last axis, so that each step of the
    # loop reads contiguous memory.
    a_NKB = torch.where(inside_BN[..., None], a_BNK[..., :gamma], 0.0).permute(1, 2, 0).contiguous()
    certain = a_NKB.new_ones(n, 1, batch)
    reach = torch.cat([certain, a_NKB.cumprod(1)], dim=1)  # P(the first j tokens are accepted)
    accepts = (reach * torch.cat([1 - a_NKB, certain], dim=1)).cpu().numpy()  # P(exactly j tokens are accepted)
    # For many short steps numpy takes a tenth of torch's time.
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
    """Return a decoder's expected counts on each text; at T=0, where a is 0 or 1, its exact counts.

    A round of a chain from t drafts min(γ, limit − t − 1) tokens, since the last token is always the target's, and none
    before position `first`, where a must be 0. If an accepted token ends the text before its limit, drafted tokens
    after it do not count. `widths_BNK`, the numbers of tokens that rounds draft at each depth, describe other drafts.
    """
    batch, n, depth = a_BNK.shape
    gamma = depth if draft_length is None else min(draft_length, depth)
    a_BNK = a_BNK[..., :gamma].double()
    starts_BN = start_probabilities(a_BNK, lengths_B)
    t = torch.arange(n, device=a_BNK.device)[None, :, None]
    offset = torch.arange(gamma, device=a_BNK.device)
    remaining_BN1 = lengths_B[:, None, None] - t
    if widths_BNK is None:
        widths_BNK = ((offset < limits_B[:, None, None] - t - 1) & (t >= first)).long()
    widths_BNK = widths_BNK[..., :gamma]
    drafts_BNK = widths_BNK > 0
    inside_BNK = offset < remaining_BN1
    reach_BNK = a_BNK.where(drafts_BNK & inside_BNK, 0.0).cumprod(-1)  # P(position j and all before it are accepted)
    before_BNK = torch.cat([torch.ones_like(reach_BNK[..., :1]), reach_BNK[..., :-1]], dim=-1)
    # P(the text's last token is an accepted draft): the drafted tokens after it do not count then.
    last_BN1 = (remaining_BN1 - 1).clamp(0, gamma - 1)
    ended_BN1 = reach_BNK.gather(-1, last_BN1).where(remaining_BN1 <= gamma, 0.0)
    accepted_BK = torch.einsum("bn,bnk->bk", starts_BN, reach_BNK)
    counted_BNK = torch.where(inside_BNK, 1.0, 1 - ended_BN1).where(drafts_BNK, 0.0)
    drafted_BK = torch.einsum("bn,bnk->bk", starts_BN, counted_BNK)
    nodes_B = torch.einsum("bn,bnk->b", starts_BN, counted_BNK * widths_BNK)
    reached_BK = torch.einsum("bn,bnk->bk", starts_BN, before_BNK.where(drafts_BNK & inside_BNK, 0.0))
    # Sums weighted by the probability of a round's start, on the host as one value each.
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
