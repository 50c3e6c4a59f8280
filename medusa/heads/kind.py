"""Medusa and Hydra heads as a kind of drafter."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from draftsmith.medusa.kind import HeadsKind
from draftsmith.train.kinds.drafter import Drafter, DrafterSpec, Loading
from draftsmith.train.kinds.kind import Recipe, drafted_tokens

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from draftsmith.decode.proposers.base import Proposer


class Medusa(HeadsKind):
    """K heads on the target's last hidden state; they draft the tree of their config."""

    name, title = "medusa", "Medusa heads"
    flags = ("medusa",)
    package, model_class = "draftsmith.medusa.heads", "model:MedusaHeads"
    recipe = Recipe(
        "medusa",
        "trains Medusa or Hydra heads on the target's hidden states",
        "draftsmith.medusa.heads",
        "draftsmith.medusa.heads.config:MedusaTrainingConfig",
        "draftsmith.medusa.heads.__main__:MedusaPlan",
        made=("draft_vocabulary",),
    )
    tree_key, tree_alone = "medusa_choices", True
    formats = ("own", "vllm")
    launched = verifiable = ("vllm",)

    def recognises(self, config: Mapping[str, Any]) -> bool:
        """Return whether these are heads, in our format or vLLM's."""
        return config.get("model_type") == "medusa"

    def candidates(self, target: "PretrainedConfig", server: str | None) -> dict[str, dict[str, Any]]:
        """Return Hydra heads, which accept more than Medusa's; for vLLM Medusa heads, the only ones that it loads."""
        cut = drafted_tokens(target, "draft_vocabulary")
        return {None: {"hydra": {"hydra": True} | cut}, "vllm": {"medusa": cut}}.get(server, {})

    def load(self, spec: DrafterSpec, loading: Loading) -> Drafter:
        """Load the heads."""
        from draftsmith.decode.tree import Tree
        from draftsmith.medusa.heads.proposer import MedusaProposer

        heads = self.heads(spec, loading)
        proposer = MedusaProposer(heads, loading.tree(spec, heads.tree) or Tree.chain(heads.config.num_heads))
        figures = {"heads": heads.config.num_heads}
        return self.drafter(spec, proposer, model=heads, draft_lengths=[proposer.tree.depth], figures=figures)

    def chain(self, drafter: Drafter, draft_length: int) -> "tuple[Proposer, int]":
        """Return a chain of the first heads."""
        from draftsmith.decode.tree import Tree
        from draftsmith.medusa.heads.proposer import MedusaProposer

        heads: Any = drafter.model
        # Chains cannot be longer than the number of heads.
        draft_length = min(draft_length, heads.config.num_heads)
        return MedusaProposer(heads, Tree.chain(draft_length)), draft_length
