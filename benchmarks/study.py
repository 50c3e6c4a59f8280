"""Trainings side by side: each trains once a seed on the same texts, and what it makes replays the same fresh texts.

    python -m benchmarks.study --config benchmarks/kinds.yaml
    python -m benchmarks.study --recipe distill --output runs/study \
        --variants '{"kl": {"divergence": "forward_kl"}, "tvd": {"divergence": "tvd"}}'

The target writes the texts to learn from and those to replay, once. τ is pooled over the seeds, and its interval is
over prompts. Finished runs are kept in results.json; a second call continues.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.common import ASSETS, MAX_PROMPT_TOKENS, BenchmarkConfig, main
from draftsmith.decode.errors import InputError, one_of, require, require_some
from draftsmith.decode.measurement.costs import measure_costs
from draftsmith.decode.measurement.intervals import ratio, ratio_difference
from draftsmith.decode.planning.costs import RoundCosts
from draftsmith.decode.sampling import Sampler
from draftsmith.decode.validation import parse_json
from draftsmith.scripts.kinds import drafter_specs, recipes
from draftsmith.scripts.pair import load_chains, load_pair, replay_completions
from draftsmith.scripts.stages import JUDGED_LATER
from draftsmith.train.cli import check_fields, flags_of
from draftsmith.train.data.corpus import stdlib_prompts, write_prompts
from draftsmith.train.data.generate import PrepareConfig, load_completions, prepare
from draftsmith.train.files import remove
from draftsmith.train.models import default_device, load_tokenizer
from draftsmith.train.provenance import write_json

CONFIGS = ASSETS.parent / "configs"
REPLAYED = {0: "replayed-greedy", 1: "replayed-sampled"}
"""Temperatures, and the texts that are replayed at each."""
EQUAL_TIME = ", equal time"
"""The end of a training's name with the steps that take the baseline's seconds."""


@dataclass
class BenchStudyConfig(BenchmarkConfig):
    """Train variants of a config over seeds, and compare the replayed acceptance of what they make."""

    output: str = "runs/study"
    """Receives completions, drafters and results.json; a second run continues."""
    target: str = str(ASSETS / "tiny-target")
    """The target."""
    recipe: str = "distill"
    """The command that trains a variant that names none."""
    common: dict[str, Any] = field(default_factory=dict)
    """Fields of all variants, such as '{"training.max_steps": 60}'."""
    variants: dict[str, dict[str, Any]] = field(default_factory=lambda: {"base": {}})
    """Fields over configs/…/tiny.yaml by variant name, such as '{"tvd": {"divergence": "tvd"}}'; `command` among them
    is another recipe."""
    equal_time: bool = False
    """Train each variant also for as many steps as take the seconds of the baseline's: of CPU time, without a GPU."""
    priced: bool = False
    """Measure what a round with each costs, those of the first seed side by side, and predict the speed-up."""
    drafters: dict[str, str] = field(default_factory=dict)
    """Drafters that are only replayed, by name: `DIR_OR_KIND`, as `--drafter` takes it elsewhere."""
    baseline: str | None = None
    """The variant or drafter that the others are compared with; the first variant if None."""
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])
    """Seeds of the training runs."""
    draft_lengths: list[int] = field(default_factory=lambda: [4])
    """γ of the replayed τ."""
    train_prompts: int = 640
    """Prompts whose completions are learned from, two thirds of them sampled, one third greedy."""
    replayed_prompts: int = 128
    """Fresh prompts from held-out modules."""
    max_new_tokens: int = 96
    """Tokens of a completion."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, one_of(recipes()), "recipe")
        require_some(self, "variants", "variant")
        names = [*self.variants, *self.drafters]
        self.baseline = self.baseline or names[0]
        if self.baseline not in names or len(set(names)) < len(names):
            raise InputError(f"baseline: expected one of {', '.join(names)}, each named once, found {self.baseline}")
        if self.equal_time and self.baseline not in self.variants:
            raise InputError(f"baseline: expected a variant, whose time the others take, found {self.baseline}")
        for name, fields in self.variants.items():
            if fields.get("command", self.recipe) not in recipes():
                found = fields["command"]
                raise InputError(f"variants: {name}: command: expected one of {', '.join(recipes())}, found {found}")
            command, argv = self.training(fields)
            try:
                check_fields(recipes()[command].config_class(), argv)
            except InputError as error:
                raise InputError(f"variants: {name}: {error}") from error

    def figures_path(self) -> Path:
        """Return where the results are written."""
        return Path(self.output) / "results.json"

    def training(self, fields: Mapping[str, Any]) -> tuple[str, list[str]]:
        """Return a variant's command and flags, from its own fields."""
        own = self.common | JUDGED_LATER | dict(fields)
        command = own.pop("command", self.recipe)
        texts = {"target": self.target, "completions": [self.completions(side) for side in ("sampled", "greedy")]}
        return command, ["--config", str(CONFIGS / command / "tiny.yaml"), *flags_of(texts | own)]

    def completions(self, side: str) -> str:
        """Return the directory of some of the target's completions."""
        return str(Path(self.output) / "completions" / side)


