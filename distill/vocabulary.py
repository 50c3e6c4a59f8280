"""Fitting a draft's vocabulary to its target's: missing tokens, and head rows beyond the tokenizer.

Verification compares token ids, so an id must mean the same token to draft and target. Rows beyond the tokenizer are
padding, but some servers demand equal numbers of them.
"""

import copy
from collections.abc import Sequence
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from draftsmith.decode.draft_models.cut_vocabulary import KEPT_TOKENS, kept_tokens
from draftsmith.train.losses.cut_vocabulary import whole_rows
from draftsmith.train.models import empty_model

# Random contexts on which the least likely token is determined; no token's usual contexts dominate them.
TEXTS, LENGTH = 4, 64


def fit_vocabulary(draft: PreTrainedModel, tokens: int, size: int | None, trained_padding: Sequence[int] = ()) -> None:
    """Give a draft an embedding and a logit for each of the target's tokens, in place; tied embeddings stay tied.

    Rows of missing tokens are drawn as by `resize_token_embeddings`, around the mean of the others (Hewitt 2021,
    "Initializing New Word Embeddings for Pretrained Language Models"). `size`, the target's `vocab_size`, is the number
    of rows of the head; rows beyond the tokens are silenced. vLLM's method `draft_model`
    (`SpeculativeConfig.verify_equal_vocab_size_if_draft_model`) and `generate(assistant_model=…)` refuse unequal sizes.
    None keeps the rows of a head that has all tokens.
    """
    rows: int = draft.config.get_text_config().vocab_size
    new_rows = max(tokens, rows if size is None else size)
    if new_rows != rows:
        # Drawing around the mean computes a covariance, which padding rows do not need.
        draft.resize_token_embeddings(new_rows, mean_resizing=rows < tokens)
    if size is not None:
        silence_padding(draft, tokens, trained_padding)


def keep_tokens(draft: PreTrainedModel, tokens: Sequence[int]) -> None:
    """Limit a draft to ascending tokens, by its config: see `decode.draft_models.cut_vocabulary`."""
    setattr(draft.config.get_text_config(), KEPT_TOKENS, list(tokens))
    kept_tokens(draft.config)


@torch.no_grad()
def with_whole_head(draft: PreTrainedModel) -> PreTrainedModel:
    """Return a model of all tokens with the same greedy drafts as a draft with a cut vocabulary, for servers.

    Rows that the draft lacks become the mean of the others: see `whole_rows`. Embeddings are no longer tied to the
    head; all other tensors are shared with the draft.
    """
    tokens_D = kept_tokens(draft.config)
    assert tokens_D is not None
    config = copy.deepcopy(draft.config)
    delattr(config.get_text_config(), KEPT_TOKENS)
    for part in (config, config.get_text_config()):
        part.tie_word_embeddings = False
    whole = empty_model(config, field="draft", dtype=draft.dtype)
    head, tensors = draft.get_output_embeddings(), draft.state_dict()
    (index,) = [name for name, module in draft.named_modules() if module is head]
    for name, rows in head.named_parameters():  # type: ignore[union-attr]
        tensors[f"{index}.{name}"] = whole_rows(rows[tokens_D], tokens_D, len(rows))
    whole.load_state_dict(tensors, assign=True)
    whole.generation_config = draft.generation_config
    return whole


@torch.no_grad()
def silence_padding(model: PreTrainedModel, tokens: int, trained_padding: Sequence[int] = ()) -> None:
    """Give an unsharded head's rows beyond the first `tokens` logits so low that they are never drafted, in place.

    The losses ignore these rows, so training does not move them with the hidden states, and their logits could rise
    above all others. Let w₀ be the row of the token with the lowest mean logit, and w̄ the mean of all tokens' rows. The
    rows become 2w₀ − w̄, whose logit is as far below w₀'s as w₀'s is below the mean. `trained_padding` are rows whose
    embeddings training uses; tied ones stay.
    """
    head = model.get_output_embeddings()
    if head is None or next(head.parameters()).shape[0] <= tokens:
        return
    training = model.training
    model.eval()
    ids = torch.randint(tokens, (TEXTS, LENGTH), generator=torch.Generator().manual_seed(0)).to(model.device)
    quiet = model(input_ids=ids, use_cache=False).logits[..., :tokens].float().mean((0, 1)).argmin()
    padding = torch.arange(tokens, len(head.weight), device=model.device)  # type: ignore[arg-type]
    if ties_embeddings(model):
        padding = padding[~torch.isin(padding, torch.tensor(trained_padding, dtype=torch.long, device=padding.device))]
    for rows in head.parameters():  # the matrix, (V, H), and a bias, (V,), in a few families
        rows[padding] = 2 * rows[quiet] - rows[:tokens].mean(0)
    model.train(training)


def ties_embeddings(model: PreTrainedModel) -> bool:
    """Return whether a causal LM's head and embeddings are one tensor."""
    embeddings, head = (cast(Any, part) for part in (model.get_input_embeddings(), model.get_output_embeddings()))
    return head is not None and embeddings.weight is head.weight
