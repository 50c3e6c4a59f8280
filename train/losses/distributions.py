"""The teacher's distributions, which a loss compares a draft with: from a model in memory or from a cache of its top k.

Shape suffixes: N positions (C of a chunk), H hidden, V vocabulary, k the tokens kept of a distribution, E = k + 1 with
the tail.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from draftsmith.decode.sampling import Sampler
from draftsmith.train.losses.output_head import OutputHead

# Finite: then a probability of zero times its logarithm is zero, and no gradient is NaN.
LOWEST = torch.finfo(torch.float32).min


@dataclass(frozen=True)
class LiveDistributions:
    """A target's distributions in memory: its last hidden states, and the head that computes logits from them."""

    hidden: Tensor  # (N, H); no gradients flow to it
    head: OutputHead  # (V, H)

    def chunk(self, at: slice) -> Callable[[slice], Tensor]:
        """Compute the matrix product for a slice of positions; return a function from a part of it to logits."""
        # p keeps the target's precision, also where the draft trains in another.
        with torch.no_grad(), torch.autocast(self.hidden.device.type, enabled=False):
            raw_CV = self.head.project(self.hidden[at])
        return lambda part: self.head.finish(raw_CV[part])


@dataclass(frozen=True)
class WholeLogits:
    """The target's logits over all tokens, for a draft that proposes D of them."""

    logits: Tensor  # (N, V)
    tokens: Tensor  # the D token ids, int64

    def among(self, log_p_NV: Tensor) -> tuple[Tensor, Tensor]:
        """Return log p over the D tokens, renormalised, (N, D), and the log of their total probability, (N,).

        `log_p_NV` is computed from these logits, and finite.
        """
        log_p_ND = log_p_NV.index_select(1, self.tokens)
        log_mass_N = log_p_ND.logsumexp(1)
        return log_p_ND - log_mass_N[:, None], log_mass_N


@dataclass(frozen=True)
class WholeDistributions:
    """A target's distributions in memory over all tokens, for a draft that proposes some of them."""

    live: LiveDistributions
    tokens: Tensor  # the D token ids, int64

    def chunk(self, at: slice) -> Callable[[slice], WholeLogits]:
        """Compute the matrix product for a slice of positions; return a function from a part of it to logits."""
        logits_of = self.live.chunk(at)
        return lambda part: WholeLogits(logits_of(part), self.tokens)


