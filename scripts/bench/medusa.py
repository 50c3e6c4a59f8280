"""Which heads: soft or hard labels, Medusa or Hydra, the backbone frozen or not; from the same data, over seeds.

    python -m draftsmith.scripts.bench.medusa --output runs/medusa-bench

Every variant's heads replay the same fresh prompts of held-out modules: τ at T=0 of a chain, of Medusa's reference tree
and of a tree as large that was searched on other prompts; the accuracy of each head on those texts; τ of the chain at
T=1. A backbone that was trained writes the texts anew, and is compared with what it was. τ is pooled over the seeds,
its interval is over prompts. What is done is kept, and a second run goes on.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel, TrainingArguments

from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement.intervals import format_estimate, ratio, ratio_difference
from draftsmith.decode.replay.ranks import TextRanks
from draftsmith.decode.sampling import Sampler
from draftsmith.decode.tree import Tree
from draftsmith.medusa.config import MedusaTrainingConfig
from draftsmith.medusa.heads import MedusaHeads
from draftsmith.medusa.replay import replay_heads, replay_ranks
from draftsmith.medusa.trainer import MedusaTrainer
from draftsmith.medusa.tree_search import rank_accuracies, reference_tree, search_tree
from draftsmith.scripts.bench.objectives import ObjectivesConfig, prepare_texts, remember
from draftsmith.train.cli import parse_config, run
from draftsmith.train.data.collator import training_examples
from draftsmith.train.data.corpus import code_prompts, stdlib_modules
from draftsmith.train.data.generate import PrepareConfig, load_completions, prepare
from draftsmith.train.models import load_model, load_tokenizer
from draftsmith.train.provenance import environment, write_json

VARIANTS: dict[str, dict[str, Any]] = {
    "soft": {},
    "hard": {"divergence": "cross_entropy", "prompt_loss": False},
    "hard_prompts": {"divergence": "cross_entropy"},
    "soft_and_hard": {"divergence": {"forward_kl": 0.5, "cross_entropy": 0.5}},
    "jsd": {"divergence": "jsd"},
    "tvd": {"divergence": "tvd"},
    "soft_answers": {"prompt_loss": False},
    "hydra": {"hydra": True},
    "hydra_hard": {"hydra": True, "divergence": "cross_entropy", "prompt_loss": False},
    "shared": {"lm_heads": "shared"},
    "frozen_lm_heads": {"train_lm_heads": False},
    "two_blocks": {"num_layers": 2},
    "even_weights": {"decay": 1.0},
    "medusa2": {"backbone": "lora"},
}
FIGURES = ("chain", "reference", "searched", "sampled")


@dataclass
class BenchMedusaConfig:
    """Train heads in several ways side by side, and compare what is accepted of them."""

    output: str = "runs/medusa-bench"
    """Receives completions, heads and results.json."""
    target: str = ObjectivesConfig.target
    """The target."""
    variants: list[str] = field(default_factory=lambda: ["soft", "hard", "hydra", "medusa2"])
    """Which ones; `NAME@STEPS` for other steps than `steps`."""
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])
    """Seeds of the order of the data."""
    steps: int = 120
    """Steps of each run."""
    batch_size: int = 16
    """Samples a step."""
    learning_rate: float = 1e-2
    """The heads', with AdamW: the peak of a cosine with 10 steps of warm-up."""
    backbone_learning_rate: float = 3e-4
    """The backbone's, where it is trained."""
    train_prompts: int = 640
    """Prompts whose completions are learned from, two thirds of them sampled, one third greedy."""
    searched_prompts: int = 128
    """Further prompts from the training modules, whose greedy completions trees are searched on."""
    replayed_prompts: int = 128
    """Fresh prompts from held-out modules."""
    baseline: str = "soft"
    """The variant that the others are compared with."""

    def __post_init__(self) -> None:
        for variant in [*self.variants, self.baseline]:
            name, _, steps = variant.partition("@")
            if name not in VARIANTS or (steps and not steps.isdecimal()):
                raise InputError(f"variants: expected NAME or NAME@STEPS out of {', '.join(VARIANTS)}, found {variant}")


