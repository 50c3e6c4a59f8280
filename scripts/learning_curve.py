"""`draftsmith learning-curve --run configs/distill/tiny.yaml --output runs/curve`: how much text is enough?

It runs the recipe on shares of its completions, one after the other, and replays what each left on the held-out
completions of the run. A curve through their τ says what more text would bring.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from transformers import PreTrainedModel

from draftsmith.decode import Proposer, Tree, replay_acceptance
from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement.intervals import Estimate, format_estimate
from draftsmith.decode.measurement.learning_curve import LearningCurve, learning_curve
from draftsmith.distill.config import DistillConfig
from draftsmith.medusa import MedusaHeads, MedusaProposer
from draftsmith.medusa.eagle.heads import EagleHeads
from draftsmith.medusa.eagle.proposer import EagleProposer
from draftsmith.scripts.cli import config_class, launcher_flags
from draftsmith.scripts.configs import LearningCurveConfig
from draftsmith.scripts.pair import PARALLEL, DrafterSpec, load_pair
from draftsmith.scripts.report.charts import value_of
from draftsmith.scripts.summary import print_summary
from draftsmith.train.cli import parse_config, run
from draftsmith.train.data.generate import load_completions
from draftsmith.train.files import require_writable
from draftsmith.train.launch import read_data
from draftsmith.train.models import load_tokenizer
from draftsmith.train.provenance import write_json
from draftsmith.train.recipe import RecipeConfig

SCHEMA = "draftsmith.learning_curve/1"


def measure_curve(config: LearningCurveConfig) -> dict[str, Any]:
    """Train and replay what is missing, and return what learning_curve.json holds.

    Raises:
        InputError: a run without held-out directories or with a target that is trained, an output of other
            settings, or a training run that failed.
    """
    output = require_writable(config.output)
    path = output / "learning_curve.json"
    settings = {**asdict(config), "run": Path(config.run).read_text("utf-8") if Path(config.run).is_file() else ""}
    settings = {name: settings[name] for name in ("run", "recipe", "flags", "draft_length")}
    known: dict[str, Any] = {"settings": settings, "points": []}
    if path.is_file():
        known = json.loads(path.read_text("utf-8"))
    if known["settings"] != settings:
        name = next(name for name in settings if known["settings"].get(name) != settings[name])
        raise InputError(f"output: expected {path} of the same {name}, found it of another; give another directory")
    points = {point["share"]: point for point in known["points"]}
    for share in config.shares:
        if share not in points:
            points[share] = _point(config, share, output / f"share-{share:g}")
            known["points"] = list(points.values())
            write_json(path, known)
    chosen = [points[share] for share in config.shares]
    curve = learning_curve(
        [point["tokens_learned"] for point in chosen],
        [point["tokens"] for point in chosen],
        [point["rounds"] for point in chosen],
        config.times,
    )
    known |= {"schema": SCHEMA, "curve": asdict(curve), "says": says(curve)}
    write_json(path, known)
    draw(curve, output / "learning_curve.svg")
    return known


def _point(config: LearningCurveConfig, share: float, directory: Path) -> dict[str, Any]:
    """Train on a share, and return what was learned from and, for each held-out text, tokens and expected rounds."""
    given = ["--config", config.run, *config.flags, f"--share={share}", f"--training.output_dir={directory}"]
    recipe: RecipeConfig = parse_config(config_class(config.recipe), launcher_flags(given)[1])
    if not recipe.heldout_directories:
        raise InputError(
            f"run: expected heldout directories in {config.run}, to replay what was trained on, found none"
        )
    if recipe.trains_target:
        raise InputError(
            f"run: expected a target that stays as it is, and so the heldout text its own, found one in {config.run} "
            "that is trained"
        )
    train, _ = read_data(recipe)
    learned = train.loss_tokens()
    print(f"share {share:g}: {learned} tokens in {directory}", flush=True)
    if code := _trained(config.recipe, given):
        raise InputError(f"run: expected a training run on a share of {share:g} that ends well, found exit code {code}")
    target, proposer, draft_length = _chains(config.recipe, recipe, str(directory), config.draft_length)
    texts, lengths = [], []
    for path in recipe.heldout_directories:
        samples = load_completions(path)
        texts += [torch.tensor(ids, device=target.device) for ids in samples["input_ids"]]
        lengths += list(samples["prompt_length"])
    sampling = (recipe.temperature, recipe.top_k, recipe.top_p)
    replay = replay_acceptance(target, proposer, texts, lengths, [draft_length], *sampling)
    tokens, rounds = replay.tokens_and_rounds(draft_length)
    return {"share": share, "tokens_learned": learned, "tokens": tokens, "rounds": rounds}


def _chains(
    name: str, recipe: RecipeConfig, directory: str, draft_length: int
) -> tuple[PreTrainedModel, Proposer, int]:
    """Load a run's target and what it trained; return both, to draft chains, and how many tokens they draft.

    Args:
        name: of the recipe.
        recipe: the run.
        directory: what it left.
        draft_length: γ at most.
    """
    tokenizer = load_tokenizer(recipe.target, field="target", trust_remote_code=recipe.trust_remote_code)
    parallel = recipe.parallel if isinstance(recipe, DistillConfig) else 0
    kind = (PARALLEL if parallel else "draft") if name == "distill" else name  # heads are called as their recipe is
    draft_length = min(draft_length, parallel or draft_length)
    spec = DrafterSpec(kind, directory, draft_lengths=[draft_length])
    pair = load_pair(recipe.target, tokenizer, [spec], recipe.target_dtype, recipe.trust_remote_code)
    model = pair.drafter.model
    if isinstance(model, MedusaHeads):
        draft_length = min(draft_length, model.config.num_heads)
        return pair.target, MedusaProposer(model, Tree.chain(draft_length)), draft_length
    if isinstance(model, EagleHeads):  # heads that were gone on from may have a tree
        return pair.target, EagleProposer(model), draft_length
    return pair.target, pair.drafter.proposer, draft_length


def _trained(recipe: str, arguments: Sequence[str]) -> int:
    """Run a recipe in a process of its own, which leaves nothing in memory; return its exit code."""
    return subprocess.run([sys.executable, "-m", "draftsmith.scripts.cli", recipe, *arguments], check=False).returncode


def says(curve: LearningCurve) -> list[str]:
    """Return the forecast in words, one sentence for each multiple of the text."""
    if not curve.grows:
        return ["τ does not rise with the text: more of it is not what this draft lacks"]
    words = {2.0: "twice"}
    return [
        f"τ at {words.get(times, f'{times:g} times')} the text: {format_estimate(found, spread='interval')}"
        for times, found in curve.forecasts.items()
    ]


def draw(curve: LearningCurve, path: Path) -> None:
    """Draw what was measured, and what is forecast beside it."""
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.add_subplot(xscale="log", xlabel="tokens learned from", ylabel="τ, tokens per forward of the target")
    ahead = {curve.sizes[-1] * times: found for times, found in curve.forecasts.items()}
    shown: tuple[tuple[str, dict[float, Estimate], str], ...] = (
        ("replayed", dict(zip(curve.sizes, curve.lengths, strict=True)), "o"),
        ("forecast", ahead, "s"),
    )
    for label, estimates, marker in shown:
        arms = list(zip(*(found.arms() for found in estimates.values()), strict=True)) or None
        values = [value_of(found) for found in estimates.values()]
        axes.errorbar(list(estimates), values, yerr=arms, fmt=marker, capsize=3, label=label)
    axes.legend(frameon=False)
    figure.savefig(path)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the curve, and print it."""
    config = parse_config(LearningCurveConfig, argv, prog="draftsmith learning-curve")
    found = measure_curve(config)
    curve = found["curve"]
    rows = {}
    for size, length in zip(curve["sizes"], curve["lengths"], strict=True):
        rows[f"τ of {size:.0f} tokens"] = format_estimate(Estimate(**length), spread="interval")
    rows["the curve misses them by"] = f"{curve['residual']:.3f} (root mean square)"
    rows |= {f"forecast {number}": words for number, words in enumerate(found["says"], 1)}
    print_summary(rows, "learning curve", Path(config.output))
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
