"""Settings of `draftsmith export`. Light: `--help` must not wait for torch."""

from dataclasses import dataclass

from draftsmith.decode.errors import InputError, at_least, one_of, require
from draftsmith.train.options import DRAFT_LENGTH, DTYPES

STORED = tuple(name for name in DTYPES if name != "auto")
"""What weights can be written in."""
SERVERS = ("vllm", "sglang")
"""What loads a draft model as it is."""
ENGINES = ("vllm",)
"""What an export can be verified in."""


@dataclass
class ExportOptions:
    """Write Medusa or EAGLE-3 heads in another format, read them from one, or say how to serve a draft model."""

    heads: str | None = None
    """Medusa or EAGLE-3 heads in draftsmith's own format, to be written to `output` in `format`."""
    import_from: str | None = None
    """Such heads in another format, to be written to `output` in draftsmith's own. EAGLE-3 heads may be by the EAGLE
    authors, SpecForge or speculators."""
    draft: str | None = None
    """A draft model, which servers load as it is: it is checked, and its launch line printed."""
    format: str | None = None
    """Of Medusa `heads`: own, vllm, fasterdecoding or modelopt; of EAGLE-3 heads: own, vllm or sglang. Of
    `import_from`: the same; recognised if not given, but vllm where an `eagle_config` counts layers as vLLM does. Of
    `draft`: vllm or sglang."""
    output: str | None = None
    """Where heads are written, or a draft with a cut vocabulary, which servers need whole: a new or empty directory."""
    target: str | None = None
    """The target: a directory or hub id. Heads must fit it, and a draft must have its tokenizer. Needed to import heads
    that use its language-model head, hold its embeddings, or name no layers."""
    dtype: str | None = None
    """The weights' type in `output`; that of the heads if not given."""
    draft_length: int | None = None
    """Tokens drafted a round, in the launch line. If not given: for Medusa heads in vLLM all of them, for a draft model
    or EAGLE-3 heads 4."""
    by_rank: bool = False
    """Leave out what a format cannot say and what changes logits but not their order: softcapping, and a scale. The
    readers of these formats draft the most likely tokens, which stay the same."""
    verify: str | None = None
    """`vllm`: let it decode prompts with what was exported, at temperature 0 in float32, and compare its texts and what
    it counts with this decoder's. For a draft model or heads in a format that it loads, with their target."""
    engine: str | None = None
    """The Python that has vLLM. If not given: the environment variable DRAFTSMITH_ENGINE's, .venv-engine/bin/python in
    this folder, which `make engine` installs, or this one."""
    prompts: str | None = None
    """A file of prompts to verify with; modules of the standard library if not given."""
    limit: int = 8
    """Verify with the first so many prompts."""
    max_new_tokens: int = 64
    """Tokens of each text that verifies."""
    timeout: int = 1800
    """Seconds that vLLM may take in all."""
    trust_remote_code: bool = False
    """Run model code that a repository ships."""

    def __post_init__(self) -> None:
        given = [name for name in ("heads", "import_from", "draft") if getattr(self, name) is not None]
        if len(given) != 1:
            raise InputError(
                f"heads: expected one of heads, import_from and draft, found {' and '.join(given) or 'none'}"
            )
        if self.import_from is None and self.format is None:
            raise InputError("format: expected one, found none")
        require(self, one_of(STORED), "dtype")
        require(self, DRAFT_LENGTH, "draft_length")
        require(self, one_of(ENGINES), "verify")
        require(self, at_least(1), "limit", "max_new_tokens", "timeout")
        if self.verify is not None and self.import_from is None and self.target is None:
            raise InputError("target: expected one to verify with, found none")
