"""Checks of `draftsmith doctor` for parallel drafts: the mask token, and how many tokens they draft."""

from draftsmith.decode.errors import InputError
from draftsmith.distill.parallel.layout import is_unused, length_of, mask_token_of, tree_of
from draftsmith.train.kinds.findings import Finding
from draftsmith.train.kinds.parts import Part, Side


def check_masks(draft: Part) -> Finding:
    """Check whether its config says what it was trained with."""
    assert isinstance(draft, Side)
    name = "parallel"
    try:
        mask, length = mask_token_of(draft.model), length_of(draft.model.config)
        tree = tree_of(draft.model.config)
    except InputError as error:
        text = str(error).removeprefix("parallel draft: ")
        return Finding("error", name, text, "write into its config.json what it was trained with")
    known = "tokens" if length is None else f"{length} tokens"
    text = f"drafts {known} in one forward (--parallel_draft), with token {mask} for a mask"
    if tree is not None:
        text += f", and a tree of {len(tree)}, {tree.depth} deep"
    if is_unused(draft.tokenizer, mask):
        return Finding("ok", name, text)
    remedy = "drafts stay lossless, but it can't tell a mask from text: train with an unused token"
    written = draft.tokenizer.convert_ids_to_tokens(mask)
    return Finding("warning", name, f"{text}, which texts may contain: {written!r}", remedy)
