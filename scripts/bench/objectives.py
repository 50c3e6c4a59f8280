"""What to minimise: drafts distilled by each objective from the same start, data, steps and optimizer, over seeds.

    python -m draftsmith.scripts.bench.objectives --output runs/objectives

Each draft replays the same fresh prompts at T=0 and T=1; τ is pooled over the seeds, its interval is over prompts.
TRL's `DistillationTrainer` (`pip install trl`) runs beside them with the same prompts, batches, steps, schedule and, so
that only the method differs, optimizer: names that begin with `trl`; those that end in `adamw` have the optimizer that
it brings along, at the same learning rate. What is done is kept, and a second run goes on.
"""

import sys
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from datasets import Dataset
from transformers import PreTrainedModel, TrainingArguments

from draftsmith.decode import DraftModelProposer, ParallelDraftProposer, replay_acceptance
from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement.intervals import ratio
from draftsmith.distill.config import DistillConfig
from draftsmith.distill.parallel.model import make_parallel
from draftsmith.distill.parallel.trainer import ParallelTrainer
from draftsmith.distill.trainer import DistillTrainer
from draftsmith.scripts.bench.common import ASSETS, run_benchmark
from draftsmith.scripts.bench.variants import VariantsConfig, compare, pooled, read_texts, taus
from draftsmith.train.cli import run
from draftsmith.train.data.examples import TrainingData
from draftsmith.train.data.generate import load_completions
from draftsmith.train.models import load_model, load_tokenizer
from draftsmith.train.optimizer import MuonAdamW

STOCK = "stock"
VARIANTS: dict[str, dict[str, Any]] = {
    STOCK: {},  # the draft as it is before any training
    "cross_entropy": {"divergence": "cross_entropy"},
    "forward_kl": {"divergence": "forward_kl"},
    "reverse_kl": {"divergence": "reverse_kl"},
    "jsd": {"divergence": "jsd"},
    "tvd": {"divergence": "tvd"},
    "expected_length": {"divergence": "expected_length"},
    "reached_tvd": {"divergence": "reached_tvd"},
    "skew_kl": {"divergence": "skew_kl"},
    "lk_hybrid": {"divergence": "lk_hybrid"},
    "lk_hybrid_eta_10": {"divergence": "lk_hybrid", "eta": 10.0},
    "lk_hybrid_batch": {"divergence": "lk_hybrid", "lk_alpha": "batch"},
    "nla": {"divergence": "nla"},
    "kl_to_tvd": {"divergence": "tvd", "curriculum": 0.5},
    "kl_to_expected_length": {"divergence": "expected_length", "curriculum": 0.5},
    "kl_to_reached_tvd": {"divergence": "reached_tvd", "curriculum": 0.5},
    "tvd_and_kl": {"divergence": {"tvd": 1.0, "forward_kl": 0.2}},
    "expected_length_and_kl": {"divergence": {"expected_length": 0.5, "forward_kl": 0.2}},
    "half_forward_kl": {"divergence": "forward_kl", "on_policy": 0.5},
    "half_tvd": {"divergence": "tvd", "on_policy": 0.5},
    "own_forward_kl": {"divergence": "forward_kl", "on_policy": 1.0},
    "own_reverse_kl": {"divergence": "reverse_kl", "on_policy": 1.0},
    "own_jsd": {"divergence": "jsd", "on_policy": 1.0},
    "own_tvd": {"divergence": "tvd", "on_policy": 1.0},
    "prompts_forward_kl": {"divergence": "forward_kl", "prompt_loss": True},
    "prompts_jsd": {"divergence": "jsd", "prompt_loss": True},
    "prompts_lk_hybrid": {"divergence": "lk_hybrid", "prompt_loss": True},
    "prompts_nla": {"divergence": "nla", "prompt_loss": True},
    "half_prompts_jsd": {"divergence": "jsd", "prompt_loss": True, "on_policy": 0.5},
    "half_prompts_tvd": {"divergence": "tvd", "prompt_loss": True, "on_policy": 0.5},
    "half_prompts_lk_hybrid": {"divergence": "lk_hybrid", "prompt_loss": True, "on_policy": 0.5},
    "half_prompts_nla": {"divergence": "nla", "prompt_loss": True, "on_policy": 0.5},
    "most_prompts_jsd": {"divergence": "jsd", "prompt_loss": True, "on_policy": 0.75},
    "own_prompts_skew_kl": {"divergence": "skew_kl", "prompt_loss": True, "on_policy": 1.0},
    "own_prompts_reverse_kl": {"divergence": "reverse_kl", "prompt_loss": True, "on_policy": 1.0},
    "own_prompts_jsd": {"divergence": "jsd", "prompt_loss": True, "on_policy": 1.0},
    "own_prompts_lk_hybrid": {"divergence": "lk_hybrid", "prompt_loss": True, "on_policy": 1.0},
    "own_prompts_nla": {"divergence": "nla", "prompt_loss": True, "on_policy": 1.0},
    "trl_forward_kl": {"beta": 0.0},
    "trl_jsd": {"beta": 0.5},
    "trl_reverse_kl": {"beta": 1.0},  # TRL's default
    "trl_forward_kl_adamw": {"beta": 0.0, "muon": False},
    "trl_reverse_kl_adamw": {"beta": 1.0, "muon": False},
}


