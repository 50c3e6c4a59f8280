"""Settings of a distillation run."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from draftsmith.decode.errors import SHARE, InputError, at_least, one_of, require
from draftsmith.distill.parallel.config import ParallelOptions
from draftsmith.train.job.defaults import Defaults
from draftsmith.train.memory.setting import TrainingMachines
from draftsmith.train.options import LoraOptions
from draftsmith.train.recipe import ObjectiveConfig
from draftsmith.train.teacher.cache_config import refuse_beside_cache

if TYPE_CHECKING:
    from draftsmith.train.losses.objective import Objective


@dataclass
class DraftInit:
    """How a draft begins, where it is not a given model; and what is done to either."""

    layers: int | list[int] | None = None
    """Carve the draft from the target: the indices of the decoder layers to keep, ascending from 0, or how many: then
    evenly spaced ones (layer round(i·(L − 1) ÷ (n − 1)) of L for i = 0…n − 1), the first n, or the first n − 1 and the
    last, by the loss on a few of the completions. These also say how much smaller the last norm begins."""
    hidden_size: int | None = None
    """Residual channels of a carved draft: those with the largest norm of what attention and MLPs write into them. The
    costliest cut of all: a quarter fewer cost the embedded target's 6 layers more than 4 of the layers do. Embeddings
    that a family scales by the hidden size (Gemma) are scaled by the new one."""
    attention_heads: int | None = None
    """Query heads of a carved draft, in whole groups that share a key-value head, so that their ratio stays: in each
    layer those with the largest norm of their columns of the output projection. Heads keep their width; vLLM takes
    it to be hidden_size ÷ heads in Qwen 2, so cut both alike there."""
    intermediate_size: int | None = None
    """MLP channels of a carved draft: in each layer those with the largest norm of their columns of the down
    projection (cf. Minitron, Muralidharan et al. 2024, section 2.2, which ranks by activations)."""
    config: dict[str, Any] | None = None
    """Random weights: what differs from the target's config, such as {num_hidden_layers: 2, hidden_size: 512}; what is
    not named stays the target's, the width of heads (head_dim) included. Tokenizer and family are the target's."""
    share: str = "none"
    """"embeddings": a carved or random draft has the target's embeddings and head, which are not trained and are saved
    with it all the same; "none": it trains its own, copied (carved) or random."""
    seed: int = 0
    """The seed of random weights, adapters included."""
    draft_vocabulary: int | None = None
    """D: the draft's head knows the D tokens alone that the completions hold most often, those that end a text among
    them (FR-Spec, arXiv 2502.14856): less to read for each drafted token, and other tokens are never accepted. All if
    not given, or those that a given draft has. Saved are the whole embeddings and head all the same."""
    pad_vocabulary: bool = True
    """Give the draft's head as many rows as the target's, as vLLM and `generate(assistant_model=…)` demand; rows that
    are no token get low logits."""
    lora: LoraOptions | None = None
    """Train low-rank adapters alone; they are merged into the saved draft."""

    def __post_init__(self) -> None:
        if self.layers is not None and self.config is not None:
            raise InputError("init: expected one of layers and config, found both")
        sizes = ("hidden_size", "attention_heads", "intermediate_size")
        require(self, at_least(1), *sizes, prefix="init.")
        require(self, at_least(2), "draft_vocabulary", prefix="init.")
        require(self, one_of(("none", "embeddings")), "share", prefix="init.")
        for name in sizes:
            if getattr(self, name) is not None and self.layers is None:
                raise InputError(f"init.layers: expected the layers to carve beside init.{name}, found none")
        if self.share == "embeddings" and self.layers is None and self.config is None:
            raise InputError("init.share: expected init.layers or init.config beside it, found neither")
        if self.share == "embeddings" and self.hidden_size is not None:
            raise InputError("init.share: expected none for embeddings that init.hidden_size narrows, found embeddings")

    def check_source(self, draft: str | None) -> None:
        """Require one beginning.

        Raises:
            InputError: none, or a given model beside another.
        """
        if (draft is not None) == (self.layers is not None or self.config is not None):
            found = "more than one" if draft is not None else "none"
            raise InputError(f"draft: expected one of a draft model, init.layers and init.config, found {found}")


@dataclass
class DistillConfig(ParallelOptions, ObjectiveConfig):
    """Distil a draft model from a frozen target, on completions that the target wrote (`draftsmith prepare`)."""

    acceptance_metrics: ClassVar[tuple[str, ...]] = ("mean_acceptance_length", "alpha", "greedy_alpha", "agreement")

    draft: str | None = None
    """The student to start from: a causal LM with the target's tokenizer. Without one `init` says what to make."""
    init: DraftInit = field(default_factory=DraftInit)
    """A draft carved from the target or random, LoRA, and the vocabulary's padding."""
    curriculum: float = 0.0
    """The share of the steps over which the objective moves from the forward KL to `divergence`, linearly."""
    draft_length: int = 4
    """γ of the replayed mean acceptance length, and of the block terms expected_length and reached_tvd."""
    teacher_cache: list[str] = field(default_factory=list)
    """Teacher caches (`draftsmith cache`) that together cover `completions` and `heldout`. With them the target's
    weights are not read: of `target` a config and a tokenizer are enough."""
    on_policy: float = 0.0
    """λ: the share of the batches whose completions the draft writes itself, for the target to score; the target's
    completions in the others."""
    on_policy_tokens: int = 128
    """Tokens of a completion that the draft writes, at most."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.init.check_source(self.draft)
        require(self, SHARE, "curriculum", "on_policy")
        require(self, at_least(1), "on_policy_tokens")
        if self.teacher_cache:
            refuse_beside_cache(self)
        if self.prompt_loss and (self.teacher_cache or not self.objective.needs_target):
            raise InputError(
                "prompt_loss: expected false with teacher_cache, which has none of the prompts, and with cross_entropy "
                "alone, which would learn to write prompts; found true"
            )
        if self.teacher_cache and self.on_policy:
            raise InputError(
                f"on_policy: expected 0 with teacher_cache, which has none of new texts, found {self.on_policy}"
            )

    @property
    def defaults(self) -> Defaults:
        """A draft that was trained before is changed a little; one carved or random must learn fast."""
        if self.init.lora is not None:
            return Defaults(rate=2e-3)
        return Defaults(rate=5e-4) if self.draft is not None else Defaults(rate=1e-2, muon=True)

    @property
    def stored_as(self) -> str:
        """The model whose dtype "auto" saves in: the draft that was given, or the target."""
        return self.draft or self.target

    def make_objective(self, **fields: Any) -> "Objective":
        """Make what is minimised; blocks have the length that is replayed."""
        return super().make_objective(draft_length=self.draft_length, **fields)


@dataclass
class DistillPlanConfig(TrainingMachines, DistillConfig):
    """Say whether a run fits its GPUs and how long it takes, from the config that it will be started with.

    The fields of the run are read as its command does; another `--recipe` has those of its own.
    """

    plan_class = "draftsmith.distill.parallel.memory:plan_of"

    draft_config: str | None = None
    """The draft's config.json, where the draft itself cannot be reached."""
    cache_k: int = 32
    """Tokens of a distribution in the teacher cache whose size is reported."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, at_least(1), "cache_k")
        if self.draft_config is not None and self.draft is None:
            raise InputError("draft_config: expected none for a draft made from the target, found one")
