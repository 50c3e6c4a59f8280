"""Checks of `draftsmith doctor` for all kinds of heads: whether heads fit the target, and the tree the heads."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftsmith.decode.errors import InputError
from draftsmith.decode.tree import Tree
from draftsmith.train.kinds.findings import Finding
from draftsmith.train.kinds.parts import SEARCH, Part, Side

WIDE, RATES = 1024, (1e-5, 1e-3)
"""From this hidden size on, learning rates of AdamW that are usual; the embedded target's heads learn at 1e-2."""


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


def learning_rate(rate: float, width: int) -> Finding:
    """Compare the rate with those that work for heads of this width."""
    name, text = "learning rate", f"{rate:g} for heads {width} wide"
    if width < WIDE:
        return Finding("ok", name, f"{text}: narrow ones take up to 1e-2")
    least, most = RATES
    if least <= rate <= most:
        return Finding("ok", name, text)
    return Finding("warning", name, text, f"heads this wide are trained at {least:g} to {most:g}, most at 5e-5 to 1e-4")


def rotation(name: str, raw: Mapping[str, Any]) -> Finding:
    """Say by which angles places turn, where two fields of a config may say it.

    Args:
        name: of the finding.
        raw: config.json, of any tool.
    """
    layer = raw.get("transformer_layer_config") or raw
    old, new = layer.get("rope_theta"), (layer.get("rope_parameters") or {}).get("rope_theta")
    if old is not None and new is not None and old != new:
        text = f"rope_theta is {old:g}, which transformers 4 reads, and in rope_parameters, which 5 reads, {new:g}"
        return Finding("error", name, text, "let both be what it was trained with")
    theta = old if new is None else new
    said = "the library's rope_theta, for its config has none" if theta is None else f"a rope_theta of {theta:g}"
    return Finding("ok", name, f"the halves of a head turn together (neox), by {said}")


def check_map(heads: Any) -> None:
    """Require that `d2t` names different tokens, and say so where it holds their ids.

    Raises:
        InputError: it does not.
    """
    try:
        heads.check_tokens("d2t")
    except InputError as error:
        d2t, vocab_size = heads.d2t, heads.config.vocab_size
        ids = int(d2t.min()) >= 0 and int(d2t.max()) < vocab_size and len(d2t.unique()) == len(d2t)
        said = ": ids, it seems, where servers look for each one's distance to its place" if ids else ""
        raise InputError(f"{error}{said}") from error
