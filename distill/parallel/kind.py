"""Parallel drafts as a kind of drafter."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from draftsmith.decode.errors import InputError
from draftsmith.distill.kind import DISTILL, SERVERS, Draft
from draftsmith.train.kinds.drafter import Drafter, DrafterSpec, Loading

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from draftsmith.decode.proposers.base import Proposer
    from draftsmith.train.kinds.export import ExportOptions
    from draftsmith.train.kinds.parts import Side


class ParallelDraft(Draft):
    """A draft of several tokens in one forward, at mask tokens after the text."""

    name, title = "parallel_draft", "parallel draft"
    flags = ("parallel_draft",)
    recipe = DISTILL
    tree_key = "parallel_tree"
    formats = launched = SERVERS
    verifiable = ("vllm",)

    def recognises(self, config: Mapping[str, Any]) -> bool:
        """Return whether the config names a mask token."""
        return config.get("pard_token") is not None

    def load(self, spec: DrafterSpec, loading: Loading) -> Drafter:
        """Load the model and its tree."""
        from draftsmith.distill.parallel.layout import length_of, tree_of
        from draftsmith.distill.parallel.proposer import ParallelDraftProposer

        model = self.model(spec, loading)
        tree, lengths = loading.shape(spec, tree_of(model.config), length_of(model.config))
        greedy = ParallelDraftProposer(model, greedy=True) if tree is None else None
        return self.drafter(spec, ParallelDraftProposer(model, tree), greedy=greedy, model=model, draft_lengths=lengths)

    def chain(self, drafter: Drafter, draft_length: int) -> "tuple[Proposer, int]":
        """Return chains no longer than the trained length."""
        return drafter.proposer, min(draft_length, drafter.proposer.longest or draft_length)

    def most_drafted(self, config: Mapping[str, Any]) -> int | None:
        """Return the trained length."""
        from transformers import PretrainedConfig

        from draftsmith.distill.parallel.layout import length_of

        return length_of(PretrainedConfig.from_dict(dict(config)))

    def proposer(self, model: "PreTrainedModel") -> "Proposer":
        """Return chains."""
        from draftsmith.distill.parallel.proposer import ParallelDraftProposer

        return ParallelDraftProposer(model)

    def inspect(self, spec: DrafterSpec, target: "Side | None", trust_remote_code: bool) -> "Side":
        """Require the mask token and the tree of its config."""
        from draftsmith.distill.parallel.layout import length_of, mask_token_of, tree_of

        draft = super().inspect(spec, target, trust_remote_code)
        mask, length = mask_token_of(draft.model), length_of(draft.model.config)
        tokens = "tokens" if length is None else f"{length} tokens"
        text = f"{draft.text}; drafts {tokens} in one forward, with token {mask} for a mask"
        if (tree := tree_of(draft.model.config)) is not None:
            text += f", and a tree of {len(tree)}, {tree.depth} deep"
        return replace(draft, text=text)

    def drafting(self, config: "ExportOptions", model: "PretrainedConfig") -> dict[str, Any]:
        """Return γ, by default the trained length, and the flag of parallel drafts.

        vLLM 0.32 reads `pard_token` of the draft's config (`v1/spec_decode/llm_base_proposer.py`), but no length.
        """
        from draftsmith.distill.export import GAMMA
        from draftsmith.distill.parallel.layout import length_of

        longest = length_of(model)
        draft_length = config.draft_length or longest or GAMMA
        if longest is not None and draft_length > longest:
            raise InputError(
                f"draft_length: expected at most the {longest} tokens that the draft was trained to propose, "
                f"found {draft_length}"
            )
        return {"num_speculative_tokens": draft_length, "parallel_drafting": True}

    def notes(self, model: "PreTrainedModel", server: str) -> list[str]:
        """Return how a server drafts with it."""
        from draftsmith.distill.parallel.layout import mask_token_of, tree_of

        if server == "sglang":
            return ["SGLang's STANDALONE drafts a token a forward, with this draft too: measure it as --draft"]
        mask_token_of(model)
        lines = ["it drafts all tokens in one forward, as `measure --drafter` does"]
        if (tree := tree_of(model.config)) is not None:
            lines.append(f"the tree of {len(tree)} tokens in its config.json is not for vLLM, which drafts chains")
        return lines
