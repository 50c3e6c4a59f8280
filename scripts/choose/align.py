"""`draftsmith align --target T --prompts P --budget 2h --output DIR`: the whole road in one line.

Choose a drafter (or take the one that is named), let the target write more text, train, measure on prompts that nothing
has seen, and where the gate passes export it and say how a server is launched. Each stage is an ordinary command, which
is printed, and is not run again once it has ended.
"""

import contextlib
import io
import random
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from draftsmith.decode.draft_models.cut_vocabulary import kept_tokens
from draftsmith.decode.errors import InputError
from draftsmith.decode.validation import parse_json
from draftsmith.scripts import cli
from draftsmith.scripts.choose.command import candidates_of
from draftsmith.scripts.choose.config import COPIES, AlignConfig, ChooseConfig
from draftsmith.scripts.kinds import kind_of
from draftsmith.scripts.stages import NO_GO, Stages, flags_of
from draftsmith.train.cli import parse_config
from draftsmith.train.data.corpus import write_prompts
from draftsmith.train.data.prompts import read_prompts
from draftsmith.train.files import require_writable, write_aside
from draftsmith.train.kinds.draft_lengths import of_drafter
from draftsmith.train.models import load_config
from draftsmith.train.runs import note_on_interrupt

LAUNCH = "launch.txt"
"""What export printed: the last line launches the server."""


@dataclass(frozen=True)
class Made:
    """What was made."""

    name: str
    """Of the candidate."""
    directory: str | None
    """None of copies."""
    ways: list[tuple[str, int]]
    """What `--drafter` says, and γ, of each way to draft that is worth measuring."""


def align(config: AlignConfig) -> int:
    """Go all the way; return 0, or 3 where no drafter pays.

    Raises:
        InputError: settings or inputs that cannot be used, or a stage that failed.
    """
    output = require_writable(config.output)
    prompts = read_prompts(config.prompts, limit=config.limit)
    if len(prompts) < 2 * config.measured_prompts:
        raise InputError(
            f"prompts: expected at least {2 * config.measured_prompts} in {config.prompts}, {config.measured_prompts} "
            f"of them to be measured on, found {len(prompts)}"
        )
    random.Random(config.seed + 1).shuffle(prompts)
    measured, others = output / "prompts/measured.jsonl", output / "prompts/others.jsonl"
    write_prompts(measured, [prompt.record() for prompt in prompts[: config.measured_prompts]])
    write_prompts(others, [prompt.record() for prompt in prompts[config.measured_prompts :]])
    stages = Stages(output / "stages")
    with note_on_interrupt(lambda: f"what has ended is kept in {output}; the same command goes on from there"):
        made = (
            _chosen(config, output, others, stages)
            if config.drafter is None
            else _named(config, output, others, stages)
        )
        if made is None:
            return NO_GO
        stages.run("measure", ["measure", *_measuring(config, made, measured, output / "report")])
        verdict = parse_json((output / "report/report.json").read_text(encoding="utf-8"))
        if verdict["gate"] is None or not verdict["gate"]["passed"]:
            print(f"\nno-go: {verdict['recommendation']['reason']}")
            return NO_GO
        _launch(config, made, output)
    return 0


def _chosen(config: AlignConfig, output: Path, prompts: Path, stages: Stages) -> Made | None:
    """Choose a drafter and train it; None where none pays."""
    choice = output / "choice"
    given = {field.name: getattr(config, field.name) for field in fields(ChooseConfig)}
    given |= {"prompts": prompts, "output": choice, "limit": None, "dry_run": None}
    for name in ("draft_length", "temperature", "batch_size"):
        given[name] = ",".join(f"{value:g}" for value in given[name])
    stages.run(
        "choose", ["choose", *flags_of({name: value for name, value in given.items() if value not in (None, {})})]
    )
    found = parse_json((choice / "choose.json").read_text(encoding="utf-8"))
    name = found["winner"]
    if name == "none":
        print(f"\nno-go: {found['reason']}")
        return None
    standing = next(its for its in found["standings"] if its["name"] == name)
    for number, line in enumerate(found["commands"], 1):
        words = shlex.split(line)[1:]
        if words[0] != "measure":
            stages.run(f"winner-{number}-{words[0]}", words)
    directory = None if name in COPIES else str(choice / "winner")
    ways: dict[tuple[str, int], None] = {}
    for outlook in standing["outlooks"]:
        last, alone = outlook["way"]["last"], directory or name
        drafter = alone if last is None else f"hybrid:{COPIES[0]}+{alone}@last={last}"
        ways[drafter, outlook["way"]["draft_length"]] = None
    return Made(name, directory, list(ways))


