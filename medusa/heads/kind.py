"""Medusa and Hydra heads as a kind of drafter."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from draftsmith.medusa.kind import HeadsKind
from draftsmith.train.kinds.drafter import Drafter, DrafterSpec, Loading
from draftsmith.train.kinds.kind import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from draftsmith.decode.proposers.base import Proposer


class Medusa(HeadsKind):
    """K heads on the target's last hidden state; they draft the tree of their config."""

    name, title = "medusa", "Medusa heads"
    flags = ("medusa",)
    recipe = Recipe(
        "medusa",
        "Medusa heads from the target's completions",
        "draftsmith.medusa",
        "draftsmith.medusa.heads.config:MedusaTrainingConfig",
    )
    tree_key = "medusa_choices"

    def recognises(self, config: Mapping[str, Any]) -> bool:
        """Say so of heads in this format or vLLM's."""
        return config.get("model_type") == "medusa"

    def heads_class(self) -> Any:
        """Return the class of the heads."""
        from draftsmith.medusa.heads.model import MedusaHeads

        return MedusaHeads

    def load(self, spec: DrafterSpec, loading: Loading) -> Drafter:
        """Load the heads."""
        from draftsmith.medusa.heads.proposer import MedusaProposer

        heads = self.heads(spec, loading)
        proposer = MedusaProposer(heads)
        figures = {"heads": heads.config.num_heads}
        return self.drafter(spec, proposer, model=heads, draft_lengths=[proposer.tree.depth], figures=figures)

    def chain(self, drafter: Drafter, draft_length: int) -> "tuple[Proposer, int]":
        """Return a chain of the first heads."""
        from draftsmith.decode.tree import Tree
        from draftsmith.medusa.heads.proposer import MedusaProposer

        heads: Any = drafter.model
        draft_length = min(draft_length, heads.config.num_heads)
        return MedusaProposer(heads, Tree.chain(draft_length)), draft_length

    def forward(self, model: "PreTrainedModel") -> Callable[[], object]:
        """Return what computes the logits of all heads."""
        import torch

        heads: Any = model
        count, size = heads.config.num_heads, heads.config.hidden_size
        hidden = torch.zeros(1, 1, size, dtype=model.dtype)
        seen = torch.zeros(1, 1, count, size, dtype=model.dtype)
        return lambda: [heads.logits(head, hidden, seen) for head in range(count)]
