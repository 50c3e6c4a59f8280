"""The trainer of heads that draft chains: where each guess is learned, its loss, and replay in evaluations.

Heads guess K tokens from each position. Guess i is learned where all of the tokens guessed before it are known.
Shape suffixes: B rows, T positions, N chosen positions, K guesses or features of a position, H hidden, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from transformers import EvalPrediction, PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.cache.kernels import computing_dtype
from draftsmith.decode.replay.rounds import expected_rounds_of_starts
from draftsmith.medusa.config import HeadsConfig
from draftsmith.medusa.target_states import TargetStates, run_for_states
from draftsmith.train.data.examples import TrainingData
from draftsmith.train.data.first_look import Text, best_scale, choose_once
from draftsmith.train.job.step_checks import Learner
from draftsmith.train.losses.chunked import chunked_features, chunked_objectives
from draftsmith.train.losses.cut_vocabulary import CutVocabulary
from draftsmith.train.losses.distributions import LiveDistributions, TeacherDistributions
from draftsmith.train.losses.output_head import OutputHead, open_forward
from draftsmith.train.losses.positions import IGNORED
from draftsmith.train.replay_metrics import replay_features
from draftsmith.train.teacher.feature_reader import cached_states
from draftsmith.train.trainer import RecipeTrainer, texts

FeaturesOf = Callable[[Tensor, OutputHead], Tensor]
"""A function from the states that a language-model head sees, (N, H), and that head to features, (N, K)."""
PER_GUESS = ("count", "overlap", "right")


class HeadPositions(Protocol):
    """The guesses of a batch that the loss is computed on: labels, (N,), and for each head weights, (N,) float32."""

    labels: Tensor
    weights: list[Tensor]

    def teacher(self, hidden: Tensor) -> Tensor:
        """Return the inputs of the teacher's head, (N, H), from hidden states, (B, T, H)."""


class ChainPositions:
    """The positions c of a batch where heads learn: the teacher predicts token c + 1, as does head i from c − 1 − i.

    All positions are head 0's. Head i learns where the tokens c − i … c + 1 all belong to one completion, because heads
    draft after a token that the target has just written, which is c − i. So all heads share one p.
    """

    def __init__(self, inputs: dict[str, Any], count: int):
        # A text's first token has no label, so no window reaches into the next text of a packed row.
        # `positions[i]` lists the positions whose next i + 1 tokens are all to predict.
        windows: Sequence[Tensor] = inputs["positions"][1 : 1 + count]
        self.ids_N: Tensor = inputs["input_ids"].flatten()
        """The whole batch, flattened."""
        self.flat = windows[0] + 1
        """c in the flattened batch, (N,)."""
        self.labels = self.ids_N[self.flat + 1]
        self.weights = [torch.zeros(len(self.flat), device=self.flat.device) for _ in windows]
        """For each head 1 where it learns and 0 elsewhere, (N,) float32."""
        for index, (starts, weights_N) in enumerate(zip(windows, self.weights, strict=True)):
            weights_N[torch.searchsorted(self.flat, starts + index + 1)] = 1.0

    def head_inputs(self, index: int, hidden: Tensor, heads: PreTrainedModel) -> Tensor:
        """Return a head's inputs, (N, H), from hidden states (B, T, H); undefined where the head does not learn."""
        return hidden.flatten(0, 1).index_select(0, (self.flat - 1 - index).clamp(min=0)).to(heads.dtype)

    def teacher(self, hidden: Tensor) -> Tensor:
        """Return the inputs of the teacher's head, (N, H)."""
        return hidden.flatten(0, 1).index_select(0, self.flat)

    def embeddings(self, index: int, embed: nn.Module, heads: PreTrainedModel) -> Tensor | None:
        """Return the embeddings of the index + 1 tokens up to c, (N, index + 1, H), for Hydra heads; else None."""
        if not heads.config.hydra:
            return None
        positions = torch.stack([(self.flat - index + j).clamp(min=0) for j in range(index + 1)], dim=1)
        with torch.no_grad():
            tokens = self.ids_N[positions]
            return embed(tokens.to(next(embed.parameters()).device)).to(tokens.device, heads.dtype)

    def table(self, index: int, features_NK: Tensor, shape: tuple[int, int]) -> Tensor:
        """Return a head's features and, last, weights by their rounds, (B, T, K + 1); zeros where it does not learn."""
        table = features_NK.new_zeros(*shape, features_NK.shape[1] + 1, dtype=torch.float32)
        learns = self.weights[index].bool()[:, None]
        ones = features_NK.new_ones(len(features_NK), 1)
        values = torch.cat([features_NK, ones], dim=1).float().where(learns, 0.0)
        # The round whose first draft is token s = c + 1 − i sees the state of token s − 2; its entries are at s − 1.
        table.flatten(0, 1).index_add_(0, (self.flat - index).clamp(min=0), values)
        return table


