"""`draftsmith align --target T --prompts P --budget 2h --output DIR`: from prompts to a served drafter in one command.

Choose a drafter (or take the named one), let the target write more text, train, and measure on held-out prompts. If the
gate passes, export the drafter and print how to launch a server. Each stage is an ordinary command, printed, and runs
once.
"""

import contextlib
import io
import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from draftsmith.decode.draft_models.cut_vocabulary import kept_tokens
from draftsmith.decode.errors import InputError
from draftsmith.decode.validation import parse_json
from draftsmith.scripts import cli
from draftsmith.scripts.choose.command import BEST_OF_EPOCHS, FREE, begin, choose, split_prompts
from draftsmith.scripts.choose.config import NONE, AlignConfig, ChooseConfig
from draftsmith.scripts.choose.sweep import candidates_of, own_fields
from draftsmith.scripts.engines.draft_lengths import drafter_entry
from draftsmith.scripts.kinds import kind_of, recipes
from draftsmith.scripts.stages import NO_GO, Stages
from draftsmith.train.cli import flags_of, parse_config
from draftsmith.train.data.corpus import write_prompts
from draftsmith.train.files import write_atomically
from draftsmith.train.job.kept_step import KeptStep
from draftsmith.train.models import load_config
from draftsmith.train.runs import note_on_interrupt

MEASURED = 32  # the most prompts that are held out for the verdict; an eighth of a small file
HELD_BACK = 0.05  # the share of the prompts that select the best epoch of a named candidate


@dataclass(frozen=True)
class TrainedDrafter:
    """A trained drafter, or copies."""

    name: str  # of the candidate
    directory: str | None  # None for copies
    draft_lengths: list[int]  # γ to measure


