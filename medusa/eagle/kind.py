"""EAGLE-3 heads as a kind of drafter."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.medusa.kind import HeadsKind
from draftsmith.train.kinds.drafter import Drafter, DrafterSpec, Loading
from draftsmith.train.kinds.kind import Recipe, drafted_tokens

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from draftsmith.decode.proposers.base import Proposer
    from draftsmith.train.kinds.export import ExportOptions, Served
    from draftsmith.train.kinds.findings import Finding
    from draftsmith.train.kinds.parts import Part, Side


class Eagle(HeadsKind):
    """One layer on features of the target; it drafts chains, or the tree of its config."""

    name, title = "eagle", "EAGLE-3 heads"
    flags = ("eagle",)
    recipe = Recipe(
        "eagle",
        "trains EAGLE-3 heads on the target's features",
        "draftsmith.medusa.eagle",
        "draftsmith.medusa.eagle.config:EagleTrainingConfig",
        "draftsmith.medusa.eagle.config:EaglePlanConfig",
        made=("draft_vocabulary", "layer_ids", "norm_", "fc_norm"),
    )
    grows_trees = True
    tree_key = "eagle_tree"
    cost_remedy = "train heads with a smaller --draft_vocabulary"
    formats = ("own", "vllm", "sglang")
    launched, verifiable = ("vllm", "sglang"), ("vllm",)

    def recognises(self, config: Mapping[str, Any]) -> bool:
        """Say so of heads of this kind in any format: the authors', SpecForge's, speculators' and ours."""
        names = config.get("architectures")
        named = isinstance(names, list) and any("Eagle3" in str(name) for name in names)
        return named or config.get("speculators_model_type") == "eagle3"

    def candidates(self, target: "PretrainedConfig", server: str | None) -> dict[str, dict[str, Any]]:
        """One layer, as the paper has it."""
        return {"eagle": drafted_tokens(target, "draft_vocabulary")}

    def heads_class(self) -> Any:
        """Return the class of the heads."""
        from draftsmith.medusa.eagle.heads import EagleHeads

        return EagleHeads

    def load(self, spec: DrafterSpec, loading: Loading) -> Drafter:
        """Load the heads and their tree."""
        from draftsmith.decode.draft_models.searched_tree import searched_tree
        from draftsmith.decode.tree import Tree
        from draftsmith.medusa.eagle.proposer import EagleProposer

        heads, lengths = self.heads(spec, loading), spec.draft_lengths
        shape = searched_tree(heads.config, self.tree_key) if spec.tree is None else spec.tree
        if spec.tree is None and isinstance(shape, Tree):
            lengths = [shape.depth]
        greedy = EagleProposer(heads, greedy=True) if shape is None else None
        return self.drafter(spec, EagleProposer(heads, shape), greedy=greedy, model=heads, draft_lengths=lengths)

    def chain(self, drafter: Drafter, draft_length: int) -> "tuple[Proposer, int]":
        """Return chains, whatever the tree is that earlier training left."""
        from draftsmith.medusa.eagle.proposer import EagleProposer

        heads: Any = drafter.model
        return EagleProposer(heads), draft_length

    def cached_numbers(self, drafter: Drafter) -> int | None:
        """Return the keys and values of the layer."""
        heads: Any = drafter.model
        return heads.cached_numbers  # type: ignore[no-any-return]

    def forward(self, model: "PreTrainedModel") -> Callable[[], object]:
        """Return a step and its logits."""
        import torch

        heads: Any = model
        states = torch.zeros(1, 1, heads.config.hidden_size, dtype=model.dtype)
        places = torch.arange(1)[None]
        return lambda: heads.head(heads(states, states, places).hidden)

    def inspect(self, spec: DrafterSpec, trust_remote_code: bool) -> "tuple[Part | None, Finding]":
        """Load the heads without their weights."""
        from draftsmith.medusa.eagle.checks import inspect

        return inspect(spec)

    def compare(self, target: "Side", part: "Part") -> "Iterator[Finding]":
        """Compare shapes, layers and positions, the tree with the heads, and their files with what servers do."""
        from draftsmith.medusa.eagle.checks import compare

        return compare(target, part)

    def begins(self, target: "Side", config: Any) -> "tuple[str, list[Finding]]":
        """Return which heads a run begins with, and whether its learning rate is usual."""
        from draftsmith.medusa.eagle.checks import check_run

        return check_run(target, config)

    def export(self, config: "ExportOptions", path: str) -> list[str]:
        """Write the heads for a server."""
        from draftsmith.medusa.eagle.formats import export

        return export.export(config, path)

    def served(
        self, config: "ExportOptions", path: str
    ) -> "tuple[list[Served], Callable[[PreTrainedModel], Proposer]]":
        """Return vLLM's method for such heads."""
        from draftsmith.medusa.eagle.formats import export

        return export.served(config, path)

    def recognises_foreign(self, directory: Path) -> bool:
        """Say so of the authors' heads, SpecForge's and speculators'."""
        from draftsmith.medusa.checkpoint_files import read_config

        return self.recognises(read_config(directory, "heads"))

    def import_from(self, config: "ExportOptions", source: str) -> list[str]:
        """Read the heads of another tool."""
        from draftsmith.medusa.eagle.formats import export

        return export.import_from(config, source)
