"""`draftsmith choose --target T --prompts P --budget 2h --output DIR`: which drafter to train for a target.

The target answers held-out prompts, and a few others. On each of a few growing amounts of text, candidates are trained
from scratch, each by its own command, and replayed on the held-out answers. Costs of rounds are measured once, all
candidates in turns. The budget is checked between the calls. Finished ones are kept.
"""

import hashlib
import json
import random
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from rich.console import Console

from draftsmith.decode.cache import follows_one_path
from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement.costs import CostTable
from draftsmith.decode.measurement.intervals import Estimate, format_estimate
from draftsmith.decode.progress import time_text
from draftsmith.decode.validation import read
from draftsmith.scripts.choose.config import LLAMA_CPP, NONE, ChooseConfig
from draftsmith.scripts.choose.forecast import Outlook, Standing, close_to, outlook, outlooks, settings_text, verdict
from draftsmith.scripts.choose.sweep import AMOUNTS, Sweep, candidates_of, commands_in_turns, own_fields, survivors
from draftsmith.scripts.engines.offline.llama_cpp import LlamaCpp, cuts_of
from draftsmith.scripts.kinds import recipes
from draftsmith.scripts.pair import require_rollback
from draftsmith.scripts.stages import Stages
from draftsmith.scripts.summary import figures_table, print_doubts
from draftsmith.train.cli import flags_of, parse_config
from draftsmith.train.data.corpus import write_prompts
from draftsmith.train.data.prompt_files import read_prompts
from draftsmith.train.data.prompts import Prompt, encode_prompts
from draftsmith.train.files import require_writable, write_atomically
from draftsmith.train.kinds.quantities import count
from draftsmith.train.models import load_config, load_tokenizer
from draftsmith.train.provenance import as_json, write_json
from draftsmith.train.runs import note_on_interrupt

SCHEMA = "draftsmith.choose/2"
LEAST_PROMPTS = 64
HELDOUT, FIRST = 64, 32  # the most prompts that are held out, and of the first amount; an eighth of a small file
FREE = ("output", "candidates", "draft", "learning", "threads", "dtype", "compiled")
"""Fields that may change in an output that an earlier run began: its text is kept, affected trainings run again."""
BEST_OF_EPOCHS = {"training.save_strategy": "epoch", "training.save_total_limit": 1}
"""Fields of a training run that keep the epoch that is best on held-out text."""
TIMES = (2.0, 4.0, 10.0)  # multiples of the last trial's text for which the winner's speed-up is forecast


@dataclass(frozen=True)
class Choice:
    """The choice, with everything that it rests on: choose.json."""

    schema: str
    target: str
    environment: dict[str, Any]  # of the measured costs
    budget: float  # seconds for everything
    seconds: dict[str, float]  # of choosing, by stage
    amounts: list[int]  # tokens of text that candidates learned from
    standings: list[Standing]  # best first
    winner: str  # a name, or `none`
    reason: str
    close: list[str]  # candidates too close to the winner to tell
    more_text: dict[str, Estimate]  # the winner's forecast by tokens of text
    more_text_at: str  # the temperature and batch size of these forecasts, those of its best forecast
    commands: list[list[str]]  # the next ones, in order
    failed: dict[str, str]  # candidate → why it was left out: its training failed, or there was no time for it
    doubts: list[str]  # repeated measurements of costs that do not agree