def chain_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """Turn gathered sums, (samples, 3 + 3K), into ratios over tokens; `loss` is the heads' objective."""
    sums = np.asarray(prediction.predictions, dtype=np.float64).sum(0)
    tokens, rounds, loss = sums[:3]
    heads = sums[3:].reshape(-1, len(PER_GUESS))
    metrics = {"mean_acceptance_length": float(tokens / rounds), "loss": float(loss / tokens)}
    for index, (count, overlap, right) in enumerate(heads, 1):
        metrics[f"accuracy_{index}"] = float(right / max(count, 1))
        metrics[f"alpha_{index}"] = float(overlap / max(count, 1))
    metrics["alpha"] = metrics["alpha_1"]
    return metrics


class HeadsTrainer(RecipeTrainer, ABC):
    """A trainer that minimises Σ_i decay^i · objective of guess i, and replays chains of K = `count` guesses.

    The optimizer steps `model`: the heads, or a module that holds them. With a teacher cache no step runs the target,
    whose layers may then be without weights.

    Evaluation replays held-out completions with chains of all guesses, and reports `mean_acceptance_length`, `alpha`
    (of the first guess) and `loss`. For each guess i ≥ 1 it reports `accuracy_i`, the share of its tokens that it puts
    first, and `alpha_i`, its Σ_v min(p, q).
    """

    cause_of_bad_new_heads: ClassVar[str]
    """A likely cause of a bad start of new heads, and a remedy."""

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
        **kwargs: Any,
    ):
        self.heads: Any = heads
        self.config: Any = config
        self.count = count
        self.embed: Any = target.get_input_embeddings()
        super().__init__(
            model,  # type: ignore[arg-type]
            target,
            tokenizer,
            config,
            train_dataset,
            eval_dataset,
            compute_metrics=chain_metrics,
            **kwargs,
        )
        self.compare_over(config.objective, heads.token_map, heads.config.vocab_size)

    @property
    def ahead(self) -> int:  # type: ignore[override]
        """The number of guesses: guess i looks i + 1 tokens further than the target's own head."""
        return self.count

    @property
    def acceptance(self) -> dict[str, Any]:
        """The card's teacher, each guess's share of tokens that it puts first, [] if unknown, τ, and their step."""
        metrics = self.kept_evaluation
        top_1 = [metrics[f"eval_accuracy_{i}"] for i in range(1, self.count + 1)] if metrics else []
        tau = metrics.get("eval_mean_acceptance_length")
        return {"teacher": self.teacher, "top_1": top_1, "tau": tau, "step": self.kept_step}

    @property
    def bad_start_cause(self) -> str:
        """A likely cause of a first loss above that of a uniform distribution."""
        if self.config.heads is not None:
            return f"look whether {self.config.heads} were trained for this target"
        return self.cause_of_bad_new_heads

    def chain_loss(
        self, positions: HeadPositions, learners: Sequence[Learner], teacher: tuple[Tensor, OutputHead] | None
    ) -> Tensor:
        """Return Σ_i decay^i · the objective summed over guess i's tokens; called inside of the heads' forwards.

        Args:
            learners: the input of each guess's language-model head, (N, H), and that head, over the heads' vocabulary.
            teacher: the input of the teacher's head, (B, T, H), and the rows of it that the objective needs; None for
                hard labels.
        """
        p: TeacherDistributions | None = None
        if self.objective.needs_target and teacher is not None:
            p = self.vocabulary.distributions(LiveDistributions(positions.teacher(teacher[0]), teacher[1]))
        labels, sizes = self.vocabulary.labels(positions.labels), self.vocabulary.sizes(self.sizes)

        def losses(learners: Sequence[Learner]) -> Tensor:
            weighted = [(*learner, positions.weights[i], self.config.decay**i) for i, learner in enumerate(learners)]
            return chunked_objectives(self.objective, labels, weighted, p, sizes)

        with self.clock.phase("loss"):
            return self.checked_loss(losses, *learners)

    def chain_sums(
        self,
        positions: ChainPositions,
        chosen_BT: Tensor,
        p: LiveDistributions,
        features: Callable[[int, FeaturesOf], Tensor],
    ) -> Tensor:
        """Return each sample's tokens, rounds and loss, and three sums for each guess, (B, 3 + 3K).

        Args:
            chosen_BT: as in `replay_sums`.
            p: the target's distributions there, over its whole vocabulary.
            features: calls the function that it is given with guess i's states and head.
        """
        rows, width = chosen_BT.shape
        sizes = self.sizes if self.cut is None else self.cut.sizes(self.sizes)

        def features_of(states: Tensor, head: OutputHead) -> Tensor:
            return chunked_features(self._guess_features, positions.labels, states, head, p, sizes)

        accepted, sums, loss_B = list[Tensor](), list[Tensor](), torch.zeros(rows, device=chosen_BT.device)
        for index in range(self.count):
            # Columns of `_guess_features`: a, Σ_v min(p, q), right, the objective's features, and last the weight.
            table = positions.table(index, features(index, features_of), (rows, width + 1))
            losses = [(row[:, -1] * row[:, 3]).sum() for row in table]
            # The same weights as in the training loss, so that held-out losses can be compared with it.
            loss_B += self.config.decay**index * torch.stack(losses)
            accepted.append(table[:, :-1, 0])
            sums.append(table[..., [-1, 1, 2]].sum(1))
        # Completions begin at different columns: sort each row's chosen tokens to the front.
        order = torch.argsort(~chosen_BT, dim=1, stable=True)
        a_BTK = torch.stack(accepted, dim=-1).gather(1, order[..., None].expand(-1, -1, self.count))
        tokens_B = chosen_BT.sum(1)
        # A Markov chain over the tokens where rounds begin gives the expected number of rounds.
        rounds_B = expected_rounds_of_starts(a_BTK.double(), tokens_B).float()
        return torch.cat([torch.stack([tokens_B.float(), rounds_B, loss_B], dim=1), *sums], dim=1)

    def _guess_features(self, p: Tensor, q_logits_ND: Tensor, tokens_N: Tensor) -> Tensor:
        """Return each guess's acceptance, Σ_v min(p, q), correctness and the objective's features, (N, 3 + …)."""
        args = p, q_logits_ND, tokens_N
        return torch.cat([self.acceptance_features(*args), self.objective_features(*args)], dim=1)

    def acceptance_features(self, p: Tensor, q_logits_ND: Tensor, tokens_N: Tensor) -> Tensor:
        """Return each guess's acceptance, Σ_v min(p, q) and correctness, (N, 3)."""
        wide_NV = self.heads.widened(q_logits_ND)[..., : self.vocab_size]
        replayed_N4 = replay_features(p, wide_NV, tokens_N, self.sampler)
        right_N = (wide_NV.argmax(-1) == tokens_N).float()
        return torch.cat([replayed_N4[:, :2], right_N[:, None]], dim=1)

    def objective_features(self, p: Tensor, q_logits_ND: Tensor, tokens_N: Tensor) -> Tensor:
        """Return each guess's features of the objective."""
        teacher = p if self.cut is None else self.cut.of_distributions(p)
        return self.objective.features(teacher, q_logits_ND, self.vocabulary.labels(tokens_N))

    def loss_head(self, head: OutputHead) -> OutputHead:
        """Return a trained head over the tokenizer's tokens; a draft vocabulary has no others."""
        return head if self.cut is not None else head.cut(self.vocab_size)


