"""Training of parallel drafts, with the loss of a plain draft at every position and at its masks.

The target's forward runs on the texts alone, since a mask learns the target's distribution at a position of the text.
Shape suffixes: B rows, T tokens of a row, M masks of a row, L = T + M, N positions with a loss, E entries: these
positions and the masks that learn, chain by chain; H hidden, V vocabulary, K tokens of a chain, F features.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import EvalPrediction

from draftsmith.decode.errors import InputError
from draftsmith.decode.replay.rounds import expected_rounds_of_starts
from draftsmith.distill.parallel.chains import Chains, draw_lengths, kept_shares, make_chains
from draftsmith.distill.parallel.layout import mask_token_of
from draftsmith.distill.parallel.model import loss_vocabulary, parallel_hidden
from draftsmith.distill.trainer import DistillTrainer
from draftsmith.train.job.step_checks import Learner
from draftsmith.train.losses.chunked import chunked_features, chunked_objective
from draftsmith.train.losses.distributions import GatheredDistributions
from draftsmith.train.losses.output_head import OutputHead, inside_model
from draftsmith.train.losses.positions import LossPositions
from draftsmith.train.replay_metrics import COLUMNS, acceptance_metrics, replay_sums


class ParallelTrainer(DistillTrainer):
    """A trainer that minimises an objective at the completions' positions and their masks (PARD, arXiv 2504.18583).

    The loss is summed over each position's chain, and averaged over positions. Block terms take a
    chain as the drafted block. Evaluation replays rounds of one forward each: `mean_acceptance_length` is that of
    blocks of min(`draft_length`, K) tokens, and `alpha_j` is Σ_v min(p, q) of the j-th token after the next one.
    `alpha` and the other metrics are those of the next token, as for a plain draft with the same weights, whose τ is
    `plain_mean_acceptance_length`.
    """

    needs_host_arrays = True
    hidden_of = staticmethod(parallel_hidden)

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        config = self.config
        self.compute_metrics = parallel_metrics
        self.mask_token = mask_token_of(self.draft)
        if self.cut is None:
            self.vocab_size = loss_vocabulary(self.draft, self.vocab_size)
        target = self.target_ends
        if target is not None and (size := target.config.get_text_config().vocab_size) < self.vocab_size:
            raise InputError(
                f"parallel_mask_token: expected a token that the target's vocabulary of {size} has, for a draft whose "
                f"embeddings are its head, found {self.mask_token}"
            )
        self.length = config.parallel
        self.shares = kept_shares(config.parallel, config.parallel_retention, config.parallel_minimum)
        self._mask_work = np.zeros(3)  # `Chains.work`, summed since the last line of the log

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """Draw a step's batches, and the masks of each."""
        batches, tokens = super().get_batch_samples(epoch_iterator, num_batches, device)
        with self.clock.phase("data"):
            return [{**batch, "chains": self._draw_chains(batch)} for batch in batches], tokens

    def _draw_chains(self, batch: dict[str, Any]) -> Chains:
        on_host, (rows, width) = batch["host"], batch["labels"].shape
        counts = np.bincount(on_host["positions"] // width, minlength=rows)
        seeds = int(self.args.seed), self.state.global_step, "masks"
        lengths = [
            draw_lengths(int(count), self.shares, *seeds, int(index))
            for count, index in zip(counts, on_host["index"], strict=True)
        ]
        chains = self._lay_out(batch, torch.from_numpy(np.concatenate(lengths)))
        self._mask_work += chains.work
        return chains.to(self.args.device)

    def _lay_out(self, batch: dict[str, Any], lengths_N: Tensor) -> Chains:
        on_host, shape = batch["host"], batch["labels"].shape
        positions = on_host.get("position_ids")
        flat_N = torch.from_numpy(on_host["positions"])
        return make_chains(flat_N, shape, lengths_N, None if positions is None else torch.from_numpy(positions))

    def _with_masks(self, inputs: dict[str, Any], chains: Chains) -> dict[str, Tensor]:
        """Return the inputs of `parallel_hidden`: in each row, the text and then the masks."""
        ids_BT = inputs["input_ids"]
        positions_BT = inputs.get("position_ids")
        if positions_BT is None:
            positions_BT = torch.arange(ids_BT.shape[1], device=ids_BT.device).expand_as(ids_BT)
        masks_BM = ids_BT.new_full(chains.positions_BM.shape, self.mask_token)
        masked = {
            "input_ids": torch.cat([ids_BT, masks_BM], dim=1),
            "position_ids": torch.cat([positions_BT, chains.positions_BM], dim=1),
            "anchors": torch.cat([positions_BT, chains.anchors_BM], dim=1),
        }
        return masked if chains.texts_BL is None else masked | {"texts": chains.texts_BL}

    def summed_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """Return the objective summed over this part's completion tokens and their masks."""
        chains: Chains = inputs["chains"]
        positions, objective = LossPositions(inputs["positions"][0]), self.objective
        # An entry learns the label and the distribution of its position: the target never sees masks.
        labels_E = self.vocabulary.labels(positions.next_tokens(inputs["input_ids"]))[chains.indices_E]
        p_E: GatheredDistributions | None = None
        if objective.needs_target:
            p_E = chains.gather(self.loss_distributions(inputs, positions))

        sizes = self.vocabulary.sizes(self.sizes)

        def objective_of(learners: Sequence[Learner]) -> Tensor:
            ((hidden_EH, head),) = learners
            return chunked_objective(objective, hidden_EH, head, p_E, labels_E, sizes)

        def loss_of(hidden_BLH: Tensor, head: OutputHead) -> Tensor:
            with self.clock.phase("loss"):
                return self.checked_loss(objective_of, (chains.take(hidden_BLH), self.loss_head(head)))

        masked = self._with_masks(inputs, chains)
        return model(**masked, inside=inside_model(self.draft, loss_of, self.hidden_of))

    def replay_sums(self, model: nn.Module, inputs: dict[str, Any], chosen_BT: Tensor) -> Tensor:
        """Return each sample's replay sums, loss, plain rounds, and two sums for each mask, (B, 7 + 2(K − 1)).

        The two sums, a count and Σ_v min(p, q), are those of the j-th token after the next one.
        """
        positions = LossPositions(inputs["positions"][0])
        labels_N, p_N = positions.next_tokens(inputs["input_ids"]), self._teacher_of(inputs, positions)
        flat_N, (rows, width) = torch.from_numpy(inputs["host"]["positions"]), inputs["labels"].shape
        row_N = flat_N // width
        counts_B = torch.bincount(row_N, minlength=rows)
        number_N = torch.arange(len(flat_N)) - (counts_B.cumsum(0) - counts_B)[row_N]  # of a position in its row

        table_EF: Tensor | None = None
        inside_BNK = torch.zeros(rows, int(counts_B.max()), self.length, dtype=torch.bool)
        # Every position is an anchor of K − 1 masks. They are spread over K − 1 forwards, so that a row's masks
        # are about as many as its tokens, and processes that share the draft's weights run the same number of forwards.
        masks = self.length - 1
        for part in range(masks):
            lengths_N = torch.where(number_N % masks == part, masks, -1)
            on_host = self._lay_out(inputs, lengths_N)
            chains = on_host.to(self.args.device)
            p_E, labels_E = chains.gather(p_N), labels_N[chains.indices_E]

            def features(
                hidden_BLH: Tensor,
                head: OutputHead,
                chains: Chains = chains,
                p_E: GatheredDistributions = p_E,
                labels_E: Tensor = labels_E,
            ) -> Tensor:
                hidden_EH, head = chains.take(hidden_BLH), self.loss_head(head)
                return chunked_features(self.evaluation_features, labels_E, hidden_EH, head, p_E, self.evaluation_sizes)

            masked = self._with_masks(inputs, chains)
            features_EF = model(**masked, inside=inside_model(self.draft, features, self.hidden_of)).float()
            if table_EF is None:
                table_EF = features_EF.new_zeros(inside_BNK.numel(), features_EF.shape[1])
            # The cells (row, position, offset) of the entries in a flattened (B, N, K).
            anchors_E = on_host.indices_E - on_host.offsets_E
            cells_E = (row_N * inside_BNK.shape[1] + number_N)[anchors_E] * self.length + on_host.offsets_E
            inside_BNK.view(-1)[cells_E] = True
            table_EF.index_copy_(0, cells_E.to(table_EF.device), features_EF)
        assert table_EF is not None
        return self._sums(table_EF.unflatten(0, inside_BNK.shape), inside_BNK.to(table_EF.device))

    def _sums(self, table_BNKF: Tensor, inside_BNK: Tensor) -> Tensor:
        losses = [losses_E.sum() for losses_E in (table_BNKF[..., 4] * inside_BNK).flatten(1)]
        plain_B5 = replay_sums(table_BNKF[:, :, 0, :4], inside_BNK[:, :, 0], self.config.draft_length)
        a_BNK = table_BNKF[..., 0].where(inside_BNK, 0.0)
        rounds_B = expected_rounds_of_starts(a_BNK, inside_BNK[:, :, 0].sum(1), self.config.draft_length)
        masks_BNK, overlap_BNK = inside_BNK[..., 1:], table_BNKF[..., 1:, 1]
        columns = [
            plain_B5[:, :1], rounds_B[:, None], plain_B5[:, 2:], torch.stack(losses)[:, None], plain_B5[:, 1:2],
            masks_BNK.sum(1), overlap_BNK.where(masks_BNK, 0.0).sum(1),
        ]  # fmt: skip
        return torch.cat([column.float() for column in columns], dim=1)

    @property
    def block(self) -> dict[str, Any]:
        """The length of a block, the mask token, and the field of vLLM's speculative config."""
        return {
            "tokens": self.length,
            "source": "PARD, arXiv 2504.18583",
            "mask_token": self.mask_token,
            "served": {"parallel_drafting": True},
        }

    @property
    def forbidden_tokens(self) -> list[int]:
        """The tokens that the draft must not write, including the mask."""
        return sorted({*super().forbidden_tokens, self.mask_token})

    def work(self, positions: float, seen: float, tokens: float) -> float | None:
        """Return the operations of some steps, including those of the draft's masks."""
        (masks, seen_by_masks, learning), self._mask_work = self._mask_work, np.zeros(3)
        work, (_, student) = super().work(positions, seen, tokens), self.works
        return None if work is None or student is None else work + student.step(masks, seen_by_masks, learning)


def parallel_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """Turn gathered sums, (samples, 7 + 2(K − 1)), into the ratios of `acceptance_metrics` and of parallel drafts."""
    samples = np.asarray(prediction.predictions, dtype=np.float64)
    shared = len(COLUMNS)
    metrics = acceptance_metrics(EvalPrediction(samples[:, :shared], samples[:, :1]))
    sums = samples.sum(0)
    metrics["plain_mean_acceptance_length"] = float(sums[0] / sums[shared])
    counts, overlaps = np.split(sums[shared + 1 :], 2)
    ratios = np.divide(overlaps, counts, out=np.full(len(counts), np.nan), where=counts > 0)
    return metrics | {f"alpha_{j}": float(ratio) for j, ratio in enumerate(ratios, start=1) if not np.isnan(ratio)}
