"""The candidates of `choose`, and their trials on growing amounts of text."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftsmith.decode.errors import InputError
from draftsmith.decode.progress import time_text
from draftsmith.decode.validation import parse_json
from draftsmith.scripts.choose.config import ChooseConfig
from draftsmith.scripts.choose.forecast import LEAST_AMOUNTS, Trial
from draftsmith.scripts.choose.rounds import MeasuredCosts, ReplayedRounds, measured_costs, replay_candidates
from draftsmith.scripts.cli import launcher_flags
from draftsmith.scripts.kinds import KINDS, recipes
from draftsmith.scripts.stages import JUDGED_LATER, Stages
from draftsmith.train.cli import check_fields, flags_of
from draftsmith.train.data.corpus import write_prompts
from draftsmith.train.data.generate import load_completions
from draftsmith.train.data.prompts import Prompt
from draftsmith.train.models import load_config

AMOUNTS = 4  # of text; a forecast with an interval needs all
FINALISTS = 2
FACTORS = (6, 4, 3, 2)  # by which text may grow from one amount to the next
CHOOSING = 0.5  # the share of the budget for choosing; the rest is the winner's
FIRST = 0.75  # the share of the time for choosing after which no other candidate is tried on the first amount
COSTS = 0.25  # the share for the costs of rounds
PROGRAM_SECONDS = 20.0
"""Seconds to compile a program on two cores. There are about two for each drafter and two for the target."""


def candidates_of(config: ChooseConfig) -> dict[str, dict[str, Any]]:
    """Return the candidates by name: those of the config, or of every kind that can be trained for the target.

    Raise InputError if one has fields that its command does not.
    """
    candidates = dict(config.candidates)
    if not candidates:
        target = load_config(config.target, field="target", trust_remote_code=config.trust_remote_code)
        for kind in KINDS:
            if kind.recipe is not None:
                by_name = kind.candidates(target, config.server)
                candidates |= {name: {"command": kind.recipe.command} | fields for name, fields in by_name.items()}
        if config.draft is not None:
            candidates["draft"] = {"command": "distill", "draft": config.draft}
    for name, fields in candidates.items():
        try:
            argv = flags_of(config.training(own_fields(fields), ["text"], "output") | JUDGED_LATER)
            check_fields(recipes()[fields["command"]].config_class(), launcher_flags(argv)[1])
        except InputError as error:
            raise InputError(f"candidates: {name}: {error}") from error
    return candidates


def own_fields(candidate: Mapping[str, Any]) -> dict[str, Any]:
    """Return a candidate's fields without its command."""
    return {key: value for key, value in candidate.items() if key != "command"}


