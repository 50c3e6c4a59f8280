"""`draftsmith choose --target T --prompts P --budget 2h --output DIR`: which drafter to train for a target.

The target is checked. Prompts are dealt out; the target answers the held-out ones. Then, on one amount of its text
after the other, candidates are trained from the beginning, each by its own command, and replayed on the held-out
answers. Costs of rounds are measured once, all candidates side by side. All that has ended is kept.
"""

import hashlib
import json
import math
import random
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement.costs import CostTable
from draftsmith.decode.measurement.intervals import Estimate
from draftsmith.decode.progress import time_text
from draftsmith.decode.validation import Amount, Count, parse_json, read
from draftsmith.scripts.choose.candidates import checked_candidates, say_plan
from draftsmith.scripts.choose.config import COPIES, NONE, ChooseConfig
from draftsmith.scripts.choose.forecast import LEAST_SPREAD, Trial, outlook, outlooks
from draftsmith.scripts.choose.page import print_choice, write_page
from draftsmith.scripts.choose.result import SCHEMA, Choice, Standing, best_way, by_name, settings_text, shell, verdict
from draftsmith.scripts.choose.rounds import CostFile, Replayed, measured_costs, replayed
from draftsmith.scripts.choose.schedule import RUNGS, Pace, affordable, begins, growth, kept, survivors
from draftsmith.scripts.kinds import recipes
from draftsmith.scripts.pair import require_rollback
from draftsmith.scripts.stages import JUDGED_LATER, Stages, flags_of, nested
from draftsmith.train.cli import parse_config
from draftsmith.train.data.corpus import write_prompts
from draftsmith.train.data.generate import load_completions
from draftsmith.train.data.prompts import Prompt, encode_prompt, read_prompts
from draftsmith.train.files import require_writable, write_aside
from draftsmith.train.models import load_tokenizer
from draftsmith.train.provenance import as_json, write_json
from draftsmith.train.runs import note_on_interrupt

MORE = "text-winner"
"""The winner's further text."""
FIRST_TEXT = 0.005
"""The share of the time for choosing in which the first amount of text is written: how long it is learned from is not
known before."""
LEAST_PROMPTS = 32
"""Of the first amount of text: a handful of steps says little of what more of them bring."""
MOST_SAMPLES = 8
"""Answers to a prompt at a temperature above 0 that the winner learns from, at most."""
FREE = ("output", "dry_run", "candidates", "draft", "learning", "epochs", "processes", "threads", "dtype", "compiled")
"""Fields that may change in an output that is gone on with: text stays, and what differs is trained again."""
BEST_OF_EPOCHS = {"training.save_strategy": "epoch", "training.save_total_limit": 1}
"""Fields of a training run that keeps the best of its epochs on held-out text."""
TIMES = (2.0, 4.0, 10.0)
"""Times the text of the last trial, at which it is said what the winner would bring."""


@dataclass(frozen=True)
class KeptRung:
    """What is kept of an amount of text: replays by candidate and temperature, and the seconds that they took."""

    tokens: Count
    commands: dict[str, list[str]]
    """What trained the candidates."""
    training: dict[str, Amount]
    replayed: dict[str, dict[str, Replayed]]
    seconds: Amount


