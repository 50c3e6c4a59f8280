"""Costs in a file: measured once on a machine, and reused there."""

from pathlib import Path
from typing import Any

import torch

from draftsmith.decode import Proposer
from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement.costs import BLOCKS, CostTable, measure_costs
from draftsmith.scripts.measure.config import MeasureConfig
from draftsmith.scripts.measure.state import Measured, member_name
from draftsmith.scripts.trials import COST_SCHEMAS, read_costs, require_same
from draftsmith.train.kinds.drafter import Pair
from draftsmith.train.provenance import environment, write_json

SAME = ("device", "dtype", "threads")
"""The fields of the environment that must be equal for costs to be reused."""


def priced_proposers(pair: Pair) -> dict[str, Proposer]:
    """Return the proposers whose costs are measured, by their names in a table: drafters and members of drafters."""
    members = {
        member_name(drafter, source): proposer
        for drafter in pair.drafters
        for source, proposer in drafter.members.items()
    }
    return pair.proposers | members


def measured_costs(measured: Measured) -> list[CostTable]:
    """Measure the drafters' round costs at the texts' lengths, and write them to costs.json."""
    config, pair = measured.config, measured.pair
    temperature, texts = next(iter(measured.texts.items()))
    prompt = max(1, round(sum(measured.prompt_lengths) / len(texts)))
    mean = max(2, round(prompt + sum(map(len, texts)) / len(texts) / 2))
    samplers = {t: measured.sampler(t) for t in config.temperature}
    longest, drafters, most = max(config.draft_lengths), pair.drafters, max(config.batch_size)
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
    text, compiled, tables = torch.cat(measured.sequences(temperature)), bool(config.compiled), list[CostTable]()
    models = pair.target, priced_proposers(pair), lengths, text, samplers, sorted(sizes)
    for context in config.context or [mean]:
        tables += measure_costs(*models, context, prompt, sorted(blocks), compiled=compiled)
    content = {
        "schema": COST_SCHEMAS["measure"],
        "environment": environment(pair.target.device, pair.dtype),
        "compiled": compiled,
        "target": config.target,
        "drafters": {drafter.name: drafter.to_dict() for drafter in drafters},
        "tables": tables,
    }
    write_json(Path(config.output) / "costs.json", content)
    return tables


def load_costs(path: Path, config: MeasureConfig, pair: Pair) -> list[CostTable]:
    """Read costs that were measured here before; drafters of the same size cost the same, so paths are not compared.

    Raise InputError without a file, or for costs of another target, drafter, temperature, dtype or machine, or of
    smaller batches.
    """
    names = priced_proposers(pair).keys()
    file = read_costs(path, "measure", config.target, names, config.temperature, config.batch_size)
    here: dict[str, Any] = environment(pair.target.device, pair.dtype)
    require_same(path, "compiled", bool(config.compiled), file.compiled)
    for name in SAME:
        require_same(path, name, here[name], file.environment.get(name))
    for drafter in pair.drafters:
        of_file = file.drafters.get(drafter.name)
        if of_file is None:
            others = ", ".join(file.drafters) or "none"
            raise InputError(f"costs: expected those of {drafter.name} in {path}, found {others}: measure again")
        for key, value in drafter.to_dict().items():
            if key != "path":
                require_same(path, f"{drafter.name}'s {key}", value, of_file.get(key))
    return file.tables