def compare(config: BenchMedusaConfig) -> dict[str, Any]:
    """Run what is missing, and return the results by variant and seed."""
    output = Path(config.output)
    texts = ObjectivesConfig(
        config.output, config.target, train_prompts=config.train_prompts, replayed_prompts=config.replayed_prompts
    )
    prepare_texts(texts)
    _write(config.target, output / "completions", output, config)
    path = output / "results.json"
    results: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    target = load_model(config.target, field="target", device="cpu")
    train = training_examples([str(output / "completions" / side) for side in ("sampled", "greedy")])
    remember(target, train["input_ids"])
    for seed in config.seeds:
        for variant in config.variants:
            if str(seed) in results.get(variant, {}):
                continue
            print(f"{variant}, seed {seed}", flush=True)
            results.setdefault(variant, {})[str(seed)] = _run(config, variant, seed, target, train)
            results["environment"] = environment(target.device, "float32")
            write_json(path, results)
    return results


def _write(target: str, completions: Path, output: Path, config: BenchMedusaConfig, replayed: bool = False) -> None:
    """Have a target write the texts that trees are searched on, and those that are replayed where it is another."""
    modules = stdlib_modules()
    searched = code_prompts([m for m in modules if not m.heldout], config.searched_prompts, seed=3)
    sides: list[tuple[str, list[dict[str, str]] | None, int, int]] = [("searched", searched, 0, 96)]
    if replayed:
        sides += [("replayed-greedy", None, 0, 64), ("replayed-sampled", None, 1, 64)]
    for name, records, temperature, tokens in sides:
        prompts = output / "prompts" / f"{name}.jsonl"
        if records is not None:
            prompts.parent.mkdir(parents=True, exist_ok=True)
            prompts.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        prepare(
            PrepareConfig(
                target,
                str(prompts),
                str(completions / name),
                temperature=temperature,
                max_prompt_tokens=48,
                max_new_tokens=tokens,
                batch_size=64,
            )
        )


def _run(config: BenchMedusaConfig, variant: str, seed: int, target: PreTrainedModel, train: Dataset) -> dict[str, Any]:
    name, _, steps = variant.partition("@")
    directory = Path(config.output) / f"{variant}-{seed}"
    options: dict[str, Any] = {"prompt_loss": True, **VARIANTS[name]}
    joint = "backbone" in options
    multiplier = config.learning_rate / config.backbone_learning_rate
    arguments = TrainingArguments(
        output_dir=str(directory),
        max_steps=int(steps or config.steps),
        per_device_train_batch_size=config.batch_size,
        learning_rate=config.backbone_learning_rate if joint else config.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=10,
        max_grad_norm=1.0,
        save_strategy="no",
        logging_steps=20,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        seed=seed,
    )
    given = MedusaTrainingConfig(
        config.target,
        ["-"],
        training=arguments,
        head_learning_rate_multiplier=multiplier,
        warmup_heads=0.3 if joint else 0.0,
        **options,
    )
    heads = MedusaHeads.of_target(target, 4, given.num_layers, given.lm_heads, hydra=given.hydra, path=config.target)
    backbone = load_model(config.target, device="cpu") if joint else target
    tokenizer = load_tokenizer(config.target)
    trainer = MedusaTrainer(heads, backbone, tokenizer, given, train)
    trainer.train()
    heads = heads.eval().requires_grad_(False)
    completions = Path(config.output) / "completions"
    moved = None
    if joint:
        trainer.save_model()
        path = str(directory / "backbone")
        completions = directory / "completions"
        backbone = load_model(path, device="cpu")
        _write(path, completions, Path(config.output), config, replayed=True)
        moved = _moved(config, target, backbone)
    heads.save_pretrained(directory / "heads" if not joint else directory)
    return {**_replayed(backbone, heads, completions), "moved": moved}


