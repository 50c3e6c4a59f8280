"""Drafters that are causal language models with a tokenizer and a directory of their own."""

from abc import abstractmethod
from typing import TYPE_CHECKING

from draftsmith.train.kinds.drafter import DrafterSpec, Loading
from draftsmith.train.kinds.kind import DrafterKind

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from draftsmith.decode.proposers.base import Proposer
    from draftsmith.train.kinds.parts import Side


class CausalKind(DrafterKind):
    """A causal language model with the target's tokenizer."""

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
