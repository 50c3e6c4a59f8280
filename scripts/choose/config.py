"""Settings of `draftsmith choose`."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from draftsmith.decode.errors import InputError, at_least, between, finite, more_than, one_of, require, require_some
from draftsmith.decode.options import Filters
from draftsmith.scripts.kinds import recipes
from draftsmith.train.cli import Floats, Ints, numbers
from draftsmith.train.kinds.export import ENGINES
from draftsmith.train.options import DRAFT_LENGTH, PromptedTarget, checked_url, nondefault_fields, seconds_of

NONE = "none"
"""The winner if no drafter pays."""
COPIES = ("suffix", "prompt_lookup")
"""Untrained drafters that compete; the first is also the first member of every hybrid."""


@dataclass(kw_only=True)
class ChooseConfig(Filters, PromptedTarget):
    """Find out which drafter to train for a target, by training several a little.

    Candidates of every kind learn from a little of the target's text, the worse half is dropped, the others learn from
    more, and a forecast says what the best will bring once it is trained.
    """

    output: str
    """The directory that receives choose.json, choose.html, winner.yaml and all else; a second run resumes there."""
    budget: str
    """The time for everything, such as 40m, 2h or 1h30m: first to choose, then to train the winner."""
    choosing: float = 0.5
    """The share of that time for choosing; the rest is the winner's."""
    budget_tokens: int | None = None
    """Tokens of text that the winner will learn from; None: as many as the remaining time allows."""
    draft: str | None = None
    """A small model with the target's tokenizer, a directory or hub id: distilled, it competes too."""
    candidates: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Candidates by name, in place of those of every kind: `command`, and fields of that command, such as
    {wide: {command: block, layers: 3}}."""
    learning: dict[str, Any] = field(default_factory=dict)
    """Fields of every training run, such as {packing: true, max_length: 2048, training.bf16: true}."""
    epochs: float = 3.0
    """Epochs of a training run."""
    processes: int | None = None
    """GPUs, or processes, of each training run; None: as for `draftsmith distill`."""
    draft_length: Ints = field(default_factory=lambda: [1, 2, 3, 4, 5, 7])
    """Values of γ to price, separated by commas."""
    temperature: Floats = field(default_factory=lambda: [0.0, 1.0])
    """Temperatures of deployment, separated by commas; text is written at each."""
    batch_size: Ints = field(default_factory=lambda: [1])
    """Texts that will be decoded together, several numbers separated by commas."""
    heldout_prompts: int = 64
    """Prompts held out from training to replay acceptance on; fewer if time is short."""
    server: str | None = None
    """The server that will load the drafter, vllm or sglang; candidates that it cannot load do not compete."""
    endpoint: str | None = None
    """A server of the target that writes the text, as in `prepare`; this process if None."""
    endpoint_model: str | None = None
    """The target's name on that server."""
    endpoint_key_env: str | None = None
    """The environment variable that holds its API key."""
    costs: str | None = None
    """costs.json of another run of `choose` with the same candidates, on the machine of deployment, in place of
    measuring here."""
    dtype: str = "auto"
    """Dtype of the models whose costs are measured, as in `measure`."""
    compiled: bool | None = None
    """Measure compiled forwards; null: if a short timing finds them faster."""
    dry_run: bool = False
    """Print what would be tried, and do nothing else."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, kind in (("draft_length", int), ("temperature", float), ("batch_size", int)):
            setattr(self, name, sorted(set(numbers(getattr(self, name), kind, name))))
            require_some(self, name, "number")
        require(self, DRAFT_LENGTH, "draft_length")
        require(self, finite(at_least(0)), "temperature")
        require(self, at_least(1), "batch_size", "budget_tokens", "processes")
        require(self, at_least(8), "heldout_prompts")
        require(self, one_of(("vllm", "sglang")), "server")
        require(self, between(0, 1), "choosing")
        require(self, finite(more_than(0)), "epochs")
        if self.endpoint is not None:
            checked_url(self.endpoint, "endpoint", "http://localhost:8000/v1")
        for name in ("endpoint_model", "endpoint_key_env"):
            if getattr(self, name) is not None and self.endpoint is None:
                raise InputError(f"{name}: expected --endpoint with it, found none")
        seconds_of(self.budget, "budget")
        for name, fields in self.candidates.items():
            if name in (*COPIES, NONE) or not re.fullmatch(r"\w[\w.-]*", name):
                raise InputError(
                    f"candidates: expected names of letters, digits, . and -, other than {', '.join((*COPIES, NONE))}, "
                    f"found {name!r}"
                )
            if fields.get("command") not in recipes():
                raise InputError(
                    f"candidates: expected a command out of {', '.join(recipes())} in {name}, found "
                    f"{fields.get('command')}"
                )

    def texts(self) -> dict[str, Any]:
        """Return how prompts are read and texts sampled, apart from the temperature, as fields of other commands."""
        return nondefault_fields(self)

    def answers(self) -> dict[str, Any]:
        """Return the fields of `prepare`, except prompts and output."""
        temperatures = ",".join(f"{temperature:g}" for temperature in self.temperature)
        fields = {"target": self.target, "temperatures": temperatures, "seed": self.seed} | self.texts()
        return fields | nondefault_fields(self, ("endpoint", "endpoint_model", "endpoint_key_env"))

    def training(self, candidate: Mapping[str, Any], completions: Sequence[str], output: str) -> dict[str, Any]:
        """Return the fields of a candidate's training."""
        own = {key: value for key, value in candidate.items() if key != "command"}
        fields: dict[str, Any] = {"target": self.target, "completions": list(completions)}
        fields |= {"training.num_train_epochs": self.epochs, "top_k": self.top_k, "top_p": self.top_p}
        fields |= {"trust_remote_code": self.trust_remote_code}
        return fields | self.learning | own | {"training.output_dir": output}

    def loading(self) -> dict[str, Any]:
        """Return how measured models are loaded, as fields of other commands."""
        return nondefault_fields(self, ("dtype", "compiled", "threads"))

    def launcher(self) -> list[str]:
        """Return the launcher flags of a training run."""
        return [] if self.processes is None else [f"--processes={self.processes}"]

    @property
    def seconds(self) -> float:
        """The whole budget in seconds."""
        return seconds_of(self.budget, "budget")


@dataclass(kw_only=True)
class AlignConfig(ChooseConfig):
    """Make a drafter for a target, all the way: choose, train, measure, and export what passes the gate."""

    drafter: str | None = None
    """Train this candidate, such as block-1, on answers to all prompts without choosing; the budget is then ignored."""
    measured_prompts: int = 32
    """Prompts held out from training and choosing, for the verdict; at least 8."""
    min_speedup: float = 1.0
    """The gate: the speed-up over plain decoding must exceed this, by its interval's lower end."""
    verify: str | None = None
    """`vllm`: let it decode with the export and compare, as `export --verify`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, at_least(8), "measured_prompts")
        require(self, more_than(0), "min_speedup")
        require(self, one_of(ENGINES), "verify")
        if self.server is None:
            self.server = "vllm"
