"""Drafters as GGUF files, and as llama-server loads them."""

import shlex
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from draftsmith.scripts.configs import ExportConfig
from draftsmith.scripts.engines.draft_lengths import NUM
from draftsmith.scripts.engines.offline.llama_cpp import LlamaCpp, server_words, spec_type
from draftsmith.train.files import is_gguf
from draftsmith.train.kinds.export import GGUF, Served
from draftsmith.train.kinds.kind import DrafterKind
from draftsmith.train.models import load_config, load_tokenizer

TYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
"""The type of GGUF files by dtype."""


def converted(config: ExportConfig, files: Path, kind: DrafterKind, path: str) -> ExportConfig:
    """Return the options of the export whose files llama.cpp's converter reads; they are written to `files`, if any."""
    output = None if kind.unchanged(path) else str(files)
    return replace(config, quantize=None, verify=None, format=kind.gguf, output=output)


def to_gguf(config: ExportConfig, files: Path, kind: DrafterKind, path: str) -> list[str]:
    """Write a GGUF file, and return notes and llama-server's launch line."""
    options, output = converted(config, files, kind, path), Path(str(config.output))
    kind.export(options, path)
    source, quantize = options.output or path, config.quantize or "q8_0"
    LlamaCpp.found().convert(source, output, quantize, _target_files(str(config.target), files))
    (form,) = in_llama_cpp(config, files, kind, path)
    target = str(output) if form.target else str(config.target) if is_gguf(str(config.target)) else "TARGET.gguf"
    line = shlex.join(["llama-server", *server_words(target, form.speculative)])
    return [f"# wrote {output}: {quantize}", line]


def _target_files(target: str, files: Path) -> str:
    """Return the directory with a target's config and tokenizer; those of a GGUF file are written next to `files`."""
    if not is_gguf(target):
        return target
    directory = files.with_name("target")
    load_config(target, field="target").save_pretrained(directory)
    load_tokenizer(target, field="target").save_pretrained(directory)
    return str(directory)


def in_llama_cpp(config: ExportConfig, files: Path, kind: DrafterKind, path: str) -> list[Served]:
    """Return the drafter as llama.cpp loads it: a model by itself, or the target's file with layers that draft."""
    options, output = converted(config, files, kind, path), str(config.output)
    form = kind.served(options, path)[0][0]
    method = "draft-mtp" if form.target else spec_type(options.output or path)
    speculative = {"method": method, "model": output, "num_speculative_tokens": form.draft_length}
    return [Served(f"the GGUF file, {method}", speculative, output if form.target else None)]


def served_at(
    path: str, kind: DrafterKind, target: str, quantize: str, files: Path, draft_lengths: Iterable[int]
) -> dict[int, Served]:
    """Write the GGUF file of a drafter to `files` with that suffix, and return it by γ."""
    options = ExportConfig(drafter=[path], target=target, format=GGUF, output=f"{files}.gguf", quantize=quantize)
    to_gguf(options, files, kind, path)
    (form,) = in_llama_cpp(options, files, kind, path)
    return {k: replace(form, speculative={**form.speculative, NUM: k}) for k in draft_lengths}