def bench(config: BenchStudyConfig) -> dict[str, Any]:
    """Run what is missing; return by name and seed the training, and by figure each prompt's tokens and rounds."""
    _write_texts(config)
    path = config.figures_path()
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    _run(config, config.variants, results)
    if config.equal_time:
        _run(config, _of_equal_time(config, results), results)
    for name in config.drafters:
        if name not in results:
            results[name] = {str(config.seeds[0]): {"replayed": _replayed(config, config.drafters[name])}}
            write_json(path, results)
    if config.priced:
        results["costs"] = _costs(config)
        write_json(path, results)
    return results


def _run(config: BenchStudyConfig, trainings: Mapping[str, dict[str, Any]], results: dict[str, Any]) -> None:
    """Train and replay what `results` does not have with these fields, and add it."""
    for seed, (name, fields) in product(config.seeds, trainings.items()):
        runs, (command, argv) = results.setdefault(name, {}), config.training(fields)
        if runs.get(str(seed), {}).get("command") == [command, *argv]:
            continue
        print(f"{name}, seed {seed}", flush=True)
        output = Path(config.output) / f"{name}-{seed}"
        if str(seed) in runs:  # of other fields; an interrupted one is continued
            remove(output)
        seconds = _train(command, [*argv, f"--training.output_dir={output}", f"--training.seed={seed}"])
        steps = parse_json((output / "trainer_state.json").read_text(encoding="utf-8"))["global_step"]
        runs[str(seed)] = {
            "command": [command, *argv], "steps": steps, "seconds": seconds, "replayed": _replayed(config, str(output)),
        }  # fmt: skip
        write_json(config.figures_path(), results)


