"""`draftsmith adapt --target T --drafter LINK --log LOG --output DIR`: one step of learning from traffic.

The deployed drafter trains on the log's older requests, mixed with some of its old text. Old and new drafter are then
replayed on the target's answers to the newest requests, which no drafter trained on. The new one replaces the old only
if it is better there. Every stage is an ordinary command; an interrupted step resumes.
"""

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement.intervals import format_estimate
from draftsmith.decode.validation import Count, read
from draftsmith.scripts.adapt.config import AdaptConfig
from draftsmith.scripts.adapt.traffic import Comparison, compare, foreign_share, read_traffic
from draftsmith.scripts.kinds import kind_of
from draftsmith.scripts.stages import JUDGED_LATER, NO_GO, Stages, flags_of
from draftsmith.train.cli import parse_config
from draftsmith.train.data.corpus import write_prompts
from draftsmith.train.files import move_link, require_writable
from draftsmith.train.job.lock import lock_directory
from draftsmith.train.provenance import write_json
from draftsmith.train.runs import note_on_interrupt

SCHEMA: Literal["draftsmith.adapt/1"] = "draftsmith.adapt/1"
STEP, STATE, RESULT = "step-", "state.json", "adapt.json"
_interval = partial(format_estimate, spread="interval")


@dataclass(frozen=True)
class State:
    """Progress of earlier steps through the log, and whether a step is open."""

    schema: Literal["draftsmith.adapt/1"] = SCHEMA
    steps: Count = 0
    requests: Count = 0
    open: bool = False  # the last step has not ended


@dataclass(frozen=True)
class Step:
    """The result of a step, which `adapt.json` holds."""

    schema: str
    verdict: Literal["better", "refused", "foreign"]
    reason: str
    deployed: str  # the drafter before the step
    drafter: str | None  # the new drafter; None if none was trained
    learned: int  # requests
    compared: Comparison | None


def adapt(config: AdaptConfig) -> Step | None:
    """Run one step and return its result; None if the log has too few new requests."""
    output = require_writable(config.output)
    link = Path(config.drafter)
    if config.swap and link.exists() and not link.is_symlink():
        raise InputError(f"drafter: expected a link to the deployed drafter, which swap moves, found {link} itself")
    state = _state(output)
    if not state.open:
        traffic = read_traffic(config, state.requests)
        if traffic is None:
            return None
        state = State(steps=state.steps + 1, requests=traffic.requests, open=True)
        step = output / f"{STEP}{state.steps:04d}"
        write_prompts(step / "learned.jsonl", [prompt.record() for prompt in traffic.learned])
        write_prompts(step / "newest.jsonl", [prompt.record() for prompt in traffic.newest])
        write_json(step / "deployed.json", os.path.realpath(link))
        write_json(output / STATE, state)
    step = output / f"{STEP}{state.steps:04d}"
    with note_on_interrupt(lambda: f"finished stages are kept in {step}; the same command continues from there"):
        result = _step(config, step)
    write_json(step / RESULT, result)
    if result.verdict == "better" and config.swap:
        move_link(link, str(result.drafter))
    # The state is closed last: a step stopped before this line repeats the swap, which changes nothing more.
    write_json(output / STATE, State(steps=state.steps, requests=state.requests))
    return result


def _state(output: Path) -> State:
    path = output / STATE
    return read(State, path) if path.is_file() else State()


