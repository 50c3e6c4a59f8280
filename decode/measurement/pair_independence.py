"""Tests that texts written together are independent.

A decoder may write each text correctly but share randomness, or tokens, between the rows of a batch or between
requests. Each text alone then looks like the target's; only pairs show the fault.

Shape suffixes: K orders of the vocabulary, C columns, B texts, P positions where both texts of a pair have a token.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.decode.measurement.uniformity import BINS, PAIR_BINS, ChiSquare, bins, independence, uniformity

Pairs = Sequence[tuple[int, int]]  # pairs of texts, by their indices; a text is in one pair at most
STAKES = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4)
IN_A_BIN = 10
IN_A_CELL = 20
PART = 256  # the pairs of positions whose distributions are multiplied at once


@dataclass(frozen=True)
class Agreement:
    """The number of positions where two texts had the same token, and its expectation for independent texts."""

    observed: int
    expected: float
    places: int
    p_value: float

    def __str__(self) -> str:
        return f"the same token at {self.observed} of {self.places} places, where {self.expected:.4g} were expected"


class BettingTest:
    """Bets on agreements that are fair where the texts are independent.

    Given both beginnings, independent tokens agree with probability s = Σ_v p_i(v) p_j(v). Let a be 1 for an agreement,
    else 0: then exp(λa) ÷ (1 + s(e^λ − 1)) has expectation 1, and so has its product over all positions. By Ville's
    inequality the mean of such products over several λ exceeds 1/x with probability at most x. Its inverse is therefore
    a p-value, valid for any number of positions (Shafer 2021, "Testing by betting").
    """

    def __init__(self) -> None:
        self._stakes = torch.tensor([sign * stake for stake in STAKES for sign in (1, -1)], dtype=torch.float64)
        self._logs = torch.zeros_like(self._stakes)
        self._observed, self._expected, self._places = 0, 0.0, 0

    def add(self, agreed_P: Tensor, chance_P: Tensor) -> None:
        """Add positions: 1 or 0 for an agreement, and its probability s for independent texts, both float64."""
        agreed_P, chance_P = agreed_P.cpu(), chance_P.cpu().clamp(0, 1)
        stakes = self._stakes[:, None]
        self._logs += (stakes * agreed_P - torch.log1p(chance_P * torch.expm1(stakes))).sum(-1)
        self._observed += int(agreed_P.sum())
        self._expected += float(chance_P.sum())
        self._places += len(agreed_P)

    def result(self) -> Agreement:
        """Return the test of all positions so far."""
        log_mean = float(self._logs.logsumexp(0)) - math.log(len(self._logs))
        return Agreement(self._observed, self._expected, self._places, math.exp(-max(log_mean, 0.0)))


class PairTests:
    """The tests of pairs within a batch, by the name of what they have in common, and of all texts' first tokens."""

    def __init__(self, pairs: Mapping[str, Pairs], orders: Sequence[str]):
        """Check the pairs, by name; raise ValueError for texts in two pairs, whose agreements would be dependent."""
        self._pairs = {kind: dict(indices) for kind, indices in pairs.items()}
        for kind, indices in pairs.items():
            if len({index for pair in indices for index in pair}) != 2 * len(indices):
                raise ValueError(f"pairs: expected each text in one pair of {kind!r} at most, found one in two")
        self._orders = orders
        self._betting = {kind: BettingTest() for kind in pairs}
        self._both: dict[str, list[Tensor]] = {kind: [torch.zeros(len(orders), 2, 0)] for kind in pairs}
        self._first = [torch.zeros(len(orders), 0)]
        self._batch: dict[str, tuple[list[int], list[int]]] = {}

    def begin(self, first: int, count: int) -> None:
        """Begin a batch of `count` texts, whose first text has the index `first`."""
        self._batch = {}
        for kind, indices in self._pairs.items():
            one = [i for i in range(first, first + count) if first <= indices.get(i, -1) < first + count]
            self._batch[kind] = [i - first for i in one], [indices[i] - first for i in one]

    def add_block(self, p_NV: Tensor, tokens_N: Tensor, block_CB: Tensor) -> None:
        """Add some columns: p and the tokens under test, column by column, and the mask of these tokens."""
        place_CB = block_CB.flatten().cumsum(0).view_as(block_CB) - 1  # the index n of each token under test
        for kind, (one_P, other_P) in self._batch.items():
            both_PC = (block_CB[:, one_P] & block_CB[:, other_P]).T
            if both_PC.any():
                at_one, at_other = place_CB[:, one_P].T[both_PC], place_CB[:, other_P].T[both_PC]
                # A few pairs at a time: p_i and p_j of all pairs together may take far more memory than p.
                parts = zip(at_one.split(PART), at_other.split(PART), strict=True)
                chance = torch.cat([(p_NV[i] * p_NV[j]).sum(-1, dtype=torch.float64) for i, j in parts])
                self._betting[kind].add((tokens_N[at_one] == tokens_N[at_other]).double(), chance)

    def end(self, u_KCB: Tensor, wanted_CB: Tensor) -> None:
        """End a batch, with the transform of its tokens under test."""
        for kind, (one_P, other_P) in self._batch.items():
            both_PC = (wanted_CB[:, one_P] & wanted_CB[:, other_P]).T
            both_KX = [u_KCB[:, :, places_P].transpose(1, 2)[:, both_PC] for places_P in (one_P, other_P)]
            self._both[kind].append(torch.stack(both_KX, 1).float())
        begun = wanted_CB.any(0)
        first = wanted_CB.int().argmax(0)[begun]
        self._first.append(u_KCB[:, first, begun.nonzero()[:, 0]].float())

    def tests(self) -> dict[str, ChiSquare | Agreement]:
        """Return the tests; few numbers are tested in fewer bins, and too few pass, so that their number is fixed."""
        tests: dict[str, ChiSquare | Agreement] = {}
        first = torch.cat(self._first, -1)
        for k, order in enumerate(self._orders):
            count = min(BINS, first.shape[-1] // IN_A_BIN)
            counts = bins(first[k], max(count, 1)).bincount(minlength=max(count, 1))
            tests[f"first tokens by {order}"] = uniformity(counts) if count > 1 else ChiSquare(0.0, 0, 1.0)
        for kind, parts in self._both.items():
            both = torch.cat(parts, -1)
            count = max(1, min(PAIR_BINS, math.isqrt(both.shape[-1] // IN_A_CELL)))
            for k, order in enumerate(self._orders):
                cells = bins(both[k, 0], count) * count + bins(both[k, 1], count)
                table = cells.bincount(minlength=count**2).view(count, count)
                tests[f"{kind}: independent by {order}"] = independence(table)
            tests[f"{kind}: agreement"] = self._betting[kind].result()
        return tests
