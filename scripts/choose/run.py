"""One run of `choose`: its candidates and their trials, its progress, and its time ledger."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftsmith.decode.errors import InputError
from draftsmith.decode.progress import time_text
from draftsmith.decode.validation import Amount, parse_json, read
from draftsmith.scripts.choose.config import COPIES, ChooseConfig
from draftsmith.scripts.choose.forecast import Trial
from draftsmith.scripts.choose.rounds import ReplayedRounds, replay_candidates
from draftsmith.scripts.choose.schedule import RUNGS, Pace, affordable, survivors
from draftsmith.scripts.kinds import KINDS, recipes
from draftsmith.scripts.stages import JUDGED_LATER, Stages, flags_of, interrupt_after
from draftsmith.train.cli import OutOfTime, check_fields
from draftsmith.train.data.corpus import write_prompts
from draftsmith.train.data.generate import load_completions
from draftsmith.train.data.prompts import Prompt
from draftsmith.train.models import load_config
from draftsmith.train.provenance import write_json

COSTS = 0.25  # the share of the time for choosing that is reserved for costs of rounds
MOST_SAMPLES = 8  # the most answers to a prompt, at a temperature above 0, that the winner learns from


def candidates_of(config: ChooseConfig) -> dict[str, dict[str, Any]]:
    """Return the candidates by name: those of the config, or of every kind that can be trained for the target."""
    if config.candidates:
        return config.candidates
    target = load_config(config.target, field="target", trust_remote_code=config.trust_remote_code)
    candidates: dict[str, dict[str, Any]] = {}
    for kind in KINDS:
        if kind.recipe is not None:
            by_name = kind.candidates(target, config.server)
            candidates |= {name: {"command": kind.recipe.command} | fields for name, fields in by_name.items()}
    if config.draft is not None:
        candidates["draft"] = {"command": "distill", "draft": config.draft}
    return candidates


def checked_candidates(config: ChooseConfig) -> dict[str, dict[str, Any]]:
    """Return the candidates; raise InputError if one has fields that its command does not."""
    candidates = candidates_of(config)
    for name, fields in candidates.items():
        try:
            argv = flags_of(config.training(fields, ["text"], "output") | JUDGED_LATER)
            check_fields(recipes()[fields["command"]].config_class(), argv)
        except InputError as error:
            raise InputError(f"candidates: {name}: {error}") from error
    return candidates


def print_plan(config: ChooseConfig) -> None:
    """Print what would be tried and what it costs."""
    candidates = candidates_of(config)
    runs = sum(survivors(rung, len(candidates)) for rung in range(1, RUNGS + 1))
    choosing = config.seconds * config.choosing
    print(
        f"{time_text(choosing)} of {time_text(config.seconds)} to choose among {len(candidates)} candidates and "
        f"{' and '.join(COPIES)}: {runs} training runs on {RUNGS} growing amounts of text, as much as fits; the rest "
        "is for the winner"
    )
    for name, fields in candidates.items():
        own = [f"--{key} {value}" for key, value in fields.items() if key != "command"]
        print(f"  {name:<12}{fields['command']} {' '.join(own)}".rstrip())


@dataclass(frozen=True)
class SavedTrial:
    """A finished trial: its replays by temperature, and the seconds that they took."""

    command: list[str]  # that trained the candidate; empty for copies
    training: Amount
    replayed: dict[str, ReplayedRounds]
    seconds: Amount


@dataclass
class ChooseRun:
    """One run: its progress and the time it has spent."""

    config: ChooseConfig
    candidates: dict[str, dict[str, Any]]
    output: Path
    train: list[Prompt]
    stages: Stages
    ledger: dict[str, float] = field(default_factory=dict)  # seconds by stage
    parts: list[str] = field(default_factory=list)  # names of the target's texts; an amount is all texts so far
    writing: float = 0.0  # seconds that they took
    used: int = 0  # prompts of `train` that are answered
    written: float = 0.0  # tokens of text so far
    trials: dict[str, list[Trial]] = field(default_factory=dict)
    paces: dict[str, Pace] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    """Candidates that were left out, and why. A candidate whose training failed is tried again by the next run."""
    notes: list[str] = field(default_factory=list)  # sentences on the costs
    amounts: list[int] = field(default_factory=list)
    over: bool = False  # no more is tried: the rest of the time for choosing is the winner's

    @property
    def seconds(self) -> float:
        """The time for choosing, in seconds."""
        return self.config.seconds * self.config.choosing

    @property
    def spent(self) -> float:
        """The time spent so far, in seconds."""
        return sum(self.ledger.values())

    @property
    def rest(self) -> float:
        """The rest of the whole budget, which stages may use that no choice can do without."""
        return self.config.seconds - self.spent

    @property
    def write(self) -> float:
        """Seconds to write a token of text."""
        return self.writing / self.written

    def spend(self, stage: str, seconds: float) -> None:
        """Enter seconds in the ledger."""
        self.ledger[stage] = self.ledger.get(stage, 0.0) + seconds

    def run(self, kind: str, name: str, argv: list[str], most: float) -> float:
        """Run a stage and enter its time; raise OutOfTime if it takes over `most` seconds, including earlier runs."""
        try:
            seconds = self.stages.run(name, argv, most)
        except BaseException:
            self.spend(kind, self.stages.unfinished(name))
            raise
        self.spend(kind, seconds)
        return seconds

    def more_text(self, prompts: int, most: float) -> None:
        """Let the target answer further prompts."""
        new, name = self.train[self.used : self.used + prompts], f"text-{len(self.parts) + 1}"
        path = self.output / "prompts" / f"{name}.jsonl"
        write_prompts(path, [prompt.record() for prompt in new])
        self.writing += self.run("text", name, ["prepare", *flags_of(self.answers(name, path))], most)
        self.parts.append(name)
        self.used += len(new)
        samples = (sample for part in self.texts() for sample in load_completions(part))
        self.written = sum(len(sample["input_ids"]) - sample["prompt_length"] for sample in samples)

    def answers(self, name: str, prompts: Path) -> dict[str, Any]:
        """Return the fields of `prepare` for one of the texts."""
        return self.config.answers() | {"prompts": prompts, "output": self.completions(name)}

    def completions(self, name: str) -> Path:
        """Return the directory of a text."""
        return self.output / "completions" / name

    def texts(self) -> list[str]:
        """Return the directories of all texts so far."""
        return [str(self.completions(name)) for name in self.parts]

    def training(self, name: str, output: Path) -> dict[str, Any]:
        """Return the fields of a candidate's training on all texts so far."""
        return self.config.training(self.candidates[name], self.texts(), str(output))

    @property
    def heldout(self) -> dict[float, str]:
        """The directories of held-out answers, by temperature."""
        return {t: str(self.completions(f"heldout-{t:g}")) for t in self.config.temperature}

    def trial(self, name: str, rung: int, until: float) -> tuple[Trial, Pace]:
        """Train a candidate on all text and replay it, or read an earlier run's results; OutOfTime past `until`."""
        output, path = self.output / "trials" / str(rung) / name, self.output / "trials" / f"{rung}-{name}.json"
        stage, argv, stage_seconds = f"train-{rung}-{name}", list[str](), 0.0
        if name in self.candidates:
            flags = flags_of(self.training(name, output) | JUDGED_LATER)
            argv = [self.candidates[name]["command"], *self.config.launcher(), *flags]
            if self.stages.changed(stage, argv) and output.is_dir():
                shutil.rmtree(output)  # left by a training with other settings
            stage_seconds = self.run("training", stage, argv, until - self.spent)
        drafter = str(output) if argv else name
        record = read(SavedTrial, path) if path.is_file() else None
        if record is None or record.command != argv:
            try:
                with interrupt_after(until - self.spent):
                    replays = replay_candidates(self.config, {name: drafter}, self.heldout)[name]
            except OutOfTime:
                self.spend("replay", self.stages.lap())
                raise
            trained = _train_seconds(drafter) if argv else 0.0
            write_json(path, SavedTrial(argv, trained, replays, self.stages.lap()))
            record = read(SavedTrial, path)
        self.spend("replay", record.seconds)
        pace = Pace(record.training / self.written, max(0.0, stage_seconds - record.training) + record.seconds)
        return Trial(drafter, int(self.written), record.training, record.replayed), pace

    def rung(self, rung: int, names: Sequence[str]) -> list[str]:
        """Try candidates on all text, and return those that were tried; raise InputError if all trainings failed.

        On the first amount, a candidate is left out if there is no time for it, and the first of each command may take
        an equal part of the time. On a later amount all must finish, or OutOfTime is raised.
        """
        print(
            f"\n{rung} of {RUNGS}: {', '.join(names)} on {self.written:,.0f} tokens of text; "
            f"{time_text(self.spent)} of {time_text(self.seconds)} spent",
            flush=True,
        )
        until, results = self.seconds * (1.0 if rung > 1 else 1 - COSTS), dict[str, tuple[Trial, Pace]]()
        untried, errors = {self.candidates[name]["command"] for name in names}, 0
        for name in names:
            seconds = [pace.trial(self.written) for _, pace in results.values()]
            most, command = until - self.spent, self.candidates[name]["command"]
            if rung == 1 and command in untried:  # a slow candidate must leave time for one of each other command
                most /= len(untried)
            untried.discard(command)
            try:
                if rung == 1 and self.spent + sum(seconds) / max(1, len(seconds)) >= until:
                    raise OutOfTime
                results[name] = self.trial(name, rung, self.spent + most)
            except OutOfTime:
                if rung > 1:
                    raise
                self.failed[name] = f"{name} is left out: there was no time to train it as well"
            except (InputError, RuntimeError) as error:  # torch raises the latter: out of memory, a missing kernel
                errors += 1
                if errors == len(names):
                    raise
                line = str(error).partition("\n")[0]
                self.failed[name] = f"{name} is left out, its training failed on amount {rung}: {line}"
                if name in self.trials:
                    self.dropped[name] = rung - 1
            if name in self.failed:
                print(self.failed[name], flush=True)
        for name, (trial, pace) in results.items():
            self.trials.setdefault(name, []).append(trial)
            self.paces[name] = pace
        self.amounts.append(int(self.written))
        return list(results)

    def reach(self, name: str) -> float:
        """Return the tokens of text that a candidate will learn from if it wins."""
        trained = float(self.trials[name][-1].tokens)
        if self.config.budget_tokens is not None:
            return max(float(self.config.budget_tokens), trained)
        choosing = self.spent if self.over else max(self.spent, self.seconds)
        left = max(self.config.seconds - choosing, 0.0)
        # At most what the target can write from these prompts.
        most = self.written / self.used * len(self.train) * self.answers_of(MOST_SAMPLES) / self.answers_of(1)
        return max(min(affordable(left, self.paces[name], self.written, self.write), most), trained)

    def answers_of(self, samples: int) -> int:
        """Return the answers to a prompt over all temperatures: one at T=0, `samples` at each other."""
        return sum(samples if temperature > 0 else 1 for temperature in self.config.temperature)


def _train_seconds(directory: str) -> float:
    state = parse_json((Path(directory) / "trainer_state.json").read_text(encoding="utf-8"))
    return float(next(entry["train_runtime"] for entry in state["log_history"] if "train_runtime" in entry))
