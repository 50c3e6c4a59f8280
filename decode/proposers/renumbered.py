"""Tokenizers that are the same but for the numbers of their tokens, and the special tokens that two tokenizers share.

Names tell target and draft ids apart: `tokens` are the target's, `ids` the draft's.
"""

import copy
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast


def matching_ids(draft: PreTrainedTokenizerBase, target: PreTrainedTokenizerBase) -> dict[int, int] | None:
    """Return the draft's id of each of the target's, where both split every text into the same pieces; else None.

    That is so where normalizer, pre-tokenizer, decoder and model (its pieces, and their merges or scores) are equal but
    for the pieces' ids. Equal pieces alone prove nothing: with other merges the draft would read text split as it never
    saw in training. Added tokens may differ. Those of the target that the draft lacks are missing from the result,
    unless they play the role (beginning and end of text, padding, unknown) of one that the draft has.

    Tokenizers that are not of the `tokenizers` library do not show how they split, and match nothing.
    """
    if not isinstance(draft, PreTrainedTokenizerFast) or not isinstance(target, PreTrainedTokenizerFast):
        return None
    if _pipeline(draft) != _pipeline(target):
        return None
    draft_ids = draft.get_vocab()
    ids = {token: draft_ids[piece] for piece, token in target.get_vocab().items() if piece in draft_ids}
    return _same_roles(draft, target) | ids


def renumbered(draft_model: PreTrainedModel, ids: Mapping[int, int], stand_in: int) -> PreTrainedModel:
    """Return a view of a model that reads and writes another tokenizer's ids: it shares all weights.

    For `DraftModelProposer(renumbered(…))`. It drafts no token that only the draft model has, for their logits are
    not there when the softmax is taken; the target's tokens that it lacks have probability zero.

    Args:
        draft_model: a causal LM.
        ids: its id of each of the target's; pairs beyond its head's width are left out.
        stand_in: its id to read where it has none.
    """
    width = draft_model.config.get_text_config().vocab_size
    # One entry more than there are ids: the target's padding entries, which some targets do write.
    table = torch.full((max(ids) + 2,), -1, device=draft_model.device)
    for token, draft_id in ids.items():
        if draft_id < width:
            table[token] = draft_id
    read, written = table.masked_fill(table < 0, stand_in), table[:-1].clamp(min=0)
    # Of several tokens that are one to the draft model, it writes the last: the end of the text, not its beginning.
    writer = {draft_id: token for token, draft_id in ids.items()}
    lacking = table[:-1] < 0
    for token, draft_id in ids.items():
        lacking[token] |= writer[draft_id] != token
    is_whole = not bool(lacking.any())

    def forward(input_ids: Tensor, **inputs: Any) -> Any:
        output: Any = draft_model(input_ids=read[input_ids.clamp(max=len(read) - 1)], **inputs)
        logits = output.logits[..., written]
        output.logits = logits if is_whole else logits.masked_fill(lacking, float("-inf"))
        return output

    view: Any = copy.copy(draft_model)
    view.forward = forward
    return view


def _pipeline(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """Return all that decides how text is split, without ids and added tokens."""
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    added = {token["content"] for token in content["added_tokens"]}
    model = content["model"]
    vocab = model["vocab"]
    if isinstance(vocab, list):  # Unigram's pieces and scores, in the order of their ids
        model["unk_id"] = None if model["unk_id"] is None else vocab[model["unk_id"]][0]
        scores = dict(vocab)
    else:
        scores = dict.fromkeys(vocab)
    model["vocab"] = {piece: score for piece, score in scores.items() if piece not in added}
    return {part: content[part] for part in ("normalizer", "pre_tokenizer", "decoder", "model")}


def _same_roles(to: PreTrainedTokenizerBase, of: PreTrainedTokenizerBase) -> dict[int, int]:
    """Map the tokens that begin and end texts, pad, or stand for what is unknown."""
    pairs = ((getattr(of, role), getattr(to, role)) for role in (f"{r}_token_id" for r in ("unk", "pad", "bos", "eos")))
    return {a: b for a, b in pairs if a is not None and b is not None}


def same_specials(to: PreTrainedTokenizerBase, of: PreTrainedTokenizerBase) -> dict[int, int]:
    """Map the special tokens that both have, by name or else by role."""
    known, known_specials, specials = to.get_vocab(), special_tokens(to), special_tokens(of)
    ids = {token: known.get(piece) for piece, token in of.get_vocab().items() if token in specials}
    return _same_roles(to, of) | {token: known_id for token, known_id in ids.items() if known_id in known_specials}


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the tokens that are no text. Added tokens that are not special are text, such as runs of spaces."""
    added = tokenizer.added_tokens_decoder
    return frozenset(tokenizer.all_special_ids) | {token for token, entry in added.items() if entry.special}


def stand_in(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the token that says the least."""
    candidates = (tokenizer.unk_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id)
    return next((token for token in candidates if token is not None), 0)
