"""Settings of `draftsmith doctor`."""

from dataclasses import dataclass, field

from draftsmith.decode.errors import InputError, at_least, require, require_some
from draftsmith.scripts.kinds import Drafters, aliases, drafter_texts
from draftsmith.train.cli import Ints, numbers
from draftsmith.train.options import TeacherOptions, TemplateOptions


@dataclass
class DoctorConfig(TemplateOptions, TeacherOptions):
    """Check a target, its drafters and samples before they cost any time, and suggest remedies."""

    target: str
    """The target: a model directory, hub id or GGUF file."""
    drafter: Drafters = field(default_factory=list, metadata=aliases())
    """A drafter: a directory, whose config.json names its kind, or another kind by its name. Repeat it for several;
    without one only the target and the samples are checked."""
    run: Drafters = field(default_factory=list, metadata={"aliases": list})  # its flag can be repeated
    """KIND:FILE, the config of a training run of such a drafter, to check whether it can begin on this target."""
    prompts: str | None = None
    """Conversations with the assistant's answers, or prompts, as `prepare` reads them: their loss masks are checked."""
    completions: str | None = None
    """Completions written by `prepare`, whose loss masks are checked instead."""
    split: str = "train"
    """The split of a directory or hub id of prompts."""
    limit: int | None = None
    """Check the first N samples only."""
    show_mask: int = 0
    """Print the first N samples: in green the tokens that a draft learns from, dimmed those that it only reads."""
    context: int | None = None
    """Tokens of a text, prompt included, that positions and memory must hold; by default the models' positions."""
    batch_size: Ints = field(default_factory=lambda: [1, 8])
    """Texts decoded together, several with commas: for these memory is checked."""
    json: str | None = None
    """A file that receives the findings, for a CI job or a dashboard."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.batch_size = numbers(self.batch_size, int, "batch_size")
        require_some(self, "batch_size", "number")
        require(self, at_least(0), "show_mask")
        require(self, at_least(1), "limit", "context", "batch_size")
        if self.prompts is not None and self.completions is not None:
            raise InputError("completions: expected either prompts or completions, found both")
        if self.show_mask and self.prompts is None and self.completions is None:
            raise InputError("show_mask: expected samples to show in prompts or completions, found none")
        self.drafter, self.run = drafter_texts(self.drafter), drafter_texts(self.run)
