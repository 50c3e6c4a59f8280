"""Tokenizers that differ only in their tokens' ids.

`tokens` are the target's, `ids` are the draft's.
"""

import copy
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast


def matching_ids(draft: PreTrainedTokenizerBase, target: PreTrainedTokenizerBase) -> dict[int, int] | None:
    """Map the target's ids to the draft's if both tokenizers split every text into the same pieces; else return None.

    Normalizer, pre-tokenizer, decoder and model (pieces, and their merges or scores) must be equal apart from ids.
    Equal pieces do not suffice: with other merges the draft would read splits that it never saw in training. Added
    tokens may differ. Target tokens that the draft lacks are missing from the map, unless they share a role (beginning
    or end of text, padding, unknown) with one of the draft's.
    """
    if not isinstance(draft, PreTrainedTokenizerFast) or not isinstance(target, PreTrainedTokenizerFast):
        return None  # only the `tokenizers` library shows how a tokenizer splits
    if _pipeline(draft) != _pipeline(target):
        return None
    draft_ids = draft.get_vocab()
    ids = {token: draft_ids[piece] for piece, token in target.get_vocab().items() if piece in draft_ids}
    return _same_roles(draft, target) | ids


def renumber_draft(draft_model: PreTrainedModel, ids: Mapping[int, int], stand_in: int) -> PreTrainedModel:
    """Return a view of a causal LM that reads and writes another tokenizer's ids and shares all weights.

    `ids` maps the target's ids to the model's; it reads `stand_in` for ids that are not in the map. Tokens that only
    one of the two has get probability zero.
    """
    width = draft_model.config.get_text_config().vocab_size
    # One entry more than there are ids, for the target's padding entries, which some targets generate.
    table = torch.full((max(ids) + 2,), -1, device=draft_model.device)
    for token, draft_id in ids.items():
        if draft_id < width:
            table[token] = draft_id
    read, written = table.masked_fill(table < 0, stand_in), table[:-1].clamp(min=0)
    # Where several tokens map to one id, the model writes the last of them: the end of the text, not its beginning.
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
    """Return the settings that decide how text is split, without ids and added tokens."""
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


def _same_roles(to: PreTrainedTokenizerBase, source: PreTrainedTokenizerBase) -> dict[int, int]:
    """Map the tokens for unknown text, padding, and the beginning and end of texts."""
    roles = [f"{role}_token_id" for role in ("unk", "pad", "bos", "eos")]
    pairs = ((getattr(source, role), getattr(to, role)) for role in roles)
    return {a: b for a, b in pairs if a is not None and b is not None}


def stand_in(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the token to read in place of a missing one."""
    candidates = (tokenizer.unk_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id)
    return next((token for token in candidates if token is not None), 0)
