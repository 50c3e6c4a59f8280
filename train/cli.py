"""Command lines: a YAML file, flags over it, one dataclass out; and errors in one line."""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jsonargparse
from jsonargparse import ArgumentParser
from transformers.utils import logging

from draftsmith.decode.errors import InputError

Config = TypeVar("Config")


def parse_config(cls: type[Config], argv: Sequence[str] | None = None, prog: str | None = None) -> Config:
    """Build a config dataclass from `--config FILE.yaml` and flags.

    Flags win over the file; nested fields are dotted; `--draft-length` and `--draft_length` are the same flag.

    Raises:
        InputError: an unknown key, a missing or ill-typed value, an unreadable file.
    """
    parser = ArgumentParser(prog=prog, description=cls.__doc__, exit_on_error=False)
    parser.add_argument("--config", action="config", help="a YAML file with the fields below; flags override it")
    parser.add_class_arguments(cls)
    names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    if "training" in names:
        # Resolved already in the default: `gradient_checkpointing`, its older name, would be overruled in silence.
        parser.set_defaults({"training.activation_checkpointing": None})
    arguments = [_underscored(argument) for argument in (sys.argv[1:] if argv is None else argv)]
    switches = {f"--{field.name}" for field in dataclasses.fields(cls) if field.type in (bool, "bool")}  # type: ignore[arg-type]
    try:
        values = vars(parser.instantiate(parser.parse_args(_switched(arguments, switches))))
    except (jsonargparse.ArgumentError, ValueError) as error:  # the latter from the library's own arguments
        raise InputError(" ".join(str(error).split())) from error
    return cls(**{f.name: values[f.name] for f in dataclasses.fields(cls) if f.init})  # type: ignore[arg-type]


def numbers(value: Any, kind: Callable[[Any], Any], name: str) -> list[Any]:
    """Return the numbers of a field that takes one, a list, or several with commas.

    Raises:
        InputError: something else.
    """
    items = value if isinstance(value, list) else str(value).split(",")
    try:
        return [kind(item) for item in items]
    except ValueError as error:
        raise InputError(f"{name}: expected numbers separated by commas, found {value!r}") from error


def _underscored(argument: str) -> str:
    if not argument.startswith("--"):
        return argument
    flag, equals, value = argument[2:].partition("=")
    return f"--{flag.replace('-', '_')}{equals}{value}"


def _switched(arguments: list[str], switches: set[str]) -> list[str]:
    """Let a flag that is true or false stand alone: `--prompt-lookup` says `true`."""
    found = []
    for argument, following in zip(arguments, [*arguments[1:], "--"], strict=False):
        found.append(argument)
        if argument in switches and following.startswith("--"):
            found.append("true")
    return found


def run(main: Callable[[], int | None]) -> int:
    """Run a command: an `InputError` prints as one line and gives exit code 2; anything else is ours and raises."""
    logging.disable_progress_bar()  # one bar per loaded file says nothing beside the bars of the work itself
    try:
        return main() or 0
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
