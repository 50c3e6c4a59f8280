"""The curve of speed against departure, from decoded prompts, and the choice of a lossy rule's level."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from rich.console import Console
from scipy import stats

from draftsmith.decode import Counts
from draftsmith.decode.measurement.intervals import (
    Estimate,
    format_estimate,
    ratio,
    ratio_difference,
    ratio_interval,
    ratio_product,
)
from draftsmith.decode.rules import Cascade, Rule, Threshold, Typical, as_rule
from draftsmith.scripts.summary import figures_table

RULES = ("typical", "threshold", "cascade")
COUNTED = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_emitted_tokens")
MEASURES = {
    "argmax_disagreement": "tokens that are not the target's argmax",
    "mean_total_variation": "total variation of a token's distribution from the target's",
}


@dataclass(frozen=True)
class RuleSetting:
    """A way of decoding: "plain", the "exact" rule, or a lossy rule at a level, with typical acceptance's δ."""

    rule: str
    level: float | None = None
    delta: float | None = None

    def build(self) -> Rule:
        """Return the rule to decode with."""
        if self.level is None:
            return as_rule(self.rule)
        if self.delta is not None:
            return Typical(self.level, self.delta)
        return Threshold(self.level) if self.rule == "threshold" else Cascade(self.level)


PLAIN, EXACT = RuleSetting("plain"), RuleSetting("exact")


@dataclass(frozen=True)
class DecodedPrompt:
    """A prompt decoded in one setting."""

    counts: Counts
    departure: float
    """Σ over emitted tokens: at T=0, 1 if the token is not the target's argmax; else TV(its q, the target's p)."""
    repeated_ngrams: int
    ngrams: int


@dataclass(frozen=True)
class Batch:
    """Prompts decoded together in one setting."""

    rows: list[DecodedPrompt]
    seconds: float


@dataclass(frozen=True)
class BoundedDeparture(Estimate):
    """The departure a token with an upper bound."""

    upper_bound: float


def figures(
    setting: RuleSetting, batches: Sequence[Batch], plain: Sequence[Batch], exact: Sequence[Batch], greedy: bool,
    confidence: float = 0.95,
) -> dict[str, Any]:  # fmt: skip
    """Return a setting's entry of tune.json: counts, and estimates with intervals over prompts, or batches for speeds.

    The speed-up is over `plain`, decoded in the same turn, and the gain in τ over `exact`. `confidence` is the level of
    the departure's bound.
    """
    lossy, rows = setting.level is not None, rows_of(batches)
    tokens, rounds = _tokens_and_rounds(rows)
    counts, times = sum((row.counts for row in rows), Counts()), _tokens_and_seconds(batches)
    ngrams = sum(row.ngrams for row in rows)
    return {
        "rule": setting.rule,
        "level": setting.level,
        "delta": setting.delta,
        "counts": {name: getattr(counts, name) for name in COUNTED},
        "mean_acceptance_length": ratio(tokens, rounds),
        "gain_over_exact": ratio_difference(tokens, rounds, *_tokens_and_rounds(rows_of(exact))) if lossy else None,
        "speedup": ratio_product(*times, *_tokens_and_seconds(plain)[::-1]),
        "tokens_per_second": ratio(*times),
        "departure": departure_estimate([r.departure for r in rows], tokens, greedy, confidence) if lossy else None,
        "repeated_ngram_share": sum(row.repeated_ngrams for row in rows) / ngrams if ngrams else None,
    }


def rows_of(batches: Sequence[Batch]) -> list[DecodedPrompt]:
    """Return the prompts in order."""
    return [row for batch in batches for row in batch.rows]


def _tokens_and_rounds(rows: Sequence[DecodedPrompt]) -> tuple[list[int], list[int]]:
    return [row.counts.num_emitted_tokens for row in rows], [row.counts.num_drafts for row in rows]


def _tokens_and_seconds(batches: Sequence[Batch]) -> tuple[list[int], list[float]]:
    return [sum(_tokens_and_rounds(batch.rows)[0]) for batch in batches], [batch.seconds for batch in batches]


