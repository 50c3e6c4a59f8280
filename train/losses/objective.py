"""Training objectives: a weighted sum of divergences.

All terms are sums over the tokens of a global batch, so that splitting it over steps and processes changes nothing.
Shape suffixes: N positions, V vocabulary, K features of a position, E outcomes: the V tokens, or the k tokens of cached
distributions and their tail.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import TopPLogitsWarper

from draftsmith.decode.errors import InputError, at_least, at_most, more_than, one_of, require
from draftsmith.decode.sampling import top_k_top_p
from draftsmith.train.losses.distributions import LOWEST, CachedDistributions, CutDistributions, WholeLogits
from draftsmith.train.losses.divergences import (
    DIVERGENCES,
    NAMES,
    check_divergence,
    forward_kl,
    lk_blend,
    parameter_of,
    tvd,
)

# These stay finite where p or q is zero. The others need q > 0 wherever p > 0, so their q is not warped as p is.
# lk_hybrid has a part of either kind; nla would have no gradient where p and q keep different tokens.
BOUNDED = ("tvd", "lk_hybrid")
# These are acceptance, or weighted by it: with a cut vocabulary, their p includes all other tokens, as in decoding.
ACCEPTANCE = ("nla", *BOUNDED)


@dataclass(frozen=True)
class Objective:
    """A weighted sum of divergences, under the deployment's sampling: see `draftsmith.train.losses.divergences`.

    `lk_hybrid` takes its KL with q unwarped, and its TV and α with q warped: λ follows the deployment's acceptance.
    """

    terms: Mapping[str, float] = field(default_factory=lambda: {"forward_kl": 1.0})  # weights by name, each more than 0
    temperature: float = 1.0  # divides both models' logits
    top_k: int = 0
    """The deployment's top-k; 0 for none. It warps p, and warps q in the terms that stay finite where q is zero."""
    top_p: float = 1.0  # the deployment's top-p, after top-k
    beta: float = 0.5  # the weight of p in jsd's mixture
    alpha: float = 0.1  # how far skewed divergences mix their first distribution into the second
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
    def needs_target(self) -> bool:
        """Return whether p is used; cross entropy learns from the text alone."""
        return set(self.terms) != {"cross_entropy"}

    @property
    def looks_outside(self) -> bool:
        """Return whether p of tokens that the draft cannot propose is needed, for acceptance or for top-k and top-p."""
        return self.partial and (self.warps or any(name in self.terms for name in ACCEPTANCE))

    def features(self, p: Tensor | WholeLogits | CachedDistributions, q_logits_NV: Tensor, labels_N: Tensor) -> Tensor:
        """Return the loss of each position, (N, 1).

        Args:
            p: the target's logits, or its cached distributions under the same warping; unused unless `needs_target`.
                For a draft with a cut vocabulary, which V then means, `WholeLogits`, or logits of its tokens alone if
                the objective does not look outside.
            q_logits_NV: the draft's logits; gradients flow to them.
            labels_N: the text's tokens. With `partial`, −100 marks tokens that the draft cannot propose: they are no
                example.
        """
        total_N = q_logits_NV.new_zeros(len(q_logits_NV), dtype=torch.float32)
        if "cross_entropy" in self.terms:
            ce_N = torch.nn.functional.cross_entropy(q_logits_NV.float(), labels_N, reduction="none")
            total_N = total_N + self.terms["cross_entropy"] * ce_N
        if not self.needs_target:
            return total_N[:, None]
        pair = DistributionPair(self, p, q_logits_NV)
        # Terms that need q > 0 wherever p > 0: q is not warped.
        parameter = {name: parameter_of(name, self.beta, self.alpha, self.eta) for name in self.terms}
        for name in self.terms:
            if name in DIVERGENCES and name not in BOUNDED:
                log_p_NE, log_q_NE = pair.in_acceptance() if name in ACCEPTANCE else pair.among_drafted()
                value_N = DIVERGENCES[name](log_p_NE, log_q_NE, parameter[name])
                total_N = total_N + self.terms[name] * pair.where_possible(value_N)
        # Terms that compare p and q as decoding does: both are warped.
        for name in [name for name in BOUNDED if name in self.terms]:
            if name == "lk_hybrid":
                kl_N = pair.where_possible(forward_kl(*pair.among_drafted()))
                value_N = lk_blend(kl_N, tvd(*pair.in_acceptance(warped=True)), self.eta)
            else:
                value_N = DIVERGENCES[name](*pair.in_acceptance(warped=True), parameter[name])
            total_N = total_N + self.terms[name] * value_N
        return total_N[:, None]

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
        self._log_q: dict[bool, Tensor] = {}

    def among_drafted(self) -> tuple[Tensor, Tensor]:
        """Return log p and log q over the tokens that the draft can propose, (N, E); q is not warped."""
        return self._log_p_NE, self._log_q_NE()

    def in_acceptance(self, warped: bool = False) -> tuple[Tensor, Tensor]:
        """Return log p and log q as decoding compares them, (N, E); with a cut vocabulary (N, E + 1), q 0 outside."""
        return self._accepted_p_NE, _like(self._accepted_p_NE, self._log_q_NE(warped))

    def where_possible(self, values_N: Tensor) -> Tensor:
        """Return values, but 0 where the draft can propose nothing that has a probability: it learns nothing there."""
        return values_N if self._log_mass_N is None else values_N.masked_fill(self._log_mass_N <= LOWEST / 2, 0.0)

    @cached_property
    def _accepted_p_NE(self) -> Tensor:
        return self._log_p_NE if self._log_mass_N is None else _with_outside(self._log_p_NE, self._log_mass_N)

    def _log_q_NE(self, warped: bool = False) -> Tensor:
        """Return log q over the outcomes."""
        warped = warped and self._objective.warps
        if warped not in self._log_q:
            scores_NV = self._objective.warped(self._scores_NV) if warped else self._scores_NV
            log_q_NV = scores_NV.log_softmax(-1)
            # Keep only the last one: both would hold one more (N, V) tensor.
            self._log_q = {warped: self._p.bucket(log_q_NV) if isinstance(self._p, CachedDistributions) else log_q_NV}
        return self._log_q[warped]


def _with_outside(log_p_NE: Tensor, log_mass_N: Tensor) -> Tensor:
    """Return log p with its true probabilities, and all that a draft cannot propose as one more outcome, (N, E + 1)."""
    outside_N = torch.log1p(-log_mass_N.exp().clamp(max=1.0))
    return torch.cat([log_p_NE + log_mass_N[:, None], outside_N[:, None]], dim=1).clamp(min=LOWEST)


def _like(log_p_NE: Tensor, log_q_NE: Tensor) -> Tensor:
    """Return log q over the outcomes of p; q is 0 at the outcome outside the draft's vocabulary, if p has one."""
    extra = log_p_NE.shape[1] - log_q_NE.shape[1]
    return torch.nn.functional.pad(log_q_NE, (0, extra), value=LOWEST) if extra else log_q_NE
