"""`draftsmith export`: drafters in the formats of other projects, and the commands that serve them."""

import sys
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedModel

from draftsmith.decode import Proposer
from draftsmith.decode.errors import InputError
from draftsmith.decode.progress import phase
from draftsmith.scripts.configs import ExportConfig
from draftsmith.scripts.engines.draft_lengths import speculative_fields, with_speculative
from draftsmith.scripts.engines.offline.jobs import EngineFailure, engine_python
from draftsmith.scripts.engines.offline.verification import room, verify
from draftsmith.scripts.kinds import drafter_specs, foreign_kind, stored_as
from draftsmith.train.cli import parse_config
from draftsmith.train.data.corpus import encoded_prompts
from draftsmith.train.job.kept_step import KeptStep
from draftsmith.train.kinds.export import check_format, check_output
from draftsmith.train.kinds.kind import DrafterKind
from draftsmith.train.models import load_config, load_model, load_tokenizer

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 8, 128, 64
"""`--verify` decodes prompts from the standard library: how many, the most tokens of each, and its new tokens."""


def check(config: ExportConfig) -> None:
    """Require, before any work, options that this kind of drafter supports."""
    if config.import_from is None:
        kind, _ = drafter_of(config)
        kind.check_export(config)
        return
    if config.format is not None:
        check_format(config.format, foreign_kind(config.import_from).formats)
    check_output(Path(str(config.output)))


def export(config: ExportConfig) -> list[str]:
    """Export or import, and return the lines to print; the last one that is no comment (#) is the launch line."""
    if config.import_from is not None:
        return foreign_kind(config.import_from).import_from(config, config.import_from)
    kind, path = drafter_of(config)
    by_load = {} if config.draft_lengths is None else speculative_fields(config.draft_lengths, path)
    lines, kept = kind.export(config, path), KeptStep.left_in(Path(path))
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


def verified(config: ExportConfig, python: Path) -> list[str]:
    """Decode with the export in a real engine; return the comparisons, a line each, or raise EngineFailure."""
    target, code = str(config.target), config.trust_remote_code
    tokenizer = load_tokenizer(target, field="target", trust_remote_code=code)
    prompts = encoded_prompts(None, tokenizer, PROMPTS, PROMPT_TOKENS)
    kind, path = drafter_of(config)
    served, drafter = kind.served(config, path)

    def load() -> tuple[PreTrainedModel, Proposer]:
        model = load_model(target, field="target", dtype="float32", trust_remote_code=code)
        return model, drafter(model)

    model_config = load_config(target, field="target", trust_remote_code=code)
    positions = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and (needed := room(served, prompts, NEW_TOKENS)) > positions:
        raise InputError(f"verify: expected a target with {needed} positions, for prompts and texts, found {positions}")
    overrides = kind.overrides(model_config)
    return verify(python, target, served, prompts, load, NEW_TOKENS, code, overrides)


def main(argv: Sequence[str] | None = None) -> int:
    """Export as the flags say, and print the lines; return 1 if the verification fails, which keeps the export."""
    config = parse_config(ExportConfig, argv, prog="draftsmith export")
    check(config)
    python = None if config.verify is None else engine_python()
    with phase("export"):
        lines = export(config)
    for line in lines:
        print(line, flush=True)
    if python is not None:
        try:
            for line in verified(config, python):
                print(f"# {line}")
        except EngineFailure as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    return 0
