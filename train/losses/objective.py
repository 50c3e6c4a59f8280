"""Training objectives: a weighted sum of divergences and of the shortfall of the expected acceptance length.

All terms are sums over the tokens of a global batch, so that splitting it over steps and processes changes nothing.
Shape suffixes: N positions, V vocabulary, K features of a position, E outcomes: the V tokens, or the k tokens of cached
distributions and their tail.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import TopPLogitsWarper

from draftsmith.decode.errors import InputError, at_least, at_most, more_than, one_of, require
from draftsmith.decode.sampling import top_k_top_p
from draftsmith.train.losses.distributions import LOWEST, CachedDistributions, CutDistributions, WholeLogits
from draftsmith.train.losses.divergences import DIVERGENCES, check_divergence, forward_kl, lk_blend, parameter_of, tvd
from draftsmith.train.losses.divergences import NAMES as DIVERGENCE_NAMES

BLOCK_TERMS = ("expected_length", "reached_tvd")
NAMES = (*DIVERGENCE_NAMES, *BLOCK_TERMS)
# These stay finite where p or q is zero. The others need q > 0 wherever p > 0, so their q is not warped as p is.
# lk_hybrid has a part of either kind; nla would have no gradient where p and q keep different tokens.
BOUNDED = ("tvd", *BLOCK_TERMS)
UNBOUNDED = tuple(name for name in DIVERGENCES if name not in (*BOUNDED, "lk_hybrid"))
# These are acceptance, or weighted by it: with a cut vocabulary, their p includes all other tokens, as in decoding.
ACCEPTANCE = ("nla", "lk_hybrid", *BOUNDED)


@dataclass(frozen=True)
class Objective:
    """A weighted sum of terms, under the deployment's sampling.

    Terms are the divergences of `draftsmith.train.losses.divergences` and two over drafted blocks of γ tokens:

    * `expected_length`: γ − E[accepted tokens] of a round that starts at the position, with
      E[accepted] = Σ_j E[Π_{i<j} min(1, q_i/p_i) · Σ_v min(p_j, q_j)]. The last factor sums over the full vocabulary,
      not over the text's token alone: the same mean with less variance. At γ = 1 the term is the TVD.
    * `reached_tvd`: the same value, but the probability of reaching a position is a constant weight in the gradient.

    `lk_hybrid` takes its KL with q unwarped, and its TV and α with q warped: λ follows the deployment's acceptance.
    """

    terms: Mapping[str, float] = field(default_factory=lambda: {"forward_kl": 1.0})  # weights by name, each more than 0
    temperature: float = 1.0  # divides both models' logits
    top_k: int = 0
    """The deployment's top-k; 0 for none. It warps p, and warps q in the terms that stay finite where q is zero."""
    top_p: float = 1.0  # the deployment's top-p, after top-k
    beta: float = 0.5  # the weight of p in jsd's mixture
    alpha: float = 0.1  # how far skewed divergences mix their first distribution into the second
    draft_length: int = 4  # γ of the block terms
    eta: float = 3.0  # η of lk_hybrid
    partial: bool = False  # whether the text has tokens that the draft cannot propose, because its vocabulary is cut

    def __post_init__(self) -> None:
        if not self.terms:
            raise InputError(f"divergence: expected one of {', '.join(NAMES)}, found none")
        for name, weight in self.terms.items():
            one_of(NAMES).check("divergence", name)
            if not weight > 0:
                raise InputError(f"divergence: expected weights above 0, found {weight} for {name}")
        check_divergence("forward_kl", self.temperature, self.beta, self.alpha, self.eta)
        require(self, at_least(0), "top_k")
        require(self, more_than(0) & at_most(1), "top_p")
        require(self, at_least(1), "draft_length")
        if self.warps and "reverse_kl" in self.terms:
            raise InputError(
                "divergence: expected a finite divergence under top_k or top_p, found reverse_kl, infinite wherever "
                "p is cut to 0 (skew_reverse_kl and jsd are not)"
            )

    @property
    def warps(self) -> bool:
        """Return whether p is cut to its most probable tokens."""
        return self.top_k > 0 or self.top_p < 1

    @property
    def has_blocks(self) -> bool:
        """Return whether positions of a drafted block affect each other's gradients: all values are needed first."""
        return any(name in self.terms for name in BLOCK_TERMS)

    @property
    def needs_target(self) -> bool:
        """Return whether p is used; cross entropy learns from the text alone."""
        return set(self.terms) != {"cross_entropy"}

    @property
    def looks_outside(self) -> bool:
        """Return whether p of tokens that the draft cannot propose is needed, for acceptance or for top-k and top-p."""
        return self.partial and (self.warps or any(name in self.terms for name in ACCEPTANCE))

    def after(self, progress: float) -> "Objective":
        """Return a curriculum's mixture: the forward KL at progress 0, the objective from 1 on."""
        if progress >= 1:
            return self
        terms = {name: weight * progress for name, weight in self.terms.items() if progress > 0}
        terms["forward_kl"] = terms.get("forward_kl", 0.0) + 1 - progress
        return replace(self, terms=terms)

    def features(self, p: Tensor | WholeLogits | CachedDistributions, q_logits_NV: Tensor, labels_N: Tensor) -> Tensor:
        """Return the addends of `shortfall`: the weighted divergences, and the parts of coupled terms.

        Args:
            p: the target's logits, or its cached distributions under the same warping; unused unless `needs_target`.
                For a draft with a cut vocabulary, which V then means, `WholeLogits`, or logits of its tokens alone if
                the objective does not look outside.
            q_logits_NV: the draft's logits; gradients flow to them.
            labels_N: the text's tokens. With `partial`, −100 marks tokens that the draft cannot propose: they are never
                accepted, and no example.

        Returns:
            (N, 1); with `has_blocks` (N, 3), adding log a = min(0, log q(x) − log p(x)) and Σ_v min(p, q).
        """
        total_N = q_logits_NV.new_zeros(len(q_logits_NV), dtype=torch.float32)
        if "cross_entropy" in self.terms:
            ce_N = torch.nn.functional.cross_entropy(q_logits_NV.float(), labels_N, reduction="none")
            total_N = total_N + self.terms["cross_entropy"] * ce_N
        if not self.needs_target:
            return total_N[:, None]
        pair = DistributionPair(self, p, q_logits_NV)
        # Terms that need q > 0 wherever p > 0: q is not warped.
        for name in self.terms:
            if name in UNBOUNDED:
                log_p_NE, log_q_NE = pair.in_acceptance() if name in ACCEPTANCE else pair.among_drafted()
                value_N = DIVERGENCES[name](log_p_NE, log_q_NE, parameter_of(name, self.beta, self.alpha, self.eta))
                total_N = total_N + self.terms[name] * pair.where_possible(value_N)
        kl_N = pair.where_possible(forward_kl(*pair.among_drafted())) if "lk_hybrid" in self.terms else None
        if kl_N is None and not self.terms.keys() & set(BOUNDED):
            return total_N[:, None]
        # Terms that compare p and q as decoding does: both are warped.
        log_p_NE, log_q_NE = pair.in_acceptance(warped=True)
        if "tvd" in self.terms or kl_N is not None:
            tv_N = tvd(log_p_NE, log_q_NE)
            total_N = total_N + self.terms.get("tvd", 0.0) * tv_N
            if kl_N is not None:
                total_N = total_N + self.terms["lk_hybrid"] * lk_blend(kl_N, tv_N, self.eta)
        if not self.has_blocks:
            return total_N[:, None]
        # The overlap comes last: its tensors are the largest, and backward frees those of the last column first.
        log_a_N = pair.log_accepted(labels_N)
        return torch.stack([total_N, log_a_N, torch.minimum(log_p_NE, log_q_NE).exp().sum(-1)], dim=1)

    def shortfall(
        self,
        features_NK: Tensor,
        follows_N: Tensor | None = None,
        weights_N: Tensor | None = None,
        starts_N: Tensor | None = None,
    ) -> Tensor:
        """Return the objective summed over positions, a scalar, from the `features` of texts one after the other.

        `follows_N` is bool, whether a position comes right after the one before it in the same text, and only needed
        with `has_blocks`. `weights_N` weighs positions in the sum, apart from blocks; 1 if None.
        `starts_N` is bool, where blocks begin; everywhere if None.
        """
        weights_N = features_NK.new_ones(len(features_NK)) if weights_N is None else weights_N
        total = (weights_N * features_NK[:, 0]).sum()
        for name in BLOCK_TERMS:
            if name in self.terms:
                assert follows_N is not None
                detach = name == "reached_tvd"
                accepted_N, most_N = expected_accepted(
                    features_NK[:, 1], features_NK[:, 2], follows_N, self.draft_length, detach
                )
                missed_N = most_N - accepted_N
                total = total + self.terms[name] * (missed_N if starts_N is None else missed_N * starts_N).sum()
        return total

    def warped(self, scores_NV: Tensor) -> Tensor:
        """Return scores with `LOWEST` in place of tokens that top-k and top-p drop."""
        if self.top_k:
            return top_k_top_p(scores_NV, self.top_k, self.top_p, LOWEST)
        if self.top_p < 1:
            nothing: Any = None  # this warper ignores the text
            return TopPLogitsWarper(self.top_p, filter_value=LOWEST)(nothing, scores_NV)
        return scores_NV


