"""What a distillation run is told."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from transformers import TrainingArguments

from draftsmith.decode.errors import InputError
from draftsmith.distill.drafts import DraftInit
from draftsmith.train.models import QUANTIZATIONS
from draftsmith.train.objective import Objective

ACCEPTANCE_METRICS = ("mean_acceptance_length", "alpha", "greedy_alpha", "agreement")


@dataclass
class DistillConfig:
    """Distil a draft model from a frozen target, on completions that the target wrote (`draftsmith prepare`)."""

    target: str
    """The frozen teacher: a model directory or hub id."""
    completions: list[str]
    """Completion directories to train on."""
    draft: str | None = None
    """The student to start from: a causal LM with the target's tokenizer. Without one `init` says what to make."""
    init: DraftInit = field(default_factory=DraftInit)
    """A draft carved from the target or random, LoRA, and the vocabulary's padding."""
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
    teacher_cache: list[str] = field(default_factory=list)
    """Directories of laws (`draftsmith cache`) that together cover `completions` and `heldout`. With them the target's
    weights are not read: of `target` a config and a tokenizer are enough."""
    max_length: int | None = None
    """Cut samples to this many tokens."""
    on_policy: float = 0.0
    """λ: the share of the batches whose completions the draft writes itself, for the target to score; the target's own
    completions in the others."""
    on_policy_tokens: int = 128
    """Tokens of a completion that the draft writes, at most."""
    prompt_loss: bool = False
    """Compare the laws at the positions of the prompts too: more to learn from in the same forwards, off the text that
    is going to be drafted."""
    packing: bool = False
    """Put whole samples one behind the other into rows of `max_length` tokens, apart from each other."""
    patience: int | None = None
    """End training after so many evaluations without a better `training.metric_for_best_model`."""
    target_dtype: str = "float32"
    """The frozen target's dtype; the draft trains in float32, under autocast where `training.bf16` asks for it."""
    target_device: str | None = None
    """Where the target lies: by default a whole copy on each process's own device; "auto" spreads one over all GPUs (of
    a single process); or a device, such as cuda:1."""
    target_quantization: str | None = None
    """8bit or 4bit weights for the target, by bitsandbytes."""
    target_sharded: bool = False
    """Leave each process its share of the target's layers, in place of a whole copy, and gather each layer while it
    computes: for targets that one device cannot hold, at the price of reading all of it over the network each step."""
    optimizer: str = "trainer"
    """"trainer": what `training.optim` says; "muon": Muon on the draft's matrices and AdamW on the rest, which learns
    faster in short runs, for unsharded drafts (one process or DDP, no FSDP or ZeRO)."""
    resume: bool = True
    """Go on from the last checkpoint in `output_dir` if there is one."""
    trust_remote_code: bool = False
    """Run model code that a repository ships."""

    def __post_init__(self) -> None:
        _ = self.objective
        self.init.check_source(self.draft)
        if not 0 <= self.curriculum <= 1:
            raise InputError(f"curriculum: expected a value between 0 and 1, found {self.curriculum}")
        if not self.completions:
            raise InputError("completions: expected at least one directory, found none")
        if self.optimizer not in ("trainer", "muon"):
            raise InputError(f"optimizer: expected trainer or muon, found {self.optimizer!r}")
        if self.optimizer == "muon" and (self.training.fsdp or self.training.deepspeed):
            raise InputError("optimizer: expected trainer for a draft sharded by FSDP or DeepSpeed, found muon")
        if self.target_quantization not in (None, *QUANTIZATIONS):
            raise InputError(
                f"target_quantization: expected one of {', '.join(QUANTIZATIONS)}, found {self.target_quantization!r}"
            )
        for name in ("teacher_cache", "target_device", "target_quantization"):
            if self.target_sharded and getattr(self, name):
                raise InputError(f"target_sharded: expected false with {name}, found true")
        if self.max_length is not None and self.max_length < 2:
            raise InputError(f"max_length: expected at least 2, found {self.max_length}")
        if not 0 <= self.on_policy <= 1:
            raise InputError(f"on_policy: expected a share between 0 and 1, found {self.on_policy}")
        if self.on_policy_tokens < 1:
            raise InputError(f"on_policy_tokens: expected at least 1, found {self.on_policy_tokens}")
        if self.prompt_loss and (self.teacher_cache or not self.objective.needs_target):
            raise InputError(
                "prompt_loss: expected false with teacher_cache, which has no laws of prompts, and with cross_entropy "
                "alone, which would learn to write prompts; found true"
            )
        if self.teacher_cache and self.on_policy:
            raise InputError(
                f"on_policy: expected 0 with teacher_cache, which has no laws of new texts, found {self.on_policy}"
            )
        loading: Any = self.training.accelerator_config
        if self.teacher_cache and loading.dispatch_batches:
            raise InputError(
                "training.accelerator_config.dispatch_batches: expected false with teacher_cache, whose laws cannot be "
                "sliced as rows are, found true"
            )
        if self.packing and self.max_length is None:
            raise InputError("max_length: expected the tokens of a packed row, found none")
        self._select_on_acceptance()
        self.training.remove_unused_columns = False  # the collator reads columns that no model does
        if self.training.eval_strategy != "no" and not self.heldout:
            raise InputError(
                f"heldout: expected completion directories for training.eval_strategy={self.training.eval_strategy}, "
                "found none"
            )

    def _select_on_acceptance(self) -> None:
        """Choose checkpoints by acceptance: the loss can fall while acceptance falls."""
        training = self.training
        if self.patience is not None and not (training.load_best_model_at_end and self.patience >= 1):
            raise InputError("patience: expected at least 1, and training.load_best_model_at_end")
        if not training.load_best_model_at_end:
            return
        if training.metric_for_best_model == "loss":  # the library's default
            training.metric_for_best_model, training.greater_is_better = "mean_acceptance_length", True
        metric = str(training.metric_for_best_model).removeprefix("eval_")
        if metric not in ACCEPTANCE_METRICS:
            raise InputError(
                f"training.metric_for_best_model: expected one of {', '.join(ACCEPTANCE_METRICS)}, found {metric}"
            )

    @cached_property
    def objective(self) -> Objective:
        """What is minimised."""
        terms = {self.divergence: 1.0} if isinstance(self.divergence, str) else self.divergence
        return Objective(terms, self.temperature, self.top_k, self.top_p, self.beta, self.alpha, self.draft_length)
