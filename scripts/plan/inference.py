"""The memory plan of a target without training: writing completions, or a cache of its distributions or features."""

from dataclasses import replace

from draftsmith.decode.cache.features import decoder_layers
from draftsmith.decode.errors import InputError
from draftsmith.scripts.plan.config import CachePlanConfig, PreparePlanConfig
from draftsmith.train.job.flops import DEVICES, Work
from draftsmith.train.losses.chunk_sizes import ChunkSizes
from draftsmith.train.losses.output_head import head_of
from draftsmith.train.memory.activations import trace_cache
from draftsmith.train.memory.moments import Moment
from draftsmith.train.memory.plan import MemoryPlan
from draftsmith.train.memory.setting import GIB, MemorySetting, Placement
from draftsmith.train.memory.states import Weights, target_bytes
from draftsmith.train.teacher.distribution_shards import distribution_bytes
from draftsmith.train.teacher.feature_shards import Layout

QUANTIZED: dict[str | None, Placement] = {None: "whole", "8bit": "8bit", "4bit": "4bit"}
READING = 0.5
"""The assumed share of the memory's bandwidth that decoding uses to read weights."""


class InferencePlan(MemoryPlan):
    """The memory of a target that decodes a batch of texts, or computes a forward of it."""

    most_rows = 4096

    def __init__(self, config: CachePlanConfig | PreparePlanConfig):
        self.writes = isinstance(config, PreparePlanConfig)  # decodes texts, in place of reading existing ones
        length = None
        if isinstance(config, PreparePlanConfig):
            if config.endpoint is not None or config.answers == "given":
                raise InputError("recipe: expected a target that completes the prompts here to plan, found none")
            length = config.max_prompt_tokens and config.max_prompt_tokens + config.new_tokens()
        elif config.teacher:
            raise InputError(f"teacher: expected none to plan a cache on GPUs here, found {', '.join(config.teacher)}")
        place = QUANTIZED[config.target_quantization]
        setting = MemorySetting("ddp", False, False, config.dtype, place, config.batch_size)
        super().__init__(config, setting, config.require_length(length))
        self.model = self.target(self.setting.target_dtype)
        prompts = replace(self.batch, length=getattr(config, "max_prompt_tokens", None) or self.batch.length)
        self._forward = self.forward_bytes(self.model, prompts, "float32")
        self._cache = trace_cache(self.mode, self.model, self.batch, "float32")

    @property
    def spread(self) -> int:
        """The GPUs over which one target's layers are spread; they compute in turns."""
        return int(self.config.gpus) if self.config.target_device == "auto" else 1

    def held(self, setting: MemorySetting) -> dict[str, float]:
        """Return the bytes that are held at all times."""
        assert setting.target is not None
        return {name: size / self.spread for name, size in target_bytes(self.model, setting.target, 1).items()}

    def moments(self, setting: MemorySetting) -> list[Moment]:
        """Return the moments at which memory may peak."""
        head, config, rows = head_of(self.model).weight, self.config, setting.rows
        forward = {"target: activations": self._forward(rows)}
        if self.writes:
            cache = {"target: keys and values": self._cache(rows)}
            sampling = {"logits": float(6 * 4 * rows * len(head))}  # processors sort and copy them
            return [Moment("prefill", cache | forward), Moment("sampling", cache | sampling)]
        if config.features:  # twice: single layers and their concatenation
            features = 2 * self._hidden_bytes(rows) * len(self.layout.layer_ids)
            return [Moment("the forward", forward | {"features": features})]
        sizes = ChunkSizes.on_gpu(config.gpu_memory * GIB)
        logits = float(sizes.chunk * head.element_size() + 8 * 4 * sizes.part)
        return [
            Moment("the forward", forward),
            Moment("the distributions", {"hidden states": self._hidden_bytes(rows), "logits of a chunk": logits}),
        ]

    @property
    def layout(self) -> Layout:
        """The layout of a feature cache."""
        decoder_layers(self.model)  # raises InputError for a family whose features cannot be read
        return Layout.of(self.config, self.model.config)

    def disk_bytes(self) -> int:
        """Return the uncompressed bytes of a token in a cache."""
        return self.layout.position_bytes if self.config.features else distribution_bytes(self.config.k)

    def _hidden_bytes(self, rows: int) -> float:
        """Return the bytes of a batch's last hidden states."""
        weight = head_of(self.model).weight
        return float(rows * self.batch.length * weight.shape[1] * weight.element_size())

    def bytes_of_a_step(self) -> float:
        """Return the bytes read to write one token of each text: the weights, and half of the final keys and values."""
        weight = head_of(self.model).weight
        return Weights.of(self.model).all * weight.element_size() + self._cache(self.setting.rows) / 2

    def hours(self) -> float | None:
        """Return the hours of `tokens` tokens; None if the model's arithmetic is not known."""
        config, work = self.config, Work.of(self.model)
        if work is None:
            return None
        token, copies, rows = work.forward(1, self.batch.length / 2, 1), config.gpus / self.spread, self.setting.rows
        if not self.writes:
            return float(config.tokens * token / self.speed() / copies / 3600)
        # Decoding a token is bounded by reading the weights, or for large batches by arithmetic.
        reading = self.bytes_of_a_step() / (DEVICES[config.device].terabytes * 1e12 * READING)
        step = max(reading, rows * token / self.speed())
        return float(config.tokens / rows * step / copies / 3600)

    def assumptions(self) -> list[str]:
        """Return the assumptions, with the speed of reading weights."""
        reading = f"weights read at {READING:.0%} of {DEVICES[self.config.device].terabytes:g} TB/s"
        return super().assumptions() + [reading] * self.writes

    def title(self) -> str:
        """Return the machine and the batch in words."""
        return f"{self.config.gpu_memory:g} GiB, {self.setting.rows} texts of {self.batch.length} tokens"

    def remarks(self) -> list[str]:
        """Return the size of a cache."""
        if self.writes:
            return []
        size = self.disk_bytes()
        return [f"on disk: at most {self.config.tokens * size / 1e9:,.0f} GB, {size} bytes a token"]
