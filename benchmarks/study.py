"""Variants of a training config side by side: each trains once a seed, and what it makes replays the same fresh texts.

    python -m benchmarks.study --recipe distill --output runs/study \
        --variants '{"kl": {"divergence": "forward_kl"}, "tvd": {"divergence": "tvd"}}'

The target writes the texts to learn from and those to replay, once. τ is pooled over the seeds, and its interval is
over prompts. Finished runs are kept in results.json; a second call continues.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.common import ASSETS, MAX_PROMPT_TOKENS, BenchmarkConfig, main
from draftsmith.decode.errors import InputError, one_of, require, require_some
from draftsmith.decode.measurement.intervals import ratio, ratio_difference
from draftsmith.decode.sampling import Sampler
from draftsmith.scripts.kinds import drafter_specs, recipes
from draftsmith.scripts.pair import load_pair
from draftsmith.scripts.stages import JUDGED_LATER, flags_of
from draftsmith.scripts.trials import replay_completions
from draftsmith.train.data.corpus import stdlib_prompts, write_prompts
from draftsmith.train.data.generate import PrepareConfig, load_completions, prepare
from draftsmith.train.models import load_tokenizer
from draftsmith.train.provenance import write_json

CONFIGS = ASSETS.parent / "configs"
REPLAYED = {0: "replayed-greedy", 1: "replayed-sampled"}
"""Temperatures, and the texts that are replayed at each."""


@dataclass
class BenchStudyConfig(BenchmarkConfig):
    """Train variants of a config over seeds, and compare the replayed acceptance of what they make."""

    output: str = "runs/study"
    """Receives completions, drafters and results.json; a second run continues."""
    target: str = str(ASSETS / "tiny-target")
    """The target."""
    recipe: str = "distill"
    """The command that trains."""
    base: str | None = None
    """A config file of the recipe; its configs/…/tiny.yaml if None."""
    variants: dict[str, dict[str, Any]] = field(default_factory=lambda: {"base": {}})
    """Fields over the base by variant name, such as '{"tvd": {"divergence": "tvd", "training.max_steps": 60}}'."""
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

    def figures_path(self) -> Path:
        """Return where the results are written."""
        return Path(self.output) / "results.json"

    def completions(self, side: str) -> str:
        """Return the directory of some of the target's completions."""
        return str(Path(self.output) / "completions" / side)


def bench(config: BenchStudyConfig) -> dict[str, Any]:
    """Run what is missing; return by name, seed and figure the tokens and expected rounds of each prompt."""
    _write_texts(config)
    path = config.figures_path()
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    for seed, name in (*product(config.seeds, config.variants), *product(config.seeds[:1], config.drafters)):
        if str(seed) in results.get(name, {}):
            continue
        print(f"{name}, seed {seed}", flush=True)
        if name in config.variants:
            drafter = str(Path(config.output) / f"{name}-{seed}")
            _train(config, config.variants[name], seed, drafter)
        else:
            drafter = config.drafters[name]
        results.setdefault(name, {})[str(seed)] = _replayed(config, drafter)
        write_json(path, results)
    return results


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
        prepare(
            PrepareConfig(
                config.target,
                str(prompts),
                config.completions(side),
                temperature=temperature,
                max_new_tokens=config.max_new_tokens,
                max_prompt_tokens=MAX_PROMPT_TOKENS,
                batch_size=64,
                dtype="float32",
            )
        )


def _train(config: BenchStudyConfig, variant: Mapping[str, Any], seed: int, output: str) -> None:
    """Train one variant by the recipe's own entry point."""
    completions = [config.completions(side) for side in ("sampled", "greedy")]
    fields: dict[str, Any] = {"target": config.target, "completions": completions}
    fields |= JUDGED_LATER | {"training.output_dir": output, "training.seed": seed} | dict(variant)
    base = config.base or str(CONFIGS / config.recipe / "tiny.yaml")
    import_module(f"{recipes()[config.recipe].package}.__main__").main(["--config", base, *flags_of(fields)])


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


def shown(config: BenchStudyConfig, results: dict[str, Any]) -> dict[str, Any]:
    """Return α and τ of each name, and the difference of its τ from the baseline's, paired over prompts."""

    def row(name: str) -> dict[str, Any]:
        cells: dict[str, Any] = {"seeds": len(results[name])}
        for figure in next(iter(results[name].values())):
            sums = _pooled(results[name], figure)
            cells[f"{figure} α"] = ratio(sums["overlap"], sums["tokens"])
            cells[f"{figure} τ"] = ratio(sums["tokens"], sums["rounds"])
            if name != config.baseline:
                base = _pooled(results[str(config.baseline)], figure)
                difference = ratio_difference(sums["tokens"], sums["rounds"], base["tokens"], base["rounds"])
                cells[f"{figure} τ against {config.baseline}"] = difference
        return cells

    return {"drafters": {name: row(name) for name in (*config.variants, *config.drafters)}}


def _pooled(runs: Mapping[str, Any], figure: str) -> dict[str, list[float]]:
    """Return each prompt's sums of one figure: their means over the seeds."""
    columns = [run[figure] for run in runs.values()]
    return {
        key: [sum(values) / len(columns) for values in zip(*(column[key] for column in columns), strict=True)]
        for key in columns[0]
    }


if __name__ == "__main__":
    main(BenchStudyConfig, bench, shown)