def align(config: AlignConfig) -> int:
    """Run all stages; return 0, or 3 if no drafter pays."""
    free = (*FREE, "min_speedup") if config.drafter is None else (*FREE, "min_speedup", "server", "budget")
    output, prompts = begin(config, free)
    random.Random(config.seed + 1).shuffle(prompts)
    measured, others = output / "prompts/measured.jsonl", output / "prompts/others.jsonl"
    parts = split_prompts(config, prompts, min(MEASURED, len(prompts) // 8))
    for path, part in zip((measured, others), parts, strict=True):
        write_prompts(path, [prompt.record() for prompt in part])
    stages = Stages(output / "stages")
    with note_on_interrupt(lambda: f"finished stages are kept in {output}; the same command continues from there"):
        trained = (_chosen if config.drafter is None else _named)(config, output, others, stages)
        if trained is None:
            return NO_GO
        step = None if trained.directory is None else KeptStep.left_in(Path(trained.directory))
        if step is not None:
            print(f"\n{trained.directory} holds {step}", flush=True)
        stages.run("measure", ["measure", *_measuring(config, trained, measured, output / "report")])
        passed = _gate(output / "report/report.json")
        if passed is None:
            return NO_GO
        _launch(config, trained, output, passed, stages)
    return 0


def _chosen(config: AlignConfig, output: Path, prompts: Path, stages: Stages) -> TrainedDrafter | None:
    """Choose, and run the commands that train the winner."""
    values = {field.name: getattr(config, field.name) for field in fields(ChooseConfig)}
    choice = choose(ChooseConfig(**values | {"prompts": str(prompts), "output": str(output / "choice")}))
    if choice.winner == NONE:
        print(f"\nno-go: {choice.reason}")
        return None
    spent = sum(choice.seconds.values())
    for number, command in enumerate(choice.commands, 1):
        if command[0] != "measure":
            left = max(1, round(config.seconds - spent - stages.spent))
            stop = flags_of({"stop_after": f"{left}s"}) if command[0] in recipes() else []
            stages.run(f"winner-{number}-{command[0]}", [*command, *stop])
    standing = next(standing for standing in choice.standings if standing.name == choice.winner)
    lengths = {outlook.way.draft_length for outlook in standing.outlooks}
    directory = None if choice.winner in config.copies else str(output / "choice/winner")
    return TrainedDrafter(choice.winner, directory, sorted(lengths))


def _named(config: AlignConfig, output: Path, prompts: Path, stages: Stages) -> TrainedDrafter | None:
    """Let the target answer all prompts, and train the named candidate."""
    name, candidates = str(config.drafter), candidates_of(config)
    if name not in candidates:
        raise InputError(f"drafter: expected a candidate out of {', '.join(candidates)}, found {name}")
    text, directory = output / "completions", output / "drafter"
    stages.run("prepare", config.prepare(prompts, text))
    training = config.training(own_fields(candidates[name]), [str(text)], directory)
    training = {"heldout": HELD_BACK} | training | BEST_OF_EPOCHS
    stages.run("train", [candidates[name]["command"], *flags_of(training)])
    kind = kind_of(str(directory))
    most = kind.most_drafted(parse_json((directory / "config.json").read_text(encoding="utf-8")))
    if most is not None and kind.whole_blocks:
        return TrainedDrafter(name, str(directory), [most])
    lengths = [k for k in config.draft_length if most is None or k <= most] or [most or 1]
    return TrainedDrafter(name, str(directory), lengths)


def _measuring(config: AlignConfig, trained: TrainedDrafter, prompts: Path, output: Path) -> list[str]:
    """Return the flags of `measure` on the held-out prompts."""
    values: dict[str, Any] = {
        "target": config.target, "prompts": prompts, "output": output,
        "temperature": ",".join(f"{temperature:g}" for temperature in config.temperature),
        "batch_size": ",".join(map(str, config.batch_size)), "draft_length": ",".join(map(str, trained.draft_lengths)),
        "drafter": f"{trained.name}={trained.directory or trained.name}",
    }  # fmt: skip
    if config.min_speedup != 1.0:  # without a gate the report gives a verdict for each setting
        values["min_speedup"] = config.min_speedup
    return flags_of(values | config.texts() | config.loading())


def _gate(path: Path) -> int | None:
    """Print the verdicts; return γ of the first passing setting, or None. One is enough."""
    verdicts = parse_json(path.read_text(encoding="utf-8"))["recommendation"]["settings"]
    print()
    for row in verdicts:
        print(f"{'go' if row['go'] else 'no-go'}: {row['reason']}")
    if not any(row["go"] for row in verdicts):
        print("no-go: it pays nowhere")
    return next((row["draft_length"] for row in verdicts if row["go"]), None)


def _launch(config: AlignConfig, trained: TrainedDrafter, output: Path, draft_length: int, stages: Stages) -> None:
    """Export the drafter, and print how to launch a server with it."""
    if trained.directory is None:
        print(f"\n{trained.name} needs no files: docs/deploy.md says which servers draft by copies")
        return
    kind = kind_of(trained.directory)
    if (format := kind.format_for(config.server)) is None:
        print(f"\n{trained.directory}: no format of {config.server} holds {kind.title}; draftsmith decodes with it")
        return
    values: dict[str, Any] = {"drafter": trained.directory, "target": config.target, "format": format}
    values["trust_remote_code"] = config.trust_remote_code
    model = load_config(trained.directory, field="drafter", trust_remote_code=config.trust_remote_code)
    if kind.recipe is not None and (kind.recipe.begun == "heads" or kept_tokens(model) is not None):
        values["output"] = output / "export"  # servers load other draft models as they are
    lengths = output / "report/draft_lengths.json"
    # If the prediction says that nothing pays although something does, take the γ that passed the gate.
    table = format == "vllm" and not kind.tree_alone and lengths.is_file()
    if table and drafter_entry(str(lengths), trained.directory)["num_speculative_tokens"] > 0:
        values["draft_lengths"] = lengths
    elif format in kind.launched and not kind.tree_alone and not kind.whole_blocks:
        values["draft_length"] = draft_length
    argv = ["export", *flags_of(values)]

    def exported() -> str:
        shutil.rmtree(output / "export", ignore_errors=True)  # left by an interrupted export, or another one
        printed = io.StringIO()
        print(f"export: draftsmith {' '.join(argv)}", flush=True)
        with contextlib.redirect_stdout(printed):
            code = cli.main(argv)
        if code != 0:
            raise InputError(f"export: expected it to end, found exit code {code}: see its line above")
        return printed.getvalue()

    text = stages.call("export", argv, exported, str)
    write_atomically(output / "launch.txt", text)
    print(f"\n{text.rstrip()}")


def main(argv: Sequence[str] | None = None) -> int:
    """Make a drafter, and print where it is and how to serve it; return 3 if no drafter pays."""
    return align(parse_config(AlignConfig, argv, prog="draftsmith align"))
