"""A kind of drafter is named in its folder and in the list of kinds: elsewhere in hardly any file."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST = 3
UNRELATED = r"in parallel|data.?parallel|tensor parallel|the parallel forward|parallel_state|PEARL: Parallel"
"""Where "parallel" is no kind of drafter."""


def files_naming(word: str, *homes: str) -> list[str]:
    """Return the source files that name a kind, outside its folders and the list of kinds."""
    found = []
    for folder in ("train", "distill", "medusa", "decode", "scripts"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if not name.startswith(homes) and name != "scripts/kinds.py":
                text = re.sub(UNRELATED, "", path.read_text(encoding="utf-8"), flags=re.IGNORECASE)
                found += [name] if re.search(word, text, re.IGNORECASE) else []
    return found


@pytest.mark.parametrize(
    ("word", "home"), [("eagle", "medusa/eagle/"), ("medusa", "medusa/"), ("parallel", "distill/parallel/")]
)
def test_few_files_name_a_kind(word, home):
    found = files_naming(word, home)
    assert len(found) <= MOST, found
