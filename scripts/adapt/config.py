"""Settings of `draftsmith adapt`."""

from dataclasses import dataclass, field
from typing import Any

from draftsmith.decode.errors import InputError, at_least, between, finite, more_than, one_of, require, require_some
from draftsmith.decode.options import Filters
from draftsmith.train.cli import Floats, numbers
from draftsmith.train.options import DRAFT_LENGTH, TemplateOptions, nondefault_fields

ANSWERS = ("given", "target")


@dataclass(kw_only=True)
class AdaptConfig(Filters, TemplateOptions):
    """Train a deployed drafter on logged requests, and replace it if the new one is better on the newest of them.

    Each call is one step, for cron: it does nothing if the log has too few new requests.
    """

    target: str
    """The target: a model directory or hub id."""
    drafter: str
    """The deployed drafter: a directory, or a link to it, which `swap` points to a better one."""
    log: list[str]
    """Logs of requests with their answers, oldest first: from the coordinator, vLLM's batches, or in OpenAI's shape.
    Prompts are enough with `answers: target`."""
    output: str
    """The directory that receives everything, a folder for each step."""
    answers: str = "given"
    """Answers to learn from: `given`, those in the log; or `target`, new answers of the target to the log's prompts, at
    each temperature. That takes longer, and trusts no logged answer."""
    old_text: list[str] = field(default_factory=list)
    """Completions that the drafter was trained on before. A share of them is replayed against forgetting."""
    old_share: float = 0.3
    """The share of the old text in each epoch."""
    newest: int = 64
    """The newest requests, held out from training, on which both drafters are compared."""
    least: int = 256
    """New requests since the last step that a step needs; with fewer it does nothing."""
    most: int = 10_000
    """The most requests to learn from, newest first."""
    foreign: float = 0.1
    """Refuse the log where more than this share of its answers is not the target's."""
    min_gain: float = 0.0
    """The new drafter's gain in τ over the deployed one must exceed this, by its interval's lower end."""
    draft_length: int = 4
    """γ of that τ; the longest draft that both can make if that is shorter."""
    temperature: Floats = field(default_factory=lambda: [0.0, 1.0])
    """Temperatures of the traffic, separated by commas; both drafters are compared at each."""
    max_new_tokens: int = 256
    """The most tokens of a text to compare them on."""
    epochs: float = 1.0
    """Epochs over the new text."""
    learning: dict[str, Any] = field(default_factory=dict)
    """Further fields of the training, such as {packing: true, max_length: 2048, training.bf16: true}."""
    processes: int | None = None
    """GPUs, or processes, of the training."""
    endpoint: str | None = None
    """A server of the target that writes the texts for the comparison, as in `prepare`; this process if None."""
    endpoint_model: str | None = None
    """The target's name on that server."""
    swap: bool = False
    """Point the link `drafter` to the new drafter if it is better."""
    seed: int = 0
    """Seed of sampling and training."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.temperature = sorted(set(numbers(self.temperature, float, "temperature")))
        require_some(self, "temperature", "number")
        require_some(self, "log", "file")
        require(self, finite(at_least(0)), "temperature", "min_gain")
        require(self, at_least(8), "newest")
        require(self, at_least(1), "least", "most", "max_new_tokens", "processes")
        require(self, one_of(ANSWERS), "answers")
        require(self, DRAFT_LENGTH, "draft_length")
        require(self, between(0, 1), "foreign")
        require(self, finite(more_than(0)), "epochs", "old_share")
        if self.endpoint_model is not None and self.endpoint is None:
            raise InputError("endpoint_model: expected --endpoint with it, found none")

    def writer(self) -> dict[str, Any]:
        """Return the fields of `prepare` that name the server that writes texts."""
        return nondefault_fields(self, ("endpoint", "endpoint_model"))

    def texts(self) -> dict[str, Any]:
        """Return the fields that say how prompts are read and texts sampled, for other commands."""
        return nondefault_fields(self)
