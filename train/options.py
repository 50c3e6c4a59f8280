"""Options that several commands share. Light: nothing here imports torch."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any
from urllib.parse import urlsplit

from draftsmith.decode.errors import (
    InputError,
    Range,
    at_least,
    at_most,
    less_than,
    more_than,
    one_of,
    require,
    require_some,
)
from draftsmith.decode.options import Filters, Options

DTYPES = ("float32", "bfloat16", "float16", "float64", "auto")
"""Values of a field `dtype`."""
SAVE_DTYPES = ("float32", "bfloat16", "float16", "auto")
"""Values of a field `save_dtype`."""
QUANTIZATIONS = ("8bit", "4bit")
DEVICE = Range(
    "auto, cpu, or a device such as cuda:1",
    lambda name: re.fullmatch(r"auto|cpu|mps|(cuda|xpu|npu|hpu)(:\d+)?", name) is not None,
)
"""Where a model may lie."""
DRAFT_LENGTH = at_least(1) & at_most(256)
"""γ: a round of more is no use to anyone."""
TREE_NODES = at_least(1) & at_most(1024)
"""Of a tree: the mask of a round has their square."""
THREADS = at_least(1) & at_most(1024)
"""Of far more the thread library crashes."""
UNITS = {"h": 3600, "m": 60, "s": 1}
"""Of time, in seconds."""


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
class TargetOptions(Options):
    """Where the target lies, and in how many bits."""

    target_device: str | None = None
    """Where the target lies: by default a whole copy on each process's device; "auto" spreads one over all GPUs (of
    a single process); or a device, such as cuda:1."""
    target_quantization: str | None = None
    """8bit or 4bit weights for the target, by bitsandbytes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, DEVICE, "target_device")
        require(self, one_of(QUANTIZATIONS), "target_quantization")

    def require_own_device(self, processes: int) -> None:
        """Require that each process can use its own GPU alone.

        Raises:
            InputError: several processes, and one GPU for all of them, or all for each.
        """
        device = self.target_device or ""
        if processes > 1 and (device == "auto" or ":" in device):
            raise InputError(
                f"target_device: expected none, cpu or cuda with {processes} processes, each of which has its own GPU, "
                f"found {device}"
            )

    @property
    def alone(self) -> bool:
        """Whether one process does all the work, however many GPUs there are."""
        device = self.target_device or ""
        return device == "auto" or ":" in device


@dataclass(kw_only=True)
class TemplateOptions(ModelOptions):
    """How conversations go into the target's chat template."""

    system_prompt: str | None = None
    """Begins every conversation that has no system turn of its own."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables of the chat template, such as '{"enable_thinking": false}'."""
    max_prompt_tokens: int | None = None
    """Tokens of a prompt at most: of a longer conversation the oldest user's text is cut from the left, so that what
    the chat template writes stays whole; of plain text the last tokens are kept."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, at_least(1), "max_prompt_tokens")

    @property
    def template(self) -> dict[str, Any]:
        """Arguments of `mask_answers`."""
        return {"system_prompt": self.system_prompt, "variables": self.chat_template_kwargs}

    @property
    def encoding(self) -> dict[str, Any]:
        """Arguments of `encode_prompt`."""
        return self.template | {"max_tokens": self.max_prompt_tokens}


TEXT_FIELDS = (
    "max_new_tokens", "max_prompt_tokens", "system_prompt", "chat_template_kwargs", "top_k", "top_p", "min_p",
    "repetition_penalty", "no_repeat_ngram_size", "trust_remote_code",
)  # fmt: skip
"""How prompts are read and texts sampled, at whatever temperature."""
NEUTRAL: dict[str, Any] = {each.name: each.default for each in fields(Filters)} | {"trust_remote_code": False}
"""Values that every command has by default."""


def given_fields(config: object, names: Iterable[str] = TEXT_FIELDS) -> dict[str, Any]:
    """Return those of a config's fields that say something, to be handed on to another command."""
    given = {name: getattr(config, name) for name in names}
    return {name: value for name, value in given.items() if value not in (None, {}, NEUTRAL.get(name))}


@dataclass(kw_only=True)
class PromptOptions(TemplateOptions):
    """Which prompts are completed, and how far."""

    limit: int | None = None
    """Read only the first N prompts."""
    max_new_tokens: int = 128
    """Tokens of a completion at most."""
    seed: int = 0
    """Seeds the sampling: prompt i draws with seed + i."""
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
    """The target: a model directory or hub id."""
    prompts: str
    """A .jsonl, .json, .parquet or text file of prompts, a directory, or a hub id."""


def checked_url(url: str, name: str, example: str = "http://127.0.0.1:8000") -> str:
    """Return the root of a server's URL, without a trailing slash or /v1.

    Args:
        url: what was given.
        name: the field that it was given in, for messages.
        example: what such a field may hold.

    Raises:
        InputError: it is none, or holds what must not be in a message or a manifest: a password, a query.
    """
    from httpx2 import URL, InvalidURL

    if any(sign in url for sign in "@?#"):
        raise InputError(
            f"{name}: expected a URL without user name, password or query, found one with; an API key goes "
            "into an environment variable, which a field that ends in key_env names"
        )
    try:
        parts = urlsplit(url)
        usable = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
        URL(url)
    except (ValueError, InvalidURL):  # a port that is no number, a broken IPv6 address, a line break
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
    """Return a time in seconds.

    Args:
        text: such as 40m, 2h or 1h30m.
        name: the field that it was given in, for messages.

    Raises:
        InputError: a text that says none.
    """
    found = re.fullmatch(
        r"(?:(?P<h>\d+(?:\.\d+)?)h)?(?:(?P<m>\d+(?:\.\d+)?)m)?(?:(?P<s>\d+(?:\.\d+)?)s)?", text.strip()
    )
    parts = found.groupdict(default="0") if found else {}
    seconds = sum(float(part) * UNITS[unit] for unit, part in parts.items())
    if not seconds > 0:
        raise InputError(f"{name}: expected a time such as 40m, 2h or 1h30m, found {text!r}")
    return seconds
