"""The settings of `draftsmith prepare`: where completions come from, and how they are sampled."""

from dataclasses import dataclass, field, fields
from urllib.parse import urlsplit

from draftsmith.decode.errors import InputError, at_least, finite, more_than, one_of, require
from draftsmith.decode.options import Sampling
from draftsmith.train.options import ModelOptions

ANSWERS = ("target", "given")


@dataclass
class PrepareConfig(Sampling, ModelOptions):
    """Let the target complete prompts, and keep what it wrote for a draft to learn from; resumable."""

    target: str
    """The target model: a directory or a hub id. Its weights are read only where it completes the prompts here."""
    prompts: str
    """A .jsonl, .json, .parquet or text file of prompts, a directory, or a hub id (`NAME` or `NAME:CONFIG`)."""
    output: str
    """The directory that receives the completions; an unfinished one is resumed."""
    split: str = "train"
    """The split of a directory or hub id."""
    limit: int | None = None
    """Read the first so many prompts only."""
    max_prompt_tokens: int | None = None
    """Keep the last so many tokens of a longer prompt."""
    max_new_tokens: int = 128
    """Tokens of a completion at most."""
    samples: int = 1
    """Completions of each prompt; the second and later ones have ids that end in #2, #3, …"""
    temperature: float = field(default=1.0, kw_only=True)
    """Sample at this temperature; 0 takes the most likely token each time."""
    batch_size: int = 16
    """Prompts completed together, of similar length; also the samples in a shard, and the unit of a resume."""
    seed: int = 0
    """Seeds the sampling."""
    answers: str = "target"
    """`target`: it completes the prompts. `given`: the records hold whole conversations, and the assistant's turns in
    them are the completions; no model is loaded, the sampling is ignored, and samples longer than the target's
    positions are left out and counted."""
    endpoint: str | None = None
    """Let a server that runs the target complete the prompts: the base URL of an OpenAI-compatible API
    (http://localhost:8000/v1), or SGLang's native http://localhost:30000/generate."""
    endpoint_model: str | None = None
    """The target's name on that server; the one model that the server lists by default."""
    endpoint_key_env: str | None = None
    """The environment variable that holds the server's API key."""
    endpoint_concurrency: int = 32
    """Requests under way at once."""
    endpoint_timeout: float = 600.0
    """Seconds to wait for one completion."""
    endpoint_retries: int = 8
    """Tries after the first, at growing intervals, where the server is busy, failing or out of reach."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, at_least(1), "limit", "max_prompt_tokens", "max_new_tokens", "samples", "batch_size")
        require(self, at_least(1), "endpoint_concurrency")
        require(self, at_least(0), "seed", "endpoint_retries")
        require(self, finite(more_than(0)), "endpoint_timeout")
        require(self, one_of(ANSWERS), "answers")
        if self.samples > 1 and (self.temperature == 0 or self.answers == "given"):
            raise InputError(
                f"samples: expected 1 where a prompt has one answer (temperature 0, or given), found {self.samples}"
            )
        if self.endpoint is None:
            for name in ("endpoint_model", "endpoint_key_env"):
                if getattr(self, name) is not None:
                    raise InputError(f"{name}: expected --endpoint beside it, found none")
        else:
            if self.answers == "given":
                raise InputError("endpoint: expected none with --answers given, which asks no model for anything")
            if self.no_repeat_ngram_size:
                raise InputError("no_repeat_ngram_size: expected 0 with --endpoint, for servers know no such setting")
            _check_url(self.endpoint)


def decisive_settings(config: PrepareConfig) -> tuple[str, ...]:
    """Return the fields that decide the tokens, to be named one by one when a run is resumed with others.

    Prompts, target and server are compared by what they are instead, because files and servers may move.
    """
    if config.answers == "given":
        return ("split", "limit", "batch_size")
    elsewhere = {"target", "prompts", "output", "trust_remote_code", "answers", "samples"}  # samples have ids
    if config.endpoint is not None:
        elsewhere.add("dtype")  # the server's weights are the server's business
    names = (f.name for f in fields(PrepareConfig))
    return tuple(name for name in names if name not in elsewhere and not name.startswith("endpoint"))


def _check_url(url: str) -> None:
    # The URL goes into the manifest and into messages, so it may not hold a secret; it is not repeated here either.
    if any(sign in url for sign in "@?#"):
        raise InputError(
            "endpoint: expected a URL without user name, password or query, found one with; an API key is read from "
            "the environment variable that --endpoint_key_env names"
        )
    try:
        parts = urlsplit(url)
        usable = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, a broken IPv6 address
        usable = False
    if not usable:
        raise InputError(f"endpoint: expected a URL such as http://localhost:8000/v1, found {url!r}")
