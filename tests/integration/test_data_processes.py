"""Two processes over one data set: who writes what they map, and which rows each reads."""

import shutil
from collections import Counter

import numpy as np
import pytest
from pipelines import WORDS
from process_jobs import rows_read
from processes import forked

from draftsmith.train.data.examples import split_off, training_examples
from draftsmith.train.data.generate import PrepareConfig, prepare

pytestmark = pytest.mark.slow

STEPS = 10  # two epochs of 20 samples, or two of 16 rows and a part of a third


@pytest.fixture(scope="module")
def ground(pipeline, tmp_path_factory):
    """Completions that nobody has mapped, and a part of them; many prompts."""
    root = tmp_path_factory.mktemp("ground")
    for name in ("short", "long"):
        shutil.copytree(pipeline / name, root / name, ignore=shutil.ignore_patterns(".mapped"))
    lines = [f"{a} {b}".replace("\n", " ") for a in WORDS for b in WORDS]
    (root / "many.txt").write_text("\n".join(lines))
    many = (str(pipeline / "target"), str(root / "many.txt"), str(root / "many"))
    prepare(PrepareConfig(*many, max_new_tokens=2))
    shutil.copytree(root / "short", root / "node0")
    shutil.copytree(root / "long", root / "node1")
    return root


@pytest.fixture(scope="module")
def found(pipeline, ground, tmp_path_factory):
    both, steps = [str(ground / "short"), str(ground / "long")], {"max_steps": STEPS, "seed": 5}
    saving = {"save_strategy": "steps", "save_steps": 7}
    weighted = {"completions": both, "source_weights": [1.0, 0.6], "training": steps | saving}
    runs = {
        "plain": {"completions": both, "training": steps},
        "weighted": weighted,
        "share": {"completions": [str(ground / "many")], "heldout": 0.3, "training": steps},
        "nodes": {"completions": [str(ground / "nodeRANK")], "training": steps},
    }
    output = tmp_path_factory.mktemp("output")
    first = forked(rows_read, pipeline, output, runs, strategy="ddp")
    resumed = {"completions": both, "resumes": str(output / "weighted" / "checkpoint-7")}
    again = forked(rows_read, pipeline, output, {"again": weighted | resumed}, strategy="ddp")
    return first, again


def epochs(ranks: list, name: str, size: int) -> list[list[int]]:
    """The rows of each epoch, both ranks' together, step by step."""
    steps = zip(*(rank[name][0] for rank in ranks), strict=True)
    rows = [row for both in steps for part in both for row in part]
    return [rows[at : at + size] for at in range(0, len(rows), size)]


def test_each_row_is_read_once_an_epoch_by_one_of_them(found):
    first, _ = found
    one, two = epochs(first, "plain", 20)
    assert sorted(one) == sorted(two) == list(range(20))
    assert one != two
    for rank in first:
        assert all(len(rows) == 2 for rows in rank["plain"][0])  # half of each batch of 4


def test_one_of_them_wrote_what_both_map(ground, found):
    for name in ("short", "long", "many"):
        names = [file.name for file in (ground / name / ".mapped").iterdir()]
        assert len(names) == 2 and ".lock" in names


def test_weights_take_the_same_of_each_directory_every_epoch(found):
    first, _ = found
    one, two, _ = epochs(first, "weighted", 16)
    for rows in (one, two):
        assert set(Counter(rows).values()) == {1}
        assert set(range(10)) <= set(rows) and len([row for row in rows if row >= 10]) == 6
    assert set(one) != set(two)


def test_weights_are_kept_to_after_a_resume(found):
    first, again = found
    for rank, resumed in zip(first, again, strict=True):
        assert resumed["again"][0] == rank["weighted"][0][7:]


def test_both_hold_back_the_same_share(ground, found):
    first, _ = found
    data = training_examples([str(ground / "many")])
    train, _ = split_off(data, 0.3)
    assert 0.5 * len(data) < len(train) < len(data)
    for rank in first:
        assert rank["share"][1] == train.sample_ids(np.arange(len(train)))


def test_processes_that_find_other_samples_are_refused(found):
    first, _ = found
    for rank in first:
        assert rank["nodes"] == "completions: expected the same samples on all processes, found 2 different sets"