def _step(config: AdaptConfig, step: Path) -> Step:
    """Run the stages of a step; `Stages` skips those that have ended."""
    stages, deployed = Stages(step / "stages"), read(str, step / "deployed.json")
    text, drafter = step / "completions/learned", step / "drafter"
    learned = sum(1 for _ in (step / "learned.jsonl").open(encoding="utf-8"))
    answers: dict[str, Any] = {"target": config.target, "seed": config.seed} | config.texts()
    values = answers | {"prompts": step / "learned.jsonl", "output": text}
    if config.answers == "given":
        sampled = ("top_k", "top_p", "min_p", "repetition_penalty", "no_repeat_ngram_size", "max_new_tokens")
        values = {name: value for name, value in values.items() if name not in sampled}
        stages.run("learned", ["prepare", *flags_of(values | {"answers": "given"})])
        if not (step / "foreign.json").is_file():  # computed once, because it loads the target
            write_json(step / "foreign.json", foreign_share(config, str(text)))
        share = read(float, step / "foreign.json")
        if share > config.foreign:
            reason = (
                f"{share:.0%} of the log's answers are not the target's, at most {config.foreign:.0%} may be: nothing "
                "is learned from it"
            )
            return Step(SCHEMA, "foreign", reason, deployed, None, learned, None)
    else:
        temperatures = ",".join(f"{temperature:g}" for temperature in config.temperature)
        fields = values | {"temperatures": temperatures} | config.writer()
        stages.run("learned", ["prepare", *flags_of(fields)])
    texts = {}
    for temperature in config.temperature:
        texts[temperature] = str(step / f"completions/newest-{temperature:g}")
        fields = answers | {"prompts": step / "newest.jsonl", "output": texts[temperature], "temperature": temperature}
        fields |= config.writer()
        stages.run(f"newest-{temperature:g}", ["prepare", *flags_of(fields)])
    recipe = kind_of(deployed).recipe
    if recipe is None:
        raise InputError(f"drafter: expected a kind that is trained, found {kind_of(deployed).title} in {deployed}")
    training: dict[str, Any] = {"target": config.target, recipe.begun: deployed}
    training |= {"completions": [str(text), *config.old_text], "training.num_train_epochs": config.epochs}
    if config.old_text:
        training["source_weights"] = [1.0, *[config.old_share] * len(config.old_text)]
    training |= {"top_k": config.top_k, "top_p": config.top_p, "trust_remote_code": config.trust_remote_code}
    training |= {"training.seed": config.seed} | JUDGED_LATER | config.learning | {"training.output_dir": str(drafter)}
    processes = [] if config.processes is None else [f"--processes={config.processes}"]
    stages.run("train", [recipe.command, *processes, *flags_of(training)])
    compared = compare(config, deployed, str(drafter), texts)
    low = compared.gain.ci95[0] if compared.gain.ci95 else None
    better = low is not None and low > config.min_gain
    reason = (
        f"τ on the newest {config.newest} requests gains {_interval(compared.gain, '+.2f')}; its lower end must exceed "
        f"{config.min_gain:g}"
    )
    return Step(SCHEMA, "better" if better else "refused", reason, deployed, str(drafter), learned, compared)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one step and print its result; return 3 if a new drafter is refused."""
    config = parse_config(AdaptConfig, argv, prog="draftsmith adapt")
    with lock_directory(Path(config.output)):
        step = adapt(config)
    if step is None:
        _say(f"nothing to do: the log has fewer than {config.least} requests since the last step")
        return 0
    if step.compared is not None:
        _say(f"\nτ on the newest requests: deployed {_interval(step.compared.old)}, new {_interval(step.compared.new)}")
        for temperature, gain in step.compared.by_temperature.items():
            _say(f"  T={temperature}: {_interval(gain, '+.2f')}")
        for category, gain in step.compared.by_category.items():
            _say(f"  {category}: {_interval(gain, '+.2f')}")
    _say(f"{'better' if step.verdict == 'better' else 'refused'}: {step.reason}")
    if step.verdict != "better":
        return NO_GO
    _say(f"drafter: {step.drafter}")
    if config.swap:
        _say(f"{config.drafter} points there now: serve-draft loads it by itself, other servers when they restart")
    command = shlex.join(["draftsmith", "measure", *_measuring(config, step)])
    _say(f"to check it on the server, with γ = {config.draft_length}:\n  {command}")
    return 0


def _say(message: str) -> None:
    Console().print(message, highlight=False, soft_wrap=True, markup=False)


def _measuring(config: AdaptConfig, step: Step) -> list[str]:
    """Return arguments of `measure` that compare a server's acceptance with the promise; exit code 3: go back."""
    assert step.compared is not None
    temperature, alpha = next(iter(step.compared.promised.items()))
    value = alpha.value or 0.0
    half = value - alpha.ci95[0] if alpha.ci95 else value
    folder = Path(str(step.drafter)).parent
    fields: dict[str, Any] = {"server": "URL", "target": config.target}
    fields |= {"prompts": folder / "newest.jsonl", "temperature": temperature, "output": folder / "server"}
    # On the same requests the server's interval is as wide as the promised one. If its lower end is below this limit,
    # the whole interval is below the promised one.
    fields |= {"min_alpha": round(max(value - 3 * half, 0.001), 3)}
    fields |= {name: value for name, value in config.texts().items() if name != "no_repeat_ngram_size"}
    return flags_of(fields)
