"""The costs of rounds: which proposers have some, and at which sizes they are measured."""

import torch

from draftsmith.decode import Proposer
from draftsmith.decode.measurement.costs import BLOCKS, CostTable, measure_costs
from draftsmith.scripts.measure.state import Measured, member_name
from draftsmith.train.kinds.drafter import Pair


def priced_proposers(pair: Pair) -> dict[str, Proposer]:
    """Return the proposers whose costs are measured, by their names in a table: drafters and members of drafters."""
    members = {
        member_name(drafter, source): proposer
        for drafter in pair.drafters
        for source, proposer in drafter.members.items()
    }
    return pair.proposers | members


def mean_lengths(measured: Measured) -> tuple[int, int]:
    """Return the tokens of the mean prompt, and of it with half of its text."""
    texts = next(iter(measured.texts.values()))
    prompt = max(1, round(sum(measured.prompt_lengths) / len(texts)))
    return prompt, max(2, round(prompt + sum(map(len, texts)) / len(texts) / 2))


def measured_costs(measured: Measured) -> list[CostTable]:
    """Measure the drafters' round costs at the texts' lengths."""
    config, pair = measured.config, measured.pair
    temperature, (prompt, mean) = next(iter(measured.texts)), mean_lengths(measured)
    samplers = {t: measured.sampler(t) for t in config.temperature}
    longest, drafters, most = max(config.draft_length), pair.drafters, max(config.batch_size)
    # Rows that end leave smaller batches, so the sizes between are measured too.
    sizes = {1, *config.batch_size, *(b for b in (2, 4, 8, 16, 32) if b < most)}
    # All block lengths: replay asks for t(γ + 1) of every γ up to 16, not only of those decoded.
    blocks = {*BLOCKS, 1 + longest}
    lengths = {d.name: longest if d.nodes is None else d.draft_lengths[0] for d in drafters}
    for drafter in drafters:
        deepest = max(drafter.draft_lengths)
        lengths |= {member_name(drafter, source): deepest for source in drafter.members}
        blocks |= {1 + member.nodes(deepest) for member in drafter.members.values()}
        blocks |= set() if drafter.nodes is None else {1 + drafter.nodes}
    text, compiled = torch.cat(measured.sequences(temperature)), bool(config.compiled)
    models = pair.target, priced_proposers(pair), lengths, text, samplers, sorted(sizes)
    return measure_costs(*models, mean, prompt, sorted(blocks), compiled=compiled)
