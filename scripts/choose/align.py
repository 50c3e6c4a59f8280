"""`draftsmith align --target T --prompts P --budget 2h --output DIR`: the whole road in one line.

Choose a drafter (or take the one that is named), let the target write more text, train, measure on prompts that nothing
has seen, and where the gate passes export it and say how a server is launched. Each stage is an ordinary command, which
is printed, and is not run again once it has ended.
"""

import contextlib
import io
import random
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from draftsmith.decode.draft_models.cut_vocabulary import kept_tokens
from draftsmith.decode.errors import InputError
from draftsmith.decode.validation import parse_json, read
from draftsmith.scripts import cli
from draftsmith.scripts.choose import command as choose
from draftsmith.scripts.choose.candidates import checked_candidates, say_plan
from draftsmith.scripts.choose.command import BEST_OF_EPOCHS, dealt, settle
from draftsmith.scripts.choose.config import COPIES, NONE, AlignConfig, ChooseConfig
from draftsmith.scripts.engine.offline import engine_python
from draftsmith.scripts.kinds import kind_of, recipes
from draftsmith.scripts.pair import require_rollback
from draftsmith.scripts.stages import NO_GO, Stages, flags_of
from draftsmith.train.cli import parse_config
from draftsmith.train.data.corpus import write_prompts
from draftsmith.train.data.prompts import read_prompts
from draftsmith.train.files import require_writable, write_aside
from draftsmith.train.job.kept_step import KeptStep
from draftsmith.train.kinds.draft_lengths import of_drafter
from draftsmith.train.models import load_config
from draftsmith.train.provenance import write_json
from draftsmith.train.runs import note_on_interrupt

FREE = (*choose.FREE, "verify", "min_speedup")
"""Fields that may change in an output that an earlier run began."""
FREE_OF_NAMED = ("server", "budget", "budget_tokens", "choosing")
"""And those that may where nothing is chosen, for `choose` would refuse another value."""
HELD_BACK = 0.05
"""The share of the prompts that choose the best epoch of a named candidate."""


@dataclass(frozen=True)
class Made:
    """What was made."""

    name: str
    """Of the candidate."""
    directory: str | None
    """None of copies."""
    draft_lengths: list[int]
    """γ that are worth measuring."""

    @property
    def drafter(self) -> str:
        """What `--drafter` says of it."""
        return self.directory or self.name


def align(config: AlignConfig) -> int:
    """Go all the way; return 0, or 3 where no drafter pays.

    Raises:
        InputError: settings or inputs that cannot be used, or a stage that failed.
    """
    python = None if config.verify is None else engine_python(None)
    output = require_writable(config.output)
    prompts = read_prompts(config.prompts, limit=config.limit)
    if len(prompts) < 2 * config.measured_prompts:
        raise InputError(
            f"prompts: expected at least {2 * config.measured_prompts} in {config.prompts}, {config.measured_prompts} "
            f"of them to be measured on, found {len(prompts)}"
        )
    require_rollback(config.target, config.trust_remote_code)
    free = FREE if config.drafter is None else (*FREE, *FREE_OF_NAMED)
    settle(config, output, [prompt.record() for prompt in prompts], free)
    random.Random(config.seed + 1).shuffle(prompts)
    measured, others = output / "prompts/measured.jsonl", output / "prompts/others.jsonl"
    for path, part in zip((measured, others), dealt(config, prompts, config.measured_prompts), strict=True):
        write_prompts(path, [prompt.record() for prompt in part])
    stages = Stages(output / "stages")
    with note_on_interrupt(lambda: f"what has ended is kept in {output}; the same command goes on from there"):
        make = _chosen if config.drafter is None else _named
        made = make(config, output, others, stages)
        if made is None:
            return NO_GO
        kept = None if made.directory is None else KeptStep.left_in(Path(made.directory))
        if kept is not None:
            print(f"\n{made.directory} holds {kept}", flush=True)
        stages.run("measure", ["measure", *_measuring(config, made, measured, output / "report")])
        passed = _gate(output / "report/report.json")
        if not passed:
            return NO_GO
        _launch(config, made, output, next(iter(passed.values())), python)
    return 0


def _chosen(config: AlignConfig, output: Path, prompts: Path, stages: Stages) -> Made | None:
    """Choose a drafter and train it; None where none pays."""
    choice = output / "choice"
    given = {field.name: getattr(config, field.name) for field in fields(ChooseConfig)}
    given |= {"prompts": prompts, "output": choice, "limit": None, "dry_run": None}
    for name in ("draft_length", "temperature", "batch_size"):
        given[name] = ",".join(f"{value:g}" for value in given[name])
    said = {name: value for name, value in given.items() if value not in (None, {})}
    stages.run("choose", ["choose", *flags_of(said)])
    found = parse_json((choice / "choose.json").read_text(encoding="utf-8"))
    name = found["winner"]
    if name == NONE:
        print(f"\nno-go: {found['reason']}")
        return None
    standing = next(its for its in found["standings"] if its["name"] == name)
    left = config.seconds - found["spent"]
    for number, line in enumerate(found["commands"], 1):
        words = shlex.split(line)[1:]
        if words[0] in recipes() and config.budget_tokens is None:
            words.append(f"--stop_after={max(1, round(left))}s")
        if words[0] != "measure":
            left -= stages.run(f"winner-{number}-{words[0]}", words)
    lengths = {outlook["way"]["draft_length"] for outlook in standing["outlooks"]}
    return Made(name, None if name in COPIES else str(choice / "winner"), sorted(lengths))


