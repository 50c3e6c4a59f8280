"""Medusa and Hydra heads as a kind of drafter."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.decode.errors import InputError
from draftsmith.medusa.kind import HeadsKind
from draftsmith.train.kinds.drafter import Drafter, DrafterSpec, Loading
from draftsmith.train.kinds.kind import Recipe, drafted_tokens

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from draftsmith.decode.proposers.base import Proposer
    from draftsmith.train.kinds.export import ExportOptions, Served
    from draftsmith.train.kinds.findings import Finding
    from draftsmith.train.kinds.parts import Part, Side


class Medusa(HeadsKind):
    """K heads on the target's last hidden state; they draft the tree of their config."""

    name, title = "medusa", "Medusa heads"
    flags = ("medusa",)
    recipe = Recipe(
        "medusa",
        "trains Medusa or Hydra heads on the target's hidden states",
        "draftsmith.medusa",
        "draftsmith.medusa.heads.config:MedusaTrainingConfig",
        "draftsmith.medusa.heads.config:MedusaPlanConfig",
        made=("draft_vocabulary",),
    )
    tree_key, tree_alone = "medusa_choices", True
    figures = ("heads", "tree_nodes")
    formats = ("own", "vllm", "fasterdecoding", "modelopt")
    launched, verifiable, drops_by_rank = ("vllm",), ("vllm", "fasterdecoding"), True

    def recognises(self, config: Mapping[str, Any]) -> bool:
        """Say so of heads in any format: ours, vLLM's, FasterDecoding's and ModelOpt's."""
        theirs = "medusa_num_heads" in config or isinstance(config.get("medusa"), dict)
        return config.get("model_type") == "medusa" or theirs

    def check(self, spec: DrafterSpec, loading: Loading) -> None:
        """Refuse files that other tools alone read."""
        from draftsmith.medusa.heads.formats.importing import foreign_format

        found = foreign_format(Path(str(spec.path)))
        if found not in (None, "vllm"):
            raise InputError(
                f"medusa: expected heads of ours in {spec.path}, found {found}'s, which draftsmith export "
                f"--import_from {spec.path} reads"
            )

    def candidates(self, target: "PretrainedConfig", server: str | None) -> dict[str, dict[str, Any]]:
        """Hydra heads, which are ahead of Medusa's; for vLLM these, for it knows no others."""
        cut = drafted_tokens(target, "draft_vocabulary")
        return {None: {"hydra": {"hydra": True} | cut}, "vllm": {"medusa": cut}}.get(server, {})

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

    def inspect(self, spec: DrafterSpec, trust_remote_code: bool) -> "tuple[Part | None, Finding]":
        """Load the heads without their weights."""
        from draftsmith.medusa.heads.checks import inspect

        return inspect(spec)

    def compare(self, target: "Side", part: "Part") -> "Iterator[Finding]":
        """Compare shapes, and the tree with the heads."""
        from draftsmith.medusa.heads.checks import compare

        return compare(target, part)

    def costs(self, spec: DrafterSpec, loading: Loading) -> "Callable[[int], Finding]":
        """Measure what a round of the tree costs."""
        return super().costs(replace(spec, name="heads") if spec.name == self.name else spec, loading)

    def check_format(self, config: "ExportOptions") -> None:
        """Name the server that loads none."""
        from draftsmith.medusa.heads.formats.writing import check_format

        check_format(str(config.format))
        super().check_format(config)

    def export(self, config: "ExportOptions", path: str) -> list[str]:
        """Write the heads for another tool."""
        from draftsmith.medusa.heads.formats import export

        return export.export(config, path)

    def served(
        self, config: "ExportOptions", path: str
    ) -> "tuple[list[Served], Callable[[PreTrainedModel], Proposer]]":
        """Return vLLM's method for such heads, a chain."""
        from draftsmith.medusa.heads.formats import export

        return export.served(config, path)

    def recognises_foreign(self, directory: Path) -> bool:
        """Say so of each of the formats."""
        from draftsmith.medusa.heads.formats.importing import marks

        return bool(marks(directory))

    def import_from(self, config: "ExportOptions", source: str) -> list[str]:
        """Read the heads of another tool."""
        from draftsmith.medusa.heads.formats import export

        return export.import_from(config, source)
