"""Parts shared by exports: options, the output directory, launch lines of servers. Imports no torch, for `--help`."""

import json
import math
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from draftsmith.decode.errors import InputError, one_of, require
from draftsmith.train.files import atomic_path, is_gguf, require_writable
from draftsmith.train.options import DRAFT_LENGTH, DTYPES

if TYPE_CHECKING:
    from transformers import PretrainedConfig


GGUF = "gguf"
"""The format of llama.cpp, into which its converter brings files of another format."""
ENGINES = ("vllm", "llama.cpp")
"""Engines that can verify an export."""
QUANTIZED = ("f32", "f16", "bf16", "q8_0", "q6_k", "q5_k_m", "q5_1", "q5_0", "q4_k_m", "q4_1", "q4_0")
"""Types of weights in GGUF files."""


@dataclass
class ExportOptions:
    """The options of an export."""

    format: str | None = None
    """For draft models: vllm or sglang, which load them unchanged. For heads: own, vllm, and sglang or
    speculators where the kind supports it. For MTP layers: target, the target's files with these layers
    in them. For llama.cpp: gguf. With `import_from` it is recognised if not given."""
    output: str | None = None
    """A new or empty directory for heads, or for a draft with a cut vocabulary, which servers need in full; for gguf a
    new file."""
    target: str | None = None
    """The target: a directory, a hub id or, for gguf, a GGUF file. Heads must fit it, and a draft must have its
    tokenizer. Required to import heads that use its language-model head, hold its embeddings, or name no layers; and to
    write such."""
    dtype: str | None = None
    """The weights' type in `output`; that of the heads if not given."""
    quantize: str | None = None
    """The weights' type in a GGUF file: f32, f16, bf16, q8_0, q6_k, q5_k_m, q5_1, q5_0, q4_k_m, q4_1 or q4_0; q8_0 if
    not given."""
    draft_length: int | None = None
    """Tokens drafted a round, in the launch line. If not given: the number that it drafts at once, or 4."""
    draft_lengths: str | None = None
    """draft_lengths.json that `measure` wrote: vLLM's launch line then gives the draft length for each load."""
    verify: str | None = None
    """`vllm` or `llama.cpp`: let it decode prompts with the export, at temperature 0 in float32, and compare its texts
    and counts with this decoder's. For draft models, and heads in a format that it loads, with their target. The
    environment variable DRAFTSMITH_ENGINE is the Python that has vLLM, by default that of `make engine`, or the current
    one; DRAFTSMITH_LLAMA_CPP is the folder of llama.cpp, by default that of `make llama-cpp`."""
    trust_remote_code: bool = False
    """Run model code that a repository ships."""

    def __post_init__(self) -> None:
        require(self, one_of(name for name in DTYPES if name != "auto"), "dtype")
        require(self, DRAFT_LENGTH, "draft_length")
        if self.draft_lengths is not None and (self.draft_length is not None or self.format != "vllm"):
            found = f"format {self.format}" if self.draft_length is None else f"draft_length {self.draft_length}"
            raise InputError(f"draft_lengths: expected format vllm and no draft_length with it, found {found}")
        require(self, one_of(ENGINES), "verify")
        require(self, one_of(QUANTIZED), "quantize")
        if self.format != GGUF and (self.quantize is not None or self.verify == "llama.cpp"):
            raise InputError(f"format: expected {GGUF} with quantize and llama.cpp, found {self.format}")
        if self.format == GGUF:
            for name, wrong in (("dtype", self.dtype is not None), ("verify", self.verify == "vllm")):
                if wrong:
                    raise InputError(f"{name}: expected none of {getattr(self, name)} with format {GGUF}, found it")
            if self.target is None:
                raise InputError(f"target: expected its directory for format {GGUF}, found none")
            if not str(self.output).endswith(".gguf"):
                raise InputError(f"output: expected the name of a new .gguf file, found {self.output}")


@dataclass(frozen=True)
class Served:
    """A drafter in vLLM."""

    name: str
    """Its name in messages."""
    speculative: Mapping[str, Any]
    """Its `speculative_config`."""
    target: str | None = None
    """The directory that vLLM serves; the target's if None."""

    @property
    def draft_length(self) -> int:
        """γ in vLLM."""
        return int(self.speculative["num_speculative_tokens"])


