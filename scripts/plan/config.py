"""Settings of `draftsmith plan`: the config of the planned run, and its machines."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from draftsmith.decode.errors import one_of
from draftsmith.scripts.kinds import recipes


def plan_config(arguments: Sequence[str]) -> type[Any]:
    """Return the config class of `--recipe`, by default that of distillation."""
    words = [part for argument in arguments for part in argument.split("=", 1)]
    name = next((name for flag, name in pairwise(words) if flag == "--recipe"), "distill")
    choices = {name: recipe for name, recipe in recipes().items() if recipe.plan is not None}
    one_of(choices).check("recipe", name)
    return choices[name].plan_class()
