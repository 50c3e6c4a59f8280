"""The settings of `draftsmith prepare`: the source of completions, and their sampling."""

from dataclasses import dataclass, field, fields

from draftsmith.decode.errors import InputError, at_least, finite, one_of, require
from draftsmith.decode.options import Sampling
from draftsmith.train.cli import Floats, numbers
from draftsmith.train.options import TargetOptions, TemplateOptions, checked_url

ANSWERS = ("target", "given")
TURNS = ("first", "all")
MAX_NEW_TOKENS = 1024
"""The default limit of a completion's tokens; most answers end earlier."""
SHARD_BATCHES = 8
"""The default size of a shard, in batches."""


@dataclass
class PrepareConfig(Sampling, TemplateOptions, TargetOptions):
    """Let the target complete prompts, and keep what it wrote for a draft to learn from; resumable."""

    target: str
    """The target model: a directory or a hub id. Its weights are read only if it completes the prompts here."""
    prompts: str
    """A .jsonl, .json, .parquet or text file of prompts, a directory, or a hub id (`NAME` or `NAME:CONFIG`)."""
    output: str
    """The directory that receives the completions; an unfinished one is resumed."""
    split: str = "train"
    """The split of a directory or hub id."""
    limit: int | None = None
    """Read only the first N prompts."""
    max_new_tokens: int | None = None
    """Tokens of a completion at most; if not given, 1,024 or half of the target's positions, whichever is less."""
    samples: int = 1
    """Completions of each prompt, at each of `temperatures` if these are given; the second and later ones have ids that
    end in #2, #3, …"""
    temperature: float = field(default=1.0, kw_only=True)
    """Sample at this temperature; 0 takes the most likely token each time."""
    temperatures: Floats = field(default_factory=list, kw_only=True)
    """Complete each prompt at each of these temperatures (with commas) in place of `temperature`: `samples` times, but
    once at 0. The column `temperature` holds the temperature of each completion."""
    batch_size: int = 16
    """Prompts completed together; when a completion ends, the next prompt takes its row."""
    shard_size: int | None = None
    """Prompts in a shard, of similar length, completed by one process: the unit of a resume. 8 × batch_size if not
    given; in larger shards fewer rows idle at the end."""
    seed: int = 0
    """The seed of the sampling."""
    answers: str = "target"
    """`target`: it completes the prompts. `given`: the records hold whole conversations, whose assistant turns are the
    completions; no model is loaded, the sampling is ignored, and samples longer than the target's positions are left
    out and counted."""
    turns: str = "first"
    """The turns to complete in records with several user `turns`: `first`, or `all`, each after the target's answers to
    those before it. The completions are then in output/turn-1, output/turn-2, …, and output/prompts.jsonl has all turns
    as prompts. With given answers, `first` makes one sample of a conversation, without the turns that the chat template
    writes differently later; `all` makes one for each context in which turns were written."""
    endpoint: str | None = None
    """Let a server that runs the target complete the prompts: the base URL of an OpenAI-compatible API, such as
    http://localhost:8000/v1."""
    endpoint_model: str | None = None
    """The target's name on that server; the one model that the server lists by default."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, at_least(1), "limit", "max_new_tokens", "samples", "batch_size", "shard_size")
        require(self, at_least(0), "seed")
        require(self, one_of(ANSWERS), "answers")
        self.temperatures = numbers(self.temperatures, float, "temperatures")
        require(self, finite(at_least(0)), "temperatures")
        if self.temperatures and self.answers == "given":
            raise InputError("temperatures: expected none with --answers given, which samples nothing")
        require(self, one_of(TURNS), "turns")
        if self.turns == "all" and len(self.plan()) > 1:
            raise InputError(
                "turns: expected first where a prompt has several completions: a later turn follows one answer"
            )
        hottest = max(self.temperatures, default=self.temperature)
        if self.samples > 1 and (hottest == 0 or self.answers == "given"):
            raise InputError(
                f"samples: expected 1 where a prompt has one answer (temperature 0, or given), found {self.samples}"
            )
        if self.endpoint is None:
            if self.endpoint_model is not None:
                raise InputError("endpoint_model: expected --endpoint with it, found none")
        else:
            if self.answers == "given":
                raise InputError("endpoint: expected none with --answers given, which asks no model for anything")
            if self.no_repeat_ngram_size:
                raise InputError("no_repeat_ngram_size: expected 0 with --endpoint, since servers lack this setting")
            checked_url(self.endpoint, "endpoint", "http://localhost:8000/v1")

    def new_tokens(self, positions: int | None = None) -> int:
        """Return the most tokens of a completion, for a target of `positions` positions."""
        most = MAX_NEW_TOKENS if positions is None else min(MAX_NEW_TOKENS, max(1, positions // 2))
        return self.max_new_tokens or most

    def plan(self) -> list[float | None]:
        """Return the temperatures of a prompt's completions, in order; None is the run's own."""
        if not self.temperatures:
            return [None] * self.samples
        return [t for t in self.temperatures for _ in range(self.samples if t else 1)]

    @property
    def alone(self) -> bool:
        """Return whether one process does all the work: a server has its own processes, and given answers need none."""
        return self.endpoint is not None or self.answers == "given"


def decisive_settings(config: PrepareConfig) -> tuple[str, ...]:
    """Return the fields that decide the tokens, to be named one by one if a run is resumed with other values.

    Prompts, target and server are compared by their contents instead, since files and servers may move.
    """
    if config.answers == "given":
        return ("split", "limit", "shard_size", "system_prompt", "chat_template_kwargs", "turns")
    elsewhere = {"target", "prompts", "output", "trust_remote_code", "answers", "invalid_prompts", "turns"}
    elsewhere.add("samples")  # they have ids
    if config.endpoint is not None:
        elsewhere |= {"dtype", "target_quantization", "batch_size"}  # the server decides these
    names = (f.name for f in fields(PrepareConfig))
    return tuple(name for name in names if name not in elsewhere and not name.startswith("endpoint"))
