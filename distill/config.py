"""Settings of a distillation run."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from draftsmith.decode.errors import SHARE, InputError, at_least, at_most, more_than, one_of, require
from draftsmith.decode.options import Options
from draftsmith.train.job.defaults import Defaults
from draftsmith.train.options import LoraOptions
from draftsmith.train.recipe import ObjectiveConfig

MOST = 256
"""The greatest number of tokens that a draft learns to draft in one forward."""


@dataclass
class ParallelOptions(Options):
    """Training of a draft that drafts several tokens in one forward."""

    parallel: int = 0
    """K: the draft learns to draft K tokens in one forward (PARD, arXiv 2504.18583): the next one as any draft does,
    and K − 1 more at mask tokens after it. 0 for a plain draft."""
    parallel_retention: float = 0.5
    """r: the share r^j of the positions that learn has a mask for the j-th token after the next, so that a step takes
    about 1 ÷ (1 − r) times a plain draft's arithmetic."""
    parallel_minimum: float = 0.05
    """The least share of positions that have a mask for a token at any distance."""
    parallel_mask_token: int | str | None = None
    """The mask token of a parallel draft, as an id or as the tokenizer writes it. No text may contain it. By default it
    is the initial draft's, or else the first row beyond the tokenizer, or an unused special token."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.parallel == 1 or not 0 <= self.parallel <= MOST:
            raise InputError(f"parallel: expected 0, or between 2 and {MOST} tokens, found {self.parallel}")
        require(self, more_than(0) & at_most(1), "parallel_retention")
        require(self, SHARE, "parallel_minimum")


@dataclass
class DraftInit:
    """The initial draft, unless it is an existing model, and changes to it."""

    layers: int | list[int] | None = None
    """Carve the draft from the target: the ascending indices of the decoder layers to keep, from 0, or their number n.
    For a number, the loss on a few of the completions decides between evenly spaced layers (round(i·(L − 1) ÷ (n − 1))
    of L for i = 0…n − 1), the first n, and the first n − 1 with the last. It also sets the scale of the last norm. Of a
    target with layers of recurrent or convolution states, all these keep some layers with attention, and the evenly
    spaced ones alternate as the target's do."""
    config: dict[str, Any] | None = None
    """Random weights: changes to the target's config, such as {num_hidden_layers: 2, hidden_size: 512}. All other
    fields, including the width of heads (head_dim), the tokenizer and the family are the target's."""
    share: str = "none"
    """"embeddings": a carved or random draft has the target's embeddings and head, which are saved with it but not
    trained; "none": it trains its own, copied (carved) or random."""
    seed: int = 0
    """The seed of random weights, adapters included."""
    draft_vocabulary: int | None = None
    """D: the draft's head proposes only the D most frequent tokens of the completions, including those that end a text
    (FR-Spec, arXiv 2502.14856). Fewer rows are read for each drafted token, and other tokens are never accepted. By
    default all tokens, or those of an existing draft. Embeddings and head are still saved whole."""
    pad_vocabulary: bool = True
    """Give the draft's head as many rows as the target's, as vLLM and `generate(assistant_model=…)` demand; rows
    beyond the tokenizer get low logits."""
    lora: LoraOptions | None = None
    """Train only low-rank adapters, which are merged into the saved draft."""

    def __post_init__(self) -> None:
        if self.layers is not None and self.config is not None:
            raise InputError("init: expected one of layers and config, found both")
        require(self, at_least(2), "draft_vocabulary", prefix="init.")
        require(self, one_of(("none", "embeddings")), "share", prefix="init.")
        if self.share == "embeddings" and self.layers is None and self.config is None:
            raise InputError("init.share: expected init.layers or init.config with it, found neither")

    def check_source(self, draft: str | None) -> None:
        """Raise an InputError unless there is exactly one of a draft model, `layers` and `config`."""
        if (draft is not None) == (self.layers is not None or self.config is not None):
            count = "more than one" if draft is not None else "none"
            raise InputError(f"draft: expected one of a draft model, init.layers and init.config, found {count}")


@dataclass
class DistillConfig(ParallelOptions, ObjectiveConfig):
    """Distil a draft model from a frozen target, on completions that the target wrote (`draftsmith prepare`)."""

    acceptance_metrics: ClassVar[tuple[str, ...]] = ("mean_acceptance_length", "alpha", "greedy_alpha", "agreement")

    draft: str | None = None
    """The initial draft: a causal LM with the target's tokenizer. Without it `init` makes one."""
    init: DraftInit = field(default_factory=DraftInit)
    """A carved or random draft, LoRA, and the vocabulary."""
    draft_length: int = 4
    """γ of the replayed mean acceptance length."""
    on_policy: float = 0.0
    """λ: the share of the batches whose completions the draft writes itself, for the target to score."""
    on_policy_tokens: int = 128
    """The greatest length of a completion that the draft writes, in tokens."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.init.check_source(self.draft)
        require(self, SHARE, "on_policy")
        require(self, at_least(1), "draft_length", "on_policy_tokens")
        if self.prompt_loss and not self.objective.needs_target:
            raise InputError(
                "prompt_loss: expected false with cross_entropy alone, which would learn to write prompts, found true"
            )
        if self.on_policy and (given := self.states_given):
            raise InputError(f"on_policy: expected 0 with {given}, which has no new texts, found {self.on_policy}")

    @property
    def defaults(self) -> Defaults:
        """A low learning rate for an existing draft, and a high one for a carved or random draft."""
        if self.init.lora is not None:
            return Defaults(rate=2e-3)
        return Defaults(rate=5e-4) if self.draft is not None else Defaults(rate=1e-2, muon_rate=1e-2)

    @property
    def stored_as(self) -> str:
        """The model whose dtype "auto" saves in: the initial draft, or the target."""
        return self.draft or self.target
