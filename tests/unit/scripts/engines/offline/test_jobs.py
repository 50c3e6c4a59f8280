"""Jobs for an engine in another Python: which one, and what becomes of a process that answers, fails, dies or hangs."""

import json
import sys
from pathlib import Path

import pytest

from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement.server_counts import ServerCounts
from draftsmith.scripts.engines.offline import driver, jobs
from draftsmith.scripts.engines.offline.jobs import (
    VARIABLE,
    Answer,
    EngineFailure,
    Job,
    engine_python,
    run_jobs,
    run_of,
)

JOBS = [Job("target", [[1, 2]]), Job("target", [[3]], {"method": "medusa"}, max_tokens=2)]
ANSWERED = {
    "token_ids": [[7, 8]],
    "num_drafts": [2],
    "num_draft_tokens": [6],
    "num_accepted_tokens": [3],
    "num_accepted_tokens_per_pos": [2, 1, 0],
}


def script(path: Path, lines: str) -> Path:
    """A Python that runs these lines, whatever it is given."""
    body = path.with_suffix(".py")
    body.write_text(f"import json, sys, time\nfrom pathlib import Path\n{lines}\n")
    path.write_text(f'#!/bin/sh\nexec {sys.executable} -S {body} "$@"\n')
    path.chmod(0o755)
    return path


def has_vllm(path: Path, code: int = 0) -> Path:
    return script(path, f"sys.exit({code})")


@pytest.fixture(autouse=True)
def _alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(jobs.importlib.util, "find_spec", lambda name: None)


def test_an_engine_is_named_or_lies_beside_or_is_this_python(tmp_path, monkeypatch):
    with pytest.raises(
        InputError, match=r"^verify: expected a Python that has vllm, found none: name one by DRAFTSMITH_ENGINE"
    ):
        engine_python()
    monkeypatch.setattr(jobs.importlib.util, "find_spec", lambda name: object())
    assert engine_python() == Path(sys.executable)
    beside = tmp_path / ".venv-engine" / "bin" / "python"
    beside.parent.mkdir(parents=True)
    beside.symlink_to(has_vllm(tmp_path / "real"))
    assert engine_python() == beside  # the link itself
    monkeypatch.setenv(VARIABLE, str(has_vllm(tmp_path / "named")))
    assert engine_python() == tmp_path / "named"


def test_what_has_no_vllm_is_said_in_a_line(tmp_path, monkeypatch):
    for named in ("nowhere/python", str(has_vllm(tmp_path / "without", code=1))):
        monkeypatch.setenv(VARIABLE, named)
        with pytest.raises(InputError, match=rf"^{VARIABLE}: expected a Python that has vllm, found none at {named}$"):
            engine_python()


def engine(path: Path, results: list[dict], then: str = "") -> Path:
    answers = {"vllm": "1.2", "device": "cpu", "results": results}
    written = f"Path(sys.argv[-1]).write_text({json.dumps(json.dumps(answers))})"
    return script(path, f"jobs = json.loads(Path(sys.argv[-2]).read_text())\n{written if results else ''}\n{then}")


def test_jobs_go_out_and_answers_come_back(tmp_path):
    sent = tmp_path / "sent"
    then = f"Path({str(sent)!r}).write_text(json.dumps([sys.argv[1:3], jobs]))"
    run = run_jobs(engine(tmp_path / "python", [ANSWERED, {"error": "ValueError: no"}], then), JOBS)
    assert (run.version, run.device) == ("1.2", "cpu")
    assert run.answers[0] == Answer([[7, 8]], ServerCounts(2, 6, 3, (2, 1, 0)))
    assert isinstance(run.answers[1], EngineFailure) and str(run.answers[1]) == "ValueError: no"
    (isolated, driver), jobs = json.loads(sent.read_text())
    assert isolated == "-P" and Path(driver).is_absolute() and Path(driver).name == "driver.py"
    assert jobs[0]["prompts"] == [[1, 2]] and jobs[0]["speculative"] is None and jobs[0]["trust_remote_code"] is False
    assert jobs[0]["overrides"] == {} and jobs[0]["dtype"] == "float32"
    assert jobs[1]["speculative"] == {"method": "medusa"} and jobs[1]["max_tokens"] == 2


def test_the_death_of_an_engine_keeps_the_answers_before_it(tmp_path):
    dies = engine(tmp_path / "python", [ANSWERED], r"print('out of\n\x1b[1;31m  memory\x1b[0m\x1b[K'); sys.exit(9)")
    first, second = run_jobs(dies, JOBS).answers
    assert isinstance(first, Answer) and isinstance(second, EngineFailure)
    assert str(second) == "exit code 9: memory"
    with pytest.raises(EngineFailure, match=r"^engine: expected answers from .*, found exit code 3$"):
        run_jobs(engine(tmp_path / "mute", [], "sys.exit(3)"), JOBS)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"token_ids": [[7, 8.5]]}, r"^engine: results\[0\]\.token_ids\[0\]\[1\]: expected a whole number, found 8\.5"),
        ({"token_ids": [[-7]]}, r"^engine: results\[0\]\.token_ids\[0\]\[0\]: expected at least 0, found -7"),
        ({"token_ids": [[7], [8]]}, "^engine: token_ids: expected 1 texts of at most 64 tokens, found"),
        ({"token_ids": [[7] * 65]}, "^engine: token_ids: expected 1 texts of at most 64 tokens, found"),
        ({"num_drafts": 2}, r"^engine: results\[0\]\.num_drafts: expected a list, found 2"),
        ({"num_accepted_tokens": [13]}, "^engine: expected at most as many accepted as drafted tokens, found 13 of 6"),
    ],
    ids=str,
)
def test_an_answer_that_cannot_be_is_one_line(wrong, named):
    said = json.dumps({"vllm": "1.2", "device": "cpu", "results": [ANSWERED | wrong]}).encode()
    with pytest.raises(EngineFailure, match=named):
        raise run_of(said, JOBS, "exit code 0").answers[0]


def test_an_engine_that_hangs_is_ended_in_time(tmp_path):
    with pytest.raises(EngineFailure, match=r"found no end within 0\.3 s: started$"):
        run_jobs(engine(tmp_path / "python", [], "print('started', flush=True); time.sleep(60)"), JOBS, timeout=0.3)


def test_the_driver_imports_the_standard_library_and_vllm_alone():
    source = Path(driver.__file__).read_text()
    modules = {
        line.split()[1].split(".")[0] for line in source.splitlines() if line.strip().startswith(("import ", "from "))
    }
    assert modules <= {*sys.stdlib_module_names, "vllm"}
