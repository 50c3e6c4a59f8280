"""`draftsmith learning-curve --run configs/distill/tiny.yaml --output runs/curve`: how much text is enough?

It runs the recipe on shares of its completions, one after the other, and replays what each left on the held-out
completions of the run, each directory under the law that it was sampled from. A curve through their τ says what more
text would bring, one for each law.
"""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from transformers import PreTrainedModel
from typing_extensions import TypedDict

from draftsmith.decode import Proposer, replay_acceptance
from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement.intervals import Estimate, format_estimate
from draftsmith.decode.measurement.learning_curve import LearningCurve, learning_curve
from draftsmith.decode.validation import Amount, Count, Share, read
from draftsmith.scripts.cli import launcher_flags
from draftsmith.scripts.configs import LearningCurveConfig
from draftsmith.scripts.kinds import drafter_specs, recipe_of
from draftsmith.scripts.pair import load_pair
from draftsmith.scripts.report.charts import value_of
from draftsmith.scripts.summary import print_summary
from draftsmith.train.cli import parse_config
from draftsmith.train.data.generate import load_completions
from draftsmith.train.data.shards import read_manifest
from draftsmith.train.files import require_writable
from draftsmith.train.launch import read_data
from draftsmith.train.models import load_tokenizer
from draftsmith.train.provenance import write_json
from draftsmith.train.recipe import RecipeConfig
from draftsmith.train.runs import note_on_interrupt

SCHEMA = "draftsmith.learning_curve/3"


class Replayed(TypedDict):
    """What replay says of one law's held-out texts: tokens and expected rounds of each."""

    tokens: list[Amount]
    rounds: list[Amount]


class Point(TypedDict):
    """What training on a share left."""

    share: Share
    tokens_learned: Count
    replayed: dict[str, Replayed]


class Known(TypedDict):
    """What `learning_curve.json` keeps."""

    schema: str
    settings: dict[str, Any]
    points: list[Point]


LAW = ("temperature", "top_k", "top_p")
"""The settings that held-out text was sampled by, as far as replay knows them; it refuses text of another law."""


def measure_curve(config: LearningCurveConfig) -> dict[str, Any]:
    """Train and replay what is missing, and return what learning_curve.json holds.

    Raises:
        InputError: a run without held-out directories or with a target that is trained, an output of other
            settings, or a training run that failed.
    """
    output = require_writable(config.output)
    path = output / "learning_curve.json"
    settings = {**asdict(config), "run": Path(config.run).read_text("utf-8") if Path(config.run).is_file() else ""}
    settings = {name: settings[name] for name in ("run", "drafter", "flags", "draft_length")}
    known: dict[str, Any] = {"schema": SCHEMA, "settings": settings, "points": []}
    if path.is_file():
        known = dict(read(Known, path))
    if known.get("schema") != SCHEMA:
        raise InputError(
            f"output: expected schema {SCHEMA!r} in {path}, found {known.get('schema')!r}; remove that file, and what "
            "was trained is replayed again"
        )
    if known["settings"] != settings:
        name = next(name for name in settings if known["settings"].get(name) != settings[name])
        raise InputError(f"output: expected {path} of the same {name}, found it of another; give another directory")
    points = {point["share"]: point for point in known["points"]}
    with note_on_interrupt(
        lambda: f"{len(points)} of {len(config.shares)} shares are kept in {output}" if points else None
    ):
        for share in config.shares:
            if share not in points:
                points[share] = _point(config, share, output / f"share-{share:g}")
                known["points"] = list(points.values())
                write_json(path, known)
    chosen = [points[share] for share in config.shares]
    curves = {
        law: learning_curve(
            [point["tokens_learned"] for point in chosen],
            [point["replayed"][law]["tokens"] for point in chosen],
            [point["replayed"][law]["rounds"] for point in chosen],
            config.times,
            config.luck,
            config.draft_length + 1,
        )
        for law in chosen[0]["replayed"]
    }
    known["curves"] = {law: asdict(curve) | {"says": says(curve)} for law, curve in curves.items()}
    write_json(path, known)
    draw(curves, output / "learning_curve.svg")
    return known


def _point(config: LearningCurveConfig, share: float, directory: Path) -> dict[str, Any]:
    """Train on a share, and return what was learned from and, by law and held-out text, tokens and expected rounds."""
    given = ["--config", config.run, *config.flags, f"--share={share}", f"--training.output_dir={directory}"]
    command = recipe_of(*config.drafter)
    recipe: RecipeConfig = parse_config(command.config_class(), launcher_flags(given)[1])
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
    chosen_by_it = recipe.training.eval_strategy != "no" or recipe.training.eval_on_start
    # Held-out text is replayed below, by law: a run that chooses nothing by it need not replay it as well.
    if code := _trained(command.command, given if chosen_by_it else [*given, "--heldout=[]"]):
        raise InputError(f"run: expected a training run on a share of {share:g} that ends well, found exit code {code}")
    target, proposer, draft_length = _chains(recipe, str(directory), config.draft_length)
    by_law: dict[tuple[float, int, float], list[dict[str, Any]]] = {}
    for path in recipe.heldout_directories:
        noted = _law_of(path, recipe)
        for sample in load_completions(path):
            by_law.setdefault(_law(noted | sample), []).append(sample)
    replayed = {}
    for law, samples in by_law.items():
        texts = [torch.tensor(sample["input_ids"], device=target.device) for sample in samples]
        lengths = [sample["prompt_length"] for sample in samples]
        tokens, rounds = replay_acceptance(target, proposer, texts, lengths, [draft_length], *law).tokens_and_rounds(
            draft_length
        )
        replayed[_name(*law)] = {"tokens": tokens, "rounds": rounds}
    return {"share": share, "tokens_learned": learned, "replayed": replayed}