@dataclass(frozen=True)
class CachedDistributions:
    """The k most probable tokens of each position, and all other tokens together as one outcome, the tail.

    Merging outcomes never increases an f-divergence (data processing inequality; Csiszár 1967): a divergence of two
    merged distributions is a lower bound of the full one, exact at k = V. Σ min(p, q) = 1 − TVD is then an upper bound,
    too large by at most min(p_tail, q_tail): over the tail, Σ min(p, q) is only known to be at least 0.
    """

    ids: Tensor  # token ids, (N, k), the argmax of the logits first
    log_p: Tensor  # their log-probabilities, (N, k), −∞ for tokens that top-k or top-p drops
    log_tail: Tensor  # the log-probability of all other tokens together, (N,), −∞ if it is zero
    log_p_of_text: Tensor  # the log-probability of the text's token, (N,); the token may be outside the k

    @classmethod
    def of(cls, logits: Tensor, labels: Tensor, sampler: Sampler, k: int) -> "CachedDistributions":
        """Compute the distributions for logits (N, V) and the text's tokens (N,), keeping k ≤ V tokens.

        `sampler` is the deployment's warping: without context, at a temperature above 0.
        """
        log_p_NV = sampler.scores(logits, []).log_softmax(-1)
        # Put the argmax first by hand: among equal values topk may return any first.
        best_N1 = logits.argmax(-1, keepdim=True)
        ids_Nk = log_p_NV.scatter(1, best_N1, torch.inf).topk(k).indices
        tail_N = log_p_NV.scatter(1, ids_Nk, -torch.inf).logsumexp(-1)
        return cls(ids_Nk, log_p_NV.gather(1, ids_Nk), tail_N, log_p_NV.gather(1, labels[:, None])[:, 0])

    @classmethod
    def concatenated(cls, distributions: Sequence["CachedDistributions"]) -> "CachedDistributions":
        """Return the distributions of several texts, one after the other."""
        return cls(*(torch.cat([getattr(part, field.name) for part in distributions]) for field in fields(cls)))

    def __len__(self) -> int:
        return len(self.log_tail)

    def __getitem__(self, at: slice | Tensor) -> "CachedDistributions":
        return type(self)(*(getattr(self, field.name)[at] for field in fields(self)))

    def to(self, device: torch.device | str) -> "CachedDistributions":
        """Return the distributions on a device."""
        return type(self)(*(getattr(self, field.name).to(device) for field in fields(self)))

    def chunk(self, at: slice) -> Callable[[slice], "CachedDistributions"]:
        """Return a function from a part of a slice to its distributions, as `LiveDistributions.chunk` does."""
        return self[at].__getitem__

    def bucketed(self) -> Tensor:
        """Return log p of the k tokens and the tail, (N, k + 1) float32, renormalised after half precision."""
        log_p_NE = torch.cat([self.log_p.float(), self.log_tail.float()[:, None]], dim=1)
        return log_p_NE.clamp(min=LOWEST).log_softmax(-1)

    def bucket(self, log_q_NV: Tensor) -> Tensor:
        """Return log q of the same outcomes, (N, k + 1), from finite log-probabilities of all tokens.

        The tail is summed over its tokens: 1 − Σ q would lose a small tail and its gradient to rounding.
        """
        ids_Nk = self.ids.long()
        tail_N1 = log_q_NV.scatter(1, ids_Nk, LOWEST).logsumexp(-1, keepdim=True)
        return torch.cat([log_q_NV.gather(1, ids_Nk), tail_N1], dim=1)

    def among(self, indices_V: Tensor, count: int) -> "CutDistributions":
        """Return the distributions over the D tokens (`count`) of a cut vocabulary, renormalised.

        `indices_V` maps each token to its index among the D, or to D if it has none. The D tokens' share of the tail is
        unknown. It is taken as its largest possible value: the whole tail, or, if less, the least of the k
        probabilities for each D token outside the k. If nothing is left, p is the tail, which teaches next to nothing.
        """
        ids_Nk = indices_V[self.ids.long()]
        inside_Nk = ids_Nk < count
        log_p_Nk, log_tail_N = self.log_p.float(), self.log_tail.float()
        others_N = (count - inside_Nk.sum(1)).float()
        log_tail_N = torch.minimum(log_tail_N, others_N.log() + log_p_Nk.amin(1))
        log_p_Nk = log_p_Nk.masked_fill(~inside_Nk, -torch.inf)
        log_mass_N = torch.cat([log_p_Nk, log_tail_N[:, None]], dim=1).logsumexp(1)
        empty_N = log_mass_N == -torch.inf
        log_mass_N = log_mass_N.masked_fill(empty_N, 0.0)
        return CutDistributions(
            ids_Nk,
            log_p_Nk - log_mass_N[:, None],
            (log_tail_N - log_mass_N).masked_fill(empty_N, 0.0),
            self.log_p_of_text,
            log_mass_N.masked_fill(empty_N, LOWEST),
        )


@dataclass(frozen=True)
class CutDistributions(CachedDistributions):
    """Cached distributions over the D tokens of a cut vocabulary; the id of any other token is D."""

    log_mass: Tensor  # the log-probability of the D tokens together, (N,)

    def bucket(self, log_q_NV: Tensor) -> Tensor:
        """Return log q of the same outcomes, (N, k + 1), from log-probabilities of the D tokens; at id D, q is 0."""
        return super().bucket(torch.nn.functional.pad(log_q_NV, (0, 1), value=LOWEST))


@dataclass(frozen=True)
class GatheredDistributions:
    """The distributions of another set at some of its positions, in any order, repeated at will.

    The matrix product of a chunk is taken once, over the range of positions that it spans.
    """

    distributions: LiveDistributions | WholeDistributions | CachedDistributions  # the distributions of N positions
    indices: Tensor  # indices of the positions, (E,) int64, on their device
    spans: Tensor  # the same indices on the CPU, to read them without waiting for the device

    def chunk(self, at: slice) -> Callable[[slice], Any]:
        """Compute the matrix product for a slice of positions; return a function from a part of it to logits."""
        indices_C, spanned = self.indices[at], self.spans[at]
        first, last = (int(spanned.min()), int(spanned.max())) if len(spanned) else (0, -1)
        chunk_of: Any = self.distributions.chunk(slice(first, last + 1))
        return lambda part: chunk_of(indices_C[part] - first)


TeacherDistributions = LiveDistributions | WholeDistributions | CachedDistributions | GatheredDistributions
