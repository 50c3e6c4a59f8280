"""A kind of drafter: one class that answers all questions of the commands.

A kind is a folder with a `kind.py`, and a line in `scripts/kinds.py`. Methods defer slow imports, because `--help` asks
all kinds for their names and must not wait for torch.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from draftsmith.decode.errors import InputError
from draftsmith.train.kinds.drafter import Drafter, DrafterSpec, Loading

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from draftsmith.decode.proposers.base import Proposer
    from draftsmith.train.kinds.export import ExportOptions, Served
    from draftsmith.train.kinds.parts import Part, Side


@dataclass(frozen=True)
class Recipe:
    """A command that trains drafters."""

    command: str
    summary: str  # a few words for `draftsmith --help` that begin with a verb
    package: str  # the module that `accelerate launch -m` starts
    config: str  # the dataclass of its fields, as "module:Class"
    plan: str | None = None
    """The class of its plan, a `train.memory.plan.TrainingPlan`, as "module:Class"."""
    begun: str = "heads"  # the field that names the drafter from which a run continues
    made: tuple[str, ...] = ()
    """The fields that describe a new drafter, or prefixes of their names; omitted where a run continues."""

    def config_class(self) -> type[Any]:
        """Return the dataclass of its fields."""
        return _imported(self.config)

    def memory_plan(self, config: Any, machines: Any) -> Any:
        """Return the plan of a run on some machines."""
        assert self.plan is not None
        return _imported(self.plan)(config, machines)


SMALL_VOCABULARY, MOST_DRAFTED = 16_384, 32_768
"""The largest vocabulary that drafters draft from in full, and the most tokens of a cut one."""


def drafted_tokens(target: "PretrainedConfig", field: str) -> dict[str, int]:
    """Return the field of a cut vocabulary, a quarter of a large target's; empty for small targets."""
    size = target.get_text_config().vocab_size
    return {} if size <= SMALL_VOCABULARY else {field: min(MOST_DRAFTED, size // 4)}


def _imported(path: str) -> type[Any]:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)  # type: ignore[no-any-return]


class DrafterKind(ABC):
    """One kind of drafter."""

    name: ClassVar[str]  # the name in `--drafter`, configs and reports
    title: ClassVar[str]  # the name in sentences
    stored: ClassVar[bool] = True  # read from a directory
    flags: ClassVar[tuple[str, ...]] = ()  # flags that are aliases of `--drafter KIND:` and a value
    switch: ClassVar[bool] = False  # these flags take no value
    recipe: ClassVar[Recipe | None] = None  # the command that trains it
    has_confidence: ClassVar[bool] = False  # it has a confidence, by which trees grow and cascades accept
    by_token: ClassVar[bool] = False  # the acceptance of a token does not depend on the start of its round
    drafts_less: ClassVar[bool] = False  # it may draft fewer tokens than γ, or none
    copies: ClassVar[bool] = False  # its drafts are copies of the text, which need no model
    tree_key: ClassVar[str | None] = None
    """The key of its config.json that holds a searched tree; None where trees cannot be searched."""
    tree_alone: ClassVar[bool] = False  # it drafts that tree, or a default one, for every γ
    whole_blocks: ClassVar[bool] = False  # servers always draft the number of tokens that it was trained for
    formats: ClassVar[tuple[str, ...]] = ()
    """The formats that `draftsmith export` writes; empty where it cannot be exported."""
    launched: ClassVar[tuple[str, ...]] = ()  # the formats whose launch line contains γ
    verifiable: ClassVar[tuple[str, ...]] = ()  # the formats that `--verify vllm` decodes with
    gguf: ClassVar[str | None] = None  # the format that llama.cpp's converter reads

    def recognises(self, config: Mapping[str, Any]) -> bool:
        """Return whether a directory with this config.json holds a drafter of this kind."""
        return False

    def check(self, spec: DrafterSpec, loading: Loading) -> None:  # noqa: B027
        """Raise InputError for a drafter that does not fit the target, as far as known before weights are read."""

    @abstractmethod
    def load(self, spec: DrafterSpec, loading: Loading) -> Drafter:
        """Load a drafter for a target; raise InputError if it cannot be loaded or does not fit the target."""

    def drafter(self, spec: DrafterSpec, proposer: "Proposer", **fields: Any) -> Drafter:
        """Return a loaded drafter; `fields` are fields of `Drafter` in addition to the spec's."""
        fields = {"draft_lengths": spec.draft_lengths} | fields
        return Drafter(spec.name or spec.kind, spec.kind, self, spec.path if self.stored else None, proposer, **fields)

    def chain(self, drafter: Drafter, draft_length: int) -> "tuple[Proposer, int]":
        """Return a proposer of chains with the same weights, and the length of its chains, at most γ."""
        return drafter.proposer, draft_length

    def inspect(self, spec: DrafterSpec, target: "Side | None", trust_remote_code: bool) -> "Part | None":
        """Return a drafter, at best without its weights, or None if it has no files.

        Raise InputError for files that do not load, or do not fit the target.
        """
        return None

    def check_export(self, config: "ExportOptions") -> None:
        """Raise InputError for options of `draftsmith export` that do not suit such drafters."""
        from draftsmith.train.kinds.export import check_output

        self.check_format(config)
        if not config.output:
            raise InputError("output: expected a directory to write in, found none")
        check_output(Path(config.output))

    def format_for(self, server: str | None) -> str | None:
        """Return the format that a server loads, vllm or sglang; None without one."""
        return server if server in self.formats else None

    def check_format(self, config: "ExportOptions") -> None:
        """Raise InputError for an unknown format, or an option that does not suit the format."""
        from draftsmith.train.kinds.export import GGUF, check_format

        if not self.formats:
            raise self.no_formats()
        check_format(str(config.format), (*self.formats, *([GGUF] if self.gguf else ())))
        for name, formats, is_set in (
            ("draft_length", self.launched, config.draft_length is not None),
            ("verify", self.verifiable, config.verify is not None),
        ):
            if is_set and config.format not in formats:
                wanted = f"it with {' or '.join(formats)}" if formats else f"none with {self.title}"
                raise InputError(f"{name}: expected {wanted}, found it with {config.format}")

    def no_formats(self) -> InputError:
        """Return the error that such drafters cannot be exported or imported."""
        why = "no other tool reads its files" if self.stored else "it has no files"
        return InputError(f"drafter: expected one that can be exported, found {self.title}: {why}")

    def export(self, config: "ExportOptions", path: str) -> list[str]:
        """Write a drafter in a format and return the lines to print; the last one without # is the launch line."""
        raise self.no_formats()

    def unchanged(self, path: str) -> bool:
        """Return whether servers load the drafter's own directory, so that an export writes no files."""
        return False

    def served(
        self, config: "ExportOptions", path: str
    ) -> "tuple[list[Served], Callable[[PreTrainedModel], Proposer]]":
        """Return vLLM's configs for the export, and a function from the target to the proposer that must agree."""
        raise self.no_formats()

    def overrides(self, target: "PretrainedConfig") -> dict[str, int]:
        """Return the fields that vLLM needs in addition to a target's config."""
        return {}

    def candidates(self, target: "PretrainedConfig", server: str | None) -> dict[str, dict[str, Any]]:
        """Return the candidates of `draftsmith choose`, by name the fields of the recipe.

        `server` is the program that will load the drafter, vllm or sglang; None for draftsmith itself.
        """
        return {}

    def most_drafted(self, config: Mapping[str, Any]) -> int | None:
        """Return the most tokens that a drafter with this config.json drafts in a round; None without a limit."""
        return None

    def recognises_foreign(self, directory: Path) -> bool:
        """Return whether a directory with a config.json holds drafters of this kind in another tool's format."""
        return False

    def import_from(self, config: "ExportOptions", source: str) -> list[str]:
        """Write another tool's drafter in our format and return the lines to print; raise InputError if unreadable."""
        raise self.no_formats()
