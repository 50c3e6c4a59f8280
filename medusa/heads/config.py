"""Settings of a training run of Medusa heads."""

from dataclasses import dataclass, field

from draftsmith.decode.errors import HEADS, SHARE, InputError, at_least, more_than, one_of, require
from draftsmith.medusa.config import HeadsConfig
from draftsmith.train.job.defaults import Defaults
from draftsmith.train.options import LoraOptions

BACKBONES = ("frozen", "lora", "full")
LM_HEADS = ("own", "shared")


@dataclass
class MedusaTrainingConfig(HeadsConfig):
    """Train Medusa heads on a target, on completions that the target wrote (`draftsmith prepare`)."""

    num_heads: int = 4
    """K: head i ≥ 1 guesses the i-th token after the next one."""
    num_layers: int = 1
    """The number of residual blocks in a head; each has its own weights."""
    lm_heads: str = "own"
    """"own": each head has its own language-model head, at first the target's times a factor that suits a few of the
    completions; "shared": one for all."""
    hydra: bool = False
    """Hydra heads: each also sees the embeddings of the tokens before its own, including drafted ones."""
    backbone: str = "frozen"
    """"frozen" (Medusa-1); or train the target with its heads (Medusa-2), by "lora" on weights of any `target_dtype` or
    `target_quantization`, or in "full", in float32. Decoding then gives the new backbone's text, not the old one's."""
    lora: LoraOptions = field(default_factory=LoraOptions)
    """Adapters of the backbone; merged when it is saved."""
    head_learning_rate_multiplier: float = 4.0
    """In joint training, the heads' learning rate over the backbone's, which is `training.learning_rate`."""
    warmup_heads: float = 0.0
    """The share of the steps in which heads are trained alone, before the backbone is trained with them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, one_of(LM_HEADS), "lm_heads")
        require(self, one_of(BACKBONES), "backbone")
        require(self, at_least(1), "num_heads", "num_layers")
        require(self, HEADS, "num_heads", "num_layers")
        require(self, more_than(0), "head_learning_rate_multiplier")
        require(self, SHARE, "warmup_heads")
        if self.joint and self.target_sharded:
            raise InputError(f"backbone: expected frozen for a target that is sharded, found {self.backbone}")
        if self.joint and (given := self.states_given):
            raise InputError(
                f"backbone: expected frozen with {given}, in place of a target to train, found {self.backbone}"
            )
        if self.backbone == "full":
            if self.target_quantization:
                raise InputError("backbone: expected frozen or lora for a target that is quantised, found full")
            if self.target_dtype not in ("auto", "float32"):
                raise InputError(
                    f"target_dtype: expected float32 where all of the backbone is trained, found {self.target_dtype}"
                )
            self.target_dtype = "float32"  # Adam's small updates vanish in 16-bit weights
        if self.joint and self.optimizer == "muon":
            raise InputError("optimizer: expected trainer where the backbone is trained too, found muon")
        if self.training.activation_checkpointing and not self.joint:
            raise InputError(
                "training.activation_checkpointing: expected false for a frozen backbone, which holds none, found true"
            )

    @property
    def defaults(self) -> Defaults:
        """The backbone's learning rate in joint training, or the heads'."""
        if self.joint:
            return Defaults(rate=1e-3 if self.backbone == "lora" else 3e-4)
        return super().defaults

    @property
    def joint(self) -> bool:
        """Whether the backbone is trained with the heads (Medusa-2)."""
        return self.backbone != "frozen"

    @property
    def trains_target(self) -> bool:
        """Whether the target is trained too."""
        return self.joint
