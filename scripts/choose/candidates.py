"""What competes: candidates of every kind, or those that the config names."""

from typing import Any

from draftsmith.decode.errors import InputError
from draftsmith.decode.progress import time_text
from draftsmith.scripts.choose.config import COPIES, ChooseConfig
from draftsmith.scripts.choose.schedule import RUNGS, survivors
from draftsmith.scripts.kinds import KINDS, recipes
from draftsmith.scripts.stages import JUDGED_LATER, flags_of
from draftsmith.train.cli import check_fields
from draftsmith.train.models import load_config


def candidates_of(config: ChooseConfig) -> dict[str, dict[str, Any]]:
    """Return what competes, by name: what the config says, or candidates of every kind."""
    if config.candidates:
        return config.candidates
    target = load_config(config.target, field="target", trust_remote_code=config.trust_remote_code)
    found: dict[str, dict[str, Any]] = {}
    for kind in KINDS:
        if kind.recipe is not None:
            tried = kind.candidates(target, config.server)
            found |= {name: {"command": kind.recipe.command} | its for name, its in tried.items()}
    if config.draft is not None:
        found["draft"] = {"command": "distill", "draft": config.draft}
    return found


def checked_candidates(config: ChooseConfig) -> dict[str, dict[str, Any]]:
    """Return what competes, once the fields of each are found to be those of its command.

    Raises:
        InputError: names the candidate.
    """
    found = candidates_of(config)
    for name, fields in found.items():
        try:
            argv = flags_of(config.training(fields, ["text"], "output") | JUDGED_LATER)
            check_fields(recipes()[fields["command"]].config_class(), argv)
        except InputError as error:
            raise InputError(f"candidates: {name}: {error}") from error
    return found


def say_plan(config: ChooseConfig) -> None:
    """Say what would be tried, and what it costs."""
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
