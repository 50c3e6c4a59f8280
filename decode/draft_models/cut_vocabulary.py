"""Drafts with a cut vocabulary: a head over the most frequent tokens (FR-Spec, arXiv 2502.14856, section 3).

Few tokens make up most of any text, and the head of a small draft is most of what a forward reads: with a cut head it
is much faster and agrees nearly as often. Tokens outside have q = 0. Such a draft is an ordinary model directory with
its whole head, which is cut in memory. Shape suffixes: H hidden, V vocabulary, D drafted tokens, listed in config.json.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from draftsmith.decode.errors import InputError

KEPT_TOKENS = "draft_vocabulary"  # the key of a draft's config that lists the tokens it drafts, ascending
SOFTCAP = "final_logit_softcapping"


def kept_tokens(config: PretrainedConfig, field: str = "draft") -> Tensor | None:
    """Return the tokens that a draft proposes, (D,) int64 on the CPU; None where it proposes all.

    Raises an `InputError` that begins with `field`, unless they are two or more ascending ids in the vocabulary.
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
    """A head that copies D rows of a linear head and gives −∞ for all other tokens, so that its output has V logits."""

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
        """Return logits, (…, V), for hidden states (…, H)."""
        logits = super().forward(hidden)
        if self.softcap is not None:  # the family's own, applied later, would make −∞ finite
            logits = torch.tanh(logits / self.softcap) * self.softcap
        nothing = logits.new_full((*logits.shape[:-1], self.vocab_size), -torch.inf)
        return nothing.index_copy(-1, self.tokens, logits)


def cut_head(model: PreTrainedModel, field: str = "draft") -> PreTrainedModel:
    """Cut a loaded draft's head, in place, to the tokens that its config lists, if any; return the draft.

    It can then no longer be trained or saved. Raises an `InputError` as `kept_tokens` does.
    """
    head: Any = model.get_output_embeddings()
    tokens_D = kept_tokens(model.config, field)
    if tokens_D is not None and not isinstance(head, CutHead):
        text = model.config.get_text_config()
        model.set_output_embeddings(CutHead(head, tokens_D, getattr(text, SOFTCAP, None)))
        setattr(text, SOFTCAP, None)
    return model


def has_whole_head(model: PreTrainedModel) -> bool:
    """Return whether a draft with a cut vocabulary still has its whole head."""
    return kept_tokens(model.config) is not None and not isinstance(model.get_output_embeddings(), CutHead)
