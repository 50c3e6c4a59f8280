"""`draftsmith export` of parallel drafts: vLLM's speculative config, and notes."""

from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

from draftsmith.decode.errors import InputError
from draftsmith.distill.export import GAMMA
from draftsmith.distill.parallel.layout import length_of, mask_token_of, tree_of
from draftsmith.train.kinds.export import ExportOptions


def drafting(config: ExportOptions, draft: PretrainedConfig) -> dict[str, Any]:
    """Return γ, and that all tokens are drafted in one forward: what was asked for, or all that the draft proposes.

    vLLM 0.32 reads `pard_token` of the draft's config (`v1/spec_decode/llm_base_proposer.py`) and asks for no length.

    Raises:
        InputError: more than it was trained to propose.
    """
    longest = length_of(draft)
    given = config.draft_length or longest or GAMMA
    if longest is not None and given > longest:
        raise InputError(
            f"draft_length: expected at most the {longest} tokens that the draft was trained to propose, found {given}"
        )
    return {"num_speculative_tokens": given, "parallel_drafting": True}


def notes(model: PreTrainedModel, server: str) -> list[str]:
    """Return what a reader should know of a draft in a server, a line each.

    Raises:
        InputError: a config without its mask token.
    """
    if server == "sglang":
        return ["SGLang's STANDALONE drafts a token a forward, with this draft too: measure it as --draft"]
    mask_token_of(model)
    found = ["it drafts all tokens in one forward; measure it as --parallel_draft"]
    if (tree := tree_of(model.config)) is not None:
        found.append(f"the tree of {len(tree)} tokens in its config.json is not for vLLM, which drafts chains")
    return found
