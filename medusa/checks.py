"""Checks of `draftsmith doctor` for all kinds of heads: whether they fit the target, their tree and their files."""

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from torch import nn

from draftsmith.decode.errors import InputError
from draftsmith.decode.tree import Tree, searched_tree
from draftsmith.medusa.checkpoint_files import read_safetensors, shards
from draftsmith.train.checkpoint import files_of
from draftsmith.train.kinds.findings import Finding
from draftsmith.train.kinds.parts import SEARCH, Part, Side

WIDE, RATES = 1024, (1e-5, 1e-3)
"""Usual learning rates of AdamW from this hidden size on; the embedded target's narrow heads learn at 1e-2."""


def find_mismatch(
    name: str, kind: str, target: Side, heads: Part, tree: Tree | None, tokens: int, remedy: str
) -> Finding | None:
    """Return why heads do not fit the target, or the tree the heads' `tokens`; None if all fits.

    `kind` is the beginning of these heads' errors, `remedy` the way out if they are another target's.
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


def feature_heads(name: str, target: Side, part: Part, tree_key: str, reads: str, remedy: str) -> Finding:
    """Return whether heads on features fit the target, and their config's tree them; `reads` is "they read" or so."""
    model, config = part.model, part.model.config
    try:
        tree = searched_tree(config, tree_key)
    except InputError as error:
        return Finding("error", name, str(error), SEARCH)
    wrong = find_mismatch(name, model.field, target, part, tree, config.draft_vocab_size, remedy)
    if wrong is not None:
        return wrong
    size = getattr(config, model.width)
    text = f"made for this target's hidden size {size} and {config.vocab_size} logits; draft "
    text += "chains" if tree is None else shape(tree)
    if config.draft_vocab_size < config.vocab_size:
        text += f" of {config.draft_vocab_size} tokens"
    text += trained_on(target, part)
    most = config.max_position_embeddings
    if target.positions is None or most >= target.positions:
        return Finding("ok", name, text)
    text += f"; {reads} {most} positions, the target {target.positions}"
    return Finding("warning", name, text, f"keep prompt and text within {most} tokens, past which nothing is drafted")


def shape(tree: Tree) -> str:
    """Return a tree in words."""
    return f"a tree of {len(tree)}, {tree.depth} deep"


def trained_on(target: Side, heads: Part) -> str:
    """Return a clause that names the target that heads were trained on, if its path is another one."""
    base = heads.model.config.base_model_name_or_path
    return f"; trained on {base}, which should be the same model" if base and Path(base) != Path(target.path) else ""


def learning_rate(rate: float, width: int) -> Finding:
    """Compare a learning rate with those that work for heads of this width."""
    name, text = "learning rate", f"{rate:g} for heads {width} wide"
    if width < WIDE:
        return Finding("ok", name, f"{text}: narrow ones take up to 1e-2")
    least, most = RATES
    if least <= rate <= most:
        return Finding("ok", name, text)
    return Finding("warning", name, text, f"heads this wide are trained at {least:g} to {most:g}, most at 5e-5 to 1e-4")


def rotation(name: str, raw: Mapping[str, Any]) -> Finding:
    """Report the angles of rotary positions, and whether config.json (`raw`, of any tool) gives them."""
    layer = raw.get("transformer_layer_config") or raw
    fields = [layer, layer.get("rope_parameters") or {}, layer.get("rope_scaling") or {}]
    theta = next((part["rope_theta"] for part in fields if part.get("rope_theta") is not None), None)
    source = "the library's rope_theta, for its config has none" if theta is None else f"a rope_theta of {theta:g}"
    return Finding("ok", name, f"the halves of a head turn together (neox), by {source}")


def whole_files(name: str, target: Side, heads: Part, read: Callable[..., Any], remedy: str) -> Iterator[Finding]:
    """Read the files as `export --import_from` does: weights, and copies of the target's embedding and head.

    `read` is a function of their directory and the target, `remedy` the way out if it refuses the files.
    """
    directory = files_of(heads.path)
    if not directory.is_dir():
        return
    # The target has no weights yet: read only the two that copies are compared with.
    model: Any = deepcopy(target.model)
    ends = {model.get_input_embeddings(), model.get_output_embeddings()}
    modules = {f"{prefix}.weight": module for prefix, module in model.named_modules() if module in ends}
    try:
        for key, tensor in read_safetensors(shards(files_of(target.path)), modules.__contains__).items():
            modules[key].weight = nn.Parameter(tensor, requires_grad=False)
    except InputError:
        return  # the target's finding names it
    model.tie_weights()
    try:
        read(directory, target=model)
    except InputError as error:
        yield Finding("error", name, str(error).removeprefix(f"{directory}: "), remedy)
    else:
        yield Finding("ok", name, "whole, and as export --import_from takes them")
