"""EAGLE-3 heads that learnt to guess a tiny target's own text a little, and what they draft, without any cache."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.medusa.eagle.features import collected
from draftsmith.medusa.eagle.heads import EagleHeads
from draftsmith.medusa.eagle.unrolled import unrolled


def train_eagle(
    target: PreTrainedModel,
    heads: EagleHeads,
    texts: Sequence[Tensor],
    steps: int = 40,
    rate: float = 2e-3,
    depth: int = 3,
) -> EagleHeads:
    """Fit heads to texts (T,) by cross-entropy, through `depth` steps on their own states; all their weights learn."""
    examples = []
    with torch.no_grad(), collected(target, heads.layer_ids) as features:
        for text in texts:
            target(text[None, :-1])
            examples.append((target.get_input_embeddings()(text[None, 1:-1]), features.pop()[:, :-1], text))
    heads.train().requires_grad_(True)
    optimizer = torch.optim.Adam(heads.parameters(), lr=rate)
    for _ in range(steps):
        optimizer.zero_grad()
        for embeddings_BTH, features_BTF, text in examples:
            positions = torch.arange(len(text) - 2)[None]
            for k, step in enumerate(unrolled(heads, embeddings_BTH, features_BTF, positions, depth)):
                log_q = heads.widened(heads.head(step.hidden[0])).log_softmax(-1).gather(-1, text[2 + k :, None])
                # What a truncated vocabulary lacks cannot be learnt.
                (-log_q[log_q.isfinite()].mean() / len(examples)).backward(retain_graph=k + 1 < depth)
        optimizer.step()
    return heads.eval().requires_grad_(False)


@torch.no_grad()
def drafted(target: PreTrainedModel, heads: EagleHeads, text: Tensor, length: int) -> list[int]:
    """What heads draft behind a text (T,), of which the target has seen all but the last token: everything anew."""
    with collected(target, heads.layer_ids) as features:
        target(text[None, :-1])
    embed, states = target.get_input_embeddings(), heads.fuse(features[0])
    tokens = text[None, 1:]
    for _ in range(length):
        step = heads(embed(tokens), states, torch.arange(tokens.shape[1])[None])
        guess = heads.widened(heads.head(step.hidden[:, -1])).argmax(-1)
        tokens, states = torch.cat([tokens, guess[None]], 1), torch.cat([states, step.states[:, -1:]], 1)
    return tokens[0, len(text) - 1 :].tolist()
