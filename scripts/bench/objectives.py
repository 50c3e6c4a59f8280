"""What to minimise: drafts distilled by each objective from the same start, data, steps and optimizer, over seeds.

    python -m draftsmith.scripts.bench.objectives --output runs/objectives

Each draft replays the same fresh prompts at T=0 and T=1; τ is pooled over the seeds, its interval is over prompts.
TRL's `DistillationTrainer` (`pip install trl`) runs beside them with the same prompts, batches, steps, schedule and, so
that only the method differs, optimizer: names that begin with `trl`; those that end in `adamw` have the optimizer that
it brings along, at the same learning rate. What is done is kept, and a second run goes on.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel, TrainingArguments
from transformers.modeling_outputs import BaseModelOutputWithPast

from draftsmith.decode import DraftModelProposer, replay_acceptance
from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement.intervals import format_estimate, ratio, ratio_difference
from draftsmith.distill.config import DistillConfig
from draftsmith.distill.trainer import DistillTrainer
from draftsmith.scripts.bench.common import ASSETS
from draftsmith.train.cli import parse_config, run
from draftsmith.train.data.collator import training_examples
from draftsmith.train.data.corpus import code_prompts, stdlib_modules
from draftsmith.train.data.generate import PrepareConfig, load_completions, prepare
from draftsmith.train.models import load_model, load_tokenizer
from draftsmith.train.optimizer import MuonAdamW
from draftsmith.train.provenance import environment, write_json

Replays = dict[int, tuple[list[Tensor], list[int]]]
"""By temperature, for each prompt: prompt and completion, the length of the prompt, the target's law of the rest."""

VARIANTS: dict[str, dict[str, Any]] = {
    "cross_entropy": {"divergence": "cross_entropy"},
    "forward_kl": {"divergence": "forward_kl"},
    "reverse_kl": {"divergence": "reverse_kl"},
    "jsd": {"divergence": "jsd"},
    "tvd": {"divergence": "tvd"},
    "expected_length": {"divergence": "expected_length"},
    "reached_tvd": {"divergence": "reached_tvd"},
    "skew_kl": {"divergence": "skew_kl"},
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
    "half_prompts_jsd": {"divergence": "jsd", "prompt_loss": True, "on_policy": 0.5},
    "most_prompts_jsd": {"divergence": "jsd", "prompt_loss": True, "on_policy": 0.75},
    "own_prompts_skew_kl": {"divergence": "skew_kl", "prompt_loss": True, "on_policy": 1.0},
    "own_prompts_reverse_kl": {"divergence": "reverse_kl", "prompt_loss": True, "on_policy": 1.0},
    "own_prompts_jsd": {"divergence": "jsd", "prompt_loss": True, "on_policy": 1.0},
    "trl_forward_kl": {"beta": 0.0},
    "trl_jsd": {"beta": 0.5},
    "trl_reverse_kl": {"beta": 1.0},  # TRL's default
    "trl_forward_kl_adamw": {"beta": 0.0, "muon": False},
    "trl_reverse_kl_adamw": {"beta": 1.0, "muon": False},
}


@dataclass
class ObjectivesConfig:
    """Distil by several objectives side by side, and compare what their drafts have accepted."""

    output: str = "runs/objectives"
    """Receives completions, drafts and results.json."""
    target: str = str(ASSETS / "tiny-target")
    """The teacher."""
    draft: str = str(ASSETS / "tiny-draft")
    """Where every draft starts."""
    variants: list[str] = field(default_factory=lambda: list(VARIANTS))
    """Which of the objectives; `NAME@STEPS` for other steps than `steps`."""
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])
    """Seeds of the order of the data and of what drafts write."""
    steps: int = 120
    """Steps of each run."""
    batch_size: int = 16
    """Samples a step."""
    learning_rate: float = 3e-3
    """The peak of a cosine with 10 steps of warm-up, for Muon on the matrices and AdamW on the rest."""
    train_prompts: int = 640
    """Prompts whose completions are learned from, two thirds of them sampled, one third greedy."""
    replayed_prompts: int = 128
    """Fresh prompts from held-out modules."""
    draft_length: int = 4
    """γ of the replayed τ, and of the block objectives."""
    baseline: str = "forward_kl"
    """The variant that the others are compared with."""

    def __post_init__(self) -> None:
        for variant in [*self.variants, self.baseline]:
            name, _, steps = variant.partition("@")
            if name not in VARIANTS or (steps and not steps.isdecimal()):
                raise InputError(f"variants: expected NAME or NAME@STEPS out of {', '.join(VARIANTS)}, found {variant}")


