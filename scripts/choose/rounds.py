"""Acceptance of candidates, replayed, and what rounds cost: together the speed-up of every way to draft."""

import dataclasses
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field

from draftsmith.decode import HybridProposer, Proposer, Switch
from draftsmith.decode.cache.program import NotCompiled, nothing_compiled
from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement.costs import BLOCKS, CostTable, ValidTable, measure_costs
from draftsmith.decode.measurement.replay import replay_drafters
from draftsmith.decode.planner import text_seconds
from draftsmith.decode.progress import time_text
from draftsmith.decode.validation import Amount, Count, read
from draftsmith.scripts.choose.config import COPIES, ChooseConfig
from draftsmith.scripts.kinds import drafter_specs
from draftsmith.scripts.pair import load_pair
from draftsmith.scripts.settings import load_fastest
from draftsmith.scripts.stages import ending_after
from draftsmith.train.cli import OutOfTime
from draftsmith.train.data.generate import load_completions
from draftsmith.train.kinds.drafter import Drafter, Pair
from draftsmith.train.models import load_tokenizer
from draftsmith.train.provenance import environment, write_json

SCHEMA = "draftsmith.choose_costs/1"
ALONE = "alone"
NEVER = 2**40
"""A shortest match, in tokens, that none has."""
LAST_LENGTHS = (1, 2, 4)
"""Draft lengths of the trained drafter in a hybrid that are tried, beside copies of any γ."""

Size = Annotated[int, Field(ge=1, le=2**31)]


@dataclass(frozen=True, order=True)
class Way:
    """A way to draft with a candidate: alone, or behind copies."""

    draft_length: int
    """γ; of copies, in a hybrid."""
    last: int | None = None
    """In a hybrid the longest draft of the candidate; None: it drafts alone."""

    @property
    def drafters(self) -> str:
        """What was replayed for it."""
        return ALONE if self.last is None else f"last={self.last}"

    def lengths(self) -> list[int]:
        """Return γ of each drafter, in their order."""
        return [self.draft_length] if self.last is None else [self.draft_length, self.last]

    def names(self, candidate: str) -> list[str]:
        """Return the drafters whose costs it has, in their order."""
        return [candidate] if self.last is None else [COPIES[0], candidate]


@dataclass(frozen=True)
class Replayed:
    """The rounds of a candidate on the held-out texts of one temperature."""

    tokens: list[Count]
    """Of each text."""
    sizes: dict[str, dict[Size, list[list[list[Amount]]]]]
    """By `Way.drafters` and γ: of each text its rounds by drafter and number of drafted tokens: `BatchReplay.sizes`."""

    def ways(self) -> list[Way]:
        """Return all ways that were replayed."""
        found = []
        for drafters, by_length in self.sizes.items():
            last = None if drafters == ALONE else int(drafters.partition("=")[2])
            found += [Way(k, last) for k in by_length]
        return sorted(found, key=lambda way: (way.last or 0, way.draft_length))

    def rounds(self, way: Way) -> list[float]:
        """Return how many rounds each text takes."""
        return [float(np.sum(sizes)) for sizes in self._of(way)]

    def seconds(self, way: Way, candidate: str, table: CostTable, rows: int) -> list[float]:
        """Return what each text takes, its prompt left aside."""
        costs = [table.at(name, rows) for name in way.names(candidate)]
        return text_seconds(costs, [np.array(sizes) for sizes in self._of(way)], way.lengths(), rows)

    def plain_seconds(self, candidate: str, table: CostTable, rows: int) -> list[float]:
        """Return what each text takes in plain decoding, its prompt left aside."""
        costs = table.at(candidate, rows)
        return [count * (costs.target[1] + costs.plain_overhead) for count in self.tokens]

    def _of(self, way: Way) -> list[list[list[float]]]:
        return self.sizes[way.drafters][way.draft_length]


