"""Settings that all training runs share."""

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from draftsmith.decode.errors import InputError, at_least, between, finite, more_than, one_of, require, require_some
from draftsmith.train.files import identity
from draftsmith.train.job.arguments import require_possible
from draftsmith.train.job.defaults import TRAINING, Defaults
from draftsmith.train.options import SAVE_DTYPES, TargetOptions, TeacherOptions, seconds_of

OPTIMIZERS = ("auto", "trainer", "muon")
OF_OPTIMIZER = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "optim", "optim_args")
LASTING = ("temperature", "top_k", "top_p", "prompt_loss", "optimizer", *(f"training.{name}" for name in OF_OPTIMIZER))
"""The settings of all kinds that a run keeps when it is resumed; the last ones are in its optimizer's state."""

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from draftsmith.train.losses.objective import Objective
else:  # `parse_config` adds their fields only where they are needed: the import takes long
    TrainingArguments = Any


def _training_arguments() -> TrainingArguments:
    import transformers

    return transformers.TrainingArguments(**TRAINING)


def _flat(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for f in fields(config):
        name, value = f"{prefix}{f.name}", getattr(config, f.name)
        yield from _flat(value, f"{name}.") if is_dataclass(value) else [(name, value)]


@dataclass
class RecipeConfig(TargetOptions, TeacherOptions):
    """Learn from a target, on completions that it wrote (`draftsmith prepare`)."""

    acceptance_metrics: ClassVar[tuple[str, ...]] = ("mean_acceptance_length", "alpha")
    """The metrics that may choose a checkpoint."""

    target: str
    """The frozen teacher: a model directory, hub id or GGUF file."""
    completions: list[str]
    """Completion directories to train on."""
    heldout: float | list[str] = field(default_factory=list)
    """The text to measure acceptance on, which chooses the checkpoint that is kept: completion directories whose
    prompts are not among those of `completions`, or a share of these, such as 0.02, held back by prompts. Needed where
    `training.eval_strategy` is not "no"."""
    source_weights: list[float] = field(default_factory=list)
    """How often an epoch takes the samples (or packed rows) of each of `completions`: 1 is once, 0.3 a random 30 % of
    them, others each epoch; all once if not given."""
    any_target: bool = False
    """Learn from completions that another target wrote, too."""
    unfinished: bool = False
    """Learn from completions with missing shards, too."""
    training: TrainingArguments = field(default_factory=_training_arguments, metadata={"defaults": TRAINING})
    """The Trainer's arguments. `output_dir` receives checkpoints and, at its top, the trained model: the checkpoint
    with the best acceptance on `heldout`, if there is such text and `load_best_model_at_end` is not false. If not
    given, `learning_rate` suits the kind of drafter and its width (in Python: None), the schedule is a cosine with a
    warm-up of 0.05 of the steps, and every tenth step is logged."""
    temperature: float = 1.0
    """Divides both models' logits in the loss and in replay: the temperature that the pair is deployed at."""
    top_k: int = 0
    """The deployment's top-k, in the loss and in replay; 0 for none."""
    top_p: float = 1.0
    """The deployment's top-p, in the loss and in replay."""
    max_length: int | None = None
    """Cut samples to this many tokens."""
    prompt_loss: bool = False
    """Learn at the positions of the prompts too: more to learn from in the same forwards, but not the text that will be
    drafted."""
    loss_chunk: int | None = None
    """Logits that the loss holds at a time, for any batch size: by default 2²⁴ on a CPU, and on a GPU what its memory
    allows, 2²⁷ of 80 GiB. More of them need fewer kernels and more memory."""
    packing: bool = False
    """Pack whole samples into rows of `max_length` tokens; they do not see each other."""
    stop_after: str | None = None
    """End training after this time, such as 40m or 1h30m, at the end of a step, and keep what was learned."""
    patience: int | None = None
    """End training after this many evaluations without a better `training.metric_for_best_model`."""
    target_dtype: str = "auto"
    """The frozen target's dtype: float32, bfloat16, float16 or float64; auto: as it is stored, or float32 where this
    device has no fast arithmetic for that. Trained weights are float32, with autocast under `training.bf16`."""
    attn_implementation: str | None = None
    """How both models compute attention: sdpa, eager, flex_attention, flash_attention_2 or another that transformers
    has here; its default, sdpa mostly, if not given. For packed rows sdpa takes a mask of T² entries a row; flex
    attention skips its empty blocks, and flash attention needs none."""
    target_sharded: bool = False
    """Shard the target's layers over the processes, in place of a whole copy each, and gather a layer while it
    computes: for targets that one device cannot hold, at the price of reading all of it over the network each step."""
    teacher_cache: list[str] = field(default_factory=list)
    """Caches of the target's features (`draftsmith cache --features true`) or, for a draft model, of its distributions,
    that together cover `completions` and `heldout`. The target is not loaded: of its weights only the ends are read,
    and none with distributions."""
    save_dtype: str = "auto"
    """The dtype of the weights in `output_dir`: float32, bfloat16 or float16; auto: the stored dtype of the model to
    start from, or the target's for heads and for a draft made from it. Checkpoints hold float32."""
    overfit: int | None = None
    """Check the way from data to drafter: learn from the first N samples alone, until replay on the same samples
    accepts 0.95 of each guess (alpha); it is an error if the last step does not."""
    optimizer: str = "auto"
    """"trainer": `training.optim`; "muon": Muon on the matrices and AdamW on the rest, which learns faster in short
    runs, for unsharded training (one process or DDP, no FSDP or ZeRO); "auto": the best for the kind of drafter."""
    trust_remote_code: bool = False
    """Run model code that a repository ships."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_possible(self.training)
        require_some(self, "completions", "directory")
        require(self, one_of(OPTIMIZERS), "optimizer")
        require(self, one_of(SAVE_DTYPES), "save_dtype")
        require(self, at_least(2), "max_length")
        require(self, at_least(1), "loss_chunk")
        require(self, at_least(1), "overfit")
        if self.stop_after is not None:
            seconds_of(self.stop_after, "stop_after")
        self._check_sources()
        if self.optimizer == "muon" and (self.training.fsdp or self.training.deepspeed):
            raise InputError("optimizer: expected trainer for training sharded by FSDP or DeepSpeed, found muon")
        if self.training.deepspeed and self.training.learning_rate is None:
            # The library has copied the rate into them already, but our default depends on the model.
            own = self.training.hf_deepspeed_config.config.keys() & {"optimizer", "scheduler"}
            if own:
                part = f"{min(own)} that training.deepspeed has"
                raise InputError(f"training.learning_rate: expected the rate of the {part}, found none")
        if self.target_sharded and self.target_quantization:
            raise InputError("target_sharded: expected false with target_quantization, found true")
        if self.teacher and self.teacher_cache:
            raise InputError(f"teacher: expected none with teacher_cache, found {', '.join(self.teacher)}")
        if given := self.states_given:
            if self.target_sharded:
                raise InputError(f"target_sharded: expected false with {given}, found true")
            loading: Any = self.training.accelerator_config
            if loading.dispatch_batches:
                raise InputError(
                    f"training.accelerator_config.dispatch_batches: expected false with {given}, whose states cannot "
                    "be sliced as rows are, found true"
                )
        if self.packing and self.max_length is None:
            raise InputError("max_length: expected the tokens of a packed row, found none")
        if self.training.n_gpu > 1:  # the library would split batches over them with nn.DataParallel
            print(f"GPUs: one of {self.training.n_gpu} is used; --processes makes more of them", file=sys.stderr)
            self.training._n_gpu = 1
        self._select_on_acceptance()
        if self.overfit is not None:
            self._measure_what_is_learned()
        self.training.dataloader_pin_memory &= self.training.device.type != "cpu"  # torch warns otherwise
        self.training.remove_unused_columns = False  # the collator reads columns that no model does
        self.training.use_cache = True  # for those who load the saved config; training forwards pass False
        # The filter waits for the device in each part, and a loss that is not finite ends the run anyway.
        self.training.logging_nan_inf_filter = False
        if self.training.save_on_each_node:
            reason = "as the library writes weights on the first machine alone"
            remedy = "give a training.output_dir that all machines share"
            raise InputError(f"training.save_on_each_node: expected false, {reason}, found true; {remedy}")
        if self.training.push_to_hub and self.training.hub_strategy != "end":
            self.training.hub_strategy = type(self.training.hub_strategy)("end")
            print("hub: what is finished is pushed once, at the end, and checkpoints are not", file=sys.stderr)
        measured = self.training.eval_strategy != "no" or self.training.eval_on_start
        if measured and not self.heldout and self.overfit is None:
            option = "eval_on_start" if self.training.eval_strategy == "no" else "eval_strategy"
            text = f"completion directories for training.{option}, or a share of completions"
            raise InputError(f"heldout: expected {text}, found none")

    @property
    def defaults(self) -> Defaults:
        """The defaults of training this kind of drafter."""
        return Defaults(rate=1e-3)

    def uses_muon(self, sharded: bool) -> bool:
        """Return whether Muon trains the matrices; `sharded` tells whether FSDP or DeepSpeed shards the drafter."""
        if self.optimizer != "auto":
            return self.optimizer == "muon"
        optim = type(self.training).__dataclass_fields__["optim"].default
        return self.defaults.muon_rate is not None and not sharded and self.training.optim == optim

    @property
    def states_given(self) -> str | None:
        """The field that names what gives the target's states or distributions; None where the target is run."""
        return "teacher" if self.teacher else "teacher_cache" if self.teacher_cache else None

    @property
    def trains_target(self) -> bool:
        """Whether the target is trained too."""
        return False

    @property
    def lasting(self) -> dict[str, Any]:
        """The settings that a run keeps for life: its kind's, its loss, and those that its optimizer's state holds.

        An initial drafter is known by its config, as its files may move.
        """
        free = {f.name for f in fields(RecipeConfig)}
        settings = {name: v for name, v in _flat(self) if name in LASTING or name.partition(".")[0] not in free}
        for name in ("draft", "heads"):
            if model := settings.get(name):
                config = json.dumps(identity(model, weights=False), sort_keys=True)
                settings[name] = f"config {hashlib.sha256(config.encode()).hexdigest()[:12]}"
        return settings

    @property
    def stored_as(self) -> str:
        """The model whose stored dtype `save_dtype` "auto" uses."""
        return self.target

    @property
    def heldout_directories(self) -> list[str]:
        """The held-out directories; empty if a share of `completions` is held back."""
        return self.heldout if isinstance(self.heldout, list) else []

    def _check_sources(self) -> None:
        require(self, finite(more_than(0)), "source_weights")
        if not isinstance(self.heldout, list):
            require(self, between(0, 1), "heldout")
        places = [os.path.realpath(path) for path in self.completions]
        for number, path in enumerate(self.completions):
            if places[number] in places[:number]:
                raise InputError(f"completions: expected each directory once, found {path} again (see source_weights)")
        if self.source_weights and len(self.source_weights) != len(self.completions):
            count, weights = len(self.completions), len(self.source_weights)
            raise InputError(f"source_weights: expected one for each of {count} completions, found {weights}")

    def _measure_what_is_learned(self) -> None:
        training = self.training
        if self.heldout:
            raise InputError(
                f"heldout: expected none with overfit, which measures what it learns, found {self.heldout}"
            )
        if training.eval_strategy == "no":
            training.eval_strategy, training.eval_steps = "steps", 20
        if training.max_steps < 0:
            training.max_steps = 400

    def _select_on_acceptance(self) -> None:
        """Select checkpoints by acceptance: the loss can fall while acceptance falls."""
        training = self.training
        if training.load_best_model_at_end is None:
            sharded = training.fsdp or training.deepspeed
            cannot = training.save_strategy == "no" or (training.save_only_model and sharded)
            training.load_best_model_at_end = bool(self.heldout) and not cannot
            if training.load_best_model_at_end and training.eval_strategy == "no":  # evaluate each checkpoint
                training.eval_strategy = "epoch" if training.save_strategy == "epoch" else "steps"
                training.eval_steps = training.save_steps
        if self.patience is not None and not (training.load_best_model_at_end and self.patience >= 1):
            raise InputError("patience: expected at least 1, and training.load_best_model_at_end")
        if not training.load_best_model_at_end:
            return
        if training.metric_for_best_model in (None, "loss"):  # the library's default
            training.metric_for_best_model, training.greater_is_better = "mean_acceptance_length", True
        metric = str(training.metric_for_best_model).removeprefix("eval_")
        one_of(self.acceptance_metrics).check("training.metric_for_best_model", metric)


@dataclass
class ObjectiveConfig(RecipeConfig):
    """Settings of a run that minimises divergences between the target's distributions and the drafter's."""

    divergence: str | dict[str, float] = "forward_kl"
    """The loss. With soft labels, the target's distributions: forward_kl, reverse_kl, jsd, skew_kl, skew_reverse_kl,
    tvd, lk_hybrid, nla. With hard labels, the completions' tokens: cross_entropy. Or
    weights by name, for a sum."""
    beta: float = 0.5
    """The weight of p in jsd's mixture."""
    alpha: float = 0.1
    """The share of the first distribution that the skewed divergences mix into the second."""
    eta: float = 3.0
    """η of lk_hybrid, λ KL + (1 − λ) TV with λ = e^(−η α): the larger, the sooner it is TV."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.objective

    @property
    def terms(self) -> dict[str, float]:
        """The weights of the divergences, by name."""
        return {self.divergence: 1.0} if isinstance(self.divergence, str) else self.divergence

    @cached_property
    def objective(self) -> "Objective":
        """The loss."""
        from draftsmith.train.losses.objective import Objective

        sampling = {name: getattr(self, name) for name in ("temperature", "top_k", "top_p")}
        shape = {name: getattr(self, name) for name in ("beta", "alpha", "eta")}
        return Objective(self.terms, **sampling, **shape)
