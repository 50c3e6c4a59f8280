"""`measure --server --expect`: a simulated server beside rounds that are known, agreeing and astray."""

import json
import random
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from jsonschema import Draft202012Validator
from simulated_server import Simulated, simulated_server

from draftsmith.scripts import cli
from draftsmith.scripts.measure.server import observe
from draftsmith.scripts.report.rounds import SCHEMA, ExpectedText, RoundsSettings, read_rounds, rounds_text
from draftsmith.scripts.report.schema import report_schema

COUNT, NEW, GAMMA, ALPHA = 12, 40, 4, 0.6
VALIDATOR = Draft202012Validator(report_schema())
FILTERS = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0}


@pytest.fixture(autouse=True)
def here(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(observe, "READ_AGAIN", 0.01)


def rounds_of(prompt: str) -> ExpectedText:
    """What the simulated server writes, and where its rounds start and how far they are accepted."""
    law = random.Random(json.dumps(prompt))
    tokens = [law.randrange(5, 900) for _ in range(NEW)] + [0] * GAMMA
    law, accepted, at = random.Random(json.dumps([prompt, "accepted"])), np.zeros((NEW + GAMMA, GAMMA), int), 1
    while at < NEW:
        step = 0
        while step < GAMMA and law.random() < ALPHA:
            step += 1
        accepted[at, :step] = 1
        at += step + 1
    name = prompt.replace("word ", "p")
    known = {"draft": {"probabilistic": accepted.tolist()}}
    return ExpectedText(name, 0.0, [1, 2, 3], tokens, NEW, [0.2] * NEW, known)


@pytest.fixture
def report(tmp_path):
    """A local report's rounds."""
    settings = RoundsSettings(
        SCHEMA, "target", "float32", NEW, GAMMA, {"draft": {"kind": "draft", "path": "d"}}, FILTERS
    )
    (tmp_path / "report").mkdir()
    texts = [rounds_of(f"word {i}") for i in range(COUNT)]
    (tmp_path / "report/rounds.jsonl").write_text(rounds_text(settings, texts))
    return tmp_path / "report" / "report.json"


@pytest.fixture
def measure(tmp_path, capsys, report):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"id": f"p{i}", "prompt": f"word {i}"}) + "\n" for i in range(COUNT)))

    def run(url: str, *flags: object) -> tuple[int, dict | None, str, str]:
        output = tmp_path / "out"
        argv = ["measure", "--server", url, "--prompts", str(prompts), "--output", str(output), "--warm-up", "0"]
        code = cli.main([*argv, "--expect", str(report), "--max-new-tokens", str(NEW), *map(str, flags)])
        path = output / "report.json"
        found = json.loads(path.read_text()) if path.exists() else None
        if found is not None:
            VALIDATOR.validate(found)
        out, err = capsys.readouterr()
        return code, found, out, err

    return run


@pytest.mark.parametrize("counts_answers", [False, True])
def test_a_server_that_does_as_expected(measure, tmp_path, counts_answers):
    with simulated_server(alpha=ALPHA, draft_length=GAMMA, counts_answers=counts_answers) as server:
        code, found, out, _ = measure(server.url, "--concurrency", "1,3")
    assert code == 0
    for one in found["server"]["reconciliations"]:
        assert one["agrees"] and one["exact"] and one["expected"] == one["counted"]
        assert (one["same_texts"], one["proposer"], one["draft_length"]) == (COUNT, "draft", GAMMA)
        assert one["counted"]["num_accepted_tokens"] == found["runs"][0]["counts"]["num_accepted_tokens"]
    assert found["gate"]["passed"] and "counts what" in found["recommendation"]["reason"]
    assert "as expected" in out
    page = (tmp_path / "out/report.html").read_text()
    assert "Compared with the expected report" in page and "the same integers" in page


def test_of_several_drafters_the_recommended_one_is_expected(measure, report):
    settings, texts = read_rounds(str(report))
    drafters = settings.drafters | {"heads": {"kind": "medusa", "path": "h"}}
    texts = [replace(text, accepted=text.accepted | {"heads": text.accepted["draft"]}) for text in texts]
    report.with_name("rounds.jsonl").write_text(rounds_text(replace(settings, drafters=drafters), texts))
    with simulated_server(alpha=ALPHA, draft_length=GAMMA) as server:
        code, _, _, err = measure(server.url)
        assert code == 2 and "drafter: expected one of the report's, draft, heads, found none" in err
        report.write_text('{"recommendation": {"proposer": "heads"}}')
        code, found, _, _ = measure(server.url)
    assert code == 0 and [one["proposer"] for one in found["server"]["reconciliations"]] == ["heads"]


