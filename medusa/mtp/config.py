"""Settings of a training run of MTP layers."""

from dataclasses import dataclass

from draftsmith.decode.errors import HEADS, InputError, at_least, require
from draftsmith.medusa.config import HeadsConfig
from draftsmith.train.job.defaults import Defaults


@dataclass
class MtpTrainingConfig(HeadsConfig):
    """Train MTP layers: those that a target ships with, or new ones, on completions that the target wrote."""

    num_layers: int | None = None
    """Begin this many new layers as the target's last one. If not given, train the target's own MTP layers, or one new
    layer where it ships with none."""
    num_steps: int | None = None
    """K, the steps of a round in training, each by the same layer on its own last output (FastMTP, arXiv 2509.18362,
    section 3); 4 if not given. Several layers have one step each."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, at_least(1), "num_layers", "num_steps")
        require(self, HEADS, "num_layers", "num_steps")
        if self.draft_vocabulary is not None:
            raise InputError(
                "draft_vocabulary: expected none, as MTP layers draft all of the target's tokens, found one"
            )
        if self.training.activation_checkpointing:
            raise InputError("training.activation_checkpointing: expected false, as steps share their keys, found true")
        if self.heads is not None and self.num_layers is not None:
            raise InputError("num_layers: expected none with heads, which have their own, found one")

    @property
    def begins_new(self) -> bool:
        """Whether the run begins new layers."""
        from draftsmith.train.checkpoint import mtp_layers
        from draftsmith.train.models import load_config

        if self.heads is not None or self.num_layers is not None:
            return self.heads is None
        return not mtp_layers(load_config(self.target, field="target", trust_remote_code=self.trust_remote_code))

    @property
    def defaults(self) -> Defaults:
        """A lower learning rate for layers that are trained already."""
        return Defaults(rate=4e-3 if self.begins_new else 1e-3)

    def steps_of(self, layers: int) -> int:
        """Return K for this many layers, or raise an InputError."""
        if layers > 1 and self.num_steps not in (None, layers):
            raise InputError(f"num_steps: expected none with {layers} layers, one step each, found {self.num_steps}")
        return layers if layers > 1 else self.num_steps or 4
