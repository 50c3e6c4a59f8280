"""The settings of a training run of EAGLE-3 heads."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from draftsmith.decode.errors import DECAY, HEADS, InputError, at_least, more_than, one_of, require
from draftsmith.train.job.defaults import Defaults
from draftsmith.train.memory.setting import TrainingMachines
from draftsmith.train.recipe import RecipeConfig
from draftsmith.train.teacher.cache_config import refuse_beside_cache

if TYPE_CHECKING:
    from draftsmith.train.losses.objective import Objective

INITS = ("auto", "last_layer", "random")
SHAPE = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


@dataclass
class EagleTrainingConfig(RecipeConfig):
    """Train EAGLE-3 heads on a target, on completions that the target wrote (`draftsmith prepare`)."""

    acceptance_metrics: ClassVar[tuple[str, ...]] = ("mean_acceptance_length", "alpha", "accuracy_1")

    heads: str | None = None
    """Heads to go on from: a directory that an earlier run left. Without one the fields below say what to make."""
    layer_ids: list[int] = field(default_factory=list)
    """After how many of the target's layers its features are taken, ascending; of L layers 2, L // 2 and L − 3 if not
    given."""
    draft_vocabulary: int | None = None
    """Draft among the so many tokens that are most frequent in `completions` alone; all of them if not given. Where the
    completions hold fewer, all of theirs."""
    init: str = "auto"
    """How the layer begins: as the target's "last_layer", which sees the state alone at first; at "random"; or "auto",
    as the last layer where ours can compute what it does (Llama, Mistral), and at random for other families."""
    norm_before_residual: bool = False
    """Begin the residual path around attention behind the state's norm."""
    norm_before_fc: bool = False
    """Norm the features together before they are fused."""
    fc_norm: bool = False
    """Norm each depth's features before they are fused."""
    norm_output: bool = False
    """Hand the state behind the last norm to the next step, in place of the one before it."""
    teacher_cache: list[str] = field(default_factory=list)
    """Caches of features (`draftsmith cache --features true`) that together cover `completions` and `heldout`. With
    them the target is not loaded: of `target` a config and a tokenizer are enough."""
    num_steps: int = 4
    """K, the steps of a round in training: the training-time test (EAGLE-3, section 3.2). Heads may draft further."""
    divergence: str | dict[str, float] = "forward_kl"
    """What each step minimises: soft labels by forward_kl, jsd, tvd, lk_hybrid, nla, … to the target's distribution;
    hard labels by cross_entropy on the completions' tokens; or weights by name, for their sum."""
    eta: float = 3.0
    """η of lk_hybrid, λ KL + (1 − λ) TV with λ = e^(−η α): the larger, the sooner it is TV."""
    lk_alpha: str = "position"
    """Which α weighs lk_hybrid: each "position" its own, or a step's mean over a "batch", which is what one process
    learns from in one forward; that takes the losses' matrix products twice."""
    decay: float = 0.8
    """decay^k is the weight of step k's loss."""

    def __post_init__(self) -> None:
        from draftsmith.train.losses.objective import BLOCK_TERMS

        super().__post_init__()
        if self.objective.has_blocks:
            raise InputError(f"divergence: expected none of {', '.join(BLOCK_TERMS)}, found {self.divergence!r}")
        require(self, one_of(INITS), "init")
        require(self, at_least(1), "num_steps", "draft_vocabulary", "layer_ids")
        require(self, HEADS, "num_steps")
        require(self, more_than(0), "decay")
        require(self, DECAY, "decay")
        if self.teacher_cache:
            refuse_beside_cache(self)
        if self.heads is not None:
            given = [name for name in ("layer_ids", "draft_vocabulary", *SHAPE) if getattr(self, name)]
            if given:
                raise InputError(f"{given[0]}: expected none beside heads, which have theirs, found one")

    @property
    def defaults(self) -> Defaults:
        """Heads that go on from others are changed less."""
        return Defaults(rate=4e-3 if self.heads is None else 1e-3)

    @cached_property
    def objective(self) -> "Objective":
        """What a step minimises."""
        from draftsmith.train.losses.objective import Objective

        terms = {self.divergence: 1.0} if isinstance(self.divergence, str) else self.divergence
        return Objective(terms, self.temperature, self.top_k, self.top_p, eta=self.eta, lk_alpha=self.lk_alpha)


@dataclass
class EaglePlanConfig(TrainingMachines, EagleTrainingConfig):
    """Say whether a training run of EAGLE-3 heads fits its GPUs and how long it takes."""
