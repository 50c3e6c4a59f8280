"""Draft models: causal language models that are smaller than their target."""

from collections.abc import Mapping
from typing import Any

from draftsmith.train.kinds.causal import CausalKind
from draftsmith.train.kinds.drafter import Drafter, DrafterSpec, Loading
from draftsmith.train.kinds.kind import Recipe

DISTILL = Recipe(
    "distill",
    "a draft model from the target's completions",
    "draftsmith.distill",
    "draftsmith.distill.config:DistillConfig",
)


class _OneByOne(CausalKind):
    """Drafts a token a forward."""

    grows_trees = True
    by_token = True

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

    def recognises(self, config: Mapping[str, Any]) -> bool:
        """Say so of any model of the library's that is not of another kind."""
        return "model_type" in config


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
        return self.drafter(spec, proposer, model=model, own_positions=proposer.renumbers)


class RunAheadDraft(_OneByOne):
    """Drafts on in a second thread while the target verifies, one text at a time."""

    name, title = "run_ahead", "draft that runs ahead"
    grows_trees = False

    def load(self, spec: DrafterSpec, loading: Loading) -> Drafter:
        """Load the model."""
        from draftsmith.decode import RunAheadProposer

        model = self.model(spec, loading)
        return self.drafter(spec, RunAheadProposer(model), model=model)
