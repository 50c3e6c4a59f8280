"""Replay: acceptance from text that the target wrote, by one teacher-forced forward of each model, without decoding.

Speculative sampling emits x with law p whatever q is, so GIVEN the emitted text the drafted token at position i was
accepted with probability a_i = min(1, q_i(x_i) / p_i(x_i)), independently along the block. The block structure is then
a Markov chain on positions that can be summed exactly, for every draft length from the same a_i.

Shape suffixes: B sequences, N positions of the text, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.sampling import Law, align_vocabulary, prefixes


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
    inside = torch.arange(n, device=a_BNK.device)[None, :] < lengths_B[:, None]
    # What lies past the end may be anything, and would spread.
    a_BNK = torch.where(inside[..., None], a_BNK[..., :gamma], 0.0)
    certain = a_BNK.new_ones(batch, n, 1)
    reach = torch.cat([certain, a_BNK.cumprod(-1)], dim=-1)  # the first j tokens are accepted
    accepts = reach * torch.cat([1 - a_BNK, certain], dim=-1)  # and no more
    starts = a_BNK.new_zeros(batch, n + gamma + 1)
    starts[:, 0] = 1.0
    for t in range(n):
        starts[:, t + 1 : t + gamma + 2] += starts[:, t, None] * accepts[:, t]
    return torch.where(inside, starts[:, :n], 0.0)


@dataclass(frozen=True)
class ReplayedText:
    """One text's acceptance probabilities, from which every draft length is summed."""

    acceptance: Tensor
    """a_i of each token the target wrote, (N,)."""
    overlap: Tensor
    """Σ_v min(p_i, q_i) of each context, (N,); at T=0 whether the argmaxes agree."""

    def __len__(self) -> int:
        return len(self.acceptance)

    def rounds(self, draft_length: int) -> float:
        """Return the expected rounds at γ = `draft_length`; at T=0 exactly the decoder's `num_drafts`."""
        a = self.acceptance[None, :].double()
        return float(expected_rounds(a, torch.tensor([a.shape[1]], device=a.device), draft_length))


def replay_text(
    target: PreTrainedModel, draft: PreTrainedModel, sequence: Tensor, prompt_length: int, law: Law
) -> ReplayedText:
    """Replay one text that the target wrote, with a draft model.

    Args:
        target: the model that wrote it.
        draft: the draft model; its logits are cut or filled to the target's width.
        sequence: prompt and text, (T,) int64.
        prompt_length: tokens of the prompt, at least 1 and less than T.
        law: the warping that the text was written under.

    Returns:
        Per-token acceptance of the T − `prompt_length` tokens of the text.
    """
    p = text_law(target, sequence, prompt_length, law)
    return replay_law(p, draft, sequence, prompt_length, law)


@torch.inference_mode()
def text_law(
    model: PreTrainedModel, sequence: Tensor, prompt_length: int, law: Law, vocab_size: int | None = None
) -> Tensor:
    """Return a model's distributions of the text's tokens, each on the true prefix, (T − `prompt_length`, V).

    Args:
        model: a target or a draft model.
        sequence: prompt and text, (T,) int64.
        prompt_length: tokens of the prompt, at least 1 and less than T.
        law: the warping.
        vocab_size: cut or fill the logits to this width.
    """
    logits = model(input_ids=sequence[None, :-1], use_cache=False).logits[0, prompt_length - 1 :]
    if vocab_size is not None:
        logits = align_vocabulary(logits, vocab_size)
    return law.probabilities(logits, prefixes(sequence[:-1], len(logits)))


def replay_law(p: Tensor, draft: PreTrainedModel, sequence: Tensor, prompt_length: int, law: Law) -> ReplayedText:
    """Replay one text against the target's `text_law`, (T − `prompt_length`, V): as `replay_text`, for many drafts."""
    tokens = sequence[prompt_length:]
    q = text_law(draft, sequence, prompt_length, law, p.shape[-1])
    if not law.do_sample:
        # In half precision a parallel forward can break a near-tie the other way: the text itself says what p chose.
        p = torch.nn.functional.one_hot(tokens, p.shape[-1]).to(p.dtype)
    return ReplayedText(acceptance_probabilities(p, q, tokens), overlap(p, q))
