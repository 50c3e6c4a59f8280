"""Short measurements of what rounds cost, for tests that do not ask how exact these are."""

from functools import partial

import pytest

from benchmarks import study
from draftsmith.decode.measurement import turns
from draftsmith.decode.measurement.costs import measure_costs
from draftsmith.scripts.choose import rounds
from draftsmith.scripts.measure import round_costs


def shorten(patch: pytest.MonkeyPatch) -> None:
    """Measure costs once, of few tokens, whether or not they agree."""
    patch.setattr(turns, "ATTEMPTS", 1)
    patch.setattr(turns, "WRITTEN", 6)
    for module in (rounds, round_costs, study):
        patch.setattr(module, "measure_costs", partial(measure_costs, repeats=1))
