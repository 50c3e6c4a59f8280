"""Tests that texts written side by side are independent, as draws from the target are.

A decoder that writes each text rightly may still share randomness, or tokens, between the rows of a batch or between
requests: each text alone then looks like the target's, and only pairs show it.

Shape suffixes: K orders of the vocabulary, C columns, B texts, P places where both texts of a pair have a token.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.decode.measurement.uniformity import BINS, PAIR_BINS, ChiSquare, bins, independence, uniformity

Pairs = Sequence[tuple[int, int]]
"""Pairs of texts, by their places among all; a text is in one pair at most."""
STAKES = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4)
IN_A_BIN = 10
IN_A_CELL = 20
PART = 256
"""Pairs of places whose distributions are multiplied at once."""


@dataclass(frozen=True)
class Agreement:
    """How often two texts had the same token at the same place, against how often independent ones would."""

    observed: int
    expected: float
    places: int
    p_value: float

    def __str__(self) -> str:
        return f"the same token at {self.observed} of {self.places} places, where {self.expected:.4g} were expected"


class BettingTest:
    """Bets on agreements, which are fair where the texts are independent, whatever was written before.

    Given both beginnings, independent tokens agree with probability s = Σ_v p_i(v) p_j(v). So
    exp(λa) ÷ (1 + s(e^λ − 1)), where a is 1 for an agreement, has expectation 1, and so has the product over all
    places. By Ville's inequality the mean of such products over several λ exceeds 1/x with probability at most x, so
    its inverse is a p-value, valid for any number of places (Shafer 2021, "Testing by betting").
    """

    def __init__(self) -> None:
        self._stakes = torch.tensor([sign * stake for stake in STAKES for sign in (1, -1)], dtype=torch.float64)
        self._logs = torch.zeros_like(self._stakes)
        self._observed, self._expected, self._places = 0, 0.0, 0

    def add(self, agreed_P: Tensor, chance_P: Tensor) -> None:
        """Add places: whether (1 or 0) the texts agreed there, and how likely independent ones would, float64."""
        agreed_P, chance_P = agreed_P.cpu(), chance_P.cpu().clamp(0, 1)
        stakes = self._stakes[:, None]
        self._logs += (stakes * agreed_P - torch.log1p(chance_P * torch.expm1(stakes))).sum(-1)
        self._observed += int(agreed_P.sum())
        self._expected += float(chance_P.sum())
        self._places += len(agreed_P)

    def result(self) -> Agreement:
        """Return the test of all places so far."""
        log_mean = float(self._logs.logsumexp(0)) - math.log(len(self._logs))
        return Agreement(self._observed, self._expected, self._places, math.exp(-max(log_mean, 0.0)))


class PairTests:
    """The part of a distribution test that looks at pairs of texts, and at all texts' first tokens.

    Pairs whose texts are in two batches are left out.
    """

    def __init__(self, pairs: Mapping[str, Pairs], orders: Sequence[str]):
        """Nothing is added up yet.

        Args:
            pairs: by what they have in common, such as "same prompt".
            orders: names of the K orders that the transform was taken by.

        Raises:
            ValueError: a text is in two pairs of a kind, whose agreements would not be independent.
        """
        self._pairs = {kind: dict(places) for kind, places in pairs.items()}
        for kind, places in pairs.items():
            if len({place for pair in places for place in pair}) != 2 * len(places):
                raise ValueError(f"pairs: expected each text in one pair of {kind!r} at most, found one in two")
        self._orders = orders
        self._betting = {kind: BettingTest() for kind in pairs}
        self._both: dict[str, list[Tensor]] = {kind: [torch.zeros(len(orders), 2, 0)] for kind in pairs}
        self._first = [torch.zeros(len(orders), 0)]
        self._here: dict[str, tuple[list[int], list[int]]] = {}

    def begin(self, first: int, count: int) -> None:
        """Begin a batch of `count` texts, the first one's place among all texts being `first`."""
        self._here = {}
        for kind, places in self._pairs.items():
            one = [i for i in range(first, first + count) if first <= places.get(i, -1) < first + count]
            self._here[kind] = [i - first for i in one], [places[i] - first for i in one]

    def add_block(self, p_NV: Tensor, tokens_N: Tensor, block_CB: Tensor) -> None:
        """Add some columns' tokens.

        Args:
            p_NV: the target's distributions, column after column, (N, V).
            tokens_N: the tokens, (N,).
            block_CB: which texts have a token under test in these columns, (C, B) bool with N set.
        """
        place_CB = block_CB.flatten().cumsum(0).view_as(block_CB) - 1
        for kind, (one_P, other_P) in self._here.items():
            both_PC = (block_CB[:, one_P] & block_CB[:, other_P]).T
            if both_PC.any():
                at_one, at_other = place_CB[:, one_P].T[both_PC], place_CB[:, other_P].T[both_PC]
                # A few at a time: of a large vocabulary all would be far more than p itself.
                parts = zip(at_one.split(PART), at_other.split(PART), strict=True)
                chance = torch.cat([(p_NV[i] * p_NV[j]).sum(-1, dtype=torch.float64) for i, j in parts])
                self._betting[kind].add((tokens_N[at_one] == tokens_N[at_other]).double(), chance)

    def end(self, u_KCB: Tensor, wanted_CB: Tensor) -> None:
        """End a batch, with the transformed numbers of its tokens under test."""
        for kind, (one_P, other_P) in self._here.items():
            both_PC = (wanted_CB[:, one_P] & wanted_CB[:, other_P]).T
            both_KX = [u_KCB[:, :, places_P].transpose(1, 2)[:, both_PC] for places_P in (one_P, other_P)]
            self._both[kind].append(torch.stack(both_KX, 1).float())
        begun = wanted_CB.any(0)
        first = wanted_CB.int().argmax(0)[begun]
        self._first.append(u_KCB[:, first, begun.nonzero()[:, 0]].float())

    def tests(self) -> dict[str, ChiSquare | Agreement]:
        """Return the tests, as many whatever was seen: with few numbers in fewer bins, with too few passed."""
        found: dict[str, ChiSquare | Agreement] = {}
        first = torch.cat(self._first, -1)
        for k, order in enumerate(self._orders):
            count = min(BINS, first.shape[-1] // IN_A_BIN)
            counts = bins(first[k], max(count, 1)).bincount(minlength=max(count, 1))
            found[f"first tokens by {order}"] = uniformity(counts) if count > 1 else ChiSquare(0.0, 0, 1.0)
        for kind, parts in self._both.items():
            both = torch.cat(parts, -1)
            count = max(1, min(PAIR_BINS, math.isqrt(both.shape[-1] // IN_A_CELL)))
            for k, order in enumerate(self._orders):
                cells = bins(both[k, 0], count) * count + bins(both[k, 1], count)
                table = cells.bincount(minlength=count**2).view(count, count)
                found[f"{kind}: independent by {order}"] = independence(table)
            found[f"{kind}: agreement"] = self._betting[kind].result()
        return found
