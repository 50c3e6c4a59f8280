"""What a distillation run is told."""

from dataclasses import dataclass, field

from transformers import TrainingArguments

from draftsmith.decode.errors import InputError
from draftsmith.train.divergences import check_divergence


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
    divergence: str = "forward_kl"
    """forward_kl, reverse_kl, jsd, skew_kl, skew_reverse_kl, tvd, or cross_entropy (on the completions' tokens, without
    the teacher's law)."""
    beta: float = 0.5
    """The weight of p in jsd's mixture."""
    alpha: float = 0.1
    """How far the skewed divergences mix their first law into the second."""
    temperature: float = 1.0
    """Divides both models' logits in the loss and in replay: the temperature that the pair is deployed at."""
    eval_draft_length: int = 4
    """γ of the replayed mean acceptance length."""
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
        check_divergence(self.divergence, self.temperature, self.beta, self.alpha)
        if not self.completions:
            raise InputError("completions: expected at least one directory, found none")
        if self.optimizer not in ("trainer", "muon"):
            raise InputError(f"optimizer: expected trainer or muon, found {self.optimizer!r}")
        if self.optimizer == "muon" and (self.training.fsdp or self.training.deepspeed):
            raise InputError("optimizer: expected trainer for a draft sharded by FSDP or DeepSpeed, found muon")
        if self.eval_draft_length < 1:
            raise InputError(f"eval_draft_length: expected at least 1, found {self.eval_draft_length}")
        if self.max_length is not None and self.max_length < 2:
            raise InputError(f"max_length: expected at least 2, found {self.max_length}")
        if self.training.eval_strategy != "no" and not self.heldout:
            raise InputError(
                f"heldout: expected completion directories for training.eval_strategy={self.training.eval_strategy}, "
                "found none"
            )
