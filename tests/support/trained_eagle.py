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
    """Fit heads to the later halves of texts (T,) by cross-entropy, `depth` steps on their own states; all learn."""
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
            positions, loss = torch.arange(labels_BT.shape[1])[None].expand_as(labels_BT), torch.zeros(())
            half = labels_BT.shape[1] // 2
            for k, step in enumerate(heads.unroll(embeddings_BTH, features_BTF, positions, depth)):
                log_q = heads.widened(heads.head(step[:, half:])).log_softmax(-1)
                log_q = log_q.gather(-1, labels_BT[:, half + k :, None])
                # What a truncated vocabulary lacks cannot be learnt.
                loss = loss - log_q[log_q.isfinite()].mean() * len(labels_BT) / len(texts)
            loss.backward()
        optimizer.step()
    return heads.eval().requires_grad_(False)


@torch.no_grad()
def fused_states(target: PreTrainedModel, heads: EagleHeads, text: Tensor) -> Tensor:
    """The target's states of a text (T,) as heads read them, (1, T, H)."""
    with collect_features(target, heads.layer_ids) as features:
        target(text[None])
    return heads.fuse(features[0])


@torch.no_grad()
def drafted(target: PreTrainedModel, heads: EagleHeads, text: Tensor, states: Tensor, length: int) -> list[int]:
    """What heads draft after a text (T,) at T=0, with the states of all its tokens but the last."""
    tokens, path = text[1:], list[int]()
    for _ in range(length):
        step = heads(target.get_input_embeddings()(tokens)[None], states, torch.arange(len(tokens))[None])
        path.append(int(heads.widened(heads.head(step.hidden[0, -1])).argmax()))
        states = torch.cat([states, step.states[:, -1:]], 1)
        tokens = torch.cat([tokens, tokens.new_tensor(path[-1:])])
    return path
