"""`draftsmith export`: drafters in the formats of other projects, and the commands that serve them."""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedModel

from draftsmith.decode import Proposer
from draftsmith.decode.errors import InputError
from draftsmith.decode.progress import phase
from draftsmith.scripts.configs import ExportConfig
from draftsmith.scripts.engines.draft_lengths import speculative_fields, with_speculative
from draftsmith.scripts.engines.offline.gguf_files import converted, in_llama_cpp, to_gguf
from draftsmith.scripts.engines.offline.jobs import EngineFailure, engine_python, run_jobs
from draftsmith.scripts.engines.offline.llama_cpp import LlamaCpp
from draftsmith.scripts.engines.offline.verification import Engine, room, verify
from draftsmith.scripts.kinds import drafter_specs, foreign_kind, stored_as
from draftsmith.train.cli import parse_config
from draftsmith.train.data.corpus import encoded_prompts
from draftsmith.train.files import is_gguf, require_writable
from draftsmith.train.gguf import turned_margin
from draftsmith.train.job.kept_step import KeptStep
from draftsmith.train.kinds.export import GGUF, check_format, check_output
from draftsmith.train.kinds.kind import DrafterKind
from draftsmith.train.models import load_config, load_model, load_tokenizer

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 8, 128, 64
"""`--verify` decodes prompts from the standard library: how many, the most tokens of each, and its new tokens."""


def check(config: ExportConfig) -> None:
    """Require, before any work, options that this kind of drafter supports."""
    if config.import_from is None:
        kind, path = drafter_of(config)
        if config.format != GGUF:
            if config.target is not None and is_gguf(config.target):
                expected = f"a directory or hub id with format {config.format}"
                raise InputError(f"target: expected {expected}, found {config.target}: llama.cpp loads it ({GGUF})")
            kind.check_export(config)
            return
        if kind.gguf is None:
            raise InputError(f"format: expected a drafter that llama.cpp loads with {GGUF}, found {kind.title}")
        if Path(str(config.output)).exists():
            raise InputError(f"output: expected a new file, found {config.output}, which is there")
        require_writable(Path(str(config.output)))
        kind.check_export(converted(config, Path(f"{config.output}.files"), kind, path))
        return
    if config.format is not None:
        check_format(config.format, foreign_kind(config.import_from).formats)
    check_output(Path(str(config.output)))


def export(config: ExportConfig, files: Path) -> list[str]:
    """Export or import, and return the lines to print; the last one that is no comment (#) is the launch line.

    `files` is a new directory for files that are converted.
    """
    if config.import_from is not None:
        return foreign_kind(config.import_from).import_from(config, config.import_from)
    kind, path = drafter_of(config)
    by_load = {} if config.draft_lengths is None else speculative_fields(config.draft_lengths, path)
    lines = to_gguf(config, files, kind, path) if config.format == GGUF else kind.export(config, path)
    kept = KeptStep.left_in(Path(path))
    if kept is not None:
        lines = [f"# {path} holds {kept}", *lines]
    if by_load:
        index = max(i for i, line in enumerate(lines) if not line.startswith("#"))
        lines[index] = with_speculative(lines[index], by_load)
    return lines


def drafter_of(config: ExportConfig) -> tuple[DrafterKind, str]:
    """Return the kind and directory of the drafter to export."""
    kind, spec = stored_as(drafter_specs(config.drafter)[0])
    if kind.formats and spec.path is None:
        raise InputError(f"drafter: expected {kind.name}:DIR to export, found {kind.name} alone")
    return kind, str(spec.path)


def verified(config: ExportConfig, engine: Engine, files: Path) -> list[str]:
    """Decode with the export in a real engine; return the comparisons, a line each, or raise EngineFailure."""
    target, code = str(config.target), config.trust_remote_code
    tokenizer = load_tokenizer(target, field="target", trust_remote_code=code)
    prompts = encoded_prompts(None, tokenizer, PROMPTS, PROMPT_TOKENS)
    kind, path = drafter_of(config)
    served, drafter = kind.served(config if config.format != GGUF else converted(config, files, kind, path), path)
    if config.format == GGUF:
        served = in_llama_cpp(config, files, kind, path)

    def load() -> tuple[PreTrainedModel, Proposer]:
        model = load_model(target, field="target", dtype="float32", trust_remote_code=code)
        return model, drafter(model)

    model_config = load_config(target, field="target", trust_remote_code=code)
    positions = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and (needed := room(served, prompts, NEW_TOKENS)) > positions:
        raise InputError(f"verify: expected a target with {needed} positions, for prompts and texts, found {positions}")
    overrides, there = kind.overrides(model_config), target
    if config.format == GGUF:
        there = LlamaCpp.found().target_file(target, files.with_name("target.gguf"), "f32")
    return verify(engine, there, served, prompts, load, NEW_TOKENS, code, overrides)


def engine_of(config: ExportConfig) -> Engine | None:
    """Return the engine that verifies the export, None without one; raise InputError if it is not there."""
    if config.verify is None:
        return None
    if config.verify == "vllm":
        python = engine_python()
        return Engine("vLLM", lambda jobs: run_jobs(python, jobs))
    folder = LlamaCpp.found()
    folder.program("llama-server")
    return Engine("llama.cpp", folder.run_jobs, batch=4, to_the_limit=True, tie=turned_margin(str(config.target)))


def main(argv: Sequence[str] | None = None) -> int:
    """Export as the flags say, and print the lines; return 1 if the verification fails, which keeps the export."""
    config = parse_config(ExportConfig, argv, prog="draftsmith export")
    check(config)
    engine = engine_of(config)
    with tempfile.TemporaryDirectory(prefix="draftsmith-export-") as scratch:
        files = Path(scratch) / "files"
        with phase("export"):
            lines = export(config, files)
        for line in lines:
            print(line, flush=True)
        if engine is not None:
            try:
                for line in verified(config, engine, files):
                    print(f"# {line}")
            except EngineFailure as error:
                print(f"error: {error}", file=sys.stderr)
                return 1
    return 0
