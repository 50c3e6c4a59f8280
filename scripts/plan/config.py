"""Settings of `draftsmith plan`: the config of the planned run, and its machines."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from draftsmith.decode.errors import one_of
from draftsmith.scripts.kinds import recipes
from draftsmith.train.data.prepare_config import PrepareConfig
from draftsmith.train.memory.setting import Machines
from draftsmith.train.teacher.cache_config import CacheConfig

INFERENCE = "draftsmith.scripts.plan.inference:InferencePlan"


@dataclass
class CachePlanConfig(Machines, CacheConfig):
    """Check whether a teacher cache can be computed on some GPUs, how long it takes, and how large it is."""

    plan_class = INFERENCE


@dataclass
class PreparePlanConfig(Machines, PrepareConfig):
    """Check whether completions can be written on some GPUs, and how long it takes."""

    plan_class = INFERENCE


def plan_config(arguments: Sequence[str]) -> type[Any]:
    """Return the config class of `--recipe`, by default that of distillation."""
    words = [part for argument in arguments for part in argument.split("=", 1)]
    name = next((name for flag, name in pairwise(words) if flag == "--recipe"), "distill")
    choices: dict[str, Callable[[], type[Any]]] = {
        **{name: recipe.plan_class for name, recipe in recipes().items() if recipe.plan is not None},
        "cache": lambda: CachePlanConfig,
        "prepare": lambda: PreparePlanConfig,
    }
    one_of(choices).check("recipe", name)
    return choices[name]()
