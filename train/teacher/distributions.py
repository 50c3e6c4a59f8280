"""The teacher's laws: what a loss compares a draft with, from a model at hand or from a cache of its top k.

Shape suffixes: N positions, H hidden, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from draftsmith.decode.sampling import Sampler
from draftsmith.train.losses.output_head import OutputHead

# Finite, so that a probability of zero times its logarithm is zero, and no gradient is a NaN.
LOWEST = torch.finfo(torch.float32).min


@dataclass(frozen=True)
class LiveDistributions:
    """The laws of a target in memory: its last hidden states, and the head that makes logits of them."""

    hidden: Tensor
    """(N, H); no gradients flow to it."""
    head: OutputHead
    """(V, H)."""

    def chunk(self, at: slice) -> Callable[[slice], Tensor]:
        """Take the matrix product of some positions, and return the way to the logits of some of those."""
        # p has the target's own precision, whatever the draft trains in.
        with torch.no_grad(), torch.autocast(self.hidden.device.type, enabled=False):
            raw = self.head.project(self.hidden[at])
        return lambda part: self.head.finish(raw[part])


@dataclass(frozen=True)
class CachedDistributions:
    """The k most probable tokens of each law, and the rest of the vocabulary as one further outcome, the tail.

    Merging outcomes is a channel, through which no f-divergence grows (data processing inequality; Csiszár 1967): a
    divergence of two such buckets is a lower bound of that of the full laws, exact at k = V. Σ min(p, q) is 1 − TVD and
    so an upper bound, by less than min(p_tail, q_tail): of the tail's own Σ min(p, q) nothing is known but that it is
    at least 0, and the bucket takes min(p_tail, q_tail) for it.
    """

    ids: Tensor
    """The tokens, (N, k), the argmax of the logits first."""
    log_p: Tensor
    """Their log-probabilities, (N, k), −∞ where top-k or top-p leaves a token out."""
    log_tail: Tensor
    """The log-probability of all others together, (N,), −∞ where nothing is left."""
    log_p_of_text: Tensor
    """The log-probability of the text's own token, (N,), which may be any."""

    @classmethod
    def of(cls, logits: Tensor, labels: Tensor, sampler: Sampler, k: int) -> "CachedDistributions":
        """Take the laws of logits.

        Args:
            logits: the target's, (N, V).
            labels: the text's tokens, (N,).
            sampler: the deployment's warping, a context-free one, at a temperature above 0.
            k: tokens to keep, at most V.
        """
        log_p = sampler.scores(logits, []).log_softmax(-1)
        # Among equals topk may put any first.
        best = logits.argmax(-1, keepdim=True)
        ids = log_p.scatter(1, best, torch.inf).topk(k).indices
        tail = log_p.scatter(1, ids, -torch.inf).logsumexp(-1)
        return cls(ids, log_p.gather(1, ids), tail, log_p.gather(1, labels[:, None])[:, 0])

    @classmethod
    def concatenated(cls, distributions: Sequence["CachedDistributions"]) -> "CachedDistributions":
        """Return the laws of several texts, one behind the other."""
        return cls(*(torch.cat([getattr(sampler, field.name) for sampler in distributions]) for field in fields(cls)))

    def __len__(self) -> int:
        return len(self.log_tail)

    def __getitem__(self, at: slice) -> "CachedDistributions":
        return CachedDistributions(*(getattr(self, field.name)[at] for field in fields(self)))

    def to(self, device: torch.device | str) -> "CachedDistributions":
        """Return the laws on a device."""
        return CachedDistributions(*(getattr(self, field.name).to(device) for field in fields(self)))

    def chunk(self, at: slice) -> Callable[[slice], "CachedDistributions"]:
        """Take some positions, and return the way to some of those: as a `LiveDistributions` does."""
        return self[at].__getitem__

    def bucketed(self) -> Tensor:
        """Return log p of the k tokens and of the tail, (N, k + 1) float32, normalised after half precision."""
        log_p = torch.cat([self.log_p.float(), self.log_tail.float()[:, None]], dim=1)
        return log_p.clamp(min=LOWEST).log_softmax(-1)

    def bucket(self, log_q: Tensor) -> Tensor:
        """Return log q of the same outcomes, (N, k + 1), of the log-probabilities of all tokens, (N, V), all finite.

        The tail is summed over its own tokens: 1 − Σ q would lose it where it is small, and its gradient with it.
        """
        ids = self.ids.long()
        tail = log_q.scatter(1, ids, LOWEST).logsumexp(-1, keepdim=True)
        return torch.cat([log_q.gather(1, ids), tail], dim=1)


TeacherDistributions = LiveDistributions | CachedDistributions
