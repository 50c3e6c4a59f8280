"""What a target holds on a GPU where it only answers: to write completions, or to have its distributions written."""

from dataclasses import replace
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode

from draftsmith.decode.errors import InputError
from draftsmith.scripts.plan.config import CachePlanConfig, PreparePlanConfig
from draftsmith.train.losses.chunk_sizes import ChunkSizes
from draftsmith.train.losses.output_head import head_of
from draftsmith.train.memory.activations import BatchShape, shadow, trace_cache, trace_forward
from draftsmith.train.memory.moments import Moment
from draftsmith.train.memory.plan import read_config
from draftsmith.train.memory.setting import GIB, Placement
from draftsmith.train.memory.states import Weights, target_bytes
from draftsmith.train.models import DTYPES, empty_model, stored_dtype
from draftsmith.train.teacher.distribution_shards import distribution_bytes
from draftsmith.train.teacher.feature_shards import Layout

QUANTIZED: dict[str | None, Placement] = {None: "whole", "8bit": "8bit", "4bit": "4bit"}


class InferencePlan:
    """A target without data, and what a batch of texts makes it hold."""

    def __init__(self, config: CachePlanConfig | PreparePlanConfig):
        self.config = config
        self.writes = isinstance(config, PreparePlanConfig)
        length = None
        if isinstance(config, PreparePlanConfig):
            if config.endpoint is not None or config.answers == "given":
                raise InputError("recipe: expected a target that completes the prompts here to plan, found none")
            length = config.max_prompt_tokens and config.max_prompt_tokens + config.new_tokens()
        self.length = config.require_length(length)
        self.capacity = (config.gpu_memory - config.reserve) * GIB
        self.mode = FakeTensorMode()
        shape: Any = read_config(config.target, config.target_config, "target", config.trust_remote_code)
        dtype = stored_dtype(shape) if config.dtype == "auto" else config.dtype
        self.target = empty_model(
            shape, field="target", dtype=DTYPES[dtype], trust_remote_code=config.trust_remote_code
        ).requires_grad_(False)
        shadow(self.mode, self.target)
        batch = BatchShape(self.length, config.batch_size)
        first = replace(batch, length=getattr(config, "max_prompt_tokens", None) or self.length)  # what is prefilled
        self._forward = trace_forward(self.mode, self.target, first, "float32")
        self._cache = trace_cache(self.mode, self.target, batch, "float32")

    @property
    def held(self) -> dict[str, float]:
        """The bytes that are there at all times."""
        place: Placement = QUANTIZED[self.config.target_quantization]
        return {name: size / self.spread for name, size in target_bytes(self.target, place, 1).items()}

    @property
    def spread(self) -> int:
        """The GPUs that one target lies on, layer after layer: they compute in turns."""
        return self.config.gpus if self.config.target_device == "auto" else 1

    def moments(self, rows: int) -> list[Moment]:
        """Return the times at which memory may be at its most."""
        head, config = head_of(self.target).weight, self.config
        if isinstance(config, PreparePlanConfig):
            kept, logits = self._cache(rows), float(6 * 4 * rows * len(head))  # processors sort and copy
            prefill = {"target: keys and values": kept, "target: activations": self._forward(rows)}
            return [Moment("prefill", prefill), Moment("sampling", {"target: keys and values": kept, "logits": logits})]
        if config.features:  # each depth's until all are joined
            features = 2 * self.hidden_bytes(rows) * len(self.layout.layer_ids)
            return [Moment("the forward", {"target: activations": self._forward(rows), "features": features})]
        sizes = ChunkSizes.on_gpu(self.config.gpu_memory * GIB)
        logits = float(sizes.chunk * head.element_size() + 8 * 4 * sizes.part)
        return [
            Moment("the forward", {"target: activations": self._forward(rows)}),
            Moment("the distributions", {"hidden states": self.hidden_bytes(rows), "logits of a chunk": logits}),
        ]

    @property
    def layout(self) -> Layout:
        """The features that a cache of them would have."""
        assert isinstance(self.config, CachePlanConfig)
        return Layout.of(self.config, self.target.config)

    def disk_bytes(self) -> int:
        """Return the bytes of a token in a cache, uncompressed."""
        assert isinstance(self.config, CachePlanConfig)
        return self.layout.position_bytes if self.config.features else distribution_bytes(self.config.k)

    def hidden_bytes(self, rows: int) -> float:
        """Return the bytes of what the head sees of so many texts."""
        weight = head_of(self.target).weight
        return float(rows * self.length * weight.shape[1] * weight.element_size())

    def total(self, rows: int) -> float:
        """Return the most bytes at any time, the reserve left out."""
        return sum(self.held.values()) + max(moment.total for moment in self.moments(rows))

    def largest(self) -> int:
        """Return the most texts of a batch that fit, up to 4,096; 0 if one does not."""
        rows = 0
        for step in (2**n for n in reversed(range(13))):
            if rows + step <= 4096 and self.total(rows + step) <= self.capacity:
                rows += step
        return rows

    def bytes_of_a_step(self) -> float:
        """Return the bytes that writing one token of each text reads: the weights, and keys and values half grown."""
        weight = head_of(self.target).weight
        return Weights.of(self.target).all * weight.element_size() + self._cache(self.config.batch_size) / 2
