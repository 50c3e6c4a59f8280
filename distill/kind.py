"""Draft models: causal language models that are smaller than their target."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from draftsmith.decode.errors import InputError
from draftsmith.train.kinds.drafter import Drafter, DrafterSpec, Loading
from draftsmith.train.kinds.kind import DrafterKind, Recipe, drafted_tokens

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from draftsmith.decode.proposers.base import Proposer
    from draftsmith.train.kinds.export import ExportOptions, Served
    from draftsmith.train.kinds.parts import Side

DISTILL = Recipe(
    "distill",
    "trains a draft model on the target's distribution",
    "draftsmith.distill",
    "draftsmith.distill.config:DistillConfig",
    "draftsmith.distill.__main__:plan_of",
    begun="draft",
    made=("init.",),
)
SERVERS = ("vllm", "sglang")  # the servers that load a draft model unchanged


class Draft(DrafterKind):
    """A causal language model with any way of drafting; servers load its directory unchanged."""

    def check(self, spec: DrafterSpec, loading: Loading) -> None:
        """Require the target's tokenizer."""
        from draftsmith.train.models import check_same_tokenizer, load_tokenizer, vocabulary_size

        path, code = str(spec.path), loading.trust_remote_code
        tokenizer = loading.tokenizers[path] = load_tokenizer(path, field=self.field(spec), trust_remote_code=code)
        if not self.renumbers(spec):
            size = vocabulary_size(loading.path, trust_remote_code=code)
            check_same_tokenizer(loading.tokenizer, tokenizer, loading.path, path, vocab_size=size)

    def field(self, spec: DrafterSpec) -> str:
        """Return the name of the drafter in error messages."""
        return spec.kind

    def renumbers(self, spec: DrafterSpec) -> bool:
        """Return whether the drafter's tokenizer may have other ids than the target's."""
        return False

    def model(self, spec: DrafterSpec, loading: Loading) -> "PreTrainedModel":
        """Load the model, once for each directory."""
        from draftsmith.train.models import check_head, load_draft

        path = str(spec.path)
        if path not in loading.models:
            dtype, code = loading.dtype, loading.trust_remote_code
            loading.models[path] = load_draft(path, field=self.field(spec), dtype=dtype, trust_remote_code=code)
        tokenizer = loading.tokenizers[path]
        other = self.renumbers(spec) and tokenizer.get_vocab() != loading.tokenizer.get_vocab()
        check_head(loading.models[path].config, tokenizer, self.field(spec), None if other else loading.target.config)
        return loading.models[path]

    def inspect(self, spec: DrafterSpec, target: "Side | None", trust_remote_code: bool) -> "Side":
        """Load the model without its weights, and require the target's tokenizer."""
        from draftsmith.train.kinds.parts import load_side
        from draftsmith.train.models import check_same_tokenizer

        path = str(spec.path)
        side = load_side(spec.name or spec.kind, path, trust_remote_code)
        if target is not None and not self.renumbers(spec):
            check_same_tokenizer(target.tokenizer, side.tokenizer, target.path, path, vocab_size=target.head)
        return side

    @abstractmethod
    def proposer(self, model: "PreTrainedModel") -> "Proposer":
        """Return the proposer of chains of a model."""

    def check_export(self, config: "ExportOptions") -> None:
        """Refuse options that would change the model."""
        if config.dtype is not None:
            raise InputError("dtype: expected none with a draft model, which stays as it is, found one")
        self.check_format(config)

    def export(self, config: "ExportOptions", path: str) -> list[str]:
        """Return the lines that launch a server with it."""
        from draftsmith.distill.export import export

        return export(self, config, path)

    def served(
        self, config: "ExportOptions", path: str
    ) -> "tuple[list[Served], Callable[[PreTrainedModel], Proposer]]":
        """Return vLLM's method for draft models, with greedy and sampled drafts."""
        from draftsmith.distill.export import served

        return served(self, config, path)

    def unchanged(self, path: str) -> bool:
        """Return whether the vocabulary is whole."""
        from draftsmith.decode.draft_models.cut_vocabulary import kept_tokens
        from draftsmith.train.models import load_config

        return kept_tokens(load_config(path, field="draft")) is None

    def drafting(self, config: "ExportOptions", model: "PretrainedConfig") -> dict[str, Any]:
        """Return the fields of vLLM's speculative config other than method and model."""
        from draftsmith.distill.export import GAMMA

        return {"num_speculative_tokens": config.draft_length or GAMMA}

    def notes(self, model: "PreTrainedModel", server: str) -> list[str]:
        """Return notes on its use in a server, a line each."""
        return []


class _OneByOne(Draft):
    """A draft that drafts one token in each forward."""

    has_confidence = True
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
    """A smaller model with the target's tokenizer."""

    name, title = "draft", "draft model"
    flags = ("draft",)
    recipe = DISTILL
    formats = launched = SERVERS
    verifiable, gguf = ("vllm",), "vllm"

    def recognises(self, config: Mapping[str, Any]) -> bool:
        """Return whether it is a model of the library, of any type."""
        return "model_type" in config

    def candidates(self, target: "PretrainedConfig", server: str | None) -> dict[str, dict[str, Any]]:
        """Return drafts carved from an eighth and a quarter of the target's layers."""
        layers = target.get_text_config().num_hidden_layers
        sizes = sorted({max(1, round(layers / part)) for part in (8, 4)})
        cut = drafted_tokens(target, "init.draft_vocabulary")
        return {f"draft-{count}": {"init.layers": count} | cut for count in sizes}


class RenumberedDraft(_OneByOne):
    """A draft whose tokenizer may be the target's under other ids."""

    name, title = "renumbered", "renumbered draft"

    def field(self, spec: DrafterSpec) -> str:
        """Return the name of a draft model."""
        return DraftModel.name

    def renumbers(self, spec: DrafterSpec) -> bool:
        """Return True."""
        return True

    def load(self, spec: DrafterSpec, loading: Loading) -> Drafter:
        """Load the model and compare tokenizers."""
        from draftsmith.decode import DraftModelProposer
        from draftsmith.decode.proposers.renumbered import matching_ids, renumber_draft, stand_in

        own, target = loading.tokenizers[str(spec.path)], loading.tokenizer
        if own.get_vocab() == target.get_vocab():
            return super().load(spec, loading)
        ids = matching_ids(own, target)
        if ids is None:
            shared = len(own.get_vocab().keys() & target.get_vocab().keys())
            raise InputError(
                f"draft {spec.path}: expected the target's tokens and merges, under any ids, found {shared} of its "
                f"{len(target)} tokens; distil a draft that has the target's tokenizer"
            )
        model = self.model(spec, loading)
        view = renumber_draft(model, ids, stand_in(own))
        return self.drafter(spec, DraftModelProposer(view, spec.tree), model=model)


class RunAheadDraft(_OneByOne):
    """A draft that runs ahead in a second thread while the target verifies, one text at a time."""

    name, title = "run_ahead", "draft that runs ahead"
    has_confidence = False

    def load(self, spec: DrafterSpec, loading: Loading) -> Drafter:
        """Load the model."""
        from draftsmith.decode import RunAheadProposer

        model = self.model(spec, loading)
        return self.drafter(spec, RunAheadProposer(model), model=model)
