"""Checks of `draftsmith doctor` for Medusa heads: whether their files are whole, and whether they fit the target."""

from pathlib import Path

import torch

from draftsmith.decode.errors import InputError
from draftsmith.medusa.checks import shape, trained_on, unfit
from draftsmith.medusa.heads.model import MedusaConfig, MedusaHeads
from draftsmith.train.checkpoint import reading
from draftsmith.train.kinds.drafter import DrafterSpec
from draftsmith.train.kinds.findings import Finding
from draftsmith.train.kinds.parts import Part, Side, load_part
from draftsmith.train.kinds.quantities import counted


def inspect(spec: DrafterSpec) -> tuple[Part | None, Finding]:
    """Load heads without their weights, and say what they are; None where they do not load."""
    remedy = "give what draftsmith.medusa wrote; draftsmith export --import-from DIR reads other formats"

    def described(model: MedusaHeads) -> str:
        config = model.config
        return f"{counted(config.num_heads, 'head')}, {counted(config.num_hidden_layers, 'block')} each"

    return load_part(spec, _empty, described, remedy)


def _empty(path: str) -> MedusaHeads:
    directory = Path(path)
    if not (directory / "config.json").is_file() and (directory.exists() or path.count("/") != 1):  # no hub id
        raise InputError(f"medusa: expected a directory of Medusa heads with config.json, found none in {path}")
    with reading("medusa", f"Medusa heads in {path}"):
        config = MedusaConfig.from_pretrained(path)
    with torch.device("meta"):
        return MedusaHeads(config)


def compare(target: Side, heads: Part) -> Finding:
    """Check whether Medusa heads fit the target, and their tree them."""
    name, config, model = "heads", heads.model.config, heads.model
    remedy = "take heads of this target, or train them: accelerate launch -m draftsmith.medusa --target TARGET"
    tree = model.tree
    wrong = unfit(name, "medusa", target, heads, tree, config.truncated_vocab_size, remedy)
    if wrong is not None:
        return wrong
    drafted = f"a chain of {len(tree)}" if config.medusa_choices is None else shape(tree)
    text = f"made for this target's hidden size {config.hidden_size} and {config.vocab_size} logits; draft {drafted}"
    text += trained_on(target, heads)
    if tree.depth < config.num_heads:
        return Finding(
            "warning",
            name,
            f"{text}; {config.num_heads - tree.depth} of {config.num_heads} heads lie deeper and are not used",
            "search a deeper tree (draftsmith tree --drafter DIR), or train fewer heads",
        )
    return Finding("ok", name, text)
