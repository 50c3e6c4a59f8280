"""A small causal LM as the drafter."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.cache import forward, new_cache, require_rollback, rollback
from draftsmith.decode.proposers.protocol import Proposal
from draftsmith.decode.sampling import Law, align_vocabulary, draw


class DraftModelProposer:
    """Drafts with any causal LM that shares the target's tokenizer (Leviathan et al. 2023; Chen et al. 2023).

    Its logits may be wider or narrower than the target's, where one of them is padded: they are cut to the target's
    width, or the missing entries get probability zero.
    """

    def __init__(self, draft_model: PreTrainedModel):
        require_rollback(draft_model, "draft model")
        self.draft_model = draft_model

    def start(self, law: Law, vocab_size: int, generator: torch.Generator | None) -> None:
        """Begin a new sequence with an empty cache."""
        self._law, self._vocab_size, self._generator = law, vocab_size, generator
        self._cache, self._cached = new_cache(), 0

    def propose(self, sequence: Tensor, draft_length: int) -> Proposal:
        """Draft `draft_length` tokens, each drawn from q (its argmax at T=0) and fed to the next step."""
        # At first the whole prompt waits; after full acceptance the last drafted token, never fed, and the bonus.
        pending = sequence[:, self._cached :]
        context, tokens, distributions = sequence, [], []
        for i in range(draft_length):
            logits = forward(self.draft_model, pending, self._cache, keep=1)
            self._cached += pending.shape[1]
            logits = align_vocabulary(logits, self._vocab_size)
            if self._law.do_sample:
                q = self._law.probabilities(logits, context[0])
                token = draw(q[0], self._generator)
                distributions.append(q)
            else:
                token = self._law.choose(logits, context[0])
            tokens.append(token)
            pending = token[None, :]
            if self._law.processors and i + 1 < draft_length:
                context = torch.cat([context, pending], dim=1)
        return Proposal(torch.cat(tokens), torch.cat(distributions) if distributions else None)

    def rollback(self, length: int) -> None:
        """Drop the rejected tokens from the cache."""
        rollback(self._cache, self._cached - length)
        self._cached = min(self._cached, length)
