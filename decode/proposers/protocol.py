"""What the round loop asks of a proposer."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from draftsmith.decode.sampling import Law


@dataclass(frozen=True)
class Proposal:
    """A drafted chain and the distributions that it was drawn from."""

    tokens: Tensor
    """Drafted tokens, (K,) int64, K ≥ 0: a proposer may draft fewer than it was asked for."""
    probabilities: Tensor | None
    """q, (K, V) with the target's V; None where the proposal is deterministic, as every proposal at T=0 is."""


class Proposer(Protocol):
    """Drafts tokens for one sequence at a time.

    The loop calls `start` once a sequence, then alternates `propose` and `rollback`. To add a proposer, implement these
    three methods; nothing is registered. What `probabilities` says must be what was drawn from: the decoder is
    lossless only then.
    """

    def start(self, law: Law, vocab_size: int, generator: torch.Generator | None) -> None:
        """Begin a new sequence.

        Args:
            law: the warping of the target's logits, to be applied to the drafter's own.
            vocab_size: V, the width of the target's logits.
            generator: the source of randomness of this sequence; the global one if None.
        """

    def propose(self, sequence: Tensor, draft_length: int) -> Proposal:
        """Draft up to `draft_length` ≥ 1 tokens to follow `sequence`, (1, T)."""

    def rollback(self, length: int) -> None:
        """Forget all but the first `length` tokens: those stand, and one token that was not drafted follows them."""
