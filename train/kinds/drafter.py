"""A drafter to load, a loaded one, and the target that it drafts for."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from draftsmith.decode.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from draftsmith.decode.proposers.base import Proposer
    from draftsmith.decode.proposers.draft_tree import DynamicTree
    from draftsmith.decode.tree import Tree
    from draftsmith.train.kinds.kind import DrafterKind


@dataclass(frozen=True)
class DrafterSpec:
    """A drafter to load."""

    kind: str
    """The name of its kind, or of the role that it plays in a report."""
    path: str | None = None
    """A directory or hub id; of a kind that is not read from one, its argument, such as the layers of an early exit."""
    name: str | None = None
    """What reports call it; its kind if None."""
    draft_lengths: Sequence[int] = (4,)
    """γ, at which it drafts; what has a tree of its own drafts as deep as it."""
    tree: "Tree | DynamicTree | None" = None
    """What it drafts; if None the tree of its config, or a chain."""
    dtype: str | None = None
    """Of its weights; the target's if None."""


@dataclass(frozen=True)
class Drafter:
    """A loaded drafter."""

    name: str
    """Short and unique."""
    kind: str
    """As in `DrafterSpec`."""
    family: "DrafterKind"
    """What commands ask about it."""
    path: str | None
    proposer: "Proposer"
    greedy: "Proposer | None" = None
    """Its proposer under sampling with the most likely tokens, which is what servers use by default."""
    model: "PreTrainedModel | None" = None
    """Its weights."""
    draft_lengths: Sequence[int] = (4,)
    """γ, at which it is decoded; of what has a tree of its own its depth."""
    figures: dict[str, Any] = field(default_factory=dict)
    """What reports say of drafters of this kind alone."""
    sources: Sequence[str] = ()
    """The names of several that take turns, in their order."""

    @property
    def tree(self) -> "Tree | None":
        """The one shape that it drafts in every round, a chain of several heads included; None for any other."""
        return _tree_of(self.proposer)

    @property
    def has_one_length(self) -> bool:
        """Whether its one γ is the depth of a tree of one shape: its own, or that of one of those that take turns."""
        return any(_tree_of(proposer) is not None for proposer in (self.proposer, *self.members.values()))

    @property
    def members(self) -> "dict[str, Proposer]":
        """Those that take turns, in their order, by their names; none of any other drafter, nor where all draft."""
        from draftsmith.decode.proposers.hybrid import HybridProposer

        if not isinstance(self.proposer, HybridProposer) or self.proposer.graft:
            return {}
        return dict(zip(self.sources, self.proposer.drafters, strict=True))

    def lengths(self, draft_length: int) -> list[int]:
        """Return γ of each of those that take turns, where γ is wanted of all; one alone has that."""
        from draftsmith.decode.proposers.hybrid import HybridProposer

        return self.proposer.lengths(draft_length) if isinstance(self.proposer, HybridProposer) else [draft_length]

    @property
    def nodes(self) -> int | None:
        """Tokens that the target verifies in a round beside the last one, where they are not γ: those of a tree."""
        return None if self.tree is None else len(self.tree)

    @property
    def weights_bytes(self) -> int:
        """The bytes of its weights."""
        return 0 if self.model is None else sum(p.numel() * p.element_size() for p in self.model.parameters())

    def to_dict(self) -> dict[str, Any]:
        """Return what a report says of it."""
        entry = {
            "name": self.name,
            "kind": self.kind,
            "path": self.path,
            "parameters": 0 if self.model is None else self.model.num_parameters(),
            "bytes": self.weights_bytes,
        }
        if self.tree is not None:
            entry["tree_nodes"] = self.nodes
        return entry | self.figures


def _tree_of(proposer: "Proposer") -> "Tree | None":
    from draftsmith.decode.proposers.draft_tree import TreeProposer
    from draftsmith.decode.tree import Tree

    if not isinstance(proposer, TreeProposer) or not isinstance(proposer.tree, Tree):
        return None
    return proposer.tree


@dataclass(frozen=True)
class Pair:
    """A target and what drafts for it."""

    target: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"
    dtype: str
    """The name of the target's dtype, which drafters have too unless they were given their own."""
    drafters: list[Drafter]
    left_out: Sequence[str] = ()
    """What the target's generation config says, and texts are written without (`checkpoint.left_out`)."""

    @property
    def proposers(self) -> "dict[str, Proposer]":
        """What drafts, by name."""
        return {drafter.name: drafter.proposer for drafter in self.drafters}

    @property
    def drafter(self) -> Drafter:
        """The only drafter."""
        (drafter,) = self.drafters
        return drafter

    def check_positions(self, prompt: int, new_tokens: int) -> None:
        """Require that the longest prompt and its text lie within the positions of the target.

        Not every architecture has such a limit; past it, a model that has one writes noise or fails. A drafter drafts
        nothing past its own positions, which `say_undrafted` counts.

        Args:
            prompt: tokens of the longest.
            new_tokens: of its text at most.

        Raises:
            InputError: names the target's positions.
        """
        from draftsmith.decode.cache import positions_of

        limit = positions_of(self.target.config)
        if limit is not None and prompt + new_tokens > limit:
            raise InputError(
                f"max_new_tokens: expected prompt and text within the target's {limit} positions, found {prompt} + "
                f"{new_tokens} tokens"
            )

    def say_undrafted(self, prompts: Sequence[int], lengths: Sequence[int]) -> None:
        """Say on standard error how many tokens of texts each drafter did not draft, for they lie past its positions.

        Args:
            prompts: tokens of each prompt.
            lengths: of each prompt and its text.
        """
        from draftsmith.decode.generation import undrafted

        written = sum(lengths) - sum(prompts)
        for drafter in self.drafters:
            count = undrafted(lengths, prompts, drafter.proposer.positions)
            if count:
                where = f"past its {drafter.proposer.positions} positions"
                print(f"{drafter.name}: drafted none of {count} of {written} tokens, {where}", file=sys.stderr)

    def holds(self, tokens: int) -> bool:
        """Return whether a text of this length lies within the positions of all models."""
        from draftsmith.decode.cache import positions_of

        limits = [positions_of(self.target.config), *(proposer.positions for proposer in self.proposers.values())]
        return all(limit is None or tokens <= limit for limit in limits)


@dataclass
class Loading:
    """A target and its drafters while they are loaded: tokenizers are compared before any weights are read."""

    path: str
    """The target's."""
    tokenizer: "PreTrainedTokenizerBase"
    """The target's."""
    trust_remote_code: bool = False
    dtype: str = "auto"
    """Of the target, once it is known."""
    model: "PreTrainedModel | None" = None
    """The target, once it is loaded."""
    tokenizers: "dict[str, PreTrainedTokenizerBase]" = field(default_factory=dict)
    """Those of drafters, by path."""
    models: "dict[str, PreTrainedModel]" = field(default_factory=dict)
    """Drafters' weights by path: one directory may draft in two ways."""

    @property
    def target(self) -> "PreTrainedModel":
        """The loaded target."""
        assert self.model is not None
        return self.model


def no_argument(spec: DrafterSpec) -> None:
    """Require that a kind that takes no argument got none."""
    if spec.path is not None:
        raise InputError(f"drafter: expected {spec.kind} alone, found {spec.kind}:{spec.path}")
