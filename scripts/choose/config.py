"""Settings of `draftsmith choose` and `draftsmith align`."""

import re
from dataclasses import dataclass, field
from typing import Any

from draftsmith.decode.errors import InputError, at_least, more_than, one_of, require, require_some
from draftsmith.scripts.kinds import recipes
from draftsmith.scripts.sweep_options import SweepOptions
from draftsmith.train.cli import Ints, numbers
from draftsmith.train.options import DRAFT_LENGTH, THREADS, nondefault_fields, seconds_of

LLAMA_CPP = "llama.cpp"
NONE = "none"
"""The winner if no drafter pays."""
COPIES = ("suffix", "prompt_lookup")


@dataclass(kw_only=True)
class ChooseConfig(SweepOptions):
    """Find out which drafter to train for a target, by training several a little.

    Candidates of every kind learn from a little of the target's text, the worse half is dropped, the others learn from
    more, and a forecast says what the best will bring once it is trained.
    """

    prompts: str
    """A .jsonl, .json, .parquet or text file of prompts, a directory, or a hub id."""
    budget: str
    """The time for everything, such as 40m, 2h or 1h30m: half of it to choose, the rest to train the winner."""
    draft: str | None = None
    """A small model with the target's tokenizer, a directory or hub id: distilled, it competes too."""
    candidates: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Candidates by name, in place of those of every kind: `command`, and fields of that command, such as
    {wide: {command: block, layers: 3}}."""
    draft_length: Ints = field(default_factory=lambda: [1, 2, 3, 4, 5, 7])
    """Values of γ to price, separated by commas."""
    batch_size: Ints = field(default_factory=lambda: [1])
    """Texts that will be decoded together, several numbers separated by commas."""
    server: str | None = None
    """The server that will load the drafter, vllm, sglang or llama.cpp; candidates that it cannot load do not compete.
    Rounds in llama.cpp are priced by its own clock, with target and drafters as GGUF files in `dtype`."""
    threads: int | None = None
    """CPU threads of the measured models; torch's default if None."""
    compiled: bool | None = None
    """Measure compiled forwards; null: if there is time to compile, and a token takes less than 0.1 s eagerly."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("draft_length", "batch_size"):
            setattr(self, name, sorted(set(numbers(getattr(self, name), int, name))))
            require_some(self, name, "number")
        require(self, DRAFT_LENGTH, "draft_length")
        require(self, at_least(1), "batch_size")
        require(self, THREADS, "threads")
        require(self, one_of(("vllm", "sglang", LLAMA_CPP)), "server")
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

    def loading(self) -> dict[str, Any]:
        """Return how measured models are loaded, as fields of other commands."""
        return nondefault_fields(self, ("dtype", "compiled", "threads"))

    @property
    def copies(self) -> tuple[str, ...]:
        """The untrained drafters that compete; the first is also the first member of every hybrid."""
        return COPIES if self.server != LLAMA_CPP else ("prompt_lookup:simple-2", "prompt_lookup:simple-4")

    @property
    def one_way(self) -> bool:
        """Whether a drafter drafts alone: llama.cpp drafts copies first where it is told so, other servers do not."""
        return self.server not in (None, LLAMA_CPP)

    @property
    def seconds(self) -> float:
        """The whole budget in seconds."""
        return seconds_of(self.budget, "budget")


@dataclass(kw_only=True)
class AlignConfig(ChooseConfig):
    """Make a drafter for a target, all the way: choose, train, measure, and export what passes the gate."""

    drafter: str | None = None
    """Train this candidate, such as block-1, on answers to all prompts without choosing; the budget is then ignored."""
    min_speedup: float = 1.0
    """The gate: the speed-up over plain decoding must exceed this, by its interval's lower end."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, more_than(0), "min_speedup")
        if self.server is None:
            self.server = "vllm"
        require(self, one_of(("vllm", "sglang")), "server")
