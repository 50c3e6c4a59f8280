"""The costs of rounds, in this decoder and in llama.cpp, and what drafters bring there."""

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from draftsmith.decode import Proposer
from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement.costs import BLOCKS, CostTable, measure_costs
from draftsmith.decode.measurement.intervals import confidence_of_each, ratio, ratio_interval, ratios
from draftsmith.scripts.engines.offline.gguf_files import TYPES, served_at
from draftsmith.scripts.engines.offline.jobs import Job
from draftsmith.scripts.engines.offline.llama_costs import LlamaCosts
from draftsmith.scripts.engines.offline.llama_cpp import LlamaCpp, cuts_of, decoded
from draftsmith.scripts.kinds import kind_named
from draftsmith.scripts.measure.config import MeasureConfig
from draftsmith.scripts.measure.predictions import priced
from draftsmith.scripts.measure.state import GREEDY, PROBABILISTIC, Measured, member_name
from draftsmith.scripts.report.entries import Forecast
from draftsmith.train.kinds.drafter import DrafterSpec, Pair
from draftsmith.train.kinds.export import Served
from draftsmith.train.kinds.hybrid import Hybrid
from draftsmith.train.kinds.kind import DrafterKind


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


@contextmanager
def served_target(measured: Measured) -> Iterator[str]:
    """Yield the target's GGUF file, converted in the dtype of the measurement; raise InputError for trees."""
    if trees := [drafter.name for drafter in measured.pair.drafters if drafter.has_one_length]:
        raise InputError(f"costs: expected chains, which llama.cpp drafts, found a tree of {trees[0]}")
    with tempfile.TemporaryDirectory(prefix="draftsmith-target-") as scratch:
        path, dtype = Path(scratch) / "target.gguf", measured.pair.dtype
        yield LlamaCpp.found().target_file(measured.config.target, path, TYPES[dtype])


def written(
    measured: Measured, target: str, temperature: float, prompts: Sequence[list[int]], seed: int
) -> list[list[int]]:
    """Return what llama-server writes after prompts, one at a time; raise EngineFailure if it fails."""
    config, new = measured.config, measured.config.max_new_tokens
    job = Job(target, prompts, None, new, max(map(len, prompts)) + new, temperature, seed % 2**31, max_num_seqs=1)
    with LlamaCpp.found().serve(job, config.threads or os.cpu_count()) as client:
        return decoded(client, job, **cuts_of(config)).token_ids


def forecasts(measured: Measured, target: str) -> list[Forecast]:
    """Return the forecasts at every γ, temperature and number of slots; raise EngineFailure if a server fails."""
    config, drafters = measured.config, measured.pair.drafters
    count = sum(len(drafter.draft_lengths) for drafter in drafters)
    level = confidence_of_each(config.confidence, count * len(config.temperature) * len(config.batch_size))
    return [forecast for table in _tables(measured, target) for forecast in _of_table(measured, table, level)]


def check(config: MeasureConfig) -> None:
    """Raise InputError unless a llama-server is there, loads these drafters, and samples so."""
    cuts_of(config)
    LlamaCpp.found().program("llama-server")
    for kind, path in (part[1:] for spec in config.specs for part in _parts(spec)):
        if not str(path).startswith("simple-") if kind.copies else path is None or kind.gguf is None:
            raise InputError(f"costs: expected drafters of llama.cpp's, as prompt_lookup:simple-N, found {kind.title}")


def _parts(spec: DrafterSpec) -> list[tuple[int, DrafterKind, str | None]]:
    """Return number, kind and path of a drafter, or of each that takes turns."""
    kind = kind_named(spec.kind)
    members = kind.members(spec) if isinstance(kind, Hybrid) else [(kind, spec)]
    return [(index, kind, member.path) for index, (kind, member) in enumerate(members)]


def _of_table(measured: Measured, table: CostTable, level: float) -> Iterator[Forecast]:
    config, temperature = measured.config, table.temperature
    for drafter in measured.pair.drafters:
        # llama.cpp drafts the likeliest token.
        verifier = GREEDY if (temperature, drafter.name, GREEDY) in measured.replays else PROBABILISTIC
        replay = measured.replays.get((temperature, drafter.name, verifier))
        if replay is None:  # its replay failed, which the report says
            continue
        for rows in config.batch_size:
            setting = measured, table, drafter, replay, drafter.draft_lengths, rows
            requests = ratios(priced(*setting))
            for k, columns in priced(*setting, with_prompts=False).items():
                length, plain = replay.mean_acceptance_length[k], table.plain_seconds([1.0] * rows, 0)
                speedup, bounds = ratio(*columns), ratio_interval(*columns, confidence=level)
                if length.value and speedup.value:  # no text, no figure
                    figures = length, plain, plain * length.value / speedup.value, speedup, requests[k], bounds
                    yield Forecast(drafter.name, k, temperature, rows, *figures)


def _tables(measured: Measured, target: str) -> list[CostTable]:
    config = measured.config
    _, context = mean_lengths(measured)
    text = torch.cat(measured.sequences(next(iter(measured.texts)))).cpu()
    with tempfile.TemporaryDirectory(prefix="draftsmith-costs-") as scratch:
        costs = LlamaCosts(
            LlamaCpp.found(), target, text, context, config.batch_size, config.temperature, config.max_new_tokens,
            config.threads, cuts_of(config),
        )  # fmt: skip
        served = [part for spec in config.specs for part in _served(measured, spec, Path(scratch))]
        return costs.tables(dict(served))


def _served(measured: Measured, spec: DrafterSpec, scratch: Path) -> Iterator[tuple[str, Mapping[int, Served | None]]]:
    """Yield a drafter, or its members, by the name in a cost table, and by γ in llama-server; None for copies."""
    drafter = measured.drafter(str(spec.name))
    last = sorted({drafter.lengths(k)[-1] for k in drafter.draft_lengths})
    for index, kind, path in _parts(spec):
        name = member_name(drafter, drafter.sources[index]) if drafter.sources else drafter.name
        if kind.copies:
            yield name, dict.fromkeys(drafter.lengths(k)[index] for k in drafter.draft_lengths)
            continue
        target, quantize = measured.config.target, TYPES[measured.pair.dtype]
        yield name, served_at(str(path), kind, target, quantize, scratch / name.replace("/", "+"), last)