class FeatureTrainer(HeadsTrainer):
    """A trainer of heads on the target's states of a batch: from one forward in each step, or from a cache.

    The states are features of some depths, embeddings, and the last hidden states, from which the target's
    distributions are computed. With a cache only the target's embeddings and head are needed.
    """

    def __init__(
        self,
        heads: Any,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        config: HeadsConfig,
        train_dataset: TrainingData,
        eval_dataset: TrainingData | None = None,
        **kwargs: Any,
    ):
        heads.check_fits(target)
        # Losses run inside of these forwards: `train/losses/output_head.py`.
        open_forward(*(part for part in (heads, heads.loss_map) if part is not None))
        count = self.guesses(heads, config)
        super().__init__(heads, heads, target, tokenizer, config, train_dataset, eval_dataset, count=count, **kwargs)
        if config.states_given:  # before the head, whose weights may be the same
            self.embed.to(self.args.device)

    @staticmethod
    @abstractmethod
    def guesses(heads: Any, config: Any) -> int:
        """Return K."""

    def summed_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """Return Σ_k decay^k · the objective summed over step k's tokens."""

        def loss(indices: ChainPositions, hidden: Tensor, states: Sequence[Tensor], head: OutputHead) -> Tensor:
            return self.chain_loss(indices, [(step, head) for step in states], (hidden, self.teacher_head))

        return self.inside(model, inputs, loss)

    def replay_sums(self, model: nn.Module, inputs: dict[str, Any], chosen_BT: Tensor) -> Tensor:
        """Return each sample's tokens, rounds and loss, and three sums for each step, (B, 3 + 3K)."""

        def sums(indices: ChainPositions, hidden: Tensor, states: Sequence[Tensor], head: OutputHead) -> Tensor:
            p = LiveDistributions(indices.teacher(hidden), self.target_head)
            return self.chain_sums(indices, chosen_BT, p, lambda k, features_of: features_of(states[k], head))

        return self.inside(model, inputs, sums)

    def inside(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        function: Callable[[ChainPositions, Tensor, Sequence[Tensor], OutputHead], Tensor],
    ) -> Tensor:
        """Return a function of positions, the target's last hidden states, all steps' states, and the head of these.

        It is called where the weights of heads and head are whole.
        """
        seen, indices, own = self.target_states(inputs), ChainPositions(inputs, self.count), self.heads.loss_map

        def steps() -> Tensor:
            states = states_of_steps(self.heads, seen, inputs.get("position_ids"), indices.flat, self.count)
            if own is None:
                return function(indices, seen.hidden, states, self.loss_head(self.frozen_head))
            head = lambda: self.loss_head(OutputHead(own.weight))  # noqa: E731
            return own(*states, inside=lambda *states: function(indices, seen.hidden, states, head()))  # type: ignore[no-any-return]

        return model(inside=steps)  # type: ignore[no-any-return]

    @property
    def adamw_modules(self) -> list[nn.Module]:
        """No module: the language-model head is not trained."""
        return []

    def target_states(self, inputs: dict[str, Any]) -> TargetStates:
        """Run the target once on a batch, or take its states from the batch."""
        if "teacher" in inputs:
            features = cached_states(inputs["teacher"])["features"]
            return TargetStates(self.target_hidden(inputs), self.embed(inputs["input_ids"]), features)
        with torch.no_grad(), self.clock.phase("teacher"):
            states = run_for_states(self.target, self.heads.layer_ids, texts(inputs))
            return TargetStates(*(part.to(self.args.device) for part in states))

    @cached_property
    def frozen_head(self) -> OutputHead:
        """The target's head of the drafted tokens, on the loss's device and in its precision."""
        ids = self.heads.token_map
        head = self.target_head if ids is None else self.target_head.of(ids.to(self.args.device))
        dtype = computing_dtype(next(self.heads.parameters()))
        return replace(head, weight=head.weight.to(dtype), bias=None if head.bias is None else head.bias.to(dtype))


