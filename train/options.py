"""Options that several commands share; without torch, so that help is fast."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any
from urllib.parse import urlsplit

from draftsmith.decode.errors import InputError, at_least, at_most, less_than, more_than, one_of, require, require_some
from draftsmith.decode.options import Filters, Options

DTYPES = ("float32", "bfloat16", "float16", "float64", "auto")
SAVE_DTYPES = ("float32", "bfloat16", "float16", "auto")
QUANTIZATIONS = ("8bit", "4bit")
INVALID = ("refuse", "skip")
DRAFT_LENGTH = at_least(1) & at_most(256)
"""The range of γ; no pair gains from longer rounds."""
TREE_NODES = at_least(1) & at_most(1024)
"""The range of a tree's nodes; a round's mask has their square."""
THREADS = at_least(1) & at_most(1024)
"""The range of CPU threads; with many more the thread library crashes."""
UNITS = {"h": 3600, "m": 60, "s": 1}
"""The seconds of each unit of time."""


@dataclass(kw_only=True)
class ModelOptions(Options):
    """Options of loading models."""

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
class TargetOptions(Options):
    """The target's quantisation."""

    target_quantization: str | None = None
    """8bit or 4bit weights for the target, by bitsandbytes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, one_of(QUANTIZATIONS), "target_quantization")

    @property
    def alone(self) -> bool:
        """Whether one process does all the work, however many GPUs there are."""
        return False


@dataclass(kw_only=True)
class TeacherOptions(Options):
    """The servers that give a target's states."""

    teacher: list[str] = field(default_factory=list)
    """Servers that give the target's states in its place, vllm:URL[,URL…]: of the target only embeddings, last layer,
    norm and head are loaded, from its files. Each process asks all servers; VLLM_API_KEY of the environment is their
    key."""


@dataclass(kw_only=True)
class TemplateOptions(ModelOptions):
    """Options of the target's chat template."""

    system_prompt: str | None = None
    """The system turn of every conversation that has none of its own."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables of the chat template, such as '{"enable_thinking": false}'."""
    invalid_prompts: str = "refuse"
    """`refuse` ends the command at the first record that cannot be read or rendered by the target's chat template;
    `skip` leaves such records out, counts them and names the first ones."""
    max_prompt_tokens: int | None = None
    """The most tokens of a prompt. The oldest user text of a longer conversation is cut from the left, so that what the
    chat template writes stays whole; of plain text the last tokens are kept."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, at_least(1), "max_prompt_tokens")
        require(self, one_of(INVALID), "invalid_prompts")

    @property
    def template(self) -> dict[str, Any]:
        """The arguments of `mask_answers`."""
        return {"system_prompt": self.system_prompt, "variables": self.chat_template_kwargs}

    @property
    def encoding(self) -> dict[str, Any]:
        """The arguments of `encode_prompt`."""
        return self.template | {"max_tokens": self.max_prompt_tokens}


TEXT_FIELDS = (
    "max_new_tokens", "max_prompt_tokens", "system_prompt", "chat_template_kwargs", "invalid_prompts", "top_k", "top_p",
    "min_p", "repetition_penalty", "no_repeat_ngram_size", "trust_remote_code",
)  # fmt: skip
"""The options of reading prompts and sampling texts, except temperature."""
NEUTRAL: dict[str, Any] = {option.name: option.default for option in fields(Filters)} | {
    "trust_remote_code": False,
    "invalid_prompts": "refuse",
}
"""The defaults that all commands share."""


def nondefault_fields(config: object, names: Iterable[str] = TEXT_FIELDS) -> dict[str, Any]:
    """Return a config's fields that differ from the defaults, to pass to another command."""
    values = {name: getattr(config, name) for name in names}
    return {name: value for name, value in values.items() if value not in (None, {}, NEUTRAL.get(name))}


@dataclass(kw_only=True)
class PromptOptions(TemplateOptions):
    """The prompts to complete, and the length of their completions."""

    limit: int | None = None
    """Read only the first N prompts."""
    max_new_tokens: int = 128
    """The most tokens of a completion."""
    seed: int = 0
    """The seed of sampling: prompt i draws with seed + i."""
    threads: int | None = None
    """CPU threads; torch's default if None."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, at_least(1), "limit", "max_new_tokens")
        require(self, THREADS, "threads")
        require(self, at_least(0), "seed")


@dataclass
class PromptedTarget(PromptOptions):
    """A target, and the prompts that it completes."""

    target: str
    """The target: a model directory, hub id or GGUF file."""
    prompts: str
    """A .jsonl, .json, .parquet or text file of prompts, a directory, or a hub id."""


def checked_url(url: str, name: str, example: str = "http://127.0.0.1:8000") -> str:
    """Return a server's URL without a trailing slash or /v1; `name` is its field and `example` a valid value.

    Raise InputError if it is not a URL, or has a user name, password or query, which must not get into messages and
    manifests.
    """
    from httpx2 import URL, InvalidURL

    if any(sign in url for sign in "@?#"):
        remedy = "an API key goes into an environment variable: VLLM_API_KEY, or a key_env"
        raise InputError(f"{name}: expected a URL without user name, password or query, found one with; {remedy}")
    try:
        parts = urlsplit(url)
        usable = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
        URL(url)
    except (ValueError, InvalidURL):  # a port that is not a number, a broken IPv6 address, a line break
        usable = False
    if not usable:
        raise InputError(f"{name}: expected a URL such as {example}, found {url!r}")
    return url.rstrip("/").removesuffix("/v1")


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


def seconds_of(text: str, name: str) -> float:
    """Return a time such as 40m, 2h or 1h30m in seconds; raise InputError, naming the field, for any other text."""
    match = re.fullmatch("".join(rf"(?:(?P<{unit}>\d+(?:\.\d+)?){unit})?" for unit in UNITS), text.strip())
    parts = match.groupdict(default="0") if match else {}
    seconds = sum(float(part) * UNITS[unit] for unit, part in parts.items())
    if not seconds > 0:
        raise InputError(f"{name}: expected a time such as 40m, 2h or 1h30m, found {text!r}")
    return seconds
