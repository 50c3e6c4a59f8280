"""Which heads: soft or hard labels, Medusa, Hydra or EAGLE-3, backbone frozen or not; from the same data, over seeds.

    python -m draftsmith.scripts.bench.medusa --output runs/medusa-bench

Every variant's heads replay the same fresh prompts of held-out modules: τ at T=0 of a chain, of Medusa's reference tree
and of a tree as large that was searched on other prompts; the accuracy of each head on those texts; τ of the chain at
T=1. A backbone that was trained writes the texts anew, and is compared with what it was. τ is pooled over the seeds,
its interval is over prompts. What is done is kept, and a second run goes on.
"""

import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, TrainingArguments

from draftsmith.decode.measurement.tree_search import rank_accuracies, reference_tree, search_tree
from draftsmith.decode.replay.ranks import MOST_RANKS, TextRanks
from draftsmith.decode.replay.texts import WrittenText
from draftsmith.decode.sampling import Sampler
from draftsmith.decode.tree import Tree
from draftsmith.medusa.eagle.config import EagleTrainingConfig
from draftsmith.medusa.eagle.heads import EagleHeads
from draftsmith.medusa.eagle.initial import new_heads
from draftsmith.medusa.eagle.replay import eagle_acceptance, eagle_ranks
from draftsmith.medusa.eagle.trainer import EagleTrainer
from draftsmith.medusa.heads.config import MedusaTrainingConfig
from draftsmith.medusa.heads.model import MedusaHeads
from draftsmith.medusa.heads.replay import ReplayedHeads, replay_heads, replay_ranks
from draftsmith.medusa.heads.trainer import MedusaTrainer
from draftsmith.scripts.bench.common import run_benchmark
from draftsmith.scripts.bench.variants import (
    VariantsConfig,
    compare,
    complete,
    pooled,
    read_texts,
    tau_difference,
    taus,
)
from draftsmith.train.cli import run
from draftsmith.train.data.corpus import stdlib_prompts
from draftsmith.train.data.examples import TrainingData
from draftsmith.train.losses.output_head import head_of, text_states
from draftsmith.train.models import load_model, load_tokenizer

NUM_HEADS = 4
VARIANTS: dict[str, dict[str, Any]] = {
    "soft": {},
    "hard": {"divergence": "cross_entropy", "prompt_loss": False},
    "hard_prompts": {"divergence": "cross_entropy"},
    "soft_and_hard": {"divergence": {"forward_kl": 0.5, "cross_entropy": 0.5}},
    "jsd": {"divergence": "jsd"},
    "tvd": {"divergence": "tvd"},
    "lk_hybrid": {"divergence": "lk_hybrid"},
    "lk_hybrid_batch": {"divergence": "lk_hybrid", "lk_alpha": "batch"},
    "nla": {"divergence": "nla"},
    "nla_and_soft": {"divergence": {"nla": 1.0, "forward_kl": 0.2}},
    "soft_answers": {"prompt_loss": False},
    "hydra": {"hydra": True},
    "hydra_hard": {"hydra": True, "divergence": "cross_entropy", "prompt_loss": False},
    "shared": {"lm_heads": "shared"},
    "frozen_lm_heads": {"train_lm_heads": False},
    "two_blocks": {"num_layers": 2},
    "even_weights": {"decay": 1.0},
    "medusa2": {"backbone": "lora"},
    "eagle": {"num_steps": NUM_HEADS},
    "eagle_random": {"num_steps": NUM_HEADS, "init": "random"},
}


@dataclass
class BenchMedusaConfig(VariantsConfig):
    """Train heads in several ways side by side, and compare what is accepted of them."""

    known = VARIANTS

    output: str = "runs/medusa-bench"
    """Receives completions, heads and results.json; a second run goes on from what is there."""
    variants: list[str] = field(default_factory=lambda: ["soft", "hard", "hydra", "medusa2"])
    """Which variants; `NAME@STEPS` for other steps than `steps`."""
    learning_rate: float = 1e-2
    """The heads', with AdamW: the peak of a cosine with 10 steps of warm-up."""
    backbone_learning_rate: float = 3e-4
    """The backbone's, where it is trained."""
    searched_prompts: int = 128
    """Further prompts from the training modules, whose greedy completions trees are searched on."""
    baseline: str = "soft"
    """The variant that the others are compared with."""


