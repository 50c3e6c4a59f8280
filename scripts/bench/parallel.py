"""One forward for K tokens, or γ forwards for γ: parallel drafts beside plain ones after the same training time.

    python -m draftsmith.scripts.bench.parallel --output runs/parallel
    python -m draftsmith.scripts.bench.parallel --output runs/parallel --variants '[plain_stock,parallel_3]' --timed 16
    python -m draftsmith.scripts.bench.parallel --output runs/parallel --tree_nodes '[4,8]' --timed 16

Both kinds begin as the stock draft or carved from the target, and train on the same text for the same CPU seconds of
one thread, which other processes do not stretch. Each draft replays the same fresh prompts at T=0 and T=1. With
`--timed` every draft of every seed also decodes prompts, in turns with plain decoding: do that on a quiet machine. A
parallel draft may be larger, for its drafting time does not grow with γ as a plain one's does, so sizes are variants,
and each kind is to be judged at its best one. With `--tree_nodes` parallel drafts draft trees, too, searched on greedy
completions that are learned from nowhere. τ is pooled over the seeds, its interval is over prompts.
"""

import shutil
import sys
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from time import process_time
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from draftsmith.decode import (
    DraftModelProposer,
    ParallelDraftProposer,
    Proposer,
    Tree,
    autoregressive_generate,
    replay_acceptance,
    speculative_generate,
)
from draftsmith.decode.errors import at_least, one_of, require
from draftsmith.decode.measurement.intervals import rate_ratio, ratio
from draftsmith.decode.measurement.tree_search import choices_of, search_tree
from draftsmith.distill.__main__ import distill
from draftsmith.distill.config import DistillConfig
from draftsmith.scripts.bench.common import ASSETS, in_turns, run_benchmark
from draftsmith.scripts.bench.variants import VariantsConfig, compare, pooled, read_texts
from draftsmith.train.cli import parse_config, run
from draftsmith.train.data.corpus import stdlib_prompts
from draftsmith.train.data.examples import TrainingData
from draftsmith.train.models import load_model
from draftsmith.train.provenance import environment, write_json

STOCK = {"draft": str(ASSETS / "tiny-draft")}
LAYERS = (1, 2, 3, 4, 6)
VARIANTS: dict[str, dict[str, Any]] = {"plain_stock": STOCK, "parallel_stock": STOCK} | {
    f"{kind}_{layers}": {"init.layers": layers} for kind in ("plain", "parallel") for layers in LAYERS
}
VARIANTS |= {
    f"parallel_{layers}_near": {"init.layers": layers, "parallel": 4, "parallel_decay": 0.7} for layers in LAYERS
}
VARIANTS |= {
    "parallel_3_dense": {"init.layers": 3, "parallel": 4, "parallel_retention": 0.8},
    "parallel_3_answers": {"init.layers": 3, "prompt_loss": False},
}
CONFIG = Path(__file__).resolve().parents[2] / "configs/distill/tiny.yaml"
TEMPERATURES = ((0, "greedy"), (1, "sampled"))


