"""The settings of a training run of Medusa heads."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from draftsmith.decode.errors import DECAY, HEADS, SHARE, InputError, at_least, more_than, one_of, require
from draftsmith.train.job.defaults import Defaults
from draftsmith.train.memory.setting import TrainingMachines
from draftsmith.train.options import LoraOptions
from draftsmith.train.recipe import RecipeConfig

if TYPE_CHECKING:
    from draftsmith.train.losses.objective import Objective

BACKBONES = ("frozen", "lora", "full")
LM_HEADS = ("own", "shared")


@dataclass
class MedusaTrainingConfig(RecipeConfig):
    """Train Medusa heads on a target, on completions that the target wrote (`draftsmith prepare`)."""

    acceptance_metrics: ClassVar[tuple[str, ...]] = ("mean_acceptance_length", "alpha", "accuracy_1")

    heads: str | None = None
    """Heads to go on from: a directory that an earlier run left. Without one the fields below say what to make."""
    num_heads: int = 4
    """K: head i ≥ 1 guesses the token after the next i."""
    num_layers: int = 1
    """Residual blocks a head, each with weights of its own."""
    lm_heads: str = "own"
    """"own": each head has its own language-model head, at first the target's times a number that suits a few of the
    completions; "shared": one for all."""
    train_lm_heads: bool = True
    """Train language-model heads, or leave them as the target's and train the blocks alone."""
    bias: bool = False
    """Whether the blocks' linear maps have biases."""
    hydra: bool = False
    """Hydra heads: each sees the embeddings of the tokens before its own too, drafted ones included."""
    draft_vocabulary: int | None = None
    """Draft among the so many tokens that are most frequent in `completions` alone; all of them if not given. Where the
    completions hold fewer, all of theirs."""
    divergence: str | dict[str, float] = "forward_kl"
    """What each head minimises: soft labels by forward_kl, jsd, tvd, lk_hybrid, nla, … to the target's distribution (in
    Medusa-2 to that before training); hard labels by cross_entropy on the completions' tokens; or weights by name, for
    their sum."""
    eta: float = 3.0
    """η of lk_hybrid, λ KL + (1 − λ) TV with λ = e^(−η α): the larger, the sooner it is TV."""
    lk_alpha: str = "position"
    """Which α weighs lk_hybrid: each "position" its own, or a head's mean over a "batch", which is what one process
    learns from in one forward; that takes the losses' matrix products twice."""
    decay: float = 0.8
    """λ_i = decay^(i − 1), the weight of head i's loss (Medusa, section 2.2.1)."""
    backbone: str = "frozen"
    """"frozen" (Medusa-1); or train the target with its heads (Medusa-2), by "lora" on weights of any `target_dtype` or
    `target_quantization`, or in "full", in float32. Then what is decoded afterwards is the new backbone's text, not the
    old one's."""
    lora: LoraOptions = field(default_factory=LoraOptions)
    """Adapters of the backbone; merged when it is saved."""
    backbone_divergence: str = "forward_kl"
    """What the backbone minimises: forward_kl to the target as it was (self-distillation), or cross_entropy on the
    completions."""
    backbone_weight: float = 1.0
    """λ_0, the weight of the backbone's loss; the heads' together have `heads_weight`."""
    heads_weight: float = 0.2
    """The weight of the heads' losses in joint training."""
    head_learning_rate_multiplier: float = 4.0
    """In joint training, the heads' learning rate over `training.learning_rate`, which the backbone has."""
    warmup_heads: float = 0.0
    """The share of the steps in which heads are trained alone, before the backbone is trained with them."""

    def __post_init__(self) -> None:
        from draftsmith.train.losses.objective import BLOCK_TERMS

        super().__post_init__()
        if self.objective.has_blocks:
            raise InputError(f"divergence: expected none of {', '.join(BLOCK_TERMS)}, found {self.divergence!r}")
        require(self, one_of(LM_HEADS), "lm_heads")
        require(self, one_of(BACKBONES), "backbone")
        require(self, one_of(("forward_kl", "cross_entropy")), "backbone_divergence")
        require(self, at_least(1), "num_heads", "num_layers", "draft_vocabulary")
        require(self, HEADS, "num_heads", "num_layers")
        require(self, more_than(0), "decay", "backbone_weight", "heads_weight", "head_learning_rate_multiplier")
        require(self, DECAY, "decay")
        require(self, SHARE, "warmup_heads")
        if self.heads is not None and self.draft_vocabulary is not None:
            raise InputError("draft_vocabulary: expected none beside heads, which have theirs, found one")
        if self.joint and (self.target_sharded or self.target_device):
            raise InputError(
                f"backbone: expected frozen for a target that is sharded or elsewhere, found {self.backbone}"
            )
        if self.backbone == "full":
            if self.target_quantization:
                raise InputError("backbone: expected frozen or lora for a target that is quantised, found full")
            if self.target_dtype not in ("auto", "float32"):
                raise InputError(
                    f"target_dtype: expected float32 where all of the backbone is trained, found {self.target_dtype}"
                )
            self.target_dtype = "float32"
        if self.joint and self.optimizer == "muon":
            raise InputError("optimizer: expected trainer where the backbone is trained too, found muon")
        if self.training.activation_checkpointing and not self.joint:
            raise InputError(
                "training.activation_checkpointing: expected false for a frozen backbone, which holds none, found true"
            )

    @property
    def defaults(self) -> Defaults:
        """Heads that go on from others are changed less; in joint training the rate is the backbone's."""
        if self.joint:
            return Defaults(rate=1e-3 if self.backbone == "lora" else 3e-4)
        return Defaults(rate=4e-3 if self.heads is None else 1e-3)

    @property
    def joint(self) -> bool:
        """Whether the backbone is trained with the heads (Medusa-2)."""
        return self.backbone != "frozen"

    @property
    def trains_target(self) -> bool:
        """Whether the target is trained too: the same."""
        return self.joint

    @property
    def needs_original(self) -> bool:
        """Whether joint training compares with the target as it was."""
        return self.backbone_divergence != "cross_entropy" or self.objective.needs_target

    @cached_property
    def objective(self) -> "Objective":
        """What a head minimises."""
        from draftsmith.train.losses.objective import Objective

        terms = {self.divergence: 1.0} if isinstance(self.divergence, str) else self.divergence
        return Objective(terms, self.temperature, self.top_k, self.top_p, eta=self.eta, lk_alpha=self.lk_alpha)


@dataclass
class MedusaPlanConfig(TrainingMachines, MedusaTrainingConfig):
    """Say whether a training run of Medusa heads fits its GPUs and how long it takes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.heads is not None:
            raise InputError("heads: expected none in a plan, which needs their shape alone (num_heads, …), found one")