class DistributionPair:
    """p and q of some positions, as logarithms over the outcomes that terms compare.

    Outcomes are the V tokens, or the k tokens of cached distributions and their tail. With a cut vocabulary they are
    the tokens that the draft can propose, over which p is renormalised; acceptance adds all others as one outcome.
    """

    def __init__(
        self, objective: Objective, p: Tensor | WholeLogits | CachedDistributions, q_logits_NV: Tensor
    ) -> None:
        self._objective, self._p = objective, p
        self._log_mass_N: Tensor | None = None
        """The log-probability under p of all tokens that a draft with a cut vocabulary can propose."""
        if isinstance(p, CachedDistributions):
            self._log_p_NE = p.bucketed()
            self._log_mass_N = p.log_mass if isinstance(p, CutDistributions) else None
        else:
            logits = p.logits if isinstance(p, WholeLogits) else p
            log_p_NV = objective.warped(logits.float() / objective.temperature).log_softmax(-1)
            self._log_p_NE = log_p_NV
            if isinstance(p, WholeLogits):
                self._log_p_NE, self._log_mass_N = p.among(log_p_NV)
        self._scores_NV = q_logits_NV.float() / objective.temperature
        self._log_q: dict[bool, tuple[Tensor, Tensor]] = {}

    def among_drafted(self) -> tuple[Tensor, Tensor]:
        """Return log p and log q over the tokens that the draft can propose, (N, E); q is not warped."""
        return self._log_p_NE, self._q()[1]

    def in_acceptance(self, warped: bool = False) -> tuple[Tensor, Tensor]:
        """Return log p and log q as decoding compares them, (N, E); with a cut vocabulary (N, E + 1), q 0 outside."""
        log_q_NE = self._q(warped)[1]
        return self._accepted_p_NE, _like(self._accepted_p_NE, log_q_NE)

    def where_possible(self, values_N: Tensor) -> Tensor:
        """Return values, but 0 where the draft can propose nothing that has a probability: it learns nothing there."""
        return values_N if self._log_mass_N is None else values_N.masked_fill(self._log_mass_N <= LOWEST / 2, 0.0)

    def log_accepted(self, labels_N: Tensor) -> Tensor:
        """Return log min(1, q(x) ÷ p(x)) of the text's tokens, (N,), `LOWEST` for those that the draft lacks."""
        partial = self._objective.partial
        known_N = labels_N.clamp(min=0) if partial else labels_N
        if isinstance(self._p, CachedDistributions):
            of_text_N = self._p.log_p_of_text.clamp(min=LOWEST)
        else:
            of_text_N = _at(self._accepted_p_NE, known_N)
        log_a_N = (_at(self._q(warped=True)[0], known_N) - of_text_N).clamp(max=0.0)
        return log_a_N.masked_fill(labels_N < 0, LOWEST) if partial else log_a_N

    @cached_property
    def _accepted_p_NE(self) -> Tensor:
        return self._log_p_NE if self._log_mass_N is None else _with_outside(self._log_p_NE, self._log_mass_N)

    def _q(self, warped: bool = False) -> tuple[Tensor, Tensor]:
        """Return log q over all of the draft's tokens, and over the outcomes."""
        warped = warped and self._objective.warps
        if warped not in self._log_q:
            scores_NV = self._objective.warped(self._scores_NV) if warped else self._scores_NV
            log_q_NV = scores_NV.log_softmax(-1)
            log_q_NE = self._p.bucket(log_q_NV) if isinstance(self._p, CachedDistributions) else log_q_NV
            # Keep only the last one: both would hold two more (N, V) tensors.
            self._log_q = {warped: (log_q_NV, log_q_NE)}
        return self._log_q[warped]