def choose(config: ChooseConfig) -> Choice:
    """Choose a drafter, write choose.json and winner.yaml, and return the choice."""
    if config.server == LLAMA_CPP:  # nothing is trained before it is known that rounds can be priced
        LlamaCpp.found().program("llama-server")
        cuts_of(config.text)
    output, prompts = begin(config, FREE)
    random.Random(config.seed).shuffle(prompts)
    heldout, train = split_prompts(config, prompts, min(HELDOUT, len(prompts) // 8))
    sweep = Sweep(config, candidates_of(config), output, train, Stages(output / "stages"))
    with note_on_interrupt(lambda: f"finished stages are kept in {output}; the same command continues from there"):
        target = {"target": config.target, "trust_remote_code": config.trust_remote_code}
        sweep.stages.run("doctor", ["doctor", *flags_of(target)])
        for temperature in config.temperature:
            name = f"heldout-{temperature:g}"
            sweep.heldout[temperature] = sweep.answer(name, heldout, temperatures=temperature)
        sweep.more_text(min(FIRST, len(train) // 8))
        for name in config.copies:
            sweep.trials[name] = [sweep.trial(name)]
        return _halve(sweep)


def _halve(sweep: Sweep) -> Choice:
    """Train on growing amounts of text, dropping the worse candidates after each, and return the choice."""
    names = sweep.try_all(commands_in_turns(sweep.candidates))
    candidates, costs = len(names), sweep.costs()
    tables = {f"{table.temperature:g}": table for table in costs["tables"]}
    while len(sweep.texts) < AMOUNTS and names and (factor := sweep.growth(names, candidates)):
        number = len(sweep.texts)
        worth = {name: _standing(sweep, name, tables).worth for name in names}
        best = sorted(names, key=lambda name: worth[name], reverse=True)[: survivors(number + 1, candidates)]
        sweep.dropped |= {name: number for name in names if name not in best}
        sweep.more_text(sweep.used * (factor - 1))
        names = sweep.try_all([name for name in names if name in best])
    environment = costs["environment"] | {"compiled": costs["compiled"]}
    return _chosen(sweep, environment, tables)


def _standing(sweep: Sweep, name: str, tables: Mapping[str, CostTable]) -> Standing:
    trials, fields = sweep.trials[name], sweep.candidates.get(name, {})
    tokens = sweep.reach(name) if fields else float(trials[-1].tokens)
    ahead = outlooks(name, trials, tables, sweep.config.batch_size, tokens)
    return Standing(name, fields.get("command"), own_fields(fields), trials, sweep.dropped.get(name), ahead)


def _chosen(sweep: Sweep, environment: dict[str, Any], tables: Mapping[str, CostTable]) -> Choice:
    config = sweep.config
    standings = [_standing(sweep, name, tables) for name in sweep.trials]
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
    commands, more, settings = list[list[str]](), dict[str, Estimate](), ""
    if winner != NONE:
        won = next(standing for standing in standings if standing.name == winner)
        commands = next_commands(sweep, won)
        if won.command is not None:
            best = max(won.outlooks, key=lambda outlook: outlook.forecast.value or 0.0)
            settings = settings_text([best])
            for times in TIMES:
                table, tokens = tables[best.temperature], times * won.trials[-1].tokens
                ahead = outlook(won.name, won.trials, table, best.temperature, best.rows, tokens)
                more[f"{tokens:.0f}"] = ahead.forecast
    choice = Choice(
        SCHEMA, config.target, environment, config.seconds, sweep.stages.seconds, sweep.amounts, standings, winner,
        reason, close, more, settings, commands, sweep.failed, doubts,
    )  # fmt: skip
    write_json(sweep.output / "choose.json", choice)
    return choice


def next_commands(sweep: Sweep, won: Standing) -> list[list[str]]:
    """Write winner.yaml, and return the commands that train the winner, search its tree and measure it."""
    config, output, commands = sweep.config, sweep.output, list[list[str]]()
    directory = output / "winner"
    if won.command is not None:
        recipe = recipes()[won.command]
        fields = sweep.training(won.name, directory)
        fields = {key: value for key, value in fields.items() if not key.startswith(recipe.made)}
        fields |= {recipe.begun: won.trials[-1].drafter}
        fields = {"heldout": [sweep.heldout[max(config.temperature)]]} | fields | BEST_OF_EPOCHS
        per_prompt = sweep.amounts[-1] / sweep.used
        missing = round((won.outlooks[0].tokens - sweep.amounts[-1]) / per_prompt)
        if missing > 0.1 * sweep.used:
            more = output / "completions/text-winner"
            prompts = output / "prompts/text-winner.jsonl"
            write_prompts(prompts, [prompt.record() for prompt in sweep.train[sweep.used :][:missing]])
            commands.append(config.prepare(prompts, more))
            fields |= {"completions": [*fields["completions"], str(more)]}
        processes = flags_of({"processes": fields.pop("processes")}) if "processes" in fields else []
        text = yaml.safe_dump(as_json(_nested(fields)), sort_keys=False, allow_unicode=True)
        note = f"# {won.name} for {config.target}: what `draftsmith choose` found. It begins with the last trial.\n"
        write_atomically(output / "winner.yaml", note + text)
        commands.append([won.command, *processes, "--config", str(output / "winner.yaml")])
        # Servers draft chains, not trees, and targets with states verify chains alone.
        target = load_config(config.target, field="target", trust_remote_code=config.trust_remote_code)
        trees = config.server is None and not follows_one_path(target)
        if won.tree_alone and 0.0 in config.temperature and trees:
            words = {"target": config.target, "drafter": directory, "trust_remote_code": config.trust_remote_code}
            commands.append(["tree", *flags_of(words | {"completions": [sweep.heldout[0.0]]})])
    for setting in won.pays():
        name = f"report-{setting.temperature}-{setting.rows}"
        words = {"target": config.target, "prompts": output / f"prompts/heldout-{setting.temperature}.jsonl"}
        words |= {"drafter": won.drafter(setting, str(directory)), "draft_length": setting.way.draft_length}
        words |= {"temperature": setting.temperature, "batch_size": setting.rows, "output": output / name}
        words |= {"costs": LLAMA_CPP} if config.server == LLAMA_CPP else {}
        commands.append(["measure", *flags_of(words | config.texts() | config.loading())])
    return commands


def _nested(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted fields as nested ones, as in YAML."""
    fields_by_group: dict[str, Any] = {}
    for key, value in fields.items():
        group, dot, name = key.partition(".")
        if dot:
            fields_by_group.setdefault(group, {})[name] = value
        else:
            fields_by_group[key] = value
    return fields_by_group


def split_prompts(config: ChooseConfig, prompts: list[Prompt], count: int) -> tuple[list[Prompt], list[Prompt]]:
    """Split prompts into the first `count`, to measure on, and the rest, without any that encode to the same tokens."""
    tokenizer = load_tokenizer(config.target, field="target", trust_remote_code=config.trust_remote_code)
    prompts, ids = encode_prompts(prompts, tokenizer, None, config.text.invalid_prompts, **config.text.encoding)
    measured = set(map(tuple, ids[:count]))
    return prompts[:count], [prompt for at, prompt in enumerate(prompts) if tuple(ids[at]) not in measured]


def begin(config: ChooseConfig, free: Sequence[str]) -> tuple[Path, list[Prompt]]:
    """Read the prompts, write the settings, and return the output and the prompts.

    Raise InputError for too few prompts, or if an earlier run had other settings, apart from the fields in `free`.
    """
    output = require_writable(config.output)
    prompts = read_prompts(config.prompts, invalid=config.text.invalid_prompts)
    if len(prompts) < LEAST_PROMPTS:
        raise InputError(f"prompts: expected at least {LEAST_PROMPTS} in {config.prompts}, found {len(prompts)}")
    require_rollback(config.target, config.trust_remote_code)
    path = output / "settings.json"
    settings = {name: value for name, value in as_json(config).items() if name not in free}
    records = json.dumps([prompt.record() for prompt in prompts])
    settings["prompts"] = hashlib.sha256(records.encode()).hexdigest()
    if path.is_file():
        earlier = read(dict[str, Any], path)
        for name, value in settings.items():
            if earlier.get(name) != value:
                raise InputError(
                    f"output: expected {output} of the same {name}, {value!r}, found it of {earlier.get(name)!r}; give "
                    "another directory"
                )
    write_json(path, settings)
    return output, prompts


def print_choice(choice: Choice, output: Path, console: Console | None = None) -> None:
    """Print the candidates, the choice and the next commands; the table fits 80 columns."""
    console = console or Console()

    def say(line: str) -> None:
        console.print(line, highlight=False, soft_wrap=True, markup=False)

    for number, setting in enumerate(choice.standings[0].outlooks):
        table = figures_table(
            ("candidate", "γ", "τ", "now", "forecast", "at tokens"),
            "candidate",
            f"T={setting.temperature}, {setting.rows} at a time: speed-up",
            "brackets: 95 % interval; dropped ones last" if number == 0 else None,
        )
        for standing in choice.standings:
            here = standing.outlooks[number]
            foretold = standing.command is not None and here.foretold
            table.add_row(
                standing.name if standing.dropped_after is None else f"({standing.name})",
                _way_text(here),
                format_estimate(here.mean_acceptance_length, spread="none"),
                format_estimate(here.now, unit="×", spread="none"),
                format_estimate(here.forecast, unit="×", spread="interval") if foretold else "–",
                count(round(here.tokens)) if foretold else "–",
                style="bold" if standing.name == choice.winner else "",
            )
        console.print(table)
        console.print()
    for line in choice.failed.values():
        say(line)
    say(f"{choice.winner}: {choice.reason}")
    for tokens, forecast in choice.more_text.items():
        speedup = format_estimate(forecast, unit="×", spread="interval")
        say(f"  after {count(int(tokens))} tokens of text, at {choice.more_text_at}: {speedup}")
    print_doubts(console, choice.doubts)
    where, how = choice.environment, "compiled" if choice.environment["compiled"] else "eager"
    say(f"costs of rounds: {where['device']}, {where['dtype']}, {how}, threads: {where['threads']}")
    say(f"{time_text(sum(choice.seconds.values()))} spent; choose.json in {output} has every figure")
    for command in choice.commands:
        say(f"  {shlex.join(['draftsmith', *command])}")


def _way_text(outlook: Outlook) -> str:
    """Return a candidate's way to draft in words."""
    way = outlook.way
    return f"{way.draft_length}" if way.last is None else f"copies {way.draft_length}, else {way.last}"


def main(argv: Sequence[str] | None = None) -> int:
    """Choose, and print the table and the next commands."""
    config = parse_config(ChooseConfig, argv, prog="draftsmith choose")
    print_choice(choose(config), Path(config.output))
    return 0
