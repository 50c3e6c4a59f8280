"""Draft lengths by load: the batch sizes that are predicted, and the ranges in words."""

from draftsmith.scripts.engines.draft_lengths import ranges
from draftsmith.scripts.measure.predictions import sizes_up_to
from draftsmith.scripts.report.entries import ByLoad, Goodput, LoadRange
from draftsmith.scripts.report.words import load_words


def test_sizes_are_all_small_ones_and_few_large_ones():
    assert sizes_up_to(8) == list(range(1, 9))
    many = sizes_up_to(512)
    assert many[0] == 1 and many[-1] == 512 and len(many) <= 24 and many == sorted(set(many))


def test_ranges_are_said_in_words():
    load = ByLoad("draft", [0.0], [LoadRange(*each) for each in ranges({1: 3, 2: 0}, 4)], {1: Goodput(1.0, 2.0)})
    assert load_words(load) == "1: γ = 3; 2 to 4: do not draft"
