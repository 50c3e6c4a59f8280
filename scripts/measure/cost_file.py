"""Costs in a file: measured once on a machine, and used again there."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement.costs import BLOCKS, CostTable, measure_costs
from draftsmith.decode.sampling import Sampler
from draftsmith.scripts.pair import Drafter
from draftsmith.train.provenance import environment, write_json

SCHEMA = "draftsmith.costs/1"
SAME = ("device", "dtype", "threads")
"""What must be as it was for costs to be used again."""


def measured_costs(
    path: Path,
    target: PreTrainedModel,
    target_path: str,
    dtype: str,
    drafters: Sequence[Drafter],
    longest: int,
    texts: Sequence[Tensor],
    samplers: Mapping[float, Sampler],
    batch_sizes: Sequence[int],
    contexts: Sequence[int],
    prompt: int,
) -> list[CostTable]:
    """Measure what rounds of these drafters cost, and keep it in a file.

    Args:
        path: the file.
        target: the model.
        target_path: where it came from.
        dtype: of the weights.
        drafters: what drafts.
        longest: γ of the longest draft that is measured, of draft models and prompt lookup.
        texts: prompts and texts, (T,) each, which the drafting is measured behind.
        samplers: by temperature.
        batch_sizes: B; 2 and 4 are measured with a greater one, for rows that end leave smaller batches.
        contexts: tokens in the cache.
        prompt: tokens of a prompt.
    """
    sizes = sorted({1, *batch_sizes, *(b for b in (2, 4, 8, 16, 32) if b < max(batch_sizes))})
    # All of them, however long the drafts that are decoded: replay asks for t(γ + 1) of every γ up to 16.
    blocks = sorted({*BLOCKS, 1 + longest} | {1 + d.nodes for d in drafters if d.nodes is not None})
    tables = []
    for context in contexts:
        tables += measure_costs(
            target,
            {drafter.name: drafter.proposer for drafter in drafters},
            {d.name: longest if d.nodes is None else d.draft_lengths[0] for d in drafters},
            torch.cat(list(texts)),
            samplers,
            sizes,
            context,
            prompt,
            blocks,
        )
    write_json(
        path,
        {
            "schema": SCHEMA,
            "environment": environment(target.device, dtype),
            "target": target_path,
            "drafters": {drafter.name: drafter.to_dict() for drafter in drafters},
            "tables": tables,
        },
    )
    return tables


def load_costs(
    path: Path,
    target: PreTrainedModel,
    target_path: str,
    dtype: str,
    drafters: Sequence[Drafter],
    temperatures: Sequence[float],
    batch_sizes: Sequence[int],
) -> list[CostTable]:
    """Read costs that were measured here before.

    Raises:
        InputError: no such file, or costs of another target, drafter, temperature, device, dtype or number of threads,
            or of smaller batches alone. Drafters of one size cost the same, wherever they lie.
    """
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"costs: expected a file that `measure` wrote at {path}, found: {error}") from error
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise InputError(f"costs: expected schema {SCHEMA} in {path}, found another")
    here: dict[str, Any] = environment(target.device, dtype)
    pairs = [("target", target_path, content.get("target"))]
    pairs += [(name, here[name], content.get("environment", {}).get(name)) for name in SAME]
    measured = content.get("drafters", {})
    for drafter in drafters:
        of_file = measured.get(drafter.name)
        if of_file is None:
            others = ", ".join(measured) or "none"
            raise InputError(f"costs: expected those of {drafter.name} in {path}, found {others}: measure again")
        pairs += [
            (f"{drafter.name}'s {key}", v, of_file.get(key)) for key, v in drafter.to_dict().items() if key != "path"
        ]
    for name, wanted, actual in pairs:
        if wanted != actual:
            raise InputError(
                f"costs: expected those of {name} {wanted} in {path}, found those of {actual}: measure again"
            )
    tables = [CostTable.from_dict(table) for table in content.get("tables", [])]
    largest = max((rows for table in tables for rows in table.target_seconds), default=0)
    if max(batch_sizes) > largest:
        raise InputError(
            f"costs: expected those of batch size {max(batch_sizes)} in {path}, found up to {largest}: measure again"
        )
    for temperature in temperatures:
        if all(table.temperature != temperature for table in tables):
            raise InputError(f"costs: expected those at T={temperature:g} in {path}, found none: measure again")
    return tables


def table_for(tables: Sequence[CostTable], temperature: float, context: float) -> CostTable:
    """Return the table of a temperature whose context is the nearest."""
    return min((t for t in tables if t.temperature == temperature), key=lambda table: abs(table.context - context))
