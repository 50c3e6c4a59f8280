"""Draft lengths by load, from measurements of a server."""

import json

import pytest

from draftsmith.decode.errors import InputError
from draftsmith.scripts.engines.draft_lengths import speculative_fields
from draftsmith.scripts.tune import load
from draftsmith.scripts.tune.config import LoadConfig, tune_config


def report(path, draft_length: int, speedups: dict[int, float], temperatures=(0.0,), server: object = True):
    runs = [
        {"batch_size": requests, "draft_length": draft_length, "temperature": temperature,
         "speedup": {"value": value, "ci95": None, "n": 8}}
        for temperature in temperatures for requests, value in speedups.items()
    ]  # fmt: skip
    path.mkdir()
    (path / "report.json").write_text(json.dumps({"runs": runs, "server": server or None}))
    return str(path)


def config(tmp_path, *reports: str) -> LoadConfig:
    return LoadConfig(list(reports), "target", str(tmp_path / "out"), ["runs/draft"])


def test_what_was_fastest_at_each_load_is_the_table(tmp_path, capsys):
    short = report(tmp_path / "one", 1, {1: 1.2, 2: 1.15, 4: 1.1, 8: 0.9})
    long = report(tmp_path / "three", 3, {1: 1.5, 2: 1.149, 4: 0.95, 8: 0.7})
    flags = ["--reports", json.dumps([short, long]), "--target", "target", "--output", str(tmp_path / "out")]
    assert tune_config(flags) is LoadConfig
    assert load.main([*flags, "--drafter", "draft:runs/draft"]) == 0
    file = str(tmp_path / "out/draft_lengths.json")
    assert speculative_fields(file, "runs/draft") == {
        "num_speculative_tokens": 3,
        # With two at once 3 is as good as 1, and stays.
        # Three are nearer to four by ratio, and six to eight.
        "num_speculative_tokens_per_batch_size": [[1, 2, 3], [3, 5, 1], [6, 8, 0]],
    }
    said = capsys.readouterr().out
    assert "8 at once: γ = 0; speed-up by γ: 0: 1.00×, 1: 0.90×, 3: 0.70×" in said and f"--draft_lengths {file}" in said


def test_temperatures_count_alike_by_the_time_of_a_token(tmp_path):
    one = report(tmp_path / "one", 2, {1: 2.0})
    runs = json.loads((tmp_path / "one/report.json").read_text())
    runs["runs"].append(runs["runs"][0] | {"temperature": 1.0, "speedup": {"value": 1.0}})
    (tmp_path / "one/report.json").write_text(json.dumps(runs))
    assert load.tune_load(config(tmp_path, one)) == {1: {0: 1.0, 2: pytest.approx(4 / 3)}}


def test_a_server_that_drafts_nothing_is_not_plain_decoding_once_it_was_measured(tmp_path, capsys):
    """vLLM 0.32 with a draft length of 0 is slower than with 1: then 1 is taken, and it is said what is faster."""
    none = report(tmp_path / "none", 0, {1: 0.9, 4: 0.8, 8: 0.7})
    short = report(tmp_path / "one", 1, {1: 1.2, 4: 1.1, 8: 0.85})
    flags = ["--reports", json.dumps([none, short]), "--target", "target", "--output", str(tmp_path / "out")]
    assert load.main([*flags, "--drafter", "draft:runs/draft"]) == 0
    file = json.loads((tmp_path / "out/draft_lengths.json").read_text())
    assert file["drafters"]["draft"]["num_speculative_tokens_per_batch_size"] == [[1, 8, 1]]
    said = capsys.readouterr().out
    assert "0.70×" in said and "8 at once: a server without a drafter is faster" in said


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: "nowhere", "expected a report of `measure --server` at nowhere, found none"),
        (lambda path: report(path / "local", 1, {1: 1.2}, server=None), "expected a report of `measure --server` in"),
        (lambda path: report(path / "none", 1, {}), "expected a report of `measure --server` in"),
        (lambda path: report(path / "alone", 1, {1: None}), "expected speed-ups over a baseline server in"),
        (lambda path: report(path / "few", 3, {1: 1.2, 2: 1.1}), "none of 2 at once with γ = 1 at every temperature"),
        (lambda path: report(path / "hot", 1, {1: 1.2}, (1.0,)), None),
    ],
)
def test_reports_that_make_no_table_are_refused_in_one_line(tmp_path, make, message):
    other = report(tmp_path / "other", 1, {1: 1.1})
    reports = [other, make(tmp_path)]
    if message is None:  # the same draft length at another temperature makes one
        assert load.tune_load(config(tmp_path, *reports))[1][1] > 1
        return
    with pytest.raises(InputError, match=message) as error:
        load.tune_load(config(tmp_path, *reports))
    assert "\n" not in str(error.value)
