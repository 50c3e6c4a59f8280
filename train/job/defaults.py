"""The default optimizer and learning rate of each kind of drafter, chosen to train well at the first try.

Nothing here imports torch. Each recipe's config has its own (`RecipeConfig.defaults`), and a user's values win field by
field. They were measured on three targets in `docs/log/defaults.md`.
"""

from dataclasses import dataclass
from typing import Any

WIDTH = 256  # the hidden size that rates are given for

TRAINING: dict[str, Any] = {
    "learning_rate": None,  # that of `Defaults`, once the hidden size is known
    "load_best_model_at_end": None,  # true where checkpoints are kept and held-out text can compare them
    "lr_scheduler_type": "cosine",
    "warmup_steps": 0.05,  # a share of the steps
    "logging_steps": 10,
    "logging_first_step": True,
}
"""The defaults of all kinds, in place of the library's own for TrainingArguments."""


@dataclass(frozen=True)
class Defaults:
    """The default optimizer and learning rate of a kind of drafter."""

    rate: float  # AdamW's learning rate at a hidden size of `WIDTH`
    muon_rate: float | None = None
    """The rate with Muon on the matrices, which is the default if nothing is sharded; None: AdamW is."""

    def learning_rate(self, width: int, muon: bool = False) -> float:
        """Return the rate for a hidden size, to two digits.

        It falls in inverse proportion, as Adam's rate must (Yang et al. 2022, arXiv 2203.03466, table 3).
        """
        rate = self.muon_rate if muon and self.muon_rate is not None else self.rate
        return float(f"{rate * WIDTH / width:.1e}")
