"""EAGLE-3 heads that learnt to guess a tiny target's own text a little, and what they draft, without any cache."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.cache.features import collect_features
from draftsmith.medusa.eagle.heads import EagleHeads


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
    with torch.no_grad(), collect_features(target, heads.layer_ids) as features:
        for length in {len(text) for text in texts}:
            ids_BT = torch.stack([text for text in texts if len(text) == length])
            target(ids_BT[:, :-2])
            examples.append((target.get_input_embeddings()(ids_BT[:, 1:-1]), features.pop(), ids_BT[:, 2:]))
    heads.train().requires_grad_(True)
    optimizer = torch.optim.Adam(heads.parameters(), lr=rate)
    for _ in range(steps):
        optimizer.zero_grad()
        for embeddings_BTH, features_BTF, labels_BT in examples:
            positions = torch.arange(labels_BT.shape[1])[None].expand_as(labels_BT)
            for k, step in enumerate(heads.unroll(embeddings_BTH, features_BTF, positions, depth)):
                log_q = heads.widened(heads.head(step)).log_softmax(-1).gather(-1, labels_BT[:, k:, None])
                # What a truncated vocabulary lacks cannot be learnt.
                share = len(labels_BT) / len(texts)
                (-log_q[log_q.isfinite()].mean() * share).backward(retain_graph=k + 1 < depth)
        optimizer.step()
    return heads.eval().requires_grad_(False)


@torch.no_grad()
def logits_after(target: PreTrainedModel, heads: EagleHeads, text: Tensor, path: Sequence[int]) -> Tensor:
    """The heads' logits, (V,), after a text (T,), of which the target has seen all but the last token, and a path.

    Everything is computed anew.
    """
    with collect_features(target, heads.layer_ids) as features:
        target(text[None, :-1])
    states, tokens = heads.fuse(features[0]), text[1:]
    for token in [*path, None]:
        step = heads(target.get_input_embeddings()(tokens)[None], states, torch.arange(len(tokens))[None])
        if token is not None:
            states, tokens = (
                torch.cat([states, step.states[:, -1:]], 1),
                torch.cat([tokens, tokens.new_tensor([token])]),
            )
    return heads.widened(heads.head(step.hidden[0, -1]))


def drafted(target: PreTrainedModel, heads: EagleHeads, text: Tensor, length: int) -> list[int]:
    """What heads draft behind a text (T,) at T=0."""
    path: list[int] = []
    for _ in range(length):
        path.append(int(logits_after(target, heads, text, path).argmax()))
    return path
