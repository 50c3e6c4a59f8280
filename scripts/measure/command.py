"""`draftsmith measure`: does a drafter pay? Acceptance by replay, speed by the clock, and costs, which join the two."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import GenerationConfig, PreTrainedModel

from draftsmith.decode import Replay
from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement.costs import CostTable
from draftsmith.scripts.measure.build import build_report
from draftsmith.scripts.measure.certify import certify_runs
from draftsmith.scripts.measure.config import MeasureConfig
from draftsmith.scripts.measure.cost_file import load_costs, measured_costs
from draftsmith.scripts.measure.estimates import rows_of
from draftsmith.scripts.measure.replays import replay_all, tree_pictures
from draftsmith.scripts.measure.side_by_side import Group, Method, decode_side_by_side
from draftsmith.scripts.measure.state import Measured
from draftsmith.scripts.pair import MEDUSA, PROMPT_LOOKUP, STOCK, DrafterSpec, load_pair, short_names
from draftsmith.scripts.report.page import write_page
from draftsmith.scripts.report.summary import markdown
from draftsmith.scripts.report.table import print_report
from draftsmith.scripts.report.types import Report, TreePicture, Verifier
from draftsmith.train.cli import parse_config, run
from draftsmith.train.data.generate import complete
from draftsmith.train.data.prompts import encode_prompt, read_prompts
from draftsmith.train.data.samples import Sample, make_batches, mixed_seed
from draftsmith.train.files import require_writable
from draftsmith.train.models import default_device, load_tokenizer
from draftsmith.train.provenance import write_json

FILES = ("report.json", "report.html", "summary.md", "costs.json")
COMPLETED_TOGETHER = 64
REPLAYED_LENGTHS = 16
"""γ up to this is replayed: it costs next to nothing."""


def measure(config: MeasureConfig, progress: bool = True) -> Report:
    """Measure as the config says, write the report into its output directory, and return it."""
    output = require_writable(config.output, *FILES)
    if config.threads:
        torch.set_num_threads(config.threads)
    tokenizer = load_tokenizer(config.target, field="target", trust_remote_code=config.trust_remote_code)
    prompts = read_prompts(config.prompts, limit=config.replay_limit or config.limit)
    encoded = [encode_prompt(prompt, tokenizer, max_tokens=config.max_prompt_tokens) for prompt in prompts]
    decoded, prompt_lengths = encoded[: config.limit], [len(ids) for ids in encoded]
    if max(config.batch_size) > len(decoded):
        raise InputError(
            f"batch_size: expected at most the {len(decoded)} prompts that are decoded, found {max(config.batch_size)}"
        )
    pair = load_pair(config.target, tokenizer, _drafters(config), config.dtype, config.trust_remote_code)
    tables: list[CostTable] | None = None if config.measure_costs else []
    if config.costs is not None:  # others' are refused before a text is decoded
        tables = load_costs(Path(config.costs), config, pair)
    methods = [Method(), *(Method(d.name, k) for d in pair.drafters for k in d.draft_lengths)]
    samplers = {t: config.at(t).sampler() for t in config.temperature}
    observations: dict[tuple[float, int, Method], Sequence[Group]] = {}
    texts: dict[float, list[list[int]]] = {}
    replays: dict[tuple[float, str, Verifier], Replay] = {}
    first_heads: dict[tuple[float, str], Replay] = {}
    for temperature, sampler in samplers.items():
        for rows in config.batch_size:
            groups = decode_side_by_side(config, pair, methods, decoded, rows, temperature, progress)
            observations |= {(temperature, rows, method): of_method for method, of_method in groups.items()}
        plain = rows_of(observations[temperature, config.batch_size[0], Method()])
        texts[temperature] = [row.tokens for row in plain]
        missing = slice(len(plain), len(prompts))
        texts[temperature] += _completed(config, pair.target, prompts[missing], encoded[missing], temperature, progress)
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
    if tables is None:
        written = next(iter(texts.values()))
        prompt = max(1, round(sum(prompt_lengths) / len(encoded)))
        mean = max(2, round(prompt + sum(map(len, written)) / len(written) / 2))
        tables = measured_costs(config, pair, _sequences(encoded, written), samplers, prompt, mean)
    pictures: list[TreePicture] = []
    if 0.0 in texts and not samplers[0.0].processors:  # a picture knows the heads' ranks alone, no penalties
        pictures = tree_pictures(pair, _sequences(encoded, texts[0.0]), prompt_lengths)
    measured = Measured(
        config=config,
        pair=pair,
        prompts=prompts,
        prompt_ids=encoded,
        texts=texts,
        observations=observations,
        replays=replays,
        first_heads=first_heads,
        tables=tables,
        lossless=certify_runs(
            config, pair, observations, [torch.tensor(prompt, device=default_device()) for prompt in decoded]
        ),
        trees=pictures,
    )
    report = build_report(measured)
    write_json(output / "report.json", report)
    write_page(report, output / "report.html")
    (output / "summary.md").write_text(markdown(report), encoding="utf-8")
    return report


def _drafters(config: MeasureConfig) -> list[DrafterSpec]:
    """Return what is to be measured."""
    specs = [
        DrafterSpec("draft", path, name, config.draft_length)
        for name, path in zip(short_names(config.drafts), config.drafts, strict=True)
    ]
    if config.baseline_draft is not None:
        specs.append(DrafterSpec("baseline_draft", config.baseline_draft, STOCK, config.draft_length))
    if config.medusa is not None:
        specs.append(DrafterSpec(MEDUSA, config.medusa))
    if config.prompt_lookup:
        specs.append(DrafterSpec(PROMPT_LOOKUP, draft_lengths=config.draft_length))
    return specs


def _completed(
    config: MeasureConfig,
    target: PreTrainedModel,
    prompts: Sequence[Any],
    encoded: Sequence[list[int]],
    temperature: float,
    progress: bool,
) -> list[list[int]]:
    """Let the target write further texts, in batches, to be replayed only."""
    base: Any = target.generation_config
    ends = [base.eos_token_id] if isinstance(base.eos_token_id, int) else base.eos_token_id
    generation = GenerationConfig(eos_token_id=ends, pad_token_id=base.pad_token_id, **config.options(temperature))
    written: dict[str, list[int]] = {}
    samples = [Sample(prompt, ids) for prompt, ids in zip(prompts, encoded, strict=True)]
    batches = make_batches(samples, COMPLETED_TOGETHER)
    for batch in tqdm(batches, desc=f"T={temperature:g}, to replay", unit="batch", disable=not progress or not batches):
        seed = mixed_seed(config.seed, batch.index)
        completions = complete(target, generation, [sample.ids for sample in batch.samples], seed)
        written |= {name: each.ids for name, each in zip(batch.names, completions, strict=True)}
    return [written[prompt.id] for prompt in prompts]


def _sequences(prompts: Sequence[list[int]], texts: Sequence[list[int]]) -> list[Tensor]:
    """Return prompts with their texts, (T,) each."""
    return [torch.tensor(ids + text, device=default_device()) for ids, text in zip(prompts, texts, strict=True)]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print table and verdict, and say where the report is; exit code 3 where a gate did not pass."""
    config = parse_config(MeasureConfig, argv, prog="draftsmith measure")
    report = measure(config)
    print_report(report)
    print(f"report: {Path(config.output) / 'report.html'}, and report.json and summary.md beside it")
    steps = os.environ.get("GITHUB_STEP_SUMMARY")
    if steps:
        with open(steps, "a", encoding="utf-8") as file:
            file.write(markdown(report))
    return 3 if report.gate is not None and not report.gate.passed else 0


if __name__ == "__main__":
    sys.exit(run(main))
