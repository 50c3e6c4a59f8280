"""The exception for bad user input, and the ranges that fields are checked against."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any


class InputError(ValueError):
    """A mistake in what a user gave: a file, a field, or a model that does not fit.

    The message is one line that names the file or field, what was expected and what was found. Commands print it
    without a traceback and exit with 2; any other exception is our own bug and exits with 1.
    """


@dataclass(frozen=True)
class Range:
    """The values that a field may have; `at_least(0) & less_than(1)` combines two ranges."""

    expected: str  # the values in words, for the error message: "at least 1"
    holds: Callable[[Any], bool]

    def check(self, name: str, value: Any) -> None:
        """Raise an `InputError` that names the field, unless the value, or each item of a list, is in the range."""
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
    """Return the range of values ≥ `least`."""
    return Range(f"at least {least}", lambda value: value >= least)


def at_most(most: float) -> Range:
    """Return the range of values ≤ `most`."""
    return Range(f"at most {most}", lambda value: value <= most)


def more_than(bound: float) -> Range:
    """Return the range of values > `bound`."""
    return Range(f"more than {bound}", lambda value: value > bound)


def less_than(bound: float) -> Range:
    """Return the range of values < `bound`."""
    return Range(f"less than {bound}", lambda value: value < bound)


def between(low: float, high: float) -> Range:
    """Return the range of values between two numbers, both excluded."""
    return Range(f"a value between {low} and {high}", lambda value: low < value < high)


def one_of(choices: Iterable[str]) -> Range:
    """Return the range of some names."""
    names = tuple(choices)
    return Range(f"one of {', '.join(names)}", lambda value: value in names)


def finite(allowed: Range) -> Range:
    """Return a range without infinity."""
    return Range(f"a finite number, {allowed.expected}", lambda value: value < float("inf") and allowed.holds(value))


SHARE = Range("a share between 0 and 1", lambda value: 0 <= value <= 1)  # both ends are included

SIZE = at_most(2**24)  # the limit of a width or vocabulary size, above any real model and any machine's memory
HEADS = at_most(256)
"""The limit of drafting heads, of their layers, and of training steps through them; servers draft a dozen tokens."""
DECAY = at_most(10)  # the limit of the factor from one weight to the next, so that its powers stay finite


def require(config: object, allowed: Range, *names: str, prefix: str = "") -> None:
    """Raise an `InputError` that names the first of some fields outside a range; None is allowed.

    `prefix` precedes the name in the message: "lora." where the config is the field `lora` of another one.
    """
    for name in names:
        value = getattr(config, name)
        if value is not None:
            allowed.check(prefix + name, value)


def require_some(config: object, name: str, what: str, prefix: str = "") -> None:
    """Raise an `InputError`, "NAME: expected at least one WHAT, found none", if a list is empty."""
    if not getattr(config, name):
        raise InputError(f"{prefix}{name}: expected at least one {what}, found none")


def first_line(error: Exception) -> str:
    """Return the first line of an error's message that is not empty, or the name of its class."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def lacks_memory(error: BaseException) -> bool:
    """Return whether memory ran out: Python's own error, or one of torch's, which has no class on CPUs."""
    return isinstance(error, MemoryError) or re.search(r"out of memory|allocate memory", str(error)) is not None
