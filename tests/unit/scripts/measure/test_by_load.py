"""Draft lengths by load: which γ pays at which batch size."""

from draftsmith.scripts.measure.predictions import sizes_up_to
from draftsmith.scripts.report.entries import ByLoad, Goodput, LoadRange
from draftsmith.scripts.report.words import load_words
from draftsmith.train.kinds.draft_lengths import chosen_lengths, ranges


def test_the_greatest_goodput_is_chosen_at_each_size_and_plain_decoding_where_it_is_faster():
    goodput = {1: {0: 10.0, 1: 12.0, 3: 14.0}, 2: {0: 19.0, 1: 21.0, 3: 20.0}, 4: {0: 36.0, 1: 33.0, 3: 25.0}}
    assert chosen_lengths(goodput) == {1: 3, 2: 1, 4: 0}


def test_a_change_that_wins_nothing_is_not_made():
    goodput = {1: {0: 10.0, 2: 14.00, 3: 13.9}, 2: {0: 20.0, 2: 26.9, 3: 27.0}, 4: {0: 40.0, 2: 43.0, 3: 44.0}}
    assert chosen_lengths(goodput) == {1: 2, 2: 2, 4: 3}


def test_ranges_follow_one_another_to_the_most_that_was_measured():
    assert ranges({1: 3, 2: 3, 4: 1, 8: 0}, 8) == [(1, 3, 3), (4, 7, 1), (8, 8, 0)]
    assert ranges({1: 0}, 1) == [(1, 1, 0)]
    assert ranges({2: 3, 8: 0}, 8) == [(1, 7, 3), (8, 8, 0)]


def test_sizes_are_all_small_ones_and_few_large_ones():
    assert sizes_up_to(8) == list(range(1, 9))
    many = sizes_up_to(512)
    assert many[0] == 1 and many[-1] == 512 and len(many) <= 24 and many == sorted(set(many))


def test_ranges_are_said_in_words():
    load = ByLoad("draft", [0.0], [LoadRange(*each) for each in ranges({1: 3, 2: 0}, 4)], {1: Goodput(1.0, 2.0)})
    assert load_words(load) == "1: γ = 3; 2 to 4: do not draft"
