"""Settings of `draftsmith plan`: the config of the run that is planned, and the machines that it is to run on."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from draftsmith.decode.errors import one_of
from draftsmith.distill.config import DistillPlanConfig
from draftsmith.medusa.eagle.config import EaglePlanConfig
from draftsmith.medusa.heads.config import MedusaPlanConfig
from draftsmith.train.data.prepare_config import PrepareConfig
from draftsmith.train.memory.setting import Machines
from draftsmith.train.teacher.cache_config import CacheConfig


@dataclass
class CachePlanConfig(Machines, CacheConfig):
    """Say whether a teacher cache can be computed on some GPUs, how long it takes, and how large it is."""


@dataclass
class PreparePlanConfig(Machines, PrepareConfig):
    """Say whether completions can be written on some GPUs, and how long it takes."""


RECIPES: dict[str, type[Any]] = {
    "distill": DistillPlanConfig,
    "medusa": MedusaPlanConfig,
    "eagle": EaglePlanConfig,
    "cache": CachePlanConfig,
    "prepare": PreparePlanConfig,
}


def plan_config(arguments: Sequence[str]) -> type[Any]:
    """Return the config of the plan that flags ask for: that of `--recipe`, or of distillation.

    Raises:
        InputError: another recipe.
    """
    words = [part for argument in arguments for part in argument.split("=", 1)]
    recipe = next((name for flag, name in pairwise(words) if flag == "--recipe"), "distill")
    one_of(RECIPES).check("recipe", recipe)
    return RECIPES[recipe]
