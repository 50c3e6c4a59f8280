"""Settings of `draftsmith adapt`."""

import shlex
from dataclasses import dataclass, field
from typing import Any

from draftsmith.decode.errors import InputError, at_least, between, finite, more_than, one_of, require, require_some
from draftsmith.decode.options import Filters
from draftsmith.train.cli import Floats, numbers
from draftsmith.train.options import DRAFT_LENGTH, TemplateOptions, checked_url, given_fields, seconds_of

ANSWERS = ("given", "target")


@dataclass(kw_only=True)
class AdaptConfig(Filters, TemplateOptions):
    """Let a deployed drafter learn from logged requests, and replace it if the new one is better on the newest of them.

    Each call is one step, for cron: it does nothing where the log has too little that is new.
    """

    target: str
    """The target: a model directory or hub id."""
    drafter: str
    """The deployed drafter: its directory, or a link to it, which is moved to a better one (`swap`)."""
    log: list[str]
    """Logs of requests with their answers, the oldest first: of the coordinator, vLLM's batches or OpenAI's shape. With
    `answers: target` prompts are enough."""
    output: str
    """The directory that receives everything, a folder for each step."""
    answers: str = "given"
    """What is learned from: `given`, the answers in the log; or `target`, which answers the prompts of the log anew, at
    each temperature. That takes its time, and believes no answer."""
    old_text: list[str] = field(default_factory=list)
    """Completions that the drafter learned from before, of which some are learned again, lest they are forgotten."""
    old_share: float = 0.3
    """The share of them that an epoch takes."""
    newest: int = 64
    """Requests, the newest ones, that nothing learns from and both drafters are compared on."""
    least: int = 256
    """Requests that must be new since the last step; with fewer nothing is done."""
    most: int = 10_000
    """Requests to learn from, the newest ones."""
    foreign: float = 0.1
    """Refuse the log where more than this share of its answers is not the target's."""
    min_gain: float = 0.0
    """What the new drafter's τ must gain over the deployed one's, by its interval's lower end."""
    draft_length: int = 4
    """γ of that τ, or as many as they draft."""
    temperature: Floats = field(default_factory=lambda: [0.0, 1.0])
    """Temperatures of the traffic, with commas; both drafters are compared at all of them."""
    max_new_tokens: int = 256
    """Tokens of a text that they are compared on, at most."""
    epochs: float = 1.0
    """How often the training reads the new text."""
    learning: dict[str, Any] = field(default_factory=dict)
    """Fields of the training, such as {packing: true, max_length: 2048, training.bf16: true}."""
    processes: int | None = None
    """GPUs, or processes, of the training."""
    endpoint: str | None = None
    """A server of the target that writes the texts to compare on, as of `prepare`; here if None."""
    endpoint_model: str | None = None
    """Its name there."""
    swap: bool = False
    """Move the link `drafter` to the new drafter if it is better."""
    server: str | None = None
    """The URL of the server that drafts with it: each call measures the drafter that the last `swap` brought, and moves
    the link back if the server's α is below what was promised; and it looks at what a vLLM has counted since."""
    server_model: str | None = None
    """The target's name on that server; the only one that it lists if None."""
    server_key_env: str | None = None
    """The environment variable that holds the server's API key."""
    restart: str | None = None
    """A command that restarts the server, such as 'systemctl restart vllm', run whenever the link has moved; it must
    return when the old one has ended. The new drafter is measured right behind it. Null: the server has loaded the new
    drafter by itself when the next call measures it, as `serve-draft` does within seconds."""
    watch: str | None = None
    """Go on: one step after the other, with so much time between them, such as 10m; null: one step."""
    seed: int = 0
    """Seeds the sampling and the training."""

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
        if self.server is not None:
            self.server = checked_url(self.server, "server")
        for name, beside in (("restart", "swap"), ("server_model", "server"), ("server_key_env", "server")):
            if getattr(self, name) is not None and not getattr(self, beside):
                raise InputError(f"{name}: expected --{beside} beside it, found none")
        if self.restart is not None:
            self.restart_words()
        if self.watch is not None:
            seconds_of(self.watch, "watch")
        if self.endpoint_model is not None and self.endpoint is None:
            raise InputError("endpoint_model: expected --endpoint beside it, found none")

    def restart_words(self) -> list[str]:
        """Return the words of the command that restarts the server.

        Raises:
            InputError: there are none, or a quote is not closed.
        """
        try:
            words = shlex.split(str(self.restart))
        except ValueError as error:
            raise InputError(f"restart: expected a command, found {self.restart!r}: {error}") from error
        if not words:
            raise InputError("restart: expected a command, found none")
        return words

    def writer(self) -> dict[str, Any]:
        """Return the server that writes texts, as fields of `prepare`."""
        return given_fields(self, ("endpoint", "endpoint_model"))

    def texts(self) -> dict[str, Any]:
        """Return how prompts are read and texts sampled, as fields of other commands."""
        return given_fields(self)
