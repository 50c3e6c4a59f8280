"""`draftsmith learning-curve --run configs/distill/tiny.yaml --output runs/curve`: how much text is enough?

It runs the recipe on shares of its completions in turn, and replays each result on the run's held-out completions, each
directory with the sampling that wrote it. A curve through their τ forecasts τ for more text, one for each sampling.
"""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from typing_extensions import TypedDict

from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement.intervals import Estimate, format_estimate
from draftsmith.decode.measurement.learning_curve import LearningCurve, learning_curve
from draftsmith.decode.sampling import Sampler
from draftsmith.decode.validation import Amount, Count, Share, read
from draftsmith.scripts.cli import launcher_flags
from draftsmith.scripts.configs import LearningCurveConfig
from draftsmith.scripts.kinds import recipe_of
from draftsmith.scripts.report.charts import value_of
from draftsmith.scripts.summary import print_summary
from draftsmith.scripts.trials import load_chains, replay_completions
from draftsmith.train.cli import parse_config
from draftsmith.train.data.generate import load_completions
from draftsmith.train.data.shards import read_manifest
from draftsmith.train.files import require_writable
from draftsmith.train.launch import read_data
from draftsmith.train.provenance import write_json
from draftsmith.train.recipe import RecipeConfig
from draftsmith.train.runs import note_on_interrupt

SCHEMA = "draftsmith.learning_curve/3"


class ReplayedTexts(TypedDict):
    """Tokens and expected rounds of each held-out text of one sampling."""

    tokens: list[Amount]
    rounds: list[Amount]


class Point(TypedDict):
    """One share: the tokens learned from, and the trained drafter's replay by sampling."""

    share: Share
    tokens_learned: Count
    replayed: dict[str, ReplayedTexts]


class CurveFile(TypedDict):
    """The part of `learning_curve.json` that a second run continues from."""

    schema: str
    settings: dict[str, Any]
    points: list[Point]


NO_INTERVAL = "without an interval: three amounts leave no residual to estimate the error of the curve from"
LAW = ("temperature", "top_k", "top_p")
"""The settings of held-out text's sampling that replay knows; it refuses text of another sampling."""


def measure_curve(config: LearningCurveConfig) -> dict[str, Any]:
    """Train and replay the missing shares, and return the content of learning_curve.json.

    Raises:
        InputError: no held-out directories, a trained target, an output of other settings, or a failed training run.
    """
    output = require_writable(config.output, "learning_curve.json", "learning_curve.svg")
    path, run = output / "learning_curve.json", Path(config.run)
    settings = {**asdict(config), "run": run.read_text("utf-8", errors="replace") if run.is_file() else ""}
    settings = {name: settings[name] for name in ("run", "drafter", "flags", "draft_length")}
    points = _earlier_points(path, settings)
    report: dict[str, Any] = {"schema": SCHEMA, "settings": settings}

    def note() -> str | None:
        return f"{len(points)} of {len(config.shares)} shares are kept in {output}" if points else None

    with note_on_interrupt(note):
        for share in config.shares:
            if share not in points:
                points[share] = _point(config, share, output / f"share-{share:g}")
                write_json(path, report | {"points": list(points.values())})
    chosen = [points[share] for share in config.shares]
    curves = {law: _curve(config, chosen, law) for law in chosen[0]["replayed"]}
    report["points"] = list(points.values())
    report["curves"] = {law: asdict(curve) | {"says": forecast_sentences(curve)} for law, curve in curves.items()}
    write_json(path, report)
    draw(curves, output / "learning_curve.svg")
    return report


def _earlier_points(path: Path, settings: dict[str, Any]) -> dict[float, Point]:
    """Return an earlier run's points by share, if any; raise InputError if its settings were others."""
    if not path.is_file():
        return {}
    earlier = read(CurveFile, path)
    if earlier["schema"] != SCHEMA:
        raise InputError(
            f"output: expected schema {SCHEMA!r} in {path}, found {earlier['schema']!r}; remove that file, and what "
            "was trained is replayed again"
        )
    for name, value in settings.items():
        if earlier["settings"].get(name) != value:
            raise InputError(f"output: expected {path} of the same {name}, found it of another; give another directory")
    return {point["share"]: point for point in earlier["points"]}


def _curve(config: LearningCurveConfig, points: Sequence[Point], law: str) -> LearningCurve:
    sizes, replayed = [point["tokens_learned"] for point in points], [point["replayed"][law] for point in points]
    tokens, rounds = ([texts["tokens"] for texts in replayed], [texts["rounds"] for texts in replayed])
    return learning_curve(sizes, tokens, rounds, config.times, config.luck, config.draft_length + 1)


