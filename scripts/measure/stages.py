"""The stages of a run of `measure`: decode, complete, replay, measure costs, certify."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, cast

from transformers import GenerationConfig

from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement.costs import CostTable, ValidTable
from draftsmith.decode.progress import track
from draftsmith.decode.validation import TokenId
from draftsmith.scripts.measure.certify import certify_runs
from draftsmith.scripts.measure.config import LLAMA_CPP
from draftsmith.scripts.measure.estimates import rows_of
from draftsmith.scripts.measure.every_round import expected_texts
from draftsmith.scripts.measure.replays import replay_all
from draftsmith.scripts.measure.round_costs import forecasts, measured_costs, priced_proposers, served_target, written
from draftsmith.scripts.measure.side_by_side import decode_side_by_side
from draftsmith.scripts.measure.state import Measured, Method
from draftsmith.scripts.measure.unfinished import Unfinished
from draftsmith.train.data.decoding import complete
from draftsmith.train.data.samples import Sample, make_batches, mixed_seed

COMPLETED_TOGETHER = 64
Write = Callable[[Sequence[list[int]], int], list[list[int]]]
"""(prompts, seed) → texts."""
REPLAYED_LENGTHS = 16
"""The longest γ replayed: replay of a longer one costs almost nothing."""


def run_stages(measured: Measured, unfinished: Unfinished) -> None:
    """Do the unfinished work of a run; a stage that fails is recorded."""
    config = measured.config
    if config.costs == LLAMA_CPP:
        with served_target(measured) as target:
            for temperature in config.temperature:
                write = partial(written, measured, target, temperature)
                measured.texts[temperature] = _completions(measured, temperature, 0, unfinished, write)
                _replay(measured, temperature, unfinished)
            measured.forecasts = forecasts(measured, target) if measured.replays else ()
    for temperature in config.temperature if config.costs != LLAMA_CPP else ():
        for rows in config.batch_size:
            groups = decode_side_by_side(measured, temperature, rows, unfinished)
            measured.observations |= {(temperature, rows, method): batches for method, batches in groups.items()}
        _complete(measured, temperature, unfinished)
        _replay(measured, temperature, unfinished)
    if not measured.forecasts and all(method == Method() for _, _, method in measured.observations):
        raise next(iter(unfinished.errors), InputError("drafter: expected one to measure, found none"))
    if config.costs is None:
        with unfinished.attempt("measuring costs"):
            measured.tables = _costs(measured, unfinished)
    measured.lossless = certify_runs(measured, unfinished)


def _complete(measured: Measured, temperature: float, unfinished: Unfinished) -> None:
    """Take the texts of plain decoding, and let the target complete the prompts that are only replayed."""
    observations = measured.observations.items()
    plain = next((groups for (t, _, m), groups in observations if (t, m) == (temperature, Method())), None)
    if plain is not None:
        decoded = [row.tokens for row in rows_of(plain)]
        with unfinished.attempt(f"completing further prompts at T = {temperature:g}"):
            measured.texts[temperature] = decoded + _completions(measured, temperature, len(decoded), unfinished)


def _completions(
    measured: Measured, temperature: float, first: int, unfinished: Unfinished, write: Write | None = None
) -> list[list[int]]:
    """Return texts of the prompts from index `first` on, written in batches; finished batches are kept.

    The target writes them here if `write` is None.
    """
    name, texts = "completed" if write is None else "served", dict[str, list[int]]()
    write = write or partial(_by_target, measured, temperature)
    prompts = measured.prompts[first:]
    samples = [Sample(prompt, ids) for prompt, ids in zip(prompts, measured.prompt_ids[first:], strict=True)]
    batches = make_batches(samples, COMPLETED_TOGETHER)
    for batch in track(batches, f"T={temperature:g}, texts to replay", "batches"):
        key = name, temperature, batch.index
        completions = unfinished.kept(list[list[TokenId]], *key)
        if completions is None:
            seed = mixed_seed(measured.config.seed, batch.index)
            completions = write([sample.ids for sample in batch.samples], seed)
            unfinished.keep(*key, value=completions)
        texts |= dict(zip(batch.names, completions, strict=True))
    return [texts[prompt.id] for prompt in prompts]


def _by_target(measured: Measured, temperature: float, prompts: Sequence[list[int]], seed: int) -> list[list[int]]:
    config, base = measured.config, cast("Any", measured.pair.target.generation_config)
    fields = {"eos_token_id": base.eos_token_id, "pad_token_id": base.pad_token_id}
    fields |= {"max_new_tokens": config.max_new_tokens} | config.at(temperature).generate_kwargs()
    generation = GenerationConfig(**fields)
    return [completion.ids for completion in complete(measured.pair.target, generation, prompts, seed)]


def _replay(measured: Measured, temperature: float, unfinished: Unfinished) -> None:
    if temperature not in measured.texts:
        return
    with unfinished.attempt(f"replay at T = {temperature:g}"):
        longest = max(REPLAYED_LENGTHS, *measured.config.draft_length)
        replays = replay_all(measured, temperature, range(1, longest + 1))
        measured.replays |= {(temperature, *key): replay for key, replay in replays.items()}
    with unfinished.attempt(f"replay of every round at T = {temperature:g}"):
        measured.rounds += expected_texts(measured, temperature)


def _costs(measured: Measured, unfinished: Unfinished) -> list[CostTable]:
    kept = unfinished.kept(list[ValidTable], "costs")
    if kept is not None and all(table.drafters.keys() == priced_proposers(measured.pair).keys() for table in kept):
        return kept
    tables = measured_costs(measured)
    unfinished.keep("costs", value=[asdict(table) for table in tables])
    return tables
