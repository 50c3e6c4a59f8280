"""Cards of trained drafters tell their readers to import what is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CARDS = [path for folder in ("distill", "medusa") for path in sorted((ROOT / folder).rglob("card.md.j2"))]
IMPORTS = sorted({
    line
    for card in CARDS
    for line in re.findall(r"^(?:from|import) draftsmith\S*.*$", card.read_text(encoding="utf-8"), re.MULTILINE)
})  # fmt: skip


def test_there_are_cards_and_some_import():
    assert len(CARDS) == 4 and IMPORTS


@pytest.mark.parametrize("line", IMPORTS)
def test_what_cards_import_is_there(line):
    exec(line, {})
