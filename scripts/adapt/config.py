"""Settings of `draftsmith adapt`."""

from dataclasses import dataclass, field

from draftsmith.decode.errors import at_least, finite, one_of, require, require_some
from draftsmith.scripts.sweep_options import SweepOptions
from draftsmith.train.options import DRAFT_LENGTH

ANSWERS = ("given", "target")


@dataclass(kw_only=True)
class AdaptConfig(SweepOptions):
    """Train a deployed drafter on logged requests, and replace it if the new one is better on the newest of them.

    Each call is one step, for cron: it does nothing if the log has too few new requests.
    """

    drafter: str
    """The deployed drafter: a directory, or a link to it, which `swap` points to a better one."""
    log: list[str]
    """Logs of requests with their answers, oldest first: from the coordinator, vLLM's batches, or in OpenAI's shape.
    Prompts are enough with `answers: target`."""
    answers: str = "given"
    """Answers to learn from: `given`, those in the log; or `target`, new answers of the target to the log's prompts, at
    each temperature. That takes longer, and trusts no logged answer."""
    old_text: list[str] = field(default_factory=list)
    """Completions that the drafter was trained on before. A share of them is replayed against forgetting."""
    newest: int = 64
    """The newest requests, held out from training, on which both drafters are compared."""
    least: int = 256
    """New requests since the last step that a step needs; with fewer it does nothing."""
    min_gain: float = 0.0
    """The new drafter's gain in τ over the deployed one must exceed this, by its interval's lower end."""
    draft_length: int = 4
    """γ of that τ; the longest draft that both can make if that is shorter."""
    max_new_tokens: int = 256
    """The most tokens of a text to compare them on."""
    swap: bool = False
    """Point the link `drafter` to the new drafter if it is better."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_some(self, "log", "file")
        require(self, finite(at_least(0)), "min_gain")
        require(self, at_least(8), "newest")
        require(self, at_least(1), "least")
        require(self, one_of(ANSWERS), "answers")
        require(self, DRAFT_LENGTH, "draft_length")