def bench(config: BenchMedusaConfig) -> dict[str, Any]:
    """Run what is missing, and return the results by variant and seed."""
    searched = stdlib_prompts(config.searched_prompts, heldout=False, seed=3)
    return compare(config, partial(_train_and_replay, config), {"searched": searched})


def _train_and_replay(
    config: BenchMedusaConfig, variant: str, seed: int, target: PreTrainedModel, train: TrainingData
) -> dict[str, Any]:
    """Train the heads, and the backbone where the variant does, and return the figures of the replay."""
    options: dict[str, Any] = {"prompt_loss": True, **VARIANTS[variant.partition("@")[0]]}
    arguments, joint = config.training_arguments(variant, seed), "backbone" in options
    if "num_steps" in options:
        return _eagle(config, options, arguments, target, train)
    directory, completions = Path(arguments["output_dir"]), config.completions
    if joint:
        arguments["learning_rate"] = config.backbone_learning_rate
    recipe = MedusaTrainingConfig(
        config.target,
        ["-"],
        training=TrainingArguments(**arguments),
        head_learning_rate_multiplier=config.learning_rate / config.backbone_learning_rate,
        warmup_heads=0.3 if joint else 0.0,
        **options,
    )
    heads = MedusaHeads.of_target(
        target,
        NUM_HEADS,
        num_hidden_layers=recipe.num_layers,
        original_lm_head=recipe.lm_heads == "shared",
        hydra=recipe.hydra,
        base_model_name_or_path=config.target,
    )
    backbone = load_model(config.target, device="cpu") if joint else target
    trainer = MedusaTrainer(heads, backbone, load_tokenizer(config.target), recipe, train)
    trainer.train()
    heads, moved = heads.eval().requires_grad_(False), None
    if joint:
        trainer.save_model()
        path, completions = str(directory / "backbone"), directory / "completions"
        backbone = load_model(path, device="cpu")
        complete(config, ("searched", "replayed-greedy", "replayed-sampled"), path, completions)
        moved = _moved(config, target, backbone)
    heads.save_pretrained(directory / "heads" if not joint else directory)
    return {**_replayed(MedusaReplay(backbone, heads), completions), "moved": moved}


def _eagle(
    config: BenchMedusaConfig,
    options: dict[str, Any],
    arguments: dict[str, Any],
    target: PreTrainedModel,
    train: TrainingData,
) -> dict[str, Any]:
    """Train EAGLE-3 heads in place of Medusa's; as `_train_and_replay`."""
    recipe = EagleTrainingConfig(config.target, ["-"], training=TrainingArguments(**arguments), **options)
    heads = new_heads(recipe, target)
    EagleTrainer(heads, target, load_tokenizer(config.target), recipe, train).train()
    heads.eval().requires_grad_(False)
    heads.save_pretrained(Path(arguments["output_dir"]) / "heads")
    return {**_replayed(EagleReplay(target, heads), config.completions), "moved": None}


@dataclass(frozen=True)
class MedusaReplay:
    """Replays chains and trees of Medusa heads."""

    target: PreTrainedModel
    heads: MedusaHeads

    def ranks(self, ids: Tensor, length: int) -> TextRanks:
        """Return the ranks of a text's tokens among each guess's logits."""
        return replay_ranks(self.target, self.heads, ids, length)

    def rounds(self, ids: Tensor, length: int) -> tuple[int, float]:
        """Return the tokens of a text that was sampled at T=1, and the expected rounds of chains."""
        replay = replay_heads(self.target, self.heads, ids, length, Sampler.of(1))
        return len(replay.acceptance), replay.rounds()


