"""What kinds of heads share: they lie in one directory, and read the target's hidden states."""

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from draftsmith.train.kinds.drafter import DrafterSpec, Loading
from draftsmith.train.kinds.kind import ModelKind

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


class HeadsKind(ModelKind):
    """Heads on a target."""

    @abstractmethod
    def heads_class(self) -> Any:
        """Return the class of the heads, with `from_pretrained` and `check_fits`."""

    def heads(self, spec: DrafterSpec, loading: Loading) -> Any:
        """Load heads, and require that they fit the target."""
        from draftsmith.decode.progress import phase
        from draftsmith.train.models import DTYPES

        target = loading.target
        with phase(f"loading {spec.path}"):
            dtype = DTYPES[spec.dtype] if spec.dtype else target.dtype
            heads = self.heads_class().from_pretrained(str(spec.path), dtype=dtype).to(target.device)
        heads.check_fits(target)
        return heads

    def reload(self, path: str, dtype: str, trust_remote_code: bool) -> "PreTrainedModel":
        """Load heads in another dtype."""
        from draftsmith.train.models import DTYPES

        return self.heads_class().from_pretrained(path, dtype=DTYPES[dtype])  # type: ignore[no-any-return]

    def overrides(self, target: "PretrainedConfig") -> dict[str, int]:
        """Return the vocabulary's size where vLLM does not find it."""
        from draftsmith.train.kinds.export import vocabulary_override

        return vocabulary_override(target)