def _of_equal_time(config: BenchStudyConfig, results: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the trainings with steps for the seconds of the baseline's, by names of their own."""

    def of(name: str, figure: str) -> float:
        return median(results[name][str(seed)][figure] for seed in config.seeds)

    seconds = of(str(config.baseline), "seconds")
    return {
        name + EQUAL_TIME: fields
        | {"training.max_steps": max(1, round(of(name, "steps") * seconds / of(name, "seconds")))}
        for name, fields in config.variants.items()
        if name != config.baseline
    }


def _write_texts(config: BenchStudyConfig) -> None:
    """Have the target complete all prompts; texts that are there already are kept."""
    train = stdlib_prompts(config.train_prompts, heldout=False)
    fresh = stdlib_prompts(config.replayed_prompts, heldout=True, seed=2)
    sampled = len(train) * 2 // 3
    texts = {"sampled": (train[:sampled], 1), "greedy": (train[sampled:], 0)}
    texts |= {side: (fresh, temperature) for temperature, side in REPLAYED.items()}
    for side, (records, temperature) in texts.items():
        prompts = Path(config.output) / "prompts" / f"{side}.jsonl"
        write_prompts(prompts, records)
        fields: dict[str, Any] = {"temperature": temperature, "max_new_tokens": config.max_new_tokens}
        fields |= {"max_prompt_tokens": MAX_PROMPT_TOKENS, "batch_size": 64, "dtype": "float32"}
        prepare(PrepareConfig(config.target, str(prompts), config.completions(side), **fields))


def _train(command: str, argv: list[str]) -> float:
    """Train by a command's own entry point, and return the seconds that it took."""
    # Other processes do not slow CPU time, but a GPU's work is not in it.
    clock = time.process_time if default_device().type == "cpu" else time.perf_counter
    begin = clock()
    import_module(f"{recipes()[command].package}.__main__").main(argv)
    return clock() - begin


def _replayed(config: BenchStudyConfig, drafter: str) -> dict[str, dict[str, list[float]]]:
    """Return by temperature and γ the tokens and expected rounds of each prompt, and the summed overlaps."""
    specs = drafter_specs([drafter], config.draft_lengths)
    pair = load_pair(config.target, load_tokenizer(config.target, field="target"), specs, "float32")
    figures = {}
    for temperature, side in REPLAYED.items():
        samples = load_completions(config.completions(side)).sort("id")  # in one order at every temperature
        proposers, sampler = {"": pair.drafter.proposer}, Sampler.of(temperature)
        replay = replay_completions(pair, proposers, list(samples), config.draft_lengths, sampler)[""]
        overlaps, _ = replay.overlaps_and_contexts()
        for draft_length in config.draft_lengths:
            tokens, rounds = replay.tokens_and_rounds(draft_length)
            name = f"T={temperature} γ={draft_length}"
            figures[name] = {"tokens": tokens, "rounds": rounds, "overlap": overlaps}
    return figures


def _costs(config: BenchStudyConfig) -> dict[str, dict[str, dict[str, float]]]:
    """Return by figure and name the milliseconds of a draft, and the speed-up if no token of it were accepted."""
    paths = {name: str(Path(config.output) / f"{name}-{config.seeds[0]}") for name in config.variants}
    pair, chains = load_chains(config.target, paths | config.drafters, max(config.draft_lengths), "float32")
    text = [token for sample in load_completions(config.completions("sampled")) for token in sample["input_ids"]]
    tables = measure_costs(
        pair.target,
        {name: chain for name, (chain, _) in chains.items()},
        {name: most for name, (_, most) in chains.items()},
        torch.tensor(text),
        {temperature: Sampler.of(temperature) for temperature in REPLAYED},
        [1],
        MAX_PROMPT_TOKENS + config.max_new_tokens // 2,
        MAX_PROMPT_TOKENS,
        sorted({1, *(1 + length for length in config.draft_lengths)}),
    )
    for doubt in (line for table in tables for line in table.doubts):
        print(doubt)

    def prices(costs: RoundCosts, draft_length: int) -> dict[str, float]:
        return {"draft_ms": 1e3 * costs.drafting(draft_length), "per_token": costs.speedup(1.0, draft_length)}

    return {
        f"T={table.temperature:g} γ={length}": {name: prices(table.at(name, 1), length) for name in chains}
        for table in tables
        for length in config.draft_lengths
    }


def shown(config: BenchStudyConfig, results: dict[str, Any]) -> dict[str, Any]:
    """Return each name's training, α and τ, and the difference of its τ from the baseline's, paired over prompts."""

    def row(name: str) -> dict[str, Any]:
        runs = list(results[name].values())
        cells: dict[str, Any] = {"seeds": len(runs)}
        if "steps" in runs[0]:
            cells |= {key: median(run[key] for run in runs) for key in ("steps", "seconds")}
        for figure in runs[0]["replayed"]:
            sums = _pooled(results[name], figure)
            cells[f"{figure} α"] = ratio(sums["overlap"], sums["tokens"])
            cells[f"{figure} τ"] = ratio(sums["tokens"], sums["rounds"])
            of_seeds = [run["replayed"][figure] for run in runs]
            cells[f"{figure} by seed"] = ", ".join(f"{sum(of['tokens']) / sum(of['rounds']):.3f}" for of in of_seeds)
            if (price := results.get("costs", {}).get(figure, {}).get(name.removesuffix(EQUAL_TIME))) is not None:
                cells[f"{figure} draft ms"] = price["draft_ms"]
                cells[f"{figure} speed-up"] = price["per_token"] * float(sum(sums["tokens"]) / sum(sums["rounds"]))
            if name != config.baseline:
                base = _pooled(results[str(config.baseline)], figure)
                difference = ratio_difference(sums["tokens"], sums["rounds"], base["tokens"], base["rounds"])
                cells[f"{figure} τ against {config.baseline}"] = difference
        return cells

    names = [*config.variants, *(name + EQUAL_TIME for name in config.variants), *config.drafters]
    return {"drafters": {name: row(name) for name in names if name in results}}


def _pooled(runs: Mapping[str, Any], figure: str) -> dict[str, list[float]]:
    """Return each prompt's sums of one figure: their means over the seeds."""
    columns = [run["replayed"][figure] for run in runs.values()]
    return {
        key: [sum(values) / len(columns) for values in zip(*(column[key] for column in columns), strict=True)]
        for key in columns[0]
    }


if __name__ == "__main__":
    main(BenchStudyConfig, bench, shown)
