"""`draftsmith adapt --target T --drafter LINK --log LOG --output DIR`: one step of learning from traffic.

The deployed drafter trains on the log's older requests, mixed with some of its old text. Old and new drafter are then
replayed on the target's answers to the newest requests, which no drafter trained on. The new one replaces the old only
if it is better there. Every stage is an ordinary command; an interrupted step resumes.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement.intervals import format_estimate
from draftsmith.decode.validation import Count, Share, read
from draftsmith.scripts.adapt.config import AdaptConfig
from draftsmith.scripts.adapt.traffic import Comparison, compare, foreign_share, read_traffic
from draftsmith.scripts.kinds import kind_of
from draftsmith.scripts.stages import JUDGED_LATER, NO_GO, Stages
from draftsmith.train.cli import flags_of, parse_config
from draftsmith.train.data.corpus import write_prompts
from draftsmith.train.files import move_link, require_writable
from draftsmith.train.job.lock import lock_directory
from draftsmith.train.provenance import write_json
from draftsmith.train.runs import note_on_interrupt

SCHEMA: Literal["draftsmith.adapt/2"] = "draftsmith.adapt/2"
STEP, STATE, RESULT = "step-", "state.json", "adapt.json"
OLD_SHARE = 0.3  # the share of the old text in each epoch
MOST_FOREIGN = 0.1  # the most answers of the log that may not be the target's
_interval = partial(format_estimate, spread="interval")


@dataclass(frozen=True)
class State:
    """Progress of earlier steps through the log, and whether a step is open."""

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
    state = read(State, output / STATE) if (output / STATE).is_file() else State()
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


def _step(config: AdaptConfig, step: Path) -> Step:
    """Run the stages of a step; `Stages` skips those that have ended."""
    stages, deployed = Stages(step / "stages"), read(str, step / "deployed.json")
    text, drafter, prompts = step / "completions/learned", step / "drafter", step / "learned.jsonl"
    learned = sum(1 for _ in prompts.open(encoding="utf-8"))
    if config.answers == "given":
        given = {"target": config.target, "prompts": prompts, "output": text, "answers": "given"}
        given |= {"trust_remote_code": config.trust_remote_code}
        kept = ("chat_template_kwargs", "system_prompt", "invalid_prompts", "max_prompt_tokens")
        given |= {name: value for name, value in config.texts().items() if name in kept}
        stages.run("learned", ["prepare", *flags_of(given)])
        foreign = stages.call("foreign", str(text), lambda: foreign_share(config, str(text)), Share)
        if foreign > MOST_FOREIGN:
            reason = (
                f"{foreign:.0%} of the log's answers are not the target's, at most {MOST_FOREIGN:.0%} may be: nothing "
                "is learned from it"
            )
            return Step(SCHEMA, "foreign", reason, deployed, None, learned, None)
    else:
        stages.run("learned", config.prepare(prompts, text))
    texts = {}
    for temperature in config.temperature:
        texts[temperature] = str(step / f"completions/newest-{temperature:g}")
        newest = config.prepare(step / "newest.jsonl", texts[temperature], temperatures=temperature)
        stages.run(f"newest-{temperature:g}", newest)
    recipe = kind_of(deployed).recipe
    if recipe is None:
        raise InputError(f"drafter: expected a kind that is trained, found {kind_of(deployed).title} in {deployed}")
    own: dict[str, Any] = {recipe.begun: deployed}
    if config.old_text:
        own["source_weights"] = [1.0, *[OLD_SHARE] * len(config.old_text)]
    training = {"training.num_train_epochs": 1.0, "training.seed": config.seed} | JUDGED_LATER
    training |= config.training(own, [str(text), *config.old_text], drafter)
    stages.run("train", [recipe.command, *flags_of(training)])
    compared: Comparison = stages.call(
        "compare", [texts, config.draft_length], lambda: compare(config, deployed, str(drafter), texts), Comparison
    )
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
    return 0


def _say(message: str) -> None:
    Console().print(message, highlight=False, soft_wrap=True, markup=False)
