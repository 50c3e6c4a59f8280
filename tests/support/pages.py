"""The documentation as the tests read it: fenced blocks, inline code, and the command lines in both."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
GUIDES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
"""All pages but those of docs/log/, which keep commands as they were when they ran."""

FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
HEREDOC = re.compile(r"^cat > (\S+) <<'EOF'\n(.*?)^EOF$\n?", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Shell:
    """A block of shell lines."""

    files: dict[str, str]
    """The files that it writes by `cat > FILE <<'EOF'`, with their text."""
    lines: list[list[str]]
    """Its command lines, split into words as a shell splits them."""


def blocks(page: Path, *languages: str) -> list[str]:
    """Return the fenced blocks of a page in one of the languages, in order."""
    return [text for language, text in FENCE.findall(page.read_text(encoding="utf-8")) if language in languages]


def shell_blocks(page: Path) -> Iterator[Shell]:
    """Yield the shell blocks of a page."""
    for text in blocks(page, "sh", "bash"):
        lines = HEREDOC.sub("", text).replace("\\\n", " ").splitlines()
        words = (shlex.split(line, comments=True) for line in lines)
        yield Shell(dict(HEREDOC.findall(text)), [line for line in words if line])


def inline_code(page: Path) -> list[str]:
    """Return what stands between single backticks outside the fenced blocks."""
    return INLINE.findall(FENCE.sub("", page.read_text(encoding="utf-8")))