@dataclass
class Choosing:
    """One run: where it stands, and what it has spent."""

    config: ChooseConfig
    candidates: dict[str, dict[str, Any]]
    output: Path
    train: list[Prompt]
    stages: Stages
    spent: float = 0.0
    used: int = 0
    """Prompts of `train` that the target has answered."""
    written: float = 0.0
    """Tokens of text that are there."""
    trials: dict[str, list[Trial]] = field(default_factory=dict)
    paces: dict[str, Pace] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    """Candidates whose training failed, and how; they are tried again when the same command runs again."""
    amounts: list[int] = field(default_factory=list)
    over: bool = False
    """Whether no more is tried: what is left of the time for choosing is then the winner's."""

    @property
    def seconds(self) -> float:
        """The time for choosing."""
        return self.config.seconds * self.config.choosing

    def run(self, name: str, argv: list[str]) -> float:
        """Run a stage, and count its time."""
        seconds = self.stages.run(name, argv)
        self.spent += seconds
        return seconds

    def write(self, name: str, prompts: Sequence[Prompt]) -> float:
        """Let the target answer some prompts; return the seconds."""
        path = self.output / "prompts" / f"{name}.jsonl"
        write_prompts(path, [prompt.record() for prompt in prompts])
        return self.run(name, ["prepare", *flags_of(self.answers(name, path))])

    def answers(self, name: str, prompts: Path) -> dict[str, Any]:
        """Return the fields of `prepare`."""
        return self.config.answers() | {"prompts": prompts, "output": self.completions(name)}

    def completions(self, name: str) -> Path:
        """Return the directory of the target's answers."""
        return self.output / "completions" / name

    def texts(self, rung: int) -> list[str]:
        """Return the directories that an amount of text consists of."""
        return [str(self.completions(f"text-{number}")) for number in range(1, rung + 1)]

    def training(self, name: str, rung: int, output: Path) -> dict[str, Any]:
        """Return the fields of a candidate's training on an amount of text."""
        return self.config.training(self.candidates[name], self.texts(rung), str(output))

    @property
    def heldout(self) -> dict[float, str]:
        """The directories of held-out answers, by temperature."""
        return {t: str(self.completions(f"heldout-{t:g}")) for t in self.config.temperature}

    def rung(self, rung: int, names: Sequence[str]) -> list[str]:
        """Train candidates on an amount of text and replay them; or read what an earlier run left of that.

        Returns:
            Those whose training did not fail.

        Raises:
            InputError: all of them failed.
        """
        tokens = self.tokens(self.texts(rung))
        self.written = tokens
        self.amounts.append(tokens)
        self.say(rung, names, tokens)
        took, commands = dict[str, float](), dict[str, list[str]]()
        for name in names:
            output, stage = self.output / "trials" / str(rung) / name, f"train-{rung}-{name}"
            flags = flags_of(self.training(name, rung, output) | JUDGED_LATER)
            argv = [self.candidates[name]["command"], *self.config.launcher(), *flags]
            if self.stages.changed(stage, argv) and output.is_dir():
                shutil.rmtree(output)  # it was trained otherwise
            begin = time.perf_counter()
            try:
                took[name] = self.run(stage, argv)
            except (InputError, RuntimeError) as error:  # the latter are torch's: memory, a kernel that is missing
                self.spent += time.perf_counter() - begin
                if name == names[-1] and not commands:
                    raise
                line = str(error).partition("\n")[0]
                self.failed[name] = f"{name} is left out, its training failed on amount {rung}: {line}"
                print(self.failed[name], flush=True)
                if name in self.trials:
                    self.dropped[name] = rung - 1
                continue
            commands[name] = argv
        names = list(commands)
        path = self.output / "trials" / f"{rung}.json"
        drafters = {name: str(self.output / "trials" / str(rung) / name) for name in names}
        copies = [] if rung > 1 else list(COPIES)
        there = read(KeptRung, path) if path.is_file() else None
        if there is None or there.commands != commands or there.replayed.keys() != {*names, *copies}:
            begin = time.perf_counter()
            found = replayed(self.config, drafters | {name: name for name in copies}, self.heldout)
            seconds = time.perf_counter() - begin
            training = {name: _train_seconds(directory) for name, directory in drafters.items()}
            write_json(path, KeptRung(tokens, commands, training, found, seconds))
        rounds = read(KeptRung, path)
        self.spent += rounds.seconds
        for name, by_temperature in rounds.replayed.items():
            training_seconds = rounds.training.get(name, 0.0)
            self.trials.setdefault(name, []).append(
                Trial(drafters.get(name, name), tokens, training_seconds, by_temperature)
            )
            if name in took:
                beside = max(0.0, took[name] - training_seconds) + rounds.seconds / len(rounds.replayed)
                self.paces[name] = Pace(training_seconds / tokens, beside)
        return names

    def tokens(self, directories: Sequence[str]) -> int:
        """Return how many tokens the target wrote there."""
        samples = (sample for path in directories for sample in load_completions(path))
        return sum(len(sample["input_ids"]) - sample["prompt_length"] for sample in samples)

    def say(self, rung: int, names: Sequence[str], tokens: int) -> None:
        """Say where it stands."""
        print(
            f"\n{rung} of {RUNGS}: {', '.join(names)} on {tokens:,} tokens of text; {time_text(self.spent)} of "
            f"{time_text(self.seconds)} spent",
            flush=True,
        )

    def reach(self, name: str, write: float) -> float:
        """Return the tokens of text that a candidate will learn from when it has won."""
        trained = float(self.trials[name][-1].tokens)
        if self.config.budget_tokens is not None:
            return max(float(self.config.budget_tokens), trained)
        choosing = self.spent if self.over else max(self.spent, self.seconds)
        left = max(self.config.seconds - choosing, 0.0)
        # No more than the target can write from these prompts.
        most = self.written / self.used * len(self.train) * self.answers_of(MOST_SAMPLES) / self.answers_of(1)
        return max(min(affordable(left, self.paces[name], self.written, write), most), trained)

    def answers_of(self, samples: int) -> int:
        """Return how many answers a prompt has with this many samples: one at T=0, as many elsewhere."""
        return sum(samples if temperature > 0 else 1 for temperature in self.config.temperature)


