"""A kind of drafter: one class that answers everything that commands ask.

A kind is a folder with a `kind.py`, and a line in `scripts/kinds.py`. Methods import what takes long by need: commands
ask all kinds for their names, and `--help` must not wait for torch.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
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
    from draftsmith.train.kinds.findings import Finding
    from draftsmith.train.kinds.parts import Part, Side


@dataclass(frozen=True)
class Recipe:
    """A command that trains drafters."""

    command: str
    """Its name."""
    summary: str
    """What it does, in a few words that begin with a verb, for `draftsmith --help`."""
    package: str
    """What `accelerate launch -m` starts."""
    config: str
    """The dataclass of its fields, as "module:Class"."""
    plan: str | None = None
    """The dataclass of the fields of its plan, as "module:Class": a `train.memory.setting.TrainingMachines`."""
    begun: str = "heads"
    """The field that names what a run goes on from."""
    made: tuple[str, ...] = ()
    """Fields that say what a new drafter is like, or beginnings of their names: left out where a run goes on."""

    def config_class(self) -> type[Any]:
        """Return the dataclass of its fields."""
        return _imported(self.config)

    def plan_class(self) -> type[Any]:
        """Return the dataclass of the fields of its plan."""
        assert self.plan is not None
        return _imported(self.plan)


SMALL_VOCABULARY, MOST_DRAFTED = 16_384, 32_768
"""Tokens of a vocabulary up to which drafters read all of it; those that they draft among at most."""


def drafted_tokens(target: "PretrainedConfig", field: str) -> dict[str, int]:
    """Return the field for a cut vocabulary where the target's is large: a quarter of it; else none."""
    size = target.get_text_config().vocab_size
    return {} if size <= SMALL_VOCABULARY else {field: min(MOST_DRAFTED, size // 4)}


def _imported(path: str) -> type[Any]:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)  # type: ignore[no-any-return]


class DrafterKind(ABC):
    """One kind of drafter."""

    name: ClassVar[str]
    """What `--drafter`, configs and reports call it."""
    title: ClassVar[str]
    """What sentences call it."""
    stored: ClassVar[bool] = True
    """Whether it is read from a directory."""
    flags: ClassVar[tuple[str, ...]] = ()
    """Flags that are aliases of `--drafter KIND:` and their value."""
    switch: ClassVar[bool] = False
    """Whether these flags take no value."""
    recipe: ClassVar[Recipe | None] = None
    """What trains it."""
    grows_trees: ClassVar[bool] = False
    """Whether it has a confidence, by which trees grow and cascades accept."""
    by_token: ClassVar[bool] = False
    """Whether a token is accepted or not wherever in the text its round began."""
    drafts_less: ClassVar[bool] = False
    """Whether it may draft fewer tokens than it is asked for, or none."""
    copies: ClassVar[bool] = False
    """Whether its drafts are copies of what a text has already: whoever has the text can draft, without a model."""
    tree_key: ClassVar[str | None] = None
    """The key of its config.json that holds a searched tree; None where none can be searched for."""
    tree_alone: ClassVar[bool] = False
    """Whether it drafts such a tree or a default one, whatever γ is asked for."""
    whole_blocks: ClassVar[bool] = False
    """Whether servers draft as many tokens as it was trained for, and no fewer."""
    cost_remedy: ClassVar[str] = "take a cheaper drafter"
    """The way out where drafting does not pay."""
    formats: ClassVar[tuple[str, ...]] = ()
    """Formats that `draftsmith export` writes; none where it cannot be exported."""
    launched: ClassVar[tuple[str, ...]] = ()
    """Formats whose launch line says γ."""
    verifiable: ClassVar[tuple[str, ...]] = ()
    """Formats that `--verify vllm` decodes with."""
    drops_by_rank: ClassVar[bool] = False
    """Whether a format can leave out what changes logits but not their order."""
    figures: ClassVar[tuple[str, ...]] = ()
    """Numbers that its entries in reports have, and those of other kinds have not."""

    def recognises(self, config: Mapping[str, Any]) -> bool:
        """Return whether a directory with this config.json holds a drafter of this kind."""
        return False

    def check(self, spec: DrafterSpec, loading: Loading) -> None:  # noqa: B027
        """Check what can be checked before any weights are read.

        Raises:
            InputError: a drafter that does not fit the target.
        """

    @abstractmethod
    def load(self, spec: DrafterSpec, loading: Loading) -> Drafter:
        """Load a drafter for a target.

        Raises:
            InputError: one that cannot be loaded or does not fit the target.
        """

    def drafter(self, spec: DrafterSpec, proposer: "Proposer", **fields: Any) -> Drafter:
        """Return a loaded drafter; `fields` are those of `Drafter` that are not the spec's."""
        fields = {"draft_lengths": spec.draft_lengths} | fields
        return Drafter(spec.name or spec.kind, spec.kind, self, spec.path if self.stored else None, proposer, **fields)

    def chain(self, drafter: Drafter, draft_length: int) -> "tuple[Proposer, int]":
        """Return what drafts chains with the same weights, and how long they are: at most γ."""
        return drafter.proposer, draft_length

    def cached_numbers(self, drafter: Drafter) -> int | None:
        """Return how many numbers its cache keeps for a token of the text; None where that is not known."""
        return 0

    def timed_forwards(
        self, drafter: Drafter, others: Iterable[str], trust_remote_code: bool
    ) -> dict[str, Callable[[], object]]:
        """Return forwards that draft a token behind a short text, by dtype; none where it keeps the dtype it has.

        Args:
            drafter: loaded, with weights.
            others: names of further dtypes to load it in.
            trust_remote_code: as for loading.
        """
        return {}

    def inspect(self, spec: DrafterSpec, trust_remote_code: bool) -> "tuple[Part | None, Finding]":
        """Load a drafter without its weights, and say what it is; None where it does not load, or has no files."""
        from draftsmith.train.kinds.findings import Finding

        return None, Finding("ok", spec.name or spec.kind, f"{self.title}: no files to check")

    def compare(self, target: "Side", part: "Part") -> "Iterator[Finding]":
        """Compare a drafter with its target, both without weights."""
        return iter(())

    def costs(self, spec: DrafterSpec, loading: Loading) -> "Callable[[int], Finding]":
        """Load a drafter, and return what measures its rounds for a number of texts decoded together.

        Raises:
            InputError: one that cannot be loaded.
        """
        from draftsmith.train.kinds.costs import TimedDrafter

        drafter = self.load(spec, loading)
        models = [loading.target] if drafter.model is None else [loading.target, drafter.model]
        name = spec.name or spec.kind
        return TimedDrafter(loading.target, drafter.proposer, models, name, self.cost_remedy, drafter.tree).finding

    def check_run(self, target: "Side", file: str) -> "Iterator[Finding]":
        """Check the config of a run that trains such drafters against a target without weights.

        Args:
            target: without weights.
            file: what the recipe's command reads.
        """
        from draftsmith.train.cli import parse_config
        from draftsmith.train.kinds.findings import Finding

        name, recipe = f"{self.name} run", self.recipe
        assert recipe is not None
        try:
            # The machine that checks need not be the one that trains: bf16 without this asks for a GPU here.
            config = parse_config(recipe.config_class(), ["--config", file, "--training.use_cpu", "true"])
            text, findings = self.begins(target, config)
        except InputError as error:
            yield Finding("error", name, str(error).removeprefix(f"{self.name}: "), f"mend {file}")
            return
        if Path(config.target) == Path(target.path):
            yield Finding("ok", name, text)
        else:
            yield Finding("warning", name, f"{text}; its target is {config.target}", "give the target of that run")
        yield from findings

    def begins(self, target: "Side", config: Any) -> "tuple[str, list[Finding]]":
        """Return what a run trains, in words, and what is found of it beside.

        Raises:
            InputError: a run that cannot begin on this target.
        """
        return self.title, []

    def check_export(self, config: "ExportOptions") -> None:
        """Check the options of `draftsmith export` before any work.

        Raises:
            InputError: an option that does not go with such drafters.
        """
        from draftsmith.train.kinds.export import check_output

        self.check_format(config)
        if not config.output:
            raise InputError("output: expected a directory to write in, found none")
        check_output(Path(config.output))

    def check_format(self, config: "ExportOptions") -> None:
        """Check a format, and the options that depend on it.

        Raises:
            InputError: an unknown format, or an option that does not go with it.
        """
        from draftsmith.train.kinds.export import check_format

        if not self.formats:
            raise self.no_formats()
        check_format(str(config.format), self.formats)
        if config.by_rank and not self.drops_by_rank:
            raise InputError(f"by_rank: expected none with {self.title}, which need it nowhere, found it")
        for name, formats, given in (
            ("draft_length", self.launched, config.draft_length is not None),
            ("verify", self.verifiable, config.verify is not None),
        ):
            if given and config.format not in formats:
                wanted = f"it with {' or '.join(formats)}" if formats else f"none with {self.title}"
                raise InputError(f"{name}: expected {wanted}, found it with {config.format}")

    def no_formats(self) -> InputError:
        """Return why such drafters cannot be exported, or imported."""
        why = "no other tool reads its files" if self.stored else "it has no files"
        return InputError(f"drafter: expected one that can be exported, found {self.title}: {why}")

    def export(self, config: "ExportOptions", path: str) -> list[str]:
        """Write a drafter in a format, and return the lines to print: the launch line is the last that is no comment.

        Args:
            config: checked by `check_export`.
            path: the drafter's directory.

        Raises:
            InputError: a drafter that cannot be read, or that the format cannot hold.
        """
        raise self.no_formats()

    def served(
        self, config: "ExportOptions", path: str
    ) -> "tuple[list[Served], Callable[[PreTrainedModel], Proposer]]":
        """Return vLLM's configs for the export, and a function from the target to the proposer that must agree."""
        raise self.no_formats()

    def overrides(self, target: "PretrainedConfig") -> dict[str, int]:
        """Return the fields that vLLM needs in a target's config beside its own."""
        return {}

    def candidates(self, target: "PretrainedConfig", server: str | None) -> dict[str, dict[str, Any]]:
        """Return what `draftsmith choose` tries of this kind: by name, fields of its recipe.

        Args:
            target: its config.
            server: what is going to load the drafter, vllm or sglang; None: draftsmith alone.
        """
        return {}

    def most_drafted(self, config: Mapping[str, Any]) -> int | None:
        """Return the most tokens a round of a drafter with this config.json; None where nothing limits them."""
        return None

    def recognises_foreign(self, directory: Path) -> bool:
        """Return whether a directory holds drafters of this kind in another tool's format.

        Raises:
            InputError: no directory, or one without a config.json.
        """
        return False

    def import_from(self, config: "ExportOptions", source: str) -> list[str]:
        """Write a drafter of another tool in our format, and return the lines to print.

        Raises:
            InputError: one that cannot be read.
        """
        raise self.no_formats()


class ModelKind(DrafterKind):
    """A kind whose drafters are models that can be loaded in several dtypes."""

    @abstractmethod
    def reload(self, path: str, dtype: str, trust_remote_code: bool) -> "PreTrainedModel":
        """Load the model in a dtype."""

    @abstractmethod
    def forward(self, model: "PreTrainedModel") -> Callable[[], object]:
        """Return the forward that drafts a token behind a short text."""

    def timed_forwards(
        self, drafter: Drafter, others: Iterable[str], trust_remote_code: bool
    ) -> dict[str, Callable[[], object]]:
        """Return the forward of the model as it is, and of a copy in each other dtype."""
        assert drafter.model is not None
        models = {str(drafter.model.dtype).removeprefix("torch."): drafter.model}
        models |= {name: self.reload(str(drafter.path), name, trust_remote_code) for name in others}
        return {name: self.forward(model) for name, model in models.items()}
