"""`python -m draftsmith.scripts.bench.teacher_cache`: what a teacher cache of the top k costs, and what it loses.

The target completes prompts from Python sources. For each k: bytes a token on disk; on held-out completions, against
full logits, how far the acceptance rate of the buckets lies above the true one and how far their forward KL below; and
a draft trained on the cache beside one trained with the target in memory, both replayed on full logits.
"""

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
from draftsmith.decode.sampling import Sampler
from draftsmith.distill.__main__ import distill
from draftsmith.distill.config import DistillConfig
from draftsmith.scripts.quickstart import STOCK, TARGET, write_prompts
from draftsmith.train.acceptance import replay_features
from draftsmith.train.cli import parse_config, run
from draftsmith.train.data.collator import CompletionCollator, training_examples
from draftsmith.train.data.corpus import code_prompts, stdlib_modules
from draftsmith.train.data.generate import PrepareConfig, prepare
from draftsmith.train.losses.objective import Objective
from draftsmith.train.models import load_model, load_tokenizer, tokenizer_size
from draftsmith.train.provenance import environment, write_json
from draftsmith.train.teacher.cache_reader import CachedCollator, cached_distributions, find_distributions
from draftsmith.train.teacher.cache_writer import CacheConfig, make_cache


@dataclass
class BenchTeacherCacheConfig:
    """Disk, bias and training of teacher caches of several k."""

    target: str = str(TARGET)
    """The target."""
    draft: str = str(STOCK)
    """The draft that is compared with it, and trained."""
    k: list[int] = field(default_factory=lambda: [8, 32, 128])
    """Tokens kept one by one."""
    train_prompts: int = 48
    """Prompts whose completions are trained on."""
    heldout_prompts: int = 24
    """Prompts whose completions are replayed."""
    max_new_tokens: int = 64
    """Tokens of a completion at most."""
    steps: int = 30
    """Training steps, of 8 samples, under the forward KL."""
    temperature: float = 1.0
    """The deployment's."""
    threads: int | None = None
    """CPU threads; torch's default if None."""
    output: str = "runs/bench/teacher-cache"
    """Receives prompts, completions, caches, drafts and figures.json."""

    def __post_init__(self) -> None:
        for name in ("train_prompts", "heldout_prompts", "max_new_tokens", "steps"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}: expected at least 1, found {getattr(self, name)}")
        if not self.k:
            raise InputError("k: expected at least one number, found none")


def bench(config: BenchTeacherCacheConfig, console: Console) -> dict[str, Any]:
    """Run the benchmark, print its table and return the figures."""
    if config.threads:
        torch.set_num_threads(config.threads)
    output = Path(config.output)
    completions = {}
    for side, count in (("train", config.train_prompts), ("heldout", config.heldout_prompts)):
        modules = [module for module in stdlib_modules() if module.heldout == (side == "heldout")]
        write_prompts(output / f"{side}.jsonl", code_prompts(modules, count))
        completions[side] = str(output / "completions" / side)
        prepare(
            PrepareConfig(
                config.target,
                str(output / f"{side}.jsonl"),
                completions[side],
                max_prompt_tokens=48,
                max_new_tokens=config.max_new_tokens,
                temperature=config.temperature,
            )
        )
    heldout = training_examples([completions["heldout"]])
    target = load_model(config.target)
    rows = []
    for k in config.k:
        cache = str(output / f"cache-{k}")
        summary = make_cache(
            CacheConfig(config.target, list(completions.values()), cache, k=k, temperature=config.temperature)
        )
        row: dict[str, Any] = {"k": k, "bytes_per_token": summary.bytes_per_token, "raw_bytes_per_token": 6 * k + 8}
        rows.append(row | bias(config, target, load_model(config.draft), heldout, completions["heldout"], cache))
    trained = {"stock": {"alpha": alpha(config, target, load_model(config.draft), heldout)}}
    for name, caches in {"live": [], **{f"k={k}": [str(output / f"cache-{k}")] for k in config.k}}.items():
        directory = output / f"draft-{name}"
        trainer = distill(
            DistillConfig(
                target=config.target,
                draft=config.draft,
                completions=[completions["train"]],
                temperature=config.temperature,
                teacher_cache=caches,
                resume=False,
                training=TrainingArguments(
                    output_dir=str(directory),
                    max_steps=config.steps,
                    per_device_train_batch_size=8,
                    learning_rate=1e-3,
                    logging_steps=config.steps,
                    save_strategy="no",
                    report_to=[],
                    seed=0,
                ),
            )
        )
        seconds = next(e["train_runtime"] for e in trainer.state.log_history if "train_runtime" in e)
        trained[name] = {
            "alpha": alpha(config, target, load_model(directory), heldout),
            "seconds_per_step": seconds / config.steps,
        }
    figures = {
        "environment": environment(target.device, "float32"),
        "config": vars(config),
        "positions": sum(label != -100 for labels in heldout["labels"] for label in labels),
        "caches": rows,
        "trained": trained,
    }
    _print(figures, console)
    write_json(output / "figures.json", figures)
    return figures


