"""A test that the target wrote the replayed texts: replay of other texts is biased.

Shape suffixes: N tokens of a text, C of a chunk of it, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement.exactness import TIE_ULPS
from draftsmith.decode.replay.rounds import on_host
from draftsmith.decode.sampling import Sampler

FOREIGN = 6.0
"""The standard errors by which a text's surprise may differ from the target's entropy. The target's own text differs by
more with probability 2e-9 if the sum is normal; its tails are a little heavier."""


@dataclass
class Authorship:
    """A test that the target wrote some texts; the results of several processes add up.

    At T=0 each token must be the argmax, or tie with it within rounding. Under sampling each token must have
    probability above 0. In addition, the surprise −log p(x) − H(p) has mean zero and the variance of −log p under p, so
    that its sum over the texts is near zero. Greedy text has too little surprise, text of another model too much.
    """

    excess: float = 0.0  # the sum of surprises, in nats
    variance: float = 0.0  # the variance of that sum

    def __add__(self, other: "Authorship") -> "Authorship":
        return Authorship(self.excess + other.excess, self.variance + other.variance)

    def add(self, tokens_C: Tensor, logits_CV: Tensor, scores_CV: Tensor, p_CV: Tensor | None) -> Tensor:
        """Add a chunk of a text, p None at T=0; return which tokens the target cannot have written, (C,) bool."""
        x = tokens_C.to(logits_CV.device)
        if p_CV is None:
            deficit = scores_CV.amax(-1) - scores_CV.gather(-1, x[:, None])[:, 0]
            tolerance = TIE_ULPS * torch.finfo(logits_CV.dtype).eps * logits_CV.abs().amax(-1).float()
            return (deficit > tolerance).cpu()
        wrong_C = p_CV.gather(-1, x[:, None])[:, 0] <= 0
        # Scores are log p plus a constant, which cancels in both figures, so that no log-softmax is needed. The clamp
        # replaces −inf, where p = 0, so that p · s is 0 there and not NaN.
        s_CV = (scores_CV - scores_CV.amax(-1, keepdim=True)).clamp_(min=-1e3)
        mean_C1 = (p_CV * s_CV).sum(-1, keepdim=True)
        s_CV -= mean_C1
        below_C = s_CV.gather(-1, x[:, None])[:, 0].double()
        squares_C = s_CV.square_().mul_(p_CV).sum(-1).double()
        wrong_C, below_C, squares_C = on_host(wrong_C.double(), below_C, squares_C)
        self.excess -= float(below_C.sum())
        self.variance += float(squares_C.sum())
        return wrong_C > 0

    def conclude(self, wrong_N: Tensor, start: int, sampled: bool) -> None:
        """Raise InputError if some tokens of a whole text are wrong, or the texts so far cannot be the target's."""
        self._refuse(wrong_N, start, "a token that the target could have drawn" if sampled else "the target's argmax")
        if sampled:
            self.judge()

    def judge(self) -> None:
        """Raise InputError where the surprise is not that of the target's texts."""
        z = self.excess / max(self.variance, 1e-12) ** 0.5
        if abs(self.excess) > 1.0 and abs(z) > FOREIGN:
            kind = "likelier" if z < 0 else "less likely"
            raise InputError(
                f"sequences: expected text that the target wrote under these settings, found text that is {kind} than "
                f"its own by {abs(z):.1f} standard errors (allow_biased replays it all the same, with a bias)"
            )

    def _refuse(self, wrong_N: Tensor, start: int, expected: str) -> None:
        if bool(wrong_N.any()):
            index = start + int(wrong_N.int().argmax())
            raise InputError(
                f"sequences: expected text that the target wrote, found {int(wrong_N.sum())} of {len(wrong_N)} tokens "
                f"that are not {expected}, the first at {index} (allow_biased replays it all the same, with a bias)"
            )


def readmit_ties(
    sampler: Sampler, logits_NV: Tensor, scores_NV: Tensor, tokens_N: Tensor, contexts: Sequence[Tensor]
) -> int:
    """Readmit tokens of a text that top-k or top-p cut off here by rounding alone.

    In half precision a forward of a block and one of the whole text differ by several units, so that a token at the
    edge of top-k or top-p may fall out. It is readmitted if it passes the filters once all logits move by the size of a
    tie in its favour. In `scores_NV` it then gets the score of the least likely token that passed. Return their number.
    """
    x_N = tokens_N.to(scores_NV.device)
    cut_N = scores_NV.gather(-1, x_N[:, None])[:, 0].isneginf()
    count = 0
    for i in cut_N.cpu().nonzero()[:, 0].tolist():
        logits_V, x = logits_NV[i].float(), x_N[i]
        tie = TIE_ULPS * torch.finfo(logits_NV.dtype).eps * logits_V.abs().max()
        moved_V = torch.where(logits_V <= logits_V[x], logits_V + tie, logits_V - tie)
        if not bool(sampler.scores(moved_V[None], contexts[i : i + 1])[0, x].isneginf()):
            scores_NV[i, x] = scores_NV[i][scores_NV[i].isfinite()].min()
            count += 1
    return count
