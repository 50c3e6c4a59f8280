"""`rounds.jsonl` as it is read: what somebody else wrote into it is one line that names the place."""

import json
from dataclasses import asdict

import pytest

from draftsmith.decode.errors import InputError
from draftsmith.scripts.report.rounds import SCHEMA, ExpectedText, RoundsSettings, read_rounds

DRAFTERS = {name: {"kind": name, "path": "d"} for name in ("draft", "heads")}
SETTINGS = RoundsSettings(SCHEMA, "target", "float32", 3, 2, DRAFTERS, {"top_k": 0})
KNOWN = {"draft": {"probabilistic": [1, 0, 1, 1, 0]}, "heads": {"probabilistic": [[1, 0], [0, 0], [1, 1], [0, 1]]}}
TEXT = ExpectedText("p0", 0.0, [1, 2], [3, 4, 5, 6, 7], 3, [0.1, 0.2, 0.3], KNOWN)


def written(path, settings, text):
    path.write_text("\n".join([json.dumps(settings), json.dumps(asdict(TEXT)), json.dumps(text)]))


def test_what_is_whole_is_read(tmp_path):
    with pytest.raises(InputError, match=r"^expect: expected a report with rounds\.jsonl next to it, found none at"):
        read_rounds(str(tmp_path / "report.json"))
    written(tmp_path / "rounds.jsonl", asdict(SETTINGS), asdict(TEXT) | {"margins": None, "temperature": 1})
    settings, texts = read_rounds(str(tmp_path))
    assert settings == SETTINGS and texts[0] == TEXT and texts[1].temperature == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"schema": "other/1"},
        {"drafters": {"draft": {"kind": "draft"}}},
        {"max_new_tokens": None},
        {"filters": {"top_x": 1}},
    ],
    ids=str,
)
def test_broken_settings_are_named(tmp_path, wrong):
    written(tmp_path / "rounds.jsonl", asdict(SETTINGS) | wrong, asdict(TEXT))
    with pytest.raises(InputError, match=r"^expect: .*rounds\.jsonl:1: .*expected .*, found"):
        read_rounds(str(tmp_path))


@pytest.mark.parametrize(
    "wrong",
    [
        {"prompt": 7},
        {"tokens": [3, 4, 5, 6, 7.5]},
        {"length": 6},
        {"margins": 0.1},
        {"accepted": {"draft": [1, 0, 1, 1, 0]}},
        {"accepted": {"draft": {"probabilistic": [1, 0, 1]}}},
        {"accepted": {"draft": {"probabilistic": [1, 0, 1, 2, 0]}}},
        {"accepted": {"draft": {"probabilistic": [[1], [0, 1], [1], [1], [1]]}}},
    ],
    ids=str,
)
def test_a_broken_text_is_named(tmp_path, wrong):
    written(tmp_path / "rounds.jsonl", asdict(SETTINGS), asdict(TEXT) | wrong)
    with pytest.raises(InputError, match=r"^expect: .*rounds\.jsonl:3: .*expected .*, found"):
        read_rounds(str(tmp_path))
