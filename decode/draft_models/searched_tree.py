"""The tree that was searched for a drafter, in its config.json."""

from transformers import PretrainedConfig

from draftsmith.decode.errors import InputError
from draftsmith.decode.tree import Tree


def searched_tree(config: PretrainedConfig, key: str) -> Tree | None:
    """Return the tree whose choices a drafter's config has under `key`; None for chains, an `InputError` if invalid."""
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