def _point(config: LearningCurveConfig, share: float, directory: Path) -> Point:
    arguments = ["--config", config.run, *config.flags, f"--share={share}", f"--training.output_dir={directory}"]
    command = recipe_of(*config.drafter)
    recipe: RecipeConfig = parse_config(command.config_class(), launcher_flags(arguments)[1])
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
    evaluates = recipe.training.eval_strategy != "no" or recipe.training.eval_on_start
    # Held-out text is replayed below, by sampling: a run that does not select by it need not replay it as well.
    if code := _trained(command.command, arguments if evaluates else [*arguments, "--heldout=[]"]):
        raise InputError(f"run: expected a training run on a share of {share:g} that ends well, found exit code {code}")
    dtype, code = recipe.target_dtype, recipe.trust_remote_code
    pair, chains = load_chains(recipe.target, {"run": str(directory)}, config.draft_length, dtype, code)
    proposer, draft_length = chains["run"]
    by_law: dict[tuple[float, int, float], list[dict[str, Any]]] = {}
    for path in recipe.heldout_directories:
        settings = _law_of(path, recipe)
        for sample in load_completions(path):
            by_law.setdefault(_law(settings | sample), []).append(sample)
    replayed: dict[str, ReplayedTexts] = {}
    for law, samples in by_law.items():
        replays = replay_completions(pair, {"": proposer}, samples, [draft_length], Sampler.of(*law))
        tokens, rounds = replays[""].tokens_and_rounds(draft_length)
        replayed[_name(*law)] = {"tokens": tokens, "rounds": rounds}
    return {"share": share, "tokens_learned": learned, "replayed": replayed}


def _law_of(directory: str, recipe: RecipeConfig) -> dict[str, Any]:
    """Return the sampling of a directory's text from its manifest, else from the run."""
    manifest = read_manifest(Path(directory))
    settings = {} if manifest is None else manifest["settings"]
    return {name: settings.get(name, getattr(recipe, name)) for name in LAW}


def _law(settings: Mapping[str, Any]) -> tuple[float, int, float]:
    """Return a sample's sampling, with its own temperature if it has one. At T=0 top-k and top-p have no effect."""
    temperature, top_k, top_p = (settings[name] for name in LAW)
    return (temperature, top_k, top_p) if temperature else (0.0, 0, 1.0)


def _name(temperature: float, top_k: int, top_p: float) -> str:
    """Return a sampling's name, such as "T=0.7, top-k 20"."""
    return f"T={temperature:g}" + (f", top-k {top_k}" if top_k else "") + (f", top-p {top_p:g}" if top_p < 1 else "")


def _trained(command: str, arguments: Sequence[str]) -> int:
    # A process of its own leaves nothing in memory.
    return subprocess.run([sys.executable, "-m", "draftsmith.scripts.cli", command, *arguments], check=False).returncode


def forecast_sentences(curve: LearningCurve) -> list[str]:
    """Return the forecast in words, one sentence for each multiple of the text."""
    if not curve.grows:
        return ["τ does not rise with the text: more text would not help this draft"]
    unsure = "" if curve.residual is not None else f", {NO_INTERVAL}"
    return [
        f"τ at {'twice' if times == 2 else f'{times:g} times'} the text: "
        f"{format_estimate(estimate, spread='interval')}{unsure}"
        for times, estimate in curve.forecasts.items()
    ]


def draw(curves: Mapping[str, LearningCurve], path: Path) -> None:
    """Draw measured and forecast τ under each sampling."""
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.add_subplot(xscale="log", xlabel="tokens learned from", ylabel="τ, tokens per forward of the target")
    for number, (law, curve) in enumerate(curves.items()):
        ahead = [curve.sizes[-1] * times for times in curve.forecasts]
        for label, marker, face, sizes, lengths in (
            ("replayed", "o", None, curve.sizes, curve.lengths),
            ("forecast", "s", "none", ahead, list(curve.forecasts.values())),
        ):
            arms = list(zip(*(estimate.arms() for estimate in lengths), strict=True)) or None
            look: dict[str, Any] = {"fmt": marker, "color": f"C{number}", "capsize": 3, "label": f"{law}, {label}"}
            axes.errorbar(sizes, list(map(value_of, lengths)), yerr=arms, markerfacecolor=face, **look)
    axes.legend(frameon=False)
    figure.savefig(path)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the curve, and print it."""
    config = parse_config(LearningCurveConfig, argv, prog="draftsmith learning-curve")
    report = measure_curve(config)
    rows = {}
    for law, curve in report["curves"].items():
        for size, length in zip(curve["sizes"], curve["lengths"], strict=True):
            rows[f"{law}: τ of {size:.0f} tokens"] = format_estimate(Estimate(**length), spread="interval")
        if curve["residual"] is not None:
            rows[f"{law}: the curve misses them by"] = f"{curve['residual']:.3f}"
        rows[f"{law}: runs differ by luck by"] = f"{curve['luck']:.3f}"
        rows |= {f"{law}: forecast {number}": words for number, words in enumerate(curve["says"], 1)}
    print_summary(rows, "learning curve", Path(config.output))
    return 0
