"""Checks of `draftsmith doctor` for Medusa heads: whether their files are whole, and fit the target."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch

from draftsmith.decode.errors import InputError
from draftsmith.medusa.checks import find_mismatch, shape, trained_on
from draftsmith.medusa.heads.formats.importing import foreign_format, import_heads
from draftsmith.medusa.heads.model import MedusaConfig, MedusaHeads
from draftsmith.train.checkpoint import files_of, reading_errors
from draftsmith.train.kinds.drafter import DrafterSpec
from draftsmith.train.kinds.findings import Finding
from draftsmith.train.kinds.parts import STORED, Part, Side, load_part
from draftsmith.train.kinds.quantities import count, count_of


def inspect(spec: DrafterSpec) -> tuple[Part | None, Finding]:
    """Load heads without their weights, and describe them; None if they do not load.

    Files of other tools are read whole, because their configs do not give the heads' shape.
    """
    # vLLM's or FasterDecoding's.
    if (format := foreign_format(files_of(str(spec.path)))) is not None:
        return _inspect_foreign(spec, format)
    remedy = "give what draftsmith.medusa wrote"

    def described(model: MedusaHeads) -> str:
        config = model.config
        return f"{count_of(config.num_heads, 'head')}, {count_of(config.num_hidden_layers, 'block')} each"

    return load_part(spec, _empty, described, remedy)


def _inspect_foreign(spec: DrafterSpec, format: str) -> tuple[Part | None, Finding]:
    role, path = spec.name or spec.kind, str(spec.path)
    try:
        heads = import_heads(str(files_of(path)), format)
    except InputError as error:
        return None, Finding("error", role, str(error), f"give {format}'s heads whole: readers skip what is missing")
    config = heads.config
    text = f"{format}'s files: {count_of(config.num_heads, 'head')}, {count_of(config.num_hidden_layers, 'block')} each"
    text += f", {count(heads.num_parameters())} parameters"
    stored = next(name for name, dtype in STORED.items() if dtype == heads.dtype)
    return Part(role, path, heads, Counter({stored: heads.num_parameters()}), 0), Finding("ok", role, text)


def _foreign_finding(heads: Part) -> Finding:
    """Report what other tools' files leave to their readers: the tree."""
    config = heads.model.config
    tree = "they name no tree, so that each reader takes its own default"
    if config.medusa_choices is not None:
        tree = f"they name a tree of {count_of(len(config.medusa_choices), 'node')}, which vLLM does not read"
    text = f"{tree}; vLLM reads them as they are, and drafts a chain of {config.num_heads}"
    return Finding("ok", "medusa readers", f"{text}; draftsmith export --import_from reads them for the other commands")


def _empty(path: str) -> MedusaHeads:
    directory = Path(path)
    if not (directory / "config.json").is_file() and (directory.exists() or path.count("/") != 1):  # no hub id
        raise InputError(f"medusa: expected a directory of Medusa heads with config.json, found none in {path}")
    with reading_errors("medusa", f"Medusa heads in {path}"):
        config = MedusaConfig.from_pretrained(path)
    with torch.device("meta"):
        return MedusaHeads(config)


def compare(target: Side, heads: Part) -> Iterator[Finding]:
    """Check whether Medusa heads fit the target, the tree fits them, and what other tools' files leave out."""
    yield _fits(target, heads)
    if foreign_format(files_of(heads.path)) is not None:
        yield _foreign_finding(heads)


def _fits(target: Side, heads: Part) -> Finding:
    name, config, model = "heads", heads.model.config, heads.model
    remedy = "take heads of this target, or train them: accelerate launch -m draftsmith.medusa --target TARGET"
    tree = model.tree
    wrong = find_mismatch(name, "medusa", target, heads, tree, config.truncated_vocab_size, remedy)
    if wrong is not None:
        return wrong
    drafted = f"a chain of {len(tree)}" if config.medusa_choices is None else shape(tree)
    text = f"made for this target's hidden size {config.hidden_size} and {config.vocab_size} logits; draft {drafted}"
    text += trained_on(target, heads)
    if tree.depth < config.num_heads:
        return Finding(
            "warning",
            name,
            f"{text}; {config.num_heads - tree.depth} of {config.num_heads} heads are deeper and not used",
            "search a deeper tree (draftsmith tree --drafter DIR), or train fewer heads",
        )
    return Finding("ok", name, text)
