"""What a distillation run is told."""

from dataclasses import dataclass, field
from functools import cached_property

from transformers import TrainingArguments

from draftsmith.decode.errors import InputError
from draftsmith.train.objective import Objective


@dataclass
class DistillConfig:
    """Distil a draft model from a frozen target, on completions that the target wrote (`draftsmith prepare`)."""

    target: str
    """The frozen teacher: a model directory or hub id."""
    draft: str
    """The student to start from: a causal LM with the target's tokenizer."""
    completions: list[str]
    """Completion directories to train on."""
    heldout: list[str] = field(default_factory=list)
    """Completion directories to measure acceptance on; needed where `training.eval_strategy` is not "no"."""
    training: TrainingArguments = field(default_factory=TrainingArguments)
    """The Trainer's arguments. `output_dir` receives checkpoints and, at its top, the distilled draft."""
    divergence: str | dict[str, float] = "forward_kl"
    """What is minimised: forward_kl, reverse_kl, jsd, skew_kl, skew_reverse_kl, tvd, cross_entropy (on the completions'
    tokens, without the teacher's law), expected_length (the accepted tokens that a drafted block falls short of),
    reached_tvd; or weights by name, for their sum."""
    beta: float = 0.5
    """The weight of p in jsd's mixture."""
    alpha: float = 0.1
    """How far the skewed divergences mix their first law into the second."""
    curriculum: float = 0.0
    """The share of the steps over which the objective moves from the forward KL to `divergence`, linearly."""
    temperature: float = 1.0
    """Divides both models' logits in the loss and in replay: the temperature that the pair is deployed at."""
    top_k: int = 0
    """The deployment's top-k, in the loss and in replay; 0 for none."""
    top_p: float = 1.0
    """The deployment's top-p, in the loss and in replay."""
    draft_length: int = 4
    """γ of the replayed mean acceptance length, and of the block terms expected_length and reached_tvd."""
    max_length: int | None = None
    """Cut samples to this many tokens."""
    target_dtype: str = "float32"
    """The frozen target's dtype; the draft trains in float32, under autocast where `training.bf16` asks for it."""
    optimizer: str = "trainer"
    """"trainer": what `training.optim` says; "muon": Muon on the draft's matrices and AdamW on the rest, which learns
    faster in short runs, for unsharded drafts (one process or DDP, no FSDP or ZeRO)."""
    resume: bool = True
    """Go on from the last checkpoint in `output_dir` if there is one."""
    trust_remote_code: bool = False
    """Run model code that a repository ships."""

    def __post_init__(self) -> None:
        _ = self.objective
        if not 0 <= self.curriculum <= 1:
            raise InputError(f"curriculum: expected a value between 0 and 1, found {self.curriculum}")
        if not self.completions:
            raise InputError("completions: expected at least one directory, found none")
        if self.optimizer not in ("trainer", "muon"):
            raise InputError(f"optimizer: expected trainer or muon, found {self.optimizer!r}")
        if self.optimizer == "muon" and (self.training.fsdp or self.training.deepspeed):
            raise InputError("optimizer: expected trainer for a draft sharded by FSDP or DeepSpeed, found muon")
        if self.max_length is not None and self.max_length < 2:
            raise InputError(f"max_length: expected at least 2, found {self.max_length}")
        if self.training.eval_strategy != "no" and not self.heldout:
            raise InputError(
                f"heldout: expected completion directories for training.eval_strategy={self.training.eval_strategy}, "
                "found none"
            )

    @cached_property
    def objective(self) -> Objective:
        """What is minimised."""
        terms = {self.divergence: 1.0} if isinstance(self.divergence, str) else self.divergence
        return Objective(terms, self.temperature, self.top_k, self.top_p, self.beta, self.alpha, self.draft_length)