def departure_estimate(
    departures: Sequence[float], tokens: Sequence[int], greedy: bool, confidence: float = 0.95
) -> BoundedDeparture:
    """Return the departure a token, its interval over prompts, and an upper bound at a level of confidence.

    The bound is the upper end of Student's interval, but at least the bound of Clopper and Pearson (1934) for equally
    many independent tokens: a few prompts without departures say little about their rate. At T=0 (`greedy`) that floor
    counts the disagreements as events; under sampling a departure is a distance, not an event, so it counts none.
    `departures` has each prompt's sum over its `tokens`, of values between 0 and 1.
    """
    estimate = ratio(departures, tokens)
    events, count = sum(departures) if greedy else 0, sum(tokens)
    floor = float(stats.beta.ppf((1 + confidence) / 2, events + 1, count - events)) if events < count else 1.0
    interval = ratio_interval(departures, tokens, confidence)
    bound = 1.0 if interval is None else min(max(floor, interval[1]), 1.0)  # no interval from too few prompts
    return BoundedDeparture(estimate.value, estimate.ci95, estimate.n, upper_bound=bound)


def admitted_levels(levels: Sequence[dict[str, Any]], most: float) -> list[dict[str, Any]]:
    """Return one rule's levels, from the strictest up to the last whose departure's bound is below `most`.

    Levels tested in a fixed order, each only if those before it passed, need no correction for their number (fixed
    sequence testing: Angelopoulos et al. 2021, "Learn then Test", section 2). The rules are such sequences, which share
    the error.
    """
    strictest_first = sorted(levels, key=lambda row: -row["level"])
    return list(takewhile(lambda row: row["departure"].upper_bound < most, strictest_first))


def choose(levels: Sequence[dict[str, Any]], most: float | None) -> tuple[dict[str, Any] | None, str]:
    """Return the fastest admitted level that gains on the exact rule, or None, and the reason in a line.

    The fastest has the greatest τ: rounds cost the same at all levels, and the clock is noisier than counts. A level
    gains if the interval of the paired difference in τ is above zero. `most` is the allowed departure, or None.
    """
    if most is None:
        return None, "no departure was asked for: give max_departure"
    inside = [row for rule in RULES for row in admitted_levels([r for r in levels if r["rule"] == rule], most)]
    if not inside:
        nearest = min(levels, key=lambda row: (row["departure"].upper_bound, row["departure"].value))
        message = f"none: keep exact. No level surely stays below {most:.2%}; the nearest is"
        return None, f"{message} {_name(nearest)}, {_at_most(nearest)}"
    gaining = [row for row in inside if (row["gain_over_exact"].ci95 or [0.0])[0] > 0]
    best = max(gaining or inside, key=lambda row: row["gain_over_exact"].value)
    if not gaining:
        message = f"none: keep exact. No level below {most:.2%} surely gains; the best is"
        return None, f"{message} {_name(best)}, {_gain(best)}"
    return best, f"{_name(best)}: {_gain(best)}, {_at_most(best)}"


def print_tradeoff(report: dict[str, Any], console: Console | None = None) -> None:
    """Print the settings and the choice, within 80 columns."""
    console = console or Console()
    count, gamma, rows = report["prompts"]["count"], report["draft_length"], report["batch_size"]
    table = figures_table(
        ("rule", "level", "τ", "over exact", "speed-up", "departure", "at most", "repeats"),
        "rule",
        f"T={report['temperature']:g}, γ = {gamma}, {count} prompts, {rows} at a time; ±: half of the 95 % interval\n"
        f"departure: {MEASURES[report['departure']]}",
    )
    for row in (report["plain"], report["exact"], *report["levels"]):
        departure, gain, repeats = row["departure"], row["gain_over_exact"], row["repeated_ngram_share"]
        table.add_row(
            row["rule"],
            "" if row["level"] is None else f"{row['level']:.4g}",
            f"{row['mean_acceptance_length'].value:.2f}",
            "" if gain is None else format_estimate(gain, "+.2f"),
            "" if row["rule"] == "plain" else format_estimate(row["speedup"], unit="×"),
            "" if departure is None else f"{departure.value:.2%}",
            "" if departure is None else f"{departure.upper_bound:.2%}",
            "" if repeats is None else f"{repeats:.0%}",
            style="bold" if row == report["chosen"] else "",
        )
    console.print(table)
    console.print(report["reason"], highlight=False, soft_wrap=True)


def _name(row: dict[str, Any]) -> str:
    delta = "" if row["delta"] is None else f" (δ {row['delta']:.3g})"
    return f"{row['rule']} at level {row['level']:.4g}{delta}"


def _gain(row: dict[str, Any]) -> str:
    return f"τ {format_estimate(row['gain_over_exact'], '+.2f', spread='interval')} over exact"


def _at_most(row: dict[str, Any]) -> str:
    return f"departure {row['departure'].value:.2%}, at most {row['departure'].upper_bound:.2%}"
