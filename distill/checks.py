"""Checks of `draftsmith doctor` for draft models: that they are small, and read text as their target does."""

from collections.abc import Iterator

from draftsmith.decode.errors import InputError
from draftsmith.decode.proposers.renumbered import matching_ids
from draftsmith.train.kinds.findings import Finding
from draftsmith.train.kinds.parts import Part, Side
from draftsmith.train.models import check_same_tokenizer

CHEAP = 0.5  # a draft of more than this share of the target's parameters hardly pays


def compare(target: Side, draft: Part) -> Iterator[Finding]:
    """Compare sizes and tokenizers."""
    assert isinstance(draft, Side)
    yield _sizes(target, draft)
    yield _tokenizers(target, draft)


def _sizes(target: Side, draft: Side) -> Finding:
    p, q = target.model.num_parameters(), draft.model.num_parameters()
    text = f"the draft has {q / p:.1%} of the target's parameters"
    if q > CHEAP * p:
        return Finding("warning", "sizes", text, "a draft pays by being far cheaper: --costs true says from which α on")
    return Finding("ok", "sizes", text)


def _tokenizers(target: Side, draft: Side) -> Finding:
    name, alike = "tokenizers", matching_ids(draft.tokenizer, target.tokenizer) is not None
    try:
        check_same_tokenizer(target.tokenizer, draft.tokenizer, target.path, draft.path, vocab_size=target.head)
    except InputError as error:
        difference = str(error).rpartition("found ")[2]
        if alike:
            return Finding(
                "warning",
                name,
                f"the same pieces under other ids: {difference}",
                "generate and RetokenizedProposer renumber them at any temperature; distill and measure want one "
                "tokenizer for both",
            )
        return Finding(
            "warning",
            name,
            difference,
            "generate and RetokenizedProposer encode the draft's text again, at T=0 alone; to distill and measure take "
            "a draft with the target's tokenizer",
        )
    size = len(target.tokenizer)
    if not alike and target.tokenizer.is_fast and draft.tokenizer.is_fast:
        return Finding(
            "warning",
            name,
            f"the same {size} tokens with the same ids, but text is split into them otherwise",
            "copy the target's tokenizer.json into the draft's directory; drafts read text as the target splits it",
        )
    return Finding("ok", name, f"the same {size} tokens with the same ids")