def test_a_server_with_another_drafter(measure, tmp_path):
    with simulated_server(alpha=0.3, draft_length=GAMMA) as server:
        code, found, out, _ = measure(server.url)
    (one,) = found["server"]["reconciliations"]
    assert code == 3 and not one["agrees"] and one["first_position"] == 1 and one["same_texts"] == COUNT
    assert [cause["name"] for cause in one["causes"]] == ["draft"] and one["departure"]["what"] == "round"
    assert not found["gate"]["passed"] and "departs from" in found["gate"]["failures"][0]
    assert "Try: compare the server's draft with d" in " ".join(out.split())
    page = (tmp_path / "out/report.html").read_text()
    assert "the first difference is in the rounds of <code>p0</code>" in page and "≠" in page


def test_a_draft_of_another_length_is_measured_again(measure):
    with simulated_server(alpha=ALPHA, draft_length=GAMMA + 2) as server:
        code, _, _, err = measure(server.url)
    assert code == 2 and "measure again with --draft_length 6" in err


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--temperature", "1"], "temperature: expected one of the report's, 0, found 1"),
        (["--max-new-tokens", "9"], f"max_new_tokens: expected {NEW}, as in the report that is expected, found 9"),
        (["--top-k", "5"], "top_k: expected 0, as in the report that is expected, found 5"),
        (["--ignore-eos", "true"], "ignore_eos: expected False, as in the report that is expected, found True"),
        (["--drafter", "medusa"], "drafter: expected one of the report's, draft, found medusa"),
        (["--expect-verifier", "drawn"], "expect_verifier: expected one of probabilistic, greedy, found 'drawn'"),
        (["--expect", "nowhere/report.json"], "expect: expected a report with rounds.jsonl next to it, found none at"),
    ],
)
def test_what_cannot_be_compared_is_said_before_anything_is_asked(measure, flags, line):
    with simulated_server() as server:
        code, _, _, err = measure(server.url, *flags)
        assert not server.asked
    assert code == 2 and err.startswith(f"error: {line}") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("prompts", "temperature", "line"),
    [
        (
            ["p0", "q1", "q2"],
            0,
            "expected a report of the same prompts, found none of 2 of 3 prompts at T = 0, first of",
        ),
        (["p0", "p1", "p2", "p3"], 1, "expected counts of at least 5 answers or turns, as an interval needs, found 4"),
    ],
    ids=["others", "too few"],
)
def test_prompts_are_compared_with_the_reports_before_anything_is_asked(
    measure, report, tmp_path, prompts, temperature, line
):
    settings, texts = read_rounds(str(report))
    texts = [replace(text, temperature=temperature) for text in texts]
    report.with_name("rounds.jsonl").write_text(rounds_text(settings, texts))
    path = tmp_path / "others.jsonl"
    path.write_text("".join(json.dumps({"id": name, "prompt": name}) + "\n" for name in prompts))
    with simulated_server() as server:
        code, _, _, err = measure(server.url, "--prompts", path, "--temperature", temperature)
        assert not server.asked
    assert code == 2 and err.startswith(f"error: expect: {line}") and err.count("\n") == 1


def test_broken_rounds_are_one_line_before_anything_is_asked(measure, report):
    path = report.with_name("rounds.jsonl")
    head, first, *rest = path.read_text().splitlines()
    path.write_text("\n".join([head, first, rest[0][:40], *rest[1:]]))
    with simulated_server() as server:
        code, _, _, err = measure(server.url)
        assert not server.asked
    assert code == 2 and err.startswith(f"error: expect: {path}:3: expected JSON")
    assert err.count("\n") == 1


def test_a_broken_server_info_is_one_line(measure, monkeypatch):
    told = Simulated.info
    monkeypatch.setattr(Simulated, "info", lambda self: told(self) | {"speculative_num_draft_tokens": "four"})
    with simulated_server(kind="sglang") as server:
        code, _, _, err = measure(server.url)
    assert code == 2 and err.count("\n") == 1
    assert f"{server.url}/server_info: speculative_num_draft_tokens: expected a whole number, found 'four'" in err


def test_the_rounds_are_read_as_they_were_written(report):
    settings, texts = read_rounds(str(Path(report).parent))
    assert settings.filters == FILTERS and asdict(texts[3]) == asdict(rounds_of("word 3"))
