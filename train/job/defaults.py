"""The optimizer and learning rate of a kind of drafter where the user gives none: what trains well at the first try.

Nothing here imports torch. Each recipe's config has its own (`RecipeConfig.defaults`), and what a user gives wins,
field by field. Measured on three targets in `docs/log/defaults.md`.
"""

from dataclasses import dataclass
from typing import Any

WIDTH = 256
"""Hidden size that rates are given for."""

TRAINING: dict[str, Any] = {
    "learning_rate": None,  # of `Defaults`, once the width of what is trained is known
    "load_best_model_at_end": None,  # where checkpoints are kept and there is held-out text to compare them on
    "lr_scheduler_type": "cosine",
    "warmup_steps": 0.05,  # a share of the steps
    "logging_steps": 10,
    "logging_first_step": True,
}
"""Of all kinds, in place of the library's own values of TrainingArguments."""


@dataclass(frozen=True)
class Defaults:
    """The optimizer and the learning rate of a kind of drafter."""

    rate: float
    """The learning rate of one that is `WIDTH` wide."""
    muon: bool = False
    """Muon on the matrices, where nothing is sharded; otherwise AdamW at the same rate, which Muon's updates are scaled
    for (`train/optimizer.py`)."""

    def learning_rate(self, width: int) -> float:
        """Return the rate for a hidden size, to two digits: in inverse proportion.

        As Adam's rate must fall for hidden matrices of greater width (Yang et al. 2022, arXiv 2203.03466, table 3).
        """
        return float(f"{self.rate * WIDTH / width:.1e}")
