"""`python -m draftsmith.scripts.bench.teacher_cache`: what a teacher cache of the top k costs, and what it loses.

The target completes prompts from Python sources. For each k: bytes a token on disk; on held-out completions, against
full logits, how far the acceptance rate of the buckets lies above the true one and how far their forward KL below; and
a draft trained on the cache beside one trained with the target in memory, both replayed on full logits.
"""

import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, TrainingArguments

from draftsmith.decode import DraftModelProposer, replay_acceptance
from draftsmith.decode.errors import require_some
from draftsmith.decode.sampling import Sampler
from draftsmith.distill.__main__ import distill
from draftsmith.distill.config import DistillConfig
from draftsmith.scripts.bench.common import PairConfig, complete_prompts, read_texts, run_benchmark, training_fields
from draftsmith.train.cli import run
from draftsmith.train.data.collator import CompletionCollator, training_examples
from draftsmith.train.data.corpus import stdlib_prompts, write_prompts
from draftsmith.train.losses.objective import Objective
from draftsmith.train.models import load_model, load_tokenizer, tokenizer_size
from draftsmith.train.provenance import environment
from draftsmith.train.replay_metrics import replay_features
from draftsmith.train.teacher.cache_reader import CachedCollator, cached_distributions, find_distributions
from draftsmith.train.teacher.cache_writer import CacheConfig, make_cache


@dataclass
class BenchTeacherCacheConfig(PairConfig):
    """Disk, bias and training of teacher caches of several k."""

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
    output: str = "runs/bench/teacher-cache"
    """Receives prompts, completions, caches, drafts and figures.json."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_some(self, "k", "number")

    def figures_path(self) -> Path:
        """Return where the figures are written."""
        return Path(self.output) / "figures.json"

    def completions(self, side: str) -> str:
        """Return the directory of the completions to train on ("train"), or of the held-out ones ("heldout")."""
        return str(Path(self.output) / "completions" / side)

    def cache(self, k: int) -> str:
        """Return the directory of a teacher cache."""
        return str(Path(self.output) / f"cache-{k}")


def bench(config: BenchTeacherCacheConfig) -> dict[str, Any]:
    """Run the benchmark and return the figures."""
    for side, count in (("train", config.train_prompts), ("heldout", config.heldout_prompts)):
        prompts = Path(config.output) / f"{side}.jsonl"
        write_prompts(prompts, stdlib_prompts(count, heldout=side == "heldout"))
        options = {"temperature": config.temperature, "max_new_tokens": config.max_new_tokens}
        complete_prompts(config.target, prompts, Path(config.completions(side)), **options)
    target, stock = load_model(config.target), load_model(config.draft)
    caches = []
    for k in config.k:
        both = [config.completions(side) for side in ("train", "heldout")]
        cache = CacheConfig(config.target, both, config.cache(k), k=k, temperature=config.temperature, dtype="float32")
        summary = make_cache(cache)
        size: dict[str, Any] = {"k": k, "bytes_per_token": summary.bytes_per_token, "raw_bytes_per_token": 6 * k + 8}
        caches.append(size | bias(config, target, stock, config.cache(k)))
    trained = {"stock": {"alpha": alpha(config, target, stock)}}
    for name, directories in {"live": [], **{f"k={k}": [config.cache(k)] for k in config.k}}.items():
        directory = Path(config.output) / f"draft-{name}"
        trainer = distill(
            DistillConfig(
                target=config.target,
                target_dtype="float32",
                draft=config.draft,
                completions=[config.completions("train")],
                temperature=config.temperature,
                teacher_cache=directories,
                resume=False,
                training=TrainingArguments(**training_fields(directory, config.steps, 8, 1e-3, seed=0)),
            )
        )
        seconds = next(entry["train_runtime"] for entry in trainer.state.log_history if "train_runtime" in entry)
        rate = alpha(config, target, load_model(directory))
        trained[name] = {"alpha": rate, "seconds_per_step": seconds / config.steps}
    heldout = zip(*read_texts(Path(config.completions("heldout"))), strict=True)
    return {
        "environment": environment(target.device, "float32"),
        "config": vars(config),
        "positions": sum(len(text) - prompt for text, prompt in heldout),
        "caches": caches,
        "trained": trained,
    }


@torch.inference_mode()
def bias(
    config: BenchTeacherCacheConfig, target: PreTrainedModel, draft: PreTrainedModel, cache: str
) -> dict[str, float]:
    """Return, over held-out positions, what a cache changes of α and of the forward KL, and its bound."""
    tokenizer = load_tokenizer(config.target)
    size, heldout = tokenizer_size(tokenizer), config.completions("heldout")
    distributions = find_distributions(
        [cache], [heldout], config.target, size, temperature=config.temperature, top_k=0, top_p=1.0
    )
    collate = CachedCollator(CompletionCollator(tokenizer), distributions)
    sampler, objective = Sampler.of(config.temperature), Objective({"forward_kl": 1.0}, config.temperature)
    gaps, bounds, losses = [], [], []
    for example in training_examples([heldout]):
        ids = torch.tensor(example["input_ids"], device=target.device)
        inside = torch.tensor([label != -100 for label in example["labels"][1:]], device=target.device)
        p, q = (model(ids[None], use_cache=False).logits[0, :-1, :size][inside] for model in (target, draft))
        bucket = cached_distributions(collate([example])["teacher"]).to(target.device)
        labels = ids[1:][inside]
        full, cached = (replay_features(source, q, labels, sampler)[:, 1] for source in (p, bucket))
        q_tail = sampler.probabilities(q, []).scatter(1, bucket.ids.long(), 0.0).sum(-1)
        gaps.append(cached - full)
        bounds.append(torch.minimum(bucket.log_tail.exp(), q_tail))
        losses.append(torch.cat([objective.features(source, q, labels) for source in (p, bucket)], dim=1))
    gap, bound, loss = torch.cat(gaps), torch.cat(bounds), torch.cat(losses)
    change = loss[:, 0] - loss[:, 1]
    return {
        "alpha_gap_mean": float(gap.mean()),
        "alpha_gap_max": float(gap.max()),
        "bound_mean": float(bound.mean()),
        "bound_max": float(bound.max()),
        "over_bound_max": float((gap - bound).max()),
        "loss": float(loss[:, 0].mean()),
        "loss_change": float(change.mean().abs()),
        "loss_change_mean_abs": float(change.abs().mean()),
    }


def alpha(config: BenchTeacherCacheConfig, target: PreTrainedModel, draft: PreTrainedModel) -> float:
    """Return the acceptance rate over held-out positions, from full logits."""
    texts, lengths = read_texts(Path(config.completions("heldout")))
    rate = replay_acceptance(target, DraftModelProposer(draft), texts, lengths, [1], config.temperature).alpha
    return float(rate.value or 0.0)


if __name__ == "__main__":
    sys.exit(run(partial(run_benchmark, BenchTeacherCacheConfig, bench)))
