"""Heads over the states of a block's guesses: `HEADS` lists all, and only its own file knows one."""

from typing import Any

from draftsmith.medusa.block.heads import dflash2, domino, dspark
from draftsmith.medusa.block.heads.base import BlockHead, SideHead

HEADS: list[type[BlockHead]] = [*dspark.HEADS, dflash2.Selector, domino.Domino]
"""In the order of their tensors."""


def side_heads(config: Any) -> dict[str, int]:
    """Return the title and R of each head that adds logits; R is 0 in a drafter without it."""
    return {head.title: head.setting(config) for head in HEADS if issubclass(head, SideHead)}


def side_width(config: Any) -> int:
    """Return R; 0 in a drafter whose logits are the target's head's alone."""
    return max(side_heads(config).values())


def family(config: Any) -> str:
    """Return what a drafter is called: by its head that adds logits, or DFlash if its anchor guesses nothing."""
    for head in HEADS:
        if issubclass(head, SideHead) and head.setting(config):
            return head.family or "block"
    return "DSpark" if config.anchor_guesses else "DFlash"


def foreign_fields(name: str) -> dict[str, Any]:
    """Return other tools' fields of a family's drafters, with their only value or what they mean left out."""
    known = [head for head in HEADS if head.family == name and head.foreign is not None]
    return {field: value for head in known for field, value in {**head.fields, **(head.foreign or {})}.items()}


def foreign_names() -> dict[str, str]:
    """Return other tools' names of heads' tensors by ours, where they differ."""
    return {f"{head.name}.{ours}": name for head in HEADS for ours, name in head.renamed.items()}
