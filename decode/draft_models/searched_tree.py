"""The tree that was searched for a drafter, as its config.json holds it."""

from transformers import PretrainedConfig

from draftsmith.decode.errors import InputError
from draftsmith.decode.tree import Tree


def searched_tree(config: PretrainedConfig, key: str) -> Tree | None:
    """Return the tree whose choices (see `Tree.from_choices`) a drafter's config has under `key`; None for chains.

    Raises:
        InputError: the config has no valid tree there.
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
