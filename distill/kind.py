"""Draft models: causal language models that are smaller than their target."""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from draftsmith.train.kinds.causal import CausalKind
from draftsmith.train.kinds.drafter import Drafter, DrafterSpec, Loading
from draftsmith.train.kinds.kind import Recipe, drafted_tokens

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from draftsmith.decode.proposers.base import Proposer
    from draftsmith.train.kinds.export import ExportOptions, Served
    from draftsmith.train.kinds.findings import Finding
    from draftsmith.train.kinds.parts import Part, Side

DISTILL = Recipe(
    "distill",
    "trains a draft model on the target's distribution",
    "draftsmith.distill",
    "draftsmith.distill.config:DistillConfig",
    "draftsmith.distill.config:DistillPlanConfig",
    begun="draft",
    made=("init.",),
)
SERVERS = ("vllm", "sglang")
"""What loads a draft model as it is."""


class Draft(CausalKind):
    """A draft model in any way of drafting; servers load its directory as it is."""

    def compare(self, target: "Side", part: "Part") -> "Iterator[Finding]":
        """Compare sizes and tokenizers."""
        from draftsmith.distill.checks import compare

        yield from compare(target, part)

    def check_export(self, config: "ExportOptions") -> None:
        """Refuse what would change the model."""
        from draftsmith.distill.export import check

        check(self, config)

    def export(self, config: "ExportOptions", path: str) -> list[str]:
        """Return the lines by which a server loads it."""
        from draftsmith.distill.export import export

        return export(self, config, path)

    def served(
        self, config: "ExportOptions", path: str
    ) -> "tuple[list[Served], Callable[[PreTrainedModel], Proposer]]":
        """Return vLLM's method for draft models, greedy and drawing."""
        from draftsmith.distill.export import served

        return served(self, config, path)

    def drafting(self, config: "ExportOptions", model: "PretrainedConfig") -> dict[str, Any]:
        """Return the fields of vLLM's speculative config beside method and model: γ, and how it drafts."""
        from draftsmith.distill.export import GAMMA

        return {"num_speculative_tokens": config.draft_length or GAMMA}

    def notes(self, model: "PreTrainedModel", server: str) -> list[str]:
        """Return what a reader should know of it in a server, a line each."""
        return []


class _OneByOne(Draft):
    """Drafts a token a forward."""

    grows_trees = True
    by_token = True

    def proposer(self, model: "PreTrainedModel") -> "Proposer":
        """Return chains."""
        from draftsmith.decode import DraftModelProposer

        return DraftModelProposer(model)

    def load(self, spec: DrafterSpec, loading: Loading) -> Drafter:
        """Load the model."""
        from draftsmith.decode import DraftModelProposer

        model = self.model(spec, loading)
        greedy = DraftModelProposer(model, greedy=True)
        return self.drafter(spec, DraftModelProposer(model, spec.tree), greedy=greedy, model=model)


class DraftModel(_OneByOne):
    """The usual one: a smaller model with the target's tokenizer."""

    name, title = "draft", "draft model"
    flags = ("draft",)
    recipe = DISTILL
    formats = launched = SERVERS
    verifiable = ("vllm",)

    def recognises(self, config: Mapping[str, Any]) -> bool:
        """Say so of any model of the library's that is not of another kind."""
        return "model_type" in config

    def candidates(self, target: "PretrainedConfig", server: str | None) -> dict[str, dict[str, Any]]:
        """Carve an eighth and a quarter of the target's layers."""
        layers = target.get_text_config().num_hidden_layers
        sizes = sorted({max(1, round(layers / part)) for part in (8, 4)})
        cut = drafted_tokens(target, "init.draft_vocabulary")
        return {f"draft-{count}": {"init.layers": count} | cut for count in sizes}


class ReencodedDraft(_OneByOne):
    """Drafts with a model of any tokenizer: unless it is the target's, ids are renumbered or text is encoded again."""

    name, title = "reencoded", "re-encoded draft"

    def field(self, spec: DrafterSpec) -> str:
        """Return what errors call it: a draft model."""
        return DraftModel.name

    def recounts(self, spec: DrafterSpec) -> bool:
        """Return True."""
        return True

    def load(self, spec: DrafterSpec, loading: Loading) -> Drafter:
        """Load the model and compare the tokenizers."""
        from draftsmith.decode import RetokenizedProposer

        tokenizer = loading.tokenizers[str(spec.path)]
        if tokenizer.get_vocab() == loading.tokenizer.get_vocab():
            return super().load(spec, loading)
        model = self.model(spec, loading)
        proposer = RetokenizedProposer(model, tokenizer, loading.tokenizer, spec.tree)
        return self.drafter(spec, proposer, model=model)


class RunAheadDraft(_OneByOne):
    """Drafts on in a second thread while the target verifies, one text at a time."""

    name, title = "run_ahead", "draft that runs ahead"
    grows_trees = False

    def load(self, spec: DrafterSpec, loading: Loading) -> Drafter:
        """Load the model."""
        from draftsmith.decode import RunAheadProposer

        model = self.model(spec, loading)
        return self.drafter(spec, RunAheadProposer(model), model=model)
