"""Trials of drafters: what they accept of texts that the target wrote, and files of what their rounds cost."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draftsmith.decode import Proposer, Replay
from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement.costs import ValidTable
from draftsmith.decode.measurement.replay import Key, replay_drafters
from draftsmith.decode.sampling import Sampler
from draftsmith.decode.validation import read
from draftsmith.scripts.kinds import drafter_specs
from draftsmith.scripts.pair import load_pair
from draftsmith.train.kinds.drafter import DrafterSpec, Pair
from draftsmith.train.models import load_tokenizer

COST_SCHEMAS = {"measure": "draftsmith.costs/1", "choose": "draftsmith.choose_costs/1"}
"""The schema of a command's file of costs."""


@dataclasses.dataclass(frozen=True)
class CostFile:
    """Costs of rounds that a command measured on a machine."""

    schema: str
    environment: dict[str, Any]
    compiled: bool
    target: str
    tables: list[ValidTable]
    drafters: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)  # `Drafter.to_dict`; from `measure`
    eager: str | None = None  # why `choose` did not compile; None if it did, or the config asked for eager forwards


def read_costs(
    path: Path, command: str, target: str, drafters: Set[str], temperatures: Iterable[float], batch_sizes: Iterable[int]
) -> CostFile:
    """Return the costs that a command wrote; raise InputError if they lack any of these, or are of another target."""
    try:
        file = read(CostFile, path, "costs")
    except FileNotFoundError as error:
        raise InputError(f"costs: expected a file that `{command}` wrote at {path}, found none") from error
    if file.schema != COST_SCHEMAS[command]:
        raise InputError(f"costs: {path}: schema: expected {COST_SCHEMAS[command]!r}, found {file.schema!r}")
    require_same(path, "target", target, file.target)
    largest, most = max((rows for table in file.tables for rows in table.target_seconds), default=0), max(batch_sizes)
    if most > largest:
        raise InputError(f"costs: expected those of batch size {most} in {path}, found up to {largest}: measure again")
    for table in file.tables:
        if missing := sorted(drafters - table.drafters.keys()):
            raise InputError(f"costs: expected those of {missing[0]} in every table of {path}, found none")
    for temperature in temperatures:
        if all(table.temperature != temperature for table in file.tables):
            raise InputError(f"costs: expected those at T={temperature:g} in {path}, found none: measure again")
    return file


def require_same(path: Path, name: str, here: object, there: object) -> None:
    """Raise InputError if the costs in a file are of something else than is here."""
    if here != there:
        raise InputError(f"costs: expected those of {name} {here} in {path}, found those of {there}: measure again")


def named_specs(drafters: Mapping[str, str]) -> list[DrafterSpec]:
    """Return the specs of directories, or of kinds that need none, by name."""
    specs = drafter_specs([path if name == path else f"{name}={path}" for name, path in drafters.items()], [1])
    return [dataclasses.replace(spec, name=name) for name, spec in zip(drafters, specs, strict=True)]


def load_chains(
    target: str, drafters: Mapping[str, str], draft_length: int, dtype: str = "auto", trust_remote_code: bool = False
) -> tuple[Pair, dict[str, tuple[Proposer, int]]]:
    """Load a target and drafters; return them, and each one's proposer of chains with their length, at most γ.

    `drafters` is as for `named_specs`. Trials use chains because trees would need a search of their own.
    """
    tokenizer = load_tokenizer(target, field="target", trust_remote_code=trust_remote_code)
    pair = load_pair(target, tokenizer, named_specs(drafters), dtype, trust_remote_code, decodes=False)
    return pair, {drafter.name: drafter.family.chain(drafter, draft_length) for drafter in pair.drafters}


def replay_completions(
    pair: Pair, proposers: Mapping[Key, Proposer], samples: Sequence[Mapping[str, Any]], draft_lengths: Sequence[int],
    sampler: Sampler, max_new_tokens: int | None = None, with_sizes: bool = False,
) -> dict[Key, Replay]:  # fmt: skip
    """Replay proposers on samples of completions, `with_sizes` of rounds; warn of tokens past their positions."""
    texts = [torch.tensor(sample["input_ids"], device=pair.target.device) for sample in samples]
    lengths = [sample["prompt_length"] for sample in samples]
    pair.warn_undrafted(lengths, list(map(len, texts)))
    whole = [np.zeros(len(text) - n, int) for text, n in zip(texts, lengths, strict=True)] if with_sizes else []
    return replay_drafters(
        pair.target, proposers, texts, lengths, draft_lengths, sampler, max_new_tokens, stretches=whole
    )