def compare(config: ObjectivesConfig) -> dict[str, Any]:
    """Run what is missing, and return the results by variant and seed."""
    output = Path(config.output)
    prepare_texts(config)
    path = output / "results.json"
    results: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    target = load_model(config.target, field="target", device="cpu")
    replays = {
        temperature: _texts(output / "completions" / f"replayed-{name}")
        for temperature, name in ((0, "greedy"), (1, "sampled"))
    }
    train = training_examples([str(output / "completions" / side) for side in ("sampled", "greedy")])
    remember(target, train["input_ids"])
    if "stock" not in results:
        results["stock"] = {"0": _replayed(config, target, load_model(config.draft, device="cpu"), replays)}
        write_json(path, results)
    for seed in config.seeds:
        for variant in config.variants:
            if str(seed) in results.get(variant, {}):
                continue
            print(f"{variant}, seed {seed}", flush=True)
            draft = _distilled(config, variant, seed, target, train)
            results.setdefault(variant, {})[str(seed)] = _replayed(config, target, draft, replays)
            results["environment"] = environment(target.device, "float32")
            write_json(path, results)
    return results


def prepare_texts(config: ObjectivesConfig) -> None:
    """Have the target write what drafts or heads learn from, and what they replay."""
    modules = stdlib_modules()
    train = code_prompts([m for m in modules if not m.heldout], config.train_prompts)
    fresh = code_prompts([m for m in modules if m.heldout], config.replayed_prompts, seed=2)
    sampled = len(train) * 2 // 3
    for name, records, temperature, tokens in (
        ("sampled", train[:sampled], 1, 96),
        ("greedy", train[sampled:], 0, 96),
        ("replayed-sampled", fresh, 1, 64),
        ("replayed-greedy", fresh, 0, 64),
    ):
        prompts = Path(config.output) / "prompts" / f"{name}.jsonl"
        prompts.parent.mkdir(parents=True, exist_ok=True)
        prompts.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        prepare(
            PrepareConfig(
                config.target,
                str(prompts),
                str(Path(config.output) / "completions" / name),
                temperature=temperature,
                max_prompt_tokens=48,
                max_new_tokens=tokens,
                batch_size=64,
            )
        )


def _texts(directory: Path) -> tuple[list[Tensor], list[int]]:
    # Ordered by id, so that every temperature has the same prompts in the same places.
    samples = load_completions(str(directory)).sort("id")
    return [torch.tensor(row) for row in samples["input_ids"]], list(samples["prompt_length"])