@torch.inference_mode()
def bias(
    config: BenchTeacherCacheConfig,
    target: PreTrainedModel,
    draft: PreTrainedModel,
    examples: Dataset,
    completions: str,
    cache: str,
) -> dict[str, float]:
    """Return, over held-out positions, what the cached laws change of α and of the forward KL, and its bound."""
    tokenizer = load_tokenizer(config.target)
    size = tokenizer_size(tokenizer)
    distributions = find_distributions(
        [cache], [completions], config.target, size, temperature=config.temperature, top_k=0, top_p=1.0
    )
    collate = CachedCollator(CompletionCollator(tokenizer), distributions)
    sampler, objective = Sampler.of(config.temperature), Objective({"forward_kl": 1.0}, config.temperature)
    gaps, bounds, losses = [], [], []
    for example in examples:
        bucket = cached_distributions(collate([example])["teacher"]).to(target.device)
        p, q, labels = _logits(target, draft, example, size)
        full, found = (replay_features(source, q, labels, sampler)[:, 1] for source in (p, bucket))
        q_tail = sampler.probabilities(q, []).scatter(1, bucket.ids.long(), 0.0).sum(-1)
        gaps.append(found - full)
        bounds.append(torch.minimum(bucket.log_tail.exp(), q_tail))
        losses.append(torch.cat([objective.features(source, q, labels) for source in (p, bucket)], dim=1))
    gap, bound, loss = torch.cat(gaps), torch.cat(bounds), torch.cat(losses)
    return {
        "alpha_gap_mean": float(gap.mean()),
        "alpha_gap_max": float(gap.max()),
        "bound_mean": float(bound.mean()),
        "bound_max": float(bound.max()),
        "over_bound_max": float((gap - bound).max()),
        "loss": float(loss[:, 0].mean()),
        "loss_change": float((loss[:, 0] - loss[:, 1]).mean().abs()),
        "loss_change_mean_abs": float((loss[:, 0] - loss[:, 1]).abs().mean()),
    }


@torch.inference_mode()
def alpha(config: BenchTeacherCacheConfig, target: PreTrainedModel, draft: PreTrainedModel, examples: Dataset) -> float:
    """Return the acceptance rate over held-out positions, from full logits."""
    sampler, size = Sampler.of(config.temperature), tokenizer_size(load_tokenizer(config.target))
    found = []
    for example in examples:
        p, q, labels = _logits(target, draft, example, size)
        found.append(replay_features(p, q, labels, sampler)[:, 1])
    return float(torch.cat(found).mean())


def _logits(
    target: PreTrainedModel, draft: PreTrainedModel, example: dict[str, list[int]], size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return both models' logits at a sample's loss positions, (N, V) each, and the tokens there, (N,)."""
    ids = torch.tensor(example["input_ids"], device=target.device)
    inside = torch.tensor([label != -100 for label in example["labels"][1:]], device=target.device)
    p, q = (model(ids[None], use_cache=False).logits[0, :-1, :size][inside] for model in (target, draft))
    return p, q, ids[1:][inside]


def _print(figures: dict[str, Any], console: Console) -> None:
    table = Table(title=f"teacher caches, on {figures['positions']} held-out positions against full logits")
    columns = {
        "k": "{k}",
        "B/token": "{bytes_per_token:.0f}",
        "raw": "{raw_bytes_per_token}",
        "α excess": "{alpha_gap_mean:.4f}",
        "max": "{alpha_gap_max:.3f}",
        "bound": "{bound_mean:.4f}",
        "max ": "{bound_max:.3f}",
        "KL": "{loss:.4f}",
        "|Δ KL|": "{loss_change:.4f}",
    }
    for column in columns:
        table.add_column(column, justify="right")
    for row in figures["caches"]:
        table.add_row(*(text.format(**row) for text in columns.values()))
    console.print(table)
    table = Table(title=f"{figures['config']['steps']} steps, then replayed on full logits")
    for column in ("trained from", "α", "s/step"):
        table.add_column(column, justify="left" if column == "trained from" else "right")
    for name, row in figures["trained"].items():
        seconds = row.get("seconds_per_step")
        table.add_row(name, f"{row['alpha']:.4f}", "" if seconds is None else f"{seconds:.2f}")
    console.print(table)


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the config and run."""
    bench(parse_config(BenchTeacherCacheConfig, argv, prog="draftsmith.scripts.bench.teacher_cache"), Console())


if __name__ == "__main__":
    sys.exit(run(main))