@dataclass
class BenchParallelConfig(VariantsConfig):
    """Compare parallel and plain drafts of several sizes."""

    known = VARIANTS

    output: str = "runs/parallel"
    """Receives completions, drafts and results.json; a second run goes on from what is there."""
    variants: list[str] = field(default_factory=lambda: list(VARIANTS))
    """Which drafts: the stock draft (2 layers of 128) or so many of the target's layers, of 256."""
    seconds: float = 240.0
    """CPU seconds of training, of each draft; `NAME@STEPS` takes steps in their place."""
    learning_rate: float = 3e-3
    """The peak of a cosine with 10 steps of warm-up, for Muon on the matrices and AdamW on the rest."""
    train_prompts: int = 1920
    """Prompts whose completions are learned from, two thirds of them sampled, one third greedy."""
    divergence: str = "forward_kl"
    """What both kinds minimise."""
    bf16: bool = True
    """Train under bfloat16 autocast, with the target in bfloat16."""
    length: int = 8
    """K, the tokens that a parallel draft learns to propose in one forward."""
    draft_lengths: list[int] = field(default_factory=lambda: [1, 2, 3, 4, 6, 8])
    """γ of the replayed τ and of what is timed."""
    tree_nodes: list[int] = field(default_factory=list)
    """Nodes of the trees that parallel drafts draft besides chains; τ of those is replayed at T=0."""
    searched_prompts: int = 64
    """Further prompts from the training modules, whose greedy completions trees are searched on."""
    timed: int | None = None
    """Prompts that every draft decodes on the clock; none if not given."""
    max_new_tokens: int = 48
    """Tokens of a timed completion."""
    dtype: str = "bfloat16"
    """Weights and arithmetic of what is timed; replay is in float32."""
    compiled: bool = True
    """Compile the timed forwards, those of plain decoding too."""
    baseline: str = "plain_stock"
    """The draft that the others are compared with."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, at_least(1), "draft_lengths", "tree_nodes")
        require(self, one_of(("float32", "bfloat16")), "dtype")


def bench(config: BenchParallelConfig) -> dict[str, Any]:
    """Train and replay what is missing, time what was asked for, and return the results by variant and seed."""
    steps: dict[str, int] = {}
    searched = {"searched": stdlib_prompts(config.searched_prompts, heldout=False, seed=3)} if config.tree_nodes else {}
    results = compare(config, partial(_train_and_replay, config, steps), searched)
    _search_trees(config, results)
    if config.timed:
        results["timed"] = _timed(config, results)
        write_json(config.figures_path(), results)
    return results


def _train_and_replay(
    config: BenchParallelConfig,
    steps: dict[str, int],
    variant: str,
    seed: int,
    target: PreTrainedModel,
    train: TrainingData,
) -> dict[str, Any]:
    """Return by temperature and γ, for each prompt, the tokens and the expected rounds; and what training took."""
    if variant not in steps:
        given = variant.partition("@")[2]
        steps[variant] = int(given) if given else _steps_within(config, variant)
    directory = _directory(config, variant, seed)
    seconds = _distil(config, variant, seed, steps[variant], directory)
    proposer = _proposer(variant, load_model(str(directory), device="cpu").eval())
    results: dict[str, Any] = {"steps": steps[variant], "cpu_seconds": seconds}
    for temperature, side in TEMPERATURES:
        texts, lengths = read_texts(config.completions / f"replayed-{side}")
        proposable = _proposable(config, proposer)
        replay = replay_acceptance(target, proposer, texts, lengths, proposable, temperature)
        for k in proposable:
            tokens, rounds = replay.tokens_and_rounds(k)
            results[f"T={temperature} γ={k}"] = {"tokens": tokens, "rounds": rounds}
    return results


def _steps_within(config: BenchParallelConfig, variant: str) -> int:
    """Return how many steps of a variant fit into the time, by trying some."""
    directory = Path(config.output) / "calibration"
    few, more = (_distil(config, variant, 0, steps, directory) for steps in (4, 16))
    return max(1, round(config.seconds / ((more - few) / 12)))


def _distil(config: BenchParallelConfig, variant: str, seed: int, steps: int, directory: Path) -> float:
    """Train a draft from its start, and return the CPU seconds that it took."""
    shutil.rmtree(directory, ignore_errors=True)
    name = variant.partition("@")[0]
    fields: dict[str, Any] = {
        "completions": f"[{config.completions / 'sampled'}, {config.completions / 'greedy'}]",
        "heldout": "[]",
        "divergence": config.divergence,
        **({} if "draft" in VARIANTS[name] else {"draft": "null"}),
        **VARIANTS[name],
        "training.output_dir": directory,
        "training.max_steps": steps,
        "training.eval_strategy": "no",
        "training.eval_on_start": False,
        "training.save_strategy": "no",
        "training.load_best_model_at_end": False,
        "training.report_to": "[]",
        "training.disable_tqdm": True,
        "training.per_device_train_batch_size": config.batch_size,
        "training.learning_rate": config.learning_rate,
        "training.seed": seed,
        "training.use_cpu": True,
        "training.bf16": config.bf16,
        "target_dtype": "bfloat16" if config.bf16 else "float32",
    }
    if name.startswith("parallel"):
        fields = {"parallel": config.length} | fields
    flags = [f"--{key}={value}" for key, value in ({"target": config.target} | fields).items()]
    recipe = parse_config(DistillConfig, ["--config", str(CONFIG), *flags])
    start = process_time()
    distill(recipe)
    return process_time() - start


def _directory(config: BenchParallelConfig, variant: str, seed: int) -> Path:
    return Path(config.output) / f"{variant}-{seed}"


def _proposer(variant: str, draft: PreTrainedModel) -> Proposer:
    return ParallelDraftProposer(draft) if variant.startswith("parallel") else DraftModelProposer(draft)


def _trees_of(config: BenchParallelConfig, variant: str) -> list[str]:
    return [f"tree of {size}" for size in config.tree_nodes] if variant.startswith("parallel") else []


def _proposable(config: BenchParallelConfig, proposer: Proposer) -> list[int]:
    return [k for k in config.draft_lengths if proposer.longest is None or k <= proposer.longest]


def _search_trees(config: BenchParallelConfig, results: dict[str, Any]) -> None:
    """Search the trees of each parallel draft that are missing, and add them and their τ at T=0 to its results."""
    target = load_model(config.target, field="target", device="cpu")
    for variant, seed in product(config.variants, config.seeds):
        figures = results[variant][str(seed)]
        missing = [size for size in config.tree_nodes if f"tree of {size}" not in figures]
        if not variant.startswith("parallel") or not missing:
            continue
        drafter = ParallelDraftProposer(load_model(str(_directory(config, variant, seed)), device="cpu").eval())
        searched, check = (
            [drafter.ranks(target, *pair) for pair in zip(*read_texts(config.completions / side), strict=True)]
            for side in ("searched", "replayed-greedy")
        )
        for size in missing:
            tree = search_tree(searched, size)
            figures[f"tree of {size}"] = {
                "tokens": [len(text) for text in check],
                "rounds": [text.rounds(tree) for text in check],
            }
            figures.setdefault("choices", {})[f"tree of {size}"] = choices_of(tree)
        write_json(config.figures_path(), results)


def _timed(config: BenchParallelConfig, results: dict[str, Any]) -> dict[str, Any]:
    """Decode prompts by every draft, in turns with plain decoding, and return each one's speed-up by temperature."""
    target = load_model(config.target, field="target", device="cpu", dtype=config.dtype)
    target.generation_config = GenerationConfig(pad_token_id=target.config.get_text_config().pad_token_id)
    drafters: dict[tuple[str, int, str], tuple[Proposer, int]] = {}  # and γ
    for variant, seed in product(config.variants, config.seeds):
        draft = load_model(str(_directory(config, variant, seed)), device="cpu", dtype=config.dtype)
        chains = _proposer(variant, draft)
        drafters |= {(variant, seed, f"γ={k}"): (chains, k) for k in _proposable(config, chains)}
        for name in _trees_of(config, variant):
            tree = Tree.from_choices(results[variant][str(seed)]["choices"][name])
            drafters[variant, seed, name] = (ParallelDraftProposer(draft, tree), tree.depth)
    texts, lengths = read_texts(config.completions / "replayed-greedy")
    prompts = [text[None, :length] for text, length in zip(texts[: config.timed], lengths, strict=False)]
    figures: dict[str, Any] = {"environment": environment(target.device, config.dtype)}
    for temperature, _ in TEMPERATURES:
        options: dict[str, Any] = {
            "max_new_tokens": config.max_new_tokens,
            "do_sample": temperature > 0,
            "temperature": float(temperature or 1),
            "top_k": 0,
            "compiled": config.compiled,
        }
        methods: dict[Any, Any] = {"plain": partial(autoregressive_generate, target, **options)}
        for drafter, (proposer, k) in drafters.items():
            methods[drafter] = partial(speculative_generate, target, proposer, draft_length=k, **options)
        for decode in methods.values():  # which compiles
            decode(input_ids=prompts[0], seed=0)
        tokens: dict[Any, list[int]] = {name: [] for name in methods}
        seconds: dict[Any, list[float]] = {name: [] for name in methods}
        for turn, prompt in enumerate(prompts):
            calls = {name: partial(decode, input_ids=prompt, seed=turn) for name, decode in methods.items()}
            for name, (taken, out) in in_turns(calls, turn).items():
                tokens[name].append(out.sequences.numel() - prompt.numel())
                seconds[name].append(taken)
        plain = [tokens["plain"], seconds["plain"]]
        for variant, draft_name in dict.fromkeys((variant, name) for variant, _, name in drafters):
            runs = [(variant, seed, draft_name) for seed in config.seeds]
            summed = [
                [sum(values) for values in zip(*(of[run] for run in runs), strict=True)] for of in (tokens, seconds)
            ]
            figures.setdefault(f"{variant} {draft_name}", {})[f"T={temperature}"] = rate_ratio(*summed, *plain)
    return figures


def shown(config: BenchParallelConfig, results: dict[str, Any]) -> dict[str, Any]:
    """Return each variant's τ by temperature and γ, against the baseline's, and what was timed."""

    def row(runs: dict[str, Any]) -> dict[str, Any]:
        figures: dict[str, Any] = {"seeds": len(runs), "steps": next(iter(runs.values()))["steps"]}
        names = [f"T={temperature} γ={k}" for temperature, _ in TEMPERATURES for k in config.draft_lengths]
        for name in [*names, *(f"tree of {size}" for size in config.tree_nodes)]:
            if all(name in run for run in runs.values()):
                sums = pooled(runs, name)
                figures[name] = ratio(sums["tokens"], sums["rounds"])
        return figures

    timed = results.pop("timed", {})
    timed.pop("environment", None)
    return {"drafts": {name: row(runs) for name, runs in results.items()}, "speed-ups": timed}


if __name__ == "__main__":
    sys.exit(run(partial(run_benchmark, BenchParallelConfig, bench, shown)))
