"""Costs in a file: measured once on a machine, and reused there."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftsmith.decode import Proposer
from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement.costs import BLOCKS, CostTable, ValidTable, measure_costs
from draftsmith.decode.validation import read
from draftsmith.scripts.measure.config import MeasureConfig
from draftsmith.scripts.measure.state import Measured, member_name
from draftsmith.train.kinds.drafter import Pair
from draftsmith.train.provenance import environment, write_json

SCHEMA = "draftsmith.costs/1"
SAME = ("device", "dtype", "threads")
"""The fields of the environment that must be equal for costs to be reused."""


@dataclass(frozen=True)
class CostFile:
    """Costs of rounds that were measured on a machine."""

    schema: str
    environment: dict[str, Any]
    compiled: bool
    target: str
    tables: list[ValidTable]
    drafters: dict[str, dict[str, Any]]  # `Drafter.to_dict`


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
    tables = measure_costs(*models, mean, prompt, sorted(blocks), compiled=compiled)
    content = {
        "schema": SCHEMA,
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
    here: dict[str, Any] = environment(pair.target.device, pair.dtype)
    priced = priced_proposers(pair)
    try:
        file = read(CostFile, path, "costs")
    except FileNotFoundError as error:
        raise InputError(f"costs: expected a file that `measure` wrote at {path}, found none") from error
    if file.schema != SCHEMA:
        raise InputError(f"costs: {path}: schema: expected {SCHEMA!r}, found {file.schema!r}")
    same = [("target", config.target, file.target), ("compiled", bool(config.compiled), file.compiled)]
    same += [(name, here[name], file.environment.get(name)) for name in SAME]
    for drafter in pair.drafters:
        of_file = file.drafters.get(drafter.name)
        if of_file is None:
            others = ", ".join(file.drafters) or "none"
            raise InputError(f"costs: expected those of {drafter.name} in {path}, found {others}: measure again")
        own = drafter.to_dict()
        same += [(f"{drafter.name}'s {key}", own[key], of_file.get(key)) for key in own if key != "path"]
    for name, one, other in same:
        if one != other:
            raise InputError(f"costs: expected those of {name} {one} in {path}, found those of {other}: measure again")
    largest = max((rows for table in file.tables for rows in table.target_seconds), default=0)
    if (most := max(config.batch_size)) > largest:
        raise InputError(f"costs: expected those of batch size {most} in {path}, found up to {largest}: measure again")
    for table in file.tables:
        if missing := sorted(priced.keys() - table.drafters.keys()):
            raise InputError(f"costs: expected those of {missing[0]} in every table of {path}, found none")
    for temperature in config.temperature:
        if all(table.temperature != temperature for table in file.tables):
            raise InputError(f"costs: expected those at T={temperature:g} in {path}, found none: measure again")
    return file.tables
