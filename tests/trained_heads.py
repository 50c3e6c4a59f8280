"""Heads that learnt to guess a tiny target's own text a little: neither always right nor always wrong."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.medusa import MedusaHeads
from draftsmith.train.heads import last_hidden


def own_texts(target: PreTrainedModel, count: int, new: int, **options: Any) -> Tensor:
    """Texts that the target wrote behind random prompts of 4 tokens, (count, 4 + new)."""
    vocab_size = target.config.get_text_config().vocab_size
    prompts = torch.randint(1, vocab_size, (count, 4), generator=torch.Generator().manual_seed(7))
    torch.manual_seed(7)
    return target.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=new, **options)


def train_heads(target: PreTrainedModel, heads: MedusaHeads, texts: Tensor, steps: int = 60) -> MedusaHeads:
    """Fit the heads to texts (B, T) by cross-entropy: head i at position t predicts token t + 2 + i."""
    count, length = heads.config.num_heads, texts.shape[1]
    with torch.no_grad():
        hidden = last_hidden(target, input_ids=texts)
        embedded = target.get_input_embeddings()(texts)
    heads.train().requires_grad_(True)
    optimizer = torch.optim.Adam(heads.parameters(), lr=1e-2)
    for _ in range(steps):
        loss = hidden.new_zeros(())
        for i in range(count):
            places = length - 2 - i
            seen = torch.stack([embedded[:, 1 + j : 1 + j + places] for j in range(i + 1)], dim=2)
            logits = heads.logits(i, hidden[:, :places], seen)
            # What a truncated vocabulary lacks cannot be learnt.
            label_log_q = logits.log_softmax(-1).gather(-1, texts[:, 2 + i :, None])
            loss = loss - label_log_q[label_log_q.isfinite()].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return heads.eval().requires_grad_(False)
