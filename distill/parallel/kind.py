"""Parallel drafts as a kind of drafter."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from draftsmith.decode.errors import InputError
from draftsmith.distill.kind import DISTILL, SERVERS, Draft
from draftsmith.train.kinds.drafter import Drafter, DrafterSpec, Loading

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from draftsmith.decode.proposers.base import Proposer
    from draftsmith.train.kinds.export import ExportOptions
    from draftsmith.train.kinds.findings import Finding
    from draftsmith.train.kinds.parts import Part, Side


class ParallelDraft(Draft):
    """Drafts several tokens in one forward, at mask tokens behind the text."""

    name, title = "parallel_draft", "parallel draft"
    flags = ("parallel_draft",)
    recipe = DISTILL
    tree_key = "parallel_tree"
    formats = launched = SERVERS
    verifiable = ("vllm",)

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

    def most_drafted(self, config: Mapping[str, Any]) -> int | None:
        """Return the tokens that it was trained to propose."""
        from transformers import PretrainedConfig

        from draftsmith.distill.parallel.layout import length_of

        return length_of(PretrainedConfig.from_dict(dict(config)))

    def proposer(self, model: "PreTrainedModel") -> "Proposer":
        """Return chains."""
        from draftsmith.distill.parallel.proposer import ParallelDraftProposer

        return ParallelDraftProposer(model)

    def at_once(self, model: "PreTrainedModel") -> int | None:
        """Return the tokens that it was trained to propose, or 4."""
        from draftsmith.distill.export import GAMMA
        from draftsmith.distill.parallel.layout import length_of

        return length_of(model.config) or GAMMA

    def compare(self, target: "Side", part: "Part") -> "Iterator[Finding]":
        """Compare sizes and tokenizers, and look at the mask token."""
        from draftsmith.distill.parallel.checks import check_masks

        yield from super().compare(target, part)
        yield check_masks(part)

    def drafting(self, config: "ExportOptions", model: "PretrainedConfig") -> dict[str, Any]:
        """Return γ, and that all tokens are drafted in one forward."""
        from draftsmith.distill.parallel.export import drafting

        return drafting(config, model)

    def notes(self, model: "PreTrainedModel", server: str) -> list[str]:
        """Say how a server drafts with it."""
        from draftsmith.distill.parallel.export import notes

        return notes(model, server)
