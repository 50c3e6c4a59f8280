"""EAGLE-3 heads as a kind of drafter."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from draftsmith.medusa.kind import HeadsKind
from draftsmith.train.kinds.drafter import Drafter, DrafterSpec, Loading
from draftsmith.train.kinds.kind import Recipe, drafted_tokens

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from draftsmith.decode.proposers.base import Proposer


class Eagle(HeadsKind):
    """One layer on features of the target; it drafts chains, or the tree of its config."""

    name, title = "eagle", "EAGLE-3 heads"
    flags = ("eagle",)
    package, model_class = "draftsmith.medusa.eagle", "heads:EagleHeads"
    recipe = Recipe(
        "eagle",
        "trains EAGLE-3 heads on the target's features",
        "draftsmith.medusa.eagle",
        "draftsmith.medusa.eagle.config:EagleTrainingConfig",
        "draftsmith.medusa.eagle.__main__:EaglePlan",
        made=("draft_vocabulary", "layer_ids", "norm_", "fc_norm"),
    )
    has_confidence = True
    tree_key = "eagle_tree"
    formats = ("own", "vllm", "sglang", "speculators")
    launched, verifiable, gguf = ("vllm", "sglang", "speculators"), ("vllm", "speculators"), "vllm"

    def recognises(self, config: Mapping[str, Any]) -> bool:
        """Return whether these are EAGLE-3 heads in any format: the authors', SpecForge's, speculators' or ours."""
        names = config.get("architectures")
        named = isinstance(names, list) and any("Eagle3" in str(name) for name in names)
        return named or config.get("speculators_model_type") == "eagle3"

    def candidates(self, target: "PretrainedConfig", server: str | None) -> dict[str, dict[str, Any]]:
        """Return one candidate: one layer, as in the paper; for SGLang without the variant that it does not know."""
        plain = {"norm_before_residual": False} if server == "sglang" else {}
        return {"eagle": plain | drafted_tokens(target, "draft_vocabulary")}

    def load(self, spec: DrafterSpec, loading: Loading) -> Drafter:
        """Load the heads and their tree."""
        from draftsmith.decode.tree import searched_tree
        from draftsmith.medusa.eagle.proposer import EagleProposer

        heads = self.heads(spec, loading)
        tree, lengths = loading.shape(spec, searched_tree(heads.config, self.tree_key))
        greedy = EagleProposer(heads, greedy=True) if tree is None else None
        return self.drafter(spec, EagleProposer(heads, tree), greedy=greedy, model=heads, draft_lengths=lengths)

    def chain(self, drafter: Drafter, draft_length: int) -> "tuple[Proposer, int]":
        """Return chains, even if the heads' config has a tree."""
        from draftsmith.medusa.eagle.proposer import EagleProposer

        heads: Any = drafter.model
        return EagleProposer(heads), draft_length