def _with_outside(log_p_NE: Tensor, log_mass_N: Tensor) -> Tensor:
    """Return log p with its true probabilities, and all that a draft cannot propose as one more outcome, (N, E + 1)."""
    outside_N = torch.log1p(-log_mass_N.exp().clamp(max=1.0))
    return torch.cat([log_p_NE + log_mass_N[:, None], outside_N[:, None]], dim=1).clamp(min=LOWEST)


def _like(log_p_NE: Tensor, log_q_NE: Tensor) -> Tensor:
    """Return log q over the outcomes of p; q is 0 at the outcome outside the draft's vocabulary, if p has one."""
    extra = log_p_NE.shape[1] - log_q_NE.shape[1]
    return torch.nn.functional.pad(log_q_NE, (0, extra), value=LOWEST) if extra else log_q_NE


def _at(log_p_NV: Tensor, tokens_N: Tensor) -> Tensor:
    return log_p_NV.gather(1, tokens_N[:, None])[:, 0]


def expected_accepted(
    log_a_N: Tensor, overlap_N: Tensor, follows_N: Tensor, draft_length: int, detach_reach: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the expected accepted tokens of a round that starts at each position, (N,), and their upper bound, (N,).

    E[accepted from t | text] = Σ_{j<γ} exp(Σ_{i<j} log a_{t+i}) · o_{t+j}: the round reaches position t + j if it
    accepts all tokens before, each with a = min(1, q(x)/p(x)), and accepts a token there with probability o = Σ_v
    min(p, q), the mean over the target's tokens (Leviathan et al. 2023, section 3.1, without the assumption of equal
    α). `follows_N` is as in `Objective.shortfall`; `detach_reach` treats the probabilities of reaching a position as
    constants.
    """
    n = len(log_a_N)
    # Row t of `reach` and `inside` describes a round that starts at t: the log-probability that it reaches t + j, and
    # whether t + j is still in the same text. Rows whose t + j is past the last position drop off.
    reach = log_a_N.new_zeros(n)
    inside = torch.ones_like(follows_N)
    accepted, most = overlap_N.clone(), torch.ones_like(overlap_N)
    for j in range(1, min(draft_length, n)):
        reach = reach[: n - j] + log_a_N[j - 1 : n - 1]
        inside = inside[: n - j] & follows_N[j:]
        weight = torch.where(inside, reach, -torch.inf).exp()  # exp(−∞) = 0, with a gradient of 0
        if detach_reach:
            weight = weight.detach()
        pad = (0, j)
        accepted = accepted + torch.nn.functional.pad(weight * overlap_N[j:], pad)
        most = most + torch.nn.functional.pad(inside.to(most.dtype), pad)
    return accepted, most
