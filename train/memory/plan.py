"""Memory plans: whether a run fits its GPUs and how long it takes, from its config, without weights or a GPU.

A kind names what it trains and with which trainer. Kernels' workspaces and the allocator's fragmentation are not
counted; a plan sets a reserve aside for them.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, PreTrainedModel

from draftsmith.decode.errors import InputError, first_line, one_of
from draftsmith.decode.sampling import Sampler
from draftsmith.train.files import is_gguf
from draftsmith.train.job.flops import DEVICES
from draftsmith.train.losses.chunked import ChunkSizes
from draftsmith.train.losses.output_head import open_forward
from draftsmith.train.memory.machines import GIB, RESERVE, Machines, Strategy
from draftsmith.train.memory.states import Placement, Weights, held_bytes, optimizer_bytes, step_bytes, target_bytes
from draftsmith.train.memory.trace import (
    BatchShape,
    InPrecision,
    LiveBytes,
    Phases,
    Precision,
    hold_gradients,
    precision_of,
    shadow,
)
from draftsmith.train.models import DTYPES, empty_model, load_config, stored_dtype
from draftsmith.train.recipe import RecipeConfig

DROPOUT = ("attention_dropout", "attn_pdrop")
MOMENTS = {
    "teacher": "the target's forward",
    "forward": "the drafter's forward",
    "loss": "the loss",
    "backward": "the backward",
    "optimizer": "the optimiser's step",
    "evaluation": "an evaluation",
}


def read_config(path: str, field: str, trust_remote_code: bool = False) -> Any:
    """Read a model's config, from its directory, the hub, a GGUF file or a config.json."""
    if is_gguf(path):
        return load_config(path, field=field)
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        expected = "a model directory, a hub id that can be reached, or a config.json"
        raise InputError(f"{field}: expected {expected}, found {path}: {first_line(error)}") from error


def configured_strategy(training: Any) -> Strategy:
    """Return how training arguments spread what is trained."""
    if training.fsdp:
        return "fsdp2"
    if not training.deepspeed:
        return "ddp"
    stages: dict[int, Strategy] = {1: "zero1", 2: "zero2", 3: "zero3"}
    return stages.get(training.hf_deepspeed_config.get_value("zero_optimization.stage", 0), "ddp")


def placement(config: RecipeConfig) -> Placement | None:
    """Return how a config places the target; None if something else gives its states."""
    if config.states_given:
        return None
    if config.target_sharded:
        return "sharded"
    quantized: dict[str | None, Placement] = {"8bit": "8bit", "4bit": "4bit"}
    return quantized.get(config.target_quantization, "whole")