def states_of_steps(
    heads: Any, target_states: TargetStates, position_ids: Tensor | None, indices_N: Tensor, num_steps: int
) -> list[Tensor]:
    """Return the head's input of each step for N positions c of the flat batch, (N, H).

    Step k guesses token c + 1, in the round that begins at c − 1 − k, and is undefined where no round begins there. In
    packed rows `position_ids`, (B, T), are the positions; without them each row is one text.
    """
    length = target_states.hidden.shape[1]
    positions = torch.arange(length, device=indices_N.device)[None] if position_ids is None else position_ids
    positions = positions[:, :-1]  # the last position of a row has no next token
    dtype = computing_dtype(next(heads.parameters()))  # with a long context the features are the largest tensor
    begin = getattr(target_states, heads.begins_with)[:, :-1].to(dtype)
    inputs = target_states.embeddings[:, 1:].to(dtype), begin, positions
    steps = heads.unroll(*inputs, num_steps, None if position_ids is None else (positions == 0).cumsum(1))
    # A batch of short rows may have no round of this length, and nothing to learn from it.
    steps = [step if step.shape[1] else steps[0] for step in steps] + [steps[0]] * (num_steps - len(steps))
    row_N, column_N = indices_N // length, indices_N % length
    return [step[row_N, (column_N - 1 - k).clamp(min=0)] for k, step in enumerate(steps)]


@torch.no_grad()
def scale_of_steps(
    heads: PreTrainedModel,
    states_of: Callable[[Text], TargetStates],
    texts: Sequence[Text],
    steps: int,
    head: Callable[[], OutputHead],
    tokens: int,
    sharded: bool,
) -> float:
    """Return the scale of the logits with the least loss of all K `steps` on some texts; a collective call.

    The head may have more rows than the tokenizer has `tokens`.
    """
    token_map: Any = heads.token_map

    def look() -> float:
        states, labels = [], []
        for text in texts:
            target_states = states_of(text)
            nn.Module.to(heads, target_states.hidden.device)  # on the CPU a large layer is slow
            indices_N = (text.ahead(1) != IGNORED).nonzero()[:, 0]
            indices_N = indices_N[indices_N > steps].to(heads.device)  # where each step has a round that reaches
            states += states_of_steps(heads, target_states, None, indices_N, steps)
            labels += [text.ids_T.to(heads.device)[indices_N + 1]] * steps
        cut = None if token_map is None else CutVocabulary(token_map, heads.config.vocab_size)
        return best_scale(states, torch.cat(labels), head().to(heads.device), cut, tokens)

    home = heads.device
    scale = choose_once(look, together=sharded)
    nn.Module.to(heads, home)
    return scale
