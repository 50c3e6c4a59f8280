"""Settings of a training run of EAGLE-3 heads."""

from dataclasses import dataclass, field

from draftsmith.decode.errors import HEADS, InputError, at_least, one_of, require
from draftsmith.medusa.config import HeadsConfig
from draftsmith.train.job.defaults import Defaults

INITS = ("auto", "last_layer", "random")
SHAPE = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


@dataclass
class EagleTrainingConfig(HeadsConfig):
    """Train EAGLE-3 heads on a target, on completions that the target wrote (`draftsmith prepare`)."""

    layer_ids: list[int] = field(default_factory=list)
    """The depths of the target's features, ascending: the number of its layers before each. If not given 2, L // 2 and
    L − 3 for a target of L layers."""
    init: str = "auto"
    """The layer's first weights: "random"; the target's "last_layer", which sees only the state at first, if ours can
    compute the same (Llama, Mistral); or "auto", the last layer where it can without a variant of the layer."""
    norm_before_residual: bool | None = None
    """Begin the residual path around attention after the state's norm. SGLang does not know such heads. If not given:
    in all new heads but those that begin as the target's last layer."""
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

    @property
    def shape(self) -> dict[str, bool]:
        """The variants of a new layer."""
        given = self.norm_before_residual
        return {name: bool(getattr(self, name)) for name in SHAPE} | {
            "norm_before_residual": self.init != "last_layer" if given is None else given
        }

    @property
    def defaults(self) -> Defaults:
        """Muon for a layer that begins at random, and a lower rate for heads of an earlier run (docs/log/peer.md)."""
        if self.heads is not None:
            return Defaults(rate=5e-4)
        return Defaults(rate=2e-3, muon_rate=1e-2) if self.shape["norm_before_residual"] else Defaults(rate=4e-3)
