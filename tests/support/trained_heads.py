"""Heads that learnt to guess a tiny target's own text a little: neither always right nor always wrong."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.medusa import MedusaHeads
from draftsmith.train.losses.output_head import last_hidden


def own_texts(target: PreTrainedModel, prompts: Sequence[Tensor], **options: Any) -> list[Tensor]:
    """What the target writes behind each prompt (T,), with the arguments of `generate`; prompts included."""
    torch.manual_seed(7)
    return [
        text
        for prompt in prompts
        for text in target.generate(prompt[None], attention_mask=torch.ones_like(prompt)[None], **options)
    ]


def train_heads(
    target: PreTrainedModel, heads: MedusaHeads, texts: Sequence[Tensor], steps: int = 40, rate: float = 1e-2
) -> MedusaHeads:
    """Fit heads to texts (T,) by cross-entropy: head i at position t predicts token t + 2 + i."""
    examples = []
    with torch.no_grad():
        states = [last_hidden(target, input_ids=text[None])[0] for text in texts]
        embedded = [target.get_input_embeddings()(text) for text in texts]
    for i in range(heads.config.num_heads):
        hidden = torch.cat([h[: -2 - i] for h in states])
        seen = torch.cat([torch.stack([e[1 + j : len(e) - 1 - i + j] for j in range(i + 1)], 1) for e in embedded])
        examples.append((i, hidden, seen, torch.cat([text[2 + i :] for text in texts])))
    heads.train().requires_grad_(True)
    optimizer = torch.optim.Adam(heads.parameters(), lr=rate)
    for _ in range(steps):
        loss = torch.zeros(())
        for i, hidden, seen, labels in examples:
            log_q = heads.logits(i, hidden, seen).log_softmax(-1).gather(-1, labels[:, None])
            # What a truncated vocabulary lacks cannot be learnt.
            loss = loss - log_q[log_q.isfinite()].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return heads.eval().requires_grad_(False)
