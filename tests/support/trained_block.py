"""Block drafters that learnt to guess a tiny target's own text a little."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.cache.features import collect_features
from draftsmith.medusa.block.blocks import Anchors, block_states, tokens_before
from draftsmith.medusa.block.model import BlockDrafter


def train_block(
    target: PreTrainedModel, drafter: BlockDrafter, texts: Sequence[Tensor], steps: int = 60, rate: float = 3e-3
) -> BlockDrafter:
    """Fit a drafter to texts (T,) by cross-entropy, from the anchors of their later halves; all its weights learn."""
    embed, head, examples = target.get_input_embeddings(), drafter.head_for(target), []
    with torch.no_grad(), collect_features(target, drafter.layer_ids) as features:
        for length in {len(text) for text in texts}:
            ids_BT = torch.stack([text for text in texts if len(text) == length])
            target(ids_BT)
            examples.append((features.pop(), ids_BT))
    drafter.train().requires_grad_(True)
    optimizer, guesses = torch.optim.Adam(drafter.parameters(), lr=rate), drafter.config.guesses
    for _ in range(steps):
        optimizer.zero_grad()
        for features_BTF, ids_BT in examples:
            rows, length = ids_BT.shape
            positions = torch.arange(length)[None].expand(rows, -1)
            indices_BN = positions[:, length // 2 : length - guesses]
            context = drafter.context(drafter.fuse(features_BTF), positions)
            hidden_BNSH = block_states(drafter, embed, context, Anchors.at(indices_BN, ids_BT, positions))
            behind_NK = indices_BN[0][:, None] + torch.arange(guesses)
            sides = drafter.sides(hidden_BNSH, tokens_before(drafter, ids_BT, None, indices_BN), embed)
            logits = drafter.widened(drafter.logits(drafter.guessing(hidden_BNSH), sides, head))
            log_q = logits.log_softmax(-1).gather(-1, ids_BT[:, behind_NK + 1][..., None])
            # What a truncated vocabulary lacks cannot be learnt.
            (-log_q[log_q.isfinite()].mean() * rows / len(texts)).backward()
        optimizer.step()
    return drafter.eval().requires_grad_(False)