def _named(config: AlignConfig, output: Path, prompts: Path, stages: Stages) -> Made | None:
    """Let the target answer all prompts, and train the candidate that is named."""
    name, candidates = str(config.drafter), checked_candidates(config)
    if name not in candidates:
        raise InputError(f"drafter: expected a candidate out of {', '.join(candidates)}, found {name}")
    text, directory = output / "completions", output / "drafter"
    stages.run("prepare", ["prepare", *flags_of(config.answers() | {"prompts": prompts, "output": text})])
    training = config.training(candidates[name], [str(text)], str(directory))
    training = {"heldout": HELD_BACK} | training | BEST_OF_EPOCHS
    stages.run("train", [candidates[name]["command"], *config.launcher(), *flags_of(training)])
    kind = kind_of(str(directory))
    most = kind.most_drafted(parse_json((directory / "config.json").read_text(encoding="utf-8")))
    if most is not None and kind.whole_blocks:
        return Made(name, str(directory), [most])
    return Made(name, str(directory), [k for k in config.draft_length if most is None or k <= most] or [most or 1])


def _measuring(config: AlignConfig, made: Made, prompts: Path, output: Path) -> list[str]:
    """Return the flags of `measure`."""
    values: dict[str, Any] = {
        "target": config.target, "prompts": prompts, "output": output,
        "temperature": ",".join(f"{each:g}" for each in config.temperature),
        "batch_size": ",".join(map(str, config.batch_size)), "draft_length": ",".join(map(str, made.draft_lengths)),
    }  # fmt: skip
    if config.min_speedup != 1.0:  # without a gate a report says in which settings drafting pays
        values["min_speedup"] = config.min_speedup
    return [*flags_of(values | config.texts() | config.loading()), f"--drafter={made.name}={made.drafter}"]


def _gate(path: Path) -> dict[tuple[float, int], int]:
    """Say where the gate passes, and return γ by temperature and batch size there; nothing where it passes nowhere.

    A server can leave drafting out where it does not pay, so that one setting is enough.
    """
    verdicts = parse_json(path.read_text(encoding="utf-8"))["recommendation"]["settings"]
    passed = {(each["temperature"], each["batch_size"]): each["draft_length"] for each in verdicts if each["go"]}
    print()
    for each in verdicts:
        print(f"{'go' if each['go'] else 'no-go'}: {each['reason']}")
    if not passed:
        print("no-go: it pays nowhere")
    return passed


def _launch(config: AlignConfig, made: Made, output: Path, draft_length: int, python: Path | None) -> None:
    """Export what was made, unless that very export was done, and print how a server is launched with it."""
    if made.directory is None:
        print(f"\n{made.name} needs no files: docs/deploy.md says which servers draft by copies")
        return
    kind = kind_of(made.directory)
    if config.server not in kind.formats:
        print(f"\n{made.directory}: no format of {config.server} holds {kind.title}; draftsmith decodes with it")
        return
    values: dict[str, Any] = {"drafter": made.directory, "target": config.target, "format": config.server}
    values["trust_remote_code"] = config.trust_remote_code
    model = load_config(made.directory, field="drafter", trust_remote_code=config.trust_remote_code)
    if kind.recipe is not None and (kind.recipe.begun == "heads" or kept_tokens(model) is not None):
        values["output"] = output / "export"  # servers load other draft models as they are
    lengths = output / "report/draft_lengths.json"
    # Where the prediction says that nothing pays although it does, γ is that which passed the gate.
    table = config.server == "vllm" and not kind.tree_alone and lengths.is_file()
    if table and of_drafter(str(lengths), made.directory)["num_speculative_tokens"] > 0:
        values["draft_lengths"] = lengths
    elif config.server in kind.launched and not kind.tree_alone and not kind.whole_blocks:
        values["draft_length"] = draft_length
    if python is not None:
        values |= {"verify": config.verify, "engine": python}
    argv, kept = ["export", *flags_of(values)], output / "stages/export.json"
    of = [argv, lengths.read_text(encoding="utf-8") if lengths.is_file() else None]
    before = read(dict[str, Any], kept) if kept.is_file() else None
    if before is None or before.get("of") != of:
        shutil.rmtree(output / "export", ignore_errors=True)  # of an export that was stopped, or of another
        said = io.StringIO()
        print(f"export: draftsmith {' '.join(argv)}", flush=True)
        with contextlib.redirect_stdout(said):
            code = cli.main(argv)
        if code != 0:
            raise InputError(f"export: expected it to end, found exit code {code}: see its line above")
        before = {"of": of, "said": said.getvalue()}
        write_json(kept, before)
    write_aside(output / "launch.txt", before["said"])
    print(f"\n{before['said'].rstrip()}")


def main(argv: Sequence[str] | None = None) -> int:
    """Make a drafter, and say where it is and how to serve it; 3 where no drafter pays."""
    config = parse_config(AlignConfig, argv, prog="draftsmith align")
    if config.dry_run:
        say_plan(config)
        return 0
    return align(config)
