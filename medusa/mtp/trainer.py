"""Training of MTP layers on a frozen target, whose head they share.

The K steps of all rounds run on the target's last hidden states, and each step's loss is computed on a chunk of
positions at a time, so that steps × tokens × vocabulary is never held. The loss of step k has the weight decay^k
(DeepSeek-AI 2024, equation 25, with the target's distributions in place of its text; FastMTP for one layer).

Shape suffixes: B rows, T positions, N chosen positions, K steps, H hidden.
"""

from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.decode.cache.kernels import computing_dtype
from draftsmith.medusa.mtp.config import MtpTrainingConfig
from draftsmith.medusa.mtp.heads import MtpHeads
from draftsmith.medusa.target_states import TargetStates
from draftsmith.medusa.trainer import FeatureTrainer
from draftsmith.train.job.flops import Work


def states_of_steps(
    heads: MtpHeads, target_states: TargetStates, position_ids: Tensor | None, indices_N: Tensor, num_steps: int
) -> list[Tensor]:
    """Return each step's inputs of the head at positions c of the flat batch, (N, H); undefined if it learns nothing.

    Step k guesses token c + 1, in the round that begins at c − 1 − k. In packed rows `position_ids`, (B, T), are the
    positions; without them each row is one text.
    """
    length = target_states.hidden.shape[1]
    positions = torch.arange(length, device=indices_N.device)[None] if position_ids is None else position_ids
    positions, dtype = positions[:, :-1], computing_dtype(next(heads.parameters()))
    embeddings, hidden = target_states.embeddings[:, 1:].to(dtype), target_states.hidden[:, :-1].to(dtype)
    texts = None if position_ids is None else (positions == 0).cumsum(1)
    steps = heads.unroll(embeddings, hidden, positions, num_steps, texts)
    row_N, column_N = indices_N // length, indices_N % length
    # A batch of short rows may have no round of this length, and nothing to learn from it.
    steps += [steps[0]] * (num_steps - len(steps))
    return [step[row_N, (column_N - 1 - k).clamp(min=0)] for k, step in enumerate(steps)]


def work_of_steps(heads: MtpHeads, num_steps: int) -> Work | None:
    """Return the arithmetic of K steps, a layer and the target's head in each; None if a layer's is not known."""
    layers = list(heads.layers) if len(heads.layers) > 1 else [*heads.layers] * num_steps
    parts: Any = heads.layers
    queries = getattr(getattr(parts[0].mtp_block, "self_attn", None), "q_proj", None)
    if not isinstance(queries, nn.Linear) or any(parameter.ndim == 3 for parameter in heads.parameters()):
        return None
    decoder, logits = Work.of_maps(*layers).head, heads.config.hidden_size * heads.config.vocab_size * num_steps
    return Work(decoder, logits, 2 * queries.out_features * num_steps, decoder / (decoder + logits))


class MtpTrainer(FeatureTrainer):
    """The trainer that minimises Σ_k decay^k · objective of step k on completions, against the target or their text."""

    states_of_steps = staticmethod(states_of_steps)
    cause_of_bad_new_heads = "the layers do not follow the target's states; try a lower training.learning_rate"

    @staticmethod
    def guesses(heads: MtpHeads, config: MtpTrainingConfig) -> int:
        """Return K, the number of steps."""
        return config.steps_of(len(heads.layers))

    @staticmethod
    def loss_maps(heads: MtpHeads) -> list[nn.Module]:
        """Return none: the head is the target's."""
        return []

    def trained_work(self) -> Work | None:
        """Return the arithmetic of the K steps."""
        return work_of_steps(self.heads, self.count)
