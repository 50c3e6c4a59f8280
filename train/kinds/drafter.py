"""Specifications of drafters, loaded drafters, and the target that they draft for."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from draftsmith.decode.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from draftsmith.decode.proposers.base import Proposer
    from draftsmith.decode.tree import Tree
    from draftsmith.train.kinds.kind import DrafterKind


@dataclass(frozen=True)
class DrafterSpec:
    """The specification of a drafter to load."""

    kind: str  # the name of its kind, or of its role in a report
    path: str | None = None
    """A directory or hub id; for kinds without files their argument, such as the shortest match of copies."""
    name: str | None = None  # the name in reports; its kind if None
    draft_lengths: Sequence[int] = (4,)  # the values of γ; drafters with their own tree draft to its depth
    tree: "Tree | None" = None  # the tree to draft; if None the tree of its config, or a chain


@dataclass(frozen=True)
class Drafter:
    """A loaded drafter; `name` is short and unique, `kind` is as in `DrafterSpec`."""

    name: str
    kind: str
    family: "DrafterKind"
    path: str | None
    proposer: "Proposer"
    greedy: "Proposer | None" = None
    """The proposer that drafts the most likely tokens under sampling, the default of servers."""
    model: "PreTrainedModel | None" = None
    draft_lengths: Sequence[int] = (4,)  # the values of γ for decoding; for drafters with their own tree its depth
    figures: dict[str, Any] = field(default_factory=dict)  # the fields of reports that only this kind has
    sources: Sequence[str] = ()  # the names of drafters that take turns, in order

    @property
    def tree(self) -> "Tree | None":
        """The tree, or chain of several heads, that it drafts in every round; None if the shape varies."""
        return _tree_of(self.proposer)

    @property
    def has_one_length(self) -> bool:
        """True if its only γ is the depth of a fixed tree, its own or that of a member."""
        return any(_tree_of(proposer) is not None for proposer in (self.proposer, *self.members.values()))

    @property
    def members(self) -> "dict[str, Proposer]":
        """The drafters that take turns, in order, by name; empty for other drafters."""
        from draftsmith.decode.proposers.hybrid import HybridProposer

        if not isinstance(self.proposer, HybridProposer):
            return {}
        return dict(zip(self.sources, self.proposer.drafters, strict=True))

    def lengths(self, draft_length: int) -> list[int]:
        """Return γ of each member for a common γ; a single drafter has just that."""
        from draftsmith.decode.proposers.hybrid import HybridProposer

        return self.proposer.lengths(draft_length) if isinstance(self.proposer, HybridProposer) else [draft_length]

    @property
    def nodes(self) -> int | None:
        """The nodes of its tree, which the target verifies in a round; None for chains of γ."""
        return None if self.tree is None else len(self.tree)

    @property
    def weights_bytes(self) -> int:
        """The bytes of its weights."""
        return 0 if self.model is None else sum(p.numel() * p.element_size() for p in self.model.parameters())

    def to_dict(self) -> dict[str, Any]:
        """Return its entry in a report."""
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
    """A target and its drafters."""

    target: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"
    dtype: str  # the name of the target's dtype, the default of its drafters
    drafters: list[Drafter]
    left_out: Sequence[str] = ()
    """Settings of the target's generation config that are not applied to texts (`checkpoint.unapplied_settings`)."""

    @property
    def proposers(self) -> "dict[str, Proposer]":
        """The proposers by name."""
        return {drafter.name: drafter.proposer for drafter in self.drafters}

    @property
    def drafter(self) -> Drafter:
        """The only drafter."""
        (drafter,) = self.drafters
        return drafter

    def check_positions(self, prompt: int, new_tokens: int) -> None:
        """Raise InputError unless the longest prompt and its text fit into the target's positions.

        Past its positions a target writes noise or fails. Past its own, a drafter drafts nothing: see `warn_undrafted`.
        """
        from draftsmith.decode.cache import positions_of

        limit = positions_of(self.target.config)
        if limit is not None and prompt + new_tokens > limit:
            raise InputError(
                f"max_new_tokens: expected prompt and text within the target's {limit} positions, found {prompt} + "
                f"{new_tokens} tokens"
            )

    def warn_undrafted(self, prompts: Sequence[int], lengths: Sequence[int]) -> None:
        """Print to standard error how many tokens each drafter did not draft because they are past its positions.

        `prompts` holds the tokens of each prompt, `lengths` those of each prompt with its text.
        """
        from draftsmith.decode.generation import count_undrafted

        written = sum(lengths) - sum(prompts)
        for drafter in self.drafters:
            count = count_undrafted(lengths, prompts, drafter.proposer.positions)
            if count:
                where = f"past its {drafter.proposer.positions} positions"
                print(f"{drafter.name}: drafted none of {count} of {written} tokens, {where}", file=sys.stderr)

    def holds(self, tokens: int) -> bool:
        """Return whether a text of this length fits into the positions of all models."""
        from draftsmith.decode.cache import positions_of

        limits = [positions_of(self.target.config), *(proposer.positions for proposer in self.proposers.values())]
        return all(limit is None or tokens <= limit for limit in limits)


