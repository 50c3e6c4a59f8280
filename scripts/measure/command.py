"""`draftsmith measure`: does a drafter pay? Acceptance by replay, speed by the clock, and costs, which join the two."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from draftsmith.decode import Replay
from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement.costs import CostTable, KeptTable
from draftsmith.decode.progress import each, phase
from draftsmith.decode.sampling import Sampler
from draftsmith.decode.validation import TokenId
from draftsmith.distill.kind import DraftModel
from draftsmith.scripts.kinds import BASELINE, STOCK, drafter_specs
from draftsmith.scripts.measure.build import build_report
from draftsmith.scripts.measure.certify import certify_recommended, certify_runs
from draftsmith.scripts.measure.config import MeasureConfig, measure_config
from draftsmith.scripts.measure.cost_file import load_costs, measured_costs
from draftsmith.scripts.measure.estimates import rows_of
from draftsmith.scripts.measure.reconcile.every_round import deepest, expected_texts, rounds_settings
from draftsmith.scripts.measure.reconcile.rounds import ROUNDS, ExpectedText, write_rounds
from draftsmith.scripts.measure.replays import replay_all, tree_pictures
from draftsmith.scripts.measure.server.command import main as server_main
from draftsmith.scripts.measure.server.config import MeasureServerConfig
from draftsmith.scripts.measure.side_by_side import Group, Method, decode_side_by_side
from draftsmith.scripts.measure.state import Measured
from draftsmith.scripts.measure.unfinished import SETTINGS, Unfinished
from draftsmith.scripts.report.page import write_page
from draftsmith.scripts.report.summary import append_summary, markdown
from draftsmith.scripts.report.table import print_report
from draftsmith.scripts.report.types import Report, TreePicture, Verifier
from draftsmith.scripts.settings import Settings, load_fastest
from draftsmith.train.cli import parse_config, run
from draftsmith.train.data.decoding import complete
from draftsmith.train.data.prompts import Prompt, encode_prompt, read_prompts
from draftsmith.train.data.samples import Batch, Sample, make_batches, mixed_seed
from draftsmith.train.data.shards import output_directory
from draftsmith.train.files import require_writable, write_aside
from draftsmith.train.kinds.drafter import DrafterSpec, Pair
from draftsmith.train.kinds.untrained import PromptLookup
from draftsmith.train.models import default_device, load_tokenizer, vocabulary_size
from draftsmith.train.provenance import write_json

FILES = ("report.json", "report.html", "summary.md", "costs.json", ROUNDS)
COMPLETED_TOGETHER = 64
REPLAYED_LENGTHS = 16
"""γ up to this is replayed: it costs next to nothing."""


def measure(config: MeasureConfig) -> Report:
    """Measure as the config says, write the report into its output directory, and return it.

    What a run has finished is kept in the output directory until it ends well: after a kill or a failure the same
    command goes on from there.

    Raises:
        InputError: bad input, settings that are not those of the unfinished run there, or a full disk.
    """
    output = require_writable(config.output, *FILES)
    tokenizer = load_tokenizer(config.target, field="target", trust_remote_code=config.trust_remote_code)
    size = vocabulary_size(config.target, trust_remote_code=config.trust_remote_code)
    prompts = read_prompts(config.prompts, limit=config.replay_limit or config.limit)
    encoded = [
        encode_prompt(prompt, tokenizer, vocab_size=size, **config.encoding)
        for prompt in each(prompts, "prompts", "texts")
    ]
    count = len(encoded[: config.limit])
    if max(config.batch_size) > count:
        raise InputError(
            f"batch_size: expected at most the {count} prompts that are decoded, found {max(config.batch_size)}"
        )
    pair, settings = load_fastest(
        config.target,
        tokenizer,
        _drafters(config),
        config.dtype,
        config.threads,
        config.compiled,
        config.trust_remote_code,
        kept=Unfinished.directory(config) / SETTINGS,
    )
    pair.check_positions(max(map(len, encoded)), config.max_new_tokens)
    config = replace(config, compiled=settings.compiled)
    tables: list[CostTable] | None = None if config.measure_costs else []
    if config.costs is not None:  # others' are refused before a text is decoded
        tables = load_costs(Path(config.costs), config, pair)
    with output_directory(output, lambda: "the batches that were decoded"):
        unfinished = Unfinished(config, pair, prompts, encoded)
        settings.to_file(unfinished.settings)
        measured = _measure(config, pair, settings, prompts, encoded, tables, unfinished)
        with phase("report"):
            report = build_report(measured)
            write_json(output / "report.json", report)
            write_page(report, output / "report.html")
        write_aside(output / "summary.md", markdown(report))
        write_rounds(output / ROUNDS, rounds_settings(config, pair), measured.rounds)
        unfinished.end()
    return report


def _measure(
    config: MeasureConfig,
    pair: Pair,
    settings: Settings,
    prompts: Sequence[Prompt],
    encoded: Sequence[list[int]],
    tables: list[CostTable] | None,
    unfinished: Unfinished,
) -> Measured:
    """Do the work, but for what is finished: decode, complete, replay, measure costs, certify.

    Args:
        config: what is to be done.
        pair: the models.
        settings: how they run.
        prompts: those to be replayed; the first of them are decoded too.
        encoded: their ids.
        tables: costs that are known; None if they are to be measured.
        unfinished: what an earlier run has finished is there, and so goes what this one finishes.

    Raises:
        Exception: what failed first, where no run is left to report.
    """
    methods = [Method(), *(Method(d.name, k) for d in pair.drafters for k in d.draft_lengths)]
    samplers = {t: config.at(t).sampler() for t in config.temperature}
    decoded, prompt_lengths = encoded[: config.limit], [len(ids) for ids in encoded]
    observations: dict[tuple[float, int, Method], Sequence[Group]] = {}
    texts: dict[float, list[list[int]]] = {}
    replays: dict[tuple[float, str, Verifier], Replay] = {}
    first_heads: dict[tuple[float, str], Replay] = {}
    rounds: list[ExpectedText] = []
    for temperature, sampler in samplers.items():
        for rows in config.batch_size:
            groups = decode_side_by_side(config, pair, methods, decoded, rows, temperature, unfinished)
            observations |= {(temperature, rows, method): of_method for method, of_method in groups.items()}
        plain = next((rows_of(of) for (t, _, m), of in observations.items() if (t, m) == (temperature, Method())), None)
        if plain is None:
            continue
        missing = slice(len(plain), len(prompts))
        with unfinished.attempt(f"completing further prompts at T = {temperature:g}"):
            further = _completed(config, pair.target, prompts[missing], encoded[missing], temperature, unfinished)
            texts[temperature] = [row.tokens for row in plain] + further
        if temperature not in texts:
            continue
        with unfinished.attempt(f"replay at T = {temperature:g}"):
            by_drafter, first = replay_all(
                pair,
                _sequences(encoded, texts[temperature]),
                prompt_lengths,
                range(1, max(REPLAYED_LENGTHS, *config.draft_length) + 1),
                sampler,
                config.max_new_tokens,
            )
            replays |= {(temperature, *key): replay for key, replay in by_drafter.items()}
            first_heads |= {(temperature, name): replay for name, replay in first.items()}
        with unfinished.attempt(f"replay of every round at T = {temperature:g}"):
            rounds += expected_texts(
                pair,
                prompts,
                encoded,
                texts[temperature],
                sampler,
                temperature,
                config.at(temperature).generate_kwargs(),
                deepest(config, pair),
                config.seed,
            )
    if all(method == Method() for _, _, method in observations):
        raise unfinished.errors[0]
    if tables is None:
        tables = []
        with unfinished.attempt("measuring costs"):
            tables = _costs(config, pair, encoded, texts, samplers, unfinished)
    pictures: list[TreePicture] = []
    if 0.0 in texts and not samplers[0.0].processors:  # a picture knows the heads' ranks alone, no penalties
        with unfinished.attempt("drawing trees"):
            pictures = tree_pictures(pair, _sequences(encoded, texts[0.0]), prompt_lengths)
    ids = [torch.tensor(prompt, device=default_device()) for prompt in decoded]
    certificates = certify_runs(config, pair, observations, ids, unfinished)
    measured = Measured(
        config=config,
        pair=pair,
        chosen=settings,
        prompts=prompts,
        prompt_ids=encoded,
        texts=texts,
        observations=observations,
        replays=replays,
        first_heads=first_heads,
        tables=tables,
        lossless=certificates,
        trees=pictures,
        rounds=rounds,
        failures=unfinished.failures,
    )
    return certify_recommended(measured, ids, unfinished)


def _costs(
    config: MeasureConfig,
    pair: Pair,
    encoded: Sequence[list[int]],
    texts: Mapping[float, Sequence[list[int]]],
    samplers: Mapping[float, Sampler],
    unfinished: Unfinished,
) -> list[CostTable]:
    """Measure costs behind the texts, unless they are measured already."""
    kept = unfinished.kept(list[KeptTable], "costs")
    if kept is None or not all(table.drafters.keys() == pair.proposers.keys() for table in kept):
        written = next(iter(texts.values()))
        prompt = max(1, round(sum(map(len, encoded)) / len(encoded)))
        mean = max(2, round(prompt + sum(map(len, written)) / len(written) / 2))
        tables = measured_costs(config, pair, _sequences(encoded, written), samplers, prompt, mean)
        unfinished.keep("costs", value=[asdict(table) for table in tables])
        return tables
    return kept


def _drafters(config: MeasureConfig) -> list[DrafterSpec]:
    """Return what is to be measured, the draft to beat behind the other draft models."""
    specs = drafter_specs(config.drafter, config.draft_length)
    ngrams = f"{config.prompt_lookup_min}-{config.prompt_lookup_max}"
    specs = [replace(spec, path=spec.path or ngrams) if spec.kind == PromptLookup.name else spec for spec in specs]
    if config.baseline_draft is not None:
        place = sum(spec.kind == DraftModel.name for spec in specs)
        specs.insert(place, DrafterSpec(BASELINE, config.baseline_draft, STOCK, config.draft_length))
    return specs


def _completed(
    config: MeasureConfig,
    target: PreTrainedModel,
    prompts: Sequence[Prompt],
    encoded: Sequence[list[int]],
    temperature: float,
    unfinished: Unfinished,
) -> list[list[int]]:
    """Let the target write further texts, in batches, to be replayed only; those of finished batches are kept."""
    base: Any = target.generation_config
    ends = [base.eos_token_id] if isinstance(base.eos_token_id, int) else base.eos_token_id
    generation = GenerationConfig(
        eos_token_id=ends,
        pad_token_id=base.pad_token_id,
        max_new_tokens=config.max_new_tokens,
        **config.at(temperature).generate_kwargs(),
    )
    written: dict[str, list[int]] = {}
    samples = [Sample(prompt, ids) for prompt, ids in zip(prompts, encoded, strict=True)]
    batches = make_batches(samples, COMPLETED_TOGETHER)
    for batch in each(batches, f"T={temperature:g}, texts to replay", "batches"):
        key = "completed", temperature, batch.index
        completions = unfinished.kept(list[list[TokenId]], *key)
        if completions is None or not _fit(completions, batch, target):
            seed = mixed_seed(config.seed, batch.index)
            found = complete(target, generation, [sample.ids for sample in batch.samples], seed)
            completions = [each.ids for each in found]
            unfinished.keep(*key, value=completions)
        written |= dict(zip(batch.names, completions, strict=True))
    return [written[prompt.id] for prompt in prompts]


def _fit(completions: Sequence[Sequence[int]], batch: Batch, target: PreTrainedModel) -> bool:
    """Say whether kept completions are as many as the batch has prompts, in tokens of the target's."""
    most = max((max(ids, default=0) for ids in completions), default=0)
    return len(completions) == len(batch.samples) and most < target.config.get_text_config().vocab_size


def _sequences(prompts: Sequence[list[int]], texts: Sequence[list[int]]) -> list[Tensor]:
    """Return prompts with their texts, (T,) each."""
    return [torch.tensor(ids + text, device=default_device()) for ids, text in zip(prompts, texts, strict=True)]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure drafters, or a server; print table and verdict, and say where the report is.

    Returns:
        0; 3 where a gate did not pass; where parts failed, 2 if input or memory is to blame for all of them, else 1.
    """
    if measure_config(sys.argv[1:] if argv is None else argv) is MeasureServerConfig:
        return server_main(argv)
    config = parse_config(MeasureConfig, argv, prog="draftsmith measure")
    report = measure(config)
    print_report(report)
    print(f"report: {Path(config.output) / 'report.html'}, and report.json and summary.md beside it")
    append_summary(report)
    if report.failures:
        return min(failure.exit_code for failure in report.failures)
    return 3 if report.gate is not None and not report.gate.passed else 0


if __name__ == "__main__":
    sys.exit(run(main))
