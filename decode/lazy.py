"""Lazy imports of a package's names, so that `--help` does not wait for torch."""

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any


def lazy_exports(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a package's `__getattr__`, which imports each name from its module of `modules` at its first use.

    A higher layer adds its own names by entry points (`pyproject.toml`) of a group with the package's name.
    """

    @cache  # it reads files of every installed distribution, and parsers ask for hundreds of names
    def points() -> Mapping[str, EntryPoint]:
        return {point.name: point for point in entry_points(group=package)}

    def get(name: str) -> Any:
        if name in modules:
            return getattr(import_module(modules[name]), name)
        if name in points():
            return points()[name].load()
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get