class TrainingPlan(ABC):
    """A target and a drafter without data, and the memory of a GPU that trains the drafter."""

    label: ClassVar[str] = "drafter"
    """The drafter's name in the table."""
    trainer_class: ClassVar[Any]

    def __init__(self, config: Any, machines: Machines):
        if config.max_length is None:
            raise InputError("max_length: expected the tokens of a sample, found none")
        one_of(("auto", *DTYPES)).check("target_dtype", config.target_dtype)
        if config.target_sharded and machines.gpus == 1:
            raise InputError("target_sharded: expected more than one process, found one")
        training = config.training
        self.config, self.machines = config, machines
        self.strategy: Strategy = machines.strategy or configured_strategy(training)
        if config.optimizer == "muon" and self.strategy != "ddp":
            raise InputError(f"optimizer: expected trainer for a draft under {self.strategy}, found muon")
        half = training.bf16 or training.fp16
        self.precision: Precision = "float32" if not half else "autocast" if self.strategy == "ddp" else "half"
        self.placement = placement(config)
        self.batch = BatchShape(config.max_length, int(training.per_device_train_batch_size), config.packing)
        self.eval_rows = int(training.per_device_eval_batch_size) if training.eval_strategy != "no" else 0
        self.mode = FakeTensorMode()
        self.target_shape: Any = read_config(config.target, "target", config.trust_remote_code)
        self.dtype: str = stored_dtype(self.target_shape) if config.target_dtype == "auto" else config.target_dtype
        self.target = self.empty(self.target_shape, self.dtype, "target").requires_grad_(False)
        with torch.device("meta"):
            self.drafter: Any = self.build()
            self.model: Any = self.joined()
        shadow(self.mode, self.target)
        shadow(self.mode, self.model, half=self.precision == "half")  # float16 takes the bytes of bfloat16
        # Losses run inside of the forwards of some of these.
        open_forward(self.model, *(module for module in self.model.modules() if isinstance(module, nn.Linear)))
        with self.mode, precision_of(self.precision):
            self.trainer = self.make_trainer()

    def empty(self, shape: Any, dtype: str, field: str) -> PreTrainedModel:
        """Return a model on the meta device, without dropout in attention.

        Fused kernels draw it again in the backward; without a GPU it would be stored.
        """
        for name in DROPOUT:
            if getattr(shape, name, None):
                setattr(shape, name, 0.0)
        code = self.config.trust_remote_code
        return empty_model(shape, field=field, dtype=DTYPES[dtype], trust_remote_code=code)

    @abstractmethod
    def build(self) -> nn.Module:
        """Return the drafter in float32, with gradients where it trains; it is called inside the meta device."""

    def joined(self) -> nn.Module:
        """Return the module that the optimizer steps: the drafter, unless the target is trained with it."""
        return self.drafter  # type: ignore[no-any-return]

    def parts(self) -> dict[str, Any]:
        """Return the attributes of the kind's trainer that its loss reads."""
        return {}

    def make_trainer(self) -> Any:
        """Return the run's trainer without data, whose loss is traced."""
        config, target = self.config, None if self.config.states_given else self.target
        sizes = ChunkSizes.on_gpu(self.machines.gpu_memory * GIB, config.loss_chunk)
        parts = {"config": config, "recipe": config, "model": self.model, "target": target, "target_ends": self.target}
        # In evaluations top-k and top-p would read data; what they take is not counted.
        parts |= {"sizes": sizes, "sampler": Sampler.of(config.temperature, 0, 1.0)}
        parts |= {"vocab_size": self.target_shape.get_text_config().vocab_size}
        parts |= {"_first_loss": None, "accelerator": SimpleNamespace(unwrap_model=lambda model: model)}
        return self.trainer_class.without_data(**parts | self.parts())

    def inputs(self, batch: BatchShape, learns: bool = True) -> dict[str, Any]:
        """Return a batch as the trainer takes it."""
        given = {"teacher": self.states(batch)} if self.config.states_given else {}
        return batch.labelled(self.trainer.ahead) | given

    def states(self, batch: BatchShape) -> dict[str, Tensor]:
        """Return the target's states of a batch, as a cache has them."""
        width, depths = self.target_shape.get_text_config().hidden_size, len(self.layer_ids)
        dtype = torch.int16 if DTYPES[self.dtype].itemsize == 2 else torch.float32
        widths = {"hidden": width, "features": depths * width}
        return {name: torch.zeros(batch.rows, batch.length, size, dtype=dtype) for name, size in widths.items()}

    def weights(self) -> Weights:
        """Count the drafter's numbers; by default FSDP gathers them as one."""
        return Weights.of_module(self.drafter, self.target_shape.get_text_config().hidden_size)

    def target_held(self) -> dict[str, float]:
        """Return the bytes that the target takes at all times; of one whose states are given, its ends."""
        return {} if self.placement is None else target_bytes(self.target, self.placement, self.machines.gpus)

    @property
    def layer_ids(self) -> Sequence[int]:
        """The layers after which the drafter reads the target's states, the last one apart; by default none."""
        return ()

    @property
    def repeats(self) -> float:
        """The entries of the drafter's forward for each token."""
        return 1.0

    def evaluated(self, inputs: dict[str, Any], model: nn.Module) -> Any:
        """Run an evaluation of a batch."""
        return self.trainer.replay_sums(model, inputs, inputs["input_ids"][:, 1:] == 0)

    # The rest is the same for all kinds.

    @property
    def optimizer(self) -> str:
        """The optimiser, as `optimizer_bytes` names it."""
        optim = self.config.training.optim
        muon = self.config.uses_muon(sharded=self.strategy != "ddp")
        return "muon" if muon else str(getattr(optim, "value", optim))

    @cached_property
    def held(self) -> dict[str, float]:
        """The bytes that a GPU holds at all times, by their use."""
        drafter, joint, weights = self.drafter, self.config.trains_target, self.weights()
        if (by_adamw := self.trainer.adamw_modules) is None:
            by_adamw = [drafter.get_input_embeddings(), drafter.get_output_embeddings()]
        weights = replace(weights, all=self.trained if joint else weights.all, trained=self.trained)
        states, label = optimizer_bytes(self.model, self.optimizer, by_adamw), "trained" if joint else self.label
        own = held_bytes(weights, states, self.strategy, self.machines.gpus, self.precision, label)
        return self.target_held() | own

    @property
    def trained(self) -> int:
        """The numbers that have gradients."""
        return sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)

    @cached_property
    def moments(self) -> dict[str, float]:
        """The most bytes in addition to those held, at each moment of a step: `MOMENTS`."""
        model, checkpointing = self.model, bool(self.config.training.activation_checkpointing)
        with self.mode:
            model.train()
            if checkpointing:
                model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
            hold_gradients(model)
            with LiveBytes() as live:
                self.trainer.clock = clock = Phases(live)
                self.trainer.summed_loss(InPrecision(model, self.precision), self.inputs(self.batch)).backward()
                clock.end("backward")
        peaks: dict[str, float] = {**clock.peaks}
        if self.placement is None:
            peaks.pop("teacher", None)
        peaks["optimizer"] = step_bytes(self.optimizer, self.trained, self.strategy, self.machines.gpus)
        if self.eval_rows:
            kept = live.now  # such as a copy of the target's head that the first step makes
            peaks["evaluation"] = kept + self._evaluation()
        return {name: float(peaks[name]) for name in MOMENTS if name in peaks}

    def _evaluation(self) -> float:
        with self.mode, torch.no_grad(), LiveBytes() as live:
            self.model.eval()
            self.trainer.clock = Phases(live)
            inputs = self.inputs(replace(self.batch, rows=self.eval_rows), learns=False)
            try:
                self.evaluated(inputs, InPrecision(self.model, self.precision))
            except RuntimeError as error:  # the expected rounds, at the end, are computed on the host from data
                if "numpy" not in str(error):
                    raise
        return float(max([live.peak, *self.trainer.clock.peaks.values()]))

    @property
    def total(self) -> float:
        """The peak in bytes, without the reserve."""
        return sum(self.held.values()) + max(self.moments.values())

    @property
    def fits(self) -> bool:
        """Whether the peak and the reserve fit."""
        return self.total + RESERVE <= self.machines.gpu_memory * GIB

    @property
    def hours(self) -> float | None:
        """The hours of `tokens` tokens by arithmetic; None if a model's is not known."""
        machines, seen = self.machines, self.batch.length / 2
        work, student = self.trainer.work(1, seen, 1), self.trainer.works[1]
        if work is None or student is None:
            return None
        again = student.forward(1, seen, 1) if self.config.training.activation_checkpointing else 0.0
        work += (self.repeats - 1) * student.step(1, seen, 1) + self.repeats * again
        rate = DEVICES[machines.device] * 1e12 * machines.mfu * machines.gpus
        return machines.tokens * work / rate / 3600