def vocabulary_override(config: "PretrainedConfig") -> dict[str, int]:
    """Return the field that lets vLLM find a target's vocabulary size; empty for most targets.

    vLLM reads `hf_config.vocab_size` (0.32, `config/speculative.py`), which multimodal configs have only in their
    `text_config`.
    """
    fields = config.to_dict()
    return {} if "vocab_size" in fields else {"vocab_size": int(config.get_text_config().vocab_size)}


def unserved_rotation(rope: Mapping[str, Any]) -> str | None:
    """Return why servers turn positions by other numbers than the library, from the fields of a rotation, or None."""
    kind = rope.get("rope_type")
    if kind in ("dynamic", "longrope"):
        return f"{kind} angles, which servers change with the length by other rules"
    if kind != "yarn":
        return None
    # vLLM and SGLang compute YaRN's scale from the factor, and from fields that the library does not know.
    grown = 0.1 * math.log(max(1.0, rope["factor"] or 1.0))
    part, whole = rope.get("mscale"), rope.get("mscale_all_dim")
    scale = (part * grown + 1) / (whole * grown + 1) if part and whole else grown + 1
    scale = scale if rope.get("attention_factor") is None else rope["attention_factor"]
    served = rope.get("attn_factor", 1.0) * (grown + 1)
    if abs(scale - served) <= 1e-6 and rope.get("extrapolation_factor", 1.0) == 1.0:
        return None
    return f"a yarn rotation scaled by {scale:.4g}, which servers scale by {served:.4g}"


def check_format(format: str, expected: Sequence[str]) -> str:
    """Return the name of a format; raise InputError for unknown ones."""
    if format not in expected:
        raise InputError(f"format: expected one of {', '.join(expected)}, found {format!r}")
    return format


def check_output(directory: Path) -> None:
    """Raise InputError unless a directory is new or empty, no file or link, and writable."""
    if os.path.lexists(directory) and (directory.is_symlink() or not directory.is_dir() or any(directory.iterdir())):
        found = "is a link" if directory.is_symlink() else "holds something"
        raise InputError(f"output: expected a new or empty directory, found {directory}, which {found}")
    require_writable(directory)


@contextmanager
def put_in_place(directory: Path) -> Iterator[Path]:
    """Yield a temporary directory, which replaces `directory` if the block succeeds and is removed otherwise."""
    check_output(directory)
    try:
        with atomic_path(directory.absolute()) as aside:
            aside.mkdir()
            yield aside
    except (OSError, SafetensorError) as error:
        cause = (isinstance(error, OSError) and error.strerror) or " ".join(str(error).split())
        raise InputError(f"output: expected to write in {directory}, found: {cause}") from error


def vllm_command(target: str, speculative: dict[str, Any], overrides: dict[str, int] | None = None) -> str:
    """Return the shell command that serves a target in vLLM; `overrides` are added to the target's config."""
    words = ["vllm", "serve", "TARGET" if is_gguf(target) else target]
    if overrides:
        words += ["--hf-overrides", json.dumps(overrides, separators=(",", ":"))]
    return shlex.join([*words, "--speculative-config", json.dumps(speculative, separators=(",", ":"))])


def sglang_command(target: str, draft: str | None, draft_length: int, algorithm: str = "STANDALONE") -> str:
    """Return the shell command that serves a target in SGLang with a draft of `draft_length` tokens a round.

    Without a draft the target's own layers draft.
    """
    flags = {
        "--model-path": "TARGET" if is_gguf(target) else target,
        "--speculative-algorithm": algorithm,
        "--speculative-draft-model-path": draft,
        "--speculative-num-steps": draft_length,
        "--speculative-eagle-topk": 1,
        "--speculative-num-draft-tokens": draft_length + 1,
    }
    words = [str(part) for flag, value in flags.items() if value is not None for part in (flag, value)]
    return "python -m sglang.launch_server " + shlex.join(words)
