"""Packages whose names are imported when they are first used: `--help` must not wait for torch."""

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any


def lazy_exports(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package that imports what it exports by need.

    A layer above may add names to a package below it, which must not know them: as entry points (`pyproject.toml`) of a
    group with the package's name.

    Args:
        package: its name.
        modules: for each exported name the module that defines it.
    """

    def get(name: str) -> Any:
        if name in modules:
            return getattr(import_module(modules[name]), name)
        for added in entry_points(group=package, name=name):
            return added.load()
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get
