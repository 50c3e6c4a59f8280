"""Settings of a training run of a block drafter."""

from dataclasses import dataclass, field

from draftsmith.decode.errors import InputError, at_least, at_most, one_of, require
from draftsmith.medusa.config import FeaturesConfig
from draftsmith.train.memory.setting import TrainingMachines

INITS = ("auto", "look_back", "last_layers", "random")
MADE = ("layer_ids", "mask_token", "markov_rank")
"""Fields that say what a new drafter is like, where they are given."""


@dataclass
class BlockTrainingConfig(FeaturesConfig):
    """Train a block drafter on a target, on completions that the target wrote (`draftsmith prepare`)."""

    layers: int = 1
    """Decoder layers of a new drafter."""
    block_size: int = 7
    """Slots of a block, each of which guesses a token; with `anchor_guesses: false` one guesses nothing."""
    anchor_guesses: bool = True
    """Whether the anchor's slot guesses the token behind it, as DSpark's does; DFlash's guesses nothing."""
    init: str = "auto"
    """How the layers begin: as the target's "last_layers", which see its deepest features at first; as these, but that
    half of the first one's heads "look_back" at the token before the block; at "random"; or "auto", the second where
    ours can have such weights (Llama, Mistral, Qwen 3), the first beside a sharded target, and otherwise at random."""
    markov_rank: int | None = None
    """The rank of the Markov head, which tells each guess the token before it (DSpark); 0 for none (DFlash); 256 if not
    given, or the target's width where that is less."""
    layer_ids: list[int] = field(default_factory=list)
    """The target's layers whose outputs it sees, ascending, counted from 0; if not given as many as `layers`, but two
    at least, evenly from the second to the last but three."""
    mask_token: int | None = None
    """The token whose embedding stands for a mask; if not given one that the tokenizer never gives: a row behind its
    tokens, or its token for padding or unknown text."""
    dpace: float | None = None
    """In place of `decay`, weigh each guess by how likely a round comes to it and beyond (D-PACE): how far to smooth
    these probabilities, 0.5 in the speculators library; 0 not at all. None if not given."""
    confidence: float = 0.0
    """The weight of the confidence head's loss, beside 1 of the guesses'; DSpark's is 1. With 0 a new drafter has no
    such head."""
    anchors: int | None = None
    """Blocks of a row that a step learns from at most, drawn anew each step; if not given as many as a quarter of the
    tokens that a block can begin at."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, one_of(INITS), "init")
        require(self, at_least(1) & at_most(256), "layers", "block_size")
        require(self, at_least(1), "anchors")
        require(self, at_least(0), "markov_rank", "layer_ids", "mask_token", "confidence")
        require(self, at_least(0) & at_most(1), "dpace")
        if not self.anchor_guesses and self.block_size < 2:
            raise InputError(f"block_size: expected at least 2 without anchor_guesses, found {self.block_size}")
        if self.heads is not None:
            given = [name for name in MADE if getattr(self, name) not in (None, [])]
            if given:
                raise InputError(f"{given[0]}: expected none beside heads, which have theirs, found one")


@dataclass
class BlockPlanConfig(TrainingMachines, BlockTrainingConfig):
    """Say whether a training run of a block drafter fits its GPUs and how long it takes."""

    plan_class = "draftsmith.medusa.block.memory:BlockPlan"
