"""Block drafters as a kind of drafter."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from draftsmith.medusa.block.config import DFLASH, FAMILIES, MADE, SPECULATORS
from draftsmith.medusa.kind import HeadsKind
from draftsmith.train.kinds.drafter import Drafter, DrafterSpec, Loading
from draftsmith.train.kinds.kind import Recipe, drafted_tokens

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from draftsmith.decode.proposers.base import Proposer


class Block(HeadsKind):
    """A few layers on features of the target that draft a block in one forward: DFlash, DSpark, DFlash 2 and Domino."""

    name, title = "block", "block drafter"
    package, model_class = "draftsmith.medusa.block", "model:BlockDrafter"
    recipe = Recipe(
        "block",
        "trains a block drafter on the target's features",
        "draftsmith.medusa.block",
        "draftsmith.medusa.block.config:BlockTrainingConfig",
        "draftsmith.medusa.block.__main__:BlockPlan",
        made=("draft_vocabulary", *MADE, "markov_rank", "selector_rank", "domino_rank"),
    )
    tree_key, whole_blocks = "block_tree", True
    formats = ("own", "vllm", "sglang", "speculators")
    launched, verifiable, gguf = ("vllm", "sglang", "speculators"), ("vllm", "speculators"), "vllm"

    def recognises(self, config: Mapping[str, Any]) -> bool:
        """Return whether this is such a drafter, of z-lab, SpecForge, DeepSpec, speculators or ours."""
        names = config.get("architectures")
        named = isinstance(names, list) and any(family in str(name) for name in names for family in FAMILIES)
        return named or config.get("speculators_model_type") in [family.lower() for family in SPECULATORS]

    def candidates(self, target: "PretrainedConfig", server: str | None) -> dict[str, dict[str, Any]]:
        """Return DSpark drafters of one and of two layers; for SGLang DFlash's, the only ones that it loads."""
        cut = drafted_tokens(target, "draft_vocabulary")
        # SGLang loads only DFlash's.
        dflash = DFLASH if server == "sglang" else {}
        return {f"block-{layers}": {"layers": layers} | dflash | cut for layers in (1, 2)}

    def most_drafted(self, config: Mapping[str, Any]) -> int | None:
        """Return the number of guesses of a block."""
        from draftsmith.medusa.block.model import BlockConfig

        return BlockConfig.from_dict(dict(config)).guesses

    def load(self, spec: DrafterSpec, loading: Loading) -> Drafter:
        """Load the drafter and its tree."""
        from draftsmith.decode.tree import searched_tree
        from draftsmith.medusa.block.proposer import BlockProposer

        heads = self.heads(spec, loading)
        tree, lengths = loading.shape(spec, searched_tree(heads.config, self.tree_key), heads.config.guesses)
        greedy = BlockProposer(heads, greedy=True) if tree is None else None
        return self.drafter(spec, BlockProposer(heads, tree), greedy=greedy, model=heads, draft_lengths=lengths)

    def chain(self, drafter: Drafter, draft_length: int) -> "tuple[Proposer, int]":
        """Return chains of at most a block's guesses."""
        from draftsmith.medusa.block.proposer import BlockProposer

        heads: Any = drafter.model
        return BlockProposer(heads), min(draft_length, heads.config.guesses)