def commands_in_turns(candidates: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the candidates' names: the first of each command, then the second of each, and so on."""
    turns, counts = dict[str, int](), Counter[str]()
    for name, fields in candidates.items():
        turns[name] = counts[fields["command"]]
        counts[fields["command"]] += 1
    return sorted(candidates, key=lambda name: turns[name])


def survivors(amount: int, candidates: int) -> int:
    """Return the number of candidates that learn from an amount of text, from 1.

    Successive halving (Jamieson & Talwalkar 2016, section 3), but all learn from two amounts, because one does not show
    how they improve.
    """
    if amount <= LEAST_AMOUNTS:
        return candidates
    return min(candidates, max(FINALISTS, math.ceil(candidates / 2)) if amount < AMOUNTS else FINALISTS)


@dataclass
class Sweep:
    """Candidates, and what they have learned so far."""

    config: ChooseConfig
    candidates: dict[str, dict[str, Any]]
    output: Path
    train: list[Prompt]
    stages: Stages
    heldout: dict[float, str] = field(default_factory=dict)  # directories of held-out answers, by temperature
    texts: list[str] = field(default_factory=list)  # directories; an amount of text is all of them so far
    used: int = 0  # prompts of `train` that are answered
    amounts: list[int] = field(default_factory=list)  # tokens of text
    trials: dict[str, list[Trial]] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)  # candidate → the last amount that it learned from
    failed: dict[str, str] = field(default_factory=dict)
    """Candidates that were left out, and why. A candidate whose training failed is tried again by the next run."""

    @property
    def seconds(self) -> float:
        """The time for choosing, in seconds."""
        return self.config.seconds * CHOOSING

    @property
    def write(self) -> float:
        """Seconds to write a token of text."""
        return sum(s for name, s in self.stages.seconds.items() if name.startswith("text-")) / self.amounts[-1]

    def answer(self, name: str, prompts: Sequence[Prompt], **fields: Any) -> str:
        """Let the target answer prompts, and return the directory of its text."""
        path, directory = self.output / "prompts" / f"{name}.jsonl", self.output / "completions" / name
        write_prompts(path, [prompt.record() for prompt in prompts])
        self.stages.run(name, self.config.prepare(path, directory, **fields))
        return str(directory)

    def more_text(self, count: int) -> None:
        """Let the target answer further prompts."""
        prompts = self.train[self.used : self.used + count]
        self.texts.append(self.answer(f"text-{len(self.texts) + 1}", prompts))
        self.used += len(prompts)
        samples = (sample for text in self.texts for sample in load_completions(text))
        self.amounts.append(sum(len(sample["input_ids"]) - sample["prompt_length"] for sample in samples))

    def training(self, name: str, output: Path) -> dict[str, Any]:
        """Return the fields of a candidate's training on all text so far."""
        return self.config.training(own_fields(self.candidates[name]), self.texts, output)

    def trial(self, name: str) -> Trial:
        """Train a candidate on all text, and replay it on the held-out answers."""
        number = len(self.texts)
        stages, drafter, seconds = [f"replay-{number}-{name}"], name, 0.0
        if name in self.candidates:
            output = self.output / "trials" / str(number) / name
            argv = [self.candidates[name]["command"], *flags_of(self.training(name, output) | JUDGED_LATER)]
            stages.append(f"train-{number}-{name}")
            self.stages.run(stages[1], argv, fresh=output)
            drafter, seconds = str(output), _train_seconds(output)
        replayed = self.stages.call(
            stages[0],
            [drafter, self.config.draft_length, self.config.server],
            lambda: replay_candidates(self.config, {name: drafter}, self.heldout)[name],
            dict[str, ReplayedRounds],
        )
        extra = max(0.0, sum(self.stages.seconds[stage] for stage in stages) - seconds)
        return Trial(drafter, self.amounts[-1], seconds, extra, replayed)

    def try_all(self, names: Sequence[str]) -> list[str]:
        """Try candidates on all text, and return those that were tried; raise InputError if all trainings failed.

        On the first amount a candidate is left out if there is no time for it.
        """
        number, tried, error = len(self.texts), list[str](), None
        print(
            f"\n{number} of {AMOUNTS}: {', '.join(names)} on {self.amounts[-1]:,} tokens of text; "
            f"{time_text(self.stages.spent)} of {time_text(self.seconds)} spent",
            flush=True,
        )
        for name in names:
            try:
                if number == 1 and tried and self.stages.spent > FIRST * self.seconds:
                    self.failed[name] = f"{name} is left out: there was no time to train it as well"
                else:
                    self.trials.setdefault(name, []).append(self.trial(name))
                    tried.append(name)
            except (InputError, RuntimeError) as failure:  # torch raises the latter: out of memory, a missing kernel
                error, line = failure, str(failure).partition("\n")[0]
                self.failed[name] = f"{name} is left out, its training failed on amount {number}: {line}"
                if self.trials.get(name):
                    self.dropped[name] = number - 1
                else:
                    self.trials.pop(name, None)
            if name in self.failed:
                print(self.failed[name], flush=True)
        if not tried and error is not None:
            raise error
        return tried

    def trial_seconds(self, name: str, tokens: float) -> float:
        """Return the seconds that a candidate's trial on an amount of text would take."""
        last = self.trials[name][-1]
        return last.extra + last.seconds / last.tokens * tokens

    def growth(self, names: Sequence[str], candidates: int) -> int | None:
        """Return the greatest factor by which text may grow for as many further amounts as fit the time, if any.

        Later survivors are unknown, so a mean trial counts for each of the `candidates` that remain then.
        """
        number, left = len(self.texts), self.seconds - self.stages.spent

        def needed(factor: int, amounts: int) -> float:
            seconds, tokens = 0.0, float(self.amounts[-1])
            for later in range(number + 1, number + amounts + 1):
                seconds += self.write * tokens * (factor - 1)
                tokens *= factor
                mean = sum(self.trial_seconds(name, tokens) for name in names) / len(names)
                seconds += survivors(later, candidates) * mean
            return seconds

        fitting = (
            factor
            for amounts in range(AMOUNTS - number, 0, -1)
            for factor in FACTORS
            if self.used * factor**amounts <= len(self.train) and needed(factor, amounts) <= left
        )
        return next(fitting, None)

    def costs(self) -> MeasuredCosts:
        """Measure the costs of rounds, all candidates side by side; eager ones if there is no time to compile."""
        drafters = {name: trials[-1].drafter for name, trials in self.trials.items()}
        compiled, left = self.config.compiled, self.seconds - self.stages.spent
        if compiled is None and PROGRAM_SECONDS * (2 * len(drafters) + 2) > left / 2:
            compiled = False
        costs: MeasuredCosts = self.stages.call(
            "costs",
            [drafters, self.config.loading(), self.config.draft_length, self.config.batch_size],
            lambda: measured_costs(self.config, drafters, self.heldout, compiled, COSTS * self.seconds),
            MeasuredCosts,
        )
        return costs

    def reach(self, name: str) -> float:
        """Return the tokens of text that a candidate can learn from if it wins, in the rest of the budget."""
        last, written = self.trials[name][-1], self.amounts[-1]
        left = max(0.0, self.config.seconds - max(self.stages.spent, self.seconds) - last.extra)
        per_token = last.seconds / last.tokens
        tokens = left / per_token
        if tokens > written:  # further text must be written
            tokens = (left + self.write * written) / (per_token + self.write)
        return max(min(tokens, written / self.used * len(self.train)), float(last.tokens))


def _train_seconds(directory: Path) -> float:
    state = parse_json((directory / "trainer_state.json").read_text(encoding="utf-8"))
    return float(next(entry["train_runtime"] for entry in state["log_history"] if "train_runtime" in entry))
