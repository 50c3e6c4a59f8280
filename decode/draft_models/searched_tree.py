"""The tree that was searched for a drafter, as its config.json holds it."""

from transformers import PretrainedConfig

from draftsmith.decode.errors import InputError
from draftsmith.decode.tree import Tree


def searched_tree(config: PretrainedConfig, key: str) -> Tree | None:
    """Return the tree of a drafter's config; None where it has none, and the drafter drafts chains.

    Args:
        config: of the drafter.
        key: of the tree's choices: see `Tree.from_choices`.

    Raises:
        InputError: the config says something else than a tree.
    """
    choices = getattr(config.get_text_config(), key, None)
    if choices is None:
        return None
    try:
        tree = Tree.from_choices(choices)
    except TypeError as error:
        raise InputError(f"{key}: expected lists of ranks, found {choices!r}") from error
    if not len(tree):
        raise InputError(f"{key}: expected at least one node, found none")
    return tree
