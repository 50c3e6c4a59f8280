"""A kind of drafter: one class that answers everything that commands ask.

A kind is a folder with a `kind.py`, and a line in `scripts/kinds.py`. Methods import what takes long by need: commands
ask all kinds for their names, and `--help` must not wait for torch.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from draftsmith.train.kinds.drafter import Drafter, DrafterSpec, Loading

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from draftsmith.decode.proposers.base import Proposer


@dataclass(frozen=True)
class Recipe:
    """A command that trains drafters."""

    command: str
    """Its name."""
    summary: str
    """What it makes, in a few words, for `draftsmith --help`."""
    package: str
    """What `accelerate launch -m` starts."""
    config: str
    """The dataclass of its fields, as "module:Class"."""

    def config_class(self) -> type[Any]:
        """Return the dataclass of its fields."""
        module, _, name = self.config.partition(":")
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
    tree_key: ClassVar[str | None] = None
    """The key of its config.json that holds a searched tree; None where none can be searched for."""
    report: ClassVar[Mapping[str, Any]] = {}
    """Further rules of the JSON Schema of its entries in a report."""

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

    def reload(self, path: str, dtype: str, trust_remote_code: bool) -> "PreTrainedModel":
        """Load its weights in another dtype, to time a forward.

        Raises:
            NotImplementedError: a kind without weights.
        """
        raise NotImplementedError(f"{self.title}: no weights")

    def forward(self, model: "PreTrainedModel") -> Callable[[], object]:
        """Return the forward that drafts a token behind a short text, to be timed.

        Raises:
            NotImplementedError: a kind without weights.
        """
        raise NotImplementedError(f"{self.title}: no weights")