def replayed(
    config: ChooseConfig, drafters: Mapping[str, str], heldout: Mapping[float, str]
) -> dict[str, dict[str, Replayed]]:
    """Replay drafters, each alone and behind copies, on what the target wrote.

    Args:
        config: γ and the law.
        drafters: by name directories, or kinds that need none.
        heldout: directories of completions, by temperature.

    Returns:
        By name and temperature (as JSON has it) the rounds.
    """
    pair = _pair(config, {COPIES[0]: COPIES[0]} | dict(drafters))
    copies = next(drafter.proposer for drafter in pair.drafters if drafter.name == COPIES[0])
    wanted = [drafter for drafter in pair.drafters if drafter.name in drafters]
    ways: dict[tuple[str, str], Proposer] = {}
    lengths_of: dict[str, list[int]] = {}
    for drafter in wanted:
        # A tree would need a search of its own: all are judged by chains.
        chain, most = drafter.family.chain(drafter, max(config.draft_length))
        lengths_of[drafter.name] = _lengths(config, drafter, chain, most)
        if drafter.name in COPIES or config.server is not None:  # servers draft in one way
            ways[drafter.name, ALONE] = chain
            continue
        # Drafters that share what was replayed: one that takes no copy is the candidate alone.
        hybrid = HybridProposer([copies, chain])
        ways[drafter.name, ALONE] = hybrid.with_switch(Switch(NEVER))
        for last in (last for last in LAST_LENGTHS if last <= most):
            ways[drafter.name, Way(1, last).drafters] = hybrid.with_switch(Switch(), last)
    tried = sorted({*config.draft_length, *(k for lengths in lengths_of.values() for k in lengths)})
    found: dict[str, dict[str, Replayed]] = {drafter.name: {} for drafter in wanted}
    for temperature in config.temperature:
        own = list(load_completions(heldout[temperature]).sort("id"))
        texts = [torch.tensor(sample["input_ids"], device=pair.target.device) for sample in own]
        lengths = [sample["prompt_length"] for sample in own]
        sampler = config.at(temperature).sampler()
        pair.say_undrafted(lengths, list(map(len, texts)))
        replays = replay_drafters(
            pair.target, ways, texts, lengths, tried, sampler, config.max_new_tokens, with_sizes=ways
        )
        tokens = [len(text) - length for text, length in zip(texts, lengths, strict=True)]
        for (name, drafters_of), replay in replays.items():
            its = found[name].setdefault(f"{temperature:g}", Replayed(tokens, {}))
            first = 1 if drafters_of == ALONE and isinstance(ways[name, drafters_of], HybridProposer) else 0
            its.sizes[drafters_of] = {
                k: [text.sizes[k][first:].tolist() for text in replay.texts]
                for k in (lengths_of[name] if drafters_of == ALONE else config.draft_length)
            }
    return found


def _lengths(config: ChooseConfig, drafter: Drafter, chain: Proposer, most: int) -> list[int]:
    """Return γ at which a drafter is tried alone."""
    if config.server is not None and drafter.family.whole_blocks and chain.longest is not None:
        return [chain.longest]
    return [k for k in config.draft_length if k <= most] or [most]


@dataclass(frozen=True)
class CostFile:
    """What `measured_costs` wrote."""

    schema: Literal["draftsmith.choose_costs/1"]
    target: str
    environment: dict[str, Any]
    compiled: bool
    tables: list[ValidTable]
    eager: str | None = None
    """Why forwards were eager; None where they were compiled, or the config says it."""


