"""The base of kinds of heads: they are stored in one directory, and read the target's hidden states."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from draftsmith.train.kinds.drafter import DrafterSpec, Loading
from draftsmith.train.kinds.kind import DrafterKind

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from draftsmith.decode.proposers.base import Proposer
    from draftsmith.train.kinds.export import ExportOptions, Served
    from draftsmith.train.kinds.parts import Part, Side


class HeadsKind(DrafterKind):
    """Heads on a target; the modules of their package are imported only when a command needs them."""

    package: ClassVar[str]
    """It has the module `formats.export`."""
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

    def inspect(self, spec: DrafterSpec, target: "Side | None", trust_remote_code: bool) -> "Part":
        """Read heads of any tool, as `export --import_from` does, and require that they fit the target."""
        formats = self._module("formats.export").FORMATS
        return formats.inspect(self.heads_class(), str(self.tree_key), spec, target)  # type: ignore[no-any-return]

    def export(self, config: "ExportOptions", path: str) -> list[str]:
        """Write the heads for a server or another tool."""
        return self._module("formats.export").FORMATS.export(config, path)  # type: ignore[no-any-return]

    def served(
        self, config: "ExportOptions", path: str
    ) -> "tuple[list[Served], Callable[[PreTrainedModel], Proposer]]":
        """Return vLLM's config for the export, and a proposer that must agree with it."""
        return self._module("formats.export").FORMATS.served(config, path)  # type: ignore[no-any-return]

    def recognises_foreign(self, directory: Path) -> bool:
        """Return whether the config is of such heads, in any tool's format."""
        from draftsmith.medusa.checkpoint_files import read_config

        return self.recognises(read_config(directory, self.title))

    def import_from(self, config: "ExportOptions", source: str) -> list[str]:
        """Read the heads of another tool."""
        return self._module("formats.export").FORMATS.import_from(config, source)  # type: ignore[no-any-return]
