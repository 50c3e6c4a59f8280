"""Training of EAGLE-3 heads: the training-time test on a frozen target (Li et al. 2025, section 3.2).

One forward of the target gives the features of three depths, the embeddings, and the last hidden states that its
distributions are made of. With a cache of features and last hidden states, the target's embeddings and head are enough.
The K steps of all rounds follow, and each step's loss is taken over a chunk of positions at a time: steps × tokens ×
vocabulary is never held. Shape suffixes: B rows, T positions, S rounds of a step, N chosen positions, K steps,
F features, H hidden.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.cache.features import collected
from draftsmith.medusa.chains import Chains, ChainTrainer, FeaturesOf
from draftsmith.medusa.eagle.config import EagleTrainingConfig
from draftsmith.medusa.eagle.heads import EagleHeads
from draftsmith.medusa.eagle.unrolled import computing_dtype, unrolled
from draftsmith.train.data.examples import TrainingData
from draftsmith.train.job.flops import Work
from draftsmith.train.losses.inside_forward import open_forward
from draftsmith.train.losses.output_head import head_of
from draftsmith.train.losses.positions import LossPositions
from draftsmith.train.optimizer import MuonAdamW
from draftsmith.train.teacher.distributions import LiveDistributions
from draftsmith.train.teacher.feature_reader import cached_states


class Seen(NamedTuple):
    """What a forward of the target leaves of a batch, or a cache has of it, without gradients."""

    hidden: Tensor
    """What its head sees, (B, T, H)."""
    embeddings: Tensor
    """Of the tokens, (B, T, H)."""
    features: Tensor
    """What the heads fuse, (B, T, F)."""


class EagleTrainer(ChainTrainer):
    """Minimises Σ_k decay^k · objective of step k, against the target's distribution or text, on completions.

    Evaluation replays held-out completions with a chain of K tokens, and reports `mean_acceptance_length`, `alpha`
    (of the first step), `loss`, and for each step k ≥ 1, which is step k − 1 of the paper, `accuracy_k`, the share of
    its tokens that it puts first, and `alpha_k`, its Σ_v min(p, q).

    Args:
        heads: in training.
        target: frozen; with `config.teacher_cache` its layers are not used, and may be without weights (`load_ends`).
        tokenizer: theirs, and so the others as in `RecipeTrainer`.

    Raises:
        InputError: heads for another target.
    """

    def __init__(
        self,
        heads: EagleHeads,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        config: EagleTrainingConfig,
        train_dataset: TrainingData,
        eval_dataset: TrainingData | None = None,
        **kwargs: Any,
    ):
        heads.check_fits(target)
        self.config: EagleTrainingConfig = config
        self.heads: EagleHeads = heads
        # Losses run inside of these: `train/losses/inside_forward.py`.
        open_forward(heads, heads.lm_head)
        live, count = None if config.teacher_cache else target, config.num_steps
        super().__init__(heads, live, tokenizer, config, train_dataset, eval_dataset, count=count, **kwargs)
        self.embed: Any = target.get_input_embeddings()
        if live is None:  # these two are all that stays of it
            self.embed.to(self.args.device)
            self.target_head = head_of(target).cut(self.vocab_size).to(self.args.device)

    def summed_loss(self, model: nn.Module, inputs: dict[str, Any], positions: LossPositions) -> Tensor:
        """Return Σ_k decay^k · the objective summed over step k's tokens."""
        seen = self._seen(inputs)

        def loss() -> Tensor:
            at = Chains(inputs, self.count)
            teacher = seen.hidden, self.teacher_head

            def of_states(*states: Tensor) -> Tensor:
                head = self.known(self.heads.head)
                return self.chain_loss(at, states, lambda _: head, teacher)

            return self.heads.lm_head(*self._states(seen, inputs, at), inside=of_states)  # type: ignore[no-any-return]

        return model(inside=loss)  # type: ignore[no-any-return]

    def replay_sums(self, model: nn.Module, inputs: dict[str, Any], chosen_BT: Tensor) -> Tensor:
        """Return each sample's tokens, rounds and loss, and three sums a step, (B, 3 + 3K)."""
        seen = self._seen(inputs)

        def sums() -> Tensor:
            at = Chains(inputs, self.count)
            p = LiveDistributions(at.teacher(seen.hidden), self.target_head)

            def of_states(*states: Tensor) -> Tensor:
                head = self.known(self.heads.head)

                def features(k: int, features_of: FeaturesOf) -> Tensor:
                    return features_of(states[k], head)

                return self.chain_sums(at, chosen_BT, p, features)

            return self.heads.lm_head(*self._states(seen, inputs, at), inside=of_states)  # type: ignore[no-any-return]

        return model(inside=sums)  # type: ignore[no-any-return]

    def _seen(self, inputs: dict[str, Any]) -> Seen:
        """Run the target once on a batch, or look up what a cache has of it."""
        if "teacher" in inputs:
            states = cached_states(inputs["teacher"])
            hidden = states["hidden"].to(self.target_head.weight.dtype)
            return Seen(hidden, self.embed(inputs["input_ids"]), states["features"])
        embeddings: list[Tensor] = []
        # A sharded target's embeddings are whole inside of its forward alone.
        hook = self.embed.register_forward_hook(lambda _m, _i, output: embeddings.append(output))
        try:
            with collected(self.target, self.heads.layer_ids) as features:
                hidden = self.target_hidden(inputs)
        finally:
            hook.remove()
        return Seen(hidden, embeddings[0].to(hidden.device), features[0].to(hidden.device))

    def _states(self, seen: Seen, inputs: dict[str, Any], at: Chains) -> Sequence[Tensor]:
        """Return what the head sees of each step at the places where it learns, (N, H); anything at others."""
        ids_BT, positions_BT = inputs["input_ids"], inputs.get("position_ids")
        packed = positions_BT is not None
        if positions_BT is None:
            positions_BT = torch.arange(ids_BT.shape[1], device=ids_BT.device).expand_as(ids_BT)
        # The last place of a row has no token behind it.
        positions_BS = positions_BT[:, :-1]
        dtype = computing_dtype(self.heads.fc.weight)  # of a long context the features are the largest tensor
        steps = unrolled(
            self.heads,
            seen.embeddings[:, 1:].to(dtype),
            seen.features[:, :-1].to(dtype),
            positions_BS,
            self.count,
            (positions_BS == 0).cumsum(1) if packed else None,
        )
        # A guess of the token c + 1 by step k is of the round that begins at c − 1 − k.
        row_N, column_N = at.flat // ids_BT.shape[1], at.flat % ids_BT.shape[1]
        return [
            # A batch of short rows may have no round as long, and nothing to learn from it.
            (step if step.hidden.shape[1] else steps[0]).hidden[row_N, (column_N - 1 - k).clamp(min=0)]
            for k, step in enumerate(steps)
        ]

    def trained_work(self) -> Work | None:
        """Return the arithmetic of the K steps: a layer and a head each."""
        heads, text = self.heads, self.heads.config
        layer = Work.of_maps(*[heads.midlayer] * self.count, heads.fc).head
        attention = 2 * text.num_attention_heads * heads.midlayer.self_attn.head_dim * self.count
        return Work(layer, Work.of_maps(*[heads.lm_head] * self.count).head, attention)

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """Make Muon where it is asked for."""
        if self.optimizer is None and self.config.optimizer == "muon":
            rate, decay = self.args.learning_rate, self.args.weight_decay
            self.optimizer = MuonAdamW(self.heads, rate, decay, ends=[self.heads.lm_head])
        return super().create_optimizer(model)
