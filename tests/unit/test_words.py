"""Plain English in the source: no docstring, comment or message has the habit words."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("decode", "train", "distill", "medusa", "scripts", "benchmarks")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
HABITS = re.compile(
    r"\b(behind|so many|of which|lest|but for|thereof|goes on|go on|going on|whatever|beside|besides|say so|says so)\b",
    re.IGNORECASE,
)
OPENINGS = re.compile(r"\s*(Of|By|That|What|Which|Whose|Where|As|Lest|Beside|Behind)\b")


def texts(path: Path) -> list[tuple[int, str, bool]]:
    """Return the line, the text and whether it is a docstring of all docstrings, comments and messages of a file."""
    source = path.read_text("utf-8")
    tree = ast.parse(source)
    documented = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    strings = [
        (node.lineno, node.value, id(node) in documented)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value
    ]
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return strings + [(token.start[0], token.string, False) for token in tokens if token.type == tokenize.COMMENT]


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_habit_words(folder):
    wrong = []
    for path in FILES:
        if path.relative_to(ROOT).parts[0] != folder:
            continue
        for line, text, docstring in texts(path):
            found = HABITS.search(text) or (docstring and OPENINGS.match(text))
            if found:
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {found.group().strip()!r} in {text.strip()[:80]!r}")
    assert not wrong, "\n".join(wrong)


def test_the_words_are_found(tmp_path):
    source = tmp_path / "planted.py"
    source.write_text(
        '"""Of x.\n\nThe rest stands behind it."""\nx = 1  # so many\ny = "a message of which"\n', "utf-8"
    )
    found = texts(source)
    assert sum(bool(HABITS.search(text)) for _, text, _ in found) == 3
    assert [line for line, text, docstring in found if docstring and OPENINGS.match(text)] == [1]
