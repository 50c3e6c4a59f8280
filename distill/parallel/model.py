"""The mask token of a draft that learns to draft in parallel, and its forward over texts with masks."""

import functools
import os
import sys
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.cache.attention import implementation_of
from draftsmith.decode.cache.kernels import additive_mask
from draftsmith.decode.draft_models.vocabulary import token_count
from draftsmith.decode.errors import InputError
from draftsmith.distill.parallel.layout import LENGTH, MASK_TOKEN, TREE, mask_token_of, unused_token, visible_entries
from draftsmith.distill.vocabulary import ties_embeddings
from draftsmith.train.losses.output_head import last_hidden
from draftsmith.train.models import set_attention, uses_varlen_attention

COMPILED_ON = {"cuda"}  # device types on which block masks are compiled


def make_parallel(
    draft: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, length: int, token: int | str | None = None
) -> None:
    """Make an unsharded draft learn to draft K = `length` tokens in one forward: set its config and mask token.

    `token` is an id, or a token as the tokenizer writes it; None keeps the draft's own, or takes an unused one. A new
    mask token's embedding is set to the mean of all tokens'.

    Raises:
        InputError: no such token, or no unused one.
    """
    config = draft.config.get_text_config()
    own_token, embeddings = getattr(config, MASK_TOKEN, None), cast(Any, draft.get_input_embeddings())
    embeddings.padding_idx = None  # the padding row, which may serve as mask, would get no gradient
    setattr(config, LENGTH, length)
    config.__dict__.pop(TREE, None)  # a tree that was searched for the draft will no longer fit
    if own_token is not None and token is None:
        mask_token_of(draft)
        return
    if isinstance(token, str):
        vocabulary = tokenizer.get_vocab()
        if token not in vocabulary:
            raise InputError(f"parallel_mask_token: expected a token of the tokenizer, found {token!r}")
        token = vocabulary[token]
    elif token is None:
        token = unused_token(tokenizer, config.vocab_size)
    setattr(config, MASK_TOKEN, token)
    mask_token_of(draft)
    if token != own_token:
        with torch.no_grad():
            embeddings.weight[token] = embeddings.weight[: token_count(tokenizer, config)].float().mean(0)


def loss_vocabulary(draft: PreTrainedModel, tokens: int) -> int:
    """Return the number of the head's rows in the loss: the tokens', and the mask token's if embeddings are tied."""
    # A tied row moves with the mask's embedding, so it must also learn that no text contains it.
    return max(tokens, mask_token_of(draft) + 1) if ties_embeddings(draft) else tokens


def choose_attention(draft: PreTrainedModel, name: str | None) -> None:
    """Set a draft's attention implementation, with sdpa in place of one that takes no masks."""
    set_attention(draft, name)
    if uses_varlen_attention(draft):
        refused = implementation_of(draft)
        set_attention(draft, "sdpa")
        if os.environ.get("RANK", "0") == "0":
            print(f"attn_implementation: the draft learns under sdpa, for {refused} takes no masks", file=sys.stderr)


def parallel_hidden(
    model: PreTrainedModel, input_ids: Tensor, position_ids: Tensor, anchors: Tensor, texts: Tensor | None = None
) -> Tensor:
    """Return the last hidden states of texts and masks, (B, L, H); the arguments are those of `visible_entries`."""
    mask = _attention_mask(model, position_ids, anchors, texts)
    return last_hidden(model, input_ids=input_ids, position_ids=position_ids, attention_mask=mask)


def _attention_mask(model: PreTrainedModel, positions_BL: Tensor, anchors_BL: Tensor, texts_BL: Tensor | None) -> Any:
    """Return the mask of a forward in the library's format: a dict by layer type if the family's layers differ."""
    config = model.config.get_text_config()
    window: int = getattr(config, "sliding_window", None) or 0
    kinds = set(getattr(config, "layer_types", None) or ())
    flex = implementation_of(model) == "flex_attention"

    def mask(within: int) -> Any:
        if flex:
            return _blocks(positions_BL, anchors_BL, texts_BL, within)
        visible_BLL = visible_entries(positions_BL, anchors_BL, texts_BL)
        if within:
            visible_BLL &= positions_BL[:, :, None] - positions_BL[:, None, :] < within
        device = visible_BLL.device.type  # the dtype of an additive mask is that of attention
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else model.dtype
        return additive_mask(visible_BLL[:, None], dtype, torch.finfo(dtype).min)

    if not kinds:
        return mask(window)
    return {kind: mask(window if kind == "sliding_attention" else 0) for kind in sorted(kinds)}


def _blocks(positions_BL: Tensor, anchors_BL: Tensor, texts_BL: Tensor | None, window: int) -> Any:
    """Return the block mask of flex attention, by the rule of `visible_entries` for one pair of entries."""

    def visible(b: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        position_q, position_k, anchor_q, anchor_k = (
            positions_BL[b, q], positions_BL[b, k], anchors_BL[b, q], anchors_BL[b, k],
        )  # fmt: skip
        is_text = anchor_k == position_k
        same_draft = (anchor_k == anchor_q) & (anchor_q != position_q) & (position_k <= position_q)
        is_visible = torch.where(is_text, position_k <= anchor_q, same_draft)
        if texts_BL is not None:
            is_visible = is_visible & (texts_BL[b, q] == texts_BL[b, k])
        return is_visible & (position_q - position_k < window) if window else is_visible

    rows, length = positions_BL.shape
    device = positions_BL.device
    return _create_block_mask(device.type in COMPILED_ON)(visible, rows, None, length, length, device=device)


@functools.cache
def _create_block_mask(compiled: bool) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    # The eager function stores numbers for each pair of entries; the compiled one does not. It is dynamic, since
    # lengths change with each step.
    return torch.compile(create_block_mask, dynamic=True) if compiled else create_block_mask


@torch.no_grad()
def require_masks(draft: PreTrainedModel) -> None:
    """Raise an InputError if a draft's attention does not respect the mask.

    Texts must have the hidden states that they have without masks, and masks those of a plain forward over their prefix
    and themselves. The draft must have the device and attention of its training.
    """
    token, training, alike = mask_token_of(draft), draft.training, False
    draft.eval()
    try:
        device = draft.device
        text = torch.randint(
            draft.config.get_text_config().vocab_size, (7,), generator=torch.Generator().manual_seed(0)
        )
        masks = torch.full((4,), token)
        ids = torch.cat([text, masks])[None].to(device)
        # Two masks after x_3, and two after x_5.
        positions = torch.cat([torch.arange(7), torch.tensor([4, 5, 6, 7])])[None].to(device)
        anchors = torch.cat([torch.arange(7), torch.tensor([3, 3, 5, 5])])[None].to(device)
        hidden = parallel_hidden(draft, ids, positions, anchors)[0]
        tolerance = 1e-4 if hidden.dtype in (torch.float32, torch.float64) else 0.05
        close = []
        for prefix, states in ((7, hidden[:7]), (4, hidden[7:9]), (6, hidden[9:])):
            alone = torch.cat([text[:prefix], masks[: 0 if prefix == 7 else 2]])[None].to(device)
            expected = last_hidden(draft, input_ids=alone)[0, -len(states) :]
            close.append(bool((states - expected).norm() <= tolerance * expected.norm()))
        alike = all(close)
    except (AttributeError, TypeError, ValueError):
        pass
    finally:
        draft.train(training)
    if not alike:
        raise InputError(
            "parallel: expected a family whose attention keeps to a mask of texts and mask tokens, found "
            f"{type(draft).__name__} with {implementation_of(draft)} attention"
        )
