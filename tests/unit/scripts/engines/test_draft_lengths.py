"""Draft lengths by load: which γ pays at which batch size, and how it goes into a launch line of vLLM."""

import json
import shlex

import pytest

from draftsmith.decode.errors import InputError
from draftsmith.scripts.engines.draft_lengths import (
    SCHEMA,
    chosen_lengths,
    ranges,
    speculative_fields,
    with_speculative,
)
from draftsmith.train.kinds.export import vllm_command

RANGES = [[1, 4, 3], [5, 8, 1], [9, 16, 0]]


def written(tmp_path, **drafters):
    entries = {
        name: {
            "path": path, "temperatures": [0.0, 1.0], "num_speculative_tokens": max(k for *_, k in spans),
            "num_speculative_tokens_per_batch_size": spans,
        }
        for name, (path, spans) in drafters.items()
    }  # fmt: skip
    file = tmp_path / "draft_lengths.json"
    file.write_text(json.dumps({"schema": SCHEMA, "target": "t", "drafters": entries}))
    return str(file)


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


def test_a_launch_line_says_how_many_tokens_at_which_load(tmp_path):
    file = written(tmp_path, draft=(str(tmp_path / "draft"), RANGES), other=("elsewhere", [[1, 1, 2]]))
    fields = speculative_fields(file, str(tmp_path / "draft"))
    line = vllm_command("target", {"method": "eagle3", "model": "draft", "num_speculative_tokens": 4})
    *words, config = shlex.split(with_speculative(line, fields))
    assert words == ["vllm", "serve", "target", "--speculative-config"]
    assert json.loads(config) == {
        "method": "eagle3", "model": "draft", "num_speculative_tokens": 3,
        "num_speculative_tokens_per_batch_size": RANGES,
    }  # fmt: skip


def test_the_only_drafter_of_a_file_may_lie_elsewhere_now(tmp_path):
    file = written(tmp_path, draft=("moved", RANGES))
    assert speculative_fields(file, "here")["num_speculative_tokens"] == 3


def test_one_draft_length_for_all_loads_needs_no_table(tmp_path):
    assert speculative_fields(written(tmp_path, draft=("d", [[1, 8, 2]])), "d") == {"num_speculative_tokens": 2}


@pytest.mark.parametrize(
    ("drafters", "message"),
    [
        ({"one": ("a", RANGES), "two": ("b", RANGES)}, "expected a drafter at here in .*, found one, two"),
        ({"one": ("a", [[1, 8, 0]])}, "expected a batch size at which the drafter pays in .*, found none"),
        ({"one": ("a", [[1, 4, 3], [6, 8, 1]])}, "expected a range that begins at 5, found 6 to 8"),
        ({"one": ("a", [[2, 4, 3]])}, "expected a range that begins at 1, found 2 to 4"),
        ({"one": ("a", [[1, 0, 3]])}, "at least 1"),
    ],
)
def test_what_no_server_would_take_is_refused_in_one_line(tmp_path, drafters, message):
    with pytest.raises(InputError, match=rf"^draft_lengths: .*{message}") as error:
        speculative_fields(written(tmp_path, **drafters), "here")
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(InputError, match=r"expected a file that `measure` wrote at .*none\.json, found none"):
        speculative_fields(str(tmp_path / "none.json"), "here")