def _moved(config: BenchMedusaConfig, target: PreTrainedModel, backbone: PreTrainedModel) -> dict[str, float]:
    """Return how far a trained backbone's law is from the target's, on texts that the target sampled."""
    samples = load_completions(str(Path(config.output) / "completions" / "replayed-sampled"))
    distance = agreement = tokens = 0.0
    for ids, length in zip(samples["input_ids"], samples["prompt_length"], strict=True):
        with torch.no_grad():
            p, q = (model(torch.tensor([ids])).logits[0, length - 1 : -1].softmax(-1) for model in (target, backbone))
        distance += float((p - q).abs().sum()) / 2
        agreement += float((p.argmax(-1) == q.argmax(-1)).sum())
        tokens += len(p)
    return {"mean_total_variation": distance / tokens, "argmax_agreement": agreement / tokens}


def _replayed(target: PreTrainedModel, heads: MedusaHeads, completions: Path) -> dict[str, Any]:
    """Return, for each prompt, tokens and rounds of every kind of draft, and the heads' accuracies."""

    def ranks(side: str) -> list[TextRanks]:
        samples = load_completions(str(completions / side)).sort("id")
        pairs = zip(samples["input_ids"], samples["prompt_length"], strict=True)
        return [replay_ranks(target, heads, torch.tensor(ids), length) for ids, length in pairs if length < len(ids)]

    searched, check = ranks("searched"), ranks("replayed-greedy")
    reference = reference_tree(heads.config.num_heads)
    trees = {
        "chain": Tree.chain(heads.config.num_heads),
        "reference": reference,
        "searched": search_tree(searched, len(reference)),
    }
    found: dict[str, Any] = {
        name: {"tokens": [len(text) for text in check], "rounds": [text.rounds(tree) for text in check]}
        for name, tree in trees.items()
    }
    samples = load_completions(str(completions / "replayed-sampled")).sort("id")
    pairs = zip(samples["input_ids"], samples["prompt_length"], strict=True)
    sampler = Sampler.of(1)
    replayed = [replay_heads(target, heads, torch.tensor(ids), length, sampler) for ids, length in pairs]
    found["sampled"] = {"tokens": [len(r.acceptance) for r in replayed], "rounds": [r.rounds() for r in replayed]}
    found["accuracies"] = rank_accuracies(check)[:, :5].tolist()
    return found


def print_results(config: BenchMedusaConfig, results: dict[str, Any], console: Console) -> None:
    """Print τ of every variant, and its difference from the baseline's, paired over prompts; and top-1 accuracies."""
    table = Table("heads", "seeds", "top 1 of each head")
    for name in FIGURES:
        table.add_column(f"τ, {name}", justify="right")
        table.add_column(f"against {config.baseline}", justify="right")
    base = results.get(config.baseline)
    for variant, runs in results.items():
        if variant == "environment":
            continue
        tops = torch.tensor([run["accuracies"] for run in runs.values()])[:, :, 0].mean(0)
        cells = [variant, str(len(runs)), " ".join(f"{top:.3f}" for top in tops.tolist())]
        for name in FIGURES:
            own = _pooled(runs, name)
            cells.append(format_estimate(ratio(*own), ".3f"))
            gain = ""
            if base is not None and variant != config.baseline:
                gain = format_estimate(ratio_difference(*own, *_pooled(base, name)), "+.3f", spread="interval")
            cells.append(gain)
        table.add_row(*cells)
    console.print(table)
    for variant, runs in results.items():
        if variant != "environment":
            d = ratio_difference(*_pooled(runs, "searched"), *_pooled(runs, "reference"))
            gain = format_estimate(d, "+.3f", spread="interval")
            console.print(f"{variant}: the searched tree over the reference {gain}")
        moved = [run["moved"] for run in runs.values() if variant != "environment" and run["moved"]]
        if moved:
            parts = (f"{key.replace('_', ' ')} {sum(m[key] for m in moved) / len(moved):.3f}" for key in moved[0])
            console.print(f"{variant}: backbone against the target: {', '.join(parts)}")


def _pooled(runs: dict[str, Any], name: str) -> tuple[list[float], list[float]]:
    columns = [run[name] for run in runs.values()]
    tokens, rounds = (
        [sum(values) / len(columns) for values in zip(*(column[key] for column in columns), strict=True)]
        for key in ("tokens", "rounds")
    )
    return tokens, rounds


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, and print the table."""
    config = parse_config(BenchMedusaConfig, argv, prog="python -m draftsmith.scripts.bench.medusa")
    print_results(config, compare(config), Console(width=220))
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