def _named(config: AlignConfig, output: Path, prompts: Path, stages: Stages) -> Made | None:
    """Let the target answer all prompts, and train the candidate that is named."""
    name, candidates = str(config.drafter), candidates_of(config)
    if name not in candidates:
        raise InputError(f"drafter: expected a candidate out of {', '.join(candidates)}, found {name}")
    text, directory = output / "completions", output / "drafter"
    answers: dict[str, Any] = config.answers() | {"prompts": prompts, "output": text}
    stages.run("prepare", ["prepare", *flags_of(answers)])
    command = candidates[name]["command"]
    training = config.training(candidates[name], [str(text)], str(directory))
    training |= {"training.save_strategy": "epoch", "training.save_total_limit": 1}
    stages.run("train", [command, *config.launcher(), *flags_of(training)])
    return Made(name, str(directory), [(str(directory), length) for length in config.draft_length])


def _measuring(config: AlignConfig, made: Made, prompts: Path, output: Path) -> list[str]:
    """Return the flags of `measure`."""
    drafters: dict[str, list[int]] = {}
    for drafter, length in made.ways:
        drafters.setdefault(drafter, []).append(length)
    longest = _longest(made)
    names = {
        drafter: made.name if number == 0 else f"{made.name}-{number + 1}" for number, drafter in enumerate(drafters)
    }
    values: dict[str, Any] = {
        "target": config.target, "prompts": prompts, "output": output, "min_speedup": config.min_speedup,
        "temperature": ",".join(f"{each:g}" for each in config.temperature),
        "batch_size": ",".join(map(str, config.batch_size)),
        "draft_length_of": {
            names[drafter]: sorted({min(length, longest or length) for length in lengths})
            for drafter, lengths in drafters.items()
        },
    }  # fmt: skip
    values |= config.texts()
    values |= {name: value for name in ("dtype", "compiled", "threads") if (value := getattr(config, name)) is not None}
    return [*flags_of(values), *(f"--drafter={names[drafter]}={drafter}" for drafter in drafters)]


def _longest(made: Made) -> int | None:
    """Return the most tokens that a drafter of a fixed length can draft; None of any other."""
    if made.directory is None:
        return None
    config = parse_json((Path(made.directory) / "config.json").read_text(encoding="utf-8"))
    return kind_of(made.directory).most_drafted(config)


def _launch(config: AlignConfig, made: Made, output: Path) -> None:
    """Export what was made, unless that was done, and print how a server is launched with it."""
    kept = output / LAUNCH
    if made.directory is None:
        print(f"\n{made.name} needs no files: see docs/deploy.md for servers that draft by copies")
        return
    if not kept.is_file():
        kind = kind_of(made.directory)
        if config.server not in kind.formats:
            print(f"\n{made.directory}: no format of {config.server} holds {kind.title}; draftsmith decodes with it")
            return
        values: dict[str, Any] = {"drafter": made.directory, "target": config.target, "format": config.server}
        model = load_config(made.directory, field="drafter", trust_remote_code=config.trust_remote_code)
        if kind.recipe is not None and (kind.recipe.begun == "heads" or kept_tokens(model) is not None):
            values["output"] = output / "export"  # servers load other draft models as they are
        lengths = output / "report/draft_lengths.json"
        # Where the gate was passed and the prediction says that nothing pays, γ is the format's own.
        table = config.server == "vllm" and not kind.tree_alone and lengths.is_file()
        if table and of_drafter(str(lengths), made.directory)["num_speculative_tokens"] > 0:
            values["draft_lengths"] = lengths
        if config.verify is not None:
            values["verify"] = config.verify
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            code = cli.main(["export", *flags_of(values)])
        if code != 0:
            raise InputError(f"export: expected it to end, found exit code {code}; the same command goes on from here")
        write_aside(kept, said.getvalue())
    print(f"\n{kept.read_text(encoding='utf-8').rstrip()}")


def main(argv: Sequence[str] | None = None) -> int:
    """Make a drafter, and say where it is and how to serve it; 3 where no drafter pays."""
    return align(parse_config(AlignConfig, argv, prog="draftsmith align"))