def choose(config: ChooseConfig) -> Choice:
    """Choose a drafter, write choose.json, choose.html and winner.yaml, and return what was found.

    Raises:
        InputError: prompts or models that cannot be used, an output of other settings, or a stage that failed.
    """
    output = require_writable(config.output)
    prompts = read_prompts(config.prompts, limit=config.limit)
    least = config.heldout_prompts + 2 * LEAST_PROMPTS
    if len(prompts) < least:
        raise InputError(
            f"prompts: expected at least {least} in {config.prompts}, {config.heldout_prompts} of them held out, found "
            f"{len(prompts)}"
        )
    if config.costs is None:  # they are measured here
        require_rollback(config.target, config.trust_remote_code)
    settle(config, output, [prompt.record() for prompt in prompts])
    random.Random(config.seed).shuffle(prompts)
    heldout, train = dealt(config, prompts, config.heldout_prompts)
    run = Choosing(config, checked_candidates(config), output, train, Stages(output / "stages"))
    with note_on_interrupt(lambda: f"what has ended is kept in {output}; the same command goes on from there"):
        # Stages of its own: another --draft must not undo the stages that follow.
        words = {"target": config.target, "trust_remote_code": config.trust_remote_code}
        words |= {} if config.draft is None else {"draft": config.draft}
        Stages(output / "doctor").run("doctor", ["doctor", *flags_of(words)])
        path = output / "prompts/heldout.jsonl"
        write_prompts(path, [prompt.record() for prompt in heldout])
        wrote = 0.0
        for temperature in config.temperature:
            name = f"heldout-{temperature:g}"
            wrote += run.run(name, ["prepare", *flags_of(run.answers(name, path) | {"temperatures": temperature})])
        wrote /= len(heldout)
        first = round(FIRST_TEXT * run.seconds / max(wrote, 1e-9))
        return _halve(run, min(max(first, LEAST_PROMPTS), len(train) // 2))


def _halve(run: Choosing, first: int) -> Choice:
    """Go through all amounts of text; `first` is how many prompts the first one has."""
    names, write = list(run.candidates), 0.0
    seconds, prompts, tables = 0.0, first, dict[str, CostTable]()
    for rung in range(1, RUNGS + 1):
        new = run.train[run.used : run.used + prompts]
        seconds += run.write(f"text-{rung}", new)
        run.used += len(new)
        names = run.rung(rung, names)
        write = seconds / run.written
        if rung == 1:
            tables = _costs(run)
        if rung == RUNGS:
            break
        left, paces = run.seconds - run.spent, [run.paces[name] for name in names]
        if not begins(left, rung, run.written, paces, len(run.candidates), write):
            print("the time is spent: nothing more is trained", flush=True)
            break
        going_on = survivors(rung + 1, len(run.candidates))
        if going_on < len(names):
            scores = {name: _standing(run, name, tables, write).worth for name in names}
            remain = kept(scores, going_on)
            run.dropped |= {name: rung for name in names if name not in remain}
            print(f"dropped: {', '.join(name for name in names if name not in remain)}", flush=True)
            names = remain
        per_prompt = run.written / run.used
        factor = growth(
            left, rung, run.written, [run.paces[name] for name in names], len(run.candidates), write,
            per_prompt * len(run.train),
        )  # fmt: skip
        if rung == 1:  # with less, those that are dropped first have no forecast; prompts differ in length
            factor = max(factor, 1.1 * LEAST_SPREAD)
        # The prompts that are left are enough for one more of each amount that comes.
        most = len(run.train) - run.used - (RUNGS - rung - 1)
        prompts = max(1, min(most, round(run.used * (factor - 1))))
    return _chosen(run, tables, write)


def _costs(run: Choosing) -> dict[str, CostTable]:
    path = run.output / "costs.json"
    kept = run.output / "stages" / "costs.json"
    of = as_json([read(KeptRung, run.output / "trials/1.json").commands, run.config.loading()])
    before = read(dict[str, Any], kept) if kept.is_file() else None
    if before is None or before.get("of") != of:
        path.unlink(missing_ok=True)  # of others
    print("\ncosts of rounds, all candidates side by side", flush=True)
    drafters = {name: trials[-1].drafter for name, trials in run.trials.items()}
    begin = time.perf_counter()
    tables = measured_costs(run.config, drafters, run.heldout, path)
    if before is None or before.get("of") != of:
        before = {"of": of, "seconds": time.perf_counter() - begin}
        write_json(kept, before)
    run.spent += float(before["seconds"])
    return tables


def _standing(run: Choosing, name: str, tables: Mapping[str, CostTable], write: float) -> Standing:
    trials = run.trials[name]
    trained = name in run.candidates
    tokens = run.reach(name, write) if trained else float(trials[-1].tokens)
    fields = dict(run.candidates.get(name, {}))
    return Standing(
        name,
        fields.pop("command", None),
        fields,
        trials,
        run.dropped.get(name),
        outlooks(name, trials, tables, run.config.batch_size, tokens),
        run.paces[name].per_token if trained else 0.0,
    )


def _chosen(run: Choosing, tables: Mapping[str, CostTable], write: float) -> Choice:
    config, output = run.config, run.output
    run.over = True
    standings = [_standing(run, name, tables, write) for name in run.trials]
    # Those that were dropped are behind those that were not: their forecasts rest on less.
    standings.sort(key=lambda its: (its.dropped_after is not None, [-part for part in its.worth]))
    winner, reason = verdict([its for its in standings if its.dropped_after is None])
    commands, more, where = list[str](), dict[str, Estimate](), ""
    if winner != NONE:
        won = by_name(standings)[winner]
        commands = _next(run, won)
        if won.command is not None:
            best = max(won.outlooks, key=lambda each: each.forecast.value or 0.0)
            where = settings_text([best])
            for times in TIMES:
                table, tokens = tables[best.temperature], times * won.trials[-1].tokens
                ahead = outlook(won.name, won.trials, table, best.temperature, best.rows, tokens)
                more[f"{tokens:.0f}"] = ahead.forecast
    costs = read(CostFile, Path(config.costs) if config.costs else output / "costs.json", "costs")
    choice = Choice(
        SCHEMA, config.target, costs.environment | {"compiled": costs.compiled}, config.seconds, run.spent, run.amounts,
        standings, winner, reason, more, where, commands, run.failed,
    )  # fmt: skip
    write_json(output / "choose.json", choice)
    write_page(choice, output / "choose.html")
    return choice


def _next(run: Choosing, won: Standing) -> list[str]:
    """Write winner.yaml, and return the commands that come next."""
    config, output = run.config, run.output
    heldout, commands = output / "prompts/heldout.jsonl", list[str]()
    directory = output / "winner"
    if won.command is not None:
        recipe = recipes()[won.command]
        fields = run.training(won.name, len(run.amounts), directory)
        fields = {key: value for key, value in fields.items() if not key.startswith(recipe.made)}
        fields |= {recipe.begun: won.trials[-1].drafter}
        fields = {"heldout": [run.heldout[max(config.temperature)]]} | fields | BEST_OF_EPOCHS
        missing = won.outlooks[0].tokens - run.written
        if missing > 0.1 * run.written:
            commands.append(_more_text(run, missing))
            fields |= {"completions": [*fields["completions"], str(run.completions(MORE))], "dedup": "texts"}
        text = yaml.safe_dump(as_json(nested(fields)), sort_keys=False, allow_unicode=True)
        note = f"# {won.name} for {config.target}: what `draftsmith choose` found. It goes on from the last trial.\n"
        write_aside(output / "winner.yaml", note + text)
        commands.append(shell(["draftsmith", won.command, *config.launcher(), "--config", output / "winner.yaml"]))
        if won.tree_alone and 0.0 in config.temperature and config.server is None:  # servers draft chains of such heads
            words = {"target": config.target, "drafter": directory, "trust_remote_code": config.trust_remote_code}
            words["completions"] = [run.heldout[0.0]]
            commands.append(shell(["draftsmith", "tree", *flags_of(words)]))
    for outlook_ in won.pays():
        drafter, length = best_way(won, outlook_, directory)
        name = f"report-{outlook_.temperature}-{outlook_.rows}"
        words = {"target": config.target, "prompts": heldout, "drafter": drafter, "draft_length": length}
        words |= {"temperature": outlook_.temperature, "batch_size": outlook_.rows, "output": output / name}
        commands.append(shell(["draftsmith", "measure", *flags_of(words | config.texts() | config.loading())]))
    return commands


def _more_text(run: Choosing, missing: float) -> str:
    """Write the prompts of the winner's further text, and return the command: new ones, or more answers to all."""
    per_prompt, new = run.written / run.used, run.train[run.used :]
    wanted = math.ceil(missing / per_prompt)
    hot = run.answers_of(2) - run.answers_of(1)
    prompts, samples = new[:wanted], 1
    if wanted > len(new) and hot:
        prompts = run.train
        samples = min(MOST_SAMPLES, math.ceil(wanted * run.answers_of(1) / hot / len(prompts)))
    path = run.output / "prompts" / f"{MORE}.jsonl"
    write_prompts(path, [prompt.record() for prompt in prompts])
    answers = run.answers(MORE, path) | {"seed": run.config.seed + 1, "samples": samples}
    return shell(["draftsmith", "prepare", *flags_of(answers)])


def dealt(config: ChooseConfig, prompts: list[Prompt], count: int) -> tuple[list[Prompt], list[Prompt]]:
    """Return the first prompts, to be measured on, and the others, but for those that are the same to the target.

    Raises:
        InputError: one that the target cannot read.
    """
    tokenizer = load_tokenizer(config.target, field="target", trust_remote_code=config.trust_remote_code)
    ids = [tuple(encode_prompt(prompt, tokenizer, **config.encoding)) for prompt in prompts]
    measured = set(ids[:count])
    return prompts[:count], [prompt for at, prompt in enumerate(prompts) if ids[at] not in measured]


def settle(config: ChooseConfig, output: Path, prompts: Sequence[dict[str, Any]], free: Sequence[str] = FREE) -> None:
    """Keep settings and prompts, or require that an earlier run had the same, but for those that are `free`.

    Raises:
        InputError: it had others.
    """
    path = output / "settings.json"
    settings = {name: value for name, value in as_json(config).items() if name not in free}
    settings["prompts"] = hashlib.sha256(json.dumps(prompts).encode()).hexdigest()
    if path.is_file():
        earlier = read(dict[str, Any], path)
        for name, value in settings.items():
            if earlier.get(name) != value:
                raise InputError(
                    f"output: expected {output} of the same {name}, {value!r}, found it of {earlier.get(name)!r}; give "
                    "another directory"
                )
    write_json(path, settings)


def _train_seconds(directory: str) -> float:
    """Return the seconds of a training run, as its trainer noted them."""
    state = parse_json((Path(directory) / "trainer_state.json").read_text(encoding="utf-8"))
    return float(next(entry["train_runtime"] for entry in state["log_history"] if "train_runtime" in entry))


def main(argv: Sequence[str] | None = None) -> int:
    """Choose, print the table, and say what comes next."""
    config = parse_config(ChooseConfig, argv, prog="draftsmith choose")
    if config.dry_run:
        say_plan(config)
        return 0
    print_choice(choose(config), Path(config.output))
    return 0
