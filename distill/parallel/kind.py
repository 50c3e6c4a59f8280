"""Parallel drafts as a kind of drafter."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from draftsmith.decode.errors import InputError
from draftsmith.distill.kind import DISTILL
from draftsmith.train.kinds.causal import CausalKind
from draftsmith.train.kinds.drafter import Drafter, DrafterSpec, Loading

if TYPE_CHECKING:
    from draftsmith.decode.proposers.base import Proposer


class ParallelDraft(CausalKind):
    """Drafts several tokens in one forward, at mask tokens behind the text."""

    name, title = "parallel_draft", "parallel draft"
    flags = ("parallel_draft",)
    recipe = DISTILL
    tree_key = "parallel_tree"

    def recognises(self, config: Mapping[str, Any]) -> bool:
        """Say so of a model whose config names a mask token."""
        return config.get("pard_token") is not None

    def load(self, spec: DrafterSpec, loading: Loading) -> Drafter:
        """Load the model and its tree."""
        from draftsmith.decode.tree import Tree
        from draftsmith.distill.parallel.layout import tree_of
        from draftsmith.distill.parallel.proposer import ParallelDraftProposer

        model = self.model(spec, loading)
        tree = spec.tree if isinstance(spec.tree, Tree) else tree_of(model.config)
        proposer, lengths = ParallelDraftProposer(model, tree), spec.draft_lengths
        if tree is not None and spec.tree is None:
            lengths = [tree.depth]
        if proposer.longest is not None and max(lengths) > proposer.longest:
            raise InputError(
                f"draft_length: expected at most the {proposer.longest} tokens that {spec.path} was trained to "
                f"propose, found {max(lengths)}"
            )
        greedy = ParallelDraftProposer(model, greedy=True) if tree is None else None
        return self.drafter(spec, proposer, greedy=greedy, model=model, draft_lengths=lengths)

    def chain(self, drafter: Drafter, draft_length: int) -> "tuple[Proposer, int]":
        """Return chains no longer than it was trained for."""
        return drafter.proposer, min(draft_length, drafter.proposer.longest or draft_length)
