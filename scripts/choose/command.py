"""`draftsmith choose --target T --prompts P --budget 2h --output DIR`: which drafter to train for a target.

The target is checked and answers a few prompts, which prices its text, and then the held-out prompts. On each of a few
growing amounts of text, candidates are trained from scratch, each by its own command, and replayed on the held-out
answers. Costs of rounds are measured once, all candidates in turns. Finished stages are kept. No stage starts that does
not fit the time, and one that overruns it is stopped.
"""

import hashlib
import json
import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from draftsmith.decode import clock
from draftsmith.decode.cache import follows_one_path
from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement.costs import CostTable
from draftsmith.decode.measurement.intervals import Estimate
from draftsmith.decode.progress import time_text
from draftsmith.decode.validation import read
from draftsmith.scripts.choose.config import COPIES, NONE, ChooseConfig
from draftsmith.scripts.choose.forecast import LEAST_SPREAD, outlook, outlooks
from draftsmith.scripts.choose.page import print_choice, write_page
from draftsmith.scripts.choose.result import (
    SCHEMA,
    Choice,
    Standing,
    by_name,
    close_to,
    settings_text,
    shell,
    verdict,
)
from draftsmith.scripts.choose.rounds import kept_costs
from draftsmith.scripts.choose.run import COSTS, MOST_SAMPLES, ChooseRun, SavedTrial, checked_candidates, print_plan
from draftsmith.scripts.choose.schedule import LEAST_GROWTH, RUNGS, another_amount_fits, best_names, growth, survivors
from draftsmith.scripts.kinds import recipes
from draftsmith.scripts.pair import require_rollback
from draftsmith.scripts.stages import Stages, flags_of, nest
from draftsmith.scripts.trials import CostFile
from draftsmith.train.cli import OutOfTime, parse_config
from draftsmith.train.data.corpus import write_prompts
from draftsmith.train.data.prompt_files import read_prompts
from draftsmith.train.data.prompts import Prompt, encode_prompts
from draftsmith.train.files import require_writable, write_atomically
from draftsmith.train.models import load_config, load_tokenizer
from draftsmith.train.provenance import as_json, write_json
from draftsmith.train.runs import note_on_interrupt

MORE = "text-winner"  # the name of the winner's additional text
PROBE_PROMPTS, FIRST_PROMPTS = 8, 32
"""Prompts that are answered first, to price the target's text; and prompts of the first amount, if the time allows. The
loss after a handful of training steps does not show how more text would help."""
TEXT, HELDOUT = 0.08, 0.1  # shares of the time for choosing: for the first amount of text, for held-out answers
LEAST_HELDOUT = 8
PROGRAM_SECONDS = 20.0
"""Seconds to compile a program on two cores. There are about two for each drafter and two for the target."""
FREE = ("output", "dry_run", "candidates", "draft", "learning", "epochs", "processes", "threads", "dtype", "compiled")
"""Fields that may change in an output that an earlier run began: its text is kept, affected trainings run again."""
BEST_OF_EPOCHS = {"training.save_strategy": "epoch", "training.save_total_limit": 1}
"""Fields of a training run that keep the epoch that is best on held-out text."""
TIMES = (2.0, 4.0, 10.0)  # multiples of the last trial's text for which the winner's speed-up is forecast


def choose(config: ChooseConfig) -> Choice:
    """Choose a drafter, write choose.json, choose.html and winner.yaml, and return the choice."""
    output = require_writable(config.output)
    checks = Stages(output / "doctor")  # apart: another --draft must not invalidate the stages that follow
    prompts = read_prompts(config.prompts, limit=config.limit, invalid=config.invalid_prompts)
    least = config.heldout_prompts + 2 * FIRST_PROMPTS
    if len(prompts) < least:
        raise InputError(
            f"prompts: expected at least {least} in {config.prompts}, {config.heldout_prompts} of them held out, found "
            f"{len(prompts)}"
        )
    if config.costs is None:  # measured here, which needs a cache that can be rolled back
        require_rollback(config.target, config.trust_remote_code)
    require_same_settings(config, output, [prompt.record() for prompt in prompts])
    random.Random(config.seed).shuffle(prompts)
    heldout, train = split_prompts(config, prompts, config.heldout_prompts)
    run = ChooseRun(config, checked_candidates(config), output, train, Stages(output / "stages"))
    with note_on_interrupt(lambda: f"finished stages are kept in {output}; the same command continues from there"):
        try:
            _prepare(run, checks, heldout)
            for name in COPIES:
                trial, _ = run.trial(name, 1, config.seconds)
                run.trials[name] = [trial]
            return _halve(run)
        except OutOfTime as error:
            raise InputError(
                f"budget: expected time for text, replay and costs, found {config.budget}, which was over after "
                + ", ".join(f"{time_text(seconds)} of {stage}" for stage, seconds in run.ledger.items())
            ) from error


