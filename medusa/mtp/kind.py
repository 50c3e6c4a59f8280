"""A target's own MTP layers as a kind of drafter."""

from typing import TYPE_CHECKING, Any

from draftsmith.decode.errors import InputError
from draftsmith.train.kinds.drafter import Drafter, DrafterSpec, Loading, no_argument
from draftsmith.train.kinds.kind import DrafterKind

if TYPE_CHECKING:
    from draftsmith.train.kinds.findings import Finding
    from draftsmith.train.kinds.parts import Part


class Mtp(DrafterKind):
    """The layers for multi-token prediction in the target's own files; they draft chains."""

    name, title, stored, within_target = "mtp", "MTP layers", False, True
    cost_remedy = "take a smaller --draft_length"

    def check(self, spec: DrafterSpec, loading: Loading) -> None:
        """Require chains, and a target whose files have the layers that its config promises."""
        from draftsmith.medusa.mtp.native import check_files

        no_argument(spec)
        if spec.tree is not None:
            raise InputError("width: expected chains from mtp, found a tree")
        check_files(loading.path, loading.trust_remote_code)

    def load(self, spec: DrafterSpec, loading: Loading) -> Drafter:
        """Load the layers, in the target's dtype."""
        from draftsmith.medusa.mtp.heads import MtpHeads
        from draftsmith.medusa.mtp.proposer import MtpProposer

        no_argument(spec)
        heads = MtpHeads.native_to(loading.target)
        return self.drafter(spec, MtpProposer(heads), greedy=MtpProposer(heads, greedy=True), model=heads)

    def cached_numbers(self, drafter: Drafter) -> int | None:
        """Return the keys and values of the layers."""
        heads: Any = drafter.model
        return heads.cached_numbers  # type: ignore[no-any-return]

    def inspect(self, spec: DrafterSpec, trust_remote_code: bool) -> "tuple[Part | None, Finding]":
        """Find the layers in the target's directory, and whether all their tensors map."""
        from draftsmith.medusa.mtp.native import inspect

        return inspect(spec, trust_remote_code)
