"""What a distillation run holds in memory at each moment of a step, computed without weights and without a GPU.

Some of it is there at all times (`model_states`), and some comes and goes (`activations`). Not counted: kernels'
workspaces and the allocator's fragmentation, for which a plan sets an allowance aside.
"""

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property, lru_cache

from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedModel

from draftsmith.train.losses.chunk_sizes import ChunkSizes
from draftsmith.train.losses.objective import Objective
from draftsmith.train.losses.output_head import head_of
from draftsmith.train.memory.activations import Activations, Affine, BatchShape, common_vocabulary, trace_loss
from draftsmith.train.memory.moments import Moment
from draftsmith.train.memory.setting import Precision
from draftsmith.train.teacher.distribution_shards import distribution_bytes


@dataclass
class Footprint:
    """What one GPU holds, as a function of the rows of a micro batch."""

    mode: FakeTensorMode
    draft: PreTrainedModel
    target: PreTrainedModel | None
    objective: Objective
    batch: BatchShape
    """Of the draft, with a parallel draft's masks."""
    precision: Precision
    activations: Activations
    target_forward: Affine
    """`trace_forward` of the target; zero without one in memory."""
    draft_forward: Affine
    """Likewise of the draft; looked at for evaluation only."""
    held: dict[str, float]
    """Bytes that are there at all times."""
    sizes: ChunkSizes
    """Of the loss."""
    step: float = 0.0
    """What the optimiser takes for a moment."""
    k: int = 32
    """Tokens of a cached distribution."""
    cache: Affine | None = None
    """`trace_cache` of a draft that writes texts itself."""

    def __post_init__(self) -> None:
        self._traced_loss = lru_cache(self._trace_loss)

    def positions(self, rows: int) -> int:
        """Return the positions that the loss is taken over, all of them completion tokens in the worst case."""
        return rows * (self.batch.entries - 1)

    def teacher_bytes(self, rows: int) -> float:
        """Return the bytes of what p is made from: the target's hidden states, or its cached distributions."""
        if not self.objective.needs_target:
            return 0.0
        places = rows * (self.batch.length - 1)  # masks learn what these do
        if self.target is None:
            return float(places * distribution_bytes(self.k))
        weight = head_of(self.target).weight
        return float(places * weight.shape[1] * weight.element_size())

    @property
    def _chunk(self) -> int:
        """Positions of a chunk of the loss."""
        return max(1, self.sizes.chunk // common_vocabulary(self.draft, self.target))

    @cached_property
    def _chunks(self) -> list[Affine]:
        """`trace_loss` by the number of chunks, from two on: the first is computed beside no other."""
        pairs = zip(self._traced_loss(2 * self._chunk), self._traced_loss(3 * self._chunk), strict=True)
        return [Affine.through(2, two, 3, three) for two, three in pairs]

    def _trace_loss(self, positions: int) -> tuple[float, float]:
        models = self.draft, self.target
        return trace_loss(self.mode, self.objective, *models, positions, self.precision, self.k, self.sizes)

    def loss_bytes(self, rows: int) -> tuple[float, float]:
        """Return `trace_loss` of so many rows."""
        positions = self.positions(rows)
        if positions <= 2 * self._chunk:
            return self._traced_loss(positions)
        forward, backward = (affine(positions / self._chunk) for affine in self._chunks)
        return forward, backward

    def eager_logits(self, rows: int) -> float:
        """Return what a loss on whole logits would take.

        Those of both models, their float32 log-probabilities, and the gradient to the draft's.
        """
        size = self.positions(rows) * common_vocabulary(self.draft)
        width = 4 if self.precision == "float32" else 2
        theirs = head_of(self.target).weight.element_size() if self.target is not None else 0
        return float(size * (2 * width + theirs + 8))

    def moments(self, rows: int, eval_rows: int) -> list[Moment]:
        """Return the times at which memory may be at its most.

        Args:
            rows: of a micro batch.
            eval_rows: of a batch of evaluation; 0 for none.
        """
        parts, loss = self.activations, self.loss_bytes(rows)
        copies = max(0.0, parts.in_loss.constant)
        moments = [
            Moment("the target's forward", {"target: activations": self.target_forward(rows)}),
            Moment(
                "the loss",
                {
                    "draft: copies of weights for autocast": copies,
                    "draft: activations": parts.in_loss(rows) - copies,
                    "p's hidden states or distributions": self.teacher_bytes(rows),
                    "loss: logits of a chunk, gradients of head and hidden states": loss[0],
                },
            ),
            Moment(
                "the head's backward",
                {"draft: activations": parts.kept(rows), "loss: gradients of head and hidden states": loss[1]},
            ),
            Moment("the backward", {"draft: activations, one layer's backward": parts.backward(rows)}),
            Moment("the optimiser's step", {"optimiser: temporary": self.step}),
        ]
        if self.cache is not None:
            logits = 6 * 4 * rows * len(head_of(self.draft).weight)  # processors sort and copy
            moments.append(
                Moment("sampling", {"draft: keys and values": self.cache(rows), "sampling: logits": float(logits)})
            )
        if eval_rows:
            sampler, evaluated = self.teacher_bytes(eval_rows), self.loss_bytes(eval_rows)[0]
            most = max(self.target_forward(eval_rows), sampler + max(self.draft_forward(eval_rows), evaluated))
            moments.append(Moment("evaluation", {"both models: activations": most}))
        return moments

    def peak(self, rows: int, eval_rows: int = 0) -> Moment:
        """Return the moment with the most."""
        return max(self.moments(rows, eval_rows), key=lambda moment: moment.total)

    def total(self, rows: int, eval_rows: int = 0) -> float:
        """Return the most bytes at any time."""
        return sum(self.held.values()) + self.peak(rows, eval_rows).total

    def largest(self, capacity: float, eval_rows: int = 0, limit: int = 4096) -> int:
        """Return the most rows of a micro batch that fit in so many bytes, below twice `limit`; 0 if one does not."""
        over = 1
        while over <= limit and self.total(over, eval_rows) <= capacity:
            over *= 2
        # Between the last power of two that fits and the first that does not.
        return bisect_right(range(over), capacity, lo=over // 2 + 1, key=lambda rows: self.total(rows, eval_rows)) - 1