def _prepare(run: ChooseRun, checks: Stages, heldout: Sequence[Prompt]) -> None:
    """Check the target; let it answer the held-out prompts and those of the first amount, as far as the time allows."""
    config, output = run.config, run.output
    words = {"target": config.target, "trust_remote_code": config.trust_remote_code}
    words |= {} if config.draft is None else {"draft": config.draft}
    run.spend("checks", checks.run("doctor", ["doctor", *flags_of(words)], run.rest))
    run.stages.lap()
    run.more_text(PROBE_PROMPTS, run.rest)
    price = run.writing / run.used
    path, affordable = output / "prompts/heldout.jsonl", round(HELDOUT * run.seconds / price)
    write_prompts(path, [prompt.record() for prompt in heldout[: max(LEAST_HELDOUT, affordable)]])
    for temperature in config.temperature:
        name = f"heldout-{temperature:g}"
        answers = run.answers(name, path) | {"temperatures": temperature}
        run.run("held-out text", name, ["prepare", *flags_of(answers)], run.rest)
    missing = min(FIRST_PROMPTS, len(run.train) // 2, round(TEXT * run.seconds / price)) - run.used
    if missing > 0:
        run.more_text(missing, run.rest)


def _halve(run: ChooseRun) -> Choice:
    """Train on growing amounts of text, dropping the worse candidates after each, and return the choice."""
    names, tables, num_candidates = _kinds_in_turns(run.candidates), dict[str, CostTable](), 0
    for rung in range(1, RUNGS + 1):
        try:
            names = run.rung(rung, names)
        except OutOfTime:
            if rung == 1:
                raise
            print(f"amount {rung} took longer than the time that was left, and is not looked at", flush=True)
            break
        if rung == 1:
            tables, num_candidates = _costs(run), len(names)
        if rung == RUNGS or not names:
            break
        left, per_prompt = run.seconds - run.spent, run.written / run.used
        # With less growth, candidates that are dropped now would have no forecast.
        least = 1.1 * LEAST_SPREAD if rung == 1 else LEAST_GROWTH
        paces = [run.paces[name] for name in names]
        if not another_amount_fits(left, rung, run.written, paces, num_candidates, run.write, least):
            print("the time is spent: nothing more is trained", flush=True)
            break
        remaining = survivors(rung + 1, num_candidates)
        if remaining < len(names):
            scores = {name: _standing(run, name, tables).worth for name in names}
            best = best_names(scores, remaining)
            run.dropped |= {name: rung for name in names if name not in best}
            print(f"dropped: {', '.join(name for name in names if name not in best)}", flush=True)
            names = best
        factor = growth(
            left, rung, run.written, [run.paces[name] for name in names], num_candidates, run.write,
            per_prompt * len(run.train),
        )  # fmt: skip
        # Each later amount needs at least one more prompt.
        most = len(run.train) - run.used - (RUNGS - rung - 1)
        try:
            run.more_text(max(1, min(most, round(run.used * (max(factor, least) - 1)))), left)
        except OutOfTime:
            print("the time was over while text was written for the next amount", flush=True)
            break
    return _chosen(run, tables)


def _kinds_in_turns(candidates: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the candidates' names: the first of each command, then the second of each, and so on."""
    turns, counts = dict[str, int](), Counter[str]()
    for name, fields in candidates.items():
        turns[name] = counts[fields["command"]]
        counts[fields["command"]] += 1
    return sorted(candidates, key=lambda name: turns[name])


def _costs(run: ChooseRun) -> dict[str, CostTable]:
    path = run.output / "costs.json"
    stage = run.output / "stages" / "costs.json"
    drafters = {name: trials[-1].drafter for name, trials in run.trials.items()}
    commands = {name: read(SavedTrial, run.output / f"trials/1-{name}.json").command for name in drafters}
    inputs = as_json([commands, run.config.loading()])
    previous = read(dict[str, Any], stage) if stage.is_file() else None
    if previous is None or previous.get("of") != inputs:
        path.unlink(missing_ok=True)  # costs of other drafters
    print("\ncosts of rounds, all candidates side by side", flush=True)
    programs = len(clock.PROGRAMS)
    compiling = PROGRAM_SECONDS * (2 * len(drafters) + 2)
    fits = run.config.compiled is not None or compiling <= (run.seconds - run.spent) / 2
    tables = kept_costs(
        run.config, drafters, run.heldout, path, None if fits else compiling, COSTS * run.seconds, run.rest
    )
    if previous is None or previous.get("of") != inputs:
        previous = {"of": inputs, "seconds": run.stages.lap(), "programs": sum(clock.PROGRAMS[programs:])}
        write_json(stage, previous)
    if run.config.costs is None and (why := read(CostFile, path, "costs").eager):
        run.notes.append(f"Costs are of eager forwards: {why}")
    run.spend("programs", float(previous["programs"]))
    run.spend("costs of rounds", float(previous["seconds"]) - float(previous["programs"]))
    return tables


def _standing(run: ChooseRun, name: str, tables: Mapping[str, CostTable]) -> Standing:
    trials = run.trials[name]
    trained = name in run.candidates
    tokens = run.reach(name) if trained else float(trials[-1].tokens)
    fields = dict(run.candidates.get(name, {}))
    ahead, pace = (
        outlooks(name, trials, tables, run.config.batch_size, tokens),
        run.paces[name].per_token if trained else 0.0,
    )
    return Standing(name, fields.pop("command", None), fields, trials, run.dropped.get(name), ahead, pace)


def _chosen(run: ChooseRun, tables: Mapping[str, CostTable]) -> Choice:
    config, output = run.config, run.output
    run.over = True
    standings = [_standing(run, name, tables) for name in run.trials]
    # Dropped candidates come last, because their forecasts rest on less text.
    standings.sort(key=lambda entry: (entry.dropped_after is not None, [-part for part in entry.worth]))
    left = [entry for entry in standings if entry.dropped_after is None]
    winner, reason = verdict(left)
    close = [] if winner == NONE else close_to(winner, left, tables)
    if close:
        reason += f"; too close to tell from {', '.join(close)}"
    doubts = [line for table in tables.values() for line in table.doubts]
    if doubts:
        reason += "; costs that were measured twice do not agree: measure again before you trust it"
    commands, more, settings = list[str](), dict[str, Estimate](), ""
    if winner != NONE:
        won = by_name(standings)[winner]
        commands = _next(run, won)
        if won.command is not None:
            best = max(won.outlooks, key=lambda outlook: outlook.forecast.value or 0.0)
            settings = settings_text([best])
            for times in TIMES:
                table, tokens = tables[best.temperature], times * won.trials[-1].tokens
                ahead = outlook(won.name, won.trials, table, best.temperature, best.rows, tokens)
                more[f"{tokens:.0f}"] = ahead.forecast
    costs = read(CostFile, Path(config.costs) if config.costs else output / "costs.json", "costs")
    choice = Choice(
        SCHEMA, config.target, costs.environment | {"compiled": costs.compiled}, config.seconds, run.spent, run.amounts,
        standings, winner, reason, close, more, settings, commands, run.failed, run.ledger, run.notes,
        doubts,
    )  # fmt: skip
    write_json(output / "choose.json", choice)
    write_page(choice, output / "choose.html")
    return choice


def _next(run: ChooseRun, won: Standing) -> list[str]:
    """Write winner.yaml, and return the next commands."""
    config, output = run.config, run.output
    heldout, commands = output / "prompts/heldout.jsonl", list[str]()
    directory = output / "winner"
    if won.command is not None:
        recipe = recipes()[won.command]
        fields = run.training(won.name, directory)
        fields = {key: value for key, value in fields.items() if not key.startswith(recipe.made)}
        fields |= {recipe.begun: won.trials[-1].drafter}
        fields = {"heldout": [run.heldout[max(config.temperature)]]} | fields | BEST_OF_EPOCHS
        missing = won.outlooks[0].tokens - run.written
        if missing > 0.1 * run.written:
            commands.append(_more_text(run, missing))
            fields |= {"completions": [*fields["completions"], str(run.completions(MORE))], "dedup": "texts"}
        text = yaml.safe_dump(as_json(nest(fields)), sort_keys=False, allow_unicode=True)
        note = f"# {won.name} for {config.target}: what `draftsmith choose` found. It begins with the last trial.\n"
        write_atomically(output / "winner.yaml", note + text)
        commands.append(shell(["draftsmith", won.command, *config.launcher(), "--config", output / "winner.yaml"]))
        # Servers draft chains, not trees, and targets with states verify chains alone.
        target = load_config(config.target, field="target", trust_remote_code=config.trust_remote_code)
        trees = config.server is None and not follows_one_path(target)
        if won.tree_alone and 0.0 in config.temperature and trees:
            words = {"target": config.target, "drafter": directory, "trust_remote_code": config.trust_remote_code}
            words["completions"] = [run.heldout[0.0]]
            commands.append(shell(["draftsmith", "tree", *flags_of(words)]))
    for setting in won.pays():
        name = f"report-{setting.temperature}-{setting.rows}"
        words = {"target": config.target, "prompts": heldout, "drafter": won.drafter(setting, str(directory))}
        words |= {"draft_length": setting.way.draft_length}
        words |= {"temperature": setting.temperature, "batch_size": setting.rows, "output": output / name}
        commands.append(shell(["draftsmith", "measure", *flags_of(words | config.texts() | config.loading())]))
    return commands


def _more_text(run: ChooseRun, missing: float) -> str:
    """Write the prompts of the winner's further text, and return its command: new prompts, or more answers to all."""
    per_prompt, new = run.written / run.used, run.train[run.used :]
    num_prompts = math.ceil(missing / per_prompt)
    hot = run.answers_of(2) - run.answers_of(1)
    prompts, samples = new[:num_prompts], 1
    if num_prompts > len(new) and hot:
        prompts = run.train
        samples = min(MOST_SAMPLES, math.ceil(num_prompts * run.answers_of(1) / hot / len(prompts)))
    path = run.output / "prompts" / f"{MORE}.jsonl"
    write_prompts(path, [prompt.record() for prompt in prompts])
    answers = run.answers(MORE, path) | {"seed": run.config.seed + 1, "samples": samples}
    return shell(["draftsmith", "prepare", *flags_of(answers)])


def split_prompts(config: ChooseConfig, prompts: list[Prompt], count: int) -> tuple[list[Prompt], list[Prompt]]:
    """Split prompts into the first `count`, to measure on, and the rest, without any that encode to the same tokens."""
    tokenizer = load_tokenizer(config.target, field="target", trust_remote_code=config.trust_remote_code)
    prompts, ids = encode_prompts(prompts, tokenizer, None, config.invalid_prompts, **config.encoding)
    measured = set(map(tuple, ids[:count]))
    return prompts[:count], [prompt for at, prompt in enumerate(prompts) if tuple(ids[at]) not in measured]


def require_same_settings(
    config: ChooseConfig, output: Path, prompts: Sequence[dict[str, Any]], free: Sequence[str] = FREE
) -> None:
    """Write settings and prompts; raise InputError if an earlier run had others, apart from the fields in `free`."""
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


def main(argv: Sequence[str] | None = None) -> int:
    """Choose, and print the table and the next commands."""
    config = parse_config(ChooseConfig, argv, prog="draftsmith choose")
    if config.dry_run:
        print_plan(config)
        return 0
    print_choice(choose(config), Path(config.output))
    return 0
