"""The stages of a run of `measure`: decode, complete, replay, measure costs, certify."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

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
from draftsmith.scripts.measure.round_costs import forecasts, measured_costs, priced_proposers
from draftsmith.scripts.measure.side_by_side import decode_side_by_side
from draftsmith.scripts.measure.state import Measured, Method
from draftsmith.scripts.measure.unfinished import Unfinished
from draftsmith.train.data.decoding import complete
from draftsmith.train.data.samples import Sample, ShardBatch, make_batches, mixed_seed

COMPLETED_TOGETHER = 64
REPLAYED_LENGTHS = 16
"""The longest γ replayed: replay of a longer one costs almost nothing."""


def run_stages(measured: Measured, unfinished: Unfinished) -> None:
    """Do the unfinished work of a run; a stage that fails is recorded."""
    config, decoding = measured.config, measured.config.costs != LLAMA_CPP
    for temperature in config.temperature:
        for rows in config.batch_size if decoding else ():
            groups = decode_side_by_side(measured, temperature, rows, unfinished)
            measured.observations |= {(temperature, rows, method): batches for method, batches in groups.items()}
        _complete(measured, temperature, unfinished)
        _replay(measured, temperature, unfinished)
    if measured.replays and not decoding:  # this decoder's speed says nothing about llama.cpp's
        measured.forecasts = forecasts(measured)
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
    if plain is not None or measured.config.costs == LLAMA_CPP:
        decoded = [row.tokens for row in rows_of(plain or ())]
        with unfinished.attempt(f"completing further prompts at T = {temperature:g}"):
            measured.texts[temperature] = decoded + _completions(measured, temperature, len(decoded), unfinished)


def _completions(measured: Measured, temperature: float, first: int, unfinished: Unfinished) -> list[list[int]]:
    """Return texts of the prompts from index `first` on, written in batches; finished batches are kept."""
    config, target = measured.config, measured.pair.target
    base: Any = target.generation_config
    generation = GenerationConfig(
        eos_token_id=base.eos_token_id,
        pad_token_id=base.pad_token_id,
        max_new_tokens=config.max_new_tokens,
        **config.at(temperature).generate_kwargs(),
    )
    vocab_size = target.config.get_text_config().vocab_size
    written: dict[str, list[int]] = {}
    prompts = measured.prompts[first:]
    samples = [Sample(prompt, ids) for prompt, ids in zip(prompts, measured.prompt_ids[first:], strict=True)]
    batches = make_batches(samples, COMPLETED_TOGETHER)
    for batch in track(batches, f"T={temperature:g}, texts to replay", "batches"):
        key = "completed", temperature, batch.index
        completions = unfinished.kept(list[list[TokenId]], *key)
        if completions is None or not _fit(completions, batch, vocab_size):
            seed = mixed_seed(config.seed, batch.index)
            answers = complete(target, generation, [sample.ids for sample in batch.samples], seed)
            completions = [completion.ids for completion in answers]
            unfinished.keep(*key, value=completions)
        written |= dict(zip(batch.names, completions, strict=True))
    return [written[prompt.id] for prompt in prompts]


def _fit(completions: Sequence[Sequence[int]], batch: ShardBatch, vocab_size: int) -> bool:
    """Return whether kept completions match the batch's prompts in number, with tokens of the target."""
    most = max((max(ids, default=0) for ids in completions), default=0)
    return len(completions) == len(batch.samples) and most < vocab_size


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