@dataclass
class BenchObjectivesConfig(VariantsConfig):
    """Distil by several objectives side by side, and compare what their drafts have accepted."""

    known = VARIANTS

    output: str = "runs/objectives"
    """Receives completions, drafts and results.json; a second run goes on from what is there."""
    draft: str = str(ASSETS / "tiny-draft")
    """Where every draft starts."""
    variants: list[str] = field(default_factory=lambda: list(VARIANTS))
    """Which objectives; `NAME@STEPS` for other steps than `steps`."""
    learning_rate: float = 3e-3
    """The peak of a cosine with 10 steps of warm-up, for Muon on the matrices and AdamW on the rest."""
    draft_length: int = 4
    """γ of the replayed τ, and of the block objectives."""
    baseline: str = "forward_kl"
    """The objective that the others are compared with."""
    parallel: int | None = None
    """K: train drafts that draft so many tokens in one forward, and replay them so; plain drafts if not given."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.parallel and any(name.startswith(("trl", STOCK)) for name in [*self.variants, self.baseline]):
            raise InputError(f"variants: expected none of TRL's nor {STOCK} with parallel, which has no such draft")
        if self.parallel and self.draft_length > self.parallel:
            raise InputError(f"draft_length: expected at most parallel, {self.parallel}, found {self.draft_length}")


def bench(config: BenchObjectivesConfig) -> dict[str, Any]:
    """Run what is missing, and return the results by variant and seed."""
    return compare(config, partial(_train_and_replay, config))


def _train_and_replay(
    config: BenchObjectivesConfig, variant: str, seed: int, target: PreTrainedModel, train: TrainingData
) -> dict[str, dict[str, list[float]]]:
    """Return by temperature, for each prompt, the tokens, expected rounds and summed overlaps."""
    draft = load_model(config.draft, device="cpu")
    if variant != STOCK:
        _distil(config, variant, seed, draft.requires_grad_(True), target, train)
    draft.eval().requires_grad_(False)
    proposer = ParallelDraftProposer(draft) if config.parallel else DraftModelProposer(draft)
    results = {}
    for temperature, side in ((0, "greedy"), (1, "sampled")):
        texts, lengths = read_texts(config.completions / f"replayed-{side}")
        replay = replay_acceptance(target, proposer, texts, lengths, [config.draft_length], temperature)
        tokens, rounds = replay.tokens_and_rounds(config.draft_length)
        overlaps, _ = replay.overlaps_and_contexts()
        results[str(temperature)] = {"tokens": tokens, "rounds": rounds, "overlap": overlaps}
    return results


def _distil(
    config: BenchObjectivesConfig,
    variant: str,
    seed: int,
    draft: PreTrainedModel,
    target: PreTrainedModel,
    train: TrainingData,
) -> None:
    """Train a draft by one variant, ours or TRL's."""
    name, training = variant.partition("@")[0], config.training_arguments(variant, seed)
    options = dict(VARIANTS[name])
    optimizer = MuonAdamW(draft, config.learning_rate, 0.0) if options.pop("muon", True) else None
    tokenizer = load_tokenizer(config.draft)
    trainer: Any
    if name.startswith("trl"):
        try:
            from trl import DistillationConfig, DistillationTrainer  # type: ignore[attr-defined]
        except ImportError as error:
            raise InputError(
                "variants: expected trl to be installed for trl_* (pip install trl), found none"
            ) from error
        training |= {"temperature": 1.0, "max_completion_length": 96, "bf16": False, "gradient_checkpointing": False}
        prompts = []  # those of the same completions as text, cut to the same tokens
        for side in ("sampled", "greedy"):
            samples = load_completions(str(config.completions / side))
            pairs = zip(samples["input_ids"], samples["prompt_length"], strict=True)
            prompts += [tokenizer.decode(ids[:length]) for ids, length in pairs]
        trainer = DistillationTrainer(
            model=draft,
            teacher_model=target,
            args=DistillationConfig(**training, **options),
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=tokenizer,
            optimizers=(optimizer, None),
        )
    else:
        options = {"draft_length": config.draft_length, "on_policy_tokens": 96, **options}
        options["parallel"] = config.parallel or 0
        recipe = DistillConfig(
            config.target, ["-"], draft=config.draft, training=TrainingArguments(**training), **options
        )
        if config.parallel:
            make_parallel(draft, tokenizer, config.parallel)
        kind = ParallelTrainer if config.parallel else DistillTrainer
        trainer = kind(draft, target, tokenizer, recipe, train, optimizers=(optimizer, None))
    trainer.train()


def shown(config: BenchObjectivesConfig, results: dict[str, Any]) -> dict[str, Any]:
    """Return τ and α of every variant, and its τ against the baseline's, paired over prompts."""

    def row(runs: dict[str, Any], temperature: str) -> dict[str, Any]:
        sums = pooled(runs, temperature)
        seeds = [sum(run[temperature]["tokens"]) / sum(run[temperature]["rounds"]) for run in runs.values()]
        return {
            f"T={temperature} α": ratio(sums["overlap"], sums["tokens"]),
            **taus(config, results, runs, temperature, f"T={temperature}"),
            f"T={temperature} τ by seed": ", ".join(f"{tau:.3f}" for tau in seeds),
        }

    return {"objectives": {name: row(runs, "0") | row(runs, "1") for name, runs in results.items()}}


if __name__ == "__main__":
    sys.exit(run(partial(run_benchmark, BenchObjectivesConfig, bench, shown)))
