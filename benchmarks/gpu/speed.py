"""Rounds at real sizes, eager and compiled."""

from typing import TYPE_CHECKING, Any

from benchmarks.gpu.shapes import random_model
from benchmarks.timing import methods, options_at, prompts, timed_rounds
from draftsmith.decode import DraftModelProposer
from draftsmith.decode.planning.costs import verification_costs
from draftsmith.scripts.kinds import kind_named
from draftsmith.train.kinds.drafter import Drafter
from draftsmith.train.models import set_attention

if TYPE_CHECKING:
    from benchmarks.gpu.cases import Place

SIZES = ("1.7B", "8B")
"""Sizes of the target; the draft has 0.6 B parameters."""
WAYS = ("eager", "compiled")
DRAFT_LENGTH, PROMPT, NEW_TOKENS, REPEATS = 4, 64, 64, 3


def rounds(size: str, way: str, place: "Place") -> dict[str, Any]:
    """Time rounds of plain decoding and of a draft's chains, and what of them passes outside the models' forwards."""
    target, draft = random_model(size, place), random_model("0.6B", place)
    set_attention(target, "sdpa")  # a step before may have left another
    kind = kind_named("draft")
    drafter = Drafter("draft", kind.name, kind, None, DraftModelProposer(draft), draft_lengths=(DRAFT_LENGTH,))
    compiled = way != "eager"
    options = options_at(0.0, NEW_TOKENS if place.full else 24) | {"compiled": compiled}
    ids = prompts(range(2, 2 + PROMPT), 1).to(place.device)
    timed = timed_rounds(methods(target, [drafter], ids, options), REPEATS if place.full else 1)
    context = PROMPT + NEW_TOKENS // 2
    verify = verification_costs(target, 1, context, (1, 1 + DRAFT_LENGTH), repeats=20, compiled=compiled)
    (step,) = verification_costs(draft, 1, context, (1,), repeats=20, compiled=compiled).values()
    forwards = {"plain": verify[1], "draft": verify[1 + DRAFT_LENGTH] + DRAFT_LENGTH * step}
    figures: dict[str, Any] = {}
    for name, seconds in forwards.items():
        figures[name] = {
            "round_ms": timed[name]["round_ms"],
            "forwards_ms": 1e3 * seconds,
            "outside_share": 1 - 1e3 * seconds / timed[name]["round_ms"],
        }
    return figures
