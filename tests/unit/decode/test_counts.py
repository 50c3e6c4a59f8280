from draftsmith.decode import Counts


def test_ratios_are_derived_from_sums():
    total = Counts.of_round(4, 2, 3) + Counts.of_round(4, 0, 1) + Counts.of_round(2, 2, 3)
    assert total.num_drafts == 3
    assert total.num_draft_tokens == 10
    assert total.num_accepted_tokens == 4
    assert total.num_accepted_tokens_per_pos == (2, 2, 0, 0)
    assert total.num_draft_tokens_per_pos == (3, 3, 2, 2)
    assert total.num_reached_per_pos == (3, 2, 1, 0)
    assert total.draft_acceptance_rate() == 0.4
    assert total.mean_acceptance_length() == 7 / 3
    assert total.acceptance_per_position() == [2 / 3, 2 / 3, 0.0, 0.0]
    assert total.conditional_acceptance() == [2 / 3, 1.0, 0.0, None]


def test_sums_over_positions_are_the_totals():
    total = Counts.of_round(5, 3, 4) + Counts.of_round(1, 1, 2)
    assert sum(total.num_accepted_tokens_per_pos) == total.num_accepted_tokens
    assert sum(total.num_draft_tokens_per_pos) == total.num_draft_tokens


def test_nothing_counted_has_no_ratio_and_is_neutral():
    assert Counts().draft_acceptance_rate() is None
    assert Counts().mean_acceptance_length() is None
    one = Counts.of_round(3, 1, 2)
    assert one + Counts() == one == Counts() + one


def test_plain_decoding_has_length_one():
    assert Counts(num_drafts=7, num_emitted_tokens=7).mean_acceptance_length() == 1.0


def test_dict_is_plain_json():
    assert Counts.of_round(2, 1, 2).to_dict()["num_accepted_tokens_per_pos"] == [1, 0]
