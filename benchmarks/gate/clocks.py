"""Speed-ups on a machine that other work slows down: does the interval hold the truth, and is a GO ever false?

A drafter that takes as long as plain decoding is measured on prompts of different acceptance, as `draftsmith measure`
does: in `turns`, by the median ratio to plain decoding, with the τ of all replayed texts. The machine is undisturbed,
has bursts of work that double all times, slows down steadily, is slow for half of a turn, or never keeps its speed.
Shapes: n decoded prompts.
"""

from collections.abc import Callable

import numpy as np
from scipy.signal import lfilter

from benchmarks.common import Figures
from benchmarks.gate import BenchGateConfig
from draftsmith.decode.clock import Compared
from draftsmith.decode.measurement.intervals import Values
from draftsmith.scripts.measure.estimates import Observation

DECODED, REPLAYED, TOKENS, GAMMA = 20, 128, 64, 3
METHODS = 5
"""Plain decoding first, then drafters, all as fast in truth."""
JITTER = 0.015
"""The scale of what each decode takes longer by itself."""
BURSTS = {f"bursts of {long} s, {share:.0%}": (long, share) for long in (3, 30) for share in (0.05, 0.15, 0.3)}
"""The mean seconds of a burst, and the share of the time."""
UNEVEN = {f"uneven, {seconds} s": seconds for seconds in (2, 20)}
"""The seconds over which a machine forgets its speed, whose logarithm has a standard deviation of 0.2."""
STEP = 0.05
"""Seconds between two moments at which the machine's speed may change."""
Clock = Callable[[float, float], float]
"""Returns when a piece of work that begins at a moment ends; both in seconds, the work's on an idle machine."""


def clock(slowdown_T: Values) -> Clock:
    """Return the clock of a machine with these slow-downs, each over a `STEP`; the last one stays."""
    moments_T = STEP * np.arange(len(slowdown_T) + 1)
    done_T = np.append(0.0, np.cumsum(STEP / slowdown_T))
    return lambda begin, work: float(np.interp(np.interp(begin, moments_T, done_T) + work, done_T, moments_T))


def slowdowns(rng: np.random.Generator, name: str, turn: float) -> Values:
    """Return the slow-down of a machine over eight times the seconds of a turn."""
    slow_T = np.ones(int(8 * turn / STEP))
    moments_T = STEP * np.arange(len(slow_T))
    if name == "drift of 20 % a turn":
        return slow_T + 0.2 * moments_T / turn
    if name == "one slow half of a turn":
        return np.where((moments_T > turn / 2) & (moments_T < turn), 2.0, 1.0)
    if name in UNEVEN:  # an autoregressive process of the first order
        kept = np.exp(-STEP / UNEVEN[name])
        news_T = rng.normal(0, 0.2 * np.sqrt(1 - kept**2), len(slow_T))
        slow_T = np.exp(lfilter([1], [1, -kept], news_T, zi=[kept * rng.normal(0, 0.2)])[0])
    if name in BURSTS:
        seconds, share = BURSTS[name]
        end = 0.0
        while end < moments_T[-1]:
            begin = end + rng.exponential(seconds * (1 - share) / share)
            end = begin + rng.exponential(seconds)
            slow_T[int(begin / STEP) : int(end / STEP)] = 2.0
    return slow_T


def observations(rng: np.random.Generator, name: str) -> tuple[Observation, Observation]:
    """Return a drafter's observation and plain decoding's on one such machine."""
    acceptance = rng.beta(5, 3, REPLAYED)
    drafted = np.log(rng.random((REPLAYED, TOKENS))) // np.log(acceptance)[:, None]
    rounds = ((np.minimum(drafted, GAMMA) + 1).cumsum(1) < TOKENS).sum(1) + 1
    again = np.log(rng.random((REPLAYED, TOKENS))) // np.log(acceptance)[:, None]  # the replayed texts are others
    expected = ((np.minimum(again, GAMMA) + 1).cumsum(1) < TOKENS).sum(1) + 1
    plain, own = np.full(DECODED, 0.01 * TOKENS), 0.01 * TAU * rounds[:DECODED]
    ends = clock(slowdowns(rng, name, plain.sum() + (METHODS - 1) * own.sum()))
    compared, now = Compared(range(DECODED), range(METHODS)), rng.uniform(0, 5)
    for turn, due in enumerate(compared.turns(2)):
        for i, methods in due:
            for method in methods:
                end = ends(now, (own if method else plain)[i] * np.exp(abs(rng.normal(0, JITTER))))
                compared.times[i, method][turn] = end - now
                now = end
    prompts, tokens = [[i] for i in range(DECODED)], [TOKENS] * DECODED
    replayed = {i: (float(TOKENS), float(count)) for i, count in enumerate(expected)}
    plain_seconds, seconds = ([compared.seconds(i, method) for i in range(DECODED)] for method in (0, 1))
    own_turns = Observation(tokens, seconds, prompts, rounds=rounds[:DECODED].tolist(), replayed=replayed)
    return own_turns, Observation(tokens, plain_seconds, prompts)


def expected_length() -> float:
    """Return τ of this population, so that a drafter whose rounds take τ tokens' time gains nothing."""
    rng = np.random.default_rng(0)
    acceptance = rng.beta(5, 3, 100_000)
    drafted = np.log(rng.random((len(acceptance), TOKENS))) // np.log(acceptance)[:, None]
    return float(TOKENS / (((np.minimum(drafted, GAMMA) + 1).cumsum(1) < TOKENS).sum(1) + 1).mean())


TAU = expected_length()


def clock_figures(config: BenchGateConfig) -> Figures:
    """Return, by machine, how often the interval holds the truth and says GO, and its width."""
    rng = np.random.default_rng(config.seed)
    rows: Figures = {}
    for name in ("undisturbed", *BURSTS, "drift of 20 % a turn", "one slow half of a turn", *UNEVEN):
        pairs = (observations(rng, name) for _ in range(config.simulations))
        ends = np.array([own.speedup_interval(plain, 0.95) for own, plain in pairs], dtype=np.float64)
        low, high = ends.T
        rows[name] = {
            "holds 1": float(((low <= 1) & (high >= 1)).mean()),
            "false GO": float((low > 1).mean()),
            "width": float(np.median(high - low)),
        }
    return {f"speed-up 1.00, {DECODED} prompts decoded, {REPLAYED} replayed": rows}