def measured_costs(
    config: ChooseConfig,
    drafters: Mapping[str, str],
    heldout: Mapping[float, str],
    path: Path,
    compiling: float | None,
    seconds: float,
    most: float,
) -> dict[str, CostTable]:
    """Measure what rounds of all drafters cost here, side by side, unless it is in the file, or in another's.

    Args:
        config: γ, temperatures and batch sizes.
        drafters: as of `replayed`.
        heldout: as of `replayed`.
        path: the file.
        compiling: None where forwards may be compiled; otherwise the seconds that it would take, and costs are of
            programs that are on disk, or eager.
        seconds: about what timing may take, once everything is compiled.
        most: seconds that all of it may take; after half of them they are measured eager, unless the config says
            which.

    Returns:
        By temperature (as JSON has it) a table.

    Raises:
        InputError: a file without some drafter, temperature or batch size.
        OutOfTime: it took too long.
    """
    given = None if config.costs is None else Path(config.costs)
    if given is None and not path.is_file():
        begin, costs, first = time.perf_counter(), dict[str, Any](), most / 2 if config.compiled is None else most
        why = [] if compiling is None else [f"compiling takes about {time_text(compiling)}, for which there is no time"]
        try:
            with ending_after(first), nullcontext() if compiling is None else nothing_compiled():
                costs = _measured(config, drafters, heldout, config.compiled, seconds)
            why.append(costs["eager"])
        except NotCompiled:
            if config.compiled is not None:
                raise
        except OutOfTime:
            if config.compiled is not None:
                raise
            why = [f"compiled ones were not measured within {time_text(first)}, half of the time that was left"]
        if not costs:  # not in the `except`: what was raised holds the models of the first attempt
            with ending_after(most - (time.perf_counter() - begin)):
                costs = _measured(config, drafters, heldout, False, seconds)
        eager = config.compiled is None and not costs["compiled"]
        write_json(path, costs | {"eager": "; ".join(why) if eager else None})
    try:
        file = read(CostFile, given or path, "costs")
    except FileNotFoundError as error:
        raise InputError(f"costs: expected a file that `choose` wrote at {given}, found none") from error
    if file.target != config.target:
        raise InputError(f"costs: expected those of {config.target} in {given or path}, found {file.target}'s")
    tables = {f"{table.temperature:g}": table for table in file.tables}
    for temperature in config.temperature:
        table = tables.get(f"{temperature:g}")
        if table is None:
            raise InputError(f"costs: expected those at T={temperature:g} in {given or path}, found none")
        longest = max(k for seconds in table.target_seconds.values() for k in seconds)
        for kind, wanted, there in (
            ("γ", config.draft_length, range(longest)),
            ("drafter", drafters, table.drafters),
            ("batch size", config.batch_size, range(1, 1 + max(table.target_seconds))),
        ):
            if missing := [each for each in wanted if each not in there]:
                raise InputError(f"costs: expected those of {kind} {missing[0]} in {given or path}, found none")
    return tables


def _measured(
    config: ChooseConfig,
    drafters: Mapping[str, str],
    heldout: Mapping[float, str],
    compiled: bool | None,
    seconds: float,
) -> dict[str, Any]:
    samples = [sample for path in heldout.values() for sample in load_completions(path).sort("id")]
    tokenizer = load_tokenizer(config.target, field="target", trust_remote_code=config.trust_remote_code)
    threads = torch.get_num_threads()
    try:
        pair, settings = load_fastest(
            config.target, tokenizer, _specs(drafters), config.dtype, config.threads, compiled,
            config.trust_remote_code,
        )  # fmt: skip
        chains = {each.name: each.family.chain(each, max(config.draft_length)) for each in pair.drafters}
        prompt = max(1, round(float(np.mean([sample["prompt_length"] for sample in samples]))))
        # Not the longest: the rest of a round grows with it, and what is chosen is mostly short.
        middle = config.draft_length[len(config.draft_length) // 2]
        whole = float(np.mean([len(sample["input_ids"]) for sample in samples]))
        longest = 1 + max(k for each in pair.drafters for k in _lengths(config, each, *chains[each.name]))
        tables = measure_costs(
            pair.target,
            {name: chain for name, (chain, _) in chains.items()},
            {name: min(most, middle) for name, (_, most) in chains.items()},
            torch.tensor([token for sample in samples for token in sample["input_ids"]]),
            {temperature: config.at(temperature).sampler() for temperature in config.temperature},
            config.batch_size,
            max(2, round((prompt + whole) / 2)),
            prompt,
            # None of what no way to draft needs: each is compiled, for a minute where the target is large.
            sorted({*(block for block in BLOCKS if block < longest), longest}),
            compiled=settings.compiled,
            seconds=seconds,
        )
    finally:
        torch.set_num_threads(threads)
    return {
        "schema": SCHEMA,
        "target": config.target,
        "environment": environment(pair.target.device, pair.dtype) | {"threads": settings.threads},
        "compiled": settings.compiled,
        "eager": f"a short timing chose them: {settings.why}" if settings.why else "nothing was timed to choose",
        "tables": tables,
    }


def _specs(drafters: Mapping[str, str]) -> list[Any]:
    given = [name if name == drafter else f"{name}={drafter}" for name, drafter in drafters.items()]
    return [
        dataclasses.replace(spec, name=name) for name, spec in zip(drafters, drafter_specs(given, [1]), strict=True)
    ]


def _pair(config: ChooseConfig, drafters: Mapping[str, str]) -> Pair:
    tokenizer = load_tokenizer(config.target, field="target", trust_remote_code=config.trust_remote_code)
    code = config.trust_remote_code
    return load_pair(config.target, tokenizer, _specs(drafters), trust_remote_code=code, decodes=False)
