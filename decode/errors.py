"""The one exception that a user's input raises, and the ranges that fields are checked against."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any


class InputError(ValueError):
    """Something a user gave is wrong: a file, a field, a model that does not fit.

    The message is one line that names the file or field, what was found and what was expected. The commands print it
    without a traceback and exit with 2; any other exception is a failure of ours and exits with 1.
    """


@dataclass(frozen=True)
class Range:
    """The values that a field may have; `at_least(0) & less_than(1)` combines two ranges."""

    expected: str
    """How the error message describes them: "at least 1"."""
    holds: Callable[[Any], bool]

    def check(self, name: str, value: Any) -> None:
        """Require that a value is one of them.

        Args:
            name: the field or argument, for the message.
            value: the value; of a list or tuple, every item.

        Raises:
            InputError: it is not, or it cannot be compared.
        """
        for item in value if isinstance(value, list | tuple) else [value]:
            try:
                inside = self.holds(item)
            except TypeError:
                inside = False
            if not inside:
                raise InputError(f"{name}: expected {self.expected}, found {item!r}")

    def __and__(self, other: "Range") -> "Range":
        return Range(f"{self.expected} and {other.expected}", lambda value: self.holds(value) and other.holds(value))


def at_least(least: float) -> Range:
    """Return the range of a number and all above."""
    return Range(f"at least {least}", lambda value: value >= least)


def at_most(most: float) -> Range:
    """Return the range of a number and all below."""
    return Range(f"at most {most}", lambda value: value <= most)


def more_than(bound: float) -> Range:
    """Return the range above a number."""
    return Range(f"more than {bound}", lambda value: value > bound)


def less_than(bound: float) -> Range:
    """Return the range below a number."""
    return Range(f"less than {bound}", lambda value: value < bound)


def between(low: float, high: float) -> Range:
    """Return the range between two numbers, without them."""
    return Range(f"a value between {low} and {high}", lambda value: low < value < high)


def one_of(choices: Iterable[str]) -> Range:
    """Return some names."""
    names = tuple(choices)
    return Range(f"one of {', '.join(names)}", lambda value: value in names)


def finite(allowed: Range) -> Range:
    """Return a range without infinity."""
    return Range(f"a finite number, {allowed.expected}", lambda value: value < float("inf") and allowed.holds(value))


SHARE = Range("a share between 0 and 1", lambda value: 0 <= value <= 1)
"""From 0 to 1, both included."""

SIZE = at_most(2**24)
"""A width, or the tokens of a vocabulary: no model comes near the end of it, and no machine could hold one."""
HEADS = at_most(256)
"""Heads that draft, their layers, or steps of training through them: servers draft a dozen tokens."""
DECAY = at_most(10)
"""The factor from one weight to the next, whose powers are numbers."""


def require(config: object, allowed: Range, *names: str, prefix: str = "") -> None:
    """Require that fields of a config lie in a range; fields that are None are left out.

    Args:
        config: a dataclass, or anything with these attributes.
        allowed: the range.
        names: the fields.
        prefix: written before each name in the message: "lora." where the config is the field `lora` of another.

    Raises:
        InputError: names the first field that lies outside.
    """
    for name in names:
        value = getattr(config, name)
        if value is not None:
            allowed.check(prefix + name, value)


def require_some(config: object, name: str, what: str, prefix: str = "") -> None:
    """Require that a list has an item.

    Raises:
        InputError: "NAME: expected at least one WHAT, found none".
    """
    if not getattr(config, name):
        raise InputError(f"{prefix}{name}: expected at least one {what}, found none")


def first_line(error: Exception) -> str:
    """Return the first line of an error's message that is not empty, or the name of its class."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def lacks_memory(error: BaseException) -> bool:
    """Say whether memory ran out: Python's own error, or one of torch's, which for the CPU has no class."""
    return isinstance(error, MemoryError) or re.search(r"out of memory|allocate memory", str(error)) is not None
