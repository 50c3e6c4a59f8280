"""Fitting a draft's vocabulary to its target's: the tokens it lacks, and head rows that are no token.

Verification compares token ids, so draft and target must mean the same by an id. How many rows their heads have beyond
the tokenizer is padding; some servers demand that it be equal all the same.
"""

import copy
from collections.abc import Sequence
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from draftsmith.decode.draft_models.cut_vocabulary import KEPT_TOKENS, kept_tokens
from draftsmith.train.losses.cut_vocabulary import whole_rows
from draftsmith.train.models import empty_model

# Contexts on which the least likely token is found: random tokens, which the usual contexts of no token dominate.
TEXTS, LENGTH = 4, 64


def fit_vocabulary(draft: PreTrainedModel, tokens: int, size: int | None, trained_padding: Sequence[int] = ()) -> None:
    """Give a draft an embedding and a logit for each token that the target can write, in place.

    Rows of tokens that it lacks are drawn as `resize_token_embeddings` does, around the mean of the others (Hewitt
    2021, "Initializing New Word Embeddings for Pretrained Language Models").

    Args:
        draft: the draft model; tied embeddings stay tied.
        tokens: the target's (`token_count`).
        size: the rows that the head is to have, the target's `vocab_size`; those beyond the tokens are silenced (see
            `silence_padding`). vLLM's method `draft_model` (`SpeculativeConfig.verify_equal_vocab_size_if_draft_model`)
            and `generate(assistant_model=…)` refuse pairs of unequal sizes, though ids beyond the tokenizer mean
            nothing. None leaves a head alone that has a row for each token.
        trained_padding: as in `silence_padding`.
    """
    rows: int = draft.config.get_text_config().vocab_size
    wanted = max(tokens, rows if size is None else size)
    if wanted != rows:
        # Drawing around the mean takes a covariance: not for rows that are padding.
        draft.resize_token_embeddings(wanted, mean_resizing=rows < tokens)
    if size is not None:
        silence_padding(draft, tokens, trained_padding)


def keep_tokens(draft: PreTrainedModel, tokens: Sequence[int]) -> None:
    """Have a draft propose these ascending tokens alone: its config says so (`decode.draft_models.cut_vocabulary`)."""
    setattr(draft.config.get_text_config(), KEPT_TOKENS, list(tokens))
    kept_tokens(draft.config)


@torch.no_grad()
def with_whole_head(draft: PreTrainedModel) -> PreTrainedModel:
    """Return a draft of all tokens that drafts what one with a cut vocabulary does, where it drafts the most likely.

    For servers, which read every row of a head: those that the draft lacks become the mean of the others, as
    `whole_rows` does. Embeddings that were the head are no longer. Beside the head all tensors are the draft's own.

    Args:
        draft: as `load_model` returns it, with a cut vocabulary.
    """
    tokens_D = kept_tokens(draft.config)
    assert tokens_D is not None
    config = copy.deepcopy(draft.config)
    delattr(config.get_text_config(), KEPT_TOKENS)
    for each in {id(c): c for c in (config, config.get_text_config())}.values():
        each.tie_word_embeddings = False
    whole = empty_model(config, field="draft", dtype=draft.dtype)
    head, tensors = draft.get_output_embeddings(), draft.state_dict()
    (place,) = [name for name, module in draft.named_modules() if module is head]
    for name, rows in head.named_parameters():  # type: ignore[union-attr]
        tensors[f"{place}.{name}"] = whole_rows(rows[tokens_D], tokens_D, len(rows))
    whole.load_state_dict(tensors, assign=True)
    whole.generation_config = draft.generation_config
    return whole


@torch.no_grad()
def silence_padding(model: PreTrainedModel, tokens: int, trained_padding: Sequence[int] = ()) -> None:
    """Give the head's rows beyond the tokenizer logits so low that they are never drafted, in place.

    The losses cut them off, so that training leaves them where they are while the hidden states move on: without this
    their logits could rise above all others. With w₀ the row of the token whose mean logit is the lowest and w̄ the mean
    of all tokens' rows, they become 2w₀ − w̄, whose logit lies as far below w₀'s as that lies below the mean.

    Args:
        model: a causal LM, whole on its device.
        tokens: rows that are tokens, from the first.
        trained_padding: rows beyond them whose embeddings training uses: where these are the head's rows, they stay.
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
    """Say whether a causal LM's head is its embeddings, one tensor in two places."""
    embeddings, head = (cast(Any, end) for end in (model.get_input_embeddings(), model.get_output_embeddings()))
    return head is not None and embeddings.weight is head.weight
