"""The gate on speed: how often it says "go" of what does not pay, what that costs, and what it says of the winner.

Each data set has prompts that differ in length and in how well they are drafted, for all settings alike and for each by
itself; plain decoding is timed once for all of them; and now and then the machine stalls. Tails are the Laplace law's.

Shape suffixes: S settings, n prompts.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import Figures
from benchmarks.gate import BenchGateConfig
from draftsmith.decode.measurement.intervals import Values, confidence_of_each, product_interval
from draftsmith.scripts.measure.winner import Timed, held_out_speedup

BOUND, CONFIDENCE = 1.2, 0.95
OVER = (1.1, 1.2, 1.3)
"""True speed-ups ÷ the bound, of the one setting that pays."""
PLAIN, SHARED, OWN = 0.04, 0.12, 0.12
"""Standard deviations of the logarithm of a prompt's time: plain decoding's, all drafters' alike, each one's own."""
STALLS, STALLED = 0.03, 2.0
"""How often a prompt stalls, and how many times as long it then takes."""


@dataclass(frozen=True)
class Times:
    """Plain and speculative decoding of the same prompts; every setting is `BOUND` times as fast in truth."""

    tokens_n: Values
    plain_n: Values
    seconds_Sn: Values

    @classmethod
    def drawn(cls, rng: np.random.Generator, settings: int, prompts: int) -> "Times":
        """Draw a data set."""

        def noise(deviation: float, *shape: int) -> Values:
            """Return heavy-tailed factors with a mean of 1."""
            scale = deviation / 2**0.5
            return np.exp(rng.laplace(0, scale, shape)) * (1 - scale**2)

        def stalls(*shape: int) -> Values:
            return np.where(rng.random(shape) < STALLS, STALLED, 1.0) / (1 + STALLS * (STALLED - 1))

        tokens_n = np.exp(rng.normal(4, 0.5, prompts)).round()
        plain_n = tokens_n * noise(PLAIN, prompts) * stalls(prompts)
        shared_n = tokens_n * noise(SHARED, prompts) / BOUND
        seconds_Sn = shared_n * noise(OWN, settings, prompts) * stalls(settings, prompts)
        return cls(tokens_n, plain_n, seconds_Sn)

    def columns(self, setting: int) -> tuple[list[float], list[float], list[float], list[float]]:
        """Return tokens and seconds of a setting, then seconds and tokens of plain decoding, prompt by prompt."""
        tokens, plain = self.tokens_n.tolist(), self.plain_n.tolist()
        return tokens, self.seconds_Sn[setting].tolist(), plain, tokens

    def speedups(self) -> Values:
        """Return each setting's own, (S,)."""
        speeds: Values = self.plain_n.sum() / self.seconds_Sn.sum(1)
        return speeds

    def lower_ends(self, confidence: float) -> Values:
        """Return the lower end of each setting's interval, (S,)."""
        found = [product_interval(*self.columns(i), confidence=confidence) for i in range(len(self.seconds_Sn))]
        return np.array([-np.inf if ends is None else ends[0] for ends in found])

    def held_out(self) -> float:
        """Return the winner's speed-up on prompts that did not choose it."""
        prompts = [[i] for i in range(len(self.tokens_n))]
        timed = {i: {0: Timed(prompts, np.array(self.columns(i)))} for i in range(len(self.seconds_Sn))}
        found = held_out_speedup(timed, 0)
        assert found is not None
        return found


def gate_figures(config: BenchGateConfig) -> Figures:
    """Return, by numbers of prompts and settings, how often there is a "go", and the mean of what the winner is said.

    "By each alone" judges every setting as if it were the only one; "at once" is the gate's own rule. Power is the
    share of data sets with a "go" where one setting is faster than the bound and all others are exactly at it.
    """
    rng = np.random.default_rng(config.seed)
    false: Figures = {}
    power: Figures = {}
    winner: Figures = {}
    for n in config.prompts:
        for count in config.settings:
            drawn = [Times.drawn(rng, count, n) for _ in range(config.simulations)]
            alone = np.array([times.lower_ends(CONFIDENCE) for times in drawn])
            level = confidence_of_each(CONFIDENCE, count)
            together = np.array([times.lower_ends(level) for times in drawn])
            row = f"{n} prompts, {count} setting{'s' if count > 1 else ''}"
            false[row] = {"by each alone": _share(alone.max(1) > BOUND), "at once": _share(together.max(1) > BOUND)}
            power[row] = {}
            for over in OVER:
                faster = np.where(np.arange(count) == 0, over, 1.0)
                power[row] |= {
                    f"{over:g}× alone": _share(alone[:, 0] * over > BOUND),
                    f"{over:g}× at once": _share((together * faster).max(1) > BOUND),
                }
            winner[row] = {
                "its own figure": float(np.mean([times.speedups().max() for times in drawn])),
                "by prompts that did not choose it": float(np.mean([times.held_out() for times in drawn])),
            }
    return {
        f"false go where all are at the bound of {BOUND:g}": false,
        "go where one setting is faster than the bound": power,
        f"the winner's speed-up where all are {BOUND:g}": winner,
    }


def _share(cases: NDArray[np.bool_]) -> float:
    return float(cases.mean())
