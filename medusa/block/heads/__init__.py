"""Heads over the states of a block's guesses: `HEADS` lists all, and only its own file knows one."""

from typing import Any

from draftsmith.medusa.block.heads import dspark
from draftsmith.medusa.block.heads.base import BlockHead, SideHead

HEADS: list[type[BlockHead]] = [*dspark.HEADS]
"""In the order of their tensors."""


def side_heads(config: Any) -> dict[str, int]:
    """Return the title and R of each head that adds logits; R is 0 in a drafter without it."""
    return {head.title: head.setting(config) for head in HEADS if issubclass(head, SideHead)}


def side_width(config: Any) -> int:
    """Return R; 0 in a drafter whose logits are the target's head's alone."""
    return max(side_heads(config).values())