@dataclass(frozen=True)
class EagleReplay:
    """The same of EAGLE-3 heads."""

    target: PreTrainedModel
    heads: EagleHeads

    def ranks(self, ids: Tensor, length: int) -> TextRanks:
        """Return the ranks of a text's tokens among each step's logits."""
        text = WrittenText(ids, length, len(ids) - length)
        return eagle_ranks(self.target, self.heads, text, Sampler.of(0), [MOST_RANKS] * NUM_HEADS)

    def rounds(self, ids: Tensor, length: int) -> tuple[int, float]:
        """Return the tokens of a text that was sampled at T=1, and the expected rounds of chains."""
        text, head = WrittenText(ids, length, len(ids) - length), head_of(self.target)
        p_NV = head(text_states(self.target, ids, length)).softmax(-1)
        found = eagle_acceptance(self.target, self.heads, text, Sampler.of(1), p_NV, NUM_HEADS)
        return len(text), ReplayedHeads(*found).rounds()


def _moved(config: BenchMedusaConfig, target: PreTrainedModel, backbone: PreTrainedModel) -> dict[str, float]:
    """Return how far a trained backbone's distributions are from the target's, on texts that the target sampled."""
    distance = agreement = tokens = 0.0
    for ids, length in zip(*read_texts(config.completions / "replayed-sampled"), strict=True):
        with torch.no_grad():
            p, q = (model(ids[None]).logits[0, length - 1 : -1].softmax(-1) for model in (target, backbone))
        distance += float((p - q).abs().sum()) / 2
        agreement += float((p.argmax(-1) == q.argmax(-1)).sum())
        tokens += len(p)
    return {"mean_total_variation": distance / tokens, "argmax_agreement": agreement / tokens}


def _replayed(replay: MedusaReplay | EagleReplay, completions: Path) -> dict[str, Any]:
    """Return, for each prompt, tokens and rounds of every kind of draft, and the heads' accuracies."""

    def ranks(side: str) -> list[TextRanks]:
        pairs = zip(*read_texts(completions / side), strict=True)
        return [replay.ranks(ids, length) for ids, length in pairs if length < len(ids)]

    searched, check = ranks("searched"), ranks("replayed-greedy")
    reference = reference_tree(NUM_HEADS)
    trees = {
        "chain": Tree.chain(NUM_HEADS),
        "reference": reference,
        "searched": search_tree(searched, len(reference)),
    }
    results: dict[str, Any] = {
        name: {"tokens": [len(text) for text in check], "rounds": [text.rounds(tree) for text in check]}
        for name, tree in trees.items()
    }
    sampled = zip(*read_texts(completions / "replayed-sampled"), strict=True)
    tokens, rounds = zip(*(replay.rounds(ids, length) for ids, length in sampled), strict=True)
    results["sampled"] = {"tokens": list(tokens), "rounds": list(rounds)}
    results["accuracies"] = rank_accuracies(check)[:, :5].tolist()
    return results


def shown(config: BenchMedusaConfig, results: dict[str, Any]) -> dict[str, Any]:
    """Return τ of every variant, and its difference from the baseline's, paired over prompts; and top-1 accuracies."""

    def row(runs: dict[str, Any]) -> dict[str, Any]:
        tops = torch.tensor([run["accuracies"] for run in runs.values()])[:, :, 0].mean(0)
        row: dict[str, Any] = {"top 1 of each head": " ".join(f"{top:.3f}" for top in tops.tolist())}
        for name in ("chain", "reference", "searched", "sampled"):
            row |= taus(config, results, runs, name, name)
        row["searched over reference"] = tau_difference(pooled(runs, "searched"), pooled(runs, "reference"))
        moved = [run["moved"] for run in runs.values() if run["moved"]]
        return row | {key: sum(distances[key] for distances in moved) / len(moved) for key in (moved or [{}])[0]}

    return {"heads": {variant: row(runs) for variant, runs in results.items()}}


if __name__ == "__main__":
    sys.exit(run(partial(run_benchmark, BenchMedusaConfig, bench, shown)))
