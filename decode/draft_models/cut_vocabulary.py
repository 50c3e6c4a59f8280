"""Drafts with a cut vocabulary: a head over the tokens that texts need most (FR-Spec, arXiv 2502.14856, section 3).

Of a small draft with a large vocabulary the head is most of what a forward reads. Few tokens make up most of any text,
so a draft whose head knows those alone is much faster and agrees nearly as often. What it can't propose has q = 0.

Such a draft is an ordinary model directory with its whole embeddings and head, and the ids of the D tokens in
config.json. Its head is cut in memory where it drafts. Shape suffixes: H hidden, V vocabulary, D tokens that it drafts.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from draftsmith.decode.errors import InputError

KEPT_TOKENS = "draft_vocabulary"
"""The key of a draft's config that lists the tokens it drafts, ascending."""
SOFTCAP = "final_logit_softcapping"


def kept_tokens(config: PretrainedConfig, field: str = "draft") -> Tensor | None:
    """Return the tokens that a draft proposes, (D,) int64 on the CPU; None where they are all.

    Args:
        config: the draft's, or its text model's.
        field: what to call it in the error message.

    Raises:
        InputError: the list is not of at least two ascending ids below the vocabulary's size.
    """
    text = config.get_text_config()
    ids, most = getattr(text, KEPT_TOKENS, None), text.vocab_size
    if ids is None:
        return None
    whole = isinstance(ids, list) and len(ids) > 1 and all(type(token) is int for token in ids)
    if not whole or ids[0] < 0 or ids[-1] >= most or ids != sorted(set(ids)):
        raise InputError(f"{field}: expected {KEPT_TOKENS} of at least two ascending ids below {most}, found others")
    return torch.tensor(ids)


class CutHead(nn.Linear):
    """A head that computes D logits and gives −∞ for all other tokens, so that whoever reads them sees V.

    Args:
        head: the whole head, a linear map, of which the D rows are copied.
        tokens_D: ids, int64.
        softcap: bounds the D logits, where the family does so; behind this head −∞ would become finite.
    """

    def __init__(self, head: nn.Module, tokens_D: Tensor, softcap: float | None = None):
        weight, bias = (getattr(head, name, None) for name in ("weight", "bias"))
        assert weight is not None
        super().__init__(weight.shape[1], len(tokens_D), bias is not None, device="meta")
        tokens_D = tokens_D.to(weight.device)
        for name, rows in (("weight", weight), ("bias", bias)):
            if rows is not None:
                setattr(self, name, nn.Parameter(rows.detach()[tokens_D], requires_grad=False))
        self.tokens: Tensor
        self.register_buffer("tokens", tokens_D, persistent=False)
        self.vocab_size, self.softcap = len(weight), softcap

    def forward(self, hidden: Tensor) -> Tensor:
        """Return logits, (…, V), of hidden states (…, H)."""
        logits = super().forward(hidden)
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        nothing = logits.new_full((*logits.shape[:-1], self.vocab_size), -torch.inf)
        return nothing.index_copy(-1, self.tokens, logits)


def cut_head(model: PreTrainedModel, field: str = "draft") -> PreTrainedModel:
    """Cut a loaded draft's head to the tokens that its config lists, in place, and return the draft.

    For inference: it can no longer be trained or saved. One that lists none stays as it is.

    Raises:
        InputError: as `kept_tokens`.
    """
    head: Any = model.get_output_embeddings()
    tokens_D = kept_tokens(model.config, field)
    if tokens_D is not None and not isinstance(head, CutHead):
        text = model.config.get_text_config()
        model.set_output_embeddings(CutHead(head, tokens_D, getattr(text, SOFTCAP, None)))
        setattr(text, SOFTCAP, None)
    return model


def has_whole_head(model: PreTrainedModel) -> bool:
    """Say whether a draft with a cut vocabulary still has its whole head."""
    return kept_tokens(model.config) is not None and not isinstance(model.get_output_embeddings(), CutHead)
