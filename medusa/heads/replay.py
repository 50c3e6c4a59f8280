"""Acceptance of Medusa heads on text that the target wrote: one forward of the target, without decoding.

The text's tokens are x_0 … x_{N−1}. A round that starts at s ≥ 1 has emitted x_{<s}, and x_{s−1} is not fed yet. Its
hidden state is h_{s−1}, from which the target predicted x_{s−1}, and head i drafts x_{s+i}. Hydra heads also see the
embeddings of x_{s−1} … x_{s+i−1}. The first round, s = 0, has no hidden state and drafts nothing. Drafts depend on
where the round began, so acceptance has two indices, start and offset.

At T=0 a tree only needs the ranks of the true tokens among each head's logits: they replay every chain and every fixed
tree, with exactly the decoder's counts. Under sampling only chains are replayed, by their acceptance probabilities:
siblings drawn without replacement would need the draws.

Shape suffixes: N tokens of the text, T tokens with the prompt, C tokens of a chunk, K heads, H hidden, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.replay.ranks import MOST_RANKS, TextRanks
from draftsmith.decode.replay.rounds import expected_rounds_of_starts
from draftsmith.decode.replay.starts import LogitsOfRounds, acceptance_by_start, ranks_by_start
from draftsmith.decode.replay.texts import AtTokens, WrittenText, contexts_of
from draftsmith.decode.sampling import Sampler
from draftsmith.medusa.heads.model import MedusaHeads
from draftsmith.train.losses.output_head import head_of, text_states


@dataclass(frozen=True)
class ReplayedHeads:
    """One text's acceptance of chains of all heads under a sampler, (N, K) each.

    `acceptance` is a_{s,j}, the probability that a round from s accepts x_{s+j} if it accepted those before, and
    `overlap` Σ_v min(p, q_j) in the same contexts; 0 where no token is `drafted`.
    """

    acceptance: Tensor
    overlap: Tensor
    drafted: Tensor

    def rounds(self, draft_length: int | None = None) -> float:
        """Return the expected rounds of chains of γ ≤ K heads, K if None."""
        a = self.acceptance.double()[None]
        return float(expected_rounds_of_starts(a, torch.tensor([a.shape[1]]), draft_length))


@torch.inference_mode()
def replay_ranks(
    target: PreTrainedModel,
    heads: MedusaHeads,
    sequence: Tensor,
    prompt_length: int,
    sampler: Sampler | None = None,
    most: int | Sequence[int] = MOST_RANKS,
    limit: int | None = None,
    hidden_NH: Tensor | None = None,
) -> TextRanks:
    """Return the ranks of a text's tokens among the heads' logits, which give every tree's counts at T=0.

    Args:
        target: the model that wrote the text at T=0.
        sequence: prompt and text, (T,) int64.
        prompt_length: at least 1 and less than T.
        sampler: the processors at T=0; none by default.
        most: the ranks to look at, for all heads or for each. If logits tie, give the tree's widths.
        limit: the completion's length limit, if the text ended earlier; the text's length if None.
        hidden_NH: the result of `text_states`; computed if None.
    """
    sampler = Sampler.of(0) if sampler is None else sampler
    if hidden_NH is None:
        hidden_NH = text_states(target, sequence, prompt_length)
    text = WrittenText(sequence, prompt_length, len(hidden_NH) if limit is None else limit)
    cuts = (most,) * heads.config.num_heads if isinstance(most, int) else tuple(most)
    return ranks_by_start(text, sampler, cuts, heads.config.vocab_size, _logits(target, heads, hidden_NH, text))


@torch.inference_mode()
def replay_heads(
    target: PreTrainedModel,
    heads: MedusaHeads,
    sequence: Tensor,
    prompt_length: int,
    sampler: Sampler,
    limit: int | None = None,
    distributions: AtTokens | None = None,
) -> ReplayedHeads:
    """Return the acceptance probabilities of a chain of all heads on a text, a_{s,j} = min(1, q_j(x) / p(x)).

    Arguments are those of `replay_ranks`; the text was written under `sampler`, at a temperature above 0.
    `distributions` are the target's at the text's tokens; computed if None.
    """
    hidden, project = text_states(target, sequence, prompt_length), head_of(target)
    text = WrittenText(sequence, prompt_length, len(hidden) if limit is None else limit)

    def distributions_at(first: int, end: int) -> Tensor:
        return sampler.probabilities(project(hidden[first:end]), contexts_of(text, sampler, first, end))

    at_tokens, logits = distributions or distributions_at, _logits(target, heads, hidden, text)
    depth, vocab_size = heads.config.num_heads, heads.config.vocab_size
    return ReplayedHeads(*acceptance_by_start(text, sampler, depth, logits, at_tokens, vocab_size))


@torch.inference_mode()
def _logits(target: PreTrainedModel, heads: MedusaHeads, hidden_NH: Tensor, text: WrittenText) -> LogitsOfRounds:
    """Return the heads' logits by start and head: a round from s sees h_{s−1} and the tokens from s − 1 on."""
    tokens = text.tokens.to(hidden_NH.device)
    embed: Any = target.get_input_embeddings()

    def logits_of(first: int, end: int) -> Iterator[Tensor]:
        for i in range(heads.config.num_heads):
            positions, embeddings = slice(first - 1, min(end, len(text) - i) - 1), None
            if heads.config.hydra:
                # The tokens from s − 1 on, which the head saw as drafts: accepted drafts are the text's own tokens.
                windows = tokens[: positions.stop + i].unfold(0, i + 1, 1)[positions]  # (C, i + 1)
                embeddings = embed(windows).to(heads.device, heads.dtype)
            yield heads.logits(i, hidden_NH[positions].to(heads.device, heads.dtype), embeddings)

    return logits_of