def _law_of(directory: str, recipe: RecipeConfig) -> dict[str, Any]:
    """Return `LAW` of a directory's text as its manifest has it; that of the run where nobody noted it."""
    manifest = read_manifest(Path(directory))
    noted = {} if manifest is None else manifest["settings"]
    return {name: noted.get(name, getattr(recipe, name)) for name in LAW}


def _law(noted: Mapping[str, Any]) -> tuple[float, int, float]:
    """Return a sample's law, its own temperature where it has one. At T=0 top-k and top-p say nothing."""
    temperature, top_k, top_p = (noted[name] for name in LAW)
    return (temperature, top_k, top_p) if temperature else (0.0, 0, 1.0)


def _name(temperature: float, top_k: int, top_p: float) -> str:
    """Return a law's name, such as "T=0.7, top-k 20"."""
    return f"T={temperature:g}" + (f", top-k {top_k}" if top_k else "") + (f", top-p {top_p:g}" if top_p < 1 else "")


def _chains(recipe: RecipeConfig, directory: str, draft_length: int) -> tuple[PreTrainedModel, Proposer, int]:
    """Load a run's target and what it trained; return both, to draft chains, and how many tokens they draft.

    Args:
        recipe: the run.
        directory: what it left.
        draft_length: γ at most.
    """
    tokenizer = load_tokenizer(recipe.target, field="target", trust_remote_code=recipe.trust_remote_code)
    specs = drafter_specs([directory], [1])
    pair = load_pair(recipe.target, tokenizer, specs, recipe.target_dtype, recipe.trust_remote_code)
    return pair.target, *pair.drafter.family.chain(pair.drafter, draft_length)


def _trained(command: str, arguments: Sequence[str]) -> int:
    """Train in a process of its own, which leaves nothing in memory; return its exit code."""
    return subprocess.run([sys.executable, "-m", "draftsmith.scripts.cli", command, *arguments], check=False).returncode


def says(curve: LearningCurve) -> list[str]:
    """Return the forecast in words, one sentence for each multiple of the text."""
    if not curve.grows:
        return ["τ does not rise with the text: more of it is not what this draft lacks"]
    words = {2.0: "twice"}
    said = [
        f"τ at {words.get(times, f'{times:g} times')} the text: {format_estimate(found, spread='interval')}"
        for times, found in curve.forecasts.items()
    ]
    if curve.residual is None:
        return [
            f"{sentence}, without an interval: of three amounts none is left to tell how far the curve is off"
            for sentence in said
        ]
    return said


def draw(curves: Mapping[str, LearningCurve], path: Path) -> None:
    """Draw what was measured under each law, and what is forecast beside it."""
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.add_subplot(xscale="log", xlabel="tokens learned from", ylabel="τ, tokens per forward of the target")
    for number, (law, curve) in enumerate(curves.items()):
        ahead = {curve.sizes[-1] * times: found for times, found in curve.forecasts.items()}
        shown: tuple[tuple[str, dict[float, Estimate], str], ...] = (
            ("replayed", dict(zip(curve.sizes, curve.lengths, strict=True)), "o"),
            ("forecast", ahead, "s"),
        )
        for label, estimates, marker in shown:
            arms = list(zip(*(found.arms() for found in estimates.values()), strict=True)) or None
            values = [value_of(found) for found in estimates.values()]
            look: dict[str, Any] = {"fmt": marker, "color": f"C{number}", "capsize": 3, "label": f"{law}, {label}"}
            axes.errorbar(list(estimates), values, yerr=arms, markerfacecolor="none" if marker == "s" else None, **look)
    axes.legend(frameon=False)
    figure.savefig(path)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the curve, and print it."""
    config = parse_config(LearningCurveConfig, argv, prog="draftsmith learning-curve")
    found = measure_curve(config)
    rows = {}
    for law, curve in found["curves"].items():
        for size, length in zip(curve["sizes"], curve["lengths"], strict=True):
            rows[f"{law}: τ of {size:.0f} tokens"] = format_estimate(Estimate(**length), spread="interval")
        if curve["residual"] is not None:
            rows[f"{law}: the curve misses them by"] = f"{curve['residual']:.3f}"
        rows[f"{law}: runs differ by luck by"] = f"{curve['luck']:.3f}"
        rows |= {f"{law}: forecast {number}": words for number, words in enumerate(curve["says"], 1)}
    print_summary(rows, "learning curve", Path(config.output))
    return 0
