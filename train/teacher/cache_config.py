"""Settings of `draftsmith cache`."""

from dataclasses import dataclass

from draftsmith.decode.errors import InputError, at_least, at_most, finite, more_than, one_of, require, require_some
from draftsmith.train.options import ModelOptions, TargetOptions, TeacherOptions

FEATURE_DTYPES = ("bfloat16", "float32")
OF_DISTRIBUTIONS = {"k": 32, "temperature": 1.0, "top_k": 0, "top_p": 1.0}


@dataclass
class CacheConfig(ModelOptions, TargetOptions, TeacherOptions):
    """Write the target's distributions or features on completions to disk, to train without the target; resumable.

    Every kind of drafter learns from features, and draft models from distributions too.
    """

    target: str
    """The target model: a directory or a hub id."""
    completions: list[str]
    """Completion directories (`draftsmith prepare`)."""
    output: str
    """The directory that receives the cache; an unfinished one is resumed."""
    k: int = 32
    """The most probable tokens of each distribution to keep; the rest is kept as one sum."""
    temperature: float = 1.0
    """The deployment's temperature; a draft can be trained on the cache at this one only."""
    top_k: int = 0
    """The deployment's top-k; 0 for all."""
    top_p: float = 1.0
    """The deployment's top-p; 1 for all."""
    batch_size: int = 16
    """Samples in a forward, of similar length; servers have their own."""
    features: bool = False
    """Write features in place of distributions: the hidden states at `layer_ids` and the last ones, of every token.
    They serve any temperature, top-k and top-p."""
    layer_ids: list[int] | None = None
    """The numbers of the target's layers after which features are taken, ascending; of L layers 2, L // 2 and L − 3 if
    not given. With none, [], the cache has the last hidden states alone: enough for draft models, and for heads
    and layers that read no features."""
    feature_dtype: str | None = None
    """The stored dtype of features, bfloat16 or float32; bfloat16 if not given, or float32 where servers compute in
    another dtype."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_some(self, "completions", "directory")
        require(self, at_least(1), "k", "batch_size", "layer_ids")
        require(self, finite(more_than(0)), "temperature")
        require(self, at_least(0), "top_k")
        require(self, more_than(0) & at_most(1), "top_p")
        require(self, one_of(FEATURE_DTYPES), "feature_dtype")
        if self.layer_ids is not None and not self.features:
            raise InputError(f"layer_ids: expected none without features, found {self.layer_ids}")
        if self.teacher and not self.features:
            states = "servers give states and no distributions"
            raise InputError(f"teacher: expected none without features, as {states}, found {', '.join(self.teacher)}")
        if self.teacher and (bits := self.target_quantization) is not None:
            raise InputError(f"target_quantization: expected none with teacher, whose servers compute, found {bits}")
        for name, default in OF_DISTRIBUTIONS.items():
            value = getattr(self, name)
            if self.features and value != default:
                raise InputError(f"{name}: expected none with features, which hold no distributions, found {value}")
