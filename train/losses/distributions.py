"""The teacher's distributions: what a loss compares a draft with, from a model at hand or from a cache of its top k.

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

# Finite, so that a probability of zero times its logarithm is zero, and no gradient is a NaN.
LOWEST = torch.finfo(torch.float32).min


@dataclass(frozen=True)
class LiveDistributions:
    """The distributions of a target in memory: its last hidden states, and the head that makes logits of them."""

    hidden: Tensor
    """(N, H); no gradients flow to it."""
    head: OutputHead
    """(V, H)."""

    def chunk(self, at: slice) -> Callable[[slice], Tensor]:
        """Take the matrix product of some positions, and return the way to the logits of some of those."""
        # p has the target's precision, whatever the draft trains in.
        with torch.no_grad(), torch.autocast(self.hidden.device.type, enabled=False):
            raw_CV = self.head.project(self.hidden[at])
        return lambda part: self.head.finish(raw_CV[part])


@dataclass(frozen=True)
class WholeLogits:
    """The target's logits of all tokens, for a draft that proposes D of them."""

    logits: Tensor
    """(N, V)."""
    tokens: Tensor
    """The D tokens, int64."""

    def among(self, log_p_NV: Tensor) -> tuple[Tensor, Tensor]:
        """Return log p over the D tokens, renormalised, (N, D), and of what they have together, (N,).

        Args:
            log_p_NV: the log-probabilities of all tokens that these logits make, all finite.
        """
        log_p_ND = log_p_NV.index_select(1, self.tokens)
        log_mass_N = log_p_ND.logsumexp(1)
        return log_p_ND - log_mass_N[:, None], log_mass_N


@dataclass(frozen=True)
class WholeDistributions:
    """The distributions of a target in memory over all its tokens, for a draft that proposes some of them."""

    live: LiveDistributions
    tokens: Tensor
    """The D tokens, int64."""

    def chunk(self, at: slice) -> Callable[[slice], WholeLogits]:
        """Take the matrix product of some positions, and return the way to the logits of some of those."""
        logits_of = self.live.chunk(at)
        return lambda part: WholeLogits(logits_of(part), self.tokens)


@dataclass(frozen=True)
class CachedDistributions:
    """The k most probable tokens of each position, and the rest of the vocabulary as one more outcome, the tail.

    Merging outcomes is a channel, through which no f-divergence grows (data processing inequality; Csiszár 1967): a
    divergence of two such buckets is a lower bound of the full one, exact at k = V. Σ min(p, q) is 1 − TVD and
    so an upper bound, by less than min(p_tail, q_tail): of Σ min(p, q) over the tail nothing is known but that it is
    at least 0, and the bucket takes min(p_tail, q_tail) for it.
    """

    ids: Tensor
    """The tokens, (N, k), the argmax of the logits first."""
    log_p: Tensor
    """Their log-probabilities, (N, k), −∞ where top-k or top-p leaves a token out."""
    log_tail: Tensor
    """The log-probability of all others together, (N,), −∞ where nothing is left."""
    log_p_of_text: Tensor
    """The log-probability of the text's token, (N,), which may be any."""

    @classmethod
    def of(cls, logits: Tensor, labels: Tensor, sampler: Sampler, k: int) -> "CachedDistributions":
        """Take the distributions of logits.

        Args:
            logits: the target's, (N, V).
            labels: the text's tokens, (N,).
            sampler: the deployment's warping, a context-free one, at a temperature above 0.
            k: tokens to keep, at most V.
        """
        log_p_NV = sampler.scores(logits, []).log_softmax(-1)
        # Among equals topk may put any first.
        best_N1 = logits.argmax(-1, keepdim=True)
        ids_Nk = log_p_NV.scatter(1, best_N1, torch.inf).topk(k).indices
        tail_N = log_p_NV.scatter(1, ids_Nk, -torch.inf).logsumexp(-1)
        return cls(ids_Nk, log_p_NV.gather(1, ids_Nk), tail_N, log_p_NV.gather(1, labels[:, None])[:, 0])

    @classmethod
    def concatenated(cls, distributions: Sequence["CachedDistributions"]) -> "CachedDistributions":
        """Return the distributions of several texts, one behind the other."""
        return cls(*(torch.cat([getattr(each, field.name) for each in distributions]) for field in fields(cls)))

    def __len__(self) -> int:
        return len(self.log_tail)

    def __getitem__(self, at: slice | Tensor) -> "CachedDistributions":
        return type(self)(*(getattr(self, field.name)[at] for field in fields(self)))

    def to(self, device: torch.device | str) -> "CachedDistributions":
        """Return them on a device."""
        return type(self)(*(getattr(self, field.name).to(device) for field in fields(self)))

    def chunk(self, at: slice) -> Callable[[slice], "CachedDistributions"]:
        """Take some positions, and return the way to some of those: as a `LiveDistributions` does."""
        return self[at].__getitem__

    def bucketed(self) -> Tensor:
        """Return log p of the k tokens and of the tail, (N, k + 1) float32, normalised after half precision."""
        log_p_NE = torch.cat([self.log_p.float(), self.log_tail.float()[:, None]], dim=1)
        return log_p_NE.clamp(min=LOWEST).log_softmax(-1)

    def bucket(self, log_q_NV: Tensor) -> Tensor:
        """Return log q of the same outcomes, (N, k + 1), of the log-probabilities of all tokens, all finite.

        The tail is summed over its tokens: 1 − Σ q would lose it where it is small, and its gradient with it.
        """
        ids_Nk = self.ids.long()
        tail_N1 = log_q_NV.scatter(1, ids_Nk, LOWEST).logsumexp(-1, keepdim=True)
        return torch.cat([log_q_NV.gather(1, ids_Nk), tail_N1], dim=1)

    def among(self, places_V: Tensor, count: int) -> "CutDistributions":
        """Return the distributions over the D tokens of a cut vocabulary, renormalised.

        What the tail holds of them is not known: no more than the whole tail, nor than each of them being as probable
        as the least of the k; that much is taken for it. Where nothing is left, p is the tail, which teaches next to
        nothing.

        Args:
            places_V: for each token its place among the D, or D where it has none.
            count: D.
        """
        ids_Nk = places_V[self.ids.long()]
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

    log_mass: Tensor
    """The log-probability of the D tokens together, (N,), which the others, but for that of the text, lack."""

    def bucket(self, log_q_NV: Tensor) -> Tensor:
        """Return log q of the same outcomes, (N, k + 1), of log-probabilities of the D tokens; at the id D q is 0."""
        return super().bucket(torch.nn.functional.pad(log_q_NV, (0, 1), value=LOWEST))


@dataclass(frozen=True)
class GatheredDistributions:
    """The distributions of another set at some of its positions, in any order and as often as named.

    Those of neighbours are made once: the target's matrix product is taken over the positions that a chunk spans.
    """

    distributions: LiveDistributions | WholeDistributions | CachedDistributions
    """Of N positions."""
    places: Tensor
    """Which of them, (E,) int64, on their device."""
    spans: Tensor
    """The same on the CPU, so that none waits for the device."""

    def chunk(self, at: slice) -> Callable[[slice], Any]:
        """Take some positions, and return the way to some of those: as a `LiveDistributions` does."""
        places_C, spanned = self.places[at], self.spans[at]
        first, last = (int(spanned.min()), int(spanned.max())) if len(spanned) else (0, -1)
        chunk_of: Any = self.distributions.chunk(slice(first, last + 1))
        return lambda part: chunk_of(places_C[part] - first)


TeacherDistributions = LiveDistributions | WholeDistributions | CachedDistributions | GatheredDistributions