def remember(target: PreTrainedModel, rows: list[list[int]]) -> None:
    """Keep the target's hidden states of some texts, which every run asks for, from the first time on."""
    decoder: Any = target.get_decoder()
    original, wanted = decoder.forward, {tuple(row) for row in rows}
    known: dict[tuple[int, ...], Tensor] = {}

    def forward(input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        lengths = [input_ids.shape[1]] * len(input_ids) if attention_mask is None else attention_mask.sum(1).tolist()
        keys = [tuple(ids[:n].tolist()) for ids, n in zip(input_ids, lengths, strict=True)]
        if all(key in known for key in keys):
            hidden = torch.nn.utils.rnn.pad_sequence([known[key] for key in keys], batch_first=True)
            return BaseModelOutputWithPast(last_hidden_state=hidden)
        output = original(input_ids=input_ids, attention_mask=attention_mask, **kwargs)
        for key, states in zip(keys, output.last_hidden_state, strict=True):
            if key in wanted:
                known[key] = states[: len(key)].clone()
        return output

    decoder.forward = forward


def _replayed(
    config: ObjectivesConfig, target: PreTrainedModel, draft: PreTrainedModel, replays: Replays
) -> dict[str, dict[str, list[float]]]:
    """Return by temperature, for each prompt, the tokens, expected rounds and summed overlaps."""
    found = {}
    for temperature, (texts, lengths) in replays.items():
        replay = replay_acceptance(
            target, DraftModelProposer(draft.eval()), texts, lengths, [config.draft_length], temperature
        )
        tokens, rounds = replay.tokens_and_rounds(config.draft_length)
        overlaps = [text.overlap for text in replay.texts]
        found[str(temperature)] = {"tokens": tokens, "rounds": rounds, "overlap": overlaps}
    return found


def _distilled(
    config: ObjectivesConfig, variant: str, seed: int, target: PreTrainedModel, train: Dataset
) -> PreTrainedModel:
    name, _, steps = variant.partition("@")
    directory = Path(config.output) / f"{variant}-{seed}"
    training: dict[str, Any] = {
        "output_dir": str(directory),
        "max_steps": int(steps or config.steps),
        "per_device_train_batch_size": config.batch_size,
        "learning_rate": config.learning_rate,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 10,
        "max_grad_norm": 1.0,
        "save_strategy": "no",
        "logging_steps": 20,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "seed": seed,
    }
    if name.startswith("trl"):
        return _distilled_by_trl(config, training, target, **VARIANTS[name])
    options = {"draft_length": config.draft_length, "on_policy_tokens": 96, **VARIANTS[name]}
    options |= {"target": config.target, "draft": config.draft, "completions": ["-"]}
    given = DistillConfig(training=TrainingArguments(**training), **options)
    draft = load_model(config.draft, device="cpu").requires_grad_(True)
    muon = MuonAdamW(draft, config.learning_rate, 0.0)
    trainer = DistillTrainer(draft, target, load_tokenizer(config.draft), given, train, optimizers=(muon, None))
    trainer.train()
    return draft.requires_grad_(False)


def _distilled_by_trl(
    config: ObjectivesConfig, training: dict[str, Any], target: PreTrainedModel, beta: float, muon: bool = True
) -> PreTrainedModel:
    try:
        from trl import DistillationConfig, DistillationTrainer  # type: ignore[attr-defined]
    except ImportError as error:
        raise InputError("variants: expected trl to be installed for trl_* (pip install trl), found none") from error
    draft = load_model(config.draft, device="cpu").requires_grad_(True)
    args = DistillationConfig(
        **training,
        beta=beta,
        temperature=1.0,
        max_completion_length=96,
        bf16=False,
        gradient_checkpointing=False,
    )
    trainer = DistillationTrainer(
        model=draft,
        teacher_model=target,
        args=args,
        train_dataset=_trl_prompts(config.output, config.target),
        processing_class=load_tokenizer(config.draft),
        optimizers=(MuonAdamW(draft, config.learning_rate, 0.0) if muon else None, None),
    )
    trainer.train()
    return draft.requires_grad_(False)


@cache
def _trl_prompts(output: str, target: str) -> Dataset:
    """Return the prompts of the training completions as text, cut to the same tokens."""
    tokenizer = load_tokenizer(target)
    texts = []
    for side in ("sampled", "greedy"):
        samples = load_completions(str(Path(output) / "completions" / side))
        pairs = zip(samples["input_ids"], samples["prompt_length"], strict=True)
        texts += [tokenizer.decode(ids[:length]) for ids, length in pairs]
    return Dataset.from_dict({"prompt": texts})


def print_results(config: ObjectivesConfig, results: dict[str, Any], console: Console) -> None:
    """Print τ and α of every variant, and its τ against the baseline's, paired over prompts."""
    table = Table("objective", "seeds")
    for temperature in ("0", "1"):
        for column in ("α", "τ", f"against {config.baseline}", "τ by seed"):
            table.add_column(f"T={temperature}: {column}", justify="right")
    done = {name: runs for name, runs in results.items() if name != "environment"}
    for name, runs in done.items():
        cells = [name, str(len(runs))]
        for temperature in ("0", "1"):
            pooled = _pooled(runs, temperature)
            base = _pooled(results[config.baseline], temperature) if config.baseline in results else None
            tau, alpha = ratio(pooled["tokens"], pooled["rounds"]), ratio(pooled["overlap"], pooled["tokens"])
            gain = ""
            if base is not None and name != config.baseline:
                # Rates of other seeds' sums: the same prompts, each as often as there are seeds.
                d = ratio_difference(pooled["tokens"], pooled["rounds"], base["tokens"], base["rounds"])
                gain = format_estimate(d, "+.3f", spread="interval")
            seeds = [sum(r[temperature]["tokens"]) / sum(r[temperature]["rounds"]) for r in runs.values()]
            cells += [format_estimate(alpha, ".3f", spread="none"), format_estimate(tau, ".3f"), gain]
            cells += [", ".join(f"{s:.3f}" for s in seeds)]
        table.add_row(*cells)
    console.print(table)


def _pooled(runs: dict[str, Any], temperature: str) -> dict[str, list[float]]:
    columns = [run[temperature] for run in runs.values()]
    return {
        name: [sum(values) / len(columns) for values in zip(*(c[name] for c in columns), strict=True)]
        for name in ("tokens", "rounds", "overlap")
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, and print the table."""
    config = parse_config(ObjectivesConfig, argv, prog="python -m draftsmith.scripts.bench.objectives")
    print_results(config, compare(config), Console(width=200))
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
