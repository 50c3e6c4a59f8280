"""Training of heads that draft chains: the loss of each guess, and replay, as Medusa and EAGLE-3 heads share them.

Heads guess K tokens from each place. Guess i is learned at the places where all that was guessed before it is known.
Shape suffixes: B rows, T positions, N chosen positions, K guesses, H hidden, V vocabulary.
"""

from abc import ABC
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import EvalPrediction, PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.replay.rounds import expected_rounds_of_starts
from draftsmith.train.data.examples import TrainingData
from draftsmith.train.job.first_loss import Learner
from draftsmith.train.losses.chunked import chunked_features, chunked_objectives
from draftsmith.train.losses.cut_vocabulary import CutVocabulary
from draftsmith.train.losses.distributions import LiveDistributions, WholeDistributions
from draftsmith.train.losses.objective import Objective
from draftsmith.train.losses.output_head import OutputHead
from draftsmith.train.recipe import RecipeConfig
from draftsmith.train.replay_metrics import replay_features
from draftsmith.train.trainer import RecipeTrainer

PER_GUESS = ("count", "overlap", "right")
FeaturesOf = Callable[[Tensor, OutputHead], Tensor]
"""From what a language-model head sees, (N, H), and that head, to the features of N places, (N, F)."""


class ChainTrainer(RecipeTrainer, ABC):
    """Minimises Σ_i λ_i · objective of guess i, and replays chains of K guesses.

    Args:
        model: as in `RecipeTrainer`, and so the others.
        count: K.
    """

    config: Any
    heads: Any

    def __init__(
        self,
        model: PreTrainedModel,
        target: PreTrainedModel | None,
        tokenizer: PreTrainedTokenizerBase,
        config: RecipeConfig,
        train_dataset: TrainingData,
        eval_dataset: TrainingData | None = None,
        *,
        count: int,
        **kwargs: Any,
    ):
        self.count = count
        self.objective: Objective = self.config.objective
        super().__init__(
            model, target, tokenizer, config, train_dataset, eval_dataset, compute_metrics=chain_metrics, **kwargs
        )
        self._cut: CutVocabulary | None = None
        """The tokens of a truncated vocabulary."""
        if self.heads.token_map is not None:
            self._cut = CutVocabulary(self.heads.token_map.to(self.args.device), self.heads.config.vocab_size)
            self.objective = replace(self.objective, partial=True)

    @property
    def ahead(self) -> int:  # type: ignore[override]
        """Guess i looks i + 1 tokens further than the target's own head."""
        return self.count

    def chain_loss(
        self,
        at: "Chains",
        states: Sequence[Tensor],
        head_of: Callable[[int], OutputHead],
        teacher: tuple[Tensor, OutputHead] | None,
    ) -> Tensor:
        """Return Σ_i λ_i · the objective summed over guess i's tokens; called inside of the heads' forwards.

        Args:
            at: the places.
            states: what the language-model head of each guess sees, (N, H).
            head_of: the head of each guess, over the tokens that the heads know.
            teacher: what the teacher's head sees, (B, T, H), and that head, as `narrowed` returns it; None where labels
                are hard.
        """
        labels, sizes, cut = at.labels, self.sizes, self._cut
        if cut is not None:
            labels, sizes = cut.labels(labels), cut.training_sizes(sizes, self.objective)
        p: LiveDistributions | WholeDistributions | None = None
        if self.objective.needs_target and teacher is not None:
            live = LiveDistributions(at.teacher(teacher[0]), teacher[1])
            p = live if cut is None else cut.taught(live, self.objective)

        def losses(learners: Sequence[Learner]) -> Tensor:
            weighed = [(*each, at.learned[i], self.config.decay**i) for i, each in enumerate(learners)]
            return chunked_objectives(self.objective, labels, weighed, p, sizes)

        with self.clock.phase("loss"):
            return self.looked_at(losses, *((seen, head_of(i)) for i, seen in enumerate(states)))

    def chain_sums(
        self,
        at: "Chains",
        chosen_BT: Tensor,
        p: LiveDistributions,
        features: Callable[[int, FeaturesOf], Tensor],
    ) -> Tensor:
        """Return each sample's tokens, rounds and loss, and three sums a guess, (B, 3 + 3K).

        Args:
            at: the places.
            chosen_BT: as in `replay_sums`.
            p: the target's distributions at the places, over its whole vocabulary.
            features: of guess i and a function, what that returns of guess i's states and head.
        """
        cut, shape = self._cut, (len(chosen_BT), chosen_BT.shape[1] + 1)
        sizes = self.sizes if cut is None else cut.sizes(self.sizes)

        def replayed(p: Any, q_logits: Tensor, tokens: Tensor) -> Tensor:
            wide = self.heads.widened(q_logits)[..., : self.vocab_size]
            accepted = replay_features(p, wide, tokens, self.sampler)
            right = (wide.argmax(-1) == tokens).float()
            if cut is not None:
                p, tokens = cut.of_distributions(p), cut.labels(tokens)
            return torch.cat([accepted[:, :2], right[:, None], self.objective.features(p, q_logits, tokens)], dim=1)

        def features_of(states: Tensor, head: OutputHead) -> Tensor:
            return chunked_features(replayed, at.labels, states, head, p, sizes)

        device = chosen_BT.device
        a = torch.zeros(*chosen_BT.shape, self.count, device=device)
        loss, sums = torch.zeros(shape[0], device=device), []
        for index in range(self.count):
            features_NK = features(index, features_of)
            # The round that begins with a token drafts from the state of the token two before it.
            spread = a.new_zeros(*shape, features_NK.shape[1] + 1)
            learned = at.learned[index].bool()[:, None]
            ones = features_NK.new_ones(len(features_NK), 1)
            values = torch.cat([features_NK, ones], dim=1).float().where(learned, 0.0)
            spread.flatten(0, 1).index_add_(0, (at.flat - index).clamp(min=0), values)  # zeros where it does not learn
            a[..., index] = spread[:, :-1, 0]
            each = [self.objective.shortfall(row[:, 3:-1], weights_N=row[:, -1]) for row in spread]
            loss += self.config.decay**index * torch.stack(each)
            sums.append(spread[..., [-1, 1, 2]].sum(1))
        # Completions begin at different columns: the chain starts at the first token of each.
        order = torch.argsort(~chosen_BT, dim=1, stable=True)
        a = a.gather(1, order[..., None].expand_as(a))
        lengths = chosen_BT.sum(1)
        rounds = expected_rounds_of_starts(a.double(), lengths).float()
        return torch.cat([lengths[:, None].float(), rounds[:, None], loss[:, None], *sums], dim=1)

    @cached_property
    def teacher_head(self) -> OutputHead:
        """What the objective needs of the target's head."""
        return self.narrowed(self.target_head)

    def narrowed(self, head: OutputHead) -> OutputHead:
        """Return what the objective needs of a head of all tokens; of a truncated vocabulary often its rows alone."""
        return head if self._cut is None else self._cut.teacher_head(head, self.objective)

    def known(self, head: OutputHead) -> OutputHead:
        """Return a trained head over the tokenizer's tokens; a truncated vocabulary has no others."""
        return head if self._cut is not None else head.cut(self.vocab_size)


