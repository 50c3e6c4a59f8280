"""A kind of drafter is one folder: how many other source files name it."""

import re

import pytest
from pages import ROOT

FOLDERS = ("decode", "train", "distill", "medusa", "scripts")
MOST = 3
# Keys and files of servers are their own, such as `parallel_drafting`; masks are "in parallel".
EAGLE = r"(?<!speculative[-_])(?<!spec_decode/)eagle(?!_aux_hidden_state_layer_ids)"
PARALLEL = r"parallel[ _-]?drafts?\b|paralleldraft|\bpard|parallel_(length|tree)|distill\.parallel"
KINDS = {"EAGLE": (EAGLE, "medusa/eagle"), "Medusa": ("medusa", "medusa"), "parallel": (PARALLEL, "distill/parallel")}


@pytest.mark.parametrize("kind", KINDS)
def test_few_files_outside_its_folder_name_a_kind(kind):
    pattern, own = KINDS[kind]
    sources = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    naming = [
        str(path.relative_to(ROOT))
        for path in sources
        if not path.is_relative_to(ROOT / own)
        and path != ROOT / "scripts/kinds.py"
        and re.search(pattern, path.read_text(encoding="utf-8"), re.IGNORECASE)
    ]
    assert len(naming) <= MOST, naming
