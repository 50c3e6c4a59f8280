"""The source: plain English without the habit words, comments where code is hard, and a size that only falls."""

import ast
import io
import json
import math
import re
import subprocess
import tokenize
from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import pairwise
from pathlib import Path

import pytest

from draftsmith.scripts import cli
from draftsmith.train.cli import FILE_ONLY

ROOT = Path(__file__).parents[2]
FOLDERS = ("decode", "train", "distill", "medusa", "scripts", "benchmarks")
HABITS = re.compile(
    r"\b(behind|so many|(?<!each )(?<!one )(?<!some )(?<!all )of which|lest|but for|thereof|goes on|go on|going on"
    r"|whatever|beside|besides|say so|says so)\b",
    re.IGNORECASE,
)
OPENINGS = re.compile(r"\s*(Of|By|That|What|Which|Whose|Where|As|Lest|Beside|Behind)\b")
COMMENTED = ("decode", "train/losses", "medusa")
CODE_PER_COMMENT = 25
CEILING = ROOT / "tests" / "ceiling.json"
FORMS = {"measure": [[], ["--server"]], "tune": [[], ["--reports"]]}
"""The arguments that choose among a command's configs."""


def files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def documented(tree: ast.Module) -> list[ast.Constant]:
    """Return all strings that stand alone: docstrings of modules, classes, functions and attributes."""
    return [
        node.value for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    ]


def comments(source: str) -> list[tuple[int, str]]:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return [(token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT]


def texts(path: Path) -> list[tuple[int, str, bool]]:
    """Return the line, the text and whether it is a docstring, of all docstrings, comments and messages of a file."""
    source = path.read_text("utf-8")
    tree = ast.parse(source)
    docstrings = {id(node) for node in documented(tree)}
    strings = [
        (node.lineno, node.value, id(node) in docstrings)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value
    ]
    return strings + [(line, text, False) for line, text in comments(source)]


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_habit_words(folder):
    wrong = []
    for path in files(folder):
        for line, text, docstring in texts(path):
            match = HABITS.search(text) or (docstring and OPENINGS.match(text))
            if match:
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {match.group().strip()!r} in {text.strip()[:80]!r}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("folder", COMMENTED)
def test_hard_code_has_comments(folder):
    code = said = 0
    for path in files(folder):
        source = path.read_text("utf-8")
        words = sum(node.end_lineno - node.lineno + 1 for node in documented(ast.parse(source)))
        alone = sum(line.strip().startswith("#") for line in source.splitlines())
        code += sum(bool(line.strip()) for line in source.splitlines()) - words - alone
        said += len(comments(source))
    assert code <= CODE_PER_COMMENT * said, f"{code} lines of code, {said} comments"


def lines(*folders: str) -> int:
    return sum(len(path.read_text("utf-8").splitlines()) for folder in folders for path in files(folder))


def flags() -> int:
    """Return the number of all commands' own flags: the fields of their configs that have one, `training` as one."""
    configs = {name: [cli.config_class(name, form) for form in FORMS.get(name, [[]])] for name in cli.summaries()}
    names = [{field.name for config in forms for field in fields(config)} for forms in configs.values()]
    assert set().union(*names) >= FILE_ONLY
    return sum(len(each - FILE_ONLY) for each in names)


def rises(versions: Sequence[Mapping[str, int]]) -> list[str]:
    """Return the names whose number grew, or went, from one version to the next."""
    return [name for old, new in pairwise(versions) for name in old if new.get(name, math.inf) > old[name]]


def test_nothing_exceeds_the_ceiling():
    counts = {"source": lines(*FOLDERS), "tests": lines("tests"), "flags": flags()}
    ceiling = json.loads(CEILING.read_text("utf-8"))
    assert ceiling.keys() == counts.keys()
    assert not {name: count for name, count in counts.items() if count > ceiling[name]}, f"{counts}, over {ceiling}"


def test_the_ceiling_only_falls():
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout

    try:
        if git("rev-parse", "--is-shallow-repository").strip() != "false":
            pytest.skip("the history is cut short")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no git")
    name = CEILING.relative_to(ROOT).as_posix()
    # Along the first parents, so that branches side by side are in the order of their merges.
    commits = git("log", "--reverse", "--first-parent", "--diff-filter=AM", "--format=%H", "--", name).split()
    assert commits or not git("ls-tree", "HEAD", "--", name)
    versions = [json.loads(git("show", f"{commit}:{name}")) for commit in commits]
    assert not rises([*versions, json.loads(CEILING.read_text("utf-8"))])


@pytest.mark.parametrize(
    ("versions", "names"),
    [
        ([], []),
        ([{"source": 9, "tests": 5}, {"source": 8, "tests": 5}, {"source": 7, "tests": 4}], []),
        ([{"source": 9, "tests": 5}, {"source": 8, "tests": 6}], ["tests"]),
        ([{"source": 9}, {"source": 8}, {"source": 9}], ["source"]),
        ([{"source": 9, "flags": 3}, {"source": 9}], ["flags"]),
    ],
)
def test_planted_rises_are_seen(versions, names):
    assert rises(versions) == names
