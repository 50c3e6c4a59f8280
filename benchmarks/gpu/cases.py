"""The cases of the first run on a GPU, in order: the most telling come first, because the time may end."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import law, speed, steps
from draftsmith.train.models import default_device


@dataclass(frozen=True)
class Place:
    """The device and the folder of the cases."""

    folder: Path
    """Keeps what one case leaves for the next."""
    device: torch.device = field(default_factory=default_device)

    @property
    def full(self) -> bool:
        """Whether models have their real sizes: on a GPU. On a CPU tiny ones enter the same code."""
        return self.device.type == "cuda"


@dataclass(frozen=True)
class Outcome:
    """The result of a case."""

    passed: bool
    facts: dict[str, Any] = field(default_factory=dict)
    """Facts that hold on any device, such as p-values."""
    figures: dict[str, Any] = field(default_factory=dict)
    """Measurements of the device, such as tokens per second; figures of a CPU are not kept."""


@dataclass(frozen=True)
class Case:
    """One thing that is tried."""

    run: Callable[[Place], Outcome]
    seconds: float
    """The most that it may take, before it is taken to hang."""


def cases() -> dict[str, Case]:
    """Return all cases by name, in the order in which they run on a GPU: stage by stage."""
    return {name: case for stage in stages() for name, case in stage.items()}


def one_of_each_first() -> list[str]:
    """Return the names of all cases: the first of each stage, then the second of each, …; compiled ones last."""
    quick_first = sorted(stages(), key=lambda stage: next(iter(stage)).endswith("compiled"))
    rounds = zip_longest(*quick_first)
    return [name for names in rounds for name in names if name is not None]


def stages() -> list[dict[str, Case]]:
    """Return the cases of each stage by name."""
    by_stage = [
        {"completions": Case(partial(of_law, law.complete), 120)},
        {f"train {name}": Case(partial(of_law, law.train, name), 120) for name in law.TRAINED},
    ]
    for dtype in ("float32", "bfloat16"):
        by_stage.append(
            {f"law {dtype} {name}": Case(partial(of_law, law.certify, name, dtype), 90) for name in law.DRAFTERS}
        )
    by_stage.append({f"step {name}": Case(partial(measured, steps.step, name, None), 120) for name in steps.CONFIGS})
    for size in speed.SIZES:
        for way in speed.WAYS:
            by_stage.append({f"rounds {size} {way}": Case(partial(measured, speed.rounds, size, way), 240)})
    for attention in steps.ATTENTION:
        by_stage.append(
            {
                f"step {name}, {attention}": Case(partial(measured, steps.step, name, attention), 120)
                for name in steps.CONFIGS
            }
        )
    return by_stage


def of_law(check: Callable[..., tuple[bool, dict[str, Any]]], *arguments: Any) -> Outcome:
    """Return the outcome of a check that passes or fails; the place comes last."""
    return Outcome(*check(*arguments))


def measured(measure: Callable[..., dict[str, Any]], *arguments: Any) -> Outcome:
    """Return the outcome of a measurement, which passes unless it raises; the place comes last."""
    return Outcome(True, figures=measure(*arguments))
