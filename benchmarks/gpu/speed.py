"""Rounds at real sizes, eager and compiled."""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.gpu.shapes import random_model
from draftsmith.decode import DraftModelProposer, autoregressive_generate, speculative_generate
from draftsmith.decode.planning.costs import verification_costs
from draftsmith.train.models import set_attention

if TYPE_CHECKING:
    from benchmarks.gpu.cases import Place

SIZES = ("1.7B", "8B")
"""Sizes of the target; the draft has 0.6 B parameters."""
WAYS = ("eager", "compiled")
DRAFT_LENGTH, PROMPT, NEW_TOKENS, REPEATS = 4, 64, 64, 3
UNCOUNTED = 2
"""Rounds at a text's beginning that are left out: they read the prompt."""


def rounds(size: str, way: str, place: "Place") -> dict[str, Any]:
    """Time rounds of plain decoding and of a draft's chains, and what of them passes outside the models' forwards."""
    target, draft = random_model(size, place), random_model("0.6B", place)
    set_attention(target, "sdpa")  # a step before may have left another
    compiled, new_tokens = way != "eager", NEW_TOKENS if place.full else 24
    options: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": False, "compiled": compiled}
    ids = torch.arange(2, 2 + PROMPT, device=place.device)[None]
    drafting = partial(speculative_generate, target, DraftModelProposer(draft), ids, draft_length=DRAFT_LENGTH)
    methods = {"plain": partial(autoregressive_generate, target, ids, **options), "draft": partial(drafting, **options)}
    timed = timed_rounds(methods, REPEATS if place.full else 1)
    context = PROMPT + NEW_TOKENS // 2
    verify = verification_costs(target, 1, context, (1, 1 + DRAFT_LENGTH), repeats=20, compiled=compiled)
    (step,) = verification_costs(draft, 1, context, (1,), repeats=20, compiled=compiled).values()
    forwards = {"plain": verify[1], "draft": verify[1 + DRAFT_LENGTH] + DRAFT_LENGTH * step}
    figures: dict[str, Any] = {}
    for name, seconds in forwards.items():
        figures[name] = {
            "round_ms": timed[name],
            "forwards_ms": 1e3 * seconds,
            "outside_share": 1 - 1e3 * seconds / timed[name],
        }
    return figures


def timed_rounds(methods: Mapping[str, Callable[..., object]], repeats: int) -> dict[str, float]:
    """Return milliseconds of the median round of methods that decode one row, by name; they take turns.

    Each decodes `repeats` texts, after one to warm up.
    """
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for repeat in range(1 + repeats):
        for name, decode in methods.items():
            ends: list[float] = []
            decode(observer=lambda *_, ends=ends: ends.append(perf_counter()))
            if repeat:
                seconds[name] += [end - begin for begin, end in pairwise(ends)][UNCOUNTED:]
    return {name: 1e3 * median(rounds) for name, rounds in seconds.items()}
