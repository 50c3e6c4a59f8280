"""Chains that end where too few of a batch's rows survive: the slots that a batch verifies.

The target verifies a batch in one forward, as wide as its longest draft. So a slot is verified in all rows or in none,
while the rows' mean survival, the probability that a row's draft is accepted up to the slot, is at least the slot's
level. Cutting single rows, as vLLM's adaptive verification does (#47808), would save nothing in a padded forward.

A row's confidence at a slot must be a function of its tokens before the slot, and levels are set before the round. So
whether a slot is verified never depends on its own tokens, and drafts stay lossless. The `n` largest survivals of a
batch would not do: which they are depends on the slots after each.
"""

from collections.abc import Sequence

from torch import Tensor

BINS = 10
MOST_TRIALS = 256  # a bin forgets half of its trials when it has more


class Survival:
    """The rule that ends the chains of a batch, and how often earlier tokens of some confidence were accepted.

    `levels` are the least mean survivals of slots, the last one also that of later slots; empty, nothing is cut. If it
    `learns`, survival is the product of earlier rounds' acceptance at such confidences, and otherwise of confidences.
    """

    def __init__(self, levels: Sequence[float] = (), learns: bool = True):
        self.levels, self.learns = levels, learns
        self.undrafted = levels  # the same for slots whose draft is not made yet
        self.seen = 0  # the slots of the present round whose confidences were given
        # A prior that is too low would never be corrected: what is cut is not tried.
        self._accepted, self._tried = [3.0] * BINS, [4.0] * BINS

    def begin(self, draft_lengths: Sequence[int]) -> None:
        """Begin a round in which rows draft at most these many tokens."""
        self._draft_lengths, self._survivals = draft_lengths, [1.0] * len(draft_lengths)

    def expects(self, slot: int) -> bool:
        """Return whether the round's next slot is worth its draft, by what is known before its confidences."""
        if not slot or not self.levels or not self.learns:
            return True
        return self._pays(slot, self.undrafted, sum(self._accepted) / sum(self._tried))

    def keeps(self, slot: int, confidences: Sequence[float]) -> bool:
        """Return whether the round's next slot is verified, given each row's confidence there."""
        self.seen = slot + 1
        if not self.levels:
            return True
        for row, confidence in enumerate(confidences):
            self._survivals[row] *= self._acceptance(confidence)
        return self._pays(slot, self.levels)

    def _pays(self, slot: int, levels: Sequence[float], acceptance: float = 1.0) -> bool:
        total = sum(s for s, k in zip(self._survivals, self._draft_lengths, strict=True) if slot < k)
        # NaN does not cut: its token is proposed, and verification finds q to be NaN.
        return not acceptance * total < levels[min(slot, len(levels) - 1)] * len(self._survivals)

    def cut(self, confidence_BK: Tensor, draft_lengths: Sequence[int]) -> list[int]:
        """Return the lengths of chains whose confidence at each slot is known, (B, K)."""
        self.begin(draft_lengths)
        columns = confidence_BK.T.tolist()
        kept = next((slot for slot, column in enumerate(columns) if not self.keeps(slot, column)), len(columns))
        return [min(k, kept) for k in draft_lengths]

    def observe(self, confidence_K: Tensor, accepted: int, drafted: int) -> None:
        """Note which of a row's drafted tokens were accepted, and the first one that was not."""
        for slot, confidence in enumerate(confidence_K[: min(accepted + 1, drafted)].tolist()):
            if confidence == confidence:
                bin = self._bin(confidence)
                self._accepted[bin] += slot < accepted
                self._tried[bin] += 1
                if self._tried[bin] > MOST_TRIALS:
                    self._accepted[bin], self._tried[bin] = self._accepted[bin] / 2, self._tried[bin] / 2

    def _acceptance(self, confidence: float) -> float:
        if not self.learns or confidence != confidence:
            return confidence
        bin = self._bin(confidence)
        # Its neighbours count half: a bin that was unlucky is cut, and would not be tried again.
        near = slice(max(bin - 1, 0), bin + 2)
        accepted, tried = self._accepted, self._tried
        return (accepted[bin] + sum(accepted[near])) / (tried[bin] + sum(tried[near]))

    @staticmethod
    def _bin(confidence: float) -> int:
        # Narrow where confidences are low: there it is decided whether a slot pays.
        return min(int(confidence**0.5 * BINS), BINS - 1)
