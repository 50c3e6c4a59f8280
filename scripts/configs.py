"""Settings of single-module commands. Light: `--help` must not load torch."""

from dataclasses import dataclass, field
from pathlib import Path

from draftsmith.decode.errors import InputError, at_least, finite, require, require_some
from draftsmith.decode.options import Sampling
from draftsmith.scripts.kinds import NONE, Drafters, aliases, drafter_texts, only_drafter
from draftsmith.train.cli import Ints, numbers
from draftsmith.train.kinds.export import ExportOptions
from draftsmith.train.options import DRAFT_LENGTH, THREADS, TREE_NODES, ModelOptions, TemplateOptions

ASSETS = Path(__file__).resolve().parents[1] / "assets"


@dataclass
class GenerateConfig(Sampling, TemplateOptions):
    """Try a target with a drafter on one prompt, and watch in colour which tokens the drafter got right."""

    target: str
    """The target: a model directory, hub id or GGUF file."""
    prompt: str
    """The text to continue; `-` reads it from standard input, without its last newline."""
    drafter: Drafters = field(default_factory=list, metadata=aliases())
    """The drafter: a directory or hub id of draft models or heads, or a kind: prompt_lookup, lookahead, unigram,
    or none for plain decoding. A draft model's tokenizer may have the target's tokens under other ids."""
    draft_length: int = 4
    """γ, drafted tokens per round; for a tree, its depth."""
    rule: str = "exact"
    """The rule that keeps drafted tokens: exact, which is lossless, or the lossy typical, threshold or cascade."""
    max_new_tokens: int = 128
    """The most tokens of the text."""
    chat: bool = False
    """Apply the tokenizer's chat template, with the prompt as a user's turn."""
    compare: bool = False
    """Decode plainly too, and print its speed and whether the texts are identical."""
    seed: int = 0
    """Seeds the sampling."""

    def __post_init__(self) -> None:
        from draftsmith.decode.rules import as_rule

        super().__post_init__()
        self.drafter = only_drafter(self.drafter)
        require(self, DRAFT_LENGTH, "draft_length")
        require(self, at_least(1), "max_new_tokens")
        require(self, at_least(0), "seed")
        as_rule(self.rule)
        if self.compare and self.drafter == [NONE]:
            raise InputError("compare: expected a drafter to compare with plain decoding, found none")


@dataclass
class ProfileConfig(ModelOptions):
    """Profile the rounds of one drafter with a target: the shares of drafting, verifying and the rest."""

    target: str
    """The target: a model directory, hub id or GGUF file."""
    prompts: str
    """A .jsonl, .json, .parquet or text file of prompts, a directory, or a hub id."""
    output: str
    """The directory that receives `trace.json` and `profile.json`."""
    drafter: Drafters = field(default_factory=list, metadata=aliases())
    """The drafter: `DIR`, or a kind that needs none, such as prompt_lookup."""
    draft_length: int = 4
    """γ, drafted tokens per round; a drafter with a tree of its own drafts that."""
    batch_size: Ints = field(default_factory=lambda: [1])
    """Prompts decoded together, several with commas; prompts that fill no whole batch are left out."""
    temperature: float = 0.0
    """Sampling temperature; 0 is greedy."""
    compiled: bool = False
    """Run the models compiled."""
    limit: int | None = None
    """Read only the first N prompts."""
    max_prompt_tokens: int | None = None
    """The most tokens of a prompt, the last ones."""
    max_new_tokens: int = 128
    """The most tokens of a text."""
    threads: int | None = None
    """CPU threads; torch's default if None."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.drafter = only_drafter(self.drafter)
        self.batch_size = numbers(self.batch_size, int, "batch_size")
        require_some(self, "batch_size", "number")
        require(self, at_least(1), "batch_size", "limit", "max_new_tokens")
        require(self, DRAFT_LENGTH, "draft_length")
        require(self, THREADS, "threads")
        require(self, finite(at_least(0)), "temperature")

    @property
    def template(self) -> TemplateOptions:
        """The options of reading prompts."""
        return TemplateOptions(trust_remote_code=self.trust_remote_code, max_prompt_tokens=self.max_prompt_tokens)


@dataclass
class TreeConfig(ModelOptions):
    """Search the tree that a drafter of several tokens should draft, on text of the target at temperature 0."""

    target: str
    """The target: a model directory, hub id or GGUF file."""
    completions: list[str]
    """Directories written by `draftsmith prepare --temperature 0` with this target, of other prompts than the drafter's
    training."""
    drafter: Drafters = field(default_factory=list, metadata=aliases("heads"))
    """The directory of the drafter, whose config.json receives the tree."""
    nodes: int | None = None
    """Nodes of the tree without the target's own token; fewer if more would never be accepted in these texts. None
    measures rounds with some trees on this machine, and chooses by that."""
    compiled: bool | None = None
    """For compiled forwards; null: as `measure` chooses."""
    output: str | None = None
    """The directory that receives `tree.json`; the drafter is not changed. None writes it next to the drafter, and the
    tree into its config.json."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.drafter = only_drafter(self.drafter)
        require(self, TREE_NODES, "nodes")
        require_some(self, "completions", "directory")


@dataclass
class ExportConfig(ExportOptions):
    """Write a drafter in another tool's format, read one, or print how a server loads a draft model."""

    drafter: Drafters = field(default_factory=list, metadata=aliases("heads"))
    """The drafter, a directory of ours. Heads are written to `output` in `format`; a draft model, which servers load as
    it is, is checked, and its launch line printed."""
    import_from: str | None = None
    """Heads of another tool, to be written to `output` in draftsmith's own format."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.drafter = drafter_texts(self.drafter)
        sources = [*self.drafter, *filter(None, [self.import_from])]
        if len(sources) != 1:
            raise InputError(f"drafter: expected one, or import_from, found {' and '.join(sources) or 'neither'}")
        if self.import_from is None and self.format is None:
            raise InputError("format: expected one, found none")
        if self.import_from is None and self.verify is not None and self.target is None:
            raise InputError("target: expected one to verify with, found none")
        if self.import_from is not None:
            for name in ("draft_length", "verify"):
                if getattr(self, name):
                    raise InputError(f"{name}: expected none with heads to import, found one")
            if not self.output:
                raise InputError("output: expected a directory to write in, found none")


@dataclass
class QuickstartConfig:
    """Prepare, distil, train Hydra heads and measure on the embedded target: minutes on two cores, no GPU."""

    output: str = "runs/quickstart"
    """The directory of prompts/, completions/, draft/, medusa/ and report.json; a second run continues from its
    content."""
