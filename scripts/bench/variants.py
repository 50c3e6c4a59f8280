"""What the benchmarks of training share: variants, trained over seeds from the same texts, and their τ side by side.

A target writes what is learned from and what is replayed, once. Each variant trains once a seed; its figures go to
results.json. τ is pooled over the seeds, its interval is over prompts.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement.intervals import Estimate, ratio, ratio_difference
from draftsmith.scripts.bench.common import ASSETS, MAX_PROMPT_TOKENS, BenchmarkConfig, training_fields
from draftsmith.train.data.corpus import stdlib_prompts, write_prompts
from draftsmith.train.data.examples import TrainingData, training_examples
from draftsmith.train.data.generate import PrepareConfig, load_completions, prepare
from draftsmith.train.models import load_model
from draftsmith.train.provenance import environment, write_json

WRITTEN = {  # temperature and tokens of the texts that the target writes
    "sampled": (1, 96),
    "greedy": (0, 96),
    "searched": (0, 96),
    "replayed-sampled": (1, 64),
    "replayed-greedy": (0, 64),
}


@dataclass(kw_only=True)
class VariantsConfig(BenchmarkConfig):
    """The options of a benchmark that trains in several ways."""

    known: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """All variants and their options."""

    output: str
    """Receives completions, what was trained, and results.json; a second run goes on from what is there."""
    target: str = str(ASSETS / "tiny-target")
    """The target, from which all learn."""
    variants: list[str]
    """Which variants; `NAME@STEPS` for other steps than `steps`."""
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])
    """Seeds of the order of the data, and of what drafts write."""
    steps: int = 120
    """Steps of each run."""
    batch_size: int = 16
    """Samples a step."""
    learning_rate: float
    """The peak of a cosine with 10 steps of warm-up."""
    train_prompts: int = 640
    """Prompts whose completions are learned from, two thirds of them sampled, one third greedy."""
    replayed_prompts: int = 128
    """Fresh prompts from held-out modules."""
    baseline: str
    """The variant that the others are compared with."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for variant in [*self.variants, self.baseline]:
            name, _, steps = variant.partition("@")
            if name not in self.known or (steps and not steps.isdecimal()):
                raise InputError(
                    f"variants: expected NAME or NAME@STEPS out of {', '.join(self.known)}, found {variant}"
                )

    def figures_path(self) -> Path:
        """Return where the results are written."""
        return Path(self.output) / "results.json"

    @property
    def completions(self) -> Path:
        """The directory of the target's completions."""
        return Path(self.output) / "completions"

    def prompts(self, side: str) -> Path:
        """Return the file of the prompts of one of `WRITTEN`."""
        return Path(self.output) / "prompts" / f"{side}.jsonl"

    def training_arguments(self, variant: str, seed: int) -> dict[str, Any]:
        """Return the fields of the Trainer's arguments for one run."""
        return training_fields(
            Path(self.output) / f"{variant}-{seed}",
            int(variant.partition("@")[2] or self.steps),
            self.batch_size,
            self.learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=10,
            max_grad_norm=1.0,
            use_cpu=True,
            seed=seed,
        )


def compare(
    config: VariantsConfig,
    train_and_replay: Callable[[str, int, PreTrainedModel, TrainingData], dict[str, Any]],
    prompts: Mapping[str, Sequence[dict[str, str]]] | None = None,
) -> dict[str, Any]:
    """Run what is missing, and return the results by variant and seed.

    Args:
        config: says what to run.
        train_and_replay: returns the figures of a variant and seed, given the target and what to learn from.
        prompts: others than those to learn from and those to replay, by their names in `WRITTEN`.
    """
    path, train_prompts = config.figures_path(), stdlib_prompts(config.train_prompts, heldout=False)
    sampled = len(train_prompts) * 2 // 3
    fresh = stdlib_prompts(config.replayed_prompts, heldout=True, seed=2)
    prompts = {"sampled": train_prompts[:sampled], "greedy": train_prompts[sampled:], **(prompts or {})}
    prompts |= {"replayed-sampled": fresh, "replayed-greedy": fresh}
    for side, records in prompts.items():
        write_prompts(config.prompts(side), records)
    complete(config, prompts, config.target, config.completions)
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    target = load_model(config.target, field="target", device="cpu")
    train = training_examples([str(config.completions / side) for side in ("sampled", "greedy")])
    for seed, variant in product(config.seeds, config.variants):
        if str(seed) not in results.get(variant, {}):
            print(f"{variant}, seed {seed}", flush=True)
            results.setdefault(variant, {})[str(seed)] = train_and_replay(variant, seed, target, train)
            results["environment"] = environment(target.device, "float32")
            write_json(path, results)
    return results


def complete(config: VariantsConfig, sides: Iterable[str], target: str, completions: Path) -> None:
    """Have a target complete the prompts of some of `WRITTEN` in float32; what it has written already is kept."""
    for side in sides:
        temperature, tokens = WRITTEN[side]
        prepare(
            PrepareConfig(
                target,
                str(config.prompts(side)),
                str(completions / side),
                temperature=temperature,
                max_new_tokens=tokens,
                max_prompt_tokens=MAX_PROMPT_TOKENS,
                batch_size=64,
                dtype="float32",
            )
        )


def read_texts(directory: Path) -> tuple[list[Tensor], list[int]]:
    """Return texts, (T,), and the lengths of their prompts, in the order of their ids, whatever the temperature."""
    samples = load_completions(str(directory)).sort("id")
    return [torch.tensor(ids) for ids in samples["input_ids"]], list(samples["prompt_length"])


def pooled(runs: Mapping[str, Any], name: str) -> dict[str, list[float]]:
    """Return each prompt's sums of one figure: their means over the seeds."""
    columns = [run[name] for run in runs.values()]
    return {
        key: [sum(values) / len(columns) for values in zip(*(column[key] for column in columns), strict=True)]
        for key in columns[0]
    }


def taus(
    config: VariantsConfig, results: Mapping[str, Any], runs: Mapping[str, Any], name: str, title: str
) -> dict[str, Any]:
    """Return a variant's τ of one figure, and its difference from the baseline's, paired over prompts."""
    sums = pooled(runs, name)
    figures: dict[str, Any] = {"seeds": len(runs), f"{title} τ": ratio(sums["tokens"], sums["rounds"])}
    base = results.get(config.baseline)
    if base is not None and base is not runs:
        figures[f"{title} against {config.baseline}"] = tau_difference(sums, pooled(base, name))
    return figures


def tau_difference(sums: Mapping[str, list[float]], others: Mapping[str, list[float]]) -> Estimate:
    """Estimate the difference of two τ, paired over prompts."""
    return ratio_difference(sums["tokens"], sums["rounds"], others["tokens"], others["rounds"])
