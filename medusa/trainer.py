"""The trainer of heads that draft chains: the loss of each guess, and replay.

Shape suffixes: B rows, T positions, N chosen positions, K guesses or features of a position, H hidden, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.replay.rounds import expected_rounds_of_starts
from draftsmith.medusa.chains import ChainPlaces, LossPlaces, chain_metrics
from draftsmith.medusa.config import FeaturesConfig, HeadsConfig
from draftsmith.medusa.seen import TargetStates, seen_by
from draftsmith.train.data.examples import TrainingData
from draftsmith.train.job.step_checks import Learner
from draftsmith.train.losses.chunked import chunked_features, chunked_objectives
from draftsmith.train.losses.cut_vocabulary import CutVocabulary
from draftsmith.train.losses.distributions import LiveDistributions, WholeDistributions
from draftsmith.train.losses.objective import Objective
from draftsmith.train.losses.output_head import OutputHead, head_of
from draftsmith.train.replay_metrics import replay_features
from draftsmith.train.teacher.feature_reader import cached_states
from draftsmith.train.trainer import RecipeTrainer

FeaturesOf = Callable[[Tensor, OutputHead], Tensor]
"""From what a language-model head sees, (N, H), and that head, to the features of N places, (N, K)."""


class HeadsTrainer(RecipeTrainer, ABC):
    """Minimises Σ_i decay^i · objective of guess i, and replays chains of K guesses.

    Args:
        heads: in training.
        model: what the optimizer steps: the heads, or a module that holds them.
        target: frozen, whole; with a teacher cache its layers may be without weights.
        tokenizer: the target's, and so the others as in `RecipeTrainer`.
        count: K.
        live: whether the target's forward is taken in each step.

    Raises:
        InputError: heads for another target.
    """

    def __init__(
        self,
        heads: Any,
        model: nn.Module,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        config: HeadsConfig,
        train_dataset: TrainingData,
        eval_dataset: TrainingData | None = None,
        *,
        count: int,
        live: bool = True,
        **kwargs: Any,
    ):
        self.heads: Any = heads
        self.config: Any = config
        self.count = count
        self.objective: Objective = config.objective
        super().__init__(
            model,  # type: ignore[arg-type]
            target if live else None,
            tokenizer,
            config,
            train_dataset,
            eval_dataset,
            compute_metrics=chain_metrics,
            **kwargs,
        )
        self._cut: CutVocabulary | None = None
        """The tokens of a cut vocabulary."""
        if heads.token_map is not None:
            self._cut = CutVocabulary(heads.token_map.to(self.args.device), heads.config.vocab_size)
            self.objective = replace(self.objective, partial=True)

    @property
    def ahead(self) -> int:  # type: ignore[override]
        """Guess i looks i + 1 tokens further than the target's own head."""
        return self.count

    @property
    def acceptance(self) -> dict[str, Any]:
        """What a card says: the share of tokens that each guess puts first, [] if unknown, τ, and of which step."""
        found = self.kept_evaluation
        top_1 = [found[f"eval_accuracy_{i}"] for i in range(1, self.count + 1)] if found else []
        return {"top_1": top_1, "tau": found.get("eval_mean_acceptance_length"), "step": self.kept_step}

    @property
    def cause_of_bad_start(self) -> str:
        """Whose heads they are."""
        if self.config.heads is not None:
            return f"look whether {self.config.heads} were trained for this target"
        return self.cause_of_bad_new_heads

    @property
    @abstractmethod
    def cause_of_bad_new_heads(self) -> str:
        """Why the loss of new heads may begin above the uniform one, and what to do."""

    def chain_loss(
        self,
        at: LossPlaces,
        states: Sequence[Tensor],
        head_for: Callable[[int], OutputHead],
        teacher: tuple[Tensor, OutputHead] | None,
    ) -> Tensor:
        """Return Σ_i decay^i · the objective summed over guess i's tokens; called inside of the heads' forwards.

        Args:
            at: the places.
            states: what the language-model head of each guess sees, (N, H).
            head_for: the head of each guess, over the tokens that the heads know.
            teacher: what the teacher's head sees, (B, T, H), and that head, as `teacher_rows` returns it; None where
                labels are hard.
        """
        labels, sizes, cut = at.labels, self.sizes, self._cut
        if cut is not None:
            labels, sizes = cut.labels(labels), cut.training_sizes(sizes, self.objective)
        p: LiveDistributions | WholeDistributions | None = None
        if self.objective.needs_target and teacher is not None:
            live = LiveDistributions(at.teacher(teacher[0]), teacher[1])
            p = live if cut is None else cut.of_teacher(live, self.objective)

        def losses(learners: Sequence[Learner]) -> Tensor:
            weighed = [(*each, at.weights[i], self.config.decay**i) for i, each in enumerate(learners)]
            return chunked_objectives(self.objective, labels, weighed, p, sizes)

        with self.clock.phase("loss"):
            return self.loss_beside_uniform(losses, *((seen, head_for(i)) for i, seen in enumerate(states)))

    def chain_sums(
        self,
        at: ChainPlaces,
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
        rows, width = chosen_BT.shape
        sizes = self.sizes if self._cut is None else self._cut.sizes(self.sizes)

        def features_of(states: Tensor, head: OutputHead) -> Tensor:
            return chunked_features(self._guess_features, at.labels, states, head, p, sizes)

        accepted, sums, loss_B = list[Tensor](), list[Tensor](), torch.zeros(rows, device=chosen_BT.device)
        for index in range(self.count):
            table = at.table(index, features(index, features_of), (rows, width + 1))
            losses = [self.objective.shortfall(row[:, 3:-1], weights_N=row[:, -1]) for row in table]
            loss_B += self.config.decay**index * torch.stack(losses)
            accepted.append(table[:, :-1, 0])
            sums.append(table[..., [-1, 1, 2]].sum(1))
        # Completions begin at different columns: the chain starts at the first token of each.
        order = torch.argsort(~chosen_BT, dim=1, stable=True)
        a_BTK = torch.stack(accepted, dim=-1).gather(1, order[..., None].expand(-1, -1, self.count))
        tokens_B = chosen_BT.sum(1)
        rounds_B = expected_rounds_of_starts(a_BTK.double(), tokens_B).float()
        return torch.cat([torch.stack([tokens_B.float(), rounds_B, loss_B], dim=1), *sums], dim=1)

    def _guess_features(self, p: Tensor, q_logits_ND: Tensor, tokens_N: Tensor) -> Tensor:
        """Return how likely a guess is accepted, Σ_v min(p, q), whether it is right, and the objective's features."""
        wide_NV = self.heads.widened(q_logits_ND)[..., : self.vocab_size]
        replayed_N4 = replay_features(p, wide_NV, tokens_N, self.sampler)
        right_N = (wide_NV.argmax(-1) == tokens_N).float()
        teacher, labels_N = (
            (p, tokens_N) if self._cut is None else (self._cut.of_distributions(p), self._cut.labels(tokens_N))
        )
        of_loss = self.objective.features(teacher, q_logits_ND, labels_N)
        return torch.cat([replayed_N4[:, :2], right_N[:, None], of_loss], dim=1)

    @cached_property
    def teacher_head(self) -> OutputHead:
        """What the objective needs of the target's head."""
        return self.teacher_rows(self.target_head)

    def teacher_rows(self, head: OutputHead) -> OutputHead:
        """Return what the objective needs of a head of all tokens; of a cut vocabulary often its rows alone."""
        return head if self._cut is None else self._cut.teacher_head(head, self.objective)

    def loss_head(self, head: OutputHead) -> OutputHead:
        """Return a trained head over the tokenizer's tokens; a cut vocabulary has no others."""
        return head if self._cut is not None else head.cut(self.vocab_size)


class FeatureTrainer(HeadsTrainer):
    """Trains heads on what one forward of the target leaves of a batch, or on what a cache has of it.

    These are the features of some depths, the embeddings, and the last hidden states that its distributions are made
    of. With a cache the target's embeddings and head are enough.

    Args:
        heads: in training.
        target: frozen; with a teacher cache its layers may be without weights.
        tokenizer: the target's, and so the others as in `RecipeTrainer`.
        count: K.

    Raises:
        InputError: heads for another target.
    """

    def __init__(
        self,
        heads: Any,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        config: FeaturesConfig,
        train_dataset: TrainingData,
        eval_dataset: TrainingData | None = None,
        *,
        count: int,
        **kwargs: Any,
    ):
        heads.check_fits(target)
        live = not config.teacher_cache
        super().__init__(
            heads, heads, target, tokenizer, config, train_dataset, eval_dataset, count=count, live=live, **kwargs
        )
        self.embed: Any = target.get_input_embeddings()
        if not live:  # these two are all that stays of it
            self.embed.to(self.args.device)
            self.target_head = head_of(target).cut(self.vocab_size).to(self.args.device)

    def seen(self, inputs: dict[str, Any]) -> TargetStates:
        """Run the target once on a batch, or look up what a cache has of it."""
        if "teacher" in inputs:
            states = cached_states(inputs["teacher"])
            hidden = states["hidden"].to(self.target_head.weight.dtype)
            return TargetStates(hidden, self.embed(inputs["input_ids"]), states["features"])
        return seen_by(self.target, self.heads.layer_ids, lambda: self.target_hidden(inputs))
