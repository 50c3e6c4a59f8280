"""What a distillation run is told."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from draftsmith.decode.errors import SHARE, InputError, at_least, require
from draftsmith.distill.draft_init import DraftInit
from draftsmith.train.losses.objective import Objective
from draftsmith.train.recipe import RecipeConfig


@dataclass
class DistillConfig(RecipeConfig):
    """Distil a draft model from a frozen target, on completions that the target wrote (`draftsmith prepare`)."""

    acceptance_metrics: ClassVar[tuple[str, ...]] = ("mean_acceptance_length", "alpha", "greedy_alpha", "agreement")

    draft: str | None = None
    """The student to start from: a causal LM with the target's tokenizer. Without one `init` says what to make."""
    init: DraftInit = field(default_factory=DraftInit)
    """A draft carved from the target or random, LoRA, and the vocabulary's padding."""
    divergence: str | dict[str, float] = "forward_kl"
    """What is minimised: forward_kl, reverse_kl, jsd, skew_kl, skew_reverse_kl, tvd, cross_entropy (on the completions'
    tokens, without the teacher), expected_length (the accepted tokens that a drafted block falls short of),
    reached_tvd; or weights by name, for their sum."""
    beta: float = 0.5
    """The weight of p in jsd's mixture."""
    alpha: float = 0.1
    """How far the skewed divergences mix their first distribution into the second."""
    curriculum: float = 0.0
    """The share of the steps over which the objective moves from the forward KL to `divergence`, linearly."""
    draft_length: int = 4
    """γ of the replayed mean acceptance length, and of the block terms expected_length and reached_tvd."""
    teacher_cache: list[str] = field(default_factory=list)
    """Teacher caches (`draftsmith cache`) that together cover `completions` and `heldout`. With them the target's
    weights are not read: of `target` a config and a tokenizer are enough."""
    on_policy: float = 0.0
    """λ: the share of the batches whose completions the draft writes itself, for the target to score; the target's own
    completions in the others."""
    on_policy_tokens: int = 128
    """Tokens of a completion that the draft writes, at most."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.objective
        self.init.check_source(self.draft)
        require(self, SHARE, "curriculum", "on_policy")
        require(self, at_least(1), "on_policy_tokens")
        if self.teacher_cache and self.target_sharded:
            raise InputError("target_sharded: expected false with teacher_cache, found true")
        if self.prompt_loss and (self.teacher_cache or not self.objective.needs_target):
            raise InputError(
                "prompt_loss: expected false with teacher_cache, which has none of the prompts, and with cross_entropy "
                "alone, which would learn to write prompts; found true"
            )
        if self.teacher_cache and self.on_policy:
            raise InputError(
                f"on_policy: expected 0 with teacher_cache, which has none of new texts, found {self.on_policy}"
            )
        loading: Any = self.training.accelerator_config
        if self.teacher_cache and loading.dispatch_batches:
            raise InputError(
                "training.accelerator_config.dispatch_batches: expected false with teacher_cache, which cannot be "
                "sliced as rows are, found true"
            )

    @cached_property
    def objective(self) -> Objective:
        """What is minimised."""
        terms = {self.divergence: 1.0} if isinstance(self.divergence, str) else self.divergence
        return Objective(terms, self.temperature, self.top_k, self.top_p, self.beta, self.alpha, self.draft_length)
