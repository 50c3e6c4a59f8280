"""Settings of a training run of a block drafter."""

from dataclasses import dataclass, field

from draftsmith.decode.errors import InputError, at_least, at_most, one_of, require
from draftsmith.medusa.config import HeadsConfig
from draftsmith.train.job.defaults import Defaults

INITS = ("auto", "look_back", "last_layers", "random")
SPECULATORS = ("DFlash", "DSpark", "DFlash2")
"""Kinds of block drafters in the speculators library."""
FAMILIES = (*SPECULATORS, "Domino")
"""Kinds of block drafters, as other tools name them."""
MADE = ("layer_ids", "mask_token", "sliding_window", "causal")
"""Fields that describe only new drafters."""
DFLASH = {"anchor_guesses": False, "markov_rank": 0}
"""The fields of DFlash's drafters, where the defaults are DSpark's."""


@dataclass
class BlockTrainingConfig(HeadsConfig):
    """Train a block drafter on a target, on completions that the target wrote (`draftsmith prepare`)."""

    layers: int = 1
    """The number of decoder layers of a new drafter."""
    block_size: int = 7
    """S, slots of a block. Each slot guesses a token, except the anchor's with `anchor_guesses: false`."""
    anchor_guesses: bool = True
    """Whether the anchor's slot guesses the next token, as in DSpark; in DFlash it guesses nothing."""
    init: str = "auto"
    """The layers' first weights: the target's "last_layers", which see its deepest features at first; the same with
    half of the first layer's heads fitted to "look_back" at the token before the block; "random"; or "auto": look_back
    for families with such weights (Llama, Mistral, Qwen 3), last_layers if their target is sharded, else, and for a
    drafter without a head that corrects its guesses, random."""
    sliding_window: int | None = None
    """The positions that a layer's slots see, their own included; none after them in the block. All if not given."""
    causal: bool | None = None
    """Whether slots see none after themselves in the block, as in JetSpec; if not given, only in layers with a
    window."""
    markov_rank: int | None = None
    """The rank of the Markov head, which tells each guess the token before it (DSpark); 0 for none (DFlash). If not
    given, 256 or the target's width if that is less. `heads` without such a head get one of this rank."""
    selector_rank: int = 0
    """The rank of DFlash 2's selector, which chooses each guess among the 16 most likely ones by the token before it,
    in place of the Markov head; DFlash 2's is 256, with `anchor_guesses: false`. A new drafter then also has
    convolutions around each sublayer, in which a slot sees the one before it. The guesses learn without it, and it
    learns to choose the target's most likely token. `heads` without such a head get one of this rank."""
    domino_rank: int = 0
    """The rank of Domino's recurrent head, which tells each guess all tokens before it, in place of the Markov head;
    Domino's is 256. `heads` without such a head get one of this rank."""
    layer_ids: list[int] = field(default_factory=list)
    """The target's layers whose outputs it sees, ascending, counted from 0. If not given as many as `layers` and at
    least two, spread evenly from the second layer to the third from the end."""
    mask_token: int | None = None
    """The token whose embedding stands for a mask. If not given one that texts never hold: a row after the tokenizer's
    tokens, or its token for padding or unknown text."""
    dpace: float | None = None
    """In place of `decay`, weigh each guess by the probability that a round comes to it and beyond (D-PACE). The value
    smooths these probabilities: 0 not at all, 0.5 as in the speculators library. Off if not given."""
    confidence: float = 0.0
    """The weight of the confidence head's loss; the guesses' loss has 1. DSpark's is 1. With 0 a drafter gets no such
    head."""
    anchors: int | None = None
    """The most blocks of a row in a step, drawn anew each step. If not given, a quarter of the tokens that a block can
    begin at."""

    @property
    def defaults(self) -> Defaults:
        """Muon at a high rate for a new drafter: in 75 to 150 steps far ahead of AdamW (docs/log/peer.md)."""
        return super().defaults if self.heads is not None else Defaults(rate=4e-3, muon_rate=2e-2)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, one_of(INITS), "init")
        require(self, at_least(1) & at_most(256), "layers", "block_size")
        require(self, at_least(1), "anchors")
        require(self, at_least(self.block_size), "sliding_window")
        ranks = ("markov_rank", "selector_rank", "domino_rank")
        require(self, at_least(0), *ranks, "layer_ids", "mask_token", "confidence")
        if self.markov_rank is None and self.heads is None and any(getattr(self, name) for name in ranks):
            self.markov_rank = 0
        if len(on := [name for name in ranks if getattr(self, name)]) > 1:
            raise InputError(f"{on[0]}: expected 0 with {on[1]}, found {getattr(self, on[0])}")
        require(self, at_least(0) & at_most(1), "dpace")
        if not self.anchor_guesses and self.block_size < 2:
            raise InputError(f"block_size: expected at least 2 without anchor_guesses, found {self.block_size}")
        if self.heads is not None:
            # These would describe a new drafter, and `heads` already has them.
            first = next((name for name in MADE if getattr(self, name) not in (None, [])), None)
            if first is not None:
                raise InputError(f"{first}: expected none with heads, which have their own, found one")
