"""What several commands are told in the same words. Light: nothing here imports torch."""

from dataclasses import dataclass

from draftsmith.decode.errors import at_least, at_most, less_than, more_than, one_of, require, require_some
from draftsmith.decode.options import Options

DTYPES = ("float32", "bfloat16", "float16", "float64", "auto")
"""What a field `dtype` may say."""
SAVE_DTYPES = ("float32", "bfloat16", "float16", "auto")
"""What a field `save_dtype` may say."""
QUANTIZATIONS = ("8bit", "4bit")
DRAFT_LENGTH = at_least(1) & at_most(256)
"""γ: a round of more is no use to anyone."""
TREE_NODES = at_least(1) & at_most(1024)
"""Of a tree: the mask of a round has their square."""
THREADS = at_least(1) & at_most(1024)
"""Of far more the thread library crashes."""


@dataclass(kw_only=True)
class ModelOptions(Options):
    """How models are loaded."""

    dtype: str = "auto"
    """Weights and arithmetic of all models: float32, bfloat16, float16 or float64; auto: as the target is stored, or
    float32 where this device has no fast arithmetic for that. T=0 texts are identical for certain in float32 and
    float64 only."""
    trust_remote_code: bool = False
    """Run model code that a repository ships."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, one_of(DTYPES), "dtype")


@dataclass(kw_only=True)
class PromptOptions(ModelOptions):
    """Which prompts are completed, and how far."""

    limit: int | None = None
    """Read the first so many prompts only."""
    max_prompt_tokens: int | None = None
    """Keep the last so many tokens of a longer prompt."""
    max_new_tokens: int = 128
    """Tokens of a completion at most."""
    seed: int = 0
    """Seeds the sampling: prompt i draws with seed + i."""
    threads: int | None = None
    """CPU threads; torch's default if None."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, at_least(1), "limit", "max_prompt_tokens", "max_new_tokens")
        require(self, THREADS, "threads")
        require(self, at_least(0), "seed")


@dataclass
class LoraOptions:
    """Low-rank adapters in place of full training (Hu et al. 2021, section 4.1): W + (alpha ÷ r)·B·A, W frozen."""

    r: int = 16
    """The rank."""
    alpha: float = 32.0
    """The scale, divided by the rank."""
    dropout: float = 0.0
    """Dropout on the adapters' inputs."""
    target_modules: list[str] | None = None
    """The ends of the modules' names, such as q_proj; all linear maps of the decoder if not given. Neither the
    embeddings nor the head, whose weight the loss takes in pieces."""

    def __post_init__(self) -> None:
        require(self, at_least(1), "r", prefix="lora.")
        require(self, more_than(0), "alpha", prefix="lora.")
        require(self, at_least(0) & less_than(1), "dropout", prefix="lora.")
        if self.target_modules is not None:
            require_some(self, "target_modules", "name", prefix="lora.")
