"""The base of kinds of heads: they are stored in one directory, and read the target's hidden states."""

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from draftsmith.train.kinds.drafter import DrafterSpec, Loading
from draftsmith.train.kinds.kind import DrafterKind

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from draftsmith.decode.proposers.base import Proposer
    from draftsmith.train.kinds.export import ExportOptions, Served
    from draftsmith.train.kinds.findings import Finding
    from draftsmith.train.kinds.parts import Part, Side


class HeadsKind(DrafterKind):
    """Heads on a target; the modules of their package are imported only when a command needs them."""

    package: ClassVar[str]
    """It has the modules `checks` and `formats.export`."""
    model_class: ClassVar[str]
    """The class of the heads, as "module:Class" in their package."""

    def _module(self, name: str) -> Any:
        return import_module(f"{self.package}.{name}")

    def heads_class(self) -> Any:
        """Return the class of the heads, with `from_pretrained` and `check_fits`."""
        module, _, name = self.model_class.partition(":")
        return getattr(self._module(module), name)

    def heads(self, spec: DrafterSpec, loading: Loading) -> Any:
        """Load heads, and require that they fit the target."""
        from draftsmith.decode.progress import phase

        target = loading.target
        with phase(f"loading {spec.path}"):
            heads = self.heads_class().from_pretrained(str(spec.path), dtype=target.dtype).to(target.device)
        heads.check_fits(target)
        return heads

    def overrides(self, target: "PretrainedConfig") -> dict[str, int]:
        """Return the vocabulary's size if vLLM does not find it."""
        from draftsmith.train.kinds.export import vocabulary_override

        return vocabulary_override(target)

    def inspect(self, spec: DrafterSpec, trust_remote_code: bool) -> "tuple[Part | None, Finding]":
        """Load heads of any tool without their weights."""
        return self._module("checks").inspect(spec)  # type: ignore[no-any-return]

    def compare(self, target: "Side", part: "Part") -> "Iterator[Finding]":
        """Compare shapes, the tree with the heads, and their files with what servers load."""
        return self._module("checks").compare(target, part)  # type: ignore[no-any-return]

    def export(self, config: "ExportOptions", path: str) -> list[str]:
        """Write the heads for a server or another tool."""
        return self._module("formats.export").FORMATS.export(config, path)  # type: ignore[no-any-return]

    def served(
        self, config: "ExportOptions", path: str
    ) -> "tuple[list[Served], Callable[[PreTrainedModel], Proposer]]":
        """Return vLLM's config for the export, and a proposer that must agree with it."""
        return self._module("formats.export").FORMATS.served(config, path)  # type: ignore[no-any-return]

    def import_from(self, config: "ExportOptions", source: str) -> list[str]:
        """Read the heads of another tool."""
        return self._module("formats.export").FORMATS.import_from(config, source)  # type: ignore[no-any-return]


class FeatureKind(HeadsKind):
    """Heads on features of the target, whose layers have a cache."""

    def describe_run(self, target: "Side", config: Any) -> "tuple[str, list[Finding]]":
        """Return how a run begins, and findings such as an unusual learning rate."""
        return self._module("checks").check_run(target, config)  # type: ignore[no-any-return]