@dataclass
class Loading:
    """A target and its drafters during loading; tokenizers are compared before any weights are read.

    Path, tokenizer, dtype (once known) and model (once loaded) are the target's.
    """

    path: str
    tokenizer: "PreTrainedTokenizerBase"
    trust_remote_code: bool = False
    dtype: str = "auto"
    model: "PreTrainedModel | None" = None
    tokenizers: "dict[str, PreTrainedTokenizerBase]" = field(default_factory=dict)  # the drafters' tokenizers by path
    models: "dict[str, PreTrainedModel]" = field(default_factory=dict)
    """The drafters' models by path, loaded once if a directory drafts in two ways."""
    again: bool = False
    """True if repeated messages are to be suppressed."""

    @property
    def target(self) -> "PreTrainedModel":
        """The loaded target."""
        assert self.model is not None
        return self.model

    @cached_property
    def chains_only(self) -> bool:
        """True if the target follows no tree: it has states, or biases by slots."""
        from draftsmith.decode.cache import follows_one_path
        from draftsmith.train.models import load_config

        if self.model is not None:
            return follows_one_path(self.model.config)
        return follows_one_path(load_config(self.path, field="target", trust_remote_code=self.trust_remote_code))

    def require_chains(self, found: str) -> None:
        """Raise InputError for what drafts trees, if the target verifies chains only."""
        if self.chains_only:
            raise InputError(f"{found}: expected chains, which is all that the target can follow, found a tree")

    def tree(self, spec: DrafterSpec, own: "Tree | None") -> "Tree | None":
        """Return the tree that a spec asks for, or a drafter's own; None, with a line, where chains alone can be."""
        if spec.tree is not None or own is None or own.is_chain or not self.chains_only:
            return own if spec.tree is None else spec.tree
        if not self.again:
            text = f"chains, not its tree of {len(own)} tokens: the target cannot follow a tree"
            print(f"{spec.name or spec.kind}: {text}", file=sys.stderr)
        return None

    def shape(
        self, spec: DrafterSpec, own: "Tree | None", most: int | None = None
    ) -> "tuple[Tree | None, Sequence[int]]":
        """Return the tree to draft, None for chains, and the values of γ, at most the `most` of its training."""
        tree = self.tree(spec, own)
        lengths = [tree.depth] if tree is not None and spec.tree is None else spec.draft_lengths
        if most is not None and max(lengths) > most:
            raise InputError(
                f"draft_length: expected at most the {most} tokens that {spec.path} was trained to propose, found "
                f"{max(lengths)}"
            )
        return tree, lengths


def no_argument(spec: DrafterSpec) -> None:
    """Raise InputError if a kind that takes no argument has one."""
    if spec.path is not None:
        raise InputError(f"drafter: expected {spec.kind} alone, found {spec.kind}:{spec.path}")
