"""Block drafters as a kind of drafter."""

from collections.abc import Callable, Iterator, Mapping
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


class Block(HeadsKind):
    """A few layers on features of the target that draft a block in one forward: DFlash, DSpark."""

    name, title = "block", "block drafter"
    recipe = Recipe(
        "block",
        "trains a block drafter on the target's features",
        "draftsmith.medusa.block",
        "draftsmith.medusa.block.config:BlockTrainingConfig",
        "draftsmith.medusa.block.config:BlockPlanConfig",
        made=("draft_vocabulary", "layer_ids", "mask_token", "markov_rank"),
    )
    tree_key, whole_blocks = "block_tree", True
    cost_remedy = "train one with fewer layers, or a smaller --draft_vocabulary"
    formats = ("own", "vllm", "sglang", "speculators")
    launched, verifiable = ("vllm", "sglang", "speculators"), ("vllm", "speculators")

    def recognises(self, config: Mapping[str, Any]) -> bool:
        """Say so of DSpark's and DFlash's drafters, z-lab's, SpecForge's, DeepSpec's, speculators' and ours."""
        names = config.get("architectures")
        named = isinstance(names, list) and any("DSpark" in str(name) or "DFlash" in str(name) for name in names)
        return named or config.get("speculators_model_type") in ("dflash", "dspark")

    def candidates(self, target: "PretrainedConfig", server: str | None) -> dict[str, dict[str, Any]]:
        """DSpark's with one layer and with two; for SGLang DFlash's, for it knows no others."""
        cut = drafted_tokens(target, "draft_vocabulary")
        dflash = {"anchor_guesses": False, "markov_rank": 0} if server == "sglang" else {}
        return {f"block-{layers}": {"layers": layers} | dflash | cut for layers in (1, 2)}

    def most_drafted(self, config: Mapping[str, Any]) -> int | None:
        """Return the guesses of a block."""
        from draftsmith.medusa.block.model import BlockConfig

        return BlockConfig.from_dict(dict(config)).guesses

    def heads_class(self) -> Any:
        """Return the class of the drafter."""
        from draftsmith.medusa.block.model import BlockDrafter

        return BlockDrafter

    def load(self, spec: DrafterSpec, loading: Loading) -> Drafter:
        """Load the drafter and its tree."""
        from draftsmith.decode.draft_models.searched_tree import searched_tree
        from draftsmith.decode.tree import Tree
        from draftsmith.medusa.block.proposer import BlockProposer

        heads, lengths = self.heads(spec, loading), spec.draft_lengths
        shape = searched_tree(heads.config, self.tree_key) if spec.tree is None else spec.tree
        tree = shape if isinstance(shape, Tree) else None
        if tree is not None and spec.tree is None:
            lengths = [tree.depth]
        most = heads.config.guesses
        if max(lengths) > most:
            raise InputError(
                f"draft_length: expected at most the {most} tokens that {spec.path} was trained to propose, found "
                f"{max(lengths)}"
            )
        greedy = BlockProposer(heads, greedy=True) if tree is None else None
        return self.drafter(spec, BlockProposer(heads, tree), greedy=greedy, model=heads, draft_lengths=lengths)

    def chain(self, drafter: Drafter, draft_length: int) -> "tuple[Proposer, int]":
        """Return chains no longer than a block."""
        from draftsmith.medusa.block.proposer import BlockProposer

        heads: Any = drafter.model
        return BlockProposer(heads), min(draft_length, heads.config.guesses)

    def cached_numbers(self, drafter: Drafter) -> int | None:
        """Return the keys and values of the layers."""
        heads: Any = drafter.model
        return heads.cached_numbers  # type: ignore[no-any-return]

    def forward(self, model: "PreTrainedModel") -> Callable[[], object]:
        """Return a block's forward."""
        import torch

        from draftsmith.decode.cache.kernels import fused_attention

        heads: Any = model
        size = heads.config.block_size
        states = torch.zeros(1, size, heads.config.hidden_size, dtype=model.dtype)
        places = torch.arange(size)[None]

        def attend(_: int) -> Any:
            return lambda queries, own: fused_attention(queries, own.keys, own.values, None)

        return lambda: heads(states, places, attend)

    def inspect(self, spec: DrafterSpec, trust_remote_code: bool) -> "tuple[Part | None, Finding]":
        """Load the drafter without its weights, whichever tool wrote it."""
        from draftsmith.medusa.block.checks import inspect

        return inspect(spec)

    def compare(self, target: "Side", part: "Part") -> "Iterator[Finding]":
        """Compare shapes, layers and positions, the tree with the drafter, and its files with what servers do."""
        from draftsmith.medusa.block.checks import compare

        return compare(target, part)

    def begins(self, target: "Side", config: Any) -> "tuple[str, list[Finding]]":
        """Return which drafter a run begins with, its mask, and whether its learning rate is usual."""
        from draftsmith.medusa.block.checks import check_run

        return check_run(target, config)

    def export(self, config: "ExportOptions", path: str) -> list[str]:
        """Write the drafter for a server."""
        from draftsmith.medusa.block.formats import export

        return export.export(config, path)

    def served(
        self, config: "ExportOptions", path: str
    ) -> "tuple[list[Served], Callable[[PreTrainedModel], Proposer]]":
        """Return vLLM's method for such drafters."""
        from draftsmith.medusa.block.formats import export

        return export.served(config, path)

    def recognises_foreign(self, directory: Path) -> bool:
        """Say so of drafters of all these tools."""
        from draftsmith.medusa.checkpoint_files import read_config

        return self.recognises(read_config(directory, "a block drafter"))

    def import_from(self, config: "ExportOptions", source: str) -> list[str]:
        """Read the drafter of another tool."""
        from draftsmith.medusa.block.formats import export

        return export.import_from(config, source)