class Chains:
    """Where heads learn: places c. There the teacher predicts the token c + 1, and head i from the state at c − 1 − i.

    All places are head 0's. Head i learns at those where the tokens c − i … c + 1 are all a completion's, one text:
    heads draft after a token that the target has just written, which is c − i. A text's first token has no label, so
    that no window reaches into the next text of a packed row. So all heads have one p.
    """

    def __init__(self, inputs: dict[str, Any], count: int):
        self.ids_N: Tensor = inputs["input_ids"].flatten()
        """Of the flattened batch."""
        windows: Sequence[Tensor] = inputs["positions"][1 : 1 + count]
        self.flat = windows[0] + 1
        """(N,): c, in the flattened batch."""
        self.labels = self.ids_N[self.flat + 1]
        """(N,)."""
        self.learned = [torch.zeros(len(self.flat), device=self.flat.device) for _ in windows]
        """For each head whether it learns, (N,) float32 of 0 and 1."""
        for index, (starts, learned) in enumerate(zip(windows, self.learned, strict=True)):
            learned[torch.searchsorted(self.flat, starts + index + 1)] = 1.0

    def before(self, index: int, hidden: Tensor, heads: PreTrainedModel) -> Tensor:
        """Return what a head sees of hidden states (B, T, H), in the heads' precision, (N, H); anything elsewhere."""
        return hidden.flatten(0, 1).index_select(0, (self.flat - 1 - index).clamp(min=0)).to(heads.dtype)

    def teacher(self, hidden: Tensor) -> Tensor:
        """Return what the teacher's head sees, (N, H)."""
        return hidden.flatten(0, 1).index_select(0, self.flat)

    def embeddings(self, index: int, embed: nn.Module, heads: PreTrainedModel) -> Tensor | None:
        """Return the embeddings of the index + 1 tokens up to c, constants, (N, index + 1, H); None of Medusa heads."""
        if not heads.config.hydra:
            return None
        places = torch.stack([(self.flat - index + j).clamp(min=0) for j in range(index + 1)], dim=1)
        with torch.no_grad():
            seen = self.ids_N[places]
            return embed(seen.to(next(embed.parameters()).device)).to(seen.device, heads.dtype)


def chain_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """Turn gathered sums, (samples, 3 + 3K), into ratios over tokens; `loss` is what the heads minimise."""
    sums = np.asarray(prediction.predictions, dtype=np.float64).sum(0)
    tokens, rounds, loss = sums[:3]
    heads = sums[3:].reshape(-1, len(PER_GUESS))
    metrics = {"mean_acceptance_length": float(tokens / rounds), "loss": float(loss / tokens)}
    for index, (count, overlap, right) in enumerate(heads, 1):
        metrics[f"accuracy_{index}"] = float(right / max(count, 1))
        metrics[f"alpha_{index}"] = float(overlap / max(count, 1))
    metrics["alpha"] = metrics["alpha_1"]
    return metrics
