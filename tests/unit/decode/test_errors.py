"""Ranges of fields: what they let through, and what their message says."""

from types import SimpleNamespace

import pytest

from draftsmith.decode.errors import (
    SHARE,
    InputError,
    at_least,
    at_most,
    between,
    finite,
    less_than,
    more_than,
    one_of,
    require,
    require_some,
)


@pytest.mark.parametrize(
    ("allowed", "good", "bad", "expected"),
    [
        (at_least(1), [1, 2.5, [1, 2]], [0, "four", float("nan"), [1, 0]], "at least 1"),
        (more_than(0) & at_most(1), [0.1, 1], [0, 1.5], "more than 0 and at most 1"),
        (at_least(0) & less_than(1), [0, 0.9], [-1, 1], "at least 0 and less than 1"),
        (between(0, 1), [0.5], [0, 1], "a value between 0 and 1"),
        (SHARE, [0, 0.5, 1], [-0.1, 1.1], "a share between 0 and 1"),
        (finite(at_least(0)), [0, 1], [-1, float("inf"), float("nan")], "a finite number, at least 0"),
        (one_of(("a", "b")), ["a", ["b", "a"]], ["c", 1], "one of a, b"),
    ],
)
def test_a_range_holds_or_says_what_it_expected(allowed, good, bad, expected):
    for value in good:
        allowed.check("field", value)
    for value in bad:
        found = value[-1] if isinstance(value, list) else value
        with pytest.raises(InputError) as error:
            allowed.check("field", value)
        assert str(error.value) == f"field: expected {expected}, found {found!r}"


def test_fields_are_checked_by_name_and_none_is_left_out():
    config = SimpleNamespace(limit=None, size=0, paths=[])
    require(config, at_least(1), "limit")
    with pytest.raises(InputError, match=r"^inner\.size: expected at least 1, found 0$"):
        require(config, at_least(1), "limit", "size", prefix="inner.")
    with pytest.raises(InputError, match=r"^paths: expected at least one directory, found none$"):
        require_some(config, "paths", "directory")
