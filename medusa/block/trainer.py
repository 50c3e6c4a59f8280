"""Training of block drafters on a frozen target: blocks after anchors that are drawn anew in each step.

One forward of the target gives the features, and the last hidden states, from which its distributions are computed. The
blocks after some anchors of each row follow, and the loss of all of their guesses, a chunk at a time: guesses ×
vocabulary is never held. The sum over the drawn anchors is scaled to estimate the sum over all anchors.

The draw depends only on the step and on the tokens there: any number of processes draws the same anchors, and so does a
resumed run.

Shape suffixes: B rows, T positions, N anchors, K guesses, M = B · N · K, H hidden.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from draftsmith.medusa.block.blocks import (
    SHARE,
    anchors_at_once,
    anchors_of,
    states_of_blocks,
    tokens_before,
    work_of_blocks,
)
from draftsmith.medusa.block.config import BlockTrainingConfig
from draftsmith.medusa.block.heads.base import limited
from draftsmith.medusa.block.model import BlockDrafter
from draftsmith.medusa.target_states import TargetStates
from draftsmith.medusa.trainer import ChainPositions, FeaturesOf, FeatureTrainer
from draftsmith.train.job.flops import Work
from draftsmith.train.losses.chunked import chunked_features, chunked_sum
from draftsmith.train.losses.distributions import LiveDistributions, WholeLogits
from draftsmith.train.losses.output_head import OutputHead
from draftsmith.train.replay_metrics import replay_features

PRIMES = (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35, 0x27D4EB2F)
"""Odd multipliers whose products, cut to 31 bits, look random (those of xxHash)."""


class BlockPositions:
    """The guesses of the blocks after drawn anchors, for a loss: K = `count` guesses for each anchor.

    The batch's `positions` list the anchors at which each guess has a label; at most `max_anchors` of a row are drawn.
    """

    def __init__(self, inputs: dict[str, Any], count: int, max_anchors: int | None, step: int):
        ids_BT: Tensor = inputs["input_ids"]
        rows, length = ids_BT.shape
        windows: Sequence[Tensor] = inputs["positions"][1 : 1 + count]
        learned_KX = torch.zeros(count, rows * length, device=ids_BT.device)
        for guess, starts in enumerate(windows):
            # Guess k has a label if the anchor and the k + 1 tokens after it are a completion's.
            learned_KX[guess, starts + 1] = 1.0
        first_BT = learned_KX[0].view(rows, length)
        # Positions without a first label come last.
        order_BT = drawn_order(ids_BT, step).masked_fill(first_BT == 0, -1)
        # A row has its own number of anchors, so that the draw does not depend on the other rows of its batch.
        self.indices = order_BT.topk(anchors_of(max_anchors, length), dim=1).indices
        """The anchors' positions, (B, N); in rows with fewer anchors the rest is filled up, and has no weight."""
        flat_BN = self.indices + torch.arange(rows, device=ids_BT.device)[:, None] * length
        weights_KBN = learned_KX[:, flat_BN]
        if max_anchors is None:
            own_B1 = (first_BT.sum(1, keepdim=True) // SHARE).clamp(min=1.0)
            weights_KBN = weights_KBN * (torch.arange(flat_BN.shape[1], device=ids_BT.device) < own_B1)
        # Those drawn stand for all anchors of the row.
        scale_B = first_BT.sum(1) / weights_KBN[0].sum(1).clamp(min=1.0)
        self.weights_BNK = (weights_KBN * scale_B[:, None]).permute(1, 2, 0)
        """The weight of each guess in the loss, (B, N, K): those drawn are scaled to stand for all of the row."""
        offset_K = torch.arange(count, device=ids_BT.device)
        self._before_M = (flat_BN[..., None] + offset_K).clamp(max=rows * length - 2).flatten()
        self.labels = ids_BT.flatten()[self._before_M + 1]
        """The tokens to guess, (M,)."""
        self.weights = [self.weights_BNK.flatten()]

    def teacher(self, hidden: Tensor) -> Tensor:
        """Return the inputs of the teacher's head, (M, H)."""
        return hidden.flatten(0, 1).index_select(0, self._before_M)


def drawn_order(ids_BT: Tensor, step: int) -> Tensor:
    """Return a pseudorandom number below 2³¹ for each position, from its tokens, its index and the step alone."""
    index_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
    before_BT = torch.nn.functional.pad(ids_BT[:, :-1], (1, 0))
    mixed = ids_BT * PRIMES[0] + before_BT * PRIMES[1] + index_T * PRIMES[2] + step * PRIMES[3]
    for shift in (15, 13, 16):
        # Mix high bits into low ones, as hashes do; 31 bits keep products in int64.
        mixed = mixed & 0x7FFFFFFF
        mixed = (mixed ^ (mixed >> shift)) * PRIMES[shift % 3]
    return mixed & 0x7FFFFFFF


class GuessStats(NamedTuple):
    """Statistics of finished guesses: the probability q of the text's token, and Σ_v min(p, q), of acceptance."""

    q_M: Tensor
    alpha_M: Tensor


def reach(q_BNK: Tensor, inside_BNK: Tensor, smoothing: float) -> Tensor:
    """Return D-PACE's weights of guesses, (B, N, K): the sum of the probabilities that a round comes to k, k + 1, ….

    Guess k has the weight Σ_{j ≥ k} Π_{i ≤ j} s_i with s = (1 − α) q + α, where α is the smoothing and q the
    probability of the text's token, if there is one (`inside_BNK`). With α = 0 this gives the gradient of a block's
    expected length.
    """
    # A product of the steps so far, then the sum over all later lengths.
    reached_BNK = (((1 - smoothing) * q_BNK + smoothing) * inside_BNK).cumprod(-1)
    return reached_BNK.flip(-1).cumsum(-1).flip(-1)


class BlockTrainer(FeatureTrainer):
    """The trainer that minimises Σ_k decay^k · objective of guess k on completions, against the target or their text.

    D-PACE's weights can replace decay^k, and the confidence head's cross entropy with Σ_v min(p, q) can be added. With
    a head that chooses among candidates the objective is that of the guesses without it, and the head's own loss is
    added: the cross entropy of its choice with the target's most likely token (DFlash 2).
    """

    cause_of_bad_new_heads = "the layers do not learn from these features; try a lower training.learning_rate"

    @staticmethod
    def guesses(heads: BlockDrafter, config: BlockTrainingConfig) -> int:
        """Return K, the guesses of a block."""
        return heads.config.guesses  # type: ignore[no-any-return]

    def summed_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """Return Σ_k decay^k · the objective summed over guess k's tokens."""
        target_states = self.target_states(inputs)
        blocks = BlockPositions(inputs, self.count, self.config.anchors, self.state.global_step)
        decays_K = self.config.decay ** torch.arange(self.count, device=blocks.labels.device)
        blocks.weights = [(blocks.weights_BNK * decays_K).flatten()]

        def loss() -> Tensor:
            hidden_BNSH = self._hidden(target_states, inputs, blocks.indices)
            before_BNS = self._before(inputs, blocks.indices)
            states_ME = self._states(hidden_BNSH, before_BNS).flatten(0, 2)
            return self._inside_head(partial(self._loss, blocks, target_states, before_BNS), hidden_BNSH, states_ME)

        return model(inside=loss)  # type: ignore[no-any-return]

    def _loss(
        self,
        blocks: BlockPositions,
        target_states: TargetStates,
        before_BNS: Tensor,
        hidden_BNSH: Tensor,
        states_ME: Tensor,
    ) -> Tensor:
        """Return the loss of guesses; called inside of the side head's map."""
        head, config = self.loss_head(self.heads.whole_head(self.frozen_head)), self.config
        decayed_M = blocks.weights[0]  # the confidence head's weights: without D-PACE's
        stats: GuessStats | None = None
        learned, learned_head, tokens_MX = states_ME, head, blocks.labels
        if self.chooses:
            learned, learned_head = self.heads.guessing(hidden_BNSH).flatten(0, 2), self.loss_head(self.frozen_head)
            tokens_MX = self._candidates(blocks, target_states, learned, learned_head)
        if config.dpace is not None or config.confidence > 0:
            stats = self._statistics(blocks, target_states, states_ME, head, tokens_MX)
        if config.dpace is not None and stats is not None:
            reached_BNK = reach(stats.q_M.view_as(blocks.weights_BNK), blocks.weights_BNK > 0, config.dpace)
            # The weights themselves have no gradient.
            blocks.weights = [(blocks.weights_BNK * reached_BNK).flatten()]
        teacher = target_states.hidden, self.teacher_head
        loss = self.chain_loss(blocks, [(learned, learned_head)], teacher)
        if self.chooses:
            loss = loss + self._choice(tokens_MX, states_ME, head, blocks.weights[0])
        if config.confidence > 0 and stats is not None:
            logits_M = self.heads.confidence(hidden_BNSH, before_BNS, self.embed).float().flatten()
            errors_M = binary_cross_entropy_with_logits(logits_M, stats.alpha_M, reduction="none")
            loss = loss + config.confidence * (decayed_M * errors_M).sum()
        return loss

    @property
    def chooses(self) -> bool:
        """Whether there is a head that chooses among candidates."""
        return self.heads.side_head is not None and self.heads.side_head.candidates is not None

    def _candidates(
        self, blocks: BlockPositions, target_states: TargetStates, plain_MH: Tensor, head: OutputHead
    ) -> Tensor:
        """Return the text's token, each guess's candidates and the target's most likely token, (M, 1 + K + 1).

        The last two are the drafter's ids, and the target's token is one that it may draft.
        """
        sizes, count = self.vocabulary.sizes(self.sizes), self.heads.side_head.candidates
        p = self.vocabulary.distributions(LiveDistributions(blocks.teacher(target_states.hidden), self.teacher_head))

        def features(p_logits: Tensor | WholeLogits, q_logits_ND: Tensor, _: Tensor) -> Tensor:
            known = p_logits.logits[:, p_logits.tokens] if isinstance(p_logits, WholeLogits) else p_logits
            return torch.cat([q_logits_ND.topk(count).indices, known.argmax(-1, keepdim=True)], 1).double()

        found_MX = chunked_features(features, blocks.labels, plain_MH, head, p, sizes).long()
        return torch.cat([blocks.labels[:, None], found_MX], dim=1)

    def _choice(self, tokens_MX: Tensor, states_ME: Tensor, head: OutputHead, weights_M: Tensor) -> Tensor:
        """Return the cross entropy of the choices among candidates with the target's most likely token."""
        tokens_MK, best_M1 = tokens_MX[:, 1:-1], tokens_MX[:, -1:]
        lacks_M1 = (tokens_MK != best_M1).all(1, keepdim=True)
        # It takes the least likely candidate's place where it is none of them.
        tokens_MK = torch.cat([tokens_MK[:, :-1], best_M1.where(lacks_M1, tokens_MK[:, -1:])], dim=1)
        places_M1 = (tokens_MK == best_M1).long().argmax(1, keepdim=True)

        def features(_: Any, q_logits_ND: Tensor, chosen_NX: Tensor) -> Tensor:
            scores_NK = q_logits_ND.gather(1, chosen_NX[:, :-1]).float()
            return nn.functional.cross_entropy(scores_NK, chosen_NX[:, -1], reduction="none")[:, None]

        labels_MX, sizes = torch.cat([tokens_MK, places_M1], dim=1), self.vocabulary.sizes(self.sizes)
        return chunked_sum(features, weights_M[:, None], labels_MX, states_ME, head, None, sizes)[0]

    def _inside_head(self, function: Callable[..., Tensor], *states: Tensor) -> Tensor:
        """Call a function of states where the map of the head that adds logits is whole (ZeRO-3, FSDP2)."""
        side_map = self.heads.loss_map
        return function(*states) if side_map is None else side_map(*states, inside=function)

    def replay_sums(self, model: nn.Module, inputs: dict[str, Any], chosen_BT: Tensor) -> Tensor:
        """Return each sample's tokens, rounds and loss, and three sums for each guess, (B, 3 + 3K)."""
        target_states = self.target_states(inputs)
        rows, length = inputs["input_ids"].shape

        def sums() -> Tensor:
            positions = ChainPositions(inputs, self.count)
            p = LiveDistributions(positions.teacher(target_states.hidden), self.target_head)
            everywhere = torch.arange(length, device=positions.flat.device).expand(rows, -1)
            # The blocks of all positions need a mask of their square: compute them in parts.
            parts = everywhere.split(anchors_at_once(rows * length, self.heads.config.block_size), dim=1)
            states_XKE = torch.cat([
                self._states(self._hidden(target_states, inputs, part), self._before(inputs, part))
                for part in parts
            ], dim=1).flatten(0, 1)  # fmt: skip

            def features(k: int, features_of: FeaturesOf) -> Tensor:
                # Guess k of token c + 1 belongs to the block whose anchor is at c − k.
                states = states_XKE[(positions.flat - k).clamp(min=0), k]
                head = self.loss_head(self.heads.whole_head(self.frozen_head))
                return self._chosen_features(positions, p, states, head) if self.chooses else features_of(states, head)

            return self._inside_head(lambda: self.chain_sums(positions, chosen_BT, p, features))

        return model(inside=sums)  # type: ignore[no-any-return]

    def _chosen_features(
        self, positions: ChainPositions, p: LiveDistributions, states_NE: Tensor, head: OutputHead
    ) -> Tensor:
        """Return the acceptance of choices among candidates, and the objective of the guesses without the head."""
        sizes, count = self.sizes if self.cut is None else self.cut.sizes(self.sizes), self.heads.side_head.candidates
        plain_NH, plain_head = states_NE[:, : self.heads.config.hidden_size], self.loss_head(self.frozen_head)

        def plain(p_logits: Tensor, q_logits_ND: Tensor, tokens_N: Tensor) -> Tensor:
            best = q_logits_ND.topk(count).indices
            return torch.cat([best, self.objective_features(p_logits, q_logits_ND, tokens_N)], dim=1).double()

        def accepted(p_logits: Tensor, q_logits_ND: Tensor, tokens_NX: Tensor) -> Tensor:
            return self.acceptance_features(p_logits, limited(q_logits_ND, tokens_NX[:, 1:]), tokens_NX[:, 0])

        found_NX = chunked_features(plain, positions.labels, plain_NH, plain_head, p, sizes)
        tokens_NX = torch.cat([positions.labels[:, None], found_NX[:, :count].long()], dim=1)
        accepted_N3 = chunked_features(accepted, tokens_NX, states_NE, head, p, sizes)
        return torch.cat([accepted_N3, found_NX[:, count:].float()], dim=1)

    def _statistics(
        self,
        blocks: BlockPositions,
        target_states: TargetStates,
        states_ME: Tensor,
        head: OutputHead,
        tokens_MX: Tensor,
    ) -> GuessStats:
        """Return statistics of the finished guesses, a chunk at a time, without gradients.

        `tokens_MX` are the text's tokens, (M,), or those of `_candidates`.
        """
        sizes = self.sizes if self.cut is None else self.cut.sizes(self.sizes)
        p = LiveDistributions(blocks.teacher(target_states.hidden), self.target_head)

        def features(p_logits: Tensor, q_logits_ND: Tensor, tokens_N: Tensor) -> Tensor:
            if self.chooses:
                q_logits_ND, tokens_N = limited(q_logits_ND, tokens_N[:, 1:-1]), tokens_N[:, 0]
            wide_NV = self.heads.widened(q_logits_ND)[..., : self.vocab_size]
            alpha_N = replay_features(p_logits, wide_NV, tokens_N, self.sampler)[:, 1]
            return torch.stack([wide_NV.float().softmax(-1).gather(1, tokens_N[:, None])[:, 0], alpha_N], dim=1)

        return GuessStats(*chunked_features(features, tokens_MX, states_ME, head, p, sizes).unbind(1))

    def _hidden(self, target_states: TargetStates, inputs: dict[str, Any], indices_BN: Tensor) -> Tensor:
        """Return the output head's inputs for the slots after some anchors, (B, N, S, H)."""
        batch = inputs["input_ids"], inputs.get("position_ids")
        return states_of_blocks(self.heads, self.embed, target_states, *batch, indices_BN)

    def _states(self, hidden_BNSH: Tensor, before_BNS: Tensor) -> Tensor:
        """Return `BlockDrafter.head_states`, (B, N, K, H + R)."""
        return self.heads.head_states(hidden_BNSH, before_BNS, self.embed)  # type: ignore[no-any-return]

    def _before(self, inputs: dict[str, Any], indices_BN: Tensor) -> Tensor:
        """Return the tokens before these slots' own, (B, N, S)."""
        return tokens_before(self.heads, inputs["input_ids"], inputs.get("position_ids"), indices_BN)

    def trained_work(self) -> Work | None:
        """Return the arithmetic of the blocks; None if their share of the tokens depends on the rows' lengths."""
        return None if self.config.anchors else work_of_blocks(self.heads, 1 / SHARE)

    @property
    def adamw_modules(self) -> list[nn.Module]:
        """The head that adds logits: its maps have a vocabulary's size."""
        return [head for head in (self.heads.side_head,) if head is not None]
