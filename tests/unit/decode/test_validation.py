"""What servers and files say is taken as a class says, or refused in one line that names the field."""

from dataclasses import dataclass

import pytest

from draftsmith.decode.errors import InputError
from draftsmith.decode.validation import Amount, Count, Finite, ServerMessage, Share, parse, parse_json, read

DEEP = "[" * 1000 + "]" * 1000


class Part(ServerMessage):
    ids: list[Count] | None = None


@dataclass(frozen=True)
class Record:
    count: Count
    number: Finite = 0.0
    parts: tuple[Part, ...] = ()
    seconds: Amount = 0.0
    share: Share = 0.0


def test_what_is_as_it_should_be_is_taken():
    text = '{"count": 3, "number": -1, "parts": [{"ids": [0, 1], "new": {}}], "seconds": 0.5, "share": 1, "other": NaN}'
    assert parse(Record, text, "it") == Record(3, -1.0, (Part(ids=[0, 1]),), 0.5, 1.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "it: expected JSON, found: EOF while parsing"),
        ('{"count": ' + DEEP + "}", "it: expected JSON, found: nested too deeply"),
        ('{"count": 1' + "0" * 5000 + "}", "it: expected JSON, found: number out of range"),
        ('{"count": 1' + "0" * 400 + "}", "it: count: expected at most 9.0072e+15, found 10000"),
        ('{"count": "\\ud800"}', "it: expected JSON, found: "),
        ("[]", "it: expected an object, found []"),
        ("{}", "it: count: expected a value, found none"),
        ('{"count": "3"}', "it: count: expected a whole number, found '3'"),
        ('{"count": true}', "it: count: expected a whole number, found True"),
        ('{"count": 3.0}', "it: count: expected a whole number, found 3.0"),
        ('{"count": NaN}', "it: count: expected a whole number, found nan"),
        ('{"count": -1}', "it: count: expected at least 0, found -1"),
        ('{"count": 1, "number": 1e999}', "it: number: expected a finite number, found inf"),
        ('{"count": 1, "number": "1"}', "it: number: expected a number, found '1'"),
        ('{"count": 1, "seconds": -0.1}', "it: seconds: expected at least 0, found -0.1"),
        ('{"count": 1, "share": 1.25}', "it: share: expected at most 1, found 1.25"),
        ('{"count": 1, "parts": [{}, {"ids": [1, null]}]}', "it: parts[1].ids[1]: expected a whole number, found None"),
    ],
)
def test_one_line_names_the_field_what_was_expected_and_found(text, message):
    with pytest.raises(InputError) as error:
        parse(Record, text, "it")
    assert str(error.value).startswith(message) and "\n" not in str(error.value) and len(str(error.value)) < 200


def test_a_key_is_not_shown_not_even_half_of_it():
    with pytest.raises(InputError) as error:
        parse(Record, '{"count": "' + "x" * 50 + ' sk-secret"}', "it", secret="sk-secret")
    assert "sk" not in str(error.value) and "***" in str(error.value)


def test_a_file_is_named(tmp_path):
    path = tmp_path / "it.json"
    with pytest.raises(FileNotFoundError):
        read(Record, path)
    with pytest.raises(InputError, match=r"expected a file that can be read, found: Is a directory"):
        read(Record, tmp_path)
    path.write_bytes(b'{"count": "\xff"}')
    with pytest.raises(InputError, match="expected JSON, found: invalid unicode"):
        read(Record, path)


@pytest.mark.parametrize("text", ["{", "[" * 100_000, "9" * 5000, ""])
def test_whatever_is_wrong_with_json_is_one_error(text):
    with pytest.raises(ValueError, match=r"line 1 column \d+") as error:
        parse_json(text)
    assert "\n" not in str(error.value)
