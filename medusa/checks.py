"""Checks of `draftsmith doctor` for all kinds of heads: whether heads fit the target, and the tree the heads."""

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from torch import nn

from draftsmith.decode.errors import InputError
from draftsmith.decode.tree import Tree
from draftsmith.medusa.checkpoint_files import read_safetensors, shards
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
    """Say by which angles places turn, and whether the config says so.

    Args:
        name: of the finding.
        raw: config.json, of any tool.
    """
    layer = raw.get("transformer_layer_config") or raw
    fields = [layer, layer.get("rope_parameters") or {}, layer.get("rope_scaling") or {}]
    theta = next((each["rope_theta"] for each in fields if each.get("rope_theta") is not None), None)
    said = "the library's rope_theta, for its config has none" if theta is None else f"a rope_theta of {theta:g}"
    return Finding("ok", name, f"the halves of a head turn together (neox), by {said}")


def whole_files(name: str, target: Side, heads: Part, read: Callable[..., Any], remedy: str) -> Iterator[Finding]:
    """Read the files as `export --import_from` does, weights and copies of the target's own included.

    Args:
        name: of the finding.
        target: without weights; its embedding and its head are read from its files.
        heads: without weights.
        read: takes their directory and the target.
        remedy: where they are not taken.
    """
    directory = Path(heads.path)
    if not directory.is_dir():
        return
    model: Any = deepcopy(target.model)
    ends = {model.get_input_embeddings(), model.get_output_embeddings()}
    modules = {f"{prefix}.weight": module for prefix, module in model.named_modules() if module in ends}
    try:
        for key, tensor in read_safetensors(shards(Path(target.path)), modules.__contains__).items():
            modules[key].weight = nn.Parameter(tensor, requires_grad=False)
    except InputError:
        return  # the target's finding says so
    model.tie_weights()
    try:
        read(directory, target=model)
    except InputError as error:
        yield Finding("error", name, str(error).removeprefix(f"{directory}: "), remedy)
    else:
        yield Finding("ok", name, "whole, and as export --import_from takes them")
