"""A parallel draft that learnt to guess a target's text a little behind its masks, by eager forwards of each text."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.distill.parallel.layout import LENGTH, MASK_TOKEN, visible_entries


def as_parallel(draft: PreTrainedModel, mask: int, length: int) -> PreTrainedModel:
    """Write into a draft's config that it drafts so many tokens in one forward, which it has not learnt."""
    setattr(draft.config, MASK_TOKEN, mask)
    setattr(draft.config, LENGTH, length)
    return draft


def train_parallel(
    draft: PreTrainedModel, mask: int, length: int, texts: Sequence[Tensor], steps: int = 20, rate: float = 2e-3
) -> PreTrainedModel:
    """Make a draft one of `length` tokens a forward, and fit it to texts (T,) with masks behind each token."""
    as_parallel(draft, mask, length)
    optimizer = torch.optim.Adam(draft.train().requires_grad_(True).parameters(), lr=rate)
    for step in range(steps):
        text = texts[step % len(texts)]
        indices = torch.arange(len(text) - length)
        # The text, then the masks of every anchor.
        anchors = torch.cat([indices, indices.repeat_interleave(length - 1)])
        positions = torch.cat([indices, (indices[:, None] + torch.arange(1, length)).flatten()])
        visible = visible_entries(positions[None], anchors[None])
        hidden = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)[:, None]
        ids = torch.cat([text[: len(indices)], torch.full((len(anchors) - len(indices),), mask)])
        logits = draft(input_ids=ids[None], attention_mask=hidden, position_ids=positions[None], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits[0], text[positions + 1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return draft.eval().requires_grad_(False)
