r"""Regular expressions of the config, applied to clients' texts: RE2, whose time is linear in the text.

Python's own `re` may backtrack without end: with `(a+)+$`, 26 letters block a process for most of a minute. RE2 has
everything that needs no backtracking, so neither look-around nor back-references (https://github.com/google/re2/wiki/Syntax).
Its \w, \d and \b are ASCII's.
"""

import re
from typing import Any

from draftsmith.decode.errors import InputError

REFERENCE = re.compile(r"\\(\d|g<\w+>)")  # to a group in a replacement, by number or name


class Pattern:
    """A compiled regular expression of RE2, where `case` may matter; `name` is its option, for InputError."""

    def __init__(self, pattern: str, name: str, case: bool):
        re2 = _re2(name)
        options = re2.Options()
        options.case_sensitive, options.log_errors = case, False
        try:
            self._compiled: Any = re2.compile(pattern, options)
        except re2.error as error:
            found = error.args[0].decode(errors="replace") if error.args else "none"
            raise InputError(
                f"{name}: expected a regular expression of RE2 (no look-around), found {pattern!r}: {found}"
            ) from error
        except UnicodeEncodeError as error:
            raise InputError(f"{name}: expected a regular expression, found {pattern!r}: {error.reason}") from error

    def found_in(self, text: str) -> bool:
        """Return whether a text has a match."""
        return self._compiled.search(_encodable(text)) is not None

    def replaced(self, text: str, replacement: str) -> str:
        r"""Return a text with every match replaced; \1 and \g<name> stand for a group's text, and must exist."""
        return self._compiled.sub(lambda match: _filled(replacement, match), _encodable(text))

    def check_replacement(self, replacement: str, name: str) -> None:
        """Raise InputError if a replacement names a group that does not exist."""
        for (reference,) in (match.groups() for match in REFERENCE.finditer(replacement)):
            group = reference.removeprefix("g<").removesuffix(">")
            exists = int(group) <= self._compiled.groups if group.isdecimal() else group in self._compiled.groupindex
            if not exists:
                raise InputError(f"{name}: expected a template, found: no group {group}")


def _filled(replacement: str, match: Any) -> str:
    def group(reference: re.Match[str]) -> str:
        group = reference[1].removeprefix("g<").removesuffix(">")
        return match.group(int(group) if group.isdecimal() else group) or ""

    return REFERENCE.sub(group, replacement)


def _encodable(text: str) -> str:
    """Return a text with lone surrogates replaced, which JSON may contain and UTF-8 cannot encode."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def _re2(name: str) -> Any:
    """Import RE2 late, because configs are also read where it is not installed."""
    try:
        import re2  # type: ignore[import-untyped]
    except ImportError as error:
        raise InputError(f"{name}: expected RE2, found none: pip install -e '.[coordinator]' in the clone") from error
    return re2
