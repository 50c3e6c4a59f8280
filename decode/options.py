"""The sampling options of every command's config; torch is imported only when it is needed."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from draftsmith.decode.errors import at_least, at_most, finite, less_than, more_than, require

if TYPE_CHECKING:
    from draftsmith.decode.sampling import Sampler


class Options:
    """The end of the `super().__post_init__()` chain in which options check their own fields."""

    def __post_init__(self) -> None:
        """Check nothing."""


@dataclass(kw_only=True)
class Filters(Options):
    """The part of the target's distribution that is sampled from, at any temperature."""

    top_k: int = 0
    """Sample among the k most likely tokens only; 0 for all."""
    top_p: float = 1.0
    """Sample among the most likely tokens that hold this much probability; 1 for all."""
    min_p: float = 0.0
    """Sample among the tokens that are at least this many times as likely as the likeliest; 0 for all."""
    repetition_penalty: float = 1.0
    """Divide the logits of tokens that occurred before, prompt included (multiply negative ones); 1 for none. Like the
    next one, it counts at temperature 0 too."""
    no_repeat_ngram_size: int = 0
    """Let no n-gram of this size occur twice; 0 for none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, at_least(0), "top_k", "no_repeat_ngram_size")
        require(self, more_than(0) & at_most(1), "top_p")
        require(self, at_least(0) & less_than(1), "min_p")
        require(self, finite(more_than(0)), "repetition_penalty")

    def at(self, temperature: float) -> "Sampling":
        """Return these filters with a temperature."""
        return Sampling(temperature=temperature, **self.filters())

    def filters(self) -> dict[str, Any]:
        """Return the filters by name."""
        return {name: getattr(self, name) for name in Filters.__annotations__}


@dataclass(kw_only=True)
class Sampling(Filters):
    """The settings by which texts are sampled."""

    temperature: float = 0.0
    """Sampling temperature; 0 is greedy."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, finite(at_least(0)), "temperature")

    def sampler(self) -> "Sampler":
        """Return the sampler of these settings."""
        from draftsmith.decode.sampling import Sampler

        return Sampler.of(**asdict(self.at(self.temperature)))

    def generate_kwargs(self) -> dict[str, Any]:
        """Return the settings as arguments of `generate`, without unused ones, since each costs a call per token."""
        kwargs: dict[str, Any] = {"do_sample": self.temperature > 0}
        if self.temperature > 0:
            kwargs |= {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
            kwargs |= {"min_p": self.min_p} if self.min_p else {}
        kwargs |= {"repetition_penalty": self.repetition_penalty} if self.repetition_penalty != 1 else {}
        kwargs |= {"no_repeat_ngram_size": self.no_repeat_ngram_size} if self.no_repeat_ngram_size else {}
        return kwargs
