"""Settings of a training run of EAGLE-3 heads."""

from dataclasses import dataclass, field

from draftsmith.decode.errors import HEADS, InputError, at_least, one_of, require
from draftsmith.medusa.config import HeadsConfig
from draftsmith.train.memory.setting import TrainingMachines

INITS = ("auto", "last_layer", "random")
SHAPE = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


@dataclass
class EagleTrainingConfig(HeadsConfig):
    """Train EAGLE-3 heads on a target, on completions that the target wrote (`draftsmith prepare`)."""

    layer_ids: list[int] = field(default_factory=list)
    """The depths of the target's features, ascending: the number of its layers before each. If not given 2, L // 2 and
    L − 3 for a target of L layers."""
    init: str = "auto"
    """The layer's first weights: the target's "last_layer", which sees only the state at first; "random"; or "auto",
    the last layer if ours can compute the same (Llama, Mistral), and random for other families."""
    norm_before_residual: bool = False
    """Begin the residual path around attention after the state's norm."""
    norm_before_fc: bool = False
    """Norm the features together before they are fused."""
    fc_norm: bool = False
    """Norm the features of each depth before they are fused."""
    norm_output: bool = False
    """Give the next step the state after the last norm, not before it."""
    sliding_window: int | None = None
    """The positions that the layer sees, its own included; all before it if not given."""
    num_steps: int = 4
    """K, the steps of a round in training: the training-time test (EAGLE-3, section 3.2). Heads may draft more."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, one_of(INITS), "init")
        require(self, at_least(1), "num_steps", "layer_ids", "sliding_window")
        require(self, HEADS, "num_steps")
        if self.heads is not None:
            # These would describe new heads, and `heads` already has them.
            first = next((name for name in ("layer_ids", "sliding_window", *SHAPE) if getattr(self, name)), None)
            if first is not None:
                raise InputError(f"{first}: expected none with heads, which have their own, found one")


@dataclass
class EaglePlanConfig(TrainingMachines, EagleTrainingConfig):
    """Say whether a training run of EAGLE-3 heads fits its GPUs and how long it takes."""

    plan_class = "draftsmith.medusa.eagle.memory:EaglePlan"
