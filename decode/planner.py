"""How long a draft should be: measured costs times measured acceptance.

γ drafted tokens a round emit τ(γ) tokens for d(γ) + t(γ + 1) + o seconds, where t(k) is a forward of the target over k
tokens, d(γ) the drafting and o the rest; plain decoding emits one for t(1). The formula of Leviathan et al. 2023
(theorem 3.8) is the case t(k) = t(1), which no machine grants.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from draftsmith.decode.cache import CachedModel
from draftsmith.decode.errors import InputError


@dataclass(frozen=True)
class Costs:
    """What a round costs on one machine, in seconds."""

    target: Mapping[int, float]
    """t(k): a forward of the target over k tokens a row; k that were not measured are interpolated."""
    draft_step: float
    """d(1): drafting one token; d(γ) is taken as γ times that."""
    overhead: float = 0.0
    """o: the rest of a round."""

    def __post_init__(self) -> None:
        if 1 not in self.target:
            raise InputError(
                f"costs: expected the target's seconds for 1 token among them, found {sorted(self.target)}"
            )

    def verification(self, tokens: int) -> float:
        """Return t(k), interpolated between measured k and extrapolated beyond the last two."""
        known = sorted(self.target)
        if tokens in self.target or len(known) == 1:
            return self.target.get(tokens, self.target[known[0]])
        above = next((k for k in known if k > tokens), known[-1])
        below = known[known.index(above) - 1]
        slope = (self.target[above] - self.target[below]) / (above - below)
        return self.target[below] + slope * (tokens - below)

    def speedup(self, acceptance_length: float, draft_length: int) -> float:
        """Return τ·t(1) ÷ (d(γ) + t(γ + 1) + o), the speed-up over plain decoding; 1 for γ = 0."""
        if draft_length == 0:
            return 1.0
        seconds = draft_length * self.draft_step + self.verification(draft_length + 1) + self.overhead
        return acceptance_length * self.target[1] / seconds


def acceptance_length(conditional: Sequence[float]) -> float:
    """Return τ = 1 + Σ_j Π_{i ≤ j} a_i of a chain whose positions are accepted with these conditional probabilities."""
    length, reach = 1.0, 1.0
    for a in conditional:
        reach *= a
        length += reach
    return length


def best_draft_length(costs: Costs, acceptance: float, longest: int) -> int:
    """Return the γ ≤ `longest` of the greatest speed-up where every position is accepted alike; 0: do not draft."""
    speedups = [costs.speedup(acceptance_length([acceptance] * k), k) for k in range(longest + 1)]
    return max(range(longest + 1), key=lambda k: speedups[k])


@torch.inference_mode()
def verification_costs(
    target: PreTrainedModel, rows: int, context: int, tokens: Sequence[int], repeats: int = 5, compiled: bool = False
) -> dict[int, float]:
    """Measure t(k) for blocks of k tokens behind a context, `rows` at a time: medians, the sizes taken in turns."""
    model = CachedModel(target, rows, context, block=max(tokens), compiled=compiled)
    model.prefill(torch.ones(rows, context, dtype=torch.long, device=target.device))
    blocks = {k: torch.ones(rows, k, dtype=torch.long, device=target.device) for k in tokens}
    seconds: dict[int, list[float]] = {k: [] for k in tokens}
    for repeat in range(repeats + 1):
        for k, block in blocks.items():
            elapsed = -now(target)
            model.feed(block, [context] * rows)
            elapsed += now(target)
            if repeat:  # the first is for warming up
                seconds[k].append(elapsed)
    return {k: sorted(own)[len(own) // 2] for k, own in seconds.items()}


def now(model: PreTrainedModel) -> float:
    """Return the time after the model's device has done what it was asked to."""
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return time.perf_counter()


@dataclass
class Plan:
    """Chooses γ anew each round, from the acceptance so far and the costs; 0 where drafting does not pay.

    The rate at which drafted tokens are accepted is estimated over the recent rounds of all rows. Where it does not pay
    to draft, every 16th round drafts one token, to notice when it would.

    Args:
        costs: measured costs. None measures them: the target's before the first round, the drafter's as it drafts.
            Under sampling the texts then depend on the clock: of the right law, but not to be had again from a seed.
        longest: the greatest γ.
    """

    costs: Costs | None = None
    longest: int = 8
    decay: float = 0.96
    _accepted: float = field(default=3.0, init=False)
    _rejected: float = field(default=1.0, init=False)
    _idle: int = field(default=0, init=False)
    _drafting: list[float] = field(default_factory=list, init=False)
    _target: dict[int, float] | None = field(default=None, init=False)

    def start(self, target: PreTrainedModel, rows: int, context: int, compiled: bool) -> None:
        """Begin with new rows: measure the target where no costs were given and it was not measured yet."""
        if self.costs is None and self._target is None:
            sizes = sorted({1, 2, (self.longest + 3) // 2, self.longest + 1})
            self._target = verification_costs(target, rows, context, sizes, compiled=compiled)

    def draft_length(self) -> int:
        """Return γ for the next round."""
        costs = self.costs
        if costs is None:
            if not self._drafting:
                return min(4, self.longest)
            recent = sorted(self._drafting[-15:])
            costs = Costs(self._target or {}, recent[len(recent) // 2])
        best = best_draft_length(costs, self._accepted / (self._accepted + self._rejected), self.longest)
        self._idle = 0 if best else self._idle + 1
        return 1 if self._idle and self._idle % 16 == 0 else best

    def drafted(self, seconds: float, draft_length: int) -> None:
        """Note how long a draft took."""
        if draft_length:
            self._drafting.append(seconds / draft_length)

    def observe(self, accepted: int, drafted: int) -> None:
        """Note what became of one row's draft."""
        if drafted:
            self._accepted = self._accepted * self.decay + accepted
            self._rejected = self._rejected * self.decay + (accepted < drafted)
