"""Reconciliation: how often a server that does as a report expects is said to depart from it.

The report has one text of each prompt, and the server writes another, which is drafted better or worse by itself: were
texts of a prompt alike, alarms would be fewer. Its counts are known of each answer, or of ten turns.
"""

import numpy as np

from benchmarks.common import Figures
from benchmarks.gate import BenchGateConfig
from draftsmith.decode.measurement.server_counts import ServerCounts, pooled
from draftsmith.scripts.measure.server.compare import FALSE_ALARM, reconcile
from draftsmith.scripts.measure.server.pairing import CountedAnswers, ServedSetting, ServedText
from draftsmith.scripts.report.rounds import SCHEMA, ExpectedText, RoundsSettings
from draftsmith.scripts.report.types import Verifier

PROMPTS, GAMMAS, TOKENS, TURNS = (8, 16, 32), (3, 8), 24, 10
TEMPERATURE = 1.0
SHARE, LESS = 0.7, 0.2
"""How likely a drafted token is accepted; by how much less of a server with a worse draft."""
SPREAD, EACH = 0.15, 0.35
"""Standard deviations of it: over texts, and over the tokens of one."""
WORSE = 4
"""A worse server is simulated in every fourth case."""


def alarm_figures(config: BenchGateConfig) -> Figures:
    """Return how often a server that does as expected is said to depart, and how often one with a worse draft is."""
    alarms: Figures = {}
    for prompts in PROMPTS:
        for gamma in GAMMAS:
            rng, seen = np.random.default_rng(config.seed), np.zeros((2, 2))
            cases = np.array([config.simulations, -(-config.simulations // WORSE)])
            for case in range(config.simulations):
                texts = [_text(rng, place, gamma) for place in range(prompts)]
                for worse in range(1 if case % WORSE else 2):
                    own = [_served(rng, SHARE - LESS * worse, gamma) for _ in texts]
                    for by_prompt in (False, True):
                        seen[int(by_prompt), worse] += _departs(texts, own, gamma, by_prompt)
            for way, name in enumerate(("each turn", "each answer")):
                rates = (seen[way] / cases).tolist()
                row = f"{prompts} prompts, γ = {gamma}, counts of {name}"
                alarms[row] = {"false alarms": rates[0], f"{LESS:g} less accepted is seen": rates[1]}
    return {f"alarms, {FALSE_ALARM:.0%} stated": alarms}


def _acceptance(rng: np.random.Generator, mean: float, tokens: int) -> np.ndarray:
    """Return the probability that each drafted token of one text is accepted, if those before it were, (T,)."""
    return np.clip(rng.normal(rng.normal(mean, SPREAD), EACH, tokens), 0.0, 1.0)


def _text(rng: np.random.Generator, place: int, gamma: int) -> ExpectedText:
    accepted: dict[str, dict[Verifier, list[float] | list[list[float]]]]
    accepted = {"draft": {"probabilistic": _acceptance(rng, SHARE, TOKENS + gamma).tolist()}}
    return ExpectedText(f"p{place}", TEMPERATURE, [place], [0] * (TOKENS + gamma), TOKENS, None, accepted)


def _served(rng: np.random.Generator, mean: float, gamma: int) -> ServerCounts:
    """Return what a server counts of a text of its own: acceptance is drawn."""
    drawn_T = rng.random(TOKENS + 2 * gamma) < _acceptance(rng, mean, TOKENS + 2 * gamma)
    steps, t = [0] * (gamma + 1), 1
    while t < TOKENS:
        rejected = ~drawn_T[t : t + gamma]
        accepted = int(rejected.argmax()) if rejected.any() else gamma
        steps[accepted] += 1
        t += accepted + 1
    return ServerCounts.of_histogram(steps, sum(steps) * gamma)


def _departs(texts: list[ExpectedText], counts: list[ServerCounts], gamma: int, by_prompt: bool) -> bool:
    settings = RoundsSettings(SCHEMA, "target", "float32", TOKENS, gamma, {"draft": {"kind": "draft", "path": ""}}, {})
    asked = ServedSetting("draft", "probabilistic", TEMPERATURE, gamma)
    served = [ServedText(text.prompt, TOKENS, text.prompt_ids, None, ()) for text in texts]
    turns = np.array_split(np.arange(len(texts)), len(texts) if by_prompt else min(TURNS, len(texts)))
    counted = [CountedAnswers(turn.tolist(), pooled([counts[i] for i in turn])) for turn in turns]
    return not reconcile("", settings, texts, asked, served, counted).agrees
