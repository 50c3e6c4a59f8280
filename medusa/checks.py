"""Checks of `draftsmith doctor` for all kinds of heads: whether heads fit the target, and the tree the heads."""

from pathlib import Path

from draftsmith.decode.errors import InputError
from draftsmith.decode.tree import Tree
from draftsmith.train.kinds.findings import Finding
from draftsmith.train.kinds.parts import SEARCH, Part, Side


def unfit(
    name: str, kind: str, target: Side, heads: Part, tree: Tree | None, tokens: int, remedy: str
) -> Finding | None:
    """Return why heads do not fit this target, or the tree the heads; None if all fits.

    Args:
        name: of the finding.
        kind: that errors of such heads begin with.
        target: without weights.
        heads: without weights.
        tree: that they draft.
        tokens: that they can draft.
        remedy: where they are of another target.
    """
    try:
        heads.model.check_fits(target.model)
    except InputError as error:
        return Finding("error", name, str(error).removeprefix(f"{kind}: "), remedy)
    widest = 0 if tree is None else max(map(len, tree.children))
    if widest <= tokens:
        return None
    text = f"tree: expected at most {tokens} siblings, as many as the heads have tokens, found {widest}"
    return Finding("error", name, text, SEARCH)


def shape(tree: Tree) -> str:
    """Return a tree in words."""
    return f"a tree of {len(tree)}, {tree.depth} deep"


def trained_on(target: Side, heads: Part) -> str:
    """Say on which target heads were trained, where that is another by its path."""
    base = heads.model.config.base_model_name_or_path
    return f"; trained on {base}, which should be the same model" if base and Path(base) != Path(target.path) else ""
