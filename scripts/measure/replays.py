"""Replay of all drafters on the target's texts, and groups of these and of their tokens."""

from collections.abc import Sequence

import numpy as np

from draftsmith.decode import Proposer, Replay
from draftsmith.decode.measurement.replay import replay_drafters
from draftsmith.decode.proposers.draft_tree import TreeProposer
from draftsmith.decode.sampling import Sampler
from draftsmith.scripts.measure.config import LLAMA_CPP
from draftsmith.scripts.measure.state import GREEDY, PROBABILISTIC, Measured
from draftsmith.scripts.report.entries import Grouping
from draftsmith.scripts.report.types import Verifier
from draftsmith.train.kinds.drafter import Pair

SHORTEST = 1024
"""Contexts of fewer tokens are one group; each further group ends at twice the length."""


def replay_all(
    measured: Measured, temperature: float, draft_lengths: Sequence[int]
) -> dict[tuple[str, Verifier], Replay]:
    """Replay the drafters on the target's texts; under sampling draft models with both verifiers."""
    pair, sampler = measured.pair, measured.sampler(temperature)
    proposers = replayed_proposers(pair, sampler)
    texts = measured.sequences(temperature), measured.prompt_lengths
    most = measured.config.max_new_tokens
    stretches = [
        doublings(len(ids), len(text))
        for ids, text in zip(measured.prompt_ids, measured.texts[temperature], strict=True)
    ]
    served = measured.config.costs == LLAMA_CPP  # in its own arithmetic
    return replay_drafters(pair.target, proposers, *texts, draft_lengths, sampler, most, served, stretches=stretches)


def replayed_proposers(pair: Pair, sampler: Sampler) -> dict[tuple[str, Verifier], Proposer]:
    """Return the proposers that can be replayed by drafter and verifier: sampled draft models with both."""
    proposers: dict[tuple[str, Verifier], Proposer] = {}
    for drafter in pair.drafters:
        may_refuse = isinstance(drafter.proposer, TreeProposer) or drafter.sources
        if may_refuse and drafter.proposer.replay_refusal(sampler.do_sample):
            continue
        proposers[drafter.name, PROBABILISTIC] = drafter.proposer
        if drafter.greedy is not None and sampler.do_sample:
            proposers[drafter.name, GREEDY] = drafter.greedy
    return proposers


def doublings(prompt_length: int, tokens: int) -> np.ndarray:
    """Return for each token of a text how often `SHORTEST` doubles until its context is shorter than that, (N,)."""
    context_N = prompt_length + np.arange(tokens)
    return np.ceil(np.log2(np.maximum(context_N + 1, SHORTEST) / SHORTEST)).astype(int)


def groups_of(measured: Measured, replay: Replay) -> dict[Grouping, dict[str, Replay]]:
    """Return the replays of the texts of each category, and of the tokens after contexts of each length, if several."""
    categories = {name: Replay([replay.texts[i] for i in indices]) for name, indices in measured.categories().items()}
    stretches = [text.stretches for text in replay.texts if text.stretches is not None]
    numbers = sorted({int(label) for of_text in stretches for label in of_text.labels})
    contexts = {str(SHORTEST << number): replay.within([number]) for number in numbers} if len(numbers) > 1 else {}
    return {"category": categories, "context": contexts}
